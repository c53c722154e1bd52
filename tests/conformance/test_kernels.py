"""Every rule of ``sim.kernels`` against what PyTorch's host code asked for on a stub driver."""

from __future__ import annotations

import collections
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

sys.path.insert(0, str(Path(__file__).parent))
from kernel_probe import decode

from pytest_vram.sim.kernels import Card, Give, Out, Take, Workspace, program
from pytest_vram.sim.profiles import find_profile

FIXTURES = Path(__file__).parents[2] / "fixtures" / "kernels"


def overload(name: str) -> OpOverload:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def predicted(call: dict[str, Any], card: Card) -> list[str]:
    """The events that the rules predict, in the notation of the recording."""
    func = overload(call["op"])
    args = tuple(decode(call["a"]))
    kwargs = {name: decode(value) for name, value in call.get("k", {}).items()}
    outputs = [decode(r) if r is not None else None for r in call["r"]]
    steps = program(func, args, kwargs, outputs, card)
    if steps is None:
        steps = tuple(Out(i) for i, o in enumerate(outputs) if o is not None)
    given = allocated(call)
    names: dict[str, str] = {}
    events = []
    workspaces = set()
    for step in steps:
        if isinstance(step, Out):
            if step.index in given:
                size = step.size if step.size is not None else extent(outputs[step.index])
                events.append(f"o{step.index}:{size}")
        elif isinstance(step, Take):
            assert step.size > 0, step
            names[step.key] = str(sum(e[0] == "+" for e in events))
            events.append(f"+{names[step.key]}:{step.size}")
        elif isinstance(step, Give):
            events.append(f"-{names.pop(step.key)}")
        elif isinstance(step, Workspace) and step.kind not in workspaces:
            workspaces.add(step.kind)
            events.append(f"w:{step.size}")
    assert not names, f"never given back: {names}"
    return events


def extent(tensor: torch.Tensor) -> int:
    """Bytes of the smallest storage that holds the tensor."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size() if tensor.numel() else 0


def allocated(call: dict[str, Any]) -> set[int]:
    """Outputs that were allocated in the call: not those that alias an argument."""
    return {int(e[1:].partition(":")[0]) for e in call["e"] if e[0] == "o"}


def differences(path: Path) -> tuple[int, list[str]]:
    with gzip.open(path) as file:
        recording = json.load(file)
    version = tuple(int(n) for n in recording["torch"].split(".")[:2])
    card = Card(find_profile(recording["profile"]), version, cublas_workspace=-1)
    wrong = []
    for call in recording["calls"]:
        try:
            expected = predicted(call, card)
        except Exception as error:
            expected = [f"{type(error).__name__}: {error}"]
        if expected != call["e"]:
            spec = {k: v for k, v in call.items() if k not in "er"}
            wrong.append(f"{json.dumps(spec)}\n  real {call['e']}\n  rule {expected}")
    return len(recording["calls"]), wrong


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.json.gz")), ids=lambda p: p.name[:-8])
def test_rules_predict_every_recorded_event(path: Path) -> None:
    count, wrong = differences(path)
    assert count > 1000
    assert not wrong, f"{len(wrong)} of {count} calls differ:\n" + "\n".join(wrong[:20])


if __name__ == "__main__":
    total, found = differences(Path(sys.argv[1]))
    by_op = collections.Counter(json.loads(w.split("\n")[0])["op"] for w in found)
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    shown = [w for w in found if only in w.split("\n")[0]]
    print("\n".join(w[:900] for w in shown[: int(sys.argv[3]) if len(sys.argv) > 3 else 12]))
    print(total, "calls,", len(found), "differ", by_op.most_common(60))

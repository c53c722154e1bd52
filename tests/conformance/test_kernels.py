"""Every rule of ``sim.kernels`` against what PyTorch's host code asked for on a stub driver."""

from __future__ import annotations

import collections
import functools
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._ops import OpOverload

sys.path.insert(0, str(Path(__file__).parent))
from kernel_probe import decode

from pytest_vram.sim.kernels import Card, Give, Out, Program, Take, Workspace, program
from pytest_vram.sim.profiles import find_profile

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "fixtures" / "kernels" / "torch-2.14.json.gz"
CACHE = Path(os.environ.get("VRAM_STUB_CACHE") or Path.home() / ".cache/pytest-vram-stub")


class Call:
    """One recorded operator call with its arguments as meta tensors."""

    def __init__(self, record: dict[str, Any], cards: int) -> None:
        self.name = record["op"]
        found: Any = torch.ops
        try:
            for part in self.name.split("."):
                found = getattr(found, part)
        except AttributeError:
            found = None  # an operator that this version of PyTorch does not have
        self.func: OpOverload | None = found
        self.args = tuple(decode(record["a"]))
        self.kwargs = {name: decode(value) for name, value in record.get("k", {}).items()}
        self.outputs = [None if r is None else decode(r) for r in record["r"]]
        self.deterministic = "det" in record
        which = record.get("d", [0] * cards)
        self.events = [None if i < 0 else record["e"][i] for i in which]
        self.varies = len(record["e"]) > 1
        self.text = json.dumps({k: v for k, v in record.items() if k not in "erd"})

    def predicted(self, card: Card, real: Sequence[str]) -> list[str]:
        assert self.func is not None
        torch.use_deterministic_algorithms(self.deterministic)
        try:
            steps = program(self.func, self.args, self.kwargs, self.outputs, card)
        finally:
            torch.use_deterministic_algorithms(False)
        if steps is None:
            steps = tuple(Out(i) for i, o in enumerate(self.outputs) if o is not None)
        # Results that alias an argument are not allocated; the device knows, a rule does not.
        fresh = {int(e[1:].partition(":")[0]) for e in real if e[0] == "o"}
        return notation(steps, self.outputs, fresh)


def notation(steps: Program, outputs: Sequence[torch.Tensor | None], fresh: set[int]) -> list[str]:
    """A program in the notation of the recording."""
    names: dict[str, int] = {}
    taken, events, workspaces, unknown = 0, [], set(), set()
    for step in steps:
        if isinstance(step, Out):
            output = outputs[step.index]
            if step.index in fresh and output is not None:
                size = extent(output) if step.size is None else step.size
                events.append(f"o{step.index}:{size}")
        elif isinstance(step, Take) and step.span is not None and not step.size:
            unknown.add(step.key)  # named, not simulated
        elif isinstance(step, Take):
            assert step.size > 0, step
            assert step.key not in names, f"taken twice: {step.key}"
            names[step.key] = taken
            events.append(f"+{taken}:{step.size}")
            taken += 1
        elif isinstance(step, Give) and step.key in unknown:
            unknown.remove(step.key)
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


@functools.cache
def recorded(path: Path = RECORDING) -> tuple[tuple[int, int], list[str], list[Call]]:
    recording = json.loads(gzip.decompress(path.read_bytes()))
    major, minor = (int(n) for n in recording["torch"].split(".")[:2])
    profiles = recording["profiles"]
    return (major, minor), profiles, [Call(c, len(profiles)) for c in recording["calls"]]


#: Run as the operators that they are made of (tests/sim/test_comparisons.py).
COMPOSED = {torch.ops.aten.allclose.default}


def differences(at: int, path: Path = RECORDING, every: int = 1) -> tuple[int, list[str]]:
    """How many calls were compared and what differs. ``every``: of the calls whose events are the
    same on all cards, only each so-many-th."""
    version, profiles, calls = recorded(path)
    card = Card(find_profile(profiles[at]), version)
    count, wrong = 0, []
    for number, call in enumerate(calls):
        real = call.events[at]
        if call.func in COMPOSED:
            continue
        if real is None or call.func is None or (number % every and not call.varies):
            continue
        count += 1
        try:
            expected = call.predicted(card, real)
        except Exception as error:
            expected = [f"{type(error).__name__}: {error}"]
        if expected != real:
            wrong.append(f"{call.text}\n  real {real}\n  rule {expected}")
    return count, wrong


@pytest.mark.parametrize(
    ("at", "every", "least"),
    [
        pytest.param(0, 1, 35_000, id="a100"),
        *(pytest.param(i, 29, 2_000, id=f"card{i}") for i in range(1, 5)),
        *(
            pytest.param(i, 1, 35_000, id=f"card{i}-all", marks=pytest.mark.slow)
            for i in (1, 2, 3, 4)
        ),
    ],
)
def test_rules_predict_every_recorded_event(at: int, every: int, least: int) -> None:
    """The first card in full; on the others what differs between cards, and a sample."""
    count, wrong = differences(at, every=every)
    assert count > least
    assert not wrong, f"{len(wrong)} of {count} calls differ:\n" + "\n".join(wrong[:20])


def test_five_cards_are_recorded() -> None:
    assert [find_profile(name).name for name in recorded()[1]] == [
        "a100-80gb",
        "h100-80gb",
        "t4",
        "l4",
        "rtx4090",
    ]


def total(op: str, shape: Sequence[int], **options: Any) -> int:
    """Scratch of one operator call: what ``fixtures/kernels`` says on the card."""
    card = Card(find_profile(options.pop("card", "a100-80gb")), (2, 14))
    dtype = options.pop("dtype", torch.float32)
    source = torch.empty(shape, dtype=dtype, device="meta")
    func: Any = getattr(getattr(torch.ops.aten, op), options.pop("overload", "default"))
    args = (source, *options.pop("args", ()))
    outputs = func(*args)
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    steps = program(func, args, {}, outputs, card) or ()
    return sum(-(-step.size // 512) * 512 for step in steps if isinstance(step, Take))


@pytest.mark.parametrize(
    ("shape", "card", "size"),
    [
        ((2048, 768), "a100-80gb", 12_583_424),
        ((2048, 2304), "a100-80gb", 37_749_248),
        ((2048, 3072), "a100-80gb", 50_332_160),
        ((16384, 4096), "a100-80gb", 113_246_720),
        ((16384, 4096), "h100-80gb", 138_412_544),
        ((16384, 4096), "t4", 33_554_944),
        ((16384, 4096), "l4", 46_137_856),
        ((16384, 4096), "rtx4090", 100_663_808),
    ],
)
def test_bias_gradient_scratch_depends_on_the_card(
    shape: tuple[int, int], card: str, size: int
) -> None:
    """Figures measured with torch 2.14.1; half and single precision alike."""
    for dtype in (torch.float32, torch.float16):
        found = total("sum", shape, args=([0],), overload="dim_IntList", card=card, dtype=dtype)
        assert found == size


def steps_of(func: Any, args: tuple[Any, ...], card: Card) -> Program:
    outputs = func(*args)
    return program(func, args, {}, [outputs], card) or ()


def test_biased_products_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """cublasLt's workspace: of the call until 2.8, of the handle until 2.10, then cuBLAS's own."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    meta = torch.empty(64, 64, device="meta")
    args = (torch.empty(64, device="meta"), meta, meta)
    profile = find_profile("a100-80gb")
    mib, cublas = 1 << 20, Workspace("cublas", 8_519_680)
    call = (Out(0), Take("cublaslt", mib, "cuBLASLt workspace"), cublas, Give("cublaslt"))
    own = (Out(0), Workspace("cublaslt", mib), cublas)
    for version, expected in {
        (2, 6): call,
        (2, 8): call,
        (2, 9): own,
        (2, 10): own,
        (2, 11): (Out(0), cublas),
        (2, 14): (Out(0), cublas),
    }.items():
        assert steps_of(torch.ops.aten.addmm.default, args, Card(profile, version)) == expected


@pytest.mark.parametrize(
    ("card", "version", "size"),
    [
        ("a100-80gb", (2, 14), 8_519_680),
        ("h100-80gb", (2, 6), 33_554_432),
        ("b200", (2, 11), 8_519_680),
        ("b200", (2, 12), 33_554_432),
    ],
)
def test_cublas_workspace_by_architecture(
    card: str, version: tuple[int, int], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert Card(find_profile(card), version).cublas_workspace == size


def test_cublas_workspace_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":128:8:64:16:32:32")
    assert Card(find_profile("a100-80gb"), (2, 14)).cublas_workspace == 3072 * 1024


def test_half_sums_load_wider_vectors_since_2_10() -> None:
    source = torch.empty(4, 1 << 20, dtype=torch.float16, device="meta")
    func = torch.ops.aten.sum.dim_IntList
    sizes = {}
    for version in ((2, 6), (2, 9), (2, 10), (2, 14)):
        steps = steps_of(func, (source, [1]), Card(find_profile("a100-80gb"), version))
        sizes[version] = [step.size for step in steps if isinstance(step, Take)]
    assert sizes[2, 6] == sizes[2, 9]
    assert sizes[2, 10] == sizes[2, 14]


@pytest.mark.slow
@pytest.mark.skipif(
    not (CACHE / "lib" / "libcudastub.so").exists(),
    reason="the stub driver is not built: run tests/stub_driver/build.sh",
)
def test_the_recording_can_be_made_again(tmp_path: Path) -> None:
    run = ROOT / "tests" / "stub_driver" / "run.sh"
    again = tmp_path / "again.json.gz"
    script = Path(__file__).with_name("kernel_probe.py")
    subprocess.run(
        [str(run), str(script), str(again)],
        check=True,
        env={**os.environ, "STUB_DEVICE": "a100"},
        capture_output=True,
    )
    fresh = {call.text: call.events[0] for call in recorded(again)[2]}
    kept = {call.text: call.events[0] for call in recorded()[2] if call.events[0] is not None}
    assert fresh == kept


if __name__ == "__main__":
    file, only, shown = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    for number, name in enumerate(recorded(file)[1]):
        total_calls, found = differences(number, file)
        by_op = collections.Counter(json.loads(w.split("\n")[0])["op"] for w in found)
        print("\n".join(w[:900] for w in found if only in w.split("\n")[0])[: shown * 900])
        print(name, total_calls, "calls,", len(found), "differ", by_op.most_common(60))

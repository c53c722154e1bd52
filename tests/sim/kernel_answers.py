"""Recorded allocator calls of the real CUDA builds, and their comparison with the rules.

A fixture holds runs ``{device, torch, calls}``; a call is ``[operator, arguments, state, outputs,
events]``. A tensor is ``{"t": [dtype, shape, stride], "d": device}``; an output ``[dtype, shape,
stride, device, bytes of storage, offset]``. Events: ``["o", output, bytes]`` the output's storage
is allocated, ``["+", number, bytes]`` scratch, ``["-", number]`` and its end.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pytest_vram.sim import find_profile
from pytest_vram.sim.kernels import Card, Give, Out, Take, program
from pytest_vram.sim.kernels.versions import overload

FOLDER = Path(__file__).parents[2] / "fixtures" / "kernels"
PROFILES = {
    "a100": "a100-80gb", "h100": "h100-80gb", "t4": "t4", "l4": "l4", "rtx4090": "rtx4090",
    "v100": "v100-32gb",
}  # fmt: skip


def runs(name: str) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))  # type: ignore[no-any-return]


def card(run: dict[str, Any]) -> Card:
    version = tuple(int(part) for part in run["torch"].split(".")[:2])
    assert len(version) == 2
    cudnn = 90100 if version == (2, 6) else 92400  # what the recorded builds loaded
    return Card(find_profile(PROFILES[run["device"]]), version, cudnn_version=cudnn)


def argument(spec: Any, known: dict[str, torch.Tensor]) -> Any:
    if isinstance(spec, list):
        return [argument(item, known) for item in spec]
    if not isinstance(spec, dict):
        return spec
    if "dt" in spec:
        return getattr(torch, spec["dt"])
    if spec.get("alias") in known:
        return known[spec["alias"]]
    dtype, shape, stride = spec["t"]
    tensor = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta")
    if "alias" in spec:
        known[spec["alias"]] = tensor
    return tensor


def output(spec: Any) -> torch.Tensor | None:
    if spec is None:
        return None
    dtype = getattr(torch, spec[0])
    storage = torch.empty(spec[4] // dtype.itemsize, dtype=dtype, device="meta")
    return storage.as_strided(spec[1], spec[2], spec[5])


@contextlib.contextmanager
def state(settings: dict[str, Any]) -> Iterator[None]:
    with torch.backends.cudnn.flags(
        enabled=settings.get("cudnn", True), benchmark=settings.get("bench", False)
    ):
        torch.use_deterministic_algorithms(settings.get("det", False))
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def events(call: list[Any], device: Card) -> list[list[Any]] | None:
    """What the rule says, in the words of the recording; ``None`` if torch has no such operator."""
    operator, arguments, settings, results, _ = call
    func = overload(operator)
    if func is None:
        return None
    known: dict[str, torch.Tensor] = {}
    args = tuple(argument(item, known) for item in arguments)
    kwargs = {key: argument(item, known) for key, item in settings.get("kwargs", {}).items()}
    with state(settings):
        steps = program(func, args, kwargs, [output(item) for item in results], device)
    if steps is None:
        steps = tuple(Out(index) for index, item in enumerate(results) if item is not None)
    return ordered(spoken(steps, results))


def spoken(steps: tuple[Any, ...], results: list[Any]) -> list[list[Any]]:
    told: list[list[Any]] = []
    numbers: dict[str, int] = {}
    allocated: set[int] = set()
    taken = 0
    for step in steps:
        if isinstance(step, Take) and step.size > 0:
            numbers[step.key] = taken
            told.append(["+", taken, step.size])
            taken += 1
        elif isinstance(step, Give) and step.key in numbers:
            told.append(["-", numbers.pop(step.key)])
        elif isinstance(step, Out):
            spec = results[step.index]
            if spec and spec[3] == "cuda" and spec[4] and step.index not in allocated:
                allocated.add(step.index)
                told.append(["o", step.index, spec[4]])
    assert not numbers, f"scratch that never dies: {sorted(numbers)}"
    return told


def ordered(told: list[list[Any]]) -> list[list[Any]]:
    """Frees that follow each other directly, in one order: the allocator merges them alike."""
    result: list[list[Any]] = []
    frees: list[list[Any]] = []
    for event in told:
        if event[0] == "-":
            frees.append(event)
        else:
            result += [*sorted(frees), event]
            frees = []
    return result + sorted(frees)


def differences(name: str) -> list[str]:
    """One line for every recorded call that a rule does not reproduce, event by event."""
    wrong = []
    for run in runs(name):
        device = card(run)
        for call in run["calls"]:
            got = events(call, device)
            if got is not None and got != ordered(call[4]):
                place = f"{run['device']} {run['torch']} {call[0]} {json.dumps(call[1])}"
                wrong.append(f"{place}\n  real {call[4]}\n  rule {got}")
    return wrong

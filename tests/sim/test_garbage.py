"""Garbage that Python collects while the simulated allocator is at work."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pytest_vram.sim import Simulation, find_profile

MIB = 1 << 20


def _cycle(size: int) -> None:
    """A tensor that only a reference cycle holds."""
    held: list[Any] = [torch.empty(size, dtype=torch.uint8, device="cuda")]
    held.append(held)


@pytest.fixture
def gpu() -> Iterator[Simulation]:
    """A simulation in which only the test collects garbage."""
    gc.collect()
    gc.disable()
    try:
        with Simulation(find_profile("a100-80gb")) as simulation:
            yield simulation
    finally:
        gc.enable()


def _collect_within(gpu: Simulation, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is collected in the middle of ``step``, which must not be entered again then."""
    inner, depth = getattr(gpu.allocator, step), 0

    def collecting(*arguments: Any) -> Any:
        nonlocal depth
        depth += 1
        assert depth == 1, "the allocator was entered while it was at work"
        gc.collect()
        found = inner(*arguments)
        depth -= 1
        return found

    monkeypatch.setattr(gpu.allocator, step, collecting)


def test_what_dies_while_a_block_is_made(gpu: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    _cycle(3 * MIB)
    _collect_within(gpu, "malloc", monkeypatch)
    made = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    assert made.is_cuda
    assert gpu.allocator.allocated == 2 * MIB
    events = [e.kind for e in gpu.trace().events if e.kind in ("alloc", "free")]
    assert events == ["alloc", "alloc", "free"]


def test_what_dies_while_a_block_is_given_back(
    gpu: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    assert kept.is_cuda
    _cycle(3 * MIB)
    _collect_within(gpu, "free", monkeypatch)
    del kept
    assert gpu.allocator.allocated == 0

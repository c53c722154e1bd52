"""``torch.unique``, where a share says how many values are distinct."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_vram.sim import Simulation, find_profile
from pytest_vram.sim.selection import assume_selected
from pytest_vram.sim.values import DataDependent


def _numbers() -> torch.Tensor:
    return torch.randint(0, 9, (1000,), device="cuda")


@pytest.mark.parametrize(
    ("run", "taken"),
    [
        (lambda x: torch.unique(x), [8000, 1, 8000, 8]),
        (
            lambda x: torch.unique(x, return_inverse=True),
            [8000, 8000, 8000, 1, 8000, 8000, 8000, 8],
        ),
        (lambda x: torch.unique(x, return_counts=True), [8000, 1, 8000, 8, 8000]),
        (
            lambda x: torch.unique(x, return_inverse=True, return_counts=True),
            [8000, 8000, 8000, 1, 8000, 8000, 8000, 8, 8000],
        ),
        (lambda x: x.float().unique(), [4000, 4000, 1, 4000, 8]),
        (lambda x: (x > 3).unique(), [1000, 4, 1, 2, 16]),
        (lambda x: torch.unique_consecutive(x), [8000, 8]),
    ],
)
def test_what_it_takes_beside_tiles(run: Callable[[Any], Any], taken: list[int]) -> None:
    """The stub driver's events with PyTorch 2.14.1, without CUB's states of tiles (1,023 bytes
    each): those are a named interval."""
    with Simulation(find_profile("a100-80gb")) as gpu, assume_selected(0.01):
        numbers = _numbers()
        before = len(gpu.trace().allocations)
        run(numbers)
        trace = gpu.trace()
        assert [one.requested for one in trace.allocations[before:]] == taken
        if trace.bounds is not None:
            low, high = trace.bounds.allocated
            assert low <= gpu.allocator.peak_allocated < high < low + 4096


def test_the_share_says_how_many_there_are() -> None:
    with Simulation(find_profile("t4")), assume_selected(0.01):
        found, inverse, counts = torch.unique(
            _numbers(), return_inverse=True, return_counts=True
        )  # fmt: skip
        assert (found.shape, inverse.shape, counts.shape) == ((10,), (1000,), (10,))
        assert torch.unique_consecutive(_numbers()).shape == (10,)
        with assume_selected(0):
            assert torch.unique(_numbers()).shape == (1,)
        assert torch.unique(torch.tensor([1, 1, 2]).cuda()).tolist() == [1, 2]


def test_without_a_share_it_stops() -> None:
    with (
        Simulation(find_profile("t4")),
        pytest.raises(DataDependent, match=r"torch\._unique2 at .*assume_selected\(0\.5\)"),
    ):
        torch.unique(_numbers())

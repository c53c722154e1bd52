"""Scratch of single operators: what PyTorch's host code asks for and gives back.

Every list is also what PyTorch 2.14.1's CUDA build requests on the stub driver.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_vram.sim import Simulation, find_profile

KIB = 1 << 10


def _events(make: Callable[[], Tensor], run: Callable[[Tensor], object]) -> list[int]:
    """KiB that ``run`` allocates (+) and frees (-); its result's end is not counted."""
    with Simulation(find_profile("a100-80gb")) as gpu:
        given = make()
        before = len(gpu.trace().events)
        result = run(given)
        trace = gpu.trace()
        del result
    return [
        trace.allocations[event.index].requested // KIB * (1 if event.kind == "alloc" else -1)
        for event in trace.events[before:]
        if event.kind in ("alloc", "free")
    ]


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [("amax", [64]), ("mean", [64, 64, 1024, -1024, 16, -16, -64])],
)
def test_a_mean_by_index_counts_with_ones(reduce: str, expected: list[int]) -> None:
    def run(source: Tensor) -> Tensor:
        rows = torch.zeros(1024, dtype=torch.long, device="cuda")  # 8 KiB
        target = torch.zeros(64, 256, device="cuda")
        return target.index_reduce(0, rows, source, reduce, include_self=False)

    found = _events(lambda: torch.ones(1024, 256, device="cuda"), run)
    assert found[:2] == [8, 64]
    assert found[2:-2] == expected


def _slice_seen_as_image(channels: int) -> Tensor:
    """Rows of a longer sequence: strides of channels last, with a gap between images."""
    return torch.ones(2, 100, 64, device="cuda")[:, :64, :channels].transpose(1, 2)


@pytest.mark.parametrize(
    ("channels", "expected"), [(32, [64, 16, -16]), (16, [32, 8, -8]), (15, [30])]
)
def test_enlarging_an_image_by_lines_copies_it_if_it_is_wide(
    channels: int, expected: list[int]
) -> None:
    def run(rows: Tensor) -> Tensor:
        return F.interpolate(rows.view(2, channels, 8, 8), size=(16, 16), mode="bilinear")

    assert _events(lambda: _slice_seen_as_image(channels), run) == expected


def test_both_products_of_a_simple_recurrent_step_outlive_its_activation() -> None:
    with Simulation(find_profile("a100-80gb")) as gpu, torch.no_grad():
        cell = nn.RNNCell(256, 256, nonlinearity="relu", device="cuda")
        source, hidden = torch.ones(2, 64, 256, device="cuda")
        cell(source, hidden)  # the workspace
        before = len(gpu.trace().events)
        result = cell(source, hidden)
        trace = gpu.trace()
    # older versions take a workspace in each product (cublasLt): not looked at here
    kinds = [
        event.kind
        for event in trace.events[before:]
        if trace.allocations[event.index].requested == 4 * 64 * 256
    ]
    assert kinds == ["alloc", "alloc", "alloc", "free", "free"]
    assert result.shape == (64, 256)

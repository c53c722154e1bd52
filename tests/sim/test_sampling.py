"""Random draws, selections and pooling whose host code allocates more than its results. Bytes are
those of PyTorch 2.14.1's CUDA build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_vram.sim import Simulation, find_profile
from pytest_vram.sim.kernels import versions

SIZE = 64 * 32 * 4
VOLUME = 2 * 4 * 8**3 * 4


def _events(run: Callable[[Tensor], Any], *shape: int) -> list[int]:
    with Simulation(find_profile("a100-80gb")) as gpu:
        given = torch.rand(*shape, device="cuda")
        if given.dim() == 5:
            given = given.to(memory_format=torch.channels_last_3d)
        before = len(gpu.trace().events)
        result = run(given)
        del result
        trace = gpu.trace()
        del given
    return [
        trace.allocations[event.index].requested * (1 if event.kind == "alloc" else -1)
        for event in trace.events[before:]
        if event.kind in ("alloc", "free")
    ]


CHECKS, CHECKED = [4, 1, 4, 1, 1, -1, -4, -1, -4], [-1, -1]
if versions.multinomial_asks_once(versions.INSTALLED):
    CHECKS, CHECKED = [4, 4, 1, 1, 1, -1, -1], [-1, -1, -4, -4]
ROWS = [256, 64, 1, -64, -256, 1, -1]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda a: a.multinomial(1), [512, *CHECKS, *ROWS, SIZE, -SIZE, *CHECKED, -512]),
        (
            lambda a: a.multinomial(3),
            [1536, *CHECKS, *ROWS, SIZE, 768, -768, -SIZE, *CHECKED, -1536],
        ),
        (
            lambda a: a[0].multinomial(1),
            [8, *CHECKS, 4, 1, -4, 1, -1, 128, -128, *CHECKED, -8],
        ),
        (lambda a: a.multinomial(3, True), [1536, *[SIZE] * 3, *[-SIZE] * 3, -1536]),
        (lambda a: torch.normal(a, a), [4, 1, -1, -4, SIZE, 4, 1, -1, -4, -SIZE]),
        (lambda a: torch.normal(a, 1.0), [SIZE, SIZE, -SIZE, -SIZE]),
        (lambda a: torch.normal(0.0, a), [4, 1, -1, -4, SIZE, 4, 1, -1, -4, 4, -4, -SIZE]),
        (lambda a: torch._sample_dirichlet(a), [SIZE, 256, -256, -SIZE]),
        (lambda a: a.t().kthvalue(3), [SIZE, 128, 256, -SIZE, -128, -256]),
        (lambda a: a.kthvalue(3, dim=0), [128, 256, -128, -256]),
        (lambda a: a.t().median(0), [SIZE, 256, 512, -SIZE, -256, -512]),
        (lambda a: torch.aminmax(a.t()), [4, 4, SIZE, -SIZE, -4, -4]),
    ],
)
def test_matrices(run: Callable[[Tensor], Any], expected: list[int]) -> None:
    assert _events(run, 64, 32) == expected


def test_a_mask_that_is_smaller_than_what_it_masks_is_expanded() -> None:
    def run(a: Tensor) -> Tensor:
        return a.masked_scatter_(torch.zeros(32, dtype=torch.bool, device="cuda"), a)

    found = _events(run, 64, 32)
    assert found[:3] == [32, 2 * SIZE, SIZE // 4]
    assert found[-3:] == [-SIZE // 4, -2 * SIZE, -32]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x: F.avg_pool3d(x, 2), [2048, VOLUME, -VOLUME, -2048]),
        (lambda x: F.adaptive_avg_pool3d(x, 2), [VOLUME, 256, -VOLUME, -256]),
        (
            lambda x: F.interpolate(x, scale_factor=2),
            [8 * VOLUME, 8 * VOLUME, VOLUME, -VOLUME, -8 * VOLUME, -8 * VOLUME],
        ),
        (
            lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
            [8 * VOLUME, -8 * VOLUME],
        ),
    ],
)
def test_volumes_with_channels_last(run: Callable[[Tensor], Any], expected: list[int]) -> None:
    assert _events(run, 2, 4, 8, 8, 8) == expected


def test_trilinear_results_keep_channels_last() -> None:
    with Simulation(find_profile("a100-80gb")):
        given = torch.rand(2, 4, 8, 8, 8, device="cuda")
        given = given.to(memory_format=torch.channels_last_3d)
        result = F.interpolate(given, scale_factor=2, mode="trilinear")
        assert result.is_contiguous(memory_format=torch.channels_last_3d)


def test_draws_need_no_gradient() -> None:
    with Simulation(find_profile("a100-80gb")):
        chances = torch.rand(8, 4, device="cuda", requires_grad=True)
        assert not chances.multinomial(2).requires_grad
        assert chances.multinomial(2).dtype is torch.int64
        assert torch.normal(chances, chances).shape == (8, 4)


@pytest.mark.parametrize(
    "run",
    [
        lambda a: a.multinomial(1),
        lambda a: a.multinomial(3, True),
        lambda a: torch.distributions.Categorical(a, validate_args=True).sample(),
        lambda a: torch._is_any_true(a > 0),
        lambda a: torch.bincount(a.argmax(1), minlength=32),
    ],
)
def test_nothing_is_unknown_about_a_policy(run: Callable[[Tensor], Any]) -> None:
    with Simulation(find_profile("a100-80gb")) as gpu:
        run(torch.rand(64, 32, device="cuda"))
        assert gpu.trace().bounds is None


@pytest.mark.parametrize(
    ("weights", "dtype", "expected"),
    [
        (None, torch.int64, [8, 8, 256, -8, -8]),
        (torch.float32, torch.float32, [8, 8, 128, -8, -8]),
        (torch.float16, torch.float64, [512, 8, 8, 256, -8, -8, -512]),
    ],
)
def test_unknown_values_have_the_bins_that_are_asked_for(
    weights: torch.dtype | None, dtype: torch.dtype, expected: list[int]
) -> None:
    with Simulation(find_profile("a100-80gb")) as gpu:
        values = torch.rand(64, 32, device="cuda").argmax(1)
        given = None if weights is None else torch.rand(64, device="cuda").to(weights)
        before = len(gpu.trace().events)
        counts = torch.bincount(values, given, 32)
        assert (counts.shape, counts.dtype) == ((32,), dtype)
        trace = gpu.trace()
        assert [
            trace.allocations[event.index].requested * (1 if event.kind == "alloc" else -1)
            for event in trace.events[before:]
            if event.kind in ("alloc", "free")
        ] == expected

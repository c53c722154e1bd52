"""Strides of results that a CUDA kernel gives and a decomposition does not, as PyTorch 2.14.1's
host code gave them on the stub driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_vram.sim import Simulation, find_profile

aten = torch.ops.aten
PLAIN, LAST = (512, 64, 8, 1), (512, 1, 64, 8)


def _batch_norm(grad: Any, source: Any, training: bool = True) -> Any:
    c = torch.empty(8, device="cuda")
    return aten.native_batch_norm_backward(
        grad, source, c, c, c, c, c, training, 1e-5, [True, True, True]
    )[0]


def _evaluated_batch_norm(grad: Any, source: Any) -> Any:
    return _batch_norm(grad, source, False)


def _group_norm(grad: Any, source: Any) -> Any:
    groups, weight = torch.empty(2, 2, device="cuda"), torch.empty(8, device="cuda")
    return aten.native_group_norm_backward(
        grad, source, groups, groups, weight, 2, 8, 64, 2, [True, True, True]
    )[0]


def _glu(grad: Any, source: Any) -> Any:
    return aten.glu_backward(grad.narrow(1, 0, 4), source, 1)


def _unshuffled(grad: Any, source: Any) -> Any:
    return aten.pixel_shuffle(aten.pixel_unshuffle(source, 2), 2)


@pytest.mark.parametrize(
    ("function", "plain_input", "last_input"),
    [
        (_batch_norm, PLAIN, LAST),
        (_evaluated_batch_norm, PLAIN, PLAIN),
        (_group_norm, PLAIN, PLAIN),
        (_glu, PLAIN, PLAIN),
        (_unshuffled, PLAIN, PLAIN),
    ],
)
@pytest.mark.parametrize("grad_format", [torch.contiguous_format, torch.channels_last])
def test_the_strides_are_those_of_the_kernel(
    function: Callable[[Any, Any], Any],
    plain_input: tuple[int, ...],
    last_input: tuple[int, ...],
    grad_format: torch.memory_format,
) -> None:
    with Simulation(find_profile("a100-80gb")):
        grad = torch.empty(2, 8, 8, 8, device="cuda", memory_format=grad_format)
        for source_format, expected in (
            (torch.contiguous_format, plain_input),
            (torch.channels_last, last_input),
        ):
            source = torch.empty(2, 8, 8, 8, device="cuda", memory_format=source_format)
            assert function(grad, source).stride() == expected

"""Convolutions: scratch, layouts and choice against what PyTorch 2.6.0 and 2.14.1 did on stand-in
devices, cuDNN on (its workspaces at 0) and off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_answers import argument, card, differences, runs, state

from pytest_vram.sim import find_profile
from pytest_vram.sim.kernels import Card, Give, Out, Take, program
from pytest_vram.sim.kernels.convolution_choice import (
    described,
    laid_out,
    result_strides,
    select,
)
from pytest_vram.sim.kernels.iterator import layout
from pytest_vram.sim.kernels.versions import overload

aten = torch.ops.aten


def test_every_recorded_call_is_reproduced_event_by_event() -> None:
    assert differences("convolution") == []


def _distances(shape: list[int], stride: tuple[int, ...]) -> list[int]:
    return [step for size, step in zip(shape, stride, strict=True) if size != 1]


def test_every_recorded_result_has_the_strides_the_rule_gives() -> None:
    for run in runs("convolution"):
        for call in run["calls"]:
            func, device = overload(call[0]), card(run)
            assert func is not None
            with state(call[2]):
                got = result_strides(func, argument(call[1], {}), device)
            for stride, spec in zip(got, call[3], strict=True):
                assert (stride is None) == (spec is None)
                if spec and 0 not in spec[1]:
                    assert stride is not None
                    assert _distances(spec[1], stride) == _distances(spec[1], spec[2]), call


def on(name: str, version: tuple[int, int] = (2, 14)) -> Card:
    return Card(find_profile(name), version, cudnn_version=92400)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("enabled", "source", "weight", "options", "chosen"),
    [
        (True, (2, 8, 9, 9), (4, 8, 3, 3), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1), "cudnn"),
        (False, (2, 8, 9, 9), (4, 8, 3, 3), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1), "slow2d"),
        (False, (2, 8, 9, 9), (4, 8, 3, 3), ([1], [0], [2], False, [0], 1), "dilated2d"),
        (True, (2, 8, 9, 9), (8, 4, 3, 3), ([2], [0], [1], True, [1], 1), "cudnn_transpose"),
        (True, (2, 8, 9, 9), (8, 4, 3, 3), ([2], [0], [3], True, [2], 1), "transpose2d"),
        (True, (2, 8, 9, 9), (8, 1, 3, 3), ([1], [0], [1], False, [0], 8), "depthwise2d"),
        (False, (2, 8, 5, 9, 9), (4, 8, 3, 3, 3), ([1], [0], [1], False, [0], 1), "dilated3d"),
        (True, (0, 8, 9, 9), (4, 8, 3, 3), ([1], [0], [1], False, [0], 1), "empty"),
    ],
)
def test_choice(
    enabled: bool, source: tuple[int, ...], weight: tuple[int, ...], options: tuple[object, ...],
    chosen: str,
) -> None:  # fmt: skip
    with state({"cudnn": enabled}):
        conv = described(layout(tensor(*source)), tensor(*weight), True, options)
        assert select(conv, on("a100-80gb")) == chosen


def test_results_keep_channels_last_with_cudnn_only() -> None:
    source = tensor(2, 8, 16, 16).to(memory_format=torch.channels_last)
    args = (source, tensor(4, 8, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    blind = tensor(2, 4, 16, 16)
    with state({"cudnn": True}):
        (out,) = laid_out(aten.convolution.default, args, [blind], on("a100-80gb"))
    assert out.stride() == (1024, 1, 64, 4)
    with state({"cudnn": False}):
        (out,) = laid_out(aten.convolution.default, args, [blind], on("a100-80gb"))
    assert out is blind


def spans(args: tuple[object, ...], card: Card) -> list[tuple[int, int | None]]:
    """What cuDNN may take in the kernels of a forward convolution."""
    steps = program(aten.convolution.default, args, {}, [tensor(1)], card) or ()
    return [
        (step.span.low, step.span.high) for step in steps if isinstance(step, Take) and step.span
    ]


def test_bounds_of_the_closed_library() -> None:
    source, weight = tensor(8, 64, 56, 56), tensor(64, 64, 1, 1)
    options = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    args = (source, weight, *options)
    x, w = 8 * 64 * 56 * 56 * 4, 64 * 64 * 4
    with state({"cudnn": True}):
        assert spans(args, on("a100-80gb")) == [(0, 2 * x + w)]
        assert spans(args, on("v100-32gb")) == []
        last = (source.to(memory_format=torch.channels_last), weight, *options)
        assert spans(last, on("a100-80gb")) == []
    with state({"cudnn": False}):
        assert spans(args, on("a100-80gb")) == []
    with state({"cudnn": True, "bench": True}):
        card = on("t4")
        assert spans(args, card) == [(0, card.profile.memory - card.profile.context)]


def test_each_kernel_of_a_backward_has_its_own_workspace() -> None:
    source, weight = tensor(8, 64, 56, 56), tensor(64, 64, 3, 3)
    options = ([64], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    x, w = 8 * 64 * 56 * 56 * 4, 64 * 64 * 9 * 4
    with state({"cudnn": True}):
        steps = program(
            aten.convolution_backward.default,
            (source, source, weight, *options),
            {},
            [source, weight, None],
            on("a100-80gb"),
        )
    assert steps is not None
    tiles = (2 * x) * 9 // 4 + w * 4  # Winograd's, more than the copies
    highs = {one.key: one.span.high for one in steps if isinstance(one, Take) and one.span}
    assert highs == {"dgrad workspace": tiles, "wgrad workspace": tiles + 48 * w}


@pytest.mark.parametrize("groups", [1, 2])
def test_a_small_transposed_output_keeps_the_block_made_like_the_input(groups: int) -> None:
    """``slow_conv_transpose3d``: recorded on the CUDA build, 2.14.1, with one group."""
    source, weight = tensor(16, 4, 2, 2, 28), tensor(4, 2 // groups, 2, 2, 2)
    options = (None, [2] * 3, [1] * 3, [1] * 3, True, [0] * 3, groups)
    out = tensor(16, 2, 2, 2, 54)
    assert out.numel() < source.numel()
    with state({"cudnn": False}):
        args = (source, weight, *options)
        steps = program(aten.convolution.default, args, {}, [out], on("t4")) or ()
    whole = source.numel() * 4
    if groups == 1:
        assert [one.size for one in steps if isinstance(one, Out)] == [whole]
    else:
        outputs = [s.size for s in steps if isinstance(s, Take) and s.key.endswith("output")]
        assert outputs == [whole // 2] * 2


def _signed(steps: Any) -> list[str]:
    """``+size`` of scratch, ``-`` where it goes, ``out``; what cuDNN may take is left out."""
    found, held = [], set()
    for step in steps:
        if isinstance(step, Take) and step.size:
            held.add(step.key)
            found.append(f"+{step.size}")
        elif isinstance(step, Give) and step.key in held:
            held.remove(step.key)
            found.append("-")
        elif isinstance(step, Out):
            found.append(f"out{step.index}")
    return found


@pytest.mark.parametrize(
    ("function", "weight", "options", "expected"),
    [
        ("slow2d", (4, 4, 3, 3), ([0, 0], 1), ["+16", "out0", "+5184", "-", "-"]),
        ("depthwise2d", (4, 1, 3, 3), ([0, 0], 4), ["+16", "out0", "-"]),
    ],
)
def test_a_strided_bias_is_copied_before_the_output(
    function: str, weight: tuple[int, ...], options: tuple[object, ...], expected: list[str]
) -> None:
    """Figures of PyTorch 2.14.1's host code on the stub driver, without cuDNN."""
    bias = tensor(8)[::2]
    args = (tensor(2, 4, 8, 8), tensor(*weight), bias, [1, 1], [0, 0], [1, 1], False, *options)
    with state({"cudnn": False}):
        steps = program(torch.ops.aten.convolution.default, args, {}, [tensor(2, 4, 6, 6)],
                        on("a100-80gb"))  # fmt: skip
    assert _signed(steps) == expected, function


def test_a_transposed_convolution_copies_its_gradient_once_for_both_kernels() -> None:
    """``grad_output.contiguous`` (cudnn/ConvShared.cpp), of a gradient that a sum expanded."""
    grad = tensor(1).expand(2, 4, 10, 10)
    args = (grad, tensor(2, 4, 8, 8), tensor(4, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], True,
            [0, 0], 1, [True, True, False])  # fmt: skip
    outputs = [tensor(2, 4, 8, 8), tensor(4, 4, 3, 3), None]
    with state({"cudnn": True}):
        backward = torch.ops.aten.convolution_backward.default
        steps = program(backward, args, {}, outputs, on("a100-80gb"))
    assert _signed(steps) == ["+3200", "out0", "out1", "-"]

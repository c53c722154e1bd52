"""Pooling, resampling and CTC: kernels that want dense operands copy the others.

Read from ATen/native/cuda/DilatedMaxPool2d.cu, AveragePool2d.cu, AdaptiveAveragePooling.cu,
AdaptiveMaxPooling2d.cu, UpSample*.cu, LossCTC.cu and ATen/native/AffineGridGenerator.cpp (v2.6.0,
v2.14.1); where a rule names no version it is of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pytest_vram.sim.kernels import (
    Card,
    Give,
    Out,
    Outputs,
    Step,
    Take,
    outs,
    rule,
    scratch,
    size_of,
)
from pytest_vram.sim.kernels.gemm import handle_workspace
from pytest_vram.sim.kernels.iterator import layout
from pytest_vram.sim.kernels.memory_format import channels_last

aten = torch.ops.aten


def _dense_in_some_format(tensor: Tensor) -> bool:
    """Contiguous, or channels-last contiguous: ``contiguous(suggest_memory_format())``."""
    if tensor.is_contiguous():
        return True
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)


def _held(taken: list[Take]) -> Iterator[Step]:
    yield from taken
    for step in reversed(taken):
        yield Give(step.key)


def _read_while_made(copies: list[Take]) -> Iterator[Step]:
    """Copies that live from before the one result until after it."""
    yield from copies
    yield Out(0)
    for step in copies:
        yield Give(step.key)


def _copies(strict: bool, *operands: Tensor) -> list[Take]:
    return [
        Take(f"dense{i}", size_of(t), "dense copy of an operand")
        for i, t in enumerate(operands)
        if not (t.is_contiguous() if strict else _dense_in_some_format(t))
    ]


def _formatted(example: Tensor, *operands: Tensor) -> list[Take]:
    """``contiguous(example.suggest_memory_format())`` of every operand."""
    memory_format = torch.contiguous_format
    if channels_last(layout(example)):
        memory_format = torch.channels_last if example.dim() == 4 else torch.channels_last_3d
    return [
        Take(f"formatted{i}", size_of(t), "copy of an operand in the input's format")
        for i, t in enumerate(operands)
        if not t.is_contiguous(memory_format=memory_format)
    ]


@rule(aten.max_pool2d_with_indices.default, aten.avg_pool2d.default)
def pool(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    yield from outs(outputs)
    yield from _held(_copies(False, args[0]))


@rule(aten.upsample_bilinear2d.default)
def bilinear(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """UpSampleBilinear2d.cu: the channels-last kernel, from 16 channels on, wants a dense input;
    the other takes any."""
    source, result = args[0], outputs[0]
    yield Out(0)
    if result is None or source.shape == result.shape or source.shape[1] < 16:
        return
    if channels_last(layout(source)) and not _dense_in_some_format(source):
        yield from scratch(size_of(source), "dense copy of an operand")


@rule(
    aten.upsample_nearest2d.default,
    aten._upsample_nearest_exact2d.default,
    aten.upsample_nearest2d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
    aten.upsample_bilinear2d_backward.default,
)
def resampled(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """UpSampleNearest2d.cu, UpSampleBilinear2d.cu: from 4 channels on a channels-last kernel where
    the input suggests it; the other one wants contiguous operands, and copies what it wrote into
    any other result."""
    yield from outs(outputs)
    if channels_last(layout(args[0])) and args[0].shape[1] >= 4:
        yield from _held(_copies(False, args[0]))
    else:
        yield from _held(_results(outputs) + _copies(True, args[0]))


@rule(aten.max_pool3d_with_indices.default)
def pool3d(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """DilatedMaxPool3d.cu."""
    yield from outs(outputs)
    yield from _held(_copies(False, args[0]))


@rule(aten.max_pool3d_with_indices_backward.default)
def pool3d_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """DilatedMaxPool3d.cu: gradient and indices in the format that the input suggests."""
    yield from outs(outputs)
    yield from _held(_formatted(args[1], args[0], args[7]))


@rule(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """AdaptiveAveragePooling.cu: the channels-last kernel reads a gradient of any strides."""
    yield from outs(outputs)
    if not channels_last(layout(args[1])):
        yield from _held(_copies(True, args[0]))


@rule(
    aten.upsample_nearest1d_backward.default,
    aten._upsample_nearest_exact1d_backward.default,
    aten.upsample_linear1d_backward.default,
    aten.upsample_nearest3d_backward.default,
    aten._upsample_nearest_exact3d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.avg_pool3d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
)
def dense_gradient(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """UpSampleNearest1d.cu, UpSampleNearest3d.cu, UpSampleLinear1d.cu, AveragePool3d.cu,
    AdaptiveAveragePooling3d.cu, AdaptiveMaxPooling3d.cu, ReflectionPad.cu."""
    yield from outs(outputs)
    yield from _held(_copies(True, args[0]))


@rule(aten.upsample_trilinear3d_backward.default)
def trilinear_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """UpSampleTrilinear3d.cu: a contiguous gradient and a contiguous result, copied back."""
    yield from outs(outputs)
    yield from _held(_copies(True, args[0]) + _results(outputs))


@rule(aten.fractional_max_pool2d_backward.default)
def fractional_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """FractionalMaxPool2d.cu: the gradient's copy comes first."""
    copies = _copies(True, args[0])
    yield from copies
    yield from outs(outputs)
    for step in copies:
        yield Give(step.key)


@rule(aten.max_pool2d_with_indices_backward.default, aten.avg_pool2d_backward.default)
def pool_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """DilatedMaxPool2d.cu, AveragePool2d.cu: input, gradient and indices in the input's format."""
    yield from outs(outputs)
    grad, source = args[:2]
    indices = args[7:8] if isinstance(args[-1], Tensor) else ()
    yield from _held(_formatted(source, source, grad, *indices))


@rule(aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    yield from _read_while_made(_copies(False, args[0]))


def _results(outputs: Outputs) -> list[Take]:
    return [
        Take(f"result{i}", size_of(t), "contiguous result")
        for i, t in enumerate(outputs)
        if t is not None and not t.is_contiguous()
    ]


@rule("aten::_adaptive_avg_pool3d")
def adaptive_avg_pool3d(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """AdaptiveAveragePooling3d.cu: of a contiguous copy."""
    yield from _read_while_made(_copies(True, args[0]))


@rule(
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
    aten.avg_pool3d.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact3d.default,
    "aten::_upsample_bilinear2d_aa",
)
def strict_forward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Contiguous results and a contiguous input; also AdaptiveMaxPooling3d.cu, ReflectionPad.cu."""
    yield from outs(outputs)
    yield from _held(_results(outputs) + _copies(True, args[0]))


@rule(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pool_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    yield from outs(outputs)
    yield from _held(_copies(True, args[0], args[2]) + _results(outputs))


@rule("aten::_upsample_bilinear2d_aa_backward", aten.upsample_bicubic2d_backward.default)
def strict_gradient(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    yield from outs(outputs)
    yield from _held(_copies(True, args[0]))


@rule(aten.max_unpool2d.default, aten.max_unpool3d.default)
def unpool(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """MaxUnpooling.cu: contiguous values and indices, then the result."""
    copies = _copies(True, args[0], args[1])
    yield from copies
    yield Out(0)
    for step in reversed(copies):
        yield Give(step.key)


@rule(aten.affine_grid_generator.default)
def affine_grid(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step] | None:
    """A base grid from one line per axis, multiplied by the transformations (2d only)."""
    theta, size, align = args[:3]
    if len(size) != 4:
        return None
    return _affine_grid_2d(theta, size, align, card)


def _affine_grid_2d(theta: Tensor, size: list[int], align: bool, card: Card) -> Iterator[Step]:
    batch, _, height, width = size
    item = theta.element_size()
    yield Take("grid", batch * height * width * 3 * item, "base grid")
    for n in (width, height):
        if n <= 1 or align:
            yield from scratch(n * item, "line of coordinates")
            continue
        names = ("line", "scaled", "shrunk")
        yield from (Take(name, n * item, "line of coordinates") for name in names)
        yield from (Give(name) for name in names)
    yield Out(0)
    yield from handle_workspace(card)
    yield Give("grid")


def _lengths(batch: int) -> list[Take]:
    names = ("offsets", "input_lengths", "target_lengths")
    return [Take(name, batch * 8, "lengths on the device") for name in names]


@rule(aten._ctc_loss.default)
def ctc_loss(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    taken = _lengths(args[0].shape[1])
    yield from taken
    yield Out(1)
    yield Out(0)
    for i in (1, 0, 2):
        yield Give(taken[i].key)


@rule(aten._ctc_loss_backward.default)
def ctc_loss_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Beta like alpha; large problems sum alpha and beta over the blanks at once."""
    probabilities, alpha = args[1], args[6]
    steps, batch, labels = probabilities.shape
    taken = _lengths(batch)
    yield from taken
    yield Take("beta", size_of(alpha), "log beta")
    yield Out(0)
    if 2 * steps + 24 * batch // 10 + 2 * labels // 10 > 450:
        line = steps * batch * probabilities.element_size()
        blanks = line * ((alpha.shape[2] + 1) // 2)
        yield Take("blanks", blanks, "alpha plus beta of the blanks")
        yield Take("maxes", line, "maxima of logsumexp")
        yield Take("abs", line, "maxima compared with infinity")
        yield Take("mask", steps * batch, "maxima compared with infinity")
        yield Give("mask")
        yield Give("abs")
        yield Take("exp", blanks, "exponentials of logsumexp")
        yield Take("sum", line, "logsumexp of the blanks")
        for key in ("exp", "maxes", "sum", "blanks"):
            yield Give(key)
    yield Give("beta")
    for i in (1, 0, 2):
        yield Give(taken[i].key)

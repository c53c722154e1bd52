"""Layer, RMS and group normalisation.

Read from ATen/native/cuda/layer_norm_kernel.cu, group_norm_kernel.cu and
ATen/native/group_norm.cpp (v2.6.0, v2.14.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
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
    argument,
    outs,
    rule,
    size_of,
    versions,
)
from pytest_vram.sim.kernels.iterator import contiguous
from pytest_vram.sim.kernels.reduce import reduction
from pytest_vram.sim.kernels.reductions import norm_steps, summing, wide

aten = torch.ops.aten


def _copies(**operands: Tensor | None) -> list[Take]:
    """``expect_contiguous`` of every operand that is not."""
    return [
        Take(name, size_of(operand), f"contiguous copy of the {name}")
        for name, operand in operands.items()
        if operand is not None and not operand.is_contiguous()
    ]


def _around(copies: list[Take], inner: Iterator[Step]) -> Iterator[Step]:
    yield from copies
    yield from inner
    for copy in reversed(copies):
        yield Give(copy.key)


@rule(aten.native_layer_norm.default)
def layer_norm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    return _around(_copies(input=args[0], weight=args[2], bias=args[3]), outs(outputs))


@rule("aten::_fused_rms_norm")
def rms_norm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    return _around(
        _copies(input=args[0], weight=argument(args, kwargs, 2, "weight")), outs(outputs)
    )


@rule(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    grad, source, shape, mean, rstd, weight = args[:6]
    copies = _copies(input=source, mean=mean, rstd=rstd, weight=weight)
    return _around(copies, _norm_backward(grad, source, shape, outputs, card))


@rule("aten::_fused_rms_norm_backward")
def rms_norm_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    grad, source, shape, rstd, weight = args[:5]
    copies = _copies(input=source, rstd=rstd, weight=weight)
    return _around(copies, _norm_backward(grad, source, shape, outputs, card))


def _norm_backward(
    grad: Tensor, source: Tensor, shape: list[int], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """The gradient is made contiguous after the results
    (``LayerNormBackwardKernelImplInternal``).

    ``LaunchGammaBetaBackwardCUDAKernel``: many short rows give partial sums, whose sums
    replace the gradients that were allocated first."""
    wide_rows = prod(shape)
    rows = source.numel() // wide_rows if wide_rows else 0
    weights = [(i, o) for i, o in enumerate(outputs) if i and o is not None and o.numel()]
    if not (
        weights
        and versions.sums_norm_gradients_in_parts(card.torch)
        and rows > 64 * 1024
        and wide_rows // 32 < card.profile.multiprocessors // 2
    ):
        yield from outs(outputs)
        yield from _around(_copies(grad=grad), iter(()))
        return
    if outputs[0] is not None:
        yield Out(0)
    columns = -(-wide_rows // 32)
    blocks = min(64 * 1024 // 2 // columns, -(-rows // 32))
    for i, output in weights:
        yield Take(f"first{i}", size_of(output), "gradient that its partial sums replace")
    for i, output in weights:
        size = blocks * wide_rows * output.element_size()
        yield Take(f"parts{i}", size, "partial sums of a weight's gradient")
    for i, output in weights:
        yield Out(i)
        parts = contiguous((blocks, wide_rows), output.element_size())
        into = contiguous((wide_rows,), output.element_size())
        kind = summing(output.dtype, output.dtype, card.torch)
        yield from reduction(parts, (0,), (into,), kind, card)
        yield Give(f"first{i}")
    for i, _ in reversed(weights):
        yield Give(f"parts{i}")


@rule(aten.native_group_norm.default)
def group_norm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    source, weight, bias, batch, channels, pixels, groups = args[:7]
    yield from outs(outputs)
    if not source.numel():
        return
    item = wide(source.dtype)
    taken = _copies(input=source)
    if item != source.element_size() and versions.wide_group_statistics(card.torch):
        taken += [Take(k, batch * groups * item, "statistics in float") for k in ("mean", "rstd")]
    if pixels > 1 and (weight is not None or bias is not None):
        taken += [Take(k, batch * channels * item, "scale and shift") for k in ("a", "b")]
    yield from _around(taken, iter(()))


@rule(aten.native_group_norm_backward.default)
def group_norm_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    copies = _copies(input=args[1], grad=args[0])
    return _around(copies, _group_norm_backward(args, outputs))


def _group_norm_backward(args: tuple[Any, ...], outputs: Outputs) -> Iterator[Step]:
    _, source, _, _, weight, batch, channels, pixels, groups = args[:9]
    yield from outs(outputs)
    if not source.numel():
        return
    item = wide(source.dtype)
    by_channel, by_group = batch * channels * item, batch * groups * item
    if pixels == 1:
        if outputs[0] is not None:
            yield Take("ds", by_group, "sums by group")
            yield Take("db", by_group, "sums by group")
            yield Give("db")
            yield Give("ds")
        return
    yield Take("ds", by_channel, "sums by channel")
    yield Take("db", by_channel, "sums by channel")
    if outputs[0] is not None:
        yield Take("c2", by_group, "coefficients by group")
        yield Take("c3", by_group, "coefficients by group")
        if weight is not None:
            yield Take("c1", by_channel, "coefficients by channel")
        yield Give("c3")
        yield Give("c2")
        if weight is not None:
            yield Give("c1")
    yield Give("db")
    yield Give("ds")


@rule(aten.renorm.default, aten.renorm_.default)
def renorm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Norms in the accumulation type, factors in the input's (ATen/native/Normalization.cpp)."""
    source, order, dim = args[:3]
    yield Out(0)
    rows = source.shape[dim]
    asked = torch.float32 if source.dtype in (torch.float16, torch.bfloat16) else source.dtype
    item = wide(source.dtype) // (2 if source.is_complex() else 1)
    yield Take("norm", rows * item, "norms")
    if source.numel():
        others = [d for d in range(source.dim()) if d != dim % source.dim()]
        kept = contiguous([1 if d in others else n for d, n in enumerate(source.shape)], item)
        yield from norm_steps(source, order, others, asked, kept, card)
    if item != source.element_size():
        yield Take("factor", rows * source.element_size(), "factors")
        yield Give("factor")
    yield Give("norm")

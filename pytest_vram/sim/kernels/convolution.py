"""Convolutions: the memory that each implementation takes besides its results.

Read from ATen/native/Convolution.cpp, cuda/ConvolutionMM2d.cu, cuda/NaiveDilatedConvolution.cu,
cuda/NaiveConvolutionTranspose{2,3}d.cu, cuda/DepthwiseConv{2,3}d.cu and cudnn/ConvShared.cpp
(v2.6.0, v2.14.1: the two act alike).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from pytest_vram.sim.kernels import Card, Give, Out, Outputs, Step, Take, rule, size_of
from pytest_vram.sim.kernels.convolution_choice import (
    Convolution,
    Implementation,
    cudnn_channels_last,
    described,
    folded,
    select,
)
from pytest_vram.sim.kernels.convolution_workspace import workspace
from pytest_vram.sim.kernels.gemm import handle_workspace
from pytest_vram.sim.kernels.iterator import Layout, contiguous, layout
from pytest_vram.sim.kernels.memory_format import channels_last, formatted, is_formatted
from pytest_vram.sim.kernels.reduce import reduced_shape, reduction
from pytest_vram.sim.kernels.reductions import summing

aten = torch.ops.aten

# ---------------------------------------------------------------------------------------- copies


@dataclass(slots=True)
class _Copies:
    """``contiguous()`` copies that live until the end of a scope."""

    keys: list[str]

    def of(self, plain: Layout, last: bool, key: str, why: str) -> tuple[Layout, list[Step]]:
        if is_formatted(plain, last):
            return plain, []
        self.keys.append(key)
        return formatted(plain, last), [Take(key, plain.nbytes, why)]

    def end(self) -> Iterator[Step]:
        while self.keys:
            yield Give(self.keys.pop())


def _sum(grad: Layout, dtype: torch.dtype, dims: Sequence[int], card: Card) -> Iterator[Step]:
    """Scratch of the bias gradient's sum over everything but channels."""
    if prod(grad.shape) == 0:
        return
    result = contiguous(reduced_shape(grad.shape, dims, False), grad.itemsize)
    yield from reduction(grad, dims, (result,), summing(dtype, dtype, card.torch), card, "bias")


def _every_dim_but_channels(plain: Layout) -> tuple[int, ...]:
    return (0, *range(2, len(plain.shape)))


# --------------------------------------------------------------------------------------- forward


def _columns(conv: Convolution) -> int:
    """Bytes of the unfolded input of one sample (of one group)."""
    kernel = prod(conv.kernel)
    if conv.transposed:
        return conv.weight.shape[1] * kernel * prod(conv.input.shape[2:]) * conv.input.itemsize
    channels = conv.weight.shape[1]
    return channels * kernel * prod(conv.output_shape[2:]) * conv.input.itemsize


def _native_forward(
    conv: Convolution, kind: Implementation, result: Take | Out, key: str, bias: int, card: Card
) -> Iterator[Step]:
    """One group on im2col and a matrix product per sample. ``slow_conv_transpose3d`` makes its
    output like its input and resizes it (NaiveConvolutionTranspose3d.cu, v2.14.1). ``bias``: bytes
    of a bias that must be made contiguous, as the parts of a complex one, before the output;
    transposed kernels make theirs empty first."""
    dense_bias = []
    if bias > conv.input.itemsize:  # a single value is contiguous whatever its stride
        dense_bias.append(Take(f"{key}bias", bias, "contiguous bias"))
    if not conv.transposed:
        yield from dense_bias
    output_size = prod(conv.output_shape) // conv.groups * conv.input.itemsize
    made = conv.input.nbytes // conv.groups if kind == "transpose3d" else output_size
    resized = output_size > made
    if resized:  # made like the input, then resized; a smaller output keeps the block
        yield Take(f"{key}like", made, "output before its resize")
        yield from dense_bias
    yield replace(result, size=made) if made > output_size else result
    if conv.transposed and not resized:
        yield from dense_bias
    if resized:
        yield Give(f"{key}like")
    columns = kind != "slow2d" or not conv.pointwise
    if columns:
        yield Take(f"{key}columns", _columns(conv), "unfolded input of one sample")
    ones = conv.transposed and conv.bias
    if ones:
        size = prod(conv.output_shape[2:]) * conv.input.itemsize
        yield Take(f"{key}ones", size, "ones that spread the bias")
    yield from handle_workspace(card)
    if ones:
        yield Give(f"{key}ones")
    if columns:
        yield Give(f"{key}columns")
    yield from (Give(step.key) for step in dense_bias)


def _group_of(plain: Layout, groups: int) -> Layout:
    """``subtensor``: one group's channels of a contiguous tensor, as a view."""
    shape = (plain.shape[0], plain.shape[1] // groups, *plain.shape[2:])
    return replace_shape(plain, shape)


def replace_shape(plain: Layout, shape: tuple[int, ...]) -> Layout:
    return Layout(shape, plain.stride, plain.itemsize, plain.offset)


def _native_groups_forward(
    conv: Convolution, kind: Implementation, bias: int, card: Card
) -> Iterator[Step]:
    """Every group by itself, then ``cat``."""
    part = _group_of(conv.input, conv.groups)
    result = prod(conv.output_shape) // conv.groups * conv.input.itemsize
    for group in range(conv.groups):
        copies = _Copies([])
        _, steps = copies.of(part, False, f"{group}.input", "contiguous input of one group")
        yield from steps
        if bias // conv.groups > conv.input.itemsize:  # a single value is contiguous already
            copies.keys.append(f"{group}.bias")
            yield Take(f"{group}.bias", bias // conv.groups, "contiguous bias of one group")
        output = Take(f"{group}.output", result, "output of one group")
        yield from _native_forward(conv, kind, output, f"{group}.", 0, card)
        yield from copies.end()
    yield Out(0)
    for group in range(conv.groups):
        yield Give(f"{group}.output")


def _depthwise_forward(kind: Implementation, bias: int) -> Iterator[Step]:
    """DepthwiseConv2d.cu, DepthwiseConv3d.cu (v2.14.1). ``bias``: bytes of one to be copied."""
    if bias and kind == "depthwise2d":
        yield Take("bias", bias, "contiguous bias")
    yield Out(0)
    if bias and kind == "depthwise3d":
        yield Take("bias", bias, "contiguous bias")
    if bias:
        yield Give("bias")


def _cudnn_forward(conv: Convolution, copies: _Copies, card: Card) -> Iterator[Step]:
    last = cudnn_channels_last(conv.input, conv.weight, conv.dtype)
    source, steps = copies.of(conv.input, last, "input", "input in the layout cuDNN works in")
    yield from steps
    yield Out(0)
    last = cudnn_channels_last(source, conv.weight, conv.dtype)
    _, steps = copies.of(conv.weight, last, "weight", "weight in the layout cuDNN works in")
    yield from steps
    yield from workspace(conv, card, "forward")


@rule(aten.convolution.default)
def convolution(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    source, weight, bias, *options = args
    copies = _Copies([])
    plain = layout(source)
    if weight.dim() == 3:  # never channels last by accident
        plain, steps = copies.of(plain, False, "line", "contiguous input")
        yield from steps
    conv = described(plain, weight, bias is not None, options)
    kind = select(conv, card)
    if kind == "empty":
        yield Out(0)
    elif kind in ("cudnn", "cudnn_transpose"):
        yield from _cudnn_forward(conv, copies, card)
    else:
        plain, steps = copies.of(conv.input, False, "input", "contiguous input")
        yield from steps
        conv = replace(conv, input=plain)
        strided = 0 if bias is None or bias.is_contiguous() else size_of(bias)
        if kind in ("depthwise2d", "depthwise3d"):
            yield from _depthwise_forward(kind, strided)
        else:
            _, steps = copies.of(conv.weight, False, "weight", "contiguous weight")
            yield from steps
            if conv.groups == 1:
                yield from _native_forward(conv, kind, Out(0), "", strided, card)
            else:
                yield from _native_groups_forward(conv, kind, strided, card)
    yield from copies.end()


# -------------------------------------------------------------------------------------- backward


@dataclass(frozen=True, slots=True)
class _Results:
    """Where gradients go: the operator's results, or parts of them that ``cat`` joins."""

    wanted: tuple[bool, ...]
    sizes: tuple[int, int, int] = (0, 0, 0)
    prefix: str = ""

    def put(self, index: int) -> Iterator[Step]:
        if not self.wanted[index]:
            return
        if self.prefix:
            name = ("input", "weight", "bias")[index]
            yield Take(f"{self.prefix}d{name}", self.sizes[index], f"{name} gradient of one group")
        else:
            yield Out(index)


def _slow2d_backward(
    conv: Convolution, grad: Layout, results: _Results, card: Card
) -> Iterator[Step]:
    copies, key = _Copies([]), results.prefix
    grad, steps = copies.of(grad, False, f"{key}grad", "contiguous gradient of the output")
    yield from steps
    columns = Take(f"{key}columns", _columns(conv), "unfolded input of one sample")
    taken = False
    if results.wanted[0]:
        yield from results.put(0)
        yield columns
        yield from handle_workspace(card)
        taken = True
    if results.wanted[2]:
        yield from results.put(2)
        yield from _sum(grad, conv.dtype, _every_dim_but_channels(grad), card)
    if results.wanted[1]:
        yield from results.put(1)
        if not taken:
            yield columns
            yield from handle_workspace(card)
        taken = True
    if taken:
        yield Give(columns.key)
    yield from copies.end()


def _dilated_backward(
    conv: Convolution, grad: Layout, results: _Results, card: Card
) -> Iterator[Step]:
    copies, key = _Copies([]), results.prefix
    grad, steps = copies.of(grad, False, f"{key}grad", "contiguous gradient of the output")
    yield from steps
    for index in range(3):
        yield from results.put(index)
    columns = results.wanted[0] or results.wanted[1]
    if columns:
        yield Take(f"{key}columns", _columns(conv), "unfolded input of one sample")
        yield from handle_workspace(card)
    if results.wanted[2]:
        sample = Layout(grad.shape[1:], grad.stride[1:], grad.itemsize)
        dims = tuple(range(1, len(sample.shape)))
        for _ in range(grad.shape[0]):
            yield Take(f"{key}sum", sample.shape[0] * sample.itemsize, "bias gradient of a sample")
            yield from _sum(sample, conv.dtype, dims, card)
            yield Give(f"{key}sum")
    if columns:
        yield Give(f"{key}columns")
    yield from copies.end()


def _transpose_backward(
    conv: Convolution, grad: Layout, results: _Results, card: Card
) -> Iterator[Step]:
    """Two functions: the input's gradient, then the parameters'."""
    key = results.prefix
    columns = not conv.pointwise or conv.dilated
    for indices in ((0,), (1, 2)):
        if not any(results.wanted[i] for i in indices):
            continue
        copies = _Copies([])
        if indices == (1, 2):
            yield from (*results.put(1), *results.put(2))
        plain, steps = copies.of(grad, False, f"{key}grad", "contiguous gradient of the output")
        yield from steps
        if indices == (0,):
            yield from results.put(0)
        if columns:
            yield Take(f"{key}columns", _columns(conv), "unfolded gradient of one sample")
        yield from handle_workspace(card)
        if indices == (1, 2) and results.wanted[2]:
            yield from _sum(plain, conv.dtype, _every_dim_but_channels(plain), card)
        if columns:
            yield Give(f"{key}columns")
        yield from copies.end()


_NATIVE_BACKWARD = {
    "slow2d": _slow2d_backward,
    "dilated2d": _dilated_backward,
    "dilated3d": _dilated_backward,
    "transpose2d": _transpose_backward,
    "transpose3d": _transpose_backward,
}


def _native_groups_backward(
    conv: Convolution, kind: Implementation, grad: Layout, wanted: tuple[bool, ...], card: Card
) -> Iterator[Step]:
    parts = {
        "grad": ("contiguous gradient of one group", _group_of(grad, conv.groups)),
        "input": ("contiguous input of one group", _group_of(conv.input, conv.groups)),
    }
    sizes = (
        conv.input.nbytes // conv.groups,
        conv.weight.nbytes // conv.groups,
        grad.shape[1] // conv.groups * grad.itemsize,
    )
    for group in range(conv.groups):
        copies = _Copies([])
        part = {}
        for name, (why, plain) in parts.items():
            last = channels_last(plain)  # subtensor keeps the suggested format
            part[name], steps = copies.of(plain, last, f"{group}.{name}_part", why)
            yield from steps
        results = _Results(wanted, sizes, f"{group}.")
        yield from _NATIVE_BACKWARD[kind](conv, part["grad"], results, card)
        yield from copies.end()
    names = ("input", "weight", "bias")
    yield from (Out(index) for index in range(3) if wanted[index])
    for index, name in reversed(list(enumerate(names))):
        if wanted[index]:  # vectors of parts, the last of which dies first
            yield from (Give(f"{group}.d{name}") for group in range(conv.groups))


def _depthwise2d_backward(
    conv: Convolution, grad: Layout, wanted: tuple[bool, ...], card: Card
) -> Iterator[Step]:
    copies = _Copies([])
    _, steps = copies.of(grad, False, "grad", "contiguous gradient of the output")
    yield from steps
    if wanted[1]:
        inner = _Copies([])
        _, steps = inner.of(conv.input, False, "input", "contiguous input")
        yield from (*steps, Out(1))
        yield from inner.end()
    if wanted[0]:
        inner = _Copies([])
        _, steps = inner.of(conv.weight, False, "weight", "contiguous weight")
        yield from (*steps, Out(0))
        yield from inner.end()
    yield from copies.end()
    yield from _bias_after(conv, grad, wanted, card)


def _depthwise3d_backward(
    conv: Convolution, grad: Layout, wanted: tuple[bool, ...], card: Card
) -> Iterator[Step]:
    yield from (Out(index) for index in (0, 1) if wanted[index])
    copies = _Copies([])
    _, steps = copies.of(grad, False, "grad", "contiguous gradient of the output")
    yield from steps
    if wanted[1]:
        inner = _Copies([])
        _, steps = inner.of(conv.input, False, "input", "contiguous input")
        yield from steps
        yield from inner.end()
    yield from _bias_after(conv, grad, wanted, card)
    yield from copies.end()


def _bias_after(
    conv: Convolution, grad: Layout, wanted: tuple[bool, ...], card: Card
) -> Iterator[Step]:
    """Implementations without a bias gradient: ``grad_output.sum`` outside of them."""
    if wanted[2]:
        yield Out(2)
        yield from _sum(grad, conv.dtype, _every_dim_but_channels(grad), card)


def _cudnn_backward(
    conv: Convolution, grad: Layout, wanted: tuple[bool, ...], card: Card
) -> Iterator[Step]:
    copies, dtype = _Copies([]), conv.dtype
    source, weight, original = conv.input, conv.weight, grad
    why = "in the layout cuDNN works in"
    if wanted[1]:
        last = cudnn_channels_last(source, weight, dtype)
        source, steps = copies.of(source, last, "input", f"input {why}")
        yield from steps
    if conv.transposed:  # ``contiguous`` once for both, where the others say ``to``
        grad, steps = copies.of(
            grad, channels_last(source), "grad", f"gradient of the output {why}"
        )
        yield from steps
    elif (wanted[0] or wanted[1]) and channels_last(grad) != channels_last(source):
        copies.keys.append("grad")
        yield Take("grad", grad.nbytes, f"gradient of the output {why}")
        grad = formatted(grad, channels_last(source))
    if wanted[0]:
        inner = _Copies([])
        last = cudnn_channels_last(grad, weight, dtype)
        yield Out(0)
        for name, plain in (("weight", weight), ("gradient of the output", grad)):
            yield from inner.of(plain, last, f"dgrad {name}", f"{name} {why}")[1]
        yield from workspace(conv, card, "dgrad")
        yield from inner.end()
    if wanted[1]:
        inner = _Copies([])
        last = cudnn_channels_last(source, grad, dtype)
        for name, plain in (("gradient of the output", grad), ("input", source)):
            yield from inner.of(plain, last, f"wgrad {name}", f"{name} {why}")[1]
        yield Out(1)
        yield from workspace(conv, card, "wgrad", weight_gradient=True)
        yield from inner.end()
    yield from copies.end()
    yield from _bias_after(conv, original, wanted, card)


@rule(aten.convolution_backward.default)
def convolution_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    grad_output, source, weight, bias_sizes, *options, mask = args
    wanted = tuple(bool(want) for want in mask)
    copies = _Copies([])
    plain = layout(source)
    if weight.dim() == 3:
        plain, steps = copies.of(plain, False, "line", "contiguous input")
        yield from steps
    conv = described(plain, weight, bias_sizes is not None, options)
    grad = folded(layout(grad_output))
    kind = select(conv, card)
    if kind == "empty":
        yield from (Out(index) for index in range(3) if wanted[index])
    elif kind in ("cudnn", "cudnn_transpose"):
        yield from _cudnn_backward(conv, grad, wanted, card)
    elif kind == "depthwise2d":
        yield from _depthwise2d_backward(conv, grad, wanted, card)
    elif kind == "depthwise3d":
        yield from _depthwise3d_backward(conv, grad, wanted, card)
    else:
        plain, steps = copies.of(conv.input, False, "input", "contiguous input")
        weights, more = copies.of(conv.weight, False, "weight", "contiguous weight")
        yield from (*steps, *more)
        conv = replace(conv, input=plain, weight=weights)
        if conv.groups == 1:
            yield from _NATIVE_BACKWARD[kind](conv, grad, _Results(wanted), card)
        else:
            yield from _native_groups_backward(conv, kind, grad, wanted, card)
    yield from copies.end()

"""Convolutions: which implementation CUDA runs, and the memory it takes besides its results.

Read from ATen/native/Convolution.cpp, ConvUtils.h, cuda/ConvolutionMM2d.cu,
cuda/NaiveDilatedConvolution.cu, cuda/NaiveConvolutionTranspose{2,3}d.cu,
cuda/DepthwiseConv{2,3}d.cu and cudnn/ConvShared.cpp (v2.6.0, v2.14.1: the two act alike).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from pytest_vram.sim.kernels import (
    Card,
    Give,
    Out,
    Outputs,
    Span,
    Step,
    Take,
    moment,
    rule,
    versions,
)
from pytest_vram.sim.kernels.gemm import handle_workspace
from pytest_vram.sim.kernels.iterator import Layout, contiguous, is_contiguous, layout
from pytest_vram.sim.kernels.reduce import reduced_shape, reduction
from pytest_vram.sim.kernels.reductions import summing

aten = torch.ops.aten

Implementation = Literal[
    "empty", "cudnn", "cudnn_transpose", "depthwise2d", "depthwise3d", "slow2d", "dilated2d",
    "dilated3d", "transpose2d", "transpose3d",
]  # fmt: skip

_INT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Convolution:
    """One call, one-dimensional ones already seen as two-dimensional (``view1d_as_2d``)."""

    input: Layout
    weight: Layout
    dtype: torch.dtype
    bias: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight.shape[2:]

    @property
    def output_shape(self) -> tuple[int, ...]:
        """``conv_output_size`` and ``conv_input_size``."""
        sizes = zip(
            self.input.shape[2:], self.kernel, self.stride, self.padding, self.dilation,
            self.output_padding, strict=True,
        )  # fmt: skip
        if self.transposed:
            spatial = [
                (size - 1) * step - 2 * pad + gap * (k - 1) + extra + 1
                for size, k, step, pad, gap, extra in sizes
            ]
            channels = self.weight.shape[1] * self.groups
        else:
            spatial = [
                (size + 2 * pad - gap * (k - 1) - 1) // step + 1
                for size, k, step, pad, gap, _ in sizes
            ]
            channels = self.weight.shape[0]
        return (self.input.shape[0], channels, *spatial)

    @property
    def dilated(self) -> bool:
        return any(gap != 1 for gap in self.dilation)

    @property
    def depthwise(self) -> bool:
        channels = self.input.shape[1]
        return (
            not self.transposed
            and len(self.input.shape) in (4, 5)
            and channels == self.groups > 1
            and self.weight.shape[0] % channels == 0
        )

    @property
    def pointwise(self) -> bool:
        """A kernel that reads each position once where it is: no columns."""
        ones = (*self.kernel, *self.stride)
        return all(size == 1 for size in ones) and not any(self.padding)


def _four(plain: Layout) -> Layout:
    """``view4d``: a dimension of size 1 before the last."""
    if len(plain.shape) != 3:
        return plain
    shape = (*plain.shape[:2], 1, plain.shape[2])
    step = plain.shape[2] * plain.stride[2]
    return Layout(shape, (*plain.stride[:2], step, plain.stride[2]), plain.itemsize, plain.offset)


def _widened(values: Sequence[int], first: int, dims: int) -> tuple[int, ...]:
    """``expand_param_if_needed`` and, for one dimension, a first one that changes nothing."""
    values = tuple(values) * dims if len(values) == 1 else tuple(values)
    return (first, *values) if dims == 1 else values


def described(source: Layout, weight: Tensor, bias: bool, options: Sequence[Any]) -> Convolution:
    """``options``: stride, padding, dilation, transposed, output_padding, groups."""
    stride, padding, dilation, transposed, output_padding, groups = options
    dims = weight.dim() - 2
    return Convolution(
        _four(source), _four(layout(weight)), weight.dtype, bias,
        _widened(stride, 1, dims), _widened(padding, 0, dims), _widened(dilation, 1, dims),
        bool(transposed), _widened(output_padding, 0, dims), int(groups),
    )  # fmt: skip


# ------------------------------------------------------------------------------------ the choice


def channels_last(plain: Layout) -> bool:
    """``suggest_memory_format`` is channels last (``is_channels_last_strides_2d`` and ``_3d``,
    c10/core/MemoryFormat.h): strides grow from channels over the innermost dimension outwards."""
    dims = len(plain.shape)
    if dims not in (4, 5) or plain.stride[1] == 0:
        return False
    least = 0
    for dim in (1, *range(dims - 1, 1, -1), 0):
        size, step = plain.shape[dim], plain.stride[dim]
        if size == 0 or step < least:
            return False
        if dim == 0 and least == plain.stride[1]:
            return False  # N111: could be either, so it is contiguous
        least = step * max(size, 1)
    return True


def cudnn_channels_last(one: Layout, other: Layout, dtype: torch.dtype) -> bool:
    """``cudnn_conv_suggest_memory_format``: either operand decides, never for double."""
    return dtype != torch.float64 and (channels_last(one) or channels_last(other))


def _splittable(conv: Convolution) -> bool:
    """``!needs_64bit_indexing_no_split``: one sample fits 32-bit indices."""
    batch = max(conv.input.shape[0], 1)
    largest = max(prod(conv.input.shape), prod(conv.output_shape))
    return largest // batch <= _INT_MAX


def _reproducible() -> bool:
    return torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


def uses_cudnn(conv: Convolution, card: Card) -> bool:
    """``ConvParams::use_cudnn``."""
    if not torch.backends.cudnn.enabled:
        return False
    if not _splittable(conv) and card.cudnn_version < 90300:
        return False
    if conv.dtype == torch.bfloat16 and card.profile.sm < 80:
        return False
    if conv.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return False
    formatted = cudnn_channels_last(conv.input, conv.weight, conv.dtype)
    if not formatted and conv.dilated and _reproducible():
        return False
    return not any(
        extra >= step for extra, step in zip(conv.output_padding, conv.stride, strict=True)
    )


def _cudnn_depthwise(conv: Convolution, card: Card) -> bool:
    """``use_cudnn_depthwise``: channels last always; otherwise half, square, undilated, from 32
    channels on, and only where it was found faster
    (``check_cudnn_depthwise_workload_with_filter``)."""
    formatted = cudnn_channels_last(conv.input, conv.weight, conv.dtype)
    brain = conv.dtype == torch.bfloat16
    if formatted and brain and versions.depthwise_bfloat16_by_cudnn(card.torch):
        return torch.backends.cudnn.enabled
    if not uses_cudnn(conv, card):
        return False
    if formatted:
        return True
    if max(prod(conv.input.shape), prod(conv.weight.shape)) > _INT_MAX:
        return True
    if conv.dtype != torch.float16 or len(conv.input.shape) != 4 or conv.dilated:
        return False
    batch, channels, height, width = conv.input.shape
    if channels < 32 or (conv.stride[0] != conv.stride[1] and height != 1):
        return False
    step, (rows, filtered) = conv.stride[1], conv.kernel
    if height == 1 and step == 1:
        return True
    if rows != filtered or filtered not in (1, 3, 5) or width < 7:
        return False
    if step != 2:
        return step == 1
    if batch == 1:
        return filtered != 1 or width <= 28
    if filtered == 1:
        return batch <= 16 and channels >= 128 and width <= 7
    return channels >= 512 or (channels >= 256 and width >= 28)


def select(conv: Convolution, card: Card) -> Implementation:
    """``_select_conv_backend`` for CUDA tensors."""
    dims = len(conv.input.shape) - 2
    if conv.input.shape[0] == 0 or conv.input.shape[1] == 0:
        return "empty"
    if conv.depthwise:
        if _cudnn_depthwise(conv, card):
            return "cudnn"
        return "depthwise2d" if dims == 2 else "depthwise3d"
    if uses_cudnn(conv, card):
        return "cudnn_transpose" if conv.transposed else "cudnn"
    if conv.transposed:
        return "transpose2d" if dims == 2 else "transpose3d"
    if dims == 3:
        return "dilated3d"  # undilated ones as well: the other kernel is the CPU's
    return "dilated2d" if conv.dilated else "slow2d"


# ---------------------------------------------------------------------------------------- copies


def formatted(plain: Layout, last: bool) -> Layout:
    """A fresh tensor of this shape, contiguous or channels last."""
    if not last:
        return contiguous(plain.shape, plain.itemsize)
    batch, channels, *spatial = plain.shape
    inner = contiguous((batch, *spatial, channels), plain.itemsize).stride
    stride = (inner[0], inner[-1], *inner[1:-1])
    return Layout(plain.shape, stride, plain.itemsize)


def _is_formatted(plain: Layout, last: bool) -> bool:
    """``is_contiguous(memory_format)``: strides of dimensions of size 1 don't count."""
    if not last:
        return is_contiguous(plain.shape, plain.stride)
    order = (0, *range(2, len(plain.shape)), 1)
    return is_contiguous([plain.shape[i] for i in order], [plain.stride[i] for i in order])


@dataclass(slots=True)
class _Copies:
    """``contiguous()`` copies that live until the end of a scope."""

    keys: list[str]

    def of(self, plain: Layout, last: bool, key: str, why: str) -> tuple[Layout, list[Step]]:
        if _is_formatted(plain, last):
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
    conv: Convolution, kind: Implementation, result: Take | Out, key: str, card: Card
) -> Iterator[Step]:
    """One group on im2col and a matrix product per sample. ``slow_conv_transpose3d`` makes its
    output like its input and resizes it (NaiveConvolutionTranspose3d.cu, v2.14.1)."""
    output_size = prod(conv.output_shape) // conv.groups * conv.input.itemsize
    made = conv.input.nbytes // conv.groups if kind == "transpose3d" else output_size
    resized = output_size > made
    if resized:  # made like the input, then resized; a smaller output keeps the block
        yield Take(f"{key}like", made, "output before its resize")
    yield replace(result, size=made) if made > output_size else result
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


def _group_of(plain: Layout, groups: int) -> Layout:
    """``subtensor``: one group's channels of a contiguous tensor, as a view."""
    shape = (plain.shape[0], plain.shape[1] // groups, *plain.shape[2:])
    return replace_shape(plain, shape)


def replace_shape(plain: Layout, shape: tuple[int, ...]) -> Layout:
    return Layout(shape, plain.stride, plain.itemsize, plain.offset)


def _native_groups_forward(conv: Convolution, kind: Implementation, card: Card) -> Iterator[Step]:
    """Every group by itself, then ``cat``."""
    part = _group_of(conv.input, conv.groups)
    result = prod(conv.output_shape) // conv.groups * conv.input.itemsize
    for group in range(conv.groups):
        copies = _Copies([])
        _, steps = copies.of(part, False, f"{group}.input", "contiguous input of one group")
        yield from steps
        output = Take(f"{group}.output", result, "output of one group")
        yield from _native_forward(conv, kind, output, f"{group}.", card)
        yield from copies.end()
    yield Out(0)
    for group in range(conv.groups):
        yield Give(f"{group}.output")


def _cudnn_forward(conv: Convolution, copies: _Copies, card: Card) -> Iterator[Step]:
    last = cudnn_channels_last(conv.input, conv.weight, conv.dtype)
    source, steps = copies.of(conv.input, last, "input", "input in the layout cuDNN works in")
    yield from steps
    yield Out(0)
    last = cudnn_channels_last(source, conv.weight, conv.dtype)
    _, steps = copies.of(conv.weight, last, "weight", "weight in the layout cuDNN works in")
    yield from steps
    yield from _workspace(conv, card, "forward")


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
        if kind in ("depthwise2d", "depthwise3d"):
            yield Out(0)
        else:
            _, steps = copies.of(conv.weight, False, "weight", "contiguous weight")
            yield from steps
            if conv.groups == 1:
                yield from _native_forward(conv, kind, Out(0), "", card)
            else:
                yield from _native_groups_forward(conv, kind, card)
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
    if (wanted[0] or wanted[1]) and channels_last(grad) != channels_last(source):
        copies.keys.append("grad")
        yield Take("grad", grad.nbytes, f"gradient of the output {why}")
        grad = formatted(grad, channels_last(source))
    if wanted[0]:
        inner = _Copies([])
        last = cudnn_channels_last(grad, weight, dtype)
        yield Out(0)
        for name, plain in (("weight", weight), ("gradient of the output", grad)):
            yield from inner.of(plain, last, f"dgrad {name}", f"{name} {why}")[1]
        yield from _workspace(conv, card, "dgrad")
        yield from inner.end()
    if wanted[1]:
        inner = _Copies([])
        last = cudnn_channels_last(source, grad, dtype)
        for name, plain in (("gradient of the output", grad), ("input", source)):
            yield from inner.of(plain, last, f"wgrad {name}", f"{name} {why}")[1]
        yield Out(1)
        yield from _workspace(conv, card, "wgrad", weight_gradient=True)
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
    grad = _four(layout(grad_output))
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


# ----------------------------------------------------------------------------- layout of results


def result_strides(
    func: Any, args: Sequence[Any], card: Card
) -> tuple[tuple[int, ...] | None, ...]:
    """Strides of the results of ``aten::convolution`` or ``aten::convolution_backward``, which
    only a CUDA device decides: cuDNN keeps channels last, everything else is contiguous. ``None``
    for a gradient that is not wanted."""
    backward = func is aten.convolution_backward.default
    source, weight = args[1:3] if backward else args[:2]
    options = args[4:10] if backward else args[3:9]
    plain = layout(source)
    if weight.dim() == 3:
        plain = contiguous(plain.shape, plain.itemsize)
    conv = described(plain, weight, False, options)
    cudnn = select(conv, card) in ("cudnn", "cudnn_transpose") and weight.dim() > 3
    last = cudnn and cudnn_channels_last(conv.input, conv.weight, conv.dtype)
    if not backward:
        shape = conv.output_shape
        if weight.dim() == 3:
            shape = (*shape[:2], shape[3])
        return (formatted(Layout(shape, shape, plain.itemsize), last).stride,)
    wanted = args[10]
    first = second = False
    if cudnn:  # the gradient of the output follows the input, which the weight may have changed
        source_last = last if wanted[1] else channels_last(conv.input)
        first = source_last or channels_last(conv.weight)
        second = source_last
        if conv.dtype == torch.float64:
            first = second = False
    if select(conv, card) == "empty":  # zeros_like
        strides = (source.stride(), weight.stride(), (1,))
        return tuple(stride if want else None for stride, want in zip(strides, wanted, strict=True))
    shapes = (tuple(source.shape), tuple(weight.shape), (int(args[0].shape[1]),))
    formats = (first, second, False)
    return tuple(
        formatted(Layout(shape, shape, plain.itemsize), form).stride if want else None
        for shape, form, want in zip(shapes, formats, wanted, strict=True)
    )


def laid_out(func: Any, args: Sequence[Any], results: Sequence[Any], card: Card) -> list[Any]:
    """The results that a device-blind fake execution gave, with the strides that CUDA gives."""
    strides = result_strides(func, args, card)
    return [
        result
        if result is None or stride is None or tuple(result.stride()) == tuple(stride)
        else result.new_empty_strided(result.shape, stride)
        for result, stride in zip(results, strides, strict=True)
    ]


# ------------------------------------------------------------------------------- cuDNN workspace


def workspace_bounds(
    conv: Convolution, card: Card, *, weight_gradient: bool = False
) -> tuple[int, int]:
    """Bytes that cuDNN's engine may ask for in one kernel of ``conv``: ``(low, high)``.

    cuDNN chooses its engine by closed heuristics, so this is a range, not a figure. PyTorch runs
    the first engine of heuristic mode A and allocates what its plan asks for, once per kernel:
    forward, input gradient, weight gradient. ``low`` is 0: implicit-GEMM engines on channels-last
    data read and write in place. ``high`` adds

    * copies into the layout of the tensor-core engines: input, weight and result of the kernel,
      channels rounded up to 16 bytes, unless the data is channels last already (TF32 counts as
      tensor core for fp32 on sm80 and newer);
    * without tensor cores (fp32 or fp64 before sm80), or where a 3x3 kernel of stride 1 allows
      it: the transformed tiles of a non-fused Winograd F(4x4, 3x3), 36 values for 16 (2.25 x
      input and result, 4 x weight);
    * for weight gradients: fp32 partial sums of a split over the batch, at most one for each
      multiprocessor-filling part and never more than 32 MiB.

    FFT engines, which mode A no longer proposes for sm70 and newer, are left out. With
    ``torch.backends.cudnn.benchmark`` an engine may use any workspace up to the largest block that
    the allocator could still give: the high bound is then what is free on the card.
    """
    if torch.backends.cudnn.benchmark:
        return (0, card.profile.memory - card.profile.context)
    high = _conversion(conv, card)
    if weight_gradient:
        partial = prod(conv.weight.shape) * 4
        parts = max(1, card.profile.multiprocessors * 128 * 128 * 4 // max(partial, 1))
        high += min(partial * parts, 32 << 20)
    return (0, high)


def _workspace(
    conv: Convolution, card: Card, kernel: str, *, weight_gradient: bool = False
) -> Iterator[Step]:
    """The plan's workspace, taken after the operands are ready (``run_conv_plan`` and its like,
    cudnn/Conv_v8.cpp)."""
    low, high = workspace_bounds(conv, card, weight_gradient=weight_gradient)
    why = "cuDNN chooses its engine by closed heuristics"
    return moment(Span("cuDNN convolution workspace", why, low, high), f"{kernel} workspace")


def _conversion(conv: Convolution, card: Card) -> int:
    """Bytes of converted or transformed operands (see :func:`workspace_bounds`)."""
    itemsize = conv.input.itemsize
    tensors = (conv.input.shape, conv.weight.shape, conv.output_shape)
    tensor_cores = (itemsize == 2 and card.profile.sm >= 70) or (
        conv.dtype == torch.float32 and card.profile.sm >= 80
    )
    high = 0
    if tensor_cores and not cudnn_channels_last(conv.input, conv.weight, conv.dtype):
        unit = 16 // itemsize
        for shape in tensors:
            channels = -(-shape[1] // unit) * unit
            high += prod(shape) // max(shape[1], 1) * channels * itemsize
    three = all(size == 3 for size in conv.kernel) and all(step == 1 for step in conv.stride)
    if three and len(conv.kernel) == 2 and conv.groups == 1 and not conv.dilated:
        given, weights, result = (prod(shape) * itemsize for shape in tensors)
        high = max(high, (given + result) * 9 // 4 + weights * 4)
    return high

"""Which implementation of a convolution CUDA runs, and how its results are laid out.

Read from ATen/native/Convolution.cpp, ConvUtils.h and cudnn/ConvShared.cpp (v2.6.0, v2.14.1: the
two act alike).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from pytest_vram.sim.kernels import Card, versions
from pytest_vram.sim.kernels.iterator import Layout, contiguous, layout
from pytest_vram.sim.kernels.memory_format import channels_last, formatted

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


def folded(plain: Layout) -> Layout:
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
        folded(source), folded(layout(weight)), weight.dtype, bias,
        _widened(stride, 1, dims), _widened(padding, 0, dims), _widened(dilation, 1, dims),
        bool(transposed), _widened(output_padding, 0, dims), int(groups),
    )  # fmt: skip


# ------------------------------------------------------------------------------------ the choice


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

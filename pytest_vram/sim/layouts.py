"""Strides that CUDA's kernels give and PyTorch's fake execution does not.

Fake execution often runs a decomposition in Python, whose result is laid out like its first step.
The strides decide later copies. What is listed here was compared with PyTorch 2.14.1's host code,
operator by operator, on transposed and expanded operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_vram.sim import inplace
from pytest_vram.sim.kernels import batchnorm
from pytest_vram.sim.kernels.iterator import contiguous_strides, layout, order_of, preserved_strides
from pytest_vram.sim.kernels.memory_format import channels_last, formatted
from pytest_vram.sim.tensors import is_dense

aten = torch.ops.aten

#: The first result is contiguous whatever the operands are: SoftMax.cpp, layer_norm_kernel.cu,
#: group_norm.cpp (``LEGACY_CONTIGUOUS_MEMORY_FORMAT``),
#: Loss.cpp (``zeros_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT)``), RreluWithNoise.cu,
#: cuda/Activation.cpp (``glu_backward_cuda`` resizes an empty tensor), PixelShuffle.cpp (a
#: ``reshape`` of a permuted view).
_CONTIGUOUS = {
    aten._log_softmax_backward_data.default,
    aten.native_layer_norm_backward.default,
    aten.native_group_norm_backward.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.rrelu_with_noise.default,
    aten.glu_backward.default,
    aten.pixel_unshuffle.default,
}

#: Channels last where the first operand suggests it: UpSample.h (``suggest_memory_format``),
#: v2.14.1.
_AS_FIRST = {
    aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_trilinear3d.default,
}

#: TensorIterators over the operands as they stand in the call (Activation.cpp, BinaryOps.cpp),
#: where the decomposition begins with another one.
_IN_ORDER = {
    aten.elu_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardtanh_backward.default,
    aten.hardswish_backward.default,
    aten.softplus_backward.default,
    aten.logit_backward.default,
    aten.xlogy.Tensor,
    aten.copysign.Tensor,
}


def laid_out(func: Any, args: Sequence[Any], result: Any) -> Any:
    """``result`` with CUDA's strides; sparse tensors have none."""
    tensors = [*args, *(result if isinstance(result, (list, tuple)) else (result,))]
    if any(isinstance(t, Tensor) and t.layout is not torch.strided for t in tensors):
        return result
    if func in _CONTIGUOUS:
        if isinstance(result, Tensor):
            return _with(result, contiguous_strides(result.shape))
        first, *others = result
        if first is None:
            return result
        return (_with(first, contiguous_strides(first.shape)), *others)
    if func is aten.native_batch_norm_backward.default:
        if not args[9][0]:  # the decomposition computes it all the same (Normalization.cu)
            return None, *result[1:]
        return _with(result[0], batchnorm.of_gradient(layout(args[1]), args[7])), *result[1:]
    if func is aten.cudnn_batch_norm_backward.default:  # empty_like(input), cudnn/BatchNorm.cpp
        source = layout(args[0])
        return _with(result[0], preserved_strides(source.shape, source.stride)), *result[1:]
    if func is aten._efficient_attention_backward.default:  # at::empty, attention_backward.cu
        gradients = (_with(gradient, contiguous_strides(gradient.shape)) for gradient in result[:3])
        return (*gradients, *result[3:])
    if func is aten.masked_fill.Scalar:
        return _masked(func, args[0], result)
    if func in _AS_FIRST:
        last = channels_last(layout(args[0]))
        return _with(result, formatted(layout(result), last).stride)
    if func is aten.log_sigmoid_forward.default:
        return result[0], result[1].new_empty(0)  # the buffer is the CPU's (Activation.cpp)
    if isinstance(result, Tensor) and (func in _IN_ORDER or _widened(func)):
        operands = [a for a in args if isinstance(a, Tensor) and a.dim() and a.numel() > 1]
        if func in _IN_ORDER or any(_expanded(a) for a in operands):
            return _with(result, _iterated(tuple(result.shape), operands))
    return result


def _masked(func: Any, source: Tensor, result: Tensor) -> Tensor:
    """``clone(MemoryFormat::Contiguous)``, then filled (Indexing.cu, v2.14.1); where autograd fills
    a tensor of its own, that keeps its strides."""
    if not inplace.of_fresh(func):
        return _with(result, contiguous_strides(result.shape))
    return _with(result, source.stride()) if is_dense(source) else result


def _widened(func: Any) -> bool:
    """Elementwise with several operands: a decomposition makes dense copies of expanded operands
    when it computes in a wider type, and then follows those. Copies, whose caller may name the
    layout (``reshape`` of an expanded tensor asks for a contiguous one), are not among them."""
    if torch.Tag.pointwise not in func.tags or func._schema.is_mutable:
        return False
    return all(argument.name != "memory_format" for argument in func._schema.arguments)


def _expanded(tensor: Tensor) -> bool:
    return any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _iterated(shape: tuple[int, ...], operands: Sequence[Tensor]) -> tuple[int, ...]:
    """The strides of a TensorIterator's own result (``TensorIteratorBase::allocate_or_resize_``):
    dense, in the order of the operands' dimensions."""
    rows = []
    for operand in operands:
        pairs = zip(operand.shape, operand.stride(), strict=True)
        strides = [0 if n == 1 else s for n, s in pairs]
        rows.append([0] * (len(shape) - len(strides)) + strides)
    result, step = [0] * len(shape), 1
    for dim in order_of(list(shape), rows):
        result[dim] = step
        step *= max(shape[dim], 1)
    return tuple(result)


def _with(result: Tensor, strides: Sequence[int]) -> Tensor:
    if tuple(result.stride()) == tuple(strides) or not result.numel():
        return result
    return result.new_empty_strided(result.shape, tuple(strides))

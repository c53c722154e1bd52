"""What cuDNN may take for a convolution besides its results: a range, for its choice is closed."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from pytest_vram.sim.kernels import Card, Span, Step, moment
from pytest_vram.sim.kernels.convolution_choice import Convolution, cudnn_channels_last


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


def workspace(
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

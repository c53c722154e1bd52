"""Memory formats: channels last or contiguous, as PyTorch tells and makes them."""

from __future__ import annotations

from pytest_vram.sim.kernels.iterator import Layout, contiguous, is_contiguous


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


def formatted(plain: Layout, last: bool) -> Layout:
    """A fresh tensor of this shape, contiguous or channels last."""
    if not last:
        return contiguous(plain.shape, plain.itemsize)
    batch, channels, *spatial = plain.shape
    inner = contiguous((batch, *spatial, channels), plain.itemsize).stride
    stride = (inner[0], inner[-1], *inner[1:-1])
    return Layout(plain.shape, stride, plain.itemsize)


def is_formatted(plain: Layout, last: bool) -> bool:
    """``is_contiguous(memory_format)``: strides of dimensions of size 1 don't count."""
    if not last:
        return is_contiguous(plain.shape, plain.stride)
    order = (0, *range(2, len(plain.shape)), 1)
    return is_contiguous([plain.shape[i] for i in order], [plain.stride[i] for i in order])

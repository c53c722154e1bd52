"""TensorIterator's view of a call: dimensions reordered by stride, merged, split below 2 GiB.

Read from ATen/TensorIterator.cpp (v2.6.0 and v2.14.1; the parts used here did not change).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

from torch import Tensor

_INT32_MAX = 2**31 - 1


class Layout(NamedTuple):
    """Shape, strides and offset (both in elements) and element size of a tensor, real or not."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    offset: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a fresh dense tensor of this shape."""
        return prod(self.shape) * self.itemsize


def layout(tensor: Tensor) -> Layout:
    return Layout(
        tuple(tensor.shape), tensor.stride(), tensor.element_size(), int(tensor.storage_offset())
    )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def contiguous(shape: Sequence[int], itemsize: int) -> Layout:
    return Layout(tuple(shape), contiguous_strides(shape), itemsize)


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that all broadcast to."""
    result = [1] * max((len(shape) for shape in shapes), default=0)
    for shape in shapes:
        for i, size in enumerate(reversed(shape), 1):
            if size != 1:
                result[-i] = size
    return tuple(result)


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    if 0 in shape:
        return True
    step = 1
    for size, distance in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1:
            if distance != step:
                return False
            step *= size
    return True


def is_flat(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether ``reshape(-1)`` is a view."""
    pairs = [(n, s) for n, s in zip(shape, stride, strict=True) if n != 1]
    return all(outer == n * inner for (_, outer), (n, inner) in pairwise(pairs))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """``is_non_overlapping_and_dense``: some order of the dimensions makes it contiguous."""
    step = 1
    for distance, size in sorted((d, n) for n, d in zip(shape, stride, strict=True) if n != 1):
        if size == 0:
            return True
        if distance != step:
            return False
        step *= size
    return True


@dataclass(slots=True)
class Dimensions:
    """The iteration space: ``shape`` fastest first, one row of byte strides per operand.

    ``offset`` is where the input's part begins, in bytes from the start of its storage.
    """

    shape: list[int]
    strides: list[list[int]]
    offset: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def fits_32bit(self) -> bool:
        """``can_use_32bit_indexing``."""
        if self.numel > _INT32_MAX:
            return False
        return all(
            sum((n - 1) * s for n, s in zip(self.shape, row, strict=True)) < _INT32_MAX
            for row in self.strides
        )

    def parts(self) -> list[Dimensions]:
        """``with_32bit_indexing``: halves of the widest dimension until every part fits, in the
        order in which they run."""
        if self.fits_32bit():
            return [self]
        widest, at = -1, 0
        for dim in reversed(range(len(self.shape))):
            for row in self.strides:
                extent = (self.shape[dim] - 1) * abs(row[dim])
                if extent > widest:
                    widest, at = extent, dim
        first = self.shape[at] // 2
        step = self.strides[-1][at]
        return [
            part
            for begin, size in ((0, first), (first, self.shape[at] - first))
            for part in Dimensions(
                [*self.shape[:at], size, *self.shape[at + 1 :]],
                self.strides,
                self.offset + begin * step,
            ).parts()
        ]


def dimensions(
    operands: Sequence[Layout], *, reduction: bool = False, outputs: int = 1
) -> Dimensions:
    """Broadcast, reorder and merge the dimensions of ``operands`` (outputs first)."""
    ndim = max((len(o.shape) for o in operands), default=0)
    shape = [1] * ndim
    for operand in operands[outputs:] if reduction else operands:
        shift = ndim - len(operand.shape)
        for i, size in enumerate(operand.shape):
            if size != 1:
                shape[shift + i] = size
    rows = []
    for operand in operands:
        shift = ndim - len(operand.shape)
        rows.append(
            [0] * shift
            + [
                0 if n == 1 and shape[shift + i] != 1 else s * operand.itemsize
                for i, (n, s) in enumerate(zip(operand.shape, operand.stride, strict=True))
            ]
        )
    order = _order(shape, rows, outputs if reduction else 0)
    shape = [shape[i] for i in order]
    rows = [[row[i] for i in order] for row in rows]
    _merge(shape, rows)
    return Dimensions(shape, rows, operands[-1].offset * operands[-1].itemsize)


def _order(shape: list[int], rows: list[list[int]], reduced_outputs: int) -> list[int]:
    """``reorder_dimensions``: fastest first; reduced dimensions before the others."""
    perm = list(reversed(range(len(shape))))

    def compare(a: int, b: int) -> int:
        for index, row in enumerate(rows):
            x, y = row[a], row[b]
            if index < reduced_outputs and (x == 0) != (y == 0):
                return 1 if y == 0 else -1
            if x == 0 or y == 0:
                continue
            if x != y:
                return -1 if x < y else 1
            if shape[a] > shape[b]:
                return 1
        return 0

    for i in range(1, len(perm)):
        at = i
        for other in range(i - 1, -1, -1):
            sign = compare(perm[other], perm[at])
            if sign > 0:
                perm[other], perm[at] = perm[at], perm[other]
                at = other
            elif sign < 0:
                break
    return perm


def order_of(shape: Sequence[int], rows: list[list[int]]) -> list[int]:
    """Dimensions, fastest first, as an elementwise iteration over ``rows`` of strides has them."""
    return _order(list(shape), rows, 0)


def _merge(shape: list[int], rows: list[list[int]]) -> None:
    """``coalesce_dimensions``, in place."""
    if len(shape) <= 1:
        return
    last = 0
    for dim in range(1, len(shape)):
        if (
            shape[last] == 1
            or shape[dim] == 1
            or all(shape[last] * row[last] == row[dim] for row in rows)
        ):
            if shape[last] == 1:
                for row in rows:
                    row[last] = row[dim]
            shape[last] *= shape[dim]
        else:
            last += 1
            if last != dim:
                for row in rows:
                    row[last] = row[dim]
                shape[last] = shape[dim]
    del shape[last + 1 :]
    for row in rows:
        del row[last + 1 :]


def preserved_strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides of ``empty_like`` with preserved format: the tensor's own where it is dense, else
    those of an elementwise result (``infer_dense_strides``)."""
    if is_dense(shape, stride):
        return tuple(stride)
    result, step = [0] * len(shape), 1
    for i in _order(list(shape), [list(stride)], 0):
        result[i] = step
        step *= max(shape[i], 1)
    return tuple(result)


def dense_like(plain: Layout, itemsize: int) -> Layout:
    """``empty_like`` with preserved format (ATen/native/TensorFactories.cpp)."""
    return Layout(plain.shape, preserved_strides(plain.shape, plain.stride), itemsize)

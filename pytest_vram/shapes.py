"""Shapes for a measured Trace: PyTorch's memory history knows bytes and operators, not shapes.

The simulation of the same test knows them. An allocation of the same size by the same operator in
the same module is the same tensor.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from pytest_vram.trace import Allocation, Trace

_Key = tuple[str, str, int]
_Shape = tuple[tuple[int, ...], str]


def borrow(measured: Trace, simulated: Trace) -> Trace:
    """``measured`` with shape and dtype filled in where ``simulated`` leaves no doubt about them.

    No figure changes. Where one key has tensors of several shapes, the n-th is the n-th, if both
    traces have equally many of them.
    """
    known = _shapes(simulated)
    wanted: dict[_Key, list[int]] = defaultdict(list)
    for index, allocation in enumerate(measured.allocations):
        wanted[_key(allocation)].append(index)
    allocations = list(measured.allocations)
    for key, indices in wanted.items():
        shapes = known.get(key, [])
        if len(set(shapes)) == 1:
            shapes = shapes[:1] * len(indices)
        if len(shapes) != len(indices):
            continue
        for index, shape in zip(indices, shapes, strict=True):
            if allocations[index].shape is None and shape is not None:
                allocations[index] = replace(allocations[index], shape=shape[0], dtype=shape[1])
    return replace(measured, allocations=allocations)


def _shapes(trace: Trace) -> dict[_Key, list[_Shape | None]]:
    """Of every allocation, in order; ``None`` for scratch, which has no shape."""
    found: dict[_Key, list[_Shape | None]] = defaultdict(list)
    for allocation in trace.allocations:
        shape = (allocation.shape, allocation.dtype) if allocation.shape is not None else None
        found[_key(allocation)].append(shape)
    return found


def _key(allocation: Allocation) -> _Key:
    return allocation.operator, allocation.module, allocation.requested

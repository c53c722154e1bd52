"""Operators on lists of tensors.

Most allocate their results in order, fused or one by one; in-place ones nothing. Read from
ATen/native/cuda/ForeachReduceOp.cu and ATen/native/ForeachUtils.h (v2.6.0, v2.14.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
)
from pytest_vram.sim.kernels.iterator import is_dense, layout
from pytest_vram.sim.kernels.reduce import Kind, reduction
from pytest_vram.sim.kernels.reductions import wide

aten = torch.ops.aten
_CHUNK = 65536


def fuses(tensors: Sequence[Tensor]) -> bool:
    """``can_use_fast_route`` for one list: one dtype, one device, dense."""
    first = tensors[0].dtype
    return all(t.dtype == first and _dense(t) for t in tensors)


def _dense(tensor: Tensor) -> bool:
    return is_dense(tensor.shape, tensor.stride())


def _chunks(tensors: Sequence[Tensor]) -> int:
    return max(-(-int(t.numel()) // _CHUNK) for t in tensors)


@rule("aten::_foreach_norm.Scalar", "aten::_foreach_powsum.Scalar")
def foreach_norm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    tensors = args[0]
    order = argument(args, kwargs, 1, "ord", 2)
    if order not in (0, 1, 2, float("inf")) or not fuses(tensors) or not _floating(tensors):
        yield from _one_by_one(tensors, outputs, card)
        return
    size = len(tensors) * _chunks(tensors) * wide(tensors[0].dtype)
    if size:
        yield Take("chunks", size, "norms of chunks of 65,536 elements")
    empty = [i for i, t in enumerate(tensors) if not t.numel()]
    yield from (Out(i) for i in range(len(tensors)) if i not in empty)
    for i in empty:
        output = outputs[i]
        assert output is not None
        yield Take("zero", output.element_size(), "norm of an empty tensor")
        yield Out(i)
        yield Give("zero")
    if size:
        yield Give("chunks")


def _floating(tensors: Sequence[Tensor]) -> bool:
    return bool(tensors[0].is_floating_point())


def _one_by_one(tensors: Sequence[Tensor], outputs: Outputs, card: Card) -> Iterator[Step]:
    """``linalg_vector_norm`` of each."""
    for i, tensor in enumerate(tensors):
        yield Out(i)
        output = outputs[i]
        if output is not None and tensor.numel():
            kind = Kind(wide(tensor.dtype))
            yield from reduction(layout(tensor), (), (layout(output),), kind, card, f"norm{i}")


@rule("aten::_foreach_max")
def foreach_max(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    tensors = args[0]
    yield from outs(outputs)
    if fuses(tensors):
        size = len(tensors) * _chunks(tensors) * tensors[0].element_size()
        yield Take("chunks", size, "maxima of chunks of 65,536 elements")
        yield Give("chunks")

"""What sparse tensors work in when equal entries are summed.

Read from ATen/native/sparse/cuda/SparseCUDATensor.cu (v2.14.1) and, for Thrust, CCCL 3.0.1:
thrust/system/cuda/detail/sort.h and unique_by_key.h.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from pytest_vram.sim.kernels import Card, Give, Out, Outputs, Span, Step, Take, cub, rule

aten = torch.ops.aten
_LONG = 8
_WHY = "how many rows are distinct is a value: all are taken to be, as many as there can be"


@rule(aten._coalesce.default)
def coalesce(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """``args`` are the indices, the values, and whether the number of distinct rows is known.

    Flattened indices are sorted by comparison, with their positions, and each is kept once; the
    result's indices live in what was sorted if there is one sparse dimension.
    """
    indices, values, certain = args
    dims, n = indices.shape
    result = outputs[1]
    assert result is not None
    if dims == 1:
        yield Out(0, n * _LONG)
    else:
        yield Take("flat", n * _LONG, "flattened indices")
    yield Take("order", n * _LONG, "where the sorted indices came from")
    yield Take("offsets", n * _LONG, "where each distinct index begins")
    yield from cub.storage(cub.merge_sort(n, _LONG, _LONG), "merge sort")
    count = 4 if n < 1 << 31 else 8
    unique = cub.unique_by_key(n, _LONG, card, count)
    yield from cub.storage(cub.alias(unique, count), "unique by key")
    # A slice would be a new tensor of the card.
    row = result.element_size() * math.prod(result.shape[1:]) * min(result.shape[0], 1)
    size = result.element_size() * math.prod(result.shape)
    yield Out(1, span=None if certain else Span("rows of a sparse gradient", _WHY, row, size))
    if not values.is_contiguous():
        yield Take("dense", values.element_size() * int(values.numel()), "contiguous values")
        yield Give("dense")
    if dims > 1:
        yield Out(0)
    yield Give("offsets")
    yield Give("order")
    if dims > 1:
        yield Give("flat")

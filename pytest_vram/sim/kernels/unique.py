"""``torch.unique`` and ``unique_consecutive``: sorted, then every value once.

Read from ATen/native/cuda/UniqueCub.cu (v2.6.0, v2.14.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    argument,
    cub,
    outs,
    rule,
    scratch,
    size_of,
)

aten = torch.ops.aten
_LONG = 8
_WHY = "CUB tiles by type and card; a tile of 128 items or more has a state of 32 bytes at most"


@rule(aten._unique2.default)
def unique(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    source: Tensor = args[0]
    inverse = bool(argument(args, kwargs, 2, "return_inverse", False))
    counts = bool(argument(args, kwargs, 3, "return_counts", False))
    if not source.numel():
        yield from outs(outputs)
    elif source.dtype is torch.bool:
        yield from _of_truths(source, inverse, counts)
    else:
        yield from _of_sorted(source, inverse, counts, card)


def _dense(source: Tensor) -> Iterator[Step]:
    if not source.is_contiguous():
        yield Take("dense", size_of(source), "contiguous copy")


def _of_sorted(source: Tensor, inverse: bool, counts: bool, card: Card) -> Iterator[Step]:
    n, item = int(source.numel()), source.element_size()
    yield from _dense(source)
    yield Take("sorted", n * item, "sorted values")
    if inverse:
        yield Take("range", n * _LONG, "positions")
        yield Take("order", n * _LONG, "sorted positions")
    sort = cub.radix_sort(n, item, _LONG if inverse else 0, card)
    yield from cub.storage(sort, "radix sort")
    if inverse:
        yield Give("range")
        yield Out(1)
        yield Take("numbers", n * _LONG, "number of each sorted value")
        yield from _tiles(n, "scan")
        yield Give("numbers")
    yield from _every_one_once(n, item, counts)
    if inverse:
        yield Give("order")
    yield Give("sorted")


@rule(aten.unique_consecutive.default)
def unique_consecutive(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    source: Tensor = args[0]
    if not source.numel():
        yield from outs(outputs)
        return
    n = int(source.numel())
    yield from _dense(source)
    if argument(args, kwargs, 1, "return_inverse", False):
        yield Out(1)
        yield Take("changes", n * 4, "where values change")
        yield from _tiles(n, "scan")
        yield Give("changes")
    counts = bool(argument(args, kwargs, 2, "return_counts", False))
    yield from _every_one_once(n, source.element_size(), counts)


def _every_one_once(n: int, item: int, counts: bool) -> Iterator[Step]:
    yield Out(0, n * item)
    yield Take("length", _LONG, "how many there are")
    if counts:
        yield Out(2, n * _LONG)
    yield from _tiles(n, "unique")
    yield Give("length")


def _tiles(n: int, what: str) -> Iterator[Step]:
    high = 32 * -(-n // 128) + 2048
    yield Take("cub", 0, f"CUB {what}", Span(f"{what}: states of tiles", _WHY, 0, high))
    yield Give("cub")


def _of_truths(source: Tensor, inverse: bool, counts: bool) -> Iterator[Step]:
    """True and False are counted, not sorted."""
    yield from _dense(source)
    yield Take("true", 4, "how many are true")
    yield from scratch(1, "CUB reduce", "cub")
    yield Out(0, 2)
    if counts:
        yield Out(2, 2 * _LONG)
    else:
        yield Take("counts", 2 * _LONG, "counts")
    if inverse:
        yield Out(1)
    if not counts:
        yield Give("counts")
    yield Give("true")

"""Embeddings: look-up, and gradients by sorted indices.

Read from ATen/native/cuda/Embedding.cu, EmbeddingBag.cu and EmbeddingBackwardKernel.cu (v2.6.0,
v2.14.1).
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
    Step,
    Take,
    argument,
    cub,
    filled_resize,
    outs,
    resized_result,
    rule,
    size_of,
    versions,
)
from pytest_vram.sim.kernels.iterator import contiguous, is_flat
from pytest_vram.sim.kernels.reductions import wide
from pytest_vram.sim.kernels.sorting import sort_steps

aten = torch.ops.aten
_ROWS_PER_THREAD = 10
_MAX_BLOCK = 1024
_ATOMIC_BLOCKS = 4  # MAX_ATOMIC_ACCUM_BLOCKS_PER_SM


@rule(aten.embedding.default)
def embedding(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """``index_select`` by the flattened indices."""
    indices = args[1]
    if indices.dim() == 1 or is_flat(tuple(indices.shape), indices.stride()):
        yield from resized_result(outputs)
        return
    yield Take("flat", size_of(indices), "flattened indices")
    yield from resized_result(outputs)
    yield Give("flat")


@rule(aten.embedding_renorm_.default)
def embedding_renorm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """The indices are sorted and each is kept once, so that no row is scaled twice
    (``embedding_renorm_cuda_``, Embedding.cu). The second buffer was seen with 2.14.1 for 12 to
    40,000 indices."""
    indices = args[1]
    n, size = int(indices.numel()), size_of(indices)
    if not n:
        return
    plain = contiguous((n,), indices.element_size())
    yield Take("sorted", size, "sorted indices")
    yield Take("order", n * 8, "order of the sorted indices")
    yield Take("keys", size, "second buffer of the sort")
    yield from sort_steps(plain, 0, plain, contiguous((n,), 8), card)
    yield Give("keys")
    yield Take("unique", size, "every index once")
    yield Take("count", 8, "number of different indices")
    yield from cub.storage(cub.select(n, card), "unique")
    for key in ("count", "unique", "order", "sorted"):
        yield Give(key)


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    grad, indices, rows = args[:3]
    by_frequency = argument(args, kwargs, 4, "scale_grad_by_freq", False)
    n, item = int(indices.numel()), indices.element_size()
    copied = [
        (key, size_of(t), why)
        for key, t, why in (
            ("indices", indices, "contiguous indices"),
            ("grad", grad, "contiguous gradient"),
        )
        if not t.is_contiguous()
    ]
    for copy in copied:
        yield Take(*copy)
    if n <= 3072 and not by_frequency:
        yield Out(0)
    else:
        yield Take("sorted", n * item, "sorted indices")
        yield Take("origin", n * item, "where the sorted indices came from")
        yield Take("range", n * item, "indices to sort along")
        yield from filled_resize(item)
        bits = rows.bit_length() if versions.sorts_by_vocabulary(card.torch) else item * 8
        yield from cub.storage(cub.radix_sort(n, item, item, card, bits), "radix sort")
        yield Give("range")
        if by_frequency:
            yield Take("count", n * item, "how often each index occurs")
            yield from cub.storage(cub.scan_by_key(n, item, card), "sum by key")
            yield from cub.storage(cub.scan_by_key(n, item, card), "maximum by key")
        yield from segments(n, item, rows, grad.shape[-1], grad.dtype, card)
        if by_frequency:
            yield Give("count")
        yield Give("origin")
        yield Give("sorted")
    for key, _, _ in reversed(copied):
        yield Give(key)


def segments(
    n: int, item: int, rows: int, columns: int, dtype: torch.dtype, card: Card, bags: bool = False
) -> Iterator[Step]:
    """``embedding_backward_cuda_kernel``: equal indices form segments, segments are cut into
    partial segments, whose sums are scattered into the gradient."""
    yield Out(0)
    yield Take("offsets", n * item, "where segments begin")
    yield Take("segments", 8, "number of segments")
    yield Take("unique", n * item, "unused unique keys")
    yield from cub.storage(cub.unique_by_key(n, item, card), "unique by key")
    yield Give("unique")
    most = min(n, rows)
    yield Take("partials", most * item, "partial segments of each segment")
    yield Take("partial_offsets", most * item, "where partial segments begin")
    yield from cub.storage(cub.scan(most, item, card), "exclusive sum")
    yield Take("partial_count", 8, "number of partial segments")
    parts = n // _ROWS_PER_THREAD + most
    yield Take("starts", parts * item, "first index of each partial segment")
    if _fused(most, parts, columns, card) and not bags:
        yield Take("owner", parts * item, "segment of each partial segment")
        if wide(dtype) != dtype.itemsize:
            yield Take("wide", rows * columns * wide(dtype), "gradient in float")
            yield Give("wide")
        yield Give("owner")
    else:
        yield Take("sums", parts * columns * wide(dtype), "sums of partial segments")
        yield Give("sums")
    for key in ("starts", "partial_count", "partial_offsets", "partials", "segments", "offsets"):
        yield Give(key)


def _fused(most: int, parts: int, columns: int, card: Card) -> bool:
    """Few large segments: since 2.11 added atomically, without sums of partial segments."""
    if not versions.fuses_embedding_segments(card.torch):
        return False
    if torch.are_deterministic_algorithms_enabled():
        return False
    warped = -(-columns // 32) * 32
    grid = -(-most * warped // min(warped, _MAX_BLOCK))
    return grid < card.profile.multiprocessors * _ATOMIC_BLOCKS and parts > grid * 4


@rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Bag sizes, the bag of each index, then the result."""
    indices, offsets = args[1], args[2]
    copied = [t for t in (indices, offsets) if not t.is_contiguous()]
    for i, t in enumerate(copied):
        yield Take(f"copy{i}", size_of(t), "contiguous indices")
    for i in (2, 1, 0, 3):
        if outputs[i] is not None:
            yield Out(i)
    for i in reversed(range(len(copied))):
        yield Give(f"copy{i}")


@rule(aten._embedding_bag_backward.default, aten._embedding_bag_dense_backward.default)
def embedding_bag_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    grad, indices = args[0], args[1]
    result = outputs[0]
    if result is not None and result.layout is torch.sparse_coo:
        yield from _sparse_bags(args, grad, int(indices.numel()))
        return
    dense = len(args) > 8 and isinstance(args[6], int)
    rows, mode = (args[6], args[8]) if dense else (args[5], args[7])
    n, item = int(indices.numel()), indices.element_size()
    if mode == 2 or n == 0:  # max
        yield from outs(outputs)
        return
    copy = not grad.is_contiguous()
    if copy:
        yield Take("grad", size_of(grad), "contiguous gradient")
    yield Take("sorted", n * item, "sorted indices")
    yield Take("origin", n * item, "where the sorted indices came from")
    yield Take("range", n * item, "indices to sort along")
    bits = rows.bit_length() if versions.sorts_by_vocabulary(card.torch) else item * 8
    yield from cub.storage(cub.radix_sort(n, item, item, card, bits), "radix sort")
    yield Give("range")
    yield from segments(n, item, rows, grad.shape[-1], grad.dtype, card, bags=True)
    yield Give("origin")
    yield Give("sorted")
    if copy:
        yield Give("grad")


def _sparse_bags(args: tuple[Any, ...], grad: Tensor, n: int) -> Iterator[Step]:
    """``_embedding_bag_sparse_backward``: the gradient of each index's bag, for a mean divided by
    the bag's size (ATen/native/EmbeddingBag.cpp, v2.14.1)."""
    yield Out(0)
    if args[8] == 1:
        bags, item = int(args[4].numel()), grad.element_size()
        yield Take("sizes", bags * item, "sizes of the bags")
        yield Take("scales", bags * item, "one over the sizes")
        yield Take("each", n * item, "scale of each index")
        for key in ("scales", "sizes", "each"):
            yield Give(key)

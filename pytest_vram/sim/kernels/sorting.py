"""Sorting, selecting and scanning.

Read from ATen/native/cuda/Sort.cpp, SortStable.cu, SortUtils.cuh, TensorTopK.cu, Randperm.cu,
ScanKernels.cpp, ScanUtils.cuh, Sorting.cpp, Bucketization.cu and SummaryOps.cu (v2.6.0, v2.14.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, log, log2
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
    moment,
    outs,
    rule,
    scratch,
    size_of,
    versions,
)
from pytest_vram.sim.kernels.iterator import (
    Layout,
    contiguous,
    dense_like,
    is_contiguous,
    is_dense,
    is_flat,
    layout,
)
from pytest_vram.sim.kernels.reduce import Kind, reduction

aten = torch.ops.aten
_LONG = 8
_SMALL_SORT = 4096
_FUSED_MODE = 2048


def _dim_last(shape: tuple[int, ...], stride: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """``infer_dense_strides_dim_last``: the sorted dimension fastest, the others as they were."""
    order = sorted((i for i in range(len(shape)) if i != dim), key=lambda i: (stride[i], -i))
    result, step = [0] * len(shape), 1
    for i in [dim, *order]:
        result[i] = step
        step *= max(shape[i], 1)
    return tuple(result)


def sort_steps(
    plain: Layout, dim: int, values: Layout | None, indices: Layout | None, card: Card
) -> Iterator[Step]:
    """``sort_cuda_kernel`` into values and indices that already exist."""
    if not plain.shape or 0 in plain.shape:
        return
    size = plain.shape[dim]
    if size <= _SMALL_SORT:
        yield from scratch(size * _LONG, "indices along the sorted dimension")
        return
    taken = []
    strides = plain.stride
    if not (is_dense(plain.shape, plain.stride) and plain.stride[dim] == 1):
        strides = _dim_last(plain.shape, plain.stride, dim)
        taken.append(Take("source", plain.nbytes, "input with the sorted dimension fastest"))
    if values is not None and values.stride != strides:
        taken.append(Take("values", plain.nbytes, "sorted values"))
    if indices is not None and indices.stride != strides:
        taken.append(Take("indices", plain.numel * _LONG, "indices of sorted values"))
    yield from taken
    yield from _segments(plain.numel, size, plain.itemsize, card)
    for step in reversed(taken):
        yield Give(step.key)


def _segments(n: int, size: int, item: int, card: Card) -> Iterator[Step]:
    """``launch_stable_sort_kernel``: few long segments one by one, some by two sorts of all, many
    by a segmented sort."""
    segments = n // size
    if segments == 1 or size >= 1_000_000:
        yield Take("positions", size * _LONG, "indices along the sorted dimension")
        for _ in range(segments):
            yield from cub.storage(cub.radix_sort(size, item, _LONG, card), "radix sort")
        yield Give("positions")
    elif segments < 128:
        yield Take("pairs", n * _LONG, "pairs of segment and index")
        yield Take("pairs2", n * _LONG, "sorted pairs of segment and index")
        yield Take("keys", n * item, "sorted keys")
        yield from cub.storage(cub.radix_sort(n, item, _LONG, card), "radix sort")
        yield Give("keys")
        bits = max(1, ceil(log2(segments)))
        yield from cub.storage(cub.radix_sort(n, _LONG, 0, card, bits), "radix sort")
        yield Give("pairs2")
        yield Give("pairs")
    else:
        yield Take("positions", n * _LONG, "indices along the sorted dimension")
        yield from cub.storage(cub.segmented_radix_sort(n, item, _LONG), "segmented sort")
        yield Give("positions")


def _sort(source: Tensor, dim: int, outputs: Outputs, card: Card) -> Iterator[Step]:
    yield from outs(outputs)
    values, indices = outputs
    assert values is not None
    assert indices is not None
    if source.dim():
        yield from sort_steps(
            layout(source), dim % source.dim(), layout(values), layout(indices), card
        )


@rule(aten.sort.default)
def sort(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    return _sort(args[0], argument(args, kwargs, 1, "dim", -1), outputs, card)


@rule(aten.sort.stable)
def sort_stable(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    return _sort(args[0], argument(args, kwargs, 2, "dim", -1), outputs, card)


@rule(aten.median.default)
def median(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    return _median(args[0], outputs, card, without_nan=False)


@rule(aten.nanmedian.default)
def nanmedian(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    return _median(args[0], outputs, card, without_nan=True)


def _median(source: Tensor, outputs: Outputs, card: Card, *, without_nan: bool) -> Iterator[Step]:
    """All elements sorted, then a flag for NaN, or the number of them (``median_impl``,
    native/cuda/Sorting.cpp)."""
    n, item = int(source.numel()), source.element_size()
    if not n:
        yield Out(0)
        return
    copied = not is_flat(tuple(source.shape), source.stride())
    flat = contiguous((n,), item)
    if copied:
        yield Take("flat", n * item, "flattened input")
    yield Take("sorted", n * item, "sorted values")
    yield Take("order", n * _LONG, "indices of sorted values")
    yield from sort_steps(flat, 0, None, None, card)
    yield Give("order")
    if without_nan:
        yield from _middle_number(flat, card)
    else:
        yield Take("nan", 1, "whether there is a NaN")
        yield Out(0)
        yield Give("nan")
    yield Give("sorted")
    if copied:
        yield Give("flat")


def _middle_number(flat: Layout, card: Card) -> Iterator[Step]:
    """Where the middle of the numbers that are none of NaN lies: ``((n - 1) - isnan().sum()) / 2``
    as an index."""
    flags = contiguous(flat.shape, 1)
    yield Take("nan", flags.nbytes, "which values are NaN")
    yield Take("count", _LONG, "number of NaN")
    counted = contiguous(flat.shape, _LONG)
    yield Take("cast", counted.nbytes, "copy of the input as int64")
    yield from reduction(counted, (), (contiguous((), _LONG),), Kind(_LONG), card)
    yield Give("cast")
    yield Take("rest", _LONG, "number of values before the last that is no NaN")
    half = torch.get_default_dtype().itemsize
    yield Take("half", half, "half of it")
    yield Take("middle", _LONG, "index of the middle value")
    for name in ("half", "rest", "count", "nan"):
        yield Give(name)
    yield Out(0)
    yield Give("middle")


@rule(aten.kthvalue.default, aten.median.dim, aten.nanmedian.dim)
def selected(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """One element of each slice, of a contiguous copy (Sorting.cpp, v2.14.1)."""
    yield from _of_dense(args[0], outputs, "input")


@rule("aten::_sample_dirichlet")
def sample_dirichlet(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Gamma samples over their sums (Distributions.cpp, ``_s_dirichlet_cuda``, v2.14.1)."""
    result = outputs[0]
    assert result is not None
    yield Out(0)
    yield from scratch(size_of(result[..., :1]), "sums of the gamma samples")


@rule(aten.mode.default)
def mode(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Slices one after the other in a contiguous copy, up to 2,048 elements of each by a kernel
    without scratch; longer ones are sorted by Thrust one by one, in the copy and along their
    positions (native/cuda/TensorModeKernel.cpp, TensorModeKernel.cu)."""
    source, dim = args[0], argument(args, kwargs, 1, "dim", -1)
    yield from outs(outputs)
    size = source.shape[dim] if source.dim() else 1
    if size <= 1 or not source.numel():
        return
    copied = size > _FUSED_MODE or not source.transpose(dim, -1).is_contiguous()
    if copied:
        yield Take("slices", size_of(source), "slices that are contiguous")
    if size > _FUSED_MODE and source.dtype is not torch.bool:
        yield Take("positions", size * _LONG, "positions of sorted values")
        why = (
            "Thrust sorts each slice and counts equal values, of which there are as many as differ"
        )
        yield from moment(Span("mode of long slices: scratch", why, 0, None))
        yield Give("positions")
    if copied:
        yield Give("slices")


def _of_dense(source: Tensor, outputs: Outputs, what: str) -> Iterator[Step]:
    copied = not source.is_contiguous()
    if copied:
        yield Take("dense", size_of(source), f"contiguous {what}")
    yield from outs(outputs)
    if copied:
        yield Give("dense")


def _several_blocks(slices: int, size: int) -> bool:
    """``should_use_multiblock``: (slices up to, elements from)."""
    for limit, least in ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000)):
        if slices <= limit:
            return size >= least
    for limit, least in ((4000, 800), (8192, 500)):
        if slices <= limit:
            return size >= least
    return slices > 8192 and size >= 300


@rule(aten.topk.default, aten.topk.values)
def topk(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    source, k = args[0], args[1]
    yield from outs(outputs)
    if not source.dim() or not source.numel() or not k:
        return
    dense = source.is_contiguous()
    if not dense:
        yield Take("dense", size_of(source), "contiguous input")
    dim = argument(args, kwargs, 2, "dim", -1) % source.dim()
    size = source.shape[dim]
    slices, item = int(source.numel()) // size, source.element_size()
    if _several_blocks(slices, size):
        yield from _topk_blocks(slices, size, item, card)
    if argument(args, kwargs, 4, "sorted", True) and k > _SMALL_SORT:
        values, indices = outputs
        assert values is not None
        assert indices is not None
        plain = layout(values)
        yield Take("order", size_of(indices), "order of the selected values")
        yield Take("picked", size_of(values), "sorted selection")
        yield from sort_steps(plain, dim, plain, layout(indices), card)
        yield from scratch(size_of(indices), "indices in order", "reordered")
        yield Give("picked")
        yield Give("order")
    if not dense:
        yield Give("dense")


@rule(aten._cummax_helper.default, aten._cummin_helper.default)
def extreme_so_far(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Results that the caller made, and a contiguous input (ScanKernels.cpp)."""
    if not args[0].is_contiguous():
        yield from scratch(size_of(args[0]), "contiguous input")


@rule(aten.cummax.default, aten.cummin.default)
def extreme_with_position(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    yield from outs(outputs)
    yield from extreme_so_far(args, kwargs, outputs, card) or ()


@rule("aten::searchsorted.Scalar", "aten::bucketize.Scalar")
def search_one(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """The number becomes a tensor on the card, and is then cast to the boundaries' type
    (``searchsorted_scalar_tensor``, BucketizationUtils.h)."""
    boundaries = args[1] if isinstance(args[1], Tensor) else args[0]
    yield Take("number", 8, "number as a tensor")
    yield Out(0)
    if boundaries.dtype not in (torch.float64, torch.int64):
        yield from scratch(boundaries.element_size(), "number in the boundaries' type", "cast")
    yield Give("number")


def _topk_blocks(slices: int, size: int, item: int, card: Card) -> Iterator[Step]:
    """``mbtopk::launch``: each slice is counted by several blocks."""
    profile = card.profile
    blocks = min(
        profile.registers_per_multiprocessor // (40 * 256), profile.blocks_per_multiprocessor
    )
    per_thread = -(-slices * size // (profile.multiprocessors * blocks * 256))
    per_thread = max(4, min(64, per_thread))
    count = -(-size // (per_thread * 256)) * slices
    bitwise = max(item, 4)
    taken = [Take("kth", slices * item, "k-th values")]
    if not versions.counts_digits_in_topk(card.torch):
        taken.append(Take("semaphores", slices * 4, "semaphores"))
    passes = 2 if versions.doubles_topk_state(card.torch) else 1
    taken += [
        Take("wanted", passes * slices * 4, "ranks to find"),
        Take("desired", passes * slices * bitwise, "digits found so far"),
        Take("counts", count * 256 * 2, "digit counts by block"),
    ]
    if versions.counts_digits_in_topk(card.torch):
        taken.append(Take("digits", slices * 256 * 4, "cumulated digit counts"))
    taken += [
        Take("within", count * 4, "values above the k-th by block"),
        Take("equal", count * 4, "values equal to the k-th by block"),
    ]
    yield from taken
    for _ in range(2):
        yield from cub.storage(cub.scan_by_key(count, 4, card), "sum by key")
    for step in reversed(taken):
        yield Give(step.key)


@rule(aten.randperm.default)
def randperm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Random keys of as many bits as make duplicates unlikely, sorted along the numbers."""
    n, result = args[0], outputs[0]
    assert result is not None
    item = result.element_size()
    yield Out(0)
    yield from scratch(item, "largest number, to see whether the type holds it")
    if not n:
        return
    bits = min(64, ceil(log2(n - (6 * n * n + 1) / (log(0.9) * 12))))
    key = 4 if bits <= 32 else 8
    yield Take("range", n * item, "numbers to permute")
    yield Take("keys", n * key, "random keys")
    yield Take("sorted", n * key, "sorted keys")
    yield from cub.storage(cub.radix_sort(n, key, item, card, bits), "radix sort")
    yield Give("sorted")
    yield Give("keys")
    yield Give("range")


@rule(
    aten.cumsum.default,
    aten.cumsum_.default,
    aten.cumprod.default,
    aten.cumprod_.default,
    aten.logcumsumexp.default,
)
def cumulate(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    source, dim, result = args[0], args[1], outputs[0]
    assert result is not None
    yield Out(0)
    n, item = int(source.numel()), result.element_size()
    if not n or not source.dim():
        return
    plain = layout(source)
    cast = source.dtype != result.dtype
    if cast:
        plain = dense_like(plain, item)
        yield Take("cast", plain.nbytes, "input in the result's type")
    copied = not is_contiguous(plain.shape, plain.stride)
    if copied:
        yield Take("dense", plain.nbytes, "contiguous input")
    if n == source.shape[dim]:
        yield from _scan(n, result, card)
    if copied:
        yield Give("dense")
    if cast:
        yield Give("cast")


def _scan(n: int, result: Tensor, card: Card) -> Iterator[Step]:
    item = result.element_size()
    if torch.are_deterministic_algorithms_enabled() and result.is_floating_point():
        threads = 128 if item >= 16 else 256 if item >= 8 else 512
        blocks = min(card.profile.multiprocessors, -(-n // (threads * 16)))
        yield from scratch(blocks * item, "sums of blocks")
        return
    primitive = result.dtype not in (torch.float16, torch.bfloat16) and not result.is_complex()
    yield from cub.storage(cub.scan(n, item, card, primitive=primitive), "scan")


@rule(aten.searchsorted.Tensor, aten.bucketize.Tensor)
def searchsorted(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Contiguous values, contiguous boundaries, one type for both."""
    bucketize = args[0].dim() > 1 and args[1].dim() == 1 and outputs[0] is not None
    bucketize = bucketize and outputs[0].shape == args[0].shape  # type: ignore[union-attr]
    values, edges = (args[0], args[1]) if bucketize else (args[1], args[0])
    yield Out(0)
    common = torch.promote_types(values.dtype, edges.dtype)
    taken = []
    for name, t in (("values", values), ("edges", edges)):
        if not t.is_contiguous():
            taken.append(Take(name, size_of(t), f"contiguous {name}"))
        if t.dtype != common:
            size = int(t.numel()) * common.itemsize
            taken.append(Take(f"{name}.cast", size, f"{name} in the common type"))
    yield from taken
    for step in reversed(taken):
        yield Give(step.key)


@rule(aten.bincount.default)
def bincount(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Weights of other types than float32 are made float64 first (native/cuda/SummaryOps.cu)."""
    source, weights = args[0], argument(args, kwargs, 1, "weights")
    cast = weights is not None and weights.dtype not in (torch.float32, torch.float64)
    if not source.numel():
        yield Out(0)
        return
    if cast:
        yield Take("weights", weights.numel() * 8, "weights in float64")
    yield from _extremes(source, card)
    yield Out(0)
    yield Give("smallest")
    yield Give("largest")
    if cast:
        yield Give("weights")


def _extremes(source: Tensor, card: Card) -> Iterator[Step]:
    item = source.element_size()
    plain = contiguous(tuple(source.shape), item)
    for name in ("smallest", "largest"):
        yield Take(name, item, f"{name} value")
        yield from reduction(plain, (), (contiguous((), item),), Kind(item), card, name)


@rule(aten.histc.default)
def histc(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Without a range the smallest and the largest value are found first."""
    source = args[0]
    low, high = (argument(args, kwargs, i, k, 0) for i, k in ((2, "min"), (3, "max")))
    yield Out(0)
    if low == high and source.numel():
        yield from _extremes(source, card)
        yield Give("smallest")
        yield Give("largest")

"""Indexing with tensors: gathers, scatters, and accumulation by sorted indices.

Read from ATen/native/cuda/Indexing.cu, ATen/native/TensorAdvancedIndexing.cpp,
ATen/native/IndexingUtils.h, ATen/native/cuda/Nonzero.cu and IndexKernel.cpp (v2.6.0, v2.14.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, prod
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
    filled_resize,
    moment,
    outs,
    resized_result,
    rule,
    scratch,
    size_of,
    versions,
)
from pytest_vram.sim.kernels.iterator import Layout, broadcast, contiguous, is_contiguous
from pytest_vram.sim.kernels.reduce import Kind, reduction

aten = torch.ops.aten
_LONG = 8


def _on_host(tensor: Tensor) -> bool:
    return bool(tensor.device.type == "cpu")


class _Index:
    """One index tensor, broadcast with the others."""

    def __init__(self, tensor: Tensor, shape: tuple[int, ...]) -> None:
        self.n = prod(shape)
        self.stride = tuple(tensor.expand(shape).stride())
        self.shape = shape
        self.contiguous = is_contiguous(shape, self.stride)
        self.host = _on_host(tensor)


def _broadcast(indices: Sequence[Tensor | None]) -> list[_Index | None]:
    shape = broadcast(*(i.shape for i in indices if i is not None))
    return [None if i is None else _Index(i, shape) for i in indices]


def _masks(indices: Sequence[Tensor | None]) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _adjacent(indices: Sequence[Any]) -> bool:
    """``hasContiguousSubspace``: no gap between the first and the last index."""
    at = [i for i, index in enumerate(indices) if index is not None]
    return not at or at[-1] - at[0] + 1 == len(at)


def _accumulate(
    target: Tensor,
    indices: Sequence[Tensor | None],
    value: Layout,
    card: Card,
    *,
    checked: bool = True,
) -> Iterator[Step]:
    """``index_put_with_sort_kernel``: linear indices, sorted with where they came from."""
    padded: list[Tensor | None] = [*indices, *[None] * (target.dim() - len(indices))]
    cast = [i for i in padded if i is not None and i.dtype != torch.int64 and not _on_host(i)]
    index = _broadcast(padded)
    known = [i for i in index if i is not None]
    n = known[0].n
    shape = tuple(target.shape)
    dense = target.is_contiguous()
    if not dense:
        yield Take("self", size_of(target), "contiguous copy of the tensor")
    for i, tensor in enumerate(cast):
        yield Take(f"long{i}", int(tensor.numel()) * _LONG, "indices as int64")
    for i, one in enumerate(known):
        yield from _wrapped(one, i, card, checked)
        if i:
            yield Give(f"linear{i}")
    for i in reversed(range(len(cast))):
        yield Give(f"long{i}")
    gap = not _adjacent(index)
    rest = [s for s, i in zip(shape, index, strict=True) if i is None]
    first = next(p for p, i in enumerate(index) if i is not None)
    before = 1 if gap else prod(shape[:first])
    slice_size = prod(rest) // max(before, 1)
    wanted = n * before * slice_size
    held = []
    if value.numel < wanted or not is_contiguous(value.shape, value.stride):
        held.append(Take("value", wanted * value.itemsize, "values, expanded and contiguous"))
    if n and slice_size:
        if gap:
            held.append(Take("moved", size_of(target), "tensor with the indexed dimensions first"))
        for key, why in (("sorted", "sorted indices"), ("origin", "where they came from")):
            held.append(Take(key, n * _LONG, why))
        held.append(Take("range", n * _LONG, "indices to sort along"))
    yield from held
    if n and slice_size:
        yield from filled_resize(_LONG)
        largest = (int(target.numel()) - 1) // slice_size
        yield from cub.storage(cub.radix_sort(n, 8, 8, card, max(1, largest.bit_length())), "sort")
    for step in reversed(held):
        yield Give(step.key)
    yield Give("linear0")
    if not dense:
        yield Give("self")


def _wrapped(index: _Index, number: int, card: Card, checked: bool) -> Iterator[Step]:
    """``wrapIndexOnce`` and the multiplication by the stride; leaves ``linear{number}`` taken.
    An index on the host is checked, wrapped and multiplied there, then moved."""
    n = index.n
    if index.host:
        yield Take(f"linear{number}", n * _LONG, "linear indices from the host")
        return
    if checked and n:
        yield from _range_check(index, card)
    yield Take("wrapped", n * _LONG, "indices without negative ones")
    yield Take(f"linear{number}", n * _LONG, "linear indices")
    yield Give("wrapped")


def _range_check(index: _Index, card: Card) -> Iterator[Step]:
    source = Layout(index.shape, index.stride, _LONG)
    result = contiguous((), _LONG)
    if versions.checks_index_range_at_once(card.torch):
        yield Take("largest", _LONG, "largest index")
        yield Take("smallest", _LONG, "smallest index")
        if not index.contiguous:
            source = contiguous(index.shape, _LONG)
            yield Take("dense", source.nbytes, "contiguous copy of the indices")
        yield from reduction(source, (), (result, result), Kind(16, in_output=False), card)
        if not index.contiguous:
            yield Give("dense")
        yield from scratch(1, "whether the largest index fits")
        yield from scratch(1, "whether the smallest index fits")
        yield Give("largest")
        yield Give("smallest")
        return
    for name in ("largest", "smallest"):
        yield Take(name, _LONG, f"{name} index")
        if not index.contiguous:
            source = contiguous(index.shape, _LONG)
            yield Take("dense", source.nbytes, "contiguous copy of the indices")
        yield from reduction(source, (), (result,), Kind(_LONG), card)
        if not index.contiguous:
            yield Give("dense")
        yield Give(name)


@rule(
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
)
def index_put(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    target, indices, value = args[:3]
    accumulate = argument(args, kwargs, 3, "accumulate", False)
    unsafe = argument(args, kwargs, 4, "unsafe", False)
    yield Out(0)
    if _masks(indices):
        mask = next(i for i in indices if i is not None)
        if accumulate or value.numel() != 1 or value.device.type != "cpu":  # else masked_fill
            yield from _positions(int(mask.numel()), 0, card)
            why = "how many elements the mask selects is a value"
            most = int(mask.numel()) * mask.dim() * _LONG
            yield from moment(Span("index_put with a mask: positions", why, 0, most), "unknown")
        return
    moved = value.device.type == "cpu" and value.dim() == 0
    if moved:
        yield Take("scalar", value.element_size(), "value from the host")
    deterministic = torch.are_deterministic_algorithms_enabled()
    if accumulate or deterministic:
        plain = Layout(tuple(value.shape), value.stride(), value.element_size())
        yield from _accumulate(target, indices, plain, card, checked=not unsafe)
    else:
        yield from _given_after(_prepared(indices))
    if moved:
        yield Give("scalar")


def _prepared(indices: Sequence[Tensor | None]) -> list[Take]:
    """What ``make_info`` makes of the indices: on the card, int64, one shape, one stride."""
    given = [i for i in indices if i is not None]
    taken = [
        Take(f"moved{i}", size_of(t), "indices from the host")
        for i, t in enumerate(given)
        if _on_host(t)
    ]
    taken += [
        Take(f"long{i}", int(t.numel()) * _LONG, "indices as int64")
        for i, t in enumerate(given)
        if t.dtype == torch.int32
    ]
    known = [i for i in _broadcast(indices) if i is not None]
    if any(i.stride != known[0].stride for i in known):
        taken += [
            Take(f"dense{i}", one.n * _LONG, "contiguous indices")
            for i, one in enumerate(known)
            if not one.contiguous
        ]
    return taken


def _given_after(taken: list[Take], inner: Sequence[Step] = ()) -> Iterator[Step]:
    yield from taken
    yield from inner
    for step in reversed(taken):
        yield Give(step.key)


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    indices = args[1]
    if _masks(indices):
        at, mask = next((p, i) for p, i in enumerate(indices) if i is not None)
        if _on_host(mask):
            return _found_on_host(mask, outputs, at)
        return _counted(int(mask.numel()), mask.dim(), outputs, card, at)
    return _given_after(_prepared(indices), list(outs(outputs)))


@rule(aten.nonzero.default)
def nonzero(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    source = args[0]
    copy = not source.is_contiguous()
    if copy:
        yield Take("dense", size_of(source), "contiguous copy of the input")
    yield from _count_nonzero(source, outputs, card)
    if copy:
        yield Give("dense")


def _count_nonzero(source: Tensor, outputs: Outputs, card: Card) -> Iterator[Step]:
    """A count, the result of that size, then the selection."""
    n = int(source.numel())
    if not n:
        yield Out(0)
        return
    yield Take("count", 4, "number of nonzero elements")
    yield from cub.storage(cub.reduce(n, 4, card), "reduce")
    yield Out(0)
    if source.dim():
        yield from cub.storage(cub.select(n, card), "select")
    yield Give("count")


def _counted(n: int, dims: int, outputs: Outputs, card: Card, at: int = 0) -> Iterator[Step]:
    """The positions of a mask's true elements, then the result: its dimension ``at`` says how many
    they are."""
    result = outputs[0]
    assert result is not None
    found = int(result.shape[at]) if result.dim() else 0
    yield from _positions(n, found * dims * _LONG, card)
    yield Out(0)
    if found:
        yield Give("positions")


def _found_on_host(mask: Tensor, outputs: Outputs, at: int) -> Iterator[Step]:
    """The positions of a mask on the host are counted there and moved."""
    result = outputs[0]
    assert result is not None
    found = int(result.shape[at]) if result.dim() else 0
    if found:
        yield Take("positions", found * mask.dim() * _LONG, "positions from the host")
    yield Out(0)
    if found:
        yield Give("positions")


def _positions(n: int, size: int, card: Card) -> Iterator[Step]:
    """``nonzero`` of a mask; leaves ``positions`` taken if ``size`` is not 0."""
    yield Take("count", 4, "number of true elements")
    yield from cub.storage(cub.reduce(n, 4, card), "reduce")
    if size:
        yield Take("positions", size, "positions of true elements")
    yield from cub.storage(cub.select(n, card), "select")
    yield Give("count")


@rule(aten.masked_select.default)
def masked_select(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    return _counted(int(args[1].numel()), args[1].dim(), outputs, card)


@rule(aten.masked_scatter.default, aten.masked_scatter_.default)
def masked_scatter(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """A prefix sum of the mask, expanded to what it masks, says where each value comes from."""
    yield Out(0)
    mask, n = args[1], int(args[0].numel())
    if n:
        yield Take("prefix", n * _LONG, "prefix sum of the mask")
        copied = int(mask.numel()) != n or not mask.is_contiguous()
        if copied:
            yield Take("mask", n, "contiguous mask")
        yield from cub.storage(cub.scan(n, 8, card), "mask sum")
        if copied:
            yield Give("mask")
        yield Give("prefix")


def _expanded(index: Tensor, dim: int) -> bool:
    """An index that was expanded from a vector along ``dim``."""
    return all(
        s == 0 or n == 1
        for d, (n, s) in enumerate(zip(index.shape, index.stride(), strict=True))
        if d != dim
    )


@rule(
    aten.scatter_add.default,
    aten.scatter_add_.default,
    aten.scatter.src,
    aten.scatter_.src,
)
def scatter(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Deterministic scatters by a vector of indices run as ``index_put``; others need nothing."""
    target, dim, index, source = args[:4]
    yield Out(0)
    if not torch.are_deterministic_algorithms_enabled() or not index.numel() or not target.dim():
        return
    dim %= target.dim()
    if target.dim() > 1 and not _expanded(index, dim):
        return
    vector = index
    for other in reversed(range(index.dim())):
        vector = vector.select(other, 0) if other != dim else vector
    plain = contiguous(tuple(index.shape), source.element_size())
    yield from _accumulate(target, (*[None] * dim, vector), plain, card)


@rule("aten::scatter_reduce.two", "aten::scatter_reduce_.two")
def scatter_reduce(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """A mean counts what it adds: ones are scattered into a count, whose zeros become ones
    (``scatter_reduce_two``, TensorAdvancedIndexing.cpp, v2.14.1)."""
    source, reduce, result = args[3], args[4], outputs[0]
    assert result is not None
    yield Out(0)
    if reduce == "mean":
        yield Take("ones", size_of(source), "ones to count with")
        yield Take("count", size_of(result), "how many values each element is the mean of")
        yield from scratch(int(result.numel()), "elements that nothing is added to")
        yield Give("count")
        yield Give("ones")


@rule(aten.index_copy.default, aten.index_copy_.default)
def index_copy(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Deterministically: ``index_put``."""
    target, dim, index, source = args[:4]
    yield Out(0)
    if torch.are_deterministic_algorithms_enabled() and index.numel() and target.dim():
        plain = Layout(tuple(source.shape), source.stride(), source.element_size())
        yield from _accumulate(target, (*[None] * (dim % target.dim()), index), plain, card)


@rule(aten.index_select.default)
def index_select(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    return resized_result(outputs)


@rule(aten.masked_scatter_backward.default)
def masked_scatter_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """The selected gradients, padded with zeros to the source's size. How many are selected
    depends on values: none, as far as shapes tell."""
    grad, mask, result = args[0], args[1], outputs[0]
    assert result is not None
    n = int(grad.numel())  # ``masked_select`` expands the mask
    copied = int(mask.numel()) != n or not mask.is_contiguous()
    if copied:
        yield Take("mask", n, "contiguous mask")
    yield Take("count", 4, "number of true elements")
    yield from cub.storage(cub.reduce(n, 4, card), "reduce")
    yield from cub.storage(cub.select(n, card), "select")
    yield Give("count")
    if copied:
        yield Give("mask")
    yield Take("padding", size_of(result), "zeros that pad the selected gradients")
    yield Out(0)
    yield Give("padding")


@rule(aten.index_add.default, aten.index_add_.default)
def index_add(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Deterministically: ``index_put`` of the scaled source."""
    target, dim, index, source = args[:4]
    yield Out(0)
    if not torch.are_deterministic_algorithms_enabled() or not index.numel():
        return
    yield Take("scaled", size_of(source), "source times alpha")
    dim %= max(target.dim(), 1)
    plain = contiguous(tuple(source.shape), source.element_size())
    yield from _accumulate(target, (*[None] * dim, index), plain, card)
    yield Give("scaled")


@rule(aten.index_reduce.default, aten.index_reduce_.default)
def index_reduce(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """The mean is divided by counts, which ``index_add_`` makes of ones (native/cuda/Indexing.cu,
    ``index_reduce_cuda_out``, v2.6.0 and v2.14.1)."""
    target, _, _, source, reduce = args[:5]
    yield Out(0)
    if reduce != "mean":
        return
    yield Take("counts", size_of(target), "rows that are averaged")
    yield from scratch(size_of(source), "ones that are counted")
    yield from scratch(int(target.numel()), "counts that are 0")
    yield Give("counts")


@rule("aten::nonzero_static")
def nonzero_static(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Counts of blocks and their prefix sums (``nonzero_static_cuda_out_impl``, Nonzero.cu): blocks
    of 8,192 elements in as many turns as it takes for one block a multiprocessor, or two where an
    element is a byte."""
    source, result = args[0], outputs[0]
    assert result is not None
    yield Out(0)
    n = int(source.numel())
    copy = not source.is_contiguous()
    if copy:
        yield Take("dense", size_of(source), "contiguous copy of the input")
    if n and result.numel():
        wanted = card.profile.multiprocessors * (2 if source.element_size() == 1 else 1)
        turns = ceil(ceil(n / 8192) / wanted)
        yield from _blocks_before(ceil(n / (8192 * turns)))
    if copy:
        yield Give("dense")


def _blocks_before(blocks: int) -> Iterator[Step]:
    yield Take("counts", blocks * 4, "nonzero elements of each block")
    yield Take("sums", blocks * 8, "nonzero elements before each block")
    yield Give("sums")
    yield Give("counts")


@rule("aten::_padded_dense_to_jagged_forward")
def padded_to_jagged(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Beside the result values that nobody reads (``_fbgemm_dense_to_jagged_forward_symint``,
    native/nested/cuda/NestedTensorTransformerFunctions.cu, v2.6.0, v2.14.1)."""
    result = outputs[0]
    assert result is not None
    yield Take("values", size_of(result), "values in the result's shape")
    yield Out(0)
    yield Give("values")

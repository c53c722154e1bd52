"""Sparse COO tensors as CUDA runs them: their gradients, sums, masks and products.

PyTorch's own fake execution forgets how many entries a sparse tensor has, or lacks these operators.
How many of an unknown index's rows are distinct is a value: as many as can be, unless the test
declares a share (``vram.assume_selected``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pytest_vram.sim import selection, values
from pytest_vram.sim.device import SimMode
from pytest_vram.sim.handlers import HANDLERS
from pytest_vram.sim.tensors import CUDA, META, SimTensor, wrap

aten = torch.ops.aten
_COO = torch.sparse_coo


def _on_card(tensor: Any) -> bool:
    return type(tensor) is SimTensor and tensor.is_cuda


def _is_coo(tensor: Any) -> bool:
    return _on_card(tensor) and tensor.layout is _COO


def _joined(indices: Tensor, entries: Tensor, like: Tensor, coalesced: bool) -> Tensor:
    return aten._sparse_coo_tensor_with_dims_and_tensors.default(  # type: ignore[no-any-return]
        like.sparse_dim(), like.dense_dim(), like.shape, indices, entries,
        dtype=entries.dtype, layout=_COO, device=CUDA, is_coalesced=coalesced,
    )  # fmt: skip


def _clone(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """A gradient that arrives first is taken as it is (``accumulateGrad``, accumulate_grad.h
    v2.6.0, v2.14.1): autograd asks how often its parts are used, and simulated parts always are."""
    source = args[0]
    if not _is_coo(source):
        return NotImplemented
    node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
    stolen = node is not None and "AccumulateGrad" in node.name() and not torch.is_grad_enabled()
    with mode:
        indices, entries = source._indices(), source._values()
        stolen = stolen and indices.is_contiguous() and entries.is_contiguous()
        if not stolen:
            entries, indices = entries.clone(), indices.clone()  # as they are allocated
        return _joined(indices, entries, source, source.is_coalesced())


_strided_copy = HANDLERS[aten._to_copy.default]


def _to_copy(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """To the card, and there to another dtype, part by part (``copy_into_sparse``,
    SparseTensor.cpp v2.6.0, v2.14.1)."""
    source, target = args[0], kwargs.get("device") or args[0].device
    if source.layout is not _COO or target.type != "cuda":
        return _strided_copy(mode, func, args, kwargs)
    there = {} if source.is_cuda else {"device": CUDA}
    with mode:
        indices = aten._to_copy.default(source._indices(), **there)
        entries = aten._to_copy.default(source._values(), dtype=kwargs.get("dtype"), **there)
        return _joined(indices, entries, source, source.is_coalesced())


# -- coalescing -----------------------------------------------------------------------------


def _distinct(source: Tensor, indices: Tensor) -> tuple[int, bool]:
    """How many entries stay, and whether that is certain."""
    entries, known = indices.shape[1], values.known(indices)
    if known is not None:
        return len({tuple(one) for one in known.t().tolist()}), True
    rows = math.prod(source.shape[: source.sparse_dim()])
    share = selection.declared_share()
    if share is not None:
        return min(round(share * entries), rows), True
    return min(entries, rows), False


def _coalesce(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``_coalesce_sparse_cuda`` (native/sparse/cuda/SparseCUDATensor.cu)."""
    source = args[0]
    if not _is_coo(source):
        return NotImplemented
    with mode:
        indices, entries = source._indices(), source._values()
        if indices.shape[1] < 2:
            entries = entries.clone()
            return _joined(indices.clone(), entries, source, True)
    count, certain = _distinct(source, indices)
    first = wrap(mode, torch.empty((indices.shape[0], count), dtype=torch.int64, device=META), CUDA)
    shape = (count, *entries.shape[1:])
    second = wrap(mode, torch.empty(shape, dtype=entries.dtype, device=META), CUDA)
    parts = (indices, entries, certain)
    mode.ledger.operator(func, parts, kwargs, [first, second], None, True)
    with mode:
        return _joined(first, second, source, True)


# -- sums -----------------------------------------------------------------------------------


def _flat_indices(indices: Tensor) -> Tensor:
    """``flatten_indices``, SparseTensorUtils.cpp: one kernel for several dimensions
    (native/sparse/FlattenIndicesCommon.h)."""
    return (
        indices.squeeze(0) if indices.shape[0] == 1 else torch.arange(indices.shape[1], device=CUDA)
    )


def _into_dense(target: Tensor, source: Tensor, alpha: Any) -> None:
    """``add_out_dense_sparse_cuda`` (native/sparse/cuda/SparseCUDATensorMath.cu): one kernel for
    coalesced entries, ``index_add_`` for others."""
    indices, entries = source._indices(), source._values().to(target.dtype)
    if not entries.numel():
        return
    if source.is_coalesced():
        if source.dense_dim():
            entries = entries.contiguous()
        return
    flat = _flat_indices(indices)
    rows = math.prod(target.shape[: indices.shape[0]])
    target.view(rows, -1).index_add_(0, flat, entries.reshape(entries.shape[0], -1), alpha=alpha)


def _together(target: Tensor, source: Tensor, alpha: Any) -> tuple[Tensor, Tensor]:
    """``add_out_sparse_cuda``: the entries of both, one behind the other."""
    added = source._values()
    if alpha != 1:
        added = added.mul(alpha)
    indices = torch.cat([target._indices(), source._indices()], 1)
    return indices, torch.cat([target._values(), added], 0)


def _add(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[:2]
    if not (_is_coo(source) and _on_card(target)):
        return NotImplemented
    alpha, in_place = kwargs.get("alpha", 1), func is aten.add_.Tensor
    with mode, torch._C._AutoDispatchBelowAutograd():
        if target.layout is not _COO:
            result = target if in_place else target.clone()
            _into_dense(result, source, alpha)
            return result
        result = _joined(*_together(target, source, alpha), target, False)
        if not in_place:
            return result
        if result._nnz() > result.numel():  # lest it grow without end
            result = result.coalesce()
    target.data = result
    return target


def _to_dense(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``sparse_to_dense`` (TensorConversions.cpp) adds the entries to zeros. PyTorch to 2.11 has no
    fake form of it."""
    source = args[0]
    if not _is_coo(source):
        return NotImplemented
    with mode, torch._C._AutoDispatchBelowAutograd():
        result = torch.zeros(source.shape, dtype=source.dtype, device=CUDA)
        _into_dense(result, source, 1)
        return result


def _negated(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """A copy, negated in place (SparseUnaryOps.cpp)."""
    source = args[0]
    if not _is_coo(source):
        return NotImplemented
    with mode:
        copy = source.clone()
        copy._values().neg_()
        return copy


def _scaled(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``intersection_binary_op_sparse_dense_out`` for a number (SparseTensorMath.cpp)."""
    source, factor = args
    if not _is_coo(source) or (isinstance(factor, Tensor) and factor.dim()):
        return NotImplemented
    with mode, torch._C._AutoDispatchBelowAutograd():
        indices, entries = source._indices().clone(), aten.mul.Tensor(source._values(), factor)
        return _joined(indices, entries, source, source.is_coalesced())


# -- masks ----------------------------------------------------------------------------------


def _sparse_mask(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``sparse_mask`` of SparseTensor.cpp multiplies by ones where the mask has entries;
    ``intersection_binary_op_sparse_dense_out`` of SparseTensorMath.cpp gathers the dense entries,
    then copies the indices and multiplies (v2.14.1)."""
    dense, mask = args
    if not (_is_coo(mask) and _on_card(dense) and dense.layout is torch.strided):
        return NotImplemented
    with mode, torch._C._AutoDispatchBelowAutograd():
        indices, entries = mask._indices(), mask._values()
        if not entries.numel():
            return mask.clone().to(dense.dtype)
        ones = torch.ones(1, dtype=entries.dtype, device=CUDA).expand_as(entries)
        gathered = aten.index.Tensor(dense, list(indices.unbind(0)))
        indices, entries = indices.clone(), gathered.mul(ones)
        del gathered, ones
        return _joined(indices, entries, mask, mask.is_coalesced())


# -- transposes and products ----------------------------------------------------------------


def _swapped(source: Tensor) -> Tensor:
    """``transpose`` of a sparse matrix: a copy whose rows of indices change places by way of a
    third (``sparse_transpose_``, TensorShape.cpp)."""
    entries, indices = source._values().clone(), source._indices().clone()
    torch.empty_like(indices[0])
    shape = (source.shape[1], source.shape[0])
    return _of_shape(shape, indices, entries, False)


def _transpose(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    if not _is_coo(source):
        return NotImplemented
    first, second = sorted(dim % source.dim() for dim in (args[1:] or (0, 1)))
    if first == second:
        return source.detach()
    if source.sparse_dim() != 2 or source.dense_dim():
        raise values.unsupported_operator(func)
    with mode, torch._C._AutoDispatchBelowAutograd():
        return _swapped(source)


def _permute(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The entries stay, the rows of indices are gathered (``permute_sparse_coo``,
    TensorShape.cpp)."""
    source, dims = args
    if not _is_coo(source):
        return NotImplemented
    order = [dim % source.dim() for dim in dims]
    if source.dense_dim():
        raise values.unsupported_operator(func)
    with mode, torch._C._AutoDispatchBelowAutograd():
        where = torch.empty(len(order), dtype=torch.int64, device=CUDA)
        indices = source._indices().index_select(0, where)
        shape = tuple(source.shape[dim] for dim in order)
        kept = source.is_coalesced() and order[:1] == [0]
        return _of_shape(shape, indices, source._values(), kept)


def _of_shape(shape: Any, indices: Tensor, entries: Tensor, coalesced: bool) -> Tensor:
    return aten._sparse_coo_tensor_with_dims_and_tensors.default(  # type: ignore[no-any-return]
        len(shape), 0, shape, indices, entries,
        dtype=entries.dtype, layout=_COO, device=CUDA, is_coalesced=coalesced,
    )  # fmt: skip


def _times(matrix: Tensor, dense: Tensor) -> Tensor:
    """``s_addmm_out_sparse_dense_cuda`` (native/sparse/cuda/SparseCUDATensorMath.cu): the indices
    as compressed rows of 32 bits; cuSPARSE wants the result by columns (SparseBlasLegacy.cpp)."""
    rows, columns = matrix.shape[0], dense.shape[1]
    result = torch.empty(rows, columns, dtype=dense.dtype, device=CUDA)
    matrix = matrix.coalesce()
    entries = matrix._nnz()
    if not entries:
        return result
    int32 = {"dtype": torch.int32, "device": CUDA}
    held = [torch.empty(rows + 1, **int32)]  # type: ignore[call-overload]
    torch.empty(entries, **int32)  # type: ignore[call-overload]
    held.append(torch.empty(entries, **int32))  # type: ignore[call-overload]
    if not _by_column(result):
        held.append(torch.empty_like(result))
    if not _by_column(dense) and dense.stride() != (columns, 1):
        held.append(dense.contiguous())
    return result


def _by_column(matrix: Tensor) -> bool:
    return matrix.stride() == (1, matrix.shape[0])


def _product(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """A product of a sparse and a dense matrix; cuSPARSE's scratch is not known. ``mm`` adds it to
    zeros, and turns a dense times a sparse one around (``_sparse_mm``, SparseTensorMath.cpp)."""
    first, second = args[-2:]
    if not (_is_coo(first) and _strided(second)):
        turned = func is aten.mm.default and _strided(first) and _is_coo(second)
        if not turned:
            return NotImplemented
    with mode, torch._C._AutoDispatchBelowAutograd():
        zeros = None
        if func is aten.mm.default:
            zeros = torch.zeros(first.shape[0], second.shape[1], dtype=second.dtype, device=CUDA)
        if _is_coo(first):
            result = _times(first, second)
        else:
            result = _times(_swapped(second), first.t()).t()
    mode.ledger.operator(func, args, kwargs, [result], None, True)
    del zeros
    return result


def _times_vector(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``mv_sparse`` (SparseTensorMath.cpp): the vector is a matrix of one column."""
    if not _is_coo(args[0]):
        return NotImplemented
    with mode, torch._C._AutoDispatchBelowAutograd():
        return aten.mm.default(args[0], args[1].unsqueeze(-1)).squeeze(-1)


def _strided(tensor: Any) -> bool:
    return _on_card(tensor) and tensor.layout is torch.strided


HANDLERS[aten._to_copy.default] = _to_copy
HANDLERS[aten.clone.default] = _clone
HANDLERS[aten._coalesce.default] = _coalesce
HANDLERS[aten.add.Tensor] = HANDLERS[aten.add_.Tensor] = _add
HANDLERS[aten._to_dense.default] = _to_dense
HANDLERS[aten.neg.default] = _negated
HANDLERS[aten.mul.Tensor] = _scaled
HANDLERS[aten.sparse_mask.default] = _sparse_mask
for _operator in (aten.mm.default, aten.addmm.default, aten._sparse_addmm.default):
    HANDLERS[_operator] = _product
HANDLERS[aten.t.default] = HANDLERS[aten.transpose.int] = _transpose
HANDLERS[aten.permute.default] = _permute
HANDLERS[aten.mv.default] = _times_vector

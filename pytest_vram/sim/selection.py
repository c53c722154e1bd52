"""Selections whose size is a value: by known masks, or by a share that the test declares.

``nonzero``, ``masked_select`` and indexing with masks allocate what the mask selects. Where the
mask's value is known (it was built on the host, or follows from the program) that decides; inside
``vram.assume_selected(share)`` an unknown mask selects that share of its elements, and that share
of unknown values is distinct (``unique``: one at the least); ``bincount`` has the bins that
``minlength`` asks for; otherwise :class:`pytest_vram.sim.values.DataDependent` names the line.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch

from pytest_vram.sim import values
from pytest_vram.sim.device import SimMode
from pytest_vram.sim.handlers import HANDLERS
from pytest_vram.sim.kernels import Span, argument
from pytest_vram.sim.tensors import CUDA, META, SimTensor, wrap

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
_share: ContextVar[float | None] = ContextVar("share", default=None)


def assume_selected(share: float) -> AbstractContextManager[None]:
    """Unknown masks select ``share`` (0 to 1) of their elements, rounded to the nearest; ``unique``
    finds so many values."""
    __tracebackhide__ = True
    if not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ValueError(f"a share lies between 0 and 1, not {share!r}")
    return _selecting(share)


def declared_share() -> float | None:
    """The share that unknown masks select here, if the test said so."""
    return _share.get()


@contextlib.contextmanager
def _selecting(share: float) -> Iterator[None]:
    token = _share.set(share)
    try:
        yield
    finally:
        _share.reset(token)


def _positions(mode: SimMode, mask: torch.Tensor, func: Any) -> SimTensor:
    """What ``mask.nonzero()`` is: int64 ``[selected, mask.dim()]``, allocated as on the card."""
    known, share = values.known(mask), _share.get()
    if known is not None:
        found = known.nonzero()
        count = int(found.shape[0])
    elif share is not None:
        found, count = None, round(share * mask.numel())
    else:
        raise values.DataDependent(values.explain(func))
    # nonzero_out_cuda writes a [dim, count] buffer and returns its transpose
    # (native/cuda/Nonzero.cu)
    elem = torch.empty((mask.dim(), count), dtype=torch.int64, device=META).t()
    out = wrap(mode, elem, CUDA)
    mode.ledger.operator(aten.nonzero.default, (mask,), {}, [out], None, True)
    if found is not None:
        values.remember(out, found)
    return out


def _nonzero(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    mask = args[0]
    if type(mask) is not SimTensor or not mask.is_cuda:
        return NotImplemented
    return _positions(mode, mask, func)


def _index(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Masks become positions first, as ``expandTensors`` does (native/IndexingUtils.h)."""
    source, indices = args
    if not _masked(source, indices):
        return NotImplemented
    expanded = _expanded(mode, indices, func)
    with mode:
        return func(source, expanded)


def _index_put(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """As :func:`_index`, where the masks' values are known: a mask on the host always, one on the
    card unless a number from the host is written, which ``masked_fill_`` does
    (TensorAdvancedIndexing.cpp, ``_index_put_impl_``)."""
    target, indices, value, *rest = args
    if not _masked(target, indices):
        return NotImplemented
    masks = [index for index in indices if index is not None and index.dtype in _MASKS]
    on_card = all(type(mask) is SimTensor for mask in masks)
    accumulate = rest[0] if rest else kwargs.get("accumulate", False)
    filled = on_card and not accumulate and value.numel() == 1 and value.device.type == "cpu"
    if filled or any(values.known(mask) is None for mask in masks):
        return NotImplemented
    expanded = _expanded(mode, indices, func)
    return mode._dispatch(func, (), (target, expanded, value, *rest), kwargs)


def _masked(source: Any, indices: Any) -> bool:
    if type(source) is not SimTensor or not source.is_cuda:
        return False
    return any(index is not None and index.dtype in _MASKS for index in indices)


def _expanded(mode: SimMode, indices: Any, func: Any) -> list[torch.Tensor | None]:
    """Positions for masks: those of a mask on the host are found there."""
    expanded: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            expanded.append(index)
        elif type(index) is not SimTensor:
            expanded.extend(index.nonzero().unbind(1))
        else:
            found = _positions(mode, index, func)
            with mode:
                expanded.extend(found.unbind(1))
            del found
    return expanded


def _masked_select(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``index`` with the mask and the source expanded against each other
    (native/cuda/IndexKernel.cpp, ``masked_select_out_cuda_impl``)."""
    source, mask = args
    if type(source) is not SimTensor or not source.is_cuda:
        return NotImplemented
    with mode:
        mask = mask if mask.dim() else mask.unsqueeze(0)
        source, mask = torch.broadcast_tensors(source, mask)  # type: ignore[no-untyped-call]
        return aten.index.Tensor(source, [mask])


def where(mode: SimMode, condition: torch.Tensor, self: torch.Tensor, other: Any) -> torch.Tensor:
    """``masked_fill_backward`` asks for ``where(mask, grad, 0)`` instead of the selected gradients
    because C++ sees tensor subclasses (autograd/FunctionsManual.cpp, v2.6.0, v2.14.1). How many are
    selected may be a value that is not known: then all of the tensor stands for them."""
    node = torch._C._current_autograd_node()
    if node is None or not node.name().startswith("MaskedFillBackward"):
        return _WHERE(condition, self, other)  # type: ignore[no-any-return]
    if values.known(condition) is not None or _share.get() is not None:
        return self.masked_select(condition)
    result: SimTensor = _WHERE(condition, self, other)
    n, item = result.numel(), result.element_size()
    why = "the sum of the gradients that a mask selects, and how many these are is a value"
    span = Span(f"{_FILLED}: selected gradients", why, 0, n * (item + 8 * result.dim() + 1))
    mode.ledger.uncertain(result, span, aten.masked_select.default)
    return result


_FILLED = "masked_fill with a trained value"
_WHERE = functools.partial(
    aten.where.ScalarOther._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd
)


def _unique(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The distinct values, where they stand, how often: as many as known values say, or the share
    of the elements."""
    source, share = args[0], _share.get()
    if type(source) is not SimTensor or not source.is_cuda or share is None:
        return NotImplemented
    consecutive = func is aten.unique_consecutive.default
    flags = args[1:] if consecutive else args[2:]
    inverse, counts, dim = (
        kwargs.get(name, flags[place] if len(flags) > place else None)
        for place, name in enumerate(("return_inverse", "return_counts", "dim"))
    )
    if values.known(source) is not None or dim is not None:
        return NotImplemented
    found = min(max(round(share * source.numel()), 1), source.numel())
    sizes = ((found,), source.shape if inverse else (0,), (found,) if counts else (0,))
    dtypes = (source.dtype, torch.int64, torch.int64)
    made = [
        wrap(mode, torch.empty(size, dtype=dtype, device=META), CUDA)
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]
    mode.ledger.operator(func, args, kwargs, made, None, True)
    return tuple(made)


def _bincount(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """With ``minlength`` as many bins as it says: programs write it to say how many there are. The
    card makes more where a value is larger (native/cuda/SummaryOps.cu)."""
    source, length = args[0], argument(args, kwargs, 2, "minlength", 0)
    if type(source) is not SimTensor or not source.is_cuda or not length:
        return NotImplemented
    if values.known(source) is not None:
        return NotImplemented
    weights = argument(args, kwargs, 1, "weights")
    dtype = torch.int64
    if weights is not None:
        dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
    made = wrap(mode, torch.empty(length, dtype=dtype, device=META), CUDA)
    mode.ledger.operator(func, args, kwargs, [made], None, True)
    return made


HANDLERS[aten.nonzero.default] = _nonzero
HANDLERS[aten.bincount.default] = _bincount
HANDLERS[aten._unique2.default] = HANDLERS[aten.unique_consecutive.default] = _unique
HANDLERS[aten.index.Tensor] = _index
for _put in (aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index_put):
    HANDLERS[_put.default] = _index_put
HANDLERS[aten.masked_select.default] = _masked_select

"""Tensors of zeros that take no memory (``_efficientzerotensor``): the gradient of ``sgn``, the
tangents that forward mode was not given.

Read from ATen/native/BinaryOps.cpp (``add_zerotensor`` and its kin) and ATen/ZeroTensorFallback.cpp
(v2.14.1): sums and products with them are known without a kernel, views stay what they are, and
every other operator is handed a single zero that is expanded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map, tree_map_only

from pytest_vram.sim import inplace
from pytest_vram.sim.handlers import HANDLERS
from pytest_vram.sim.tensors import CUDA, META, SimTensor, wrap

if TYPE_CHECKING:
    from pytest_vram.sim.device import SimMode

aten = torch.ops.aten

_MARK = "sim_zeros"

#: As C++ runs them on zeros: (operator, whether a product).
_COMBINED = {
    aten.add.Tensor: False, aten.add.Scalar: False,
    aten.sub.Tensor: False, aten.sub.Scalar: False,
    aten.mul.Tensor: True, aten.mul.Scalar: True,
    aten.div.Tensor: True, aten.div.Scalar: True,
}  # fmt: skip

#: Those that the fallback lets through.
_UNCONCERNED = {
    aten.clone.default, aten.copy_.default, aten.zeros_like.default, aten.empty_like.default,
}  # fmt: skip


def _of(tensor: Any) -> bool:
    return type(tensor) is SimTensor and _MARK in tensor.__dict__


def _zeros(mode: SimMode, shaped: Any) -> Any:
    """Zeros in the shapes of ``shaped``, a meta tensor or several; the books never hear of them."""

    def make(meta: torch.Tensor) -> SimTensor:
        made = wrap(mode, meta, CUDA)
        made.__dict__[_MARK] = True
        mode.zeros = True
        return made

    return tree_map_only(torch.Tensor, make, shaped)


def _efficient(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return _zeros(mode, torch.empty(args[0], dtype=dtype, device=META))


HANDLERS[aten._efficientzerotensor.default] = _efficient


def answered(mode: SimMode, func: Any, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
    """What ``func`` gives for zeros among its arguments; NotImplemented where there are none."""
    zeros = [tensor for tensor in tensors if _of(tensor)]
    if not zeros or func in _UNCONCERNED:
        return NotImplemented
    if func.is_view or func is aten.detach.default:
        return _zeros(mode, func(_shape_of(args[0]), *args[1:], **kwargs))
    # ``accumulate`` (autograd/input_buffer.cpp) adds zeros into a gradient, and into zeros nothing
    if not _of(args[0]) and inplace.takes_over(func, args, mode.added_in_place, mode.ledger):
        _one(mode, zeros[0])
        result = wrap(mode, _shape_of(args[0]), CUDA)
        mode.ledger.in_place(func, args, kwargs, result)
        return result
    if func in _COMBINED:
        for zero in zeros:  # on its way to the meta device, which says shape and type
            _one(mode, zero)
        return _combined(mode, func, args, kwargs, len(zeros))
    replaced = tree_map(lambda leaf: _one(mode, leaf) if _of(leaf) else leaf, (args, kwargs))
    return _ordinary(mode, func, *replaced)


def _shape_of(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _one(mode: SimMode, zero: SimTensor) -> torch.Tensor:
    """A single zero in the zeros' shape."""
    with mode:
        return torch.zeros((), dtype=zero.dtype, device=CUDA).expand(zero.shape)


def _ordinary(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    mode.zeros = False
    try:
        return mode._dispatch(func, (), args, kwargs)
    finally:
        mode.zeros = True


def _combined(mode: SimMode, func: Any, args: Any, kwargs: Any, count: int) -> Any:
    first, second = args[:2]
    shaped = func(*map(_shape_of, args), **kwargs)
    if func is aten.div.Tensor and _of(second):
        with mode:
            return torch.full(shaped.shape, math.nan, dtype=shaped.dtype, device=CUDA)
    if _COMBINED[func] or count == 2:
        return _zeros(mode, shaped)
    if not isinstance(second, torch.Tensor):
        with mode:
            return torch.full(shaped.shape, second, dtype=shaped.dtype, device=CUDA)
    other = second if _of(first) else first
    with mode:
        copy = aten._to_copy.default(other.expand(shaped.shape), dtype=shaped.dtype)
        factor = kwargs.get("alpha", 1) * (-1 if func is aten.sub.Tensor else 1)
        return copy if other is first or factor == 1 else copy * factor

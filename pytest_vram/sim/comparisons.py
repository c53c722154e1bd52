"""Comparisons that C++ composes of other operators, as a card runs them.

Read from ATen/native/TensorCompare.cpp, BinaryOps.cpp and ATen/native/cuda/TensorCompare.cu
(v2.6.0, v2.14.1). Where C++ asks ``isTensorSubclassLike`` a card's tensors are none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_vram.sim import values
from pytest_vram.sim.handlers import HANDLERS
from pytest_vram.sim.tensors import SimTensor

aten = torch.ops.aten


def isclose(
    self: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Tensor:
    if self.dtype is not other.dtype:
        raise RuntimeError(f"{_named(self.dtype)} did not match {_named(other.dtype)}")
    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if not tolerance >= 0:
            raise RuntimeError(
                f"{name} must be greater than or equal to zero, but got {tolerance:g}"
            )
    whole = not (self.is_floating_point() or self.is_complex())
    close = self == other
    if equal_nan and not whole:
        mine, theirs = self.isnan(), other.isnan()
        if mine.shape == theirs.shape:
            close |= mine.__iand__(theirs)
        else:
            close |= mine & theirs
        del theirs, mine
    if rtol == 0 and atol == 0:
        return close
    if self.dtype is torch.bool:
        self = self.to(torch.get_default_dtype())
    if whole:
        other = other.to(torch.get_default_dtype())
    scaled = other * rtol
    magnitude = scaled.abs()
    allowed = magnitude + atol
    del magnitude, scaled
    difference = self - other
    actual = difference.abs()
    del difference
    finite = actual.isfinite()
    within = actual <= allowed
    finite &= within
    close |= finite
    del within, finite, actual, allowed, other, self  # as C++ does it: last to first
    return close


def _named(dtype: torch.dtype) -> str:
    return {torch.float32: "Float", torch.float64: "Double", torch.float16: "Half",
            torch.int64: "Long", torch.int32: "Int", torch.bool: "Bool"}.get(
                dtype, str(dtype)[6:].capitalize())  # fmt: skip


def _allclose(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """``isclose(...).all()``, whose value is asked."""
    if any(type(t) is SimTensor and t.is_cuda for t in args[:2]):
        with mode:
            close = isclose(*args, **kwargs)
            close.all()
    return values.equal(args[0], args[1])


def _isin(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Few values are compared with each element; more are sorted among the elements, from which
    repeated ones are removed first unless there are none (``isin_Tensor_Tensor_out``)."""
    elements, wanted = args[:2]
    unique, invert = (kwargs.get(name, False) for name in ("assume_unique", "invert"))
    if not isinstance(elements, SimTensor) or not elements.is_cuda or not elements.numel():
        return NotImplemented
    few = wanted.numel() < 10 * elements.numel() ** 0.145
    if not few and not unique and (values.known(elements) is None or values.known(wanted) is None):
        return NotImplemented  # how many differ is not known
    with mode:
        out = torch.empty(elements.shape, dtype=torch.bool, device=elements.device)
        if few:
            theirs = wanted.view((1,) * elements.dim() + (-1,))
            mine = elements.unsqueeze(-1)
            flags = mine.ne(theirs) if invert else mine.eq(theirs)
            found = flags.all(-1) if invert else flags.any(-1)
            out.copy_(found)
            del found, flags
        else:
            _by_sorting(elements, wanted, unique, invert, out)
    return out


def _by_sorting(elements: Tensor, wanted: Tensor, unique: bool, invert: bool, out: Tensor) -> None:
    """``isin_sorting``"""
    places = None
    if unique:
        joined = torch.cat([elements.ravel(), wanted.ravel()])
    else:
        mine, places, _ = aten._unique2(elements, sorted=False, return_inverse=True)
        theirs = aten._unique2(wanted, sorted=False)[0]
        joined = torch.cat([mine, theirs])
        del mine, theirs
    ordered, order = joined.sort(stable=True, dim=0)
    repeated = torch.empty_like(ordered, dtype=torch.bool)
    later, earlier = ordered[1:], ordered[:-1]
    same = later.ne(earlier) if invert else later.eq(earlier)
    repeated[:-1].copy_(same)
    del same
    repeated[-1].fill_(invert)
    mask = torch.empty_like(repeated)
    mask.index_copy_(0, order, repeated)
    if places is None:
        out.copy_(mask[: elements.numel()].view_as(out))
    else:
        found = mask[places]
        out.copy_(found)
        del found
    del mask, repeated, later, earlier, order, ordered, joined


def _ldexp(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A kernel where whole exponents meet floating numbers; else ``x * 2 ** other``, a two of
    ``x``'s type where that is not the default one."""
    source, exponent = args
    whole = not (exponent.is_floating_point() or exponent.is_complex())
    if not isinstance(source, SimTensor) or not source.is_cuda:
        return NotImplemented
    if source.is_floating_point() and whole and exponent.dtype is not torch.bool:
        return NotImplemented
    with mode:
        power = _power_of_two(source, exponent)
        result = source * power
        del power
    return result


def _power_of_two(source: Tensor, exponent: Tensor) -> Tensor:
    if source.is_floating_point() and source.dtype is not torch.get_default_dtype():
        two = torch.full((), 2.0, dtype=source.dtype, device=source.device)
        return torch.pow(two, exponent)
    return torch.pow(2.0, exponent)


HANDLERS[aten.allclose.default] = _allclose
HANDLERS[aten.isin.Tensor_Tensor] = _isin
HANDLERS[aten.ldexp.Tensor] = _ldexp

#: Composites that autograd takes apart.
COMPOSITES = {"isclose": isclose}

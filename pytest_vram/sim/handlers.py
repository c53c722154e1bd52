"""Operators that need more than shapes: those that read values, cross to the host, or pack."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pytest_vram.sim import values
from pytest_vram.sim.kernels import rnn
from pytest_vram.sim.tensors import CUDA, META, SimTensor, wrap

if TYPE_CHECKING:
    from pytest_vram.sim.device import SimMode

aten = torch.ops.aten

#: Operators that need more than shapes: func -> handler(mode, func, args, kwargs) -> result or
#: NotImplemented.
HANDLERS: dict[Any, Callable[[SimMode, Any, tuple[Any, ...], dict[str, Any]], Any]] = {}


def _handles(*overloads: Any) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        for overload in overloads:
            HANDLERS[overload] = function
        return function

    return register


@_handles(aten._local_scalar_dense.default)
def _read_scalar(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    return values.scalar(args[0])


@_handles(aten.equal.default)
def _read_equal(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    first, second = args[:2]
    on_gpu = any(type(t) is SimTensor and t.is_cuda for t in (first, second))
    mode.ledger.operator(func, args, kwargs, [], None, on_gpu)
    return values.equal(first, second)


@_handles(aten.record_stream.default)
def _record_stream(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    mode.ledger.record_stream(args[0], args[1])
    return None


@_handles(aten._pin_memory.default, aten.pin_memory.default)
def _pin(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


@_handles(aten.lift_fresh.default, aten.lift.default)
def _lift(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.tensor(...)``: data that the program wrote down, so its values are known."""
    return args[0]


@_handles(aten._to_copy.default)
def _to_copy(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    source, target = args[0], kwargs.get("device")
    here = isinstance(source, SimTensor)
    if target is None or target.type == source.device.type:
        return NotImplemented
    if target.type == "cpu" and here:
        host = values.to_host(mode, source, kwargs)
        mode.ledger.operator(func, args, kwargs, [host], None, source.is_cuda)
        return host
    if not here and target.type == "cuda" and source.layout is torch.strided:
        return _upload(mode, func, source, kwargs)
    return NotImplemented


def _upload(mode: SimMode, func: Any, source: torch.Tensor, kwargs: Any) -> SimTensor:
    """A host tensor goes to the GPU: a new block, and the value kept beside it if small."""
    shape_of = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=META)
    options = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format") and v is not None}
    elem = torch.ops.aten._to_copy.default(shape_of, **options)
    tensor = wrap(mode, elem, CUDA)
    mode.ledger.operator(func, (source,), kwargs, [tensor], None, True)
    values.remember(tensor, source, options.get("dtype"))
    return tensor


@_handles(aten.copy_.default, aten._copy_from_and_resize.default)
def _copy(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[0], args[1]
    if isinstance(target, SimTensor):
        return NotImplemented
    if type(source) is SimTensor:
        mode.ledger.operator(func, args, kwargs, [target], None, source.is_cuda)
    values.fill_host(target, source)
    return target


@_handles(
    aten._foreach_addcmul.Tensor,
    aten._foreach_addcmul_.Tensor,
    aten._foreach_addcdiv.Tensor,
    aten._foreach_addcdiv_.Tensor,
)
def _foreach_by_tensor(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """A host tensor of factors is read into a list (``convert_tensor_to_scalar_list``,
    native/cuda/ForeachPointwiseOp.cu); fake execution would move it to ``meta``."""
    factors = values.known(args[3])
    if factors is None or args[3].is_cuda:
        return NotImplemented
    with mode:
        packet = getattr(aten, func._opname)
        return packet.ScalarList(*args[:3], factors.tolist())


@_handles(aten._pack_padded_sequence.default)
def _pack(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Packing reads the lengths, which lie on the host."""
    source, lengths, batch_first = args
    known = values.known(lengths)
    if known is None or not isinstance(source, SimTensor):
        return NotImplemented
    ends = [int(length) for length in known]
    if min(ends) <= 0:
        raise RuntimeError("Length of all samples has to be greater than 0")
    sizes = rnn.packed_sizes(ends)
    rest = source.shape[2:]
    elem = torch.empty((sum(ends), *rest), dtype=source.dtype, device=META)
    data = wrap(mode, elem, source.device)
    mode.ledger.operator(func, (source, known, batch_first), kwargs, [data], None, source.is_cuda)
    return data, torch.tensor(sizes, dtype=torch.int64)


@_handles(
    *[
        op
        for op in (getattr(getattr(aten, "_grouped_mm", None), "default", None),)
        if op is not None
    ]
)
def _grouped_mm(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """PyTorch's meta kernel only knows bfloat16; CUDA multiplies the groups one by one in any
    floating type (native/cuda/GroupedBlas.cpp, ``_grouped_mm_fallback``)."""
    first, second = args[0], args[1]
    if first.dtype is torch.bfloat16 or first.dtype is not second.dtype:
        return NotImplemented
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    groups = offsets.shape[0] if offsets is not None else 0
    if first.dim() == 2 and second.dim() == 2:
        shape: tuple[int, ...] = (groups, first.shape[0], second.shape[1])
    elif first.dim() == 2:
        shape = (first.shape[0], second.shape[2])
    elif second.dim() == 2:
        shape = (first.shape[1], second.shape[1])
    else:
        shape = (first.shape[0], first.shape[1], second.shape[2])
    out = wrap(mode, torch.empty(shape, dtype=first.dtype, device=META), CUDA)
    mode.ledger.operator(func, args, kwargs, [out], None, True)
    return out

"""Values on a device that has none: what the program itself determined, and a policy for the rest.

A simulated tensor has no values. Small tensors whose value follows from the program alone (copies
of host tensors, ``zeros``, ``ones``, ``full``, ``arange`` and what is computed from them) keep it
on the side, so that reads of masks, positions, counters and loss scales answer truly; so does what
one known operand settles (``anything | True``). For every other read:

* ``bool``: False (flags such as "an overflow was found" mean that nothing happened; but values are
  finite, the arguments of ``torch.distributions`` are valid, and what the program asserts is true);
* floating point: 1.0; integers: 1 (``UNKNOWN_INT``);
* reads that decide how much is allocated (``nonzero``, masks as indices, ``repeat_interleave``
  with a tensor, ``unique``) raise :class:`DataDependent`, which names the user's line.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pytest_vram.sim.patching import Patches
from pytest_vram.sim.tensors import CPU, REAL_ON_HOST, SimTensor

aten = torch.ops.aten

#: Values are kept for integer and bool tensors up to this many elements, and for floating-point
#: ones up to FLOAT_LIMIT (scales, counters, flags).
LIMIT = 1 << 16
FLOAT_LIMIT = 64

UNKNOWN_BOOL, UNKNOWN_FLOAT, UNKNOWN_INT = False, 1.0, 1


class DataDependent(RuntimeError):  # noqa: N818
    """A value that the simulation does not have decides what happens next."""


class NoSimulatedKernel(NotImplementedError):  # noqa: N818
    """An operator without a shape rule: PyTorch calls it a fake (or meta) implementation."""


def real_tensor(func: Any, tensor: torch.Tensor) -> NoSimulatedKernel:
    """A tensor lies on the real card: it was made before the simulation began."""
    from pytest_vram.frames import user_line

    return NoSimulatedKernel(
        f"{func} at {user_line()} was given a tensor that lies on the real card "
        f"({tensor.dtype}, {list(tensor.shape)}), from before the pass; make it in the test or in "
        "a fixture of function scope"
    )


# -- keeping values -------------------------------------------------------------------------


def _keeps(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    kind = dtype or tensor.dtype
    limit = FLOAT_LIMIT if kind.is_floating_point or kind.is_complex else LIMIT
    return tensor.numel() <= limit


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def remember(tensor: SimTensor, value: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Keep a copy of ``value`` (a host tensor) as what ``tensor`` holds."""
    if type(value) is SimTensor or not _keeps(tensor, dtype):
        return
    kept = value.detach().to(dtype=dtype or value.dtype, copy=True)
    tensor.sim_value = (kept, _version(tensor))


def take_over(tensor: SimTensor, source: SimTensor) -> None:
    """``tensor.data = source`` has happened: device and value are ``source``'s too."""
    for name in ("_fake_device", "fake_device"):
        if name in source.__dict__:
            tensor.__dict__[name] = source.__dict__[name]
    value = known(source)
    tensor.sim_value = None if value is None else (value, _version(tensor))


def known(tensor: Any) -> torch.Tensor | None:
    """The value on the host, or None. Host tensors are their own value."""
    if type(tensor) is not SimTensor:
        return tensor.detach() if isinstance(tensor, torch.Tensor) else None
    kept = tensor.sim_value
    if kept is None:
        return None
    version = _version(tensor)
    if version == kept[1] or (len(kept) == 3 and version == kept[2]):
        return kept[0]  # type: ignore[no-any-return]
    tensor.sim_value = None
    return None


_CONSTANT_FACTORIES = {
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.eye.default,
    aten.scalar_tensor.default,
    aten.tril_indices.default,
    aten.triu_indices.default,
    aten.linspace.default,
}


def from_factory(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Constants that the program asked for have a known value."""
    if func in _CONSTANT_FACTORIES and type(result) is SimTensor and _keeps(result):
        value = func(*args, **{**kwargs, "device": CPU, "pin_memory": False} if "pin_memory"
                     in kwargs else {**kwargs, "device": CPU})  # fmt: skip
        result.sim_value = (value, _version(result))


#: In-place operators after which the target's value is known whatever it was before.
_OVERWRITES = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.copy_.default}


#: Operators that one operand decides alone, where all of it is this: ``x | True``, ``x & 0``.
_DECIDES: dict[Any, bool] = {
    aten.logical_or.default: True,
    aten.logical_or_.default: True,
    aten.bitwise_or.Tensor: True,
    aten.bitwise_or_.Tensor: True,
    aten.logical_and.default: False,
    aten.logical_and_.default: False,
    aten.bitwise_and.Tensor: False,
    aten.bitwise_and_.Tensor: False,
}


def _decided(func: Any, operands: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """The result of an operator of which not every operand is known, if one settles it."""
    decisive = _DECIDES.get(func)
    if decisive is None or (decisive and dtype is not torch.bool):
        return None
    for operand in operands:
        value = known(operand)
        if value is not None and bool((value.bool() == decisive).all()):
            return torch.full(shape, decisive, dtype=dtype)
    return None


#: Reductions that are computed of a value of any size: such values are one element, repeated.
_SETTLES = {aten.all.default, aten.any.default}


def trust_values(held: Patches) -> None:
    """``torch.isfinite`` answers yes: nothing overflows in a simulation. Its operators run (it is
    put together from others before anything is dispatched)."""

    def trusting(check: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(check)
        def checked(*args: Any, **kwargs: Any) -> Any:
            result = check(*args, **kwargs)
            if type(result) is SimTensor and known(result) is None:
                yes = torch.ones((), dtype=torch.bool).expand(result.shape)
                result.sim_value = (yes, _version(result))
            return result

        return checked

    for owner in (torch, torch.Tensor):
        held.set(owner, "isfinite", trusting(owner.isfinite))


def concerned(func: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether values may follow this call: an operand's is known, or one is overwritten."""
    if func in _OVERWRITES:
        return _keeps(tensors[0])
    return any(type(t) is SimTensor and t.sim_value is not None for t in tensors)


def propagate(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Compute ``result``'s value where every tensor argument's value is known and small."""
    outputs = [leaf for leaf in tree_leaves(result) if type(leaf) is SimTensor]
    schema = func._schema
    mutates = schema.is_mutable
    if mutates:
        _mutate(func, args, kwargs)
        return
    if not outputs or not all(_keeps(out) for out in outputs):
        return
    if torch.Tag.nondeterministic_seeded in func.tags:
        return
    missing = False

    def value_of(leaf: Any) -> Any:
        nonlocal missing
        if isinstance(leaf, torch.Tensor):
            value = known(leaf)
            if value is None or (value.numel() > LIMIT and func not in _SETTLES):
                missing = True
            return value
        return CPU if isinstance(leaf, torch.device) else leaf

    host_args, host_kwargs = tree_map(value_of, (args, kwargs))
    if missing:
        decided = _decided(func, args, outputs[0].shape, outputs[0].dtype)
        if decided is not None:
            outputs[0].sim_value = (decided, _version(outputs[0]))
        return
    try:
        computed = func(*host_args, **host_kwargs)
    except Exception:  # a kernel the host lacks: the value is simply not known
        return
    # A view counts with its base once autograd has made it one, which may come after this.
    is_view = schema.returns[0].alias_info is not None and type(args[0]) is SimTensor
    for out, value in zip(outputs, tree_leaves(computed), strict=False):
        if isinstance(value, torch.Tensor) and value.shape == out.shape:
            version = _version(out)
            out.sim_value = (value, version, _version(args[0]) if is_view else version)


def _mutate(func: Any, args: Any, kwargs: Any) -> None:
    """In-place operators: autograd raises the version after them, which drops stale values by
    itself; where all operands are known the new value is kept for the version to come."""
    if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
        found_inf = args[1]  # nothing overflows in a simulation: the flag stays what it was
        if type(found_inf) is SimTensor and found_inf.sim_value is not None:
            _rewritten(found_inf, found_inf.sim_value[0])
        return
    target = args[0] if args else None
    if type(target) is not SimTensor or not _keeps(target):
        return
    decided = _decided(func, args, target.shape, target.dtype)
    if decided is not None:
        _rewritten(target, decided)
        return
    rest = (args[1:], kwargs)
    host_rest = tree_map(lambda leaf: known(leaf) if isinstance(leaf, torch.Tensor) else leaf, rest)
    inputs = [leaf for leaf in tree_leaves(rest) if isinstance(leaf, torch.Tensor)]
    if any(known(leaf) is None for leaf in inputs):
        return
    whole = func in _OVERWRITES
    value = known(target)
    if value is None:
        if not whole:
            return
        value = torch.empty(target.shape, dtype=target.dtype)
    value = value.clone()
    try:
        func(value, *host_rest[0], **host_rest[1])
    except Exception:  # as above; the version, raised meanwhile, has dropped the old value
        return
    _rewritten(target, value)


def _rewritten(target: SimTensor, value: torch.Tensor) -> None:
    """Autograd counts the write after the operator returns, if at all (``no_grad`` foreach
    operators do not): both versions are the new value's."""
    version = _version(target)
    target.sim_value = (value, version, version if target.is_inference() else version + 1)


# -- checks of arguments --------------------------------------------------------------------

_checks_hold: ContextVar[bool] = ContextVar("checks_hold", default=False)


def trust_distributions(held: Patches) -> None:
    """``torch.distributions`` asks the values of its arguments whether they are valid (__init__ and
    _validate_sample, distributions/distribution.py, 2.6 to 2.14). Its operators run; yes is the
    answer. So it is where ``VonMises.sample`` asks whether it may stop drawing (von_mises.py)."""
    from torch.distributions import Distribution, VonMises

    def trusting(check: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(check)
        def checked(*args: Any, **kwargs: Any) -> Any:
            token = _checks_hold.set(True)
            try:
                return check(*args, **kwargs)
            finally:
                _checks_hold.reset(token)

        return checked

    for owner, name in (
        (Distribution, "__init__"),
        (Distribution, "_validate_sample"),
        (VonMises, "sample"),
    ):
        held.set(owner, name, trusting(getattr(owner, name)))


@functools.lru_cache(maxsize=1024)
def _without_error(code: CodeType, offset: int) -> bool | None:
    """What the conditional jump at ``offset`` has to be told so that no error is raised; None where
    it decides something else."""
    found = [step for step in dis.get_instructions(code) if step.opname not in _NO_STEP]
    at = {step.offset: index for index, step in enumerate(found)}
    index = at.get(offset)
    if index is not None and found[index].opname == "TO_BOOL":
        index += 1
    if index is None or "JUMP" not in found[index].opname or index + 1 == len(found):
        return None
    jumps_if = "IF_TRUE" in found[index].opname
    if _raises(found[index + 1 :]):
        return jumps_if
    target = at.get(found[index].argval)
    return not jumps_if if target is not None and _raises(found[target:]) else None


_NO_STEP = {"CACHE", "NOT_TAKEN", "EXTENDED_ARG"}


def _raises(steps: list[dis.Instruction]) -> bool:
    """Whether these instructions raise before they go anywhere else."""
    for step in steps:
        if step.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in step.opname or "RETURN" in step.opname or "FOR_ITER" in step.opname:
            return False
    return False


def asserted(frame: FrameType | None) -> bool:
    """Whether the truth that is read now is that of an ``assert``, or of an ``if`` that raises, and
    True lets it pass. Programs check what holds for their data (boxes with corners in order, labels
    below a number): it would hold for real values."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_INNER):
        frame = frame.f_back
    return frame is not None and _without_error(frame.f_code, frame.f_lasti) is True


_INNER = ("pytest_vram.", "torch._", "torch.utils.")


# -- reading values -------------------------------------------------------------------------


def scalar(tensor: torch.Tensor) -> Any:
    """What ``tensor.item()`` answers."""
    value = known(tensor)
    if value is not None:
        return aten._local_scalar_dense.default(value)
    if tensor.dtype is torch.bool:
        return UNKNOWN_BOOL or _checks_hold.get() or asserted(sys._getframe())
    if tensor.dtype.is_complex:
        return complex(UNKNOWN_FLOAT)
    return UNKNOWN_FLOAT if tensor.dtype.is_floating_point else UNKNOWN_INT


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape:
        return False
    one, other = known(left), known(right)
    return bool(torch.equal(one, other)) if one is not None and other is not None else True


def on_host(tensor: SimTensor) -> torch.Tensor:
    """A real tensor of the same shape: the known value, or the policy's everywhere."""
    value = known(tensor)
    if value is not None:
        return value.clone()
    fill = UNKNOWN_FLOAT if tensor.dtype.is_floating_point else UNKNOWN_INT
    with torch._C._DisableTorchDispatch():
        host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return host.fill_(UNKNOWN_BOOL if tensor.dtype is torch.bool else fill)


def to_host(mode: Any, source: SimTensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """``tensor.cpu()``: a real host tensor while it is small, else a simulated one."""
    from pytest_vram.sim.tensors import META, wrap

    options = {k: v for k, v in kwargs.items() if k == "memory_format" and v is not None}
    options["dtype"] = kwargs.get("dtype") or source.dtype
    if source.numel() <= REAL_ON_HOST:
        return aten._to_copy.default(on_host(source), **options)  # type: ignore[no-any-return]
    elem = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=META)
    return wrap(mode, aten._to_copy.default(elem, **options), CPU)


def fill_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """``host.copy_(device)``: real where the value is known, else what it was."""
    value = known(source)
    if value is not None and type(target) is not SimTensor:
        target.detach().copy_(value)


# -- values that decide ---------------------------------------------------------------------


def data_dependent(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Operators whose output's shape is a value: run on known values, or say what is missing."""
    missing = False

    def value_of(leaf: Any) -> Any:
        nonlocal missing
        if isinstance(leaf, torch.Tensor):
            value = known(leaf)
            missing = missing or value is None
            return value
        return CPU if isinstance(leaf, torch.device) else leaf

    host_args, host_kwargs = tree_map(value_of, (args, kwargs))
    if missing:
        raise DataDependent(explain(func))
    computed = func(*host_args, **host_kwargs)
    return tree_map(
        lambda leaf: uploaded(mode, leaf) if isinstance(leaf, torch.Tensor) else leaf, computed
    )


def uploaded(mode: Any, value: torch.Tensor) -> SimTensor:
    from pytest_vram.sim.tensors import CUDA, META, wrap

    elem = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    tensor = wrap(mode, elem, CUDA)
    remember(tensor, value)
    return tensor


def explain(func: Any) -> str:
    from pytest_vram.frames import user_line

    packet = func._schema.name.removeprefix("aten::")
    share = ""
    if packet in _SELECTING:
        share = "Say how much it selects (with vram.assume_selected(0.5): ...), or give"
    return (
        f"torch.{packet} at {user_line()} makes a tensor whose size depends on values, and a "
        f"simulated tensor has none. {share or 'Give'} the size another way (torch.where(mask, x, "
        "0) keeps the shape; a mask or index built on the CPU keeps its values), or branch on "
        "vram.has_values."
    )


#: What :mod:`pytest_vram.sim.selection` can do by a declared share.
_SELECTING = ("nonzero", "index", "masked_select", "_unique2", "unique_consecutive")


def unsupported_operator(func: Any) -> NoSimulatedKernel:
    from pytest_vram.frames import user_line

    name = str(func)
    return NoSimulatedKernel(
        f"{name} at {user_line()} has no shape rule, so it cannot be simulated. Register one with "
        f'torch.library.register_fake("{func._schema.name}").'
    )

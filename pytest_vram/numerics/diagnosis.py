"""Diagnosis: one replay in which every operator is watched, to name the first that made NaN or inf.

Only run after something was found. It keeps nothing of the user's alive and judges each operator as
it runs: were its inputs finite, is its output? Intended infinities (masks filled with ``-inf``) are
followed to the operator that turns them into NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_vram.frames import user_line
from pytest_vram.numerics.names import NameBook, dtype_name
from pytest_vram.numerics.probes import Probes

aten = torch.ops.aten

#: Operators by which a program writes infinities on purpose (masks).
_INTENDED = {
    "full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "where",
    "scalar_tensor", "lift_fresh", "lift_fresh_copy", "constant_pad_nd", "index_put_",
    "scatter", "scatter_",
}  # fmt: skip
#: They move values and look at none.
_MOVES = {"copy_", "clone", "_to_copy", "cat", "stack", "select", "slice", "index_select"}
#: Their output is not defined yet.
_UNDEFINED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_"}
_SOFTMAX = {"_softmax", "_log_softmax", "softmax", "log_softmax"}
_FLOAT16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class Birth:
    """The operator at which NaN or inf first appeared, and where it ran."""

    what: str  #: ``NaN``, ``inf`` or ``-inf``
    operator: str
    module: str
    line: str
    backward: bool
    dtype: str
    detail: str = ""  #: about this operator: a fully masked row, the value in fp32
    cause: str = ""  #: what its inputs already held, where nobody seen made that
    origin: Birth | None = None  #: who made what its inputs held
    data: bool = False  #: nobody here made it: the data came so
    intended: bool = False

    def text(self) -> str:
        where = f"module {self.module}, " if self.module else ""
        phase = "backward of " if self.backward else ""
        head = f"{phase}{self.operator} ({where}{self.dtype}, {self.line})"
        if self.data:
            source = self.cause or "look at the data"
            return f"{head} got an input that already held {self.what}: {source}"
        if self.origin is not None:
            tail = f": {self.detail}" if self.detail else ""
            return f"{self.origin.text()}; then {head} made {self.what} of it{tail}"
        if self.operator in _INTENDED and not self.backward:
            return f"{head} wrote {self.what}; {self.detail}"
        parts = [f"{head} made {self.what}" + ("" if self.cause else " out of finite inputs")]
        return "; ".join([*parts, *filter(None, (self.detail, self.cause))])


@dataclass(frozen=True, slots=True)
class _Forward:
    """An operator of the forward, found again by its autograd node's sequence number."""

    operator: str
    module: str
    line: str
    made: str = ""


class Diagnosis(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager; ``births`` in the order in which they happened."""

    def __init__(self, names: NameBook, probes: Probes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._probes = names, probes
        self._modules: list[str] = []
        self._nodes: dict[int, _Forward] = {}
        self._holders: dict[int, Birth] = {}  # storage -> who made what it holds
        self.births: list[Birth] = []
        self.refused: list[str] = []
        self._handles: list[Any] = []
        self._until: int | None = None
        self._carried: Birth | None = None  # an inf that was written on purpose, and went on

    # ---- life

    def __enter__(self) -> Diagnosis:
        self._handles = [
            module_hooks.register_module_forward_pre_hook(self._enter_module),
            module_hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, tb)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._names.note(module) if not self._modules else None
        self._modules.append(self._names.module_name(module))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()

    # ---- every operator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._probes.telling:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        mutable = func._schema.is_mutable
        held = self._held((args, kwargs)) if mutable else None
        try:
            output = func(*args, **kwargs)
        except RuntimeError as error:
            if "without overflow" in str(error):
                self.refused.append(f"{name} at {user_line()}: {error}")
            raise
        node = torch._C._current_autograd_node()
        sequence = torch._C._autograd._get_sequence_nr() - 1 if node is None else -1
        made = "" if name in _UNDEFINED else _bad(output)
        if node is None and torch.is_grad_enabled() and name != "detach":
            # The node was made before the operator ran; what it saves is detached after.
            self._nodes.setdefault(sequence, _Forward(name, self._module(), user_line(), made))
        if made:
            if held is None:
                held = self._held((args, kwargs))
            self._judge(func, name, args, kwargs, output, made, held, node)
        elif mutable:
            self._forget(output)
        return output

    def _module(self) -> str:
        return self._modules[-1] if self._modules else ""

    def _held(self, arguments: Any) -> tuple[str, Birth | None]:
        """What the inputs already hold, and who made it."""
        worst, maker = "", None
        for tensor in _tensors(arguments):
            bad = _bad(tensor)
            if bad and (not worst or (bad == "NaN" != worst)):
                worst, maker = bad, self._holders.get(_storage(tensor))
        return worst, maker

    def _forget(self, output: Any) -> None:
        for tensor in _tensors(output):
            self._holders.pop(_storage(tensor), None)

    def _judge(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        output: Any,
        made: str,
        held: tuple[str, Birth | None],
        node: Any,
    ) -> None:
        before, maker = held
        passed_on = bool(before) and not (made == "NaN" and before != "NaN")
        written = maker is not None and maker.intended and before == "NaN"
        if passed_on and maker is not None and written and name not in _INTENDED | _MOVES:
            # Masks are written as inf, never as NaN: this came with the data.
            cause = f"it was written at {maker.line}"
            birth = self._birth(name, args, output, made, node, data=True, what=before)
            birth = replace(birth, cause=cause)
            self.births.append(birth)
        elif passed_on:
            birth = maker or self._birth(name, args, output, made, node, data=True, what=before)
            if maker is None:
                self.births.append(birth)
            elif maker.intended and node is None and self._until is None:
                reached = f"it reaches the loss at {user_line()}"
                self._carried = replace(maker, detail=reached, intended=False)
        else:
            birth = self._birth(name, args, output, made, node)
            if before and maker is not None and not maker.intended:
                birth = replace(birth, origin=maker)
            elif before:
                birth = replace(birth, cause=_caused(before, maker))
            if not birth.intended and not birth.backward:
                detail = _detail(func, name, args, kwargs, made, bool(before))
                birth = replace(birth, detail=detail)
            self.births.append(birth)
        for tensor in _tensors(output):
            self._holders[_storage(tensor)] = birth

    def _birth(
        self,
        name: str,
        args: Any,
        output: Any,
        made: str,
        node: Any,
        data: bool = False,
        what: str = "",
    ) -> Birth:
        dtype = next((dtype_name(t.dtype) for t in _tensors((args, output))), "")
        if node is None:
            intended = name in _INTENDED
            return Birth(
                what or made, name, self._module(), user_line(), False, dtype, data=data,
                intended=intended,
            )  # fmt: skip
        forward = self._nodes.get(node._sequence_nr())
        if forward is None:
            # A function of the user's own: its backward runs operators like any other code.
            phase = f"{name} in {node.name()}" if hasattr(type(node), "_forward_cls") else ""
            return Birth(
                what or made, phase or node.name(), "", user_line(), not phase, dtype, data=data
            )
        cause = f"its forward output was already {forward.made}" if forward.made else ""
        return Birth(
            what or made, forward.operator, forward.module, forward.line, True, dtype,
            detail=cause, data=data,
        )  # fmt: skip

    # ---- what it comes to

    def stop(self) -> None:
        """The failure has been noticed: what follows is its consequence."""
        if self._until is None:
            self._until = len(self.births)

    def first(self, bad_loss: bool | None) -> Birth | None:
        """The birth that explains the failure. ``bad_loss``: True when the loss itself is not
        finite, False when only gradients are, None when there was no loss."""
        births = [birth for birth in self.births[: self._until] if not birth.intended]
        if bad_loss is False:
            backward = [birth for birth in births if birth.backward]
            return backward[0] if backward else (births[0] if births else None)
        forward = [birth for birth in births if not birth.backward]
        if bad_loss and not births:
            return self._carried
        nan = [birth for birth in forward if birth.what == "NaN"]
        if nan and (bad_loss is None or forward[0].what != "NaN"):
            # An inf that came first matters only if the NaN came of it; then it is its cause.
            return nan[0]
        return forward[0] if forward else (births[0] if births else None)


def _caused(before: str, maker: Birth | None) -> str:
    if maker is None:
        return f"{before} was in its input"
    return f"{before} was written by {maker.operator} at {maker.line}"


def _detail(func: Any, name: str, args: Any, kwargs: Any, made: str, tainted: bool) -> str:
    if name in _SOFTMAX and made == "NaN":
        return _masked_rows(args)
    if tainted:
        return ""
    if name == "_to_copy":
        return _beyond_half(float(args[0].abs().max()), kwargs.get("dtype"))
    return _in_float32(func, args, kwargs)


def _beyond_half(peak: float, dtype: Any) -> str:
    if dtype is torch.float16 and peak > _FLOAT16_MAX:
        return f"max |x| is {peak:.3g} in float32, float16 ends at 65504 (bfloat16 holds it)"
    return ""


def _masked_rows(args: Any) -> str:
    scores, dim = args[0], int(args[1])
    if not isinstance(scores, Tensor) or not scores.dim():
        return ""
    rows = int((scores == -torch.inf).all(dim).sum())
    if not rows:
        return ""
    plural = "row" if rows == 1 else "rows"
    return f"-inf entered softmax, {rows} {plural} entirely -inf -> NaN"


def _in_float32(func: Any, args: Any, kwargs: Any) -> str:
    """The same operator on the same inputs in float32: is the dtype's range the reason?"""
    halves = [t for t in _tensors((args, kwargs)) if t.dtype in (torch.float16, torch.bfloat16)]
    if not halves or func._schema.is_mutable:
        return ""
    try:
        output = func(*_raised(args), **_raised(kwargs))
    except (RuntimeError, TypeError, NotImplementedError):
        return ""
    if _bad(output):
        return "it is not finite in float32 either"
    peak = max((float(t.abs().max()) for t in _tensors(output) if t.numel()), default=0.0)
    beyond = _beyond_half(peak, halves[0].dtype)
    return beyond or f"the same operator is finite in float32 (max |x| {peak:.3g})"


def _raised(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_raised(inner) for inner in value)
    if isinstance(value, dict):
        return {key: _raised(inner) for key, inner in value.items()}
    if value in (torch.float16, torch.bfloat16):
        return torch.float32
    return value


def _bad(value: Any) -> str:
    """``NaN`` if any floating tensor holds one, else ``inf`` or ``-inf``, else nothing."""
    found = ""
    for tensor in _tensors(value):
        if torch.isfinite(tensor).all():
            continue
        if torch.isnan(tensor).any():
            return "NaN"
        found = "inf" if bool((tensor == torch.inf).any()) else (found or "-inf")
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        plain = value.layout is torch.strided and value.element_size() > 1
        if plain and value.dtype.is_floating_point and value.device.type != "meta":
            yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

"""Probes of what makes gradients: the autograd engine, and the gradient scalers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.eager_transforms as transforms
from torch import Tensor

from pytest_vram.frames import user_line
from pytest_vram.numerics.events import Backward, ScalerCall, Update
from pytest_vram.numerics.wire import Wire

_SCALER_METHODS = ("scale", "unscale_", "step", "update", "load_state_dict")


class _Scaled:
    """One call of ``scaler.scale``; keeps neither what it was given nor what it returned alive."""

    __slots__ = ("captured", "node", "scale", "scaler")

    def __init__(self, scaler: Any, scale: float, result: Tensor, captured: Any) -> None:
        self.scaler, self.scale, self.captured = scaler, scale, captured
        self.node = result.grad_fn._sequence_nr() if result.grad_fn is not None else -1


class GradientProbes:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._scaled: list[_Scaled] = []
        self._in_scaler: list[int] = []

    def install(self) -> None:
        patch = self._wire.patch
        # torch.autograd.backward and .grad look the engine's entry up in torch/autograd/__init__.py
        # (2.6 to 2.14).
        patch(torch.autograd, "_engine_run_backward", self._around_backward)
        # torch.func.grad and grad_and_value look it up when they are called (2.6 to 2.14).
        patch(transforms, "grad_and_value_impl", self._around_functional)
        for cls in [torch.amp.GradScaler, *subclasses(torch.amp.GradScaler)]:
            for name in _SCALER_METHODS:
                if name in cls.__dict__:
                    patch(cls, name, functools.partial(self._around_scaler, name))
        self._wire.undo.callback(self._scaled.clear)

    # ---- backward

    def _around_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def run_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            accumulates = kwargs.get("accumulate_grad", args[5] if len(args) > 5 else False)
            self._wire.backward_depth += 1
            depth = self._wire.depth
            call = None
            try:
                if accumulates and self._wire.backward_depth == 1:
                    call = self._backward(roots)
                    call.creates = bool(kwargs.get("create_graph", args[2:3] == (True,)))
                    call.retains = bool(kwargs.get("retain_graph", args[1:2] == (True,)))
                    self._wire.tell("backward_begins", call)
                result = run(roots, *args, **kwargs)
            finally:
                self._wire.backward_depth -= 1
                self._wire.depth = depth
            if call is not None:
                self._wire.tell("backward_ends", call)
            return result

        return run_backward

    def _around_functional(self, differentiate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(differentiate)
        def grad_and_value(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            gradients, loss = result = differentiate(*args, **kwargs)
            if not torch.compiler.is_compiling():
                loss = loss[0] if isinstance(loss, tuple) else loss  # has_aux: (loss, aux)
                self._wire.tell("gradients_returned", gradients, loss, user_line())
            return result

        return grad_and_value

    def _backward(self, roots: Any) -> Backward:
        tensors = tuple(root for root in roots if isinstance(root, Tensor))
        call = Backward(tensors, user_line(), inside_step=bool(self._wire.updates))
        captured = []
        for root in tensors:
            scaled = self._scaled_form(root)
            if scaled is not None:
                call.scaler, call.scale = scaled.scaler, scaled.scale
                self._scaled.remove(scaled)
            captured.append(scaled.captured if scaled is not None else None)
        call.captured = tuple(captured)
        return call

    def _scaled_form(self, root: Tensor) -> _Scaled | None:
        """The call of ``scale`` that ``root`` comes from: directly, or a few operators ago as in
        ``(scaler.scale(a) + scaler.scale(b)).backward()``."""
        by_node = {scaled.node: scaled for scaled in self._scaled if scaled.node >= 0}
        front = [root.grad_fn] if by_node else []
        for _ in range(64):
            node = front.pop(0) if front else None
            if node is None:
                return None
            if node._sequence_nr() in by_node:
                return by_node[node._sequence_nr()]
            front += [inner for inner, _ in node.next_functions if inner is not None]
        return None

    # ---- loss scaling

    def _around_scaler(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call_scaler(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            # step() calls unscale_() itself where the loop did not, and a subclass its parent's
            # method: parts of one call.
            if not scaler.is_enabled() or id(scaler) in self._in_scaler:
                return method(scaler, *args, **kwargs)
            self._in_scaler.append(id(scaler))
            try:
                return self._call_scaler(kind, method, scaler, args, kwargs)
            finally:
                self._in_scaler.pop()

        return call_scaler

    def _call_scaler(
        self, kind: str, method: Callable[..., Any], scaler: Any, args: Any, kwargs: Any
    ) -> Any:
        __tracebackhide__ = True
        optimizer = kwargs.get("optimizer", args[0] if args else None)
        call = ScalerCall(kind, scaler, user_line(), scale_before=self._wire.scale_of(scaler))
        if kind == "scale" and self._wire.unit_scale:
            _force_unit_scale(scaler, optimizer)
            self._wire.scales[scaler] = call.scale_before = 1.0
        call.explicit = kind == "update" and bool(args or kwargs.get("new_scale") is not None)
        if kind in ("unscale_", "step"):
            call.optimizer = optimizer
        if kind == "unscale_":
            self._wire.tell("unscale_begins", call)
        update = None
        if kind == "step":
            closure = any(callable(value) for value in (*args[1:], kwargs.get("closure")))
            update = Update(optimizer, call.line, scaler, closure=closure)
            self._wire.tell("update_begins", update)
            self._wire.updates.append(update)
        try:
            result = method(scaler, *args, **kwargs)
        except BaseException as error:
            call.error = error
            raise
        finally:
            if update is not None:
                self._wire.updates.remove(update)
            if kind in ("update", "load_state_dict"):
                self._wire.scales.pop(scaler, None)
            if kind == "scale" and call.error is None:
                given = args[0] if args else kwargs.get("outputs")
                self._remember_scaled(scaler, call.scale_before, given, result)
            if update is not None:
                update.failed = call.error is not None
                update.applied = not update.failed and not self._wire.found_inf(scaler, optimizer)
                self._wire.tell("update_ends", update)
            self._wire.tell("scaler_called", call)
        return result

    def _remember_scaled(self, scaler: Any, scale: float, given: Any, result: Any) -> None:
        pairs = (
            [(given, result)]
            if isinstance(result, Tensor)
            else zip(_flat(given), _flat(result), strict=False)
        )
        for loss, scaled in pairs:
            if isinstance(loss, Tensor) and isinstance(scaled, Tensor):
                captured = self._wire.captured(loss)
                self._scaled.append(_Scaled(scaler, scale, scaled, captured))
        del self._scaled[:-8]


def _force_unit_scale(scaler: Any, outputs: Any) -> None:
    first = next((value for value in _flat(outputs) if isinstance(value, Tensor)), None)
    if scaler._scale is None and first is not None:
        scaler._lazy_init_scale_growth_tracker(first.device)
    if scaler._scale is not None:
        scaler._scale.fill_(1.0)


def subclasses(cls: Any) -> Iterator[Any]:
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _flat(inner)
    else:
        yield value

"""Probes: everything that is patched into PyTorch to see a training loop, in one context manager.

Loops need not cooperate: modules are seen through the global forward hooks, optimizers through the
global step hooks, loss scaling through the methods of ``torch.amp.GradScaler`` (the old
``torch.cuda.amp`` name and subclasses included), ``backward`` where Python enters the autograd
engine, clipping, schedulers, checkpointing and the autocast cache at their functions.

Each sight becomes one call on every :class:`Listener`. Leaving the context undoes all of it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import torch._functorch.eager_transforms as transforms
import torch.optim.lr_scheduler as schedulers
import torch.optim.optimizer as optimizers
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer

from pytest_vram.frames import user_line
from pytest_vram.numerics.events import Backward, Clip, Listener, ScalerCall, Update

_SCALER_METHODS = ("scale", "unscale_", "step", "update", "load_state_dict")


class _Scaled:
    """One call of ``scaler.scale``; keeps neither what it was given nor what it returned alive."""

    __slots__ = ("captured", "node", "scale", "scaler")

    def __init__(self, scaler: Any, scale: float, result: Tensor, captured: Any) -> None:
        self.scaler, self.scale, self.captured = scaler, scale, captured
        self.node = result.grad_fn._sequence_nr() if result.grad_fn is not None else -1


@dataclass
class Probes:
    """Context manager; ``listeners`` are told in the given order. ``values=False``: tensors have no
    values (a simulated pass), so nothing is read from them."""

    listeners: tuple[Listener, ...]
    values: bool = True
    #: Scale every loss by 1, to see gradients as they are: a diagnostic replay.
    unit_scale: bool = False
    scales: weakref.WeakKeyDictionary[Any, float] = field(default_factory=weakref.WeakKeyDictionary)
    #: Reads a loss before it is scaled, without keeping it: afterwards it may be inf.
    capture: Callable[[Tensor], Any] | None = None
    telling: bool = False  #: listeners are at work: operators that run now are theirs

    def __post_init__(self) -> None:
        self._undo = contextlib.ExitStack()
        self._audience: dict[str, list[Callable[..., None]]] = {}
        self._depth = 0  # modules that are running
        self._backward_depth = 0
        self._updates: list[Update] = []
        self._scaled: list[_Scaled] = []
        self._in_scaler: list[int] = []
        self._creating_scheduler = 0
        self._moving = 0  # Module._apply runs for every child
        self._scheduling = 0  # ChainedScheduler and SequentialLR step others

    # ---- life

    def __enter__(self) -> Probes:
        try:
            self._install(self._undo)
        except BaseException:
            self._undo.close()
            raise
        return self

    def _install(self, undo: contextlib.ExitStack) -> None:
        for handle in (
            module_hooks.register_module_module_registration_hook(self._registered),
            module_hooks.register_module_parameter_registration_hook(self._given_parameter),
            module_hooks.register_module_forward_pre_hook(self._entered),
            after_forward := module_hooks.register_module_forward_hook(
                self._left, with_kwargs=True, always_call=True
            ),
            optimizers.register_optimizer_step_pre_hook(self._optimizer_pre),
            optimizers.register_optimizer_step_post_hook(self._optimizer_post),
        ):
            undo.callback(handle.remove)
        # RemovableHandle forgets this entry (torch/nn/modules/module.py, 2.6 to 2.14).
        undo.callback(module_hooks._global_forward_hooks_with_kwargs.pop, after_forward.id, None)
        # torch.autograd.backward and .grad look the engine's entry up in torch/autograd/__init__.py
        # (2.6 to 2.14).
        self._patch(torch.autograd, "_engine_run_backward", self._around_backward)
        for cls in [torch.amp.GradScaler, *_subclasses(torch.amp.GradScaler)]:
            for name in _SCALER_METHODS:
                if name in cls.__dict__:
                    self._patch(cls, name, functools.partial(self._around_scaler, name))
        self._patch(Optimizer, "__init__", self._around_optimizer_init)
        self._patch(Optimizer, "load_state_dict", self._around_optimizer_load)
        self._patch(Optimizer, "zero_grad", self._around_zero_grad)
        self._patch(nn.Module, "zero_grad", self._around_zero_grad)
        self._patch(nn.Module, "load_state_dict", self._around_module_load)
        # torch.func.grad and grad_and_value look it up when they are called (2.6 to 2.14).
        self._patch(transforms, "grad_and_value_impl", self._around_functional)
        self._patch(nn.Module, "_apply", self._around_apply)
        self._patch_functions()
        for scheduler in [schedulers.LRScheduler, *_subclasses(schedulers.LRScheduler)]:
            if "step" in scheduler.__dict__:
                self._patch(scheduler, "step", self._around_scheduler_step)
        self._patch(schedulers.LRScheduler, "_initial_step", self._around_initial_step)
        self._patch(torch, "clear_autocast_cache", self._around_cache_clear)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._undo.close()
        self._scaled.clear()
        self._updates.clear()

    def _patch(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
        setattr(owner, name, around(original))
        self._undo.callback(setattr, owner, name, original)

    def _patch_functions(self) -> None:
        """Clipping and checkpointing are functions that user modules import by name."""
        for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
            original = getattr(torch.nn.utils, name)
            around = self._around_clip(original)
            for module in list(sys.modules.values()):
                namespace = getattr(module, "__dict__", None)
                if isinstance(namespace, dict) and namespace.get(name) is original:
                    setattr(module, name, around)
                    self._undo.callback(setattr, module, name, original)
        self._patch(torch.nn.functional, "binary_cross_entropy", self._around_banned)
        # torch.utils.checkpoint.checkpoint looks both up when it is called (2.6 to 2.14).
        self._patch(checkpointing, "CheckpointFunction", self._around_reentrant)
        self._patch(
            checkpointing,
            "_checkpoint_without_reentrant_generator",
            self._around_non_reentrant,
        )

    def _tell(self, event: str, *args: Any) -> None:
        # Modes of the test's (and the CPU stand-in's, which says that tensors are on a GPU) must
        # not see what the watch does.
        methods = self._audience.get(event)
        if methods is None:
            methods = self._audience[event] = self._listening(event)
        if not methods:
            return
        self.telling = True
        try:
            with torch._C.DisableTorchFunction():
                for method in methods:
                    method(*args)
        finally:
            self.telling = False

    def _listening(self, event: str) -> list[Callable[..., None]]:
        """The methods of those who care for ``event``: modules run by the hundred."""
        nothing = getattr(Listener, event)
        return [
            getattr(listener, event)
            for listener in self.listeners
            if getattr(type(listener), event) is not nothing
        ]

    # ---- modules

    def _registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._tell("children_added", parent)

    def _given_parameter(self, parent: nn.Module, name: str, parameter: Tensor | None) -> None:
        if parameter is not None:
            self._tell("parameter_added", parameter)

    def _entered(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth == 1 and not self._backward_depth:
            self._tell("forward_begins", module)

    def _left(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """``rest`` is ``(kwargs, output)``, or ``(output,)`` when the forward raised."""
        if torch.compiler.is_compiling() or not self._depth:
            return
        self._depth -= 1
        if len(rest) < 2:
            return
        kwargs, output = rest
        self._tell("module_ran", module, output)
        if not self._depth and not self._backward_depth:
            self._tell("forward_ends", module, (args, kwargs), output)

    # ---- backward

    def _around_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def run_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            accumulates = kwargs.get("accumulate_grad", args[5] if len(args) > 5 else False)
            self._backward_depth += 1
            depth = self._depth
            call = None
            try:
                if accumulates and self._backward_depth == 1:
                    call = self._backward(roots)
                    call.creates = bool(kwargs.get("create_graph", args[2:3] == (True,)))
                    call.retains = bool(kwargs.get("retain_graph", args[1:2] == (True,)))
                    self._tell("backward_begins", call)
                result = run(roots, *args, **kwargs)
            finally:
                self._backward_depth -= 1
                self._depth = depth
            if call is not None:
                self._tell("backward_ends", call)
            return result

        return run_backward

    def _around_functional(self, differentiate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(differentiate)
        def grad_and_value(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            gradients, loss = result = differentiate(*args, **kwargs)
            if not torch.compiler.is_compiling():
                loss = loss[0] if isinstance(loss, tuple) else loss  # has_aux: (loss, aux)
                self._tell("gradients_returned", gradients, loss, user_line())
            return result

        return grad_and_value

    def _backward(self, roots: Any) -> Backward:
        tensors = tuple(root for root in roots if isinstance(root, Tensor))
        call = Backward(tensors, user_line(), inside_step=bool(self._updates))
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

    def scale_of(self, scaler: Any) -> float:
        """The scale, read once per change: reading it waits for the GPU."""
        if not scaler.is_enabled() or not self.values:
            return float(getattr(scaler, "_init_scale", 1.0)) if scaler.is_enabled() else 1.0
        if scaler not in self.scales:
            self.scales[scaler] = float(scaler.get_scale())
        return self.scales[scaler]

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
        call = ScalerCall(kind, scaler, user_line(), scale_before=self.scale_of(scaler))
        if kind == "scale" and self.unit_scale:
            _force_unit_scale(scaler, optimizer)
            self.scales[scaler] = call.scale_before = 1.0
        call.explicit = kind == "update" and bool(args or kwargs.get("new_scale") is not None)
        if kind in ("unscale_", "step"):
            call.optimizer = optimizer
        if kind == "unscale_":
            self._tell("unscale_begins", call)
        update = None
        if kind == "step":
            closure = any(callable(value) for value in (*args[1:], kwargs.get("closure")))
            update = Update(optimizer, call.line, scaler, closure=closure)
            self._tell("update_begins", update)
            self._updates.append(update)
        try:
            result = method(scaler, *args, **kwargs)
        except BaseException as error:
            call.error = error
            raise
        finally:
            if update is not None:
                self._updates.remove(update)
            if kind in ("update", "load_state_dict"):
                self.scales.pop(scaler, None)
            if kind == "scale" and call.error is None:
                given = args[0] if args else kwargs.get("outputs")
                self._remember_scaled(scaler, call.scale_before, given, result)
            if update is not None:
                update.failed = call.error is not None
                update.applied = not update.failed and not self.found_inf(scaler, optimizer)
                self._tell("update_ends", update)
            self._tell("scaler_called", call)
        return result

    def found_inf(self, scaler: Any, optimizer: Any) -> bool:
        """Whether the scaler's own check found inf or NaN for this optimizer since update()."""
        if not self.values:
            return False
        states = getattr(scaler, "_per_optimizer_states", {})
        if id(optimizer) not in states:
            return False
        found = states[id(optimizer)]["found_inf_per_device"].values()
        return any(bool(value.item()) for value in found)

    def _remember_scaled(self, scaler: Any, scale: float, given: Any, result: Any) -> None:
        pairs = (
            [(given, result)]
            if isinstance(result, Tensor)
            else zip(_flat(given), _flat(result), strict=False)
        )
        for loss, scaled in pairs:
            if isinstance(loss, Tensor) and isinstance(scaled, Tensor):
                captured = self._captured(loss)
                self._scaled.append(_Scaled(scaler, scale, scaled, captured))
        del self._scaled[:-8]

    def _captured(self, loss: Tensor) -> Any:
        if self.capture is None:
            return None
        self.telling = True
        try:
            with torch._C.DisableTorchFunction():
                return self.capture(loss)
        finally:
            self.telling = False

    # ---- optimizers

    def _around_optimizer_init(self, init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(init)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            __tracebackhide__ = True
            init(optimizer, *args, **kwargs)
            self._tell("optimizer_made", optimizer)

        return __init__

    def _around_optimizer_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def load_state_dict(optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            load(optimizer, state, *args, **kwargs)
            self._tell("optimizer_loaded", optimizer, state, user_line())

        return load_state_dict

    def _around_module_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def load_state_dict(module: nn.Module, state: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            tied = ties(module)
            result = load(module, state, *args, **kwargs)
            assigned = kwargs.get("assign", args[1:2] == (True,))
            self._compare_ties(module, tied, f"load_state_dict(assign={assigned})")
            self._tell("module_loaded", module, state, user_line())
            return result

        return load_state_dict

    def _around_apply(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Behind to(), cuda(), half() and to_empty(): they may make every parameter anew."""

        @functools.wraps(apply)
        def move(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            tied = [] if self._moving else ties(module)
            self._moving += 1
            try:
                result = apply(module, *args, **kwargs)
            finally:
                self._moving -= 1
            self._compare_ties(module, tied, "the module was moved or cast")
            return result

        return move

    def _compare_ties(self, module: nn.Module, before: list[list[str]], how: str) -> None:
        for names in before:
            if len({id(parameter) for parameter in held_as(module, names)}) > 1:
                self._tell("ties_broken", module, names, how, user_line())

    def _around_zero_grad(self, zero: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(zero)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            result = zero(owner, *args, **kwargs)
            if isinstance(owner, nn.Module):
                parameters: list[Tensor] = list(owner.parameters())
            else:
                parameters = [p for group in owner.param_groups for p in group["params"]]
            self._tell("gradients_zeroed", parameters, user_line())
            return result

        return zero_grad

    def _optimizer_pre(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._updates and self._updates[-1].scaler is not None:
            update = self._updates[-1]
        else:
            closure = any(callable(value) for value in (*args[1:], kwargs.get("closure")))
            nested = bool(self._updates)
            update = Update(optimizer, user_line(), closure=closure, nested=nested)
            self._updates.append(update)
            self._tell("update_begins", update)
        self._tell("gradients_ready", update)

    def _optimizer_post(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # A step that raised never got here: what it left behind goes with the next one.
        while self._updates and self._updates[-1].scaler is None:
            update = self._updates.pop()
            if update.optimizer is optimizer:
                update.applied = True
                self._tell("update_ends", update)
                return

    # ---- functions

    def _around_clip(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clip)
        def clip_gradients(parameters: Any, limit: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            owned = [p for p in tensors if isinstance(p, Tensor)]
            seen = Clip(owned, clip.__name__.lstrip("_"), float(limit), user_line())
            self._tell("clip_begins", seen)
            result = clip(tensors, limit, *args, **kwargs)
            seen.norm = kwargs.get("total_norm", args[0] if args else None)
            if clip.__name__ == "clip_grad_norm_":
                seen.norm = result
            self._tell("clipped", seen)
            return result

        return clip_gradients

    def _around_banned(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """CUDA's autocast refuses it (autocast_mode.cpp), the CPU's casts to fp32."""

        @functools.wraps(function)
        def banned(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if any(torch.is_autocast_enabled(device) for device in ("cuda", "cpu")):
                self._tell("banned_called", function.__name__, user_line())
            return function(*args, **kwargs)

        return banned

    def _around_reentrant(self, original: Any) -> Any:
        probes = self

        class Reentrant:
            """Stands where ``torch.utils.checkpoint`` looks ``CheckpointFunction`` up."""

            @staticmethod
            def apply(function: Any, preserve: bool, *args: Any) -> Any:
                probes._tell("checkpointed", function, args, True, user_line())
                return original.apply(function, preserve, *args)

        return Reentrant

    def _around_non_reentrant(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def generator(function: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            self._tell("checkpointed", function, args, False, user_line())
            return original(function, *args, **kwargs)

        return generator

    def _around_scheduler_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def scheduler_step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            self._scheduling += 1
            try:
                result = step(scheduler, *args, **kwargs)
            finally:
                self._scheduling -= 1
            if not self._scheduling and not self._creating_scheduler:
                self._tell("scheduler_stepped", scheduler)
            return result

        return scheduler_step

    def _around_initial_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A scheduler's constructor takes one step itself."""

        @functools.wraps(step)
        def initial_step(scheduler: Any) -> Any:
            __tracebackhide__ = True
            self._creating_scheduler += 1
            try:
                return step(scheduler)
            finally:
                self._creating_scheduler -= 1

        return initial_step

    def _around_cache_clear(self, clear: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clear)
        def clear_autocast_cache() -> None:
            clear()
            self._tell("autocast_cache_cleared")

        return clear_autocast_cache


def ties(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that ``module`` holds under several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def held_as(module: nn.Module, names: Sequence[str]) -> list[Tensor]:
    """The parameters of these names; one that is no longer there is left out."""
    present = dict(module.named_parameters(remove_duplicate=False))
    return [present[name] for name in names if name in present]


def _force_unit_scale(scaler: Any, outputs: Any) -> None:
    first = next((value for value in _flat(outputs) if isinstance(value, Tensor)), None)
    if scaler._scale is None and first is not None:
        scaler._lazy_init_scale_growth_tracker(first.device)
    if scaler._scale is not None:
        scaler._scale.fill_(1.0)


def _subclasses(cls: Any) -> Iterator[Any]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _flat(inner)
    else:
        yield value

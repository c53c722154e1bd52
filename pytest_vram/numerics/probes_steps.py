"""Probes of optimizers and schedulers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.optim.lr_scheduler as schedulers
import torch.optim.optimizer as optimizers
from torch import Tensor, nn
from torch.optim import Optimizer

from pytest_vram.frames import user_line
from pytest_vram.numerics.events import Update
from pytest_vram.numerics.probes_gradients import subclasses
from pytest_vram.numerics.wire import Wire


class StepProbes:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._creating_scheduler = 0
        self._scheduling = 0  # ChainedScheduler and SequentialLR step others

    def install(self) -> None:
        patch, undo = self._wire.patch, self._wire.undo
        undo.callback(optimizers.register_optimizer_step_pre_hook(self._optimizer_pre).remove)
        undo.callback(optimizers.register_optimizer_step_post_hook(self._optimizer_post).remove)
        patch(Optimizer, "__init__", self._around_optimizer_init)
        patch(Optimizer, "load_state_dict", self._around_optimizer_load)
        patch(Optimizer, "zero_grad", self._around_zero_grad)
        patch(nn.Module, "zero_grad", self._around_zero_grad)
        for scheduler in [schedulers.LRScheduler, *subclasses(schedulers.LRScheduler)]:
            if "step" in scheduler.__dict__:
                patch(scheduler, "step", self._around_scheduler_step)
        patch(schedulers.LRScheduler, "_initial_step", self._around_initial_step)

    # ---- optimizers

    def _around_optimizer_init(self, init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(init)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            __tracebackhide__ = True
            init(optimizer, *args, **kwargs)
            self._wire.tell("optimizer_made", optimizer)

        return __init__

    def _around_optimizer_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def load_state_dict(optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            load(optimizer, state, *args, **kwargs)
            self._wire.tell("optimizer_loaded", optimizer, state, user_line())

        return load_state_dict

    def _around_zero_grad(self, zero: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(zero)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            result = zero(owner, *args, **kwargs)
            if isinstance(owner, nn.Module):
                parameters: list[Tensor] = list(owner.parameters())
            else:
                parameters = [p for group in owner.param_groups for p in group["params"]]
            self._wire.tell("gradients_zeroed", parameters, user_line())
            return result

        return zero_grad

    def _optimizer_pre(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._wire.updates and self._wire.updates[-1].scaler is not None:
            update = self._wire.updates[-1]
        else:
            closure = any(callable(value) for value in (*args[1:], kwargs.get("closure")))
            nested = bool(self._wire.updates)
            update = Update(optimizer, user_line(), closure=closure, nested=nested)
            self._wire.updates.append(update)
            self._wire.tell("update_begins", update)
        self._wire.tell("gradients_ready", update)

    def _optimizer_post(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # A step that raised never got here: what it left behind goes with the next one.
        while self._wire.updates and self._wire.updates[-1].scaler is None:
            update = self._wire.updates.pop()
            if update.optimizer is optimizer:
                update.applied = True
                self._wire.tell("update_ends", update)
                return

    # ---- schedulers

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
                self._wire.tell("scheduler_stepped", scheduler)
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

"""Observer: finds out by itself what a training test does, and tells a Recorder.

Modules are seen through PyTorch's global forward hooks, optimizers through the global step hooks
and :class:`torch.amp.GradScaler`, backward where Python enters the autograd engine. Nothing here
allocates device memory, keeps a tensor alive, or adds anything to the autograd graph: no
saved-tensor hooks, no dispatch modes, no backward hooks. Only then are the figures the test's own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from pytest_vram.observe.names import ModuleNames
from pytest_vram.observe.steps import StepCounter
from pytest_vram.observe.tensors import optimized, plain_tensors, tensors_in
from pytest_vram.trace import Phase, Recorder, Trace

_HALF = (torch.float16, torch.bfloat16)


class Observer:
    """Context manager that reports phases, modules and labels of the code in it to ``recorder``.

    Phases: ``setup`` until the first forward; ``forward`` from there until ``backward``, which
    lasts as long as the autograd engine runs; ``optimizer`` while an optimizer (or GradScaler)
    steps; ``between`` for the rest. Steps count from 1. A step begins at the first forward or
    backward after an optimizer step, if the optimizer that steps next has stepped since the step
    began: a GAN with two optimizers, or accumulation over micro-batches, is one step. Which one
    steps next is known too late for the phase marks; :meth:`renumber` sets a finished Trace right.

    ``from_start``: the program begins inside this context. If it makes no optimizer, it updates its
    parameters by hand, and a forward after a backward begins the next step.
    """

    def __init__(self, recorder: Recorder, *, from_start: bool = False) -> None:
        self._recorder = recorder
        self._names = ModuleNames()
        self._steps = StepCounter(from_start=from_start)
        self._stack: list[int] = []  # ids of the modules that are running, outermost first
        self._backward_depth = 0
        self._scaling = 0  # GradScaler.step calls that are running
        self._hooked: list[int] = []  # ids of optimizers whose step() is running
        self._chosen: list[str] = []  # phases that the test named
        self._current = Phase("setup", 0)
        self._marks: list[int] = []  # segment of each phase told to the recorder
        self._undo = ExitStack()

    # ---- what others ask

    @property
    def step(self) -> int:
        """The training step that runs now, from 1; 0 before the first."""
        return self._steps.number

    @property
    def by_hand(self) -> int:
        """Steps of a program that began here and has made no optimizer; 0 where it has one."""
        return self._steps.by_hand

    @property
    def modules(self) -> list[nn.Module]:
        """Outermost modules whose forward ran, in the order in which they first did."""
        return self._names.called()

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers that have stepped, in the order in which they first did."""
        return self._steps.optimizers()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The test's own phase, for its peaks. It replaces ``forward`` and ``between``; the
        engine's ``backward`` and an optimizer's ``optimizer`` inside it are still told apart."""
        before = self._current.name
        if name == "forward":
            self._steps.work()
        self._chosen.append(name)
        self._tell(name)
        try:
            yield
        finally:
            self._chosen.pop()
            self._tell("between" if self.step and before in ("setup", "optimizer") else before)

    def begin_step(self) -> None:
        """A training step begins here. From the first call on, steps are counted by these calls."""
        self._steps.begin()
        self._tell("between")

    def renumber(self, trace: Trace) -> Trace:
        """``trace`` (whole, or cut short) with the step numbers that are known by now."""
        numbers = self._steps.numbers()
        phases = [
            phase if segment < 0 else replace(phase, step=numbers[segment])
            for phase, segment in zip(trace.phases, self._marks, strict=False)
        ]
        return replace(trace, phases=[*phases, *trace.phases[len(phases) :]])

    # ---- life

    def __enter__(self) -> Observer:
        with ExitStack() as undo:
            self._install(undo)
            self._undo = undo.pop_all()
        self._current = Phase("setup", 0)
        self._marks.append(-1)
        self._recorder.phase("setup", 0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._undo.close()
        self._steps.failed = error is not None
        self._label_modules()
        self._label_gradients(self.optimizers)
        for optimizer in self.optimizers:
            self._label_optimizer(optimizer)
        self._unwind(0)

    def _install(self, undo: ExitStack) -> None:
        for handle in (
            register_module_module_registration_hook(self._registered_module),
            register_module_parameter_registration_hook(self._registered_parameter),
            register_module_forward_pre_hook(self._entered),
            after_forward := register_module_forward_hook(
                self._left, with_kwargs=True, always_call=True
            ),
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ):
            undo.callback(handle.remove)
        # RemovableHandle forgets this entry (torch/nn/modules/module.py, 2.6 to 2.14).
        undo.callback(_global_forward_hooks_with_kwargs.pop, after_forward.id, None)
        # torch.autograd.backward and .grad look the engine's entry up in two modules
        # (torch/autograd/__init__.py and torch/autograd/graph.py, 2.6 to 2.14).
        for owner in (torch.autograd, torch.autograd.graph):
            undo.enter_context(_patched(owner, "_engine_run_backward", self._around_backward))
        undo.enter_context(_patched(torch.amp.GradScaler, "step", self._around_scaler_step))
        undo.enter_context(_patched(Optimizer, "__init__", self._around_optimizer_init))

    # ---- modules

    def _registered_module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._names.adopted(parent, child)

    def _registered_parameter(self, owner: nn.Module, name: str, parameter: Any) -> None:
        self._names.built(owner)

    def _entered(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return  # what Dynamo traces must not change
        path = self._names.path(module)
        if path is None:
            path = self._names.discover(module, self._stack)
        if not self._stack and not self._backward_depth:
            self._forward_begins(module, args)
        self._stack.append(id(module))
        self._recorder.enter_module(path)

    def _left(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        """``rest`` is ``(kwargs, output)``, or ``(output,)`` when the forward raised."""
        if torch.compiler.is_compiling() or id(module) not in self._stack:
            return
        # A module that was left by an exception no hook sees (KeyboardInterrupt) goes with it.
        depth = len(self._stack) - 1
        while self._stack[depth] != id(module):
            depth -= 1
        self._unwind(depth)
        if not self._stack and not self._backward_depth and len(rest) == 2:
            self._label_inputs(rest[0])

    def _unwind(self, depth: int) -> None:
        while len(self._stack) > depth:
            self._stack.pop()
            self._recorder.leave_module()

    def _forward_begins(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._names.call(module)
        if not self._inside_step():
            self._steps.work()
        self._tell(self._chosen[-1] if self._chosen else "forward")
        self._label_modules()
        self._label_inputs(args)

    # ---- backward

    def _around_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            before, depth = self._current.name, len(self._stack)
            self._backward_begins()
            try:
                return run(outputs, *args, **kwargs)
            finally:
                self._unwind(depth)
                # (grad_outputs, keep_graph, create_graph, ...): a gradient that is
                # differentiated again is part of the forward.
                goes_on = depth > 0 or (len(args) > 2 and bool(args[2]))
                self._backward_ends(before, goes_on)

        return run_backward

    def _backward_begins(self) -> None:
        self._backward_depth += 1
        if self._backward_depth > 1:
            return
        if not self._inside_step():
            self._steps.work(backward=True)
        self._label_modules()
        self._tell("backward")

    def _backward_ends(self, before: str, goes_on: bool) -> None:
        self._backward_depth -= 1
        if self._backward_depth:
            return
        self._label_gradients(self._steps.known())
        if self._inside_step():
            self._tell("optimizer")
        elif self._chosen:
            self._tell(self._chosen[-1])
        else:
            self._tell(before if goes_on and before != "setup" else "between")

    # ---- optimizers

    def _around_optimizer_init(self, init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(init)
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            init(optimizer, *args, **kwargs)
            self._steps.meet(optimizer)

        return __init__

    def _around_scaler_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A step that the scaler skips for an overflow is a step of the training all the same."""

        @functools.wraps(step)
        def scaler_step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._optimizer_begins(optimizer)
            self._scaling += 1
            try:
                return step(scaler, optimizer, *args, **kwargs)
            finally:
                self._scaling -= 1
                for name in ("_scale", "_growth_tracker"):
                    self._label(getattr(scaler, name, None), "other", f"loss scaler {name[1:]}")
                self._optimizer_ends(optimizer)

        return scaler_step

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # The post hook of a step that raised never ran. This step is on the stack already.
        del self._hooked[max(_running_steps() - 1, 0) :]
        self._optimizer_begins(optimizer)
        self._hooked.append(id(optimizer))

    def _step_ends(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or id(optimizer) not in self._hooked:
            return
        while self._hooked.pop() != id(optimizer):
            pass
        self._optimizer_ends(optimizer)

    def _optimizer_begins(self, optimizer: Any) -> None:
        if self._inside_step():
            return  # GradScaler.step, or a wrapper that is an Optimizer itself, announced it
        self._steps.stepped(optimizer)
        self._label_modules()
        self._label_gradients([optimizer])
        self._label_optimizer(optimizer)
        self._tell("optimizer")

    def _optimizer_ends(self, optimizer: Any) -> None:
        self._label_optimizer(optimizer)
        if not self._inside_step():
            self._tell(self._chosen[-1] if self._chosen else "between")

    def _inside_step(self) -> bool:
        """A closure's forward and backward run inside the optimizer's step."""
        if self._hooked:
            del self._hooked[_running_steps() :]
        return bool(self._scaling or self._hooked)

    # ---- telling

    def _tell(self, name: str) -> None:
        phase = Phase(name, self._steps.number)
        if phase != self._current:
            self._current = phase
            self._marks.append(self._steps.segment)
            self._recorder.phase(phase.name, phase.step)

    def _label(self, value: Any, bill: str, name: str) -> None:
        for tensor, suffix in plain_tensors(value):
            self._recorder.label(tensor, bill, name + suffix)

    def _label_modules(self) -> None:
        for name, parameter in self._names.parameters():
            self._label(parameter, "parameters", name)
        for name, buffer in self._names.buffers():
            self._label(buffer, "buffers", name)

    def _label_gradients(self, optimizers: list[Optimizer]) -> None:
        seen: set[int] = set()
        for name, parameter in self._names.parameters():
            seen.add(id(parameter))
            # Only leaves collect gradients; asking another tensor for its own warns.
            if parameter.is_leaf and parameter.grad is not None:
                self._label(parameter.grad, "gradients", name)
        for optimizer in optimizers:
            for name, parameter in optimized(optimizer):
                if id(parameter) not in seen and parameter.grad is not None:
                    self._label(parameter.grad, "gradients", name)

    def _label_optimizer(self, optimizer: Optimizer) -> None:
        """Optimizers may be duck-typed (GradScaler accepts that): they need ``param_groups``."""
        names = {id(parameter): name for name, parameter in self._names.parameters()}
        updated = list(optimized(optimizer))
        held = {id(parameter) for _, parameter in updated}
        has_low_precision_twin = any(
            parameter.dtype in _HALF and id(parameter) not in held
            for _, parameter in self._names.parameters()
        )
        for name, parameter in updated:
            if id(parameter) not in names:
                names[id(parameter)] = name
                master = has_low_precision_twin and parameter.dtype not in _HALF
                self._label(parameter, "master_weights" if master else "parameters", name)
        state = getattr(optimizer, "state", None) or {}
        for key, value in list(state.items()):
            owner = names.get(id(key), "") if isinstance(key, Tensor) else str(key)
            for path, tensor in tensors_in(value):
                self._label(tensor, "optimizer_state", f"{path} of {owner}" if owner else path)
        for number, group in enumerate(getattr(optimizer, "param_groups", ())):
            for key, value in group.items():
                if key != "params" and isinstance(value, Tensor):
                    self._label(value, "optimizer_state", f"{key} of group {number}")

    def _label_inputs(self, arguments: Any) -> None:
        for leaf in tree_leaves(arguments):
            # What a graph leads to was computed from something: it is another module's output.
            if isinstance(leaf, Tensor) and leaf.grad_fn is None:
                self._label(leaf, "inputs", "")


def _patched(
    owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> AbstractContextManager[None]:
    @contextmanager
    def replaced() -> Iterator[None]:
        original = getattr(owner, name)
        setattr(owner, name, around(original))
        try:
            yield
        finally:
            setattr(owner, name, original)

    return replaced()


#: Code of the wrapper that Optimizer puts around every step() (torch/optim/optimizer.py).
_STEP_CODE = Optimizer.profile_hook_step(lambda optimizer: None).__code__


def _running_steps() -> int:
    """How many hooked optimizer steps are on this thread's call stack."""
    count, frame = 0, sys._getframe()
    while frame is not None:
        count += frame.f_code is _STEP_CODE
        frame = frame.f_back  # type: ignore[assignment]
    return count

"""Probes of modules: when they run, and what happens to their parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from pytest_vram.frames import user_line
from pytest_vram.numerics.wire import Wire


class ModuleProbes:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._moving = 0  # Module._apply runs for every child

    def install(self) -> None:
        undo = self._wire.undo
        for handle in (
            module_hooks.register_module_module_registration_hook(self._registered),
            module_hooks.register_module_parameter_registration_hook(self._given_parameter),
            module_hooks.register_module_forward_pre_hook(self._entered),
            after_forward := module_hooks.register_module_forward_hook(
                self._left, with_kwargs=True, always_call=True
            ),
        ):
            undo.callback(handle.remove)
        # RemovableHandle forgets this entry (torch/nn/modules/module.py, 2.6 to 2.14).
        undo.callback(module_hooks._global_forward_hooks_with_kwargs.pop, after_forward.id, None)
        self._wire.patch(nn.Module, "load_state_dict", self._around_module_load)
        self._wire.patch(nn.Module, "_apply", self._around_apply)

    # ---- running

    def _registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._wire.tell("children_added", parent)

    def _given_parameter(self, parent: nn.Module, name: str, parameter: Tensor | None) -> None:
        if parameter is not None:
            self._wire.tell("parameter_added", parameter)

    def _entered(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._wire.depth += 1
        if self._wire.depth == 1 and not self._wire.backward_depth:
            self._wire.tell("forward_begins", module)

    def _left(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """``rest`` is ``(kwargs, output)``, or ``(output,)`` when the forward raised."""
        if torch.compiler.is_compiling() or not self._wire.depth:
            return
        self._wire.depth -= 1
        if len(rest) < 2:
            return
        kwargs, output = rest
        self._wire.tell("module_ran", module, output)
        if not self._wire.depth and not self._wire.backward_depth:
            self._wire.tell("forward_ends", module, (args, kwargs), output)

    # ---- their parameters

    def _around_module_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def load_state_dict(module: nn.Module, state: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            tied = ties(module)
            result = load(module, state, *args, **kwargs)
            assigned = kwargs.get("assign", args[1:2] == (True,))
            self._compare_ties(module, tied, f"load_state_dict(assign={assigned})")
            self._wire.tell("module_loaded", module, state, user_line())
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
                self._wire.tell("ties_broken", module, names, how, user_line())


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

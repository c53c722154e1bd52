"""``torch.jit.trace`` inside a simulation: what would be traced runs, and is returned.

The tracer hands sizes out as tensors, which the shape rules of simulated operators cannot take, and
keeps results that it saw nobody make as constants. On a card it takes what running takes: once to
record and, unless told otherwise, four times to check (``_check_trace``, torch/jit/_trace.py), of
which the last three results are held side by side.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pytest_vram.frames import user_line
from pytest_vram.sim.patching import Patches
from pytest_vram.sim.values import NoSimulatedKernel

_trace = torch.jit.trace


def run_instead_of_tracing(held: Patches) -> None:
    """Until ``held`` is undone, tracers run what they are given; ``torch.export`` is refused: its
    own fake tensors end the process where PyTorch has no CUDA."""
    held.set(torch.jit, "trace", _tracing)
    held.set(torch.jit, "trace_module", _tracing_methods)
    held.set(torch.export, "export", _exporting)


def _tracing(
    func: Any, example_inputs: Any = None, optimize: Any = None, check_trace: bool = True,
    *_: Any, example_kwarg_inputs: Mapping[str, Any] | None = None, **__: Any,
) -> Any:  # fmt: skip
    if isinstance(example_inputs, Tensor | dict):
        example_inputs = (example_inputs,)
    inputs = tuple(example_inputs or ())
    _run(func, inputs, example_kwarg_inputs or {}, check_trace)
    return _as_traced(func)


def _tracing_methods(
    mod: nn.Module, inputs: Mapping[str, Any], optimize: Any = None, check_trace: bool = True,
    *_: Any, **__: Any,
) -> Any:  # fmt: skip
    for name, example in inputs.items():
        method = mod if name == "forward" else getattr(mod, name)
        _run(method, example if isinstance(example, tuple) else (example,), {}, check_trace)
    return _as_traced(mod)


def _run(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], check: bool
) -> None:
    func(*args, **kwargs)
    if not check:
        return

    def again() -> Any:
        copies = tree_map_only(Tensor, _copy, (args, dict(kwargs)))
        return func(*copies[0], **copies[1])

    again()
    held = [again() for _ in range(3)]
    del held


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _exporting(*_: Any, **__: Any) -> Any:
    raise NoSimulatedKernel(
        f"torch.export at {user_line()} is not simulated: it traces with fake tensors of its own"
    )


# -- what is returned -----------------------------------------------------------------------


class _Traced:
    """What others ask of a traced function or module, beside calling it."""

    @property
    def graph(self) -> Any:
        """A graph for those who write it down; no more than that of a module that does nothing."""
        return _stand_in().graph

    inlined_graph = graph

    @property
    def code(self) -> str:
        return str(_stand_in().code)

    @property
    def original_name(self) -> str:
        return type(self).__name__

    def save(self, f: Any, **_: Any) -> None:
        _stand_in().save(f)


def _stand_in() -> Any:
    with warnings.catch_warnings():  # the program hears from its own call that tracing is old
        warnings.simplefilter("ignore", DeprecationWarning)
        return _trace(nn.Identity(), torch.zeros(1), check_trace=False)  # type: ignore[no-untyped-call]


class _TracedFunction(_Traced):
    def __init__(self, function: Callable[..., Any]) -> None:
        self.__wrapped__ = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


def _as_traced(func: Any) -> Any:
    """A module is returned as one that shares everything with it: its parameters stay its own."""
    if not isinstance(func, nn.Module):
        return _TracedFunction(func)
    kind: Any = type(type(func).__name__, (_Traced, type(func)), {"__module__": __name__})
    traced = kind.__new__(kind)
    traced.__dict__ = func.__dict__
    return traced

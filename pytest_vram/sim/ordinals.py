"""Device ordinals in a PyTorch that was built without any accelerator.

``model.to(0)``, ``tensor.cuda(0)`` and ``torch.zeros(3, device=0)`` mean the current accelerator's
device 0. C++ looks that accelerator up among the backends it was compiled with
(``at::getAccelerator``, aten/src/ATen/DeviceAccelerator.cpp) before anything is dispatched, so a
CPU wheel refuses. Where it would, whole numbers are turned into ``cuda:N`` on the Python side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.jit._builtins import _get_builtin_table
from torch.utils._device import _device_constructors

from pytest_vram.sim.patching import Patches

MAKERS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like",
        "zeros_like")  # fmt: skip


def understand_ordinals(held: Patches, stack: ExitStack) -> None:
    """Let whole numbers name the simulated card, where this PyTorch cannot; until ``held`` is
    undone and ``stack`` closed."""
    try:
        torch.device(0)
    except RuntimeError:  # a build without accelerators: the patches below are needed
        pass
    else:
        return
    for name in sorted(factories() | set(LIKE)):
        replace_builtin(held, stack, name, _by_keyword(getattr(torch, name)))
    replace_builtin(held, stack, "device", _device_class(torch.device))
    for name in MAKERS:
        held.set(torch.Tensor, name, _by_keyword(getattr(torch.Tensor, name)))
    for name in ("to", "cuda"):
        held.set(torch.Tensor, name, _anywhere(getattr(torch.Tensor, name)))
    held.set(torch._C._nn, "_parse_to", _anywhere(torch._C._nn._parse_to))


@functools.lru_cache(maxsize=1)
def factories() -> frozenset[str]:
    """Functions of ``torch`` that take a device. ``set_default_device`` compares with those that it
    finds at first: this is called before anything is replaced."""
    names = {function.__name__ for function in _device_constructors()}
    return frozenset(names & set(vars(torch)))


def replace_builtin(held: Patches, stack: ExitStack, name: str, ours: Any) -> None:
    """Put ``ours`` in the place of a function of ``torch``; torch.jit knows those by identity."""
    theirs = getattr(torch, name)
    held.set(torch, name, ours)
    scripted = _get_builtin_table()  # type: ignore[no-untyped-call]
    if id(theirs) in scripted:
        scripted[id(ours)] = scripted[id(theirs)]
        stack.callback(scripted.pop, id(ours))


def _is_ordinal(value: Any) -> bool:
    return type(value) is int


def _by_keyword(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if _is_ordinal(kwargs.get("device")):
            kwargs["device"] = f"cuda:{kwargs['device']}"
        return function(*args, **kwargs)

    return called


def _anywhere(function: Callable[..., Any]) -> Callable[..., Any]:
    """For functions whose only whole number is a device."""
    by_keyword = _by_keyword(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if any(_is_ordinal(arg) for arg in args):
            args = tuple(f"cuda:{arg}" if _is_ordinal(arg) else arg for arg in args)
        return by_keyword(*args, **kwargs)

    return called


def _device_class(original: Any) -> Any:
    """``torch.device`` that takes a whole number; its instances are the original's."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs and _is_ordinal(args[0]):
                return original("cuda", args[0])
            return original(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is original

        def __hash__(cls) -> int:
            return hash(original)

    return Meta("device", (), {"__module__": "torch", "__doc__": original.__doc__})

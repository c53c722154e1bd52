"""The device ``meta`` as programs mean it: libraries build models there, to load them later.

C++ believes that simulated tensors are on ``meta`` (:mod:`pytest_vram.sim.tensors`), and what it
makes beside one it makes there: for it the word means the card. Python is told ``cuda`` of such
tensors, so where Python says ``meta``, it means tensors without memory.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._device import DeviceContext

from pytest_vram.sim.ordinals import LIKE, MAKERS, factories, replace_builtin
from pytest_vram.sim.patching import Patches
from pytest_vram.sim.tensors import META, SimTensor

_said = threading.local()


def is_meant() -> bool:
    """Whether the call that is dispatched now was given ``meta`` by Python."""
    return getattr(_said, "meta", False)


def mean_what_python_says(held: Patches, stack: ExitStack) -> None:
    """Until ``held`` is undone and ``stack`` closed, ``device="meta"`` makes tensors of PyTorch's
    own ``meta``, and so does ``with torch.device("meta")``."""
    for name in sorted(factories() | set(LIKE)):
        replace_builtin(held, stack, name, _by_keyword(getattr(torch, name)))
    for name in MAKERS:
        held.set(torch.Tensor, name, _by_keyword(getattr(torch.Tensor, name)))
    held.set(torch.Tensor, "to", _moved(torch.Tensor.to))
    in_context: Any = DeviceContext.__torch_function__

    def __torch_function__(  # noqa: N807
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self.device.type != "meta":
            return in_context(self, func, types, args, kwargs)
        with _meaning_it():
            return in_context(self, func, types, args, kwargs)

    held.set(DeviceContext, "__torch_function__", __torch_function__)


@contextmanager
def _meaning_it() -> Iterator[None]:
    before = is_meant()
    _said.meta = True
    try:
        yield
    finally:
        _said.meta = before


def _is_meta(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "meta"
    return isinstance(device, str) and device.partition(":")[0] == "meta"


def _by_keyword(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not _is_meta(kwargs.get("device")):
            return function(*args, **kwargs)
        with _meaning_it():
            if args and type(args[0]) is SimTensor:
                args = (_without_memory(args[0]), *args[1:])
            return function(*args, **kwargs)

    return called


def _moved(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def called(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _is_meta(args[0] if args else kwargs.get("device")):
            return to(self, *args, **kwargs)
        with _meaning_it():
            return to(_without_memory(self), *args, **kwargs)

    return called


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not SimTensor:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)

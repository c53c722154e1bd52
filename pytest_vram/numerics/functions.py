"""Calls of PyTorch's functions by the program, seen where that is cheap: in the run on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from pytest_vram.numerics.probes import Probes


class Sight(Protocol):
    """A part of the watch that wants to know of some functions."""

    functions: Collection[Any]

    def called(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """One of ``functions`` was called by the program, and returned."""


class Functions(TorchFunctionMode):
    """Context manager; tells ``sights`` of the functions that they name."""

    def __init__(self, probes: Probes, sights: Collection[Sight]) -> None:
        super().__init__()
        self._probes = probes
        self._told: dict[Any, list[Callable[..., None]]] = {}
        for sight in sights:
            for func in sight.functions:
                self._told.setdefault(func, []).append(sight.called)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        told = self._told.get(func)
        if told is not None and not self._probes.telling:
            with torch._C.DisableTorchFunction():
                for tell in told:
                    tell(func, args, result)
        return result

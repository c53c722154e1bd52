"""What the probes share: whom they tell, what they have patched, and where the program is."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pytest_vram.numerics.events import Listener, Update


@dataclass
class Wire:
    """``listeners`` are told in the given order. ``values=False``: tensors have no values (a
    simulated pass), so nothing is read from them."""

    listeners: tuple[Listener, ...]
    values: bool = True
    #: Scale every loss by 1, to see gradients as they are: a diagnostic replay.
    unit_scale: bool = False
    scales: weakref.WeakKeyDictionary[Any, float] = field(default_factory=weakref.WeakKeyDictionary)
    #: Reads a loss before it is scaled, without keeping it: afterwards it may be inf.
    capture: Callable[[Tensor], Any] | None = None
    telling: bool = False  #: listeners are at work: operators that run now are theirs
    depth: int = 0  #: modules that are running
    backward_depth: int = 0
    updates: list[Update] = field(default_factory=list)  #: that have begun and not ended

    def __post_init__(self) -> None:
        self.undo = contextlib.ExitStack()
        self._audience: dict[str, list[Callable[..., None]]] = {}

    def patch(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
        setattr(owner, name, around(original))
        self.undo.callback(setattr, owner, name, original)

    def tell(self, event: str, *args: Any) -> None:
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

    def scale_of(self, scaler: Any) -> float:
        """The scale, read once per change: reading it waits for the GPU."""
        if not scaler.is_enabled() or not self.values:
            return float(getattr(scaler, "_init_scale", 1.0)) if scaler.is_enabled() else 1.0
        if scaler not in self.scales:
            self.scales[scaler] = float(scaler.get_scale())
        return self.scales[scaler]

    def found_inf(self, scaler: Any, optimizer: Any) -> bool:
        """Whether the scaler's own check found inf or NaN for this optimizer since update()."""
        if not self.values:
            return False
        states = getattr(scaler, "_per_optimizer_states", {})
        if id(optimizer) not in states:
            return False
        found = states[id(optimizer)]["found_inf_per_device"].values()
        return any(bool(value.item()) for value in found)

    def captured(self, loss: Tensor) -> Any:
        if self.capture is None:
            return None
        self.telling = True
        try:
            with torch._C.DisableTorchFunction():
                return self.capture(loss)
        finally:
            self.telling = False

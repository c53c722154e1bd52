"""What each gradient scaler was told, in the order of the calls."""

from __future__ import annotations

import weakref
from typing import Any

from pytest_vram.numerics.events import Listener, ScalerCall, Update


class ScalerSeen:
    """What one scaler did since its last update, and ever."""

    def __init__(self) -> None:
        self.unscaled: dict[int, str] = {}
        self.stepped: dict[int, str] = {}
        self.ever_stepped: dict[int, str] = {}
        self.last_found_inf: dict[int, bool] = {}
        self.updates = 0
        self.updated_at = ""
        self.loaded = False


class ScalerCalls(Listener):
    """Of every scaler of a pass; to be told of a call before those that ask."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Any, ScalerSeen] = weakref.WeakKeyDictionary()

    def of(self, scaler: Any) -> ScalerSeen:
        return self._seen.setdefault(scaler, ScalerSeen())

    def that_stepped(self, optimizer: Any) -> list[ScalerSeen]:
        return [seen for seen in self._seen.values() if id(optimizer) in seen.ever_stepped]

    def scaler_called(self, call: ScalerCall) -> None:
        seen = self.of(call.scaler)
        if call.error is not None:
            return
        if call.kind == "unscale_":
            seen.unscaled[id(call.optimizer)] = call.line
        elif call.kind == "step":
            seen.stepped[id(call.optimizer)] = call.line
        elif call.kind == "update":
            seen.unscaled.clear()
            seen.stepped.clear()
            seen.updates += 1
            seen.updated_at = call.line
        elif call.kind == "load_state_dict":
            seen.loaded = True

    def update_ends(self, update: Update) -> None:
        if update.scaler is not None:
            seen = self.of(update.scaler)
            seen.ever_stepped[id(update.optimizer)] = update.line
            seen.last_found_inf[id(update.optimizer)] = not update.applied

"""A part of the watch that turns what it saw into findings at once, while modules, optimizers and
the user's frames still exist, so that the sentence can name the line and the parameters."""

from __future__ import annotations

from typing import Any

from pytest_vram.findings import Finding
from pytest_vram.numerics.events import Listener
from pytest_vram.numerics.loop import Loop


class Collector(Listener):
    """Adds to ``found``, which it may share with others: each kind of mistake once."""

    def __init__(self, loop: Loop, found: dict[str, Finding]) -> None:
        self._loop, self.found = loop, found

    def _add(self, key: str, sentence: str, *details: str, hint: str = "", **more: Any) -> None:
        kind = more.pop("kind", "scaler")
        severity = more.pop("severity", "fail")
        if key not in self.found:
            self.found[key] = Finding(kind, severity, sentence, details, hint, more)

"""Attributes replaced for as long as a simulation lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_MISSING = object()


class Patches:
    """Remembers what it replaces and puts it back, last first."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """``owner.name = value``; an attribute that ``owner`` only inherits is deleted later."""
        own = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else _MISSING
        self._undo.append((owner, name, own))
        setattr(owner, name, value)

    def replace(self, owner: Any, **values: Any) -> None:
        """Set every name that ``owner`` has; versions of PyTorch differ in what there is."""
        for name, value in values.items():
            if hasattr(owner, name):
                self.set(owner, name, value)

    def undo(self) -> None:
        while self._undo:
            owner, name, value = self._undo.pop()
            if value is _MISSING:
                with contextlib.suppress(AttributeError):
                    delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextlib.contextmanager
def patches() -> Iterator[Patches]:
    held = Patches()
    try:
        yield held
    finally:
        held.undo()

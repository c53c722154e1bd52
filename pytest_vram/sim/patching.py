"""Attributes replaced for as long as a simulation lasts."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

_MISSING = object()

#: Our values that were taken away again, while somebody else still holds them; see :func:`heal`.
_undone: list[tuple[Any, str, weakref.ref[Any], Any]] = []


class Patches:
    """Remembers what it replaces and puts it back, last first."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """``owner.name = value``; an attribute that ``owner`` only inherits is deleted later."""
        own = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else _MISSING
        self._undo.append((owner, name, own, value))
        setattr(owner, name, value)

    def replace(self, owner: Any, **values: Any) -> None:
        """Set every name that ``owner`` has; versions of PyTorch differ in what there is."""
        for name, value in values.items():
            if hasattr(owner, name):
                self.set(owner, name, value)

    def undo(self) -> None:
        _undone[:] = [entry for entry in _undone if entry[2]() is not None]
        while self._undo:
            owner, name, own, ours = self._undo.pop()
            with contextlib.suppress(TypeError):  # a value that takes no weak references
                _undone.append((owner, name, weakref.ref(ours), own))
            _put_back(owner, name, own)


def _put_back(owner: Any, name: str, value: Any) -> None:
    if value is _MISSING:
        with contextlib.suppress(AttributeError):
            delattr(owner, name)
    else:
        setattr(owner, name, value)


def heal() -> None:
    """Take away what came back: a ``monkeypatch`` of the test that replaced a patched attribute in
    some pass "restores" what it found there, and does so after the pass."""
    for owner, name, ours, own in _undone:
        mine = ours()
        if mine is not None and getattr(owner, "__dict__", {}).get(name) is mine:
            _put_back(owner, name, own)
    _undone.clear()


@contextlib.contextmanager
def patches() -> Iterator[Patches]:
    held = Patches()
    try:
        yield held
    finally:
        held.undo()

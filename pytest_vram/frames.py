"""Whose line is it: running frames, read as the user's code, a library's, or nobody's concern."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, Literal

import torch

from pytest_vram.places import installed, is_package, shown

#: What calls the test. Its plugins (``pytest_asyncio``, ...) are part of it.
_HARNESS = ("pytest", "_pytest", "pluggy", "xdist")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep

Owner = Literal["user", "library", "machinery"]

#: Asked for several frames at every allocation. By path: code objects are equal to one another when
#: their code is, whatever their file.
_NAMED: dict[str, bool] = {}


@lru_cache(maxsize=10_000)
def owner(path: str) -> Owner:
    """Whose source file it is. ``machinery``: PyTorch, pytest, Python and this package, in which
    nobody looks for the cause of their figures. ``library``: one of models or trainers."""
    if path.startswith(("<", _TORCH)) or is_package(path):
        return "machinery"
    if inside := installed(path):
        return "machinery" if inside.startswith(_HARNESS) else "library"
    return "machinery" if path.startswith(_STDLIB) else "user"


def nearest_frame() -> tuple[CodeType, int] | None:
    """Code and line of the innermost frame of the user or a library, formatted only when somebody
    reads it: see :func:`describe`."""
    frame: FrameType | None = sys._getframe(1)
    known = _NAMED
    while frame is not None:
        path = frame.f_code.co_filename
        named = known.get(path)
        if named is None:
            named = known[path] = owner(path) != "machinery"
        if named:
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None


def describe(code: CodeType, line: int) -> str:
    """``train/loss.py:41 compute_loss``, the path relative to :func:`pytest_vram.places.here`."""
    return describe_line(code.co_filename, line, code.co_name)


def describe_line(path: str, line: int, function: str) -> str:
    """:func:`describe` where only names are known, as in PyTorch's memory history."""
    return f"{shown(path)}:{line} {function}"


def user_frames() -> Iterator[FrameType]:
    """Frames of the user's own code, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if owner(frame.f_code.co_filename) == "user":
            yield frame
        frame = frame.f_back


def user_line() -> str:
    """The innermost line of user code; inside a trainer of a library that line of the library
    comes first, because the user's own line only says ``trainer.train()``."""
    library = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        whose = owner(frame.f_code.co_filename)
        if whose == "user":
            mine = describe(frame.f_code, frame.f_lineno)
            return f"{library} (called from {mine})" if library else mine
        if whose == "library" and not library:
            library = describe(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return library or "an unknown line"


def local_variables(frame: FrameType) -> dict[str, Any]:
    """A copy of a frame's variables that keeps nothing alive once it is dropped.

    Before Python 3.13 ``f_locals`` of a function is a snapshot that the frame itself keeps, with a
    reference to every local: a tensor that the function deletes would live on. The snapshot is
    emptied again (it is not written back to the function's variables).
    """
    found = frame.f_locals
    copy = dict(found)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & 0x2 and isinstance(found, dict):
        found.clear()  # CO_NEWLOCALS: a function, not a module whose f_locals are its globals
    return copy

"""Where in the user's code something happened, and what the user calls the things in it."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from pytest_vram.places import here

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = tuple(
    {sysconfig.get_paths()[key] + os.sep for key in ("purelib", "platlib")} | {"<frozen", "<string"}
)


@lru_cache(maxsize=4096)
def _kind(filename: str) -> str:
    """``hidden`` (PyTorch, this plugin, the standard library), ``library`` or ``user``."""
    if filename.startswith((_TORCH, _OURS)):
        return "hidden"
    if filename.startswith(_PACKAGES) or f"{os.sep}site-packages{os.sep}" in filename:
        return "library"
    return "hidden" if filename.startswith((_STDLIB, "<")) else "user"


def shown(filename: str, line: int, function: str) -> str:
    """``train/loss.py:41 compute_loss``, relative to :func:`pytest_vram.places.here` if inside."""
    with contextlib.suppress(ValueError):
        filename = str(Path(filename).relative_to(here()))
    return f"{filename}:{line} {function}"


def user_frames(start: FrameType | None = None) -> Iterator[FrameType]:
    """Frames of user code, innermost first."""
    frame = start or sys._getframe(1)
    while frame is not None:
        if _kind(frame.f_code.co_filename) == "user":
            yield frame
        frame = frame.f_back  # type: ignore[assignment]


def user_line() -> str:
    """The innermost line of user code; inside a trainer of a library that line of the library
    comes first, because the user's own line only says ``trainer.train()``."""
    library = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        kind = _kind(code.co_filename)
        if kind == "user":
            mine = shown(code.co_filename, frame.f_lineno, code.co_name)
            return f"{library} (called from {mine})" if library else mine
        if kind == "library" and not library and "pytest" not in code.co_filename:
            path = code.co_filename.split("site-packages" + os.sep)[-1]
            library = f"{path}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return library or "unknown line"


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

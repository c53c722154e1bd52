"""Source files: what people read as their names, and which of them are installed.

Names are relative to the rootdir, wherever a test has changed to. It knows paths alone, without
PyTorch; :mod:`pytest_vram.frames` reads running frames with it, :mod:`pytest_vram.tracebacks` the
frames of an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path

_directory: ContextVar[str] = ContextVar("vram_directory", default="")


@contextmanager
def shown_from(directory: str | Path) -> Iterator[None]:
    """Lines of code are named relative to ``directory`` while this is open."""
    token = _directory.set(str(directory))
    try:
        yield
    finally:
        _directory.reset(token)


def here() -> str:
    """The directory that paths are relative to; outside of :func:`shown_from` the current one."""
    return _directory.get() or os.getcwd()


def shown(path: str) -> str:
    """A source file as people read it: relative to :func:`here`, or to where it is installed."""
    return _shown(path, here())


@lru_cache(maxsize=10_000)
def _shown(path: str, directory: str) -> str:
    if inside := installed(path):
        return inside
    try:
        relative = os.path.relpath(path, directory)
    except ValueError:  # another drive on Windows
        return path
    return path if relative.startswith("..") else relative


def installed(path: str) -> str:
    """An installed source file, relative to where packages are installed; empty for others."""
    for site in _SITES:
        if site in path:
            return path.rsplit(site, 1)[1]
    return ""


def is_library(path: str) -> bool:
    """Whether a source file is not the user's: installed, or part of Python or of this package."""
    return bool(installed(path)) or path.startswith((_PACKAGE, _PYTHON))


def is_package(path: str) -> bool:
    """Whether a source file is this package's."""
    return path.startswith(_PACKAGE)


_SITES = tuple(os.sep + name + os.sep for name in ("site-packages", "dist-packages"))
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep

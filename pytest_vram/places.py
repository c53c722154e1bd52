"""Where the paths begin that people read: the rootdir, wherever a test has changed to."""

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
    if _SITE in path:
        return path.rsplit(_SITE, 1)[1]
    try:
        relative = os.path.relpath(path, directory)
    except ValueError:  # another drive on Windows
        return path
    return path if relative.startswith("..") else relative


def is_library(path: str) -> bool:
    """Whether a source file is not the user's: installed, or part of Python or of this package."""
    return _SITE in path or path.startswith((_PACKAGE, _PYTHON))


def is_package(path: str) -> bool:
    """Whether a source file is this package's."""
    return path.startswith(_PACKAGE)


_SITE = os.sep + "site-packages" + os.sep
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(os.__file__)) + os.sep

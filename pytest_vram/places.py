"""Where the paths begin that people read: the rootdir, wherever a test has changed to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_directory: ContextVar[str] = ContextVar("vram_directory", default="")


@contextmanager
def shown_from(directory: Path) -> Iterator[None]:
    """Lines of code are named relative to ``directory`` while this is open."""
    token = _directory.set(str(directory))
    try:
        yield
    finally:
        _directory.reset(token)


def here() -> str:
    """The directory that paths are relative to; outside of :func:`shown_from` the current one."""
    return _directory.get() or os.getcwd()

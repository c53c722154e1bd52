"""What a long run is doing, right of pytest's own line and gone before pytest writes on.

The cursor is saved, the text written with line wrap off, the cursor put back: pytest's line is as
it was, and one "erase to the end of the line" removes every trace. Terminals without these controls
(ECMA-48 EL, DEC save/restore cursor and autowrap) are told by ``TERM`` and get nothing; neither do
files, pipes, ``-q``, ``-s`` and live logs, where the test itself may write to the line.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_WRAP_OFF, _WRAP_ON = "\x1b[?7l", "\x1b[?7h"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_ERASE = "\x1b[K"


class Progress:
    """Shows one text at a time; ``show("")`` removes it. ``write`` is ``None`` where nothing may
    be shown."""

    def __init__(
        self, write: Callable[[str], None] | None, close: Callable[[], None] | None = None
    ) -> None:
        self._write = write
        self._close = close
        self._shown = False
        self._running: dict[str, None] = {}

    def show(self, text: str) -> None:
        if self._write is None or not (text or self._shown):
            return
        clean = "".join(one if one.isprintable() else "?" for one in text)
        body = f"{_SAVE}{_WRAP_OFF}  {_DIM}{clean}{_PLAIN}{_WRAP_ON}{_RESTORE}" if text else ""
        self._write(_ERASE + body)
        self._shown = bool(text)

    def close(self) -> None:
        """Nothing is shown from now on."""
        self._write = None
        if self._close is not None:
            self._close()
            self._close = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Out of the way while pytest writes."""
        self.show("")
        yield

    # ---- workers of pytest-xdist: the controller knows which tests run, not which pass

    def started(self, nodeid: str) -> None:
        self._running[nodeid] = None

    def finished(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    def show_running(self) -> None:
        names = [nodeid.rpartition("/")[2] for nodeid in self._running]
        self.show(f"running {', '.join(names)}" if names else "")


def to_terminal(out: TextIO, *, quiet: bool, captured: bool) -> Progress:
    """Progress on the terminal behind ``out``, if it is one that can show it. ``captured``: tests'
    own output does not reach the terminal."""
    term = os.environ.get("TERM", "dumb")
    if quiet or not captured or term in ("dumb", "unknown") or sys.platform == "win32":
        return Progress(None)
    try:
        if not out.isatty():
            return Progress(None)
        # pytest points descriptor 1 elsewhere while a test runs: keep one that stays.
        handle = os.dup(out.fileno())
    except (OSError, ValueError, AttributeError):
        return Progress(None)
    encoding = getattr(out, "encoding", None) or "utf-8"

    def write(text: str) -> None:
        out.flush()
        with contextlib.suppress(OSError):  # the terminal is gone
            os.write(handle, text.encode(encoding, errors="replace"))

    return Progress(write, lambda: os.close(handle))

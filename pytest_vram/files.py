"""Whole files or none. At every moment, also after a crash or on a full disk, a reader finds the
old content of a file or the new one."""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
from pathlib import Path

#: What half-written files end in; a ``.gitignore`` may name it.
SUFFIX = ".tmp"
#: Characters of a name that its half-written file repeats: the rest of 255 is the system's.
_REPEATED = 100


def write_whole(path: Path, data: bytes) -> None:
    """``path`` holds ``data`` afterwards, durably; its directory must be there. A link is followed,
    permissions are kept.

    :raises OSError: and ``path`` is as it was before.
    """
    path = Path(os.path.realpath(path))
    handle, temporary = tempfile.mkstemp(SUFFIX, _prefix(path), path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, path.stat().st_mode if path.exists() else 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_directory(path.parent)


def remove_left_behind(path: Path) -> None:
    """Remove what killed writers of ``path`` left beside it. Only where no other one can be at
    work: the caller holds a lock."""
    pattern = glob.escape(_prefix(path)) + "*" + SUFFIX
    for left_behind in path.parent.glob(pattern):
        left_behind.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    return f".{path.name[:_REPEATED]}."


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync_directory(directory: Path) -> None:
    """Make the rename itself durable, where the system lets us open directories."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

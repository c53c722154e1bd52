"""``--vram-snapshots DIR``: snapshots for PyTorch's memory visualiser (pytorch.org/memory_viz).

They are pickles, as PyTorch writes them. They are written here and never read.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from pathlib import Path
from typing import Any

from pytest_vram.reports.files import write_bytes

#: Characters of a test id that a file name keeps, and how many of them.
_KEPT = re.compile(r"[^A-Za-z0-9._-]+")
_LENGTH = 80


def snapshot_name(nodeid: str, kind: str, attempt: int = 1) -> str:
    """``test_a.py-test_b-1a2b3c4d.simulation.pickle``. The digest tells ids apart that look the
    same without their special characters, and keeps names within what file systems take."""
    digest = hashlib.sha256(nodeid.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    readable = _KEPT.sub("-", nodeid.rpartition("/")[2] if "::" not in nodeid else nodeid)
    readable = readable.strip("-.")[-_LENGTH:].lstrip("-.")
    again = f".attempt{attempt}" if attempt > 1 else ""
    return f"{readable}-{digest}{again}.{kind}.pickle"


def write_snapshot(
    directory: Path, nodeid: str, kind: str, snapshot: dict[str, Any], attempt: int = 1
) -> str:
    """Write one pass's snapshot; returns what went wrong, if anything."""
    path = directory / snapshot_name(nodeid, kind, attempt)
    try:
        write_bytes(path, pickle.dumps(snapshot, protocol=4))
    except OSError as error:
        return f"no snapshot was written to {path}: {error.strerror or error}"
    return ""

"""What workers of pytest-xdist collected, noted in files: one that dies says nothing more."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

#: Tells a worker, in its ``workerinput``, which file is its own.
KEY = "pytest_vram_note"


class Notes:
    """The controlling process's side: a directory for as long as it runs."""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="pytest-vram-")

    def place(self, worker: str) -> str:
        """The file of one worker."""
        return str(Path(self._directory, f"{worker}.json"))

    def read(self) -> Iterator[dict[str, Any]]:
        """What has been noted so far; a file that a worker died writing is not."""
        for note in sorted(Path(self._directory).glob("*.json")):
            with contextlib.suppress(ValueError):
                yield json.loads(note.read_text(encoding="utf-8"))

    def remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def write_note(worker_input: Mapping[str, Any], content: dict[str, Any]) -> None:
    """The worker's side. One on another machine has only its words at the end of the run."""
    if place := worker_input.get(KEY):
        with contextlib.suppress(OSError):
            Path(place).write_text(json.dumps(content), encoding="utf-8")

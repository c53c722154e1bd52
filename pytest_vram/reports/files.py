"""The files of ``--vram-report``: which format a name means, and writing whole files or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_vram.files import write_whole
from pytest_vram.reports.model import Report

Writer = Callable[[Report], str]


def _json(report: Report) -> str:
    return report.to_json()


def _html(report: Report) -> str:
    from pytest_vram.reports.html import page

    return page(report)


def _markdown(report: Report) -> str:
    from pytest_vram.reports.markdown import document

    return document(report)


def _csv(report: Report) -> str:
    from pytest_vram.reports.csv import rows

    return rows(report)


def _gitlab(report: Report) -> str:
    from pytest_vram.reports.gitlab import code_quality

    return code_quality(report)


#: Suffix -> format; the longest suffix that fits decides.
WRITERS: dict[str, Writer] = {
    ".codequality.json": _gitlab,
    ".json": _json,
    ".html": _html,
    ".md": _markdown,
    ".csv": _csv,
}


def parse_report(text: str) -> Path:
    """The path of one ``--vram-report``. :raises ValueError: if its suffix names no format."""
    path = Path(text)
    if writer_of(path) is None:
        raise ValueError(f"{text!r}: the suffix decides the format: {', '.join(WRITERS)}")
    return path


def writer_of(path: Path) -> Writer | None:
    name = path.name.lower()
    return next(
        (writer for suffix, writer in WRITERS.items() if name.endswith(suffix) and name != suffix),
        None,
    )


def obstacle(path: Path, *, directory: bool = False) -> str:
    """Why a file (or a directory for files) could not be written at ``path``; empty if it can.
    Nothing is created to find out."""
    if directory and path.exists() and not path.is_dir():
        return f"{path} is a file"
    if not directory and path.is_dir():
        return f"{path} is a directory"
    parent = path if directory else path.parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        return f"{parent} is a file"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{parent} cannot be written to"
    return ""


def write_reports(report: Report, paths: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Write every file; returns those written, and what went wrong. One failure spares the
    others."""
    written, problems = [], []
    for path in paths:
        writer = writer_of(path)
        assert writer is not None
        try:
            write_text(path, writer(report))
        except OSError as error:
            problems.append(f"{path} was not written: {error.strerror or error}")
        except Exception as error:  # whatever one format stumbles over, the others are written
            problems.append(f"{path} was not written: {type(error).__name__}: {error}")
        else:
            written.append(_shown(path))
    return written, problems


def _shown(path: Path) -> str:
    """As short as it is clear: relative where it lies below the current directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def write_text(path: Path, text: str) -> None:
    """``text`` as UTF-8, whole or not at all. Characters that UTF-8 does not have (file names that
    are no text) are escaped."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def write_bytes(path: Path, data: bytes) -> None:
    """``data``, whole or not at all; parent directories are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, data)

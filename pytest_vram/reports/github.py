"""GitHub Actions: annotations at the tests' lines, and the step summary.

Workflow commands and their escaping: docs.github.com, "Workflow commands for GitHub Actions", and
actions/toolkit, packages/core/src/command.ts (escapeData, escapeProperty).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pytest_vram.findings import Finding
from pytest_vram.record import TestRecord
from pytest_vram.reports.markdown import document, plain
from pytest_vram.reports.model import Report

#: A step shows ten errors and ten warnings; more are dropped without a word (docs.github.com,
#: "Workflow commands": annotation limits).
SHOWN = 10
#: One step's summary may have 1 MiB (docs.github.com, "Adding a job summary").
SUMMARY_LIMIT = 1_000_000


def running(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get("GITHUB_ACTIONS") == "true"


def annotate(report: Report, root: Path, workspace: str = "") -> list[str]:
    """``::error file=...,line=...::`` for what fails, ``::warning`` for what is worth a look.

    ``root`` is pytest's rootdir; GitHub wants paths from the repository's root, ``workspace``.
    """
    lines: dict[str, list[str]] = {"error": [], "warning": []}
    for record in report.records:
        place = _place(record, root, workspace)
        for found in record.findings:
            kind = {"fail": "error", "warn": "warning"}.get(found.severity)
            if kind == "error" and not record.failed:
                kind = "warning"  # expected: the test is marked xfail
            if kind is not None:
                lines[kind].append(_command(kind, place, _title(record, found), _text(found)))
    for one in report.lost:
        text = f"{plain(one.nodeid)}: VRAM not checked: {one.why}"
        lines["error"].append(_command("error", {}, "not-checked", text))
    shown = []
    for kind, some in lines.items():
        shown += some[:SHOWN]
        if len(some) > SHOWN:
            shown[-1] = _command(
                kind,
                {},
                "pytest-vram",
                f"{len(some) - SHOWN + 1} more: see the step summary",
            )
    return shown


def write_summary(report: Report, environ: Mapping[str, str] = os.environ) -> str:
    """Append the Markdown report to the step's summary; returns what went wrong, if anything."""
    path = environ.get("GITHUB_STEP_SUMMARY")
    if not path or not (report.records or report.unmeasured):
        return ""
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            room = SUMMARY_LIMIT - file.tell()
            text = document(report)
            if len(text.encode("utf-8", "backslashreplace")) <= room:
                file.write(text + "\n")
    except OSError as error:
        return f"the step summary was not written: {error.strerror or error}"
    return ""


def _place(record: TestRecord, root: Path, workspace: str) -> dict[str, str]:
    path = root / record.file
    if workspace:
        try:
            path = path.resolve().relative_to(Path(workspace).resolve())
        except ValueError:
            return {}  # outside the repository: GitHub has no line to show
    else:
        path = Path(record.file)
    return {"file": path.as_posix(), "line": str(record.line)}


def _title(record: TestRecord, found: Finding) -> str:
    return f"{found.kind}: {record.nodeid.partition('::')[2] or record.nodeid}"


def _text(found: Finding) -> str:
    """Sentence, details and hint; terminal escapes and the like are taken out line by line."""
    return "\n".join(plain(line) for line in found.text().splitlines())


def _command(kind: str, place: Mapping[str, str], title: str, text: str) -> str:
    properties = {**place, "title": plain(title)}
    named = ",".join(f"{name}={_escape(value, ':,')}" for name, value in properties.items())
    return f"::{kind} {named}::{_escape(text)}"


def _escape(text: str, more: str = "") -> str:
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text

"""``python -m pytest_vram.reports.gate``: one step of a CI job that runs the marked tests.

Everything comes in environment variables, so that no input of a workflow is ever part of a shell
command. The step itself succeeds; what pytest said is its output ``exit-code``, so that the report
can be uploaded and shown before the job fails.

``VRAM_ARGS``: pytest's arguments, quoted as in a shell. ``VRAM_DEVICE``: for ``--vram-device``.
``VRAM_DIRECTORY``: where reports go. ``VRAM_BASE``: the base branch's report.json, if there is one.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pytest_vram.reports.diffing import compare_reports, markdown
from pytest_vram.reports.files import write_text
from pytest_vram.reports.model import ReportError, read_report

FORMATS = ("json", "html", "md", "csv", "codequality.json")


def main(environ: Mapping[str, str] = os.environ) -> int:
    """:returns: 0, or 2 if the variables cannot be read."""
    directory = Path(environ.get("VRAM_DIRECTORY") or "vram-report")
    try:
        arguments = shlex.split(environ.get("VRAM_ARGS", ""))
    except ValueError as error:
        print(f"::error title=pytest-vram::the arguments for pytest cannot be read: {error}")
        return 2
    _remove_old(directory)
    code = subprocess.run(command(arguments, directory, environ.get("VRAM_DEVICE", ""))).returncode
    compare_with_base(directory, Path(environ.get("VRAM_BASE") or os.devnull), environ)
    if output := environ.get("GITHUB_OUTPUT"):
        with open(output, "a", encoding="utf-8") as file:
            file.write(f"exit-code={code}\n")
    return 0


def _remove_old(directory: Path) -> None:
    """A self-hosted runner keeps files: what an earlier job reported is not this one's result,
    should pytest end without a report."""
    for name in (*(f"report.{suffix}" for suffix in FORMATS), "diff.md"):
        (directory / name).unlink(missing_ok=True)


def command(arguments: list[str], directory: Path, device: str = "") -> list[str]:
    """What is run: pytest of this interpreter, with a report in every format."""
    reports = [f"--vram-report={directory / f'report.{name}'}" for name in FORMATS]
    devices = [f"--vram-device={device}"] if device else []
    return [sys.executable, "-m", "pytest", *devices, *reports, *arguments]


def compare_with_base(directory: Path, base: Path, environ: Mapping[str, str]) -> None:
    """``diff.md`` beside the report and in the step's summary, where both reports are there. A
    base that cannot be read is said and is no reason to fail."""
    head = directory / "report.json"
    if not base.is_file() or not head.is_file():
        return
    try:
        text = markdown(compare_reports(read_report(base), read_report(head)))
    except ReportError as error:
        print(f"::notice title=pytest-vram::not compared with the base branch: {error}")
        return
    write_text(directory / "diff.md", text)
    if summary := environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    raise SystemExit(main())

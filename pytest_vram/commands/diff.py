"""``pytest-vram diff``: what a change costs, from the reports of two runs."""

from __future__ import annotations

from pathlib import Path

import click

from pytest_vram.commands.common import Problem, emit, json_option
from pytest_vram.quantities import QuantityError, Tolerance, parse_tolerance
from pytest_vram.reports import diffing
from pytest_vram.reports.model import Report, ReportError, read_report

FILE = click.Path(path_type=Path)


@click.command("diff")
@click.argument("base", type=FILE)
@click.argument("head", type=FILE)
@click.option("--tolerance", help="Instead of the markers' own, e.g. '1% + 1 MiB' or 0.")
@click.option("--markdown", is_flag=True, help="Print Markdown, for a pull request.")
@json_option
def command(base: Path, head: Path, tolerance: str | None, markdown: bool, as_json: bool) -> None:
    """Compare two reports (pytest --vram-report FILE.json), test by test.

    Exits with 1 if a figure of HEAD is above BASE by more than the tolerance, or a test fails that
    did not; with 3 if no test could be compared.
    """
    if markdown and as_json:
        raise click.UsageError("choose one of --markdown and --json")
    diff = diffing.compare_reports(load(base), load(head), _tolerance(tolerance))
    if as_json:
        emit(diffing.to_dict(diff))
    else:
        click.echo(diffing.markdown(diff) if markdown else diffing.text(diff), nl=False)
    raise SystemExit(diff.exit_code)


def load(path: Path) -> Report:
    """:raises Problem: naming the file, if it is no report."""
    try:
        return read_report(path)
    except ReportError as error:
        raise Problem(str(error)) from None


def _tolerance(text: str | None) -> Tolerance | None:
    if text is None:
        return None
    try:
        return parse_tolerance(int(text) if text.isdigit() else text)
    except QuantityError as error:
        raise Problem(f"--tolerance: {error}") from None

"""``pytest-vram report``: the reports of shards as one, and in other formats."""

from __future__ import annotations

from pathlib import Path

import click

from pytest_vram.commands.common import Problem
from pytest_vram.commands.diff import FILE, load
from pytest_vram.reports.files import WRITERS, obstacle, write_reports, writer_of
from pytest_vram.reports.markdown import document, headline
from pytest_vram.reports.model import merge


@click.command("report")
@click.argument("reports", type=FILE, nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    "outputs",
    type=FILE,
    multiple=True,
    metavar="FILE",
    help=f"Where to write; the suffix decides: {', '.join(WRITERS)}. Repeatable.",
)
def command(reports: tuple[Path, ...], outputs: tuple[Path, ...]) -> None:
    """Join JSON reports (of shards, of several machines) and write them in other formats.

    Without --output the Markdown report is printed.
    """
    for path in outputs:
        if writer_of(path) is None:
            raise Problem(f"{path}: the suffix decides the format: {', '.join(WRITERS)}")
        if problem := obstacle(path):
            raise Problem(problem)
    report = merge([load(path) for path in reports])
    if not outputs:
        click.echo(document(report), nl=False)
        return
    written, problems = write_reports(report, outputs)
    click.echo(f"{headline(report)}: {', '.join(written)}")
    if problems:
        raise Problem("\n".join(problems))

"""``pytest-vram diff``: what changed between two reports, base branch against pull request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_vram.commands.common import Exit, Problem, bill_name, emit, json_option, say, table
from pytest_vram.quantities import (
    QuantityError,
    Tolerance,
    format_bytes,
    format_change,
    format_percent,
    parse_tolerance,
)

if TYPE_CHECKING:
    from pytest_vram.comparison import Comparison
    from pytest_vram.record import TestRecord
    from pytest_vram.reports.model import Report

#: What a marker allows where it says nothing.
TOLERANCE = "2% + 1 MiB"


@dataclass(frozen=True)
class Pair:
    """One test in both reports, and what moved beyond the tolerance. ``other_device`` says so
    where the two were not answered by the same device: then nothing is compared."""

    nodeid: str
    before: int
    now: int
    comparison: Comparison | None
    other_device: str = ""

    @property
    def grown(self) -> bool:
        return self.comparison is not None and bool(self.comparison.grown)


@dataclass(frozen=True)
class Diff:
    """Two reports side by side."""

    pairs: tuple[Pair, ...]
    only_before: tuple[str, ...]
    only_now: tuple[str, ...]

    @property
    def changed(self) -> tuple[Pair, ...]:
        return tuple(p for p in self.pairs if p.comparison is not None and p.comparison.changes)

    @property
    def grown(self) -> tuple[Pair, ...]:
        return tuple(pair for pair in self.pairs if pair.grown)


@click.command("diff")
@click.argument("base", type=click.Path(path_type=Path))
@click.argument("now", type=click.Path(path_type=Path))
@click.option("--tolerance", default=TOLERANCE, show_default=True, help="What may move.")
@click.option("--markdown", is_flag=True, help="Print Markdown, for a comment.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, base: Path, now: Path, tolerance: str, markdown: bool, as_json: bool
) -> None:
    """Compare the JSON reports BASE and NOW (pytest --vram-report FILE.json).

    Exit code 1 if any figure of any test grew by more than the tolerance.
    """
    try:
        allowed = parse_tolerance(tolerance)
    except QuantityError as error:
        raise Problem(f"--tolerance: {error}") from None
    diff = compare_reports(_read(base), _read(now), allowed)
    if as_json:
        emit(to_dict(diff))
    elif markdown:
        click.echo("\n".join(markdown_lines(diff)))
    else:
        _show(diff)
    ctx.exit(Exit.NO if diff.grown else Exit.YES)


def _read(path: Path) -> Report:
    from pytest_vram.reports.model import ReportError, read_report

    try:
        return read_report(path)
    except ReportError as error:
        raise Problem(str(error)) from None


def compare_reports(base: Report, now: Report, tolerance: Tolerance) -> Diff:
    """Every test with a ledger, by its id."""
    before = {record.nodeid: record for record in base.records if record.ledger}
    after = {record.nodeid: record for record in now.records if record.ledger}
    pairs = tuple(
        _pair(before[nodeid], after[nodeid], tolerance) for nodeid in before if nodeid in after
    )
    return Diff(
        pairs,
        tuple(nodeid for nodeid in before if nodeid not in after),
        tuple(nodeid for nodeid in after if nodeid not in before),
    )


def _pair(before: TestRecord, now: TestRecord, tolerance: Tolerance) -> Pair:
    from pytest_vram.comparison import compare, record_of

    assert before.ledger is not None
    assert now.ledger is not None
    sizes = (before.ledger.peak_allocated, now.ledger.peak_allocated)
    was, here = before.environment, now.environment
    if (was.kind, was.gpu) != (here.kind, here.gpu):
        return Pair(now.nodeid, *sizes, None, f"{was.kind}/{was.gpu} -> {here.kind}/{here.gpu}")
    old = record_of(before.ledger, before.environment)
    new = record_of(now.ledger, now.environment)
    return Pair(now.nodeid, *sizes, compare(old, new, tolerance))


def to_dict(diff: Diff) -> dict[str, Any]:
    """JSON-serialisable; sizes in bytes."""
    return {
        "tests": [
            {
                "nodeid": pair.nodeid,
                "before": pair.before,
                "now": pair.now,
                "other_device": pair.other_device,
                "changes": [asdict(c) for c in pair.comparison.changes] if pair.comparison else [],
                "versions": list(pair.comparison.versions) if pair.comparison else [],
            }
            for pair in diff.pairs
        ],
        "only_before": list(diff.only_before),
        "only_now": list(diff.only_now),
        "grown": [pair.nodeid for pair in diff.grown],
    }


def _headline(diff: Diff) -> str:
    total = len(diff.pairs)
    tests = "1 test" if total == 1 else f"{total} tests"
    if not total:
        return "No test is in both reports."
    if not diff.changed:
        return f"{tests} compared, nothing moved beyond the tolerance."
    shrunk = len(diff.changed) - len(diff.grown)
    return f"{tests} compared: {len(diff.grown)} grew, {shrunk} shrank."


def _show(diff: Diff) -> None:
    say(_headline(diff))
    for pair in sorted(diff.changed, key=lambda pair: pair.before - pair.now):
        say()
        say(f"{pair.nodeid}: {_peak(pair)}")
        rows = [
            (
                bill_name(change.title),
                format_bytes(change.before),
                format_bytes(change.now),
                format_change(change.growth, max(change.before, change.now)),
            )
            for change in _changes(pair)
        ]
        table(("", "before", "now", "change"), rows)
        for version in pair.comparison.versions if pair.comparison else ():
            say(f"  {version}")
    for line in _remarks(diff):
        say()
        say(line)


def _changes(pair: Pair) -> Iterator[Any]:
    if pair.comparison:
        yield from sorted(pair.comparison.changes, key=lambda change: -abs(change.growth))


def _peak(pair: Pair) -> str:
    change = pair.now - pair.before
    return (
        f"peak {format_bytes(pair.before)} -> {format_bytes(pair.now)} "
        f"({format_percent(change, pair.before)})"
    )


def _remarks(diff: Diff) -> Iterator[str]:
    for pair in diff.pairs:
        if pair.other_device:
            yield f"not compared, other device: {pair.nodeid} ({pair.other_device})"
    if diff.only_before:
        yield f"only in the first report: {', '.join(diff.only_before)}"
    if diff.only_now:
        yield f"only in the second report: {', '.join(diff.only_now)}"


def markdown_lines(diff: Diff) -> Iterator[str]:
    """The same as a table of GitHub-flavoured Markdown; ids appear as code."""
    from pytest_vram.reports.markdown import code

    yield f"**GPU memory: {_headline(diff)}**"
    if diff.changed:
        yield ""
        yield "| test | figure | before | now | change |"
        yield "|---|---|---:|---:|---:|"
    for pair in sorted(diff.changed, key=lambda pair: pair.before - pair.now):
        for change in _changes(pair):
            moved = format_change(change.growth, max(change.before, change.now))
            percent = format_percent(change.growth, change.before)
            yield (
                f"| {code(pair.nodeid, table=True)} | {bill_name(change.title)} | "
                f"{format_bytes(change.before)} | {format_bytes(change.now)} | "
                f"{moved} ({percent}) |"
            )
    for line in _remarks(diff):
        yield ""
        yield line.replace("|", "\\|")

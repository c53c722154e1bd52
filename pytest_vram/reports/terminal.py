"""The terminal report: one table per run, readable at 80 columns, made of TestRecords alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from pytest_vram.findings import Finding
from pytest_vram.quantities import format_bytes, format_percent, format_share
from pytest_vram.record import TestRecord
from pytest_vram.reports.figures import verdict_text
from pytest_vram.session import LOST, Summary
from pytest_vram.tables import largest_table, listed, moment_table
from pytest_vram.uncertain import interval_lines, part_names

GAP = "  "
#: The space between a figure and its unit.
_UNIT = re.compile(r"(?<=\d) (?=(?:bytes|[KMGT]iB|%)(?!\w))")
MARGIN = 6
#: Marked tests without figures that are listed, without ``-v``.
MISSING_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Line:
    """One line and how it is meant: ``""``, ``ok``, ``warn`` or ``fail``."""

    text: str
    mood: str = ""


def report(
    records: Sequence[TestRecord], summary: Summary, *, width: int = 80, verbosity: int = 0
) -> list[Line]:
    """Everything the terminal says about a run's marked tests; nothing if there were none.

    Quiet (``verbosity`` below 0): only warnings, updates and problems. Verbose: ledgers too.
    """
    lines: list[Line] = []
    if records and verbosity >= 0:
        lines += table(records, width)
        lines += [Line(text) for text in legend(records)]
    if verbosity > 0:
        for record in records:
            lines += [Line(""), *(Line(text) for text in ledger(record))]
    lines += remarks(records, verbosity)
    lines += _missing(summary, verbosity)
    lines += _updates(summary, verbosity)
    return lines


def fitted(lines: Sequence[Line], width: int) -> list[Line]:
    """``lines`` for the screen of a terminal: longer ones go on, further in, between two words.

    Only a screen needs that. In a file or a log each sentence stays on one line, where ``grep``
    finds it whole.
    """
    return [Line(part, line.mood) for line in lines for part in _broken(line.text, width)]


def _broken(text: str, width: int) -> list[str]:
    if len(text) <= width:
        return [text]
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    # A path that is wider than the screen is left to the terminal; a figure stays with its unit.
    joined = _UNIT.sub("\N{NO-BREAK SPACE}", text)
    parts = wrap(
        joined, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [part.replace("\N{NO-BREAK SPACE}", " ") for part in parts]


# ---- the table


def table(records: Sequence[TestRecord], width: int) -> list[Line]:
    """Grouped by file; a test whose name does not fit has it on a line of its own."""
    rows = [_cells(record) for record in records]
    titles = ("device", "peak", "of budget", "baseline", "estimate", "scaler", "verdict")
    # Columns that say nothing in this run are left out.
    used = [at for at, title in enumerate(titles) if title in ("device", "peak", "verdict")
            or any(row[at] for row in rows)]  # fmt: skip
    sizes = {at: max(len(titles[at]), *(len(row[at]) for row in rows)) for at in used}
    names = [_name(record) for record in records]
    room = width - sum(sizes.values()) - len(GAP) * len(used)
    if room < MARGIN:
        # The legend has the devices' full names.
        sizes[0] = max(MARGIN, sizes[0] - MARGIN + room)
        room = MARGIN
    name_width = min(room, max(len("test"), *(len(name) + 2 for name in names)))
    lines = [Line(("test".ljust(name_width) + _row(titles, used, sizes)).rstrip())]
    file = None
    for record, name, row in zip(records, names, rows, strict=True):
        if record.file != file:
            file = record.file
            lines.append(Line(file))
        label, mood = f"  {name}", _mood(record)
        if len(label) > name_width:
            lines.append(Line(label, mood))
            label = ""
        lines.append(Line((label.ljust(name_width) + _row(row, used, sizes)).rstrip(), mood))
    return lines


def _name(record: TestRecord) -> str:
    return record.nodeid.partition("::")[2] or record.nodeid


def _row(cells: Sequence[str], used: Sequence[int], sizes: dict[int, int]) -> str:
    last = used[-1]
    parts = [
        _cut(cells[at], sizes[at]).ljust(sizes[at])
        if at in (0, last)
        else cells[at].rjust(sizes[at])
        for at in used
    ]
    return GAP + GAP.join(parts)


def _cells(record: TestRecord) -> tuple[str, ...]:
    ledger, stored = record.ledger, record.stored or {}
    peak = ledger.peak_allocated if ledger is not None else 0
    failure = ledger.failure if ledger is not None else None
    budget = format_share(peak, record.budget.peak) if record.budget.peak else ""
    before = stored.get("peak_allocated")
    estimate = record.estimate.peak_allocated if record.estimate is not None else None
    scaler = ""
    if record.scaler:
        skipped = record.skipped_steps
        scaler = f"{skipped} skip" if skipped else f"{record.scaler[-1].scale_after:g}"
    return (
        _short(record.environment.gpu),
        "out" if failure is not None and record.verdict == "out-of-memory" else format_bytes(peak),
        budget,
        format_percent(peak - before, before) if before is not None else "",
        format_percent(peak - estimate, estimate) if estimate is not None else "",
        scaler,
        verdict_text(record),
    )


def _cut(text: str, size: int) -> str:
    """At most ``size`` characters, whole words where there are several."""
    if len(text) <= size:
        return text
    return text[: size + 1].rpartition(" ")[0] or text[:size]


def _short(gpu: str) -> str:
    """``H100 80GB HBM3`` for ``NVIDIA H100 80GB HBM3``."""
    return re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", gpu)


def _mood(record: TestRecord) -> str:
    if record.failed:
        return "fail"
    return "ok" if record.verdict == "ok" else "warn"


# ---- what the figures stand for


def legend(records: Sequence[TestRecord]) -> list[str]:
    """Which devices answered, and which numbers were checked where."""
    lines = []
    for environment in dict.fromkeys(str(record.environment) for record in records):
        lines.append(environment + (", to the byte and without values"
                                    if environment.startswith("simulated") else ""))  # fmt: skip
    for names, count in Counter(
        part_names(record.ledger) for record in records if record.ledger and record.ledger.bounds
    ).items():
        tests = "1 test" if count == 1 else f"{count} tests"
        lines.append(f"but for {names} in {tests}: -v shows the interval")
    checked = {"cuda": "on the GPU, in the same run", "cpu": "by a real run on the CPU"}
    parts = []
    for where, how in checked.items():
        count = sum(record.numerics == where for record in records)
        if count:
            parts.append(f"{count} {how}")
    missing = sum(not record.numerics for record in records)
    if missing:
        parts.append(f"{missing} not checked")
    lines.append(f"numbers: {', '.join(parts)}")
    return lines


def ledger(record: TestRecord) -> list[str]:
    """The ledger of one test, for ``-v``."""
    found = record.ledger
    if found is None:
        return []
    exactly = f"{format_bytes(found.peak_allocated)} ({found.peak_allocated} bytes)"
    cached = f"{format_bytes(found.cached)} of it cached"
    reserved = f"reserved {format_bytes(found.peak_reserved)} ({cached})"
    lines = [
        *listed(record.nodeid, [f" ({record.environment})"]),
        *(f"  {line}" for line in listed("peak allocated", [exactly, reserved])),
    ]
    lines += [f"  {line}" for line in moment_table(found.peak)]
    if found.phases:
        phases = [f"{name} {format_bytes(size)}" for name, size in found.phases.items()]
        lines += [f"  {line}" for line in listed("peaks by phase:", phases)]
    if found.steps:
        live = [format_bytes(step.live) for step in found.steps]
        lines += [f"  {line}" for line in listed("alive after each step:", live)]
    if found.base_allocated:
        lines.append(f"  held before the test, not counted: {format_bytes(found.base_allocated)}")
    lines += [f"  {line}" for line in interval_lines(found)]
    lines += [f"  {line}" for line in largest_table(found.largest)]
    for note in record.notes:
        lines += wrap(f"note: {note}", 80, initial_indent="  ", subsequent_indent="    ")
    if record.passes:
        passes = [f"{one.kind} {one.seconds:.1f} s" for one in record.passes]
        lines += [f"  {line}" for line in listed("passes:", passes)]
    return lines


# ---- sentences


def remarks(records: Sequence[TestRecord], verbosity: int) -> list[Line]:
    """Warnings in full; notes in full with ``-v``, else the frequent ones are counted."""
    lines = []
    for record in records:
        for found in record.findings:
            if found.severity == "warn":
                lines += [Line(f"{_name(record)}: {text}" if at == 0 else text, "warn")
                          for at, text in enumerate(found.text().splitlines())]  # fmt: skip
            elif found.severity == "note" and _is_shown(found, verbosity):
                lines += [Line(f"{_name(record)}: {text}" if at == 0 else text)
                          for at, text in enumerate(found.text().splitlines())]  # fmt: skip
    if verbosity < 0:
        return lines
    lines += _grouped_notes(records) if verbosity == 0 else []
    new = [record for record in records if _lacks_baseline(record)]
    if new:
        tests = "1 test has" if len(new) == 1 else f"{len(new)} tests have"
        them = "it" if len(new) == 1 else "them"
        lines.append(Line(f"{tests} no baseline here: pytest --vram-update records {them}"))
        for detail in dict.fromkeys(_baseline_details(new)):
            lines.append(Line(f"  {detail}"))
    return lines


def _is_shown(note: Finding, verbosity: int) -> bool:
    """Notes on what a passing test's memory consists of are for ``-v`` (a failing one's message has
    them as causes), and that a test without an optimizer never trained."""
    quiet = note.kind == "memory-cause" or note.data.get("reason") == "never trained"
    return note.kind != "no-baseline" and verbosity >= (1 if quiet else 0)


def _lacks_baseline(record: TestRecord) -> bool:
    return any(
        found.kind == "no-baseline" and found.severity == "note" for found in record.findings
    )


def _baseline_details(records: Iterable[TestRecord]) -> Iterable[str]:
    for record in records:
        for found in record.findings:
            if found.kind == "no-baseline":
                yield from (f"{_name(record)}: {detail}" for detail in found.details)


def _grouped_notes(records: Sequence[TestRecord]) -> list[Line]:
    """Each different note once, with the tests it is about."""
    about: dict[str, list[str]] = {}
    for record in records:
        for note in record.notes:
            about.setdefault(note, []).append(_name(record))
    lines = []
    for note, names in about.items():
        who = names[0] if len(names) == 1 else f"{len(names)} tests"
        lines.append(Line(f"{who}: {note}"))
    return lines


def _missing(summary: Summary, verbosity: int) -> list[Line]:
    """Marked tests that should have figures and have none: never silently."""
    lines = []
    for why, names in summary.missing.items():
        count = len(names)
        tests = "1 marked test was" if count == 1 else f"{count} marked tests were"
        mood = "fail" if why == LOST else "warn"
        lines.append(Line(f"VRAM not checked: {tests} {why}", mood))
        shown = count if verbosity > 0 else MISSING_SHOWN
        lines += [Line(f"  {name}", mood) for name in names[:shown]]
        if count > shown:
            lines.append(Line(f"  and {count - shown} more (-v lists them)", mood))
    return lines


def _updates(summary: Summary, verbosity: int) -> list[Line]:
    lines = []
    if summary.stale:
        count = len(summary.stale)
        tests = "1 baseline is" if count == 1 else f"{count} baselines are"
        mood = "fail" if summary.failed else ""
        lines.append(
            Line(f"{tests} of tests that are gone: pytest --vram-update=prune removes them", mood)
        )
        for name in summary.stale:
            new = summary.renamed.get(name)
            lines.append(Line(f"  {name}", mood))
            if new is not None:
                lines.append(Line(f"    renamed? the figures of {new} are the same", mood))
    if summary.update:
        lines.append(Line(f"vram baselines: {summary.update}", "ok"))
    lines += [Line(f"vram baselines: {refusal}", "warn") for refusal in summary.refusals]
    lines += [Line(f"vram baselines: {problem}", "fail") for problem in summary.problems]
    lines += [Line(f"vram report: {problem}", "fail") for problem in summary.unwritten]
    if verbosity >= 0:
        lines += [Line(f"vram report: {path}") for path in summary.written]
    return lines

"""The report as GitHub-flavoured Markdown: for step summaries, pull-request comments, GitLab.

Test ids, shapes and names are hostile input. They appear in code spans, in fenced code or escaped
inside ``<code>``, where Markdown, HTML, links and mentions mean nothing.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from pytest_vram.quantities import format_bytes
from pytest_vram.record import TestRecord
from pytest_vram.reports import figures
from pytest_vram.reports.model import Report
from pytest_vram.uncertain import interval_lines, part_names

#: A comment on a pull request takes 65,536 characters (GitHub's REST documentation); the report
#: leaves room for what is put around it.
LIMIT = 60_000
SIGNS = {"fail": "❌", "warn": "⚠️", "ok": "✅"}
#: Tests without figures that are named of one reason.
_NAMED = 10
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200b-\u200f\u202a-\u202e\u2066-\u2069]+")


def document(report: Report, limit: int = LIMIT) -> str:
    """The whole report in at most ``limit`` characters: what does not fit is counted instead,
    the least grave first."""
    head = [f"## {_sign(report)} {headline(report)}", *_remarks(report)]
    records = sorted(report.records, key=lambda one: figures.MOODS.index(figures.mood(one)))
    foot = _footer(report)
    room = limit - _length(head) - _length(foot) - 400  # the sentences about what is left out
    table, left_out = _fitting(_rows(records), room * 6 // 10)
    room -= _length(table)
    tries: dict[str, list[TestRecord]] = {}
    for attempt in report.attempts:
        tries.setdefault(attempt.nodeid, []).append(attempt)
    details, hidden = _fitting(
        [
            _details(one, tries.get(one.nodeid, ()))
            for one in records
            if _has_details(one) or one.nodeid in tries
        ],
        room,
    )
    lines = [*head]
    if table:
        lines += ["", *_table_head(records), *table]
    if left_out:
        lines += ["", f"{left_out} more tests are in the full report."]
    if details:
        lines += ["", *details]
    if hidden:
        lines += ["", f"The details of {hidden} more tests are in the full report."]
    return "\n".join([*lines, "", *foot]) + "\n"


def headline(report: Report) -> str:
    """``GPU memory: 2 of 12 tests failed``."""
    total, failed, warned = len(report.records), len(report.failed), len(report.warned)
    lost = f", {len(report.lost)} lost with a worker" if report.lost else ""
    if not total:
        return f"GPU memory: no test was measured{lost}"
    tests = "1 test" if total == 1 else f"{total} tests"
    if failed:
        return f"GPU memory: {failed} of {tests} failed{lost}"
    return f"GPU memory: {tests} passed{f', {warned} with a remark' if warned else ''}{lost}"


def _sign(report: Report) -> str:
    if report.failed or report.lost:
        return SIGNS["fail"]
    fine = report.records and not report.warned and not report.stopped
    return SIGNS["ok"] if fine else SIGNS["warn"]


def _remarks(report: Report) -> list[str]:
    lines = []
    if report.stopped:
        lines.append(f"The run was not complete: {code(report.stopped)}.")
    by_reason: dict[str, list[str]] = {}
    for one in report.unmeasured:
        by_reason.setdefault(one.why, []).append(code(one.nodeid))
    for why, names in by_reason.items():
        count = len(names)
        tests = "1 marked test has" if count == 1 else f"{count} marked tests have"
        some = ", ".join(names[:_NAMED]) + (", …" if count > _NAMED else "")
        lines.append(f"{tests} no figures, {plain(why)}: {some}.")
    if report.update:
        lines.append(f"Baselines: {report.update}.")
    lines += [f"Baselines: {code(line)}" for line in (*report.refusals, *report.problems)]
    if report.stale:
        count = len(report.stale)
        tests = "1 baseline belongs" if count == 1 else f"{count} baselines belong"
        lines.append(f"{tests} to tests that are gone: `pytest --vram-update=prune` removes them.")
    return [part for line in lines for part in ("", line)]


# ---- the table

_TITLES = (
    "",
    "test",
    "peak",
    "budget",
    "against baseline",
    "against estimate",
    "scaler",
    "verdict",
)


def _cells(record: TestRecord) -> tuple[str, ...]:
    now = figures.peak(record)
    estimate = record.estimate.peak_allocated if record.estimate is not None else None
    return (
        SIGNS[figures.mood(record)],
        code(record.nodeid, table=True),
        figures.size_text(now),
        figures.budget_text(record),
        figures.change_text(now or 0, figures.stored_peak(record)),
        figures.change_text(now or 0, estimate),
        figures.scaler_text(record),
        figures.verdict_text(record),
    )


def _used(records: Sequence[TestRecord]) -> list[int]:
    """Columns that say nothing in this run are left out."""
    rows = [_cells(record) for record in records]
    return [at for at in range(len(_TITLES)) if at < 3 or at == 7 or any(row[at] for row in rows)]


def _table_head(records: Sequence[TestRecord]) -> list[str]:
    used = _used(records)
    rule = ["---" if at in (0, 1, 7) else "--:" for at in used]
    return [_line([_TITLES[at] for at in used]), _line(rule)]


def _rows(records: Sequence[TestRecord]) -> list[list[str]]:
    used = _used(records)
    return [[_line([_cells(record)[at] for at in used])] for record in records]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ---- what there is to say about one test


def _has_details(record: TestRecord) -> bool:
    return figures.mood(record) != "ok" or bool(_said(record))


def _said(record: TestRecord) -> list[str]:
    """Its findings in full. That there is no baseline yet is no news, unless it failed for that."""
    return [
        found.text()
        for found in record.findings
        if found.kind != "no-baseline" or found.severity == "fail"
    ]


def _details(record: TestRecord, attempts: Sequence[TestRecord]) -> list[str]:
    opened = " open" if figures.mood(record) == "fail" else ""
    name = html.escape(plain(record.nodeid))
    said = _said(record)
    if not said and record.outcome == "failed":
        said = ["the test itself failed; its memory was within bounds"]
    if record.ledger is not None and record.ledger.bounds is not None:
        lines = interval_lines(record.ledger)
        if not any(lines[0] in text for text in said):
            said = [*said, "\n".join(lines)]
    return [
        f"<details{opened}><summary>{SIGNS[figures.mood(record)]} <code>{name}</code> "
        f"{html.escape(figures.verdict_text(record))}</summary>",
        "",
        f"{code(str(record.environment))}, numbers {figures.numbers_text(record)}",
        "",
        *(fenced("\n\n".join(said)) if said else []),
        *_attempts(attempts),
        "",
        "</details>",
        "",
    ]


def _attempts(attempts: Sequence[TestRecord]) -> list[str]:
    lines = [""] if attempts else []
    for one in attempts:
        peak = figures.peak(one)
        figure = f", peak {format_bytes(peak)}" if peak is not None else ""
        lines.append(f"- attempt {one.attempt}: {one.outcome}, {one.verdict}{figure}")
    return lines


def _footer(report: Report) -> list[str]:
    environments = dict.fromkeys(str(record.environment) for record in report.records)
    lines = [f"- {code(name)}" for name in list(environments)[:8]]
    checked = sum(bool(record.numerics) for record in report.records)
    for names in dict.fromkeys(part_names(one.ledger) for one in report.records if one.ledger):
        if names:
            lines.append(f"- not known to the byte: {code(names)}")
    if report.records:
        lines.append(f"- numbers checked in {checked} of {len(report.records)} tests")
    lines.append(f"- pytest-vram {report.version}, {report.created}")
    return lines


# ---- Markdown that means nothing but itself


def plain(text: str) -> str:
    """One line: control characters, line breaks and marks that turn text around become spaces."""
    return _CONTROL.sub(" ", text)


def code(text: str, *, table: bool = False) -> str:
    """A code span that shows exactly ``text``. In a ``table`` pipes are escaped (GFM, 4.10)."""
    text = plain(text) or " "
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    if text.startswith(("`", " ")) or text.endswith(("`", " ")):
        text = f" {text} "
    return ticks + (text.replace("|", "\\|") if table else text) + ticks


def fenced(text: str) -> list[str]:
    """A block of code that shows exactly ``text``."""
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return [f"{ticks}text", *(plain(line) for line in text.splitlines()), ticks]


def _length(lines: Iterable[str]) -> int:
    return sum(len(line) + 1 for line in lines)


def _fitting(blocks: Sequence[list[str]], room: int) -> tuple[list[str], int]:
    """The first blocks that fit into ``room`` characters, and how many do not."""
    lines: list[str] = []
    for at, block in enumerate(blocks):
        room -= _length(block)
        if room < 0:
            return lines, len(blocks) - at
        lines += block
    return lines, 0

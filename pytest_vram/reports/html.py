"""The report as one self-contained page: it works offline, and runs no script but its own.

Tables are plain HTML, readable without scripts; charts are drawn by uPlot (assets/uPlot.LICENSE)
when they come into view. Test ids, names and shapes are hostile input: Jinja2 escapes them in text
and attributes, and in the data blocks ``<``, ``>`` and ``&`` are written as JSON escapes. A content
security policy that names the digest of the page's script forbids every other one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from itertools import pairwise
from typing import Any

from markupsafe import Markup, escape

from pytest_vram.environment import changed_versions
from pytest_vram.findings import Finding
from pytest_vram.ledger import Live
from pytest_vram.quantities import format_bytes, format_change, format_percent
from pytest_vram.record import TestRecord
from pytest_vram.reports import figures
from pytest_vram.reports.model import Report
from pytest_vram.timeline import Timeline
from pytest_vram.trace import BILLS
from pytest_vram.uncertain import format_interval

#: Failing tests that are shown unfolded when the page opens.
UNFOLDED = 5
#: In every font, unlike the emoji of the Markdown report.
SIGNS = {"fail": "✗", "warn": "!", "ok": "✓"}


def page(report: Report) -> str:
    """The whole page."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pytest_vram.reports", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {
        "size": format_bytes,
        "exact": _exact,
        "breakable": _breakable,
        "interval": format_interval,
    }
    script = f"{_asset('uPlot.iife.min.js')}\n{_asset('report.js')}"
    records = sorted(report.records, key=lambda one: figures.MOODS.index(figures.mood(one)))
    return environment.get_template("report.html.j2").render(
        report=report,
        totals=report.totals(),
        environments=list(dict.fromkeys(str(record.environment) for record in records)),
        tests=[_test(at, record, report) for at, record in enumerate(records)],
        bills=BILLS,
        columns=_columns(records),
        style=Markup(f"{_asset('uPlot.min.css')}\n{_asset('report.css')}"),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8").strip()


def _exact(size: int) -> str:
    return f"{size:,} bytes"


def _breakable(text: str) -> Markup:
    """Escaped, with the places where a long test id may go on in the next line."""
    made = str(escape(text))
    for mark in ("::", "/"):
        made = made.replace(mark, f"{mark}<wbr>")
    return Markup(made.replace("[", "<wbr>["))


def _columns(records: Sequence[TestRecord]) -> dict[str, bool]:
    """Which columns of the overview say anything in this run."""
    return {
        "budget": any(record.budget.peak for record in records),
        "baseline": any(figures.stored_peak(record) is not None for record in records),
        "estimate": any(record.estimate is not None for record in records),
        "scaler": any(record.scaler for record in records),
    }


# ---- one test, as the template shows it


def _test(at: int, record: TestRecord, report: Report) -> dict[str, Any]:
    ledger = record.ledger
    stored = record.stored or {}
    mood = figures.mood(record)
    share = figures.budget_share(record)
    failure = ledger.failure if ledger is not None else None
    return {
        "key": f"t{at}",
        "record": record,
        "title": figures.title(record),
        "mood": mood,
        "sign": SIGNS[mood],
        "verdict": figures.verdict_text(record),
        "open": mood == "fail" and at < UNFOLDED,
        "peak": figures.peak(record),
        "share": share,
        "share_text": figures.share_text(record),
        "against_baseline": _against(figures.peak(record), figures.stored_peak(record)),
        "against_estimate": _against(
            figures.peak(record),
            record.estimate.peak_allocated if record.estimate is not None else None,
        ),
        "scaler": figures.scaler_text(record),
        "numbers": figures.numbers_text(record),
        "ledger": ledger,
        "failure": failure,
        "totals": list(map(_row, figures.totals(record))),
        "bills": list(map(_row, figures.bills(record))),
        "phases": list(map(_row, figures.phases(record))),
        "has_baseline": bool(stored),
        "has_estimate": record.estimate is not None,
        "largest": [_live(live) for live in (failure.moment if failure else ledger.peak).largest]
        if ledger is not None
        else [],
        "findings": [_finding(found) for found in record.findings],
        "changed": changed_versions(stored.get("versions") or {}, record.environment.versions)
        if stored
        else [],
        "attempts": [one for one in report.attempts if one.nodeid == record.nodeid],
        "extra": {
            name: json.dumps(value, default=str, ensure_ascii=False)
            for name, value in record.extra.items()
        },
        "data": _data(record),
        "label": _label(record),
    }


def _against(now: int | None, before: int | None) -> dict[str, Any]:
    if now is None or before is None:
        return {"text": "", "title": "", "sort": "", "direction": ""}
    change = now - before
    return {
        "text": "unchanged" if not change else format_percent(change, before),
        "title": figures.change_text(now, before),
        "sort": change,
        "direction": _direction(change),
    }


def _direction(change: int) -> str:
    return "up" if change > 0 else "down" if change < 0 else ""


def _row(row: figures.Row) -> dict[str, Any]:
    change = row.change
    return {
        "name": row.name,
        "now": row.now,
        "baseline": row.baseline,
        "estimate": row.estimate,
        "change": format_change(change, max(row.now, row.baseline or 0)) if change else "",
        "percent": format_percent(change, row.baseline or 0) if change else "",
        "direction": _direction(change),
    }


def _live(live: Live) -> dict[str, Any]:
    return {
        "size": live.size,
        "bill": live.bill,
        "tensor": live.tensor,
        "name": live.name,
        "operator": live.operator,
        "module": live.module,
        "frame": live.frame,
    }


def _finding(found: Finding) -> dict[str, Any]:
    return {
        "kind": found.kind,
        "severity": found.severity,
        "sentence": found.sentence,
        "details": "\n".join(found.details),
        "hint": found.hint,
    }


def _label(record: TestRecord) -> str:
    """What a screen reader says in place of the chart."""
    if record.ledger is None:
        return ""
    ledger = record.ledger
    return (
        "Allocated memory over the run, stacked by bill: peak "
        f"{format_bytes(ledger.peak_allocated)} in {ledger.peak}; the slider below walks through it"
    )


# ---- what the charts are drawn from


def _data(record: TestRecord) -> dict[str, Any]:
    """Small enough for hundreds of tests in one page: differences, in the allocator's 512 bytes."""
    return {
        "timeline": None if record.timeline is None else _timeline(record.timeline),
        "lines": _lines(record),
        "scaler": [
            [step.step, _plain(step.scale_before), _plain(step.scale_after), int(step.found_inf)]
            for step in record.scaler
        ],
    }


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _lines(record: TestRecord) -> list[list[Any]]:
    """Horizontal lines: what the peak is held against."""
    estimate = record.estimate.peak_allocated if record.estimate is not None else None
    lines = (
        ("budget", record.budget.peak),
        ("baseline", figures.stored_peak(record)),
        ("estimate", estimate),
    )
    return [[name, value] for name, value in lines if value]


def _timeline(timeline: Timeline) -> dict[str, Any]:
    series = [timeline.reserved, *timeline.bills.values()]
    names: dict[str, int] = {}  # every text once
    spans = [
        [
            span.start,
            span.end,
            span.live.size,
            *(names.setdefault(text, len(names)) for text in _origin(span.live)),
        ]
        for span in timeline.spans
    ]
    unit = 512 if all(value % 512 == 0 for values in series for value in values) else 1
    return {
        "events": timeline.events,
        "unit": unit,
        "at": _steps(timeline.at),
        "reserved": _steps(value // unit for value in timeline.reserved),
        "bills": {
            bill: _steps(value // unit for value in values)
            for bill, values in timeline.bills.items()
        },
        "marks": [[mark.at, mark.name, mark.step] for mark in timeline.marks],
        "names": list(names),
        "spans": spans,
    }


def _steps(values: Iterable[int]) -> list[int]:
    """The first value, then the differences."""
    whole = [0, *values]
    return [after - before for before, after in pairwise(whole)]


def _origin(live: Live) -> tuple[str, ...]:
    return live.bill, live.tensor, live.operator, live.module or live.name, live.frame

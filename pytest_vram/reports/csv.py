"""The report as a table of figures: one test a row, bytes as whole numbers. A test without figures
has the reason for its verdict."""

from __future__ import annotations

import csv
import io
from typing import Any

from pytest_vram.nodeids import split_id
from pytest_vram.record import TestRecord
from pytest_vram.reports.markdown import plain
from pytest_vram.reports.model import Report
from pytest_vram.trace import BILLS

COLUMNS = (
    "nodeid",
    "file",
    "line",
    "environment",
    "answered",
    "outcome",
    "verdict",
    "precision",
    "budget_peak",
    "budget_reserved",
    "peak_allocated",
    "peak_reserved",
    "cached",
    "peak_phase",
    "peak_step",
    "live_after_step",
    "baseline_peak_allocated",
    "estimate_peak_allocated",
    *BILLS,
    "numerics",
    "skipped_steps",
    "final_scale",
    "final_loss",
    "attempt",
    "seconds",
    "findings",
)

#: What makes a spreadsheet take a text for a formula (OWASP, "CSV Injection").
_FORMULA = ("=", "+", "-", "@")


def rows(report: Report) -> str:
    """The whole file; the first row names the columns."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    for record in report.records:
        writer.writerow({name: _cell(value) for name, value in row(record).items()})
    for one in report.unmeasured:
        file = split_id(one.nodeid)[0]
        cells = {"nodeid": one.nodeid, "file": file, "verdict": one.why}
        writer.writerow({name: _cell(value) for name, value in cells.items()})
    return out.getvalue()


def row(record: TestRecord) -> dict[str, Any]:
    """One test's cells; what is not known is left out."""
    cells: dict[str, Any] = {
        "nodeid": record.nodeid,
        "file": record.file,
        "line": record.line,
        "environment": record.environment.key,
        "answered": record.answered,
        "outcome": record.outcome,
        "verdict": record.verdict,
        "precision": record.budget.precision,
        "budget_peak": record.budget.peak,
        "budget_reserved": record.budget.reserved,
        "baseline_peak_allocated": (record.stored or {}).get("peak_allocated"),
        "estimate_peak_allocated": record.estimate and record.estimate.peak_allocated,
        "numerics": record.numerics,
        "skipped_steps": record.skipped_steps,
        "final_scale": record.scaler[-1].scale_after if record.scaler else None,
        "final_loss": record.losses[-1] if record.losses else None,
        "attempt": record.attempt,
        "seconds": round(sum(one.seconds for one in record.passes), 3),
        "findings": "; ".join(f"{one.severity} {one.kind}" for one in record.findings),
    }
    ledger = record.ledger
    if ledger is not None:
        cells |= {
            "peak_allocated": ledger.peak_allocated,
            "peak_reserved": ledger.peak_reserved,
            "cached": ledger.cached,
            "peak_phase": ledger.peak.phase,
            "peak_step": ledger.peak.step,
            "live_after_step": ledger.live_after_step,
            **{bill: ledger.bills.get(bill, 0) for bill in BILLS},
        }
    return cells


def _cell(value: Any) -> Any:
    """Texts in one line, and none that a spreadsheet would compute."""
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text.startswith(_FORMULA) else text

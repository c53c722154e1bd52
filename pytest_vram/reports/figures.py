"""Figures as the reports show them: what is compared with what, and in which words."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_vram.quantities import format_bytes, format_change, format_percent, format_share
from pytest_vram.record import TestRecord
from pytest_vram.trace import BILLS

#: How grave a verdict is: the order in which tests are listed, and how they are marked.
MOODS = ("fail", "warn", "ok")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure now, and where known in the baseline and in the estimate, bytes."""

    name: str
    now: int
    baseline: int | None = None
    estimate: int | None = None

    @property
    def change(self) -> int:
        return 0 if self.baseline is None else self.now - self.baseline


def mood(record: TestRecord) -> str:
    if record.failed:
        return "fail"
    return "ok" if record.verdict == "ok" else "warn"


def verdict_text(record: TestRecord) -> str:
    """``over-budget``; of a test that may fail ``over-budget (xfail)``."""
    return f"{record.verdict} (xfail)" if record.outcome == "xfailed" else record.verdict


def peak(record: TestRecord) -> int | None:
    """Peak allocated; ``None`` where nothing was recorded."""
    return None if record.ledger is None else record.ledger.peak_allocated


def stored_peak(record: TestRecord) -> int | None:
    value = (record.stored or {}).get("peak_allocated")
    return value if isinstance(value, int) else None


def budget_share(record: TestRecord) -> float | None:
    """Peak over budget: 1.0 is exactly the budget."""
    now = peak(record)
    return None if now is None or not record.budget.peak else now / record.budget.peak


def share_text(record: TestRecord) -> str:
    """``70 %`` of the budget; empty without a figure or a budget."""
    now, whole = peak(record), record.budget.peak
    return "" if now is None or not whole else format_share(now, whole)


def budget_text(record: TestRecord) -> str:
    """``70 % of 3.50 GiB``, ``12x 1.00 KiB``; empty without a figure or a budget."""
    share, whole = share_text(record), record.budget.peak or 0
    return share and f"{share} {'of ' if share.endswith('%') else ''}{format_bytes(whole)}"


def change_text(now: int, before: int | None) -> str:
    """``+0.44 GiB (+23.5 %)``; empty where there is nothing to compare with."""
    if before is None:
        return ""
    if now == before:
        return "unchanged"
    return (
        f"{format_change(now - before, max(now, before))} ({format_percent(now - before, before)})"
    )


def totals(record: TestRecord) -> list[Row]:
    """Peak allocated, peak reserved, live bytes after the last step."""
    ledger, stored, estimate = record.ledger, record.stored or {}, record.estimate
    if ledger is None:
        return []
    rows = [("peak_allocated", "peak allocated"), ("peak_reserved", "peak reserved")]
    if ledger.steps:
        rows.append(("live_after_step", "live after the last step"))
    return [
        Row(
            title,
            getattr(ledger, name),
            stored.get(name),
            getattr(estimate, name) if estimate is not None else None,
        )
        for name, title in rows
    ]


def bills(record: TestRecord) -> list[Row]:
    """The ledger at the peak; lines that are 0 everywhere are left out."""
    if record.ledger is None:
        return []
    before = (record.stored or {}).get("bills")
    estimate = record.estimate.bills if record.estimate is not None else None
    rows = [
        Row(
            bill.replace("_", " "),
            record.ledger.bills.get(bill, 0),
            None if before is None else before.get(bill, 0),
            None if estimate is None else estimate.get(bill, 0),
        )
        for bill in BILLS
    ]
    return [row for row in rows if row.now or row.baseline or row.estimate]


def phases(record: TestRecord) -> list[Row]:
    """The peak of each phase, in the order in which they came."""
    if record.ledger is None:
        return []
    before = (record.stored or {}).get("phases") or {}
    estimate = record.estimate.phases if record.estimate is not None else {}
    return [
        Row(name, size, before.get(name), estimate.get(name))
        for name, size in record.ledger.phases.items()
    ]


def scaler_text(record: TestRecord) -> str:
    """``1 skipped, scale 32768``; empty without a scaler."""
    if not record.scaler:
        return ""
    scale = f"scale {record.scaler[-1].scale_after:g}"
    skipped = record.skipped_steps
    return f"{skipped} skipped, {scale}" if skipped else scale


def numbers_text(record: TestRecord) -> str:
    """Where the values were checked."""
    where = {"cuda": "checked on the GPU, in the same run", "cpu": "checked by a run on the CPU"}
    return where.get(record.numerics, "not checked")


def title(record: TestRecord) -> str:
    """The test's name without its file."""
    return record.nodeid.partition("::")[2] or record.nodeid


def size_text(size: int | None) -> str:
    return "" if size is None else format_bytes(size)

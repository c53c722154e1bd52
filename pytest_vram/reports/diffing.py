"""Two reports compared, base branch against pull request: as text, Markdown and JSON.

Tests are compared like a test with its baseline (:mod:`pytest_vram.comparison`), each with the
tolerance of its own marker.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pytest_vram.comparison import Comparison, arrivals, compare, record_of
from pytest_vram.environment import Environment
from pytest_vram.quantities import Tolerance, format_bytes
from pytest_vram.record import TestRecord
from pytest_vram.reports import figures
from pytest_vram.reports.markdown import code, fenced, plain
from pytest_vram.reports.model import Report
from pytest_vram.session import LOST

Status = Literal["grew", "shrank", "same", "added", "removed", "elsewhere", "unmeasured"]

#: In the order in which they are listed; what each says in a sentence of counts.
STATUSES: dict[Status, str] = {
    "grew": "grew",
    "shrank": "shrank",
    "same": "as before",
    "added": "only in head",
    "removed": "only in base",
    "elsewhere": "on another device",
    "unmeasured": "without figures on one side",
}
FORMAT, VERSION = "pytest-vram-diff", 1
#: New or larger allocations that are shown of one test.
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TestDiff:
    """One test in both reports. ``comparison`` is there where figures were compared; ``missing``
    says why the one report that knows the test without figures has none."""

    __test__ = False  # not a test class, whatever its name

    nodeid: str
    status: Status
    base: TestRecord | None
    head: TestRecord | None
    comparison: Comparison | None = None
    missing: str = ""

    @property
    def newly_fails(self) -> bool:
        """It fails in head, or was lost there with its worker, and did not fail in base (where it
        may not have been)."""
        if self.head is None:
            return self.missing == LOST
        if figures.mood(self.head) != "fail":
            return False
        return self.base is None or figures.mood(self.base) != "fail"

    @property
    def environment(self) -> str:
        record = self.head or self.base
        return record.environment.key if record is not None else ""


@dataclass(frozen=True, slots=True)
class ReportDiff:
    """All tests of both reports, what changed first."""

    tests: tuple[TestDiff, ...]

    def of(self, status: Status) -> tuple[TestDiff, ...]:
        return tuple(test for test in self.tests if test.status == status)

    @property
    def compared(self) -> int:
        return sum(test.comparison is not None for test in self.tests)

    @property
    def newly_failing(self) -> tuple[TestDiff, ...]:
        return tuple(test for test in self.tests if test.newly_fails)

    @property
    def exit_code(self) -> int:
        """0: nothing grew beyond its tolerance and nothing newly fails; 1: something did; 3: no
        test could be compared."""
        if self.of("grew") or self.newly_failing:
            return 1
        return 0 if self.compared else 3


def compare_reports(base: Report, head: Report, tolerance: Tolerance | None = None) -> ReportDiff:
    """``tolerance`` takes the place of the markers' own."""
    missing = _reasons(base), _reasons(head)
    pairs = [
        _diff(before, after, tolerance, missing)
        for before, after in _pairs(base.records, head.records)
    ]
    known = {test.nodeid for test in pairs} | {one.nodeid for one in base.lost}
    pairs += [
        TestDiff(one.nodeid, "unmeasured", None, None, missing=one.why)
        for one in head.lost
        if one.nodeid not in known
    ]
    order = list(STATUSES)

    def place(test: TestDiff) -> tuple[int, int, str]:
        comparison = test.comparison
        moved = max((abs(change.growth) for change in comparison.changes), default=0) if (
            comparison is not None
        ) else 0  # fmt: skip
        return order.index(test.status), -moved, test.nodeid

    return ReportDiff(tuple(sorted(pairs, key=place)))


def _reasons(report: Report) -> dict[str, str]:
    return {one.nodeid: one.why for one in report.unmeasured}


def _pairs(
    base: Iterable[TestRecord], head: Iterable[TestRecord]
) -> list[tuple[TestRecord | None, TestRecord | None]]:
    """Same test on the same device, whatever its torch; what is left over of one test is paired
    across devices, so that it is not mistaken for new."""
    before: dict[str, list[TestRecord]] = {}
    for record in base:
        before.setdefault(record.nodeid, []).append(record)
    pairs: list[tuple[TestRecord | None, TestRecord | None]] = []
    unpaired: list[TestRecord] = []
    for record in head:
        known = before.get(record.nodeid, [])
        same = [one for one in known if _device(one.environment) == _device(record.environment)]
        exact = [one for one in same if one.environment.key == record.environment.key]
        if same:
            found = (exact or same)[0]
            known.remove(found)
            pairs.append((found, record))
        else:
            unpaired.append(record)
    for record in unpaired:
        known = before.get(record.nodeid, [])
        pairs.append((known.pop(0) if known else None, record))
    pairs += [(record, None) for known in before.values() for record in known]
    return pairs


def _device(environment: Environment) -> tuple[str, str]:
    return environment.kind, environment.gpu


def _diff(
    before: TestRecord | None,
    after: TestRecord | None,
    tolerance: Tolerance | None,
    missing: tuple[Mapping[str, str], Mapping[str, str]],
) -> TestDiff:
    """``missing``: why base and head have no figures of tests that they know, by id."""
    known = after or before
    assert known is not None
    if before is None or after is None:
        why = missing[before is not None].get(known.nodeid, "")
        gone: Status = "added" if before is None else "removed"
        return TestDiff(known.nodeid, "unmeasured" if why else gone, before, after, missing=why)
    if _device(before.environment) != _device(after.environment):
        return TestDiff(known.nodeid, "elsewhere", before, after)
    if before.ledger is None or after.ledger is None:
        return TestDiff(known.nodeid, "unmeasured", before, after)
    comparison = compare(
        record_of(before.ledger, before.environment),
        record_of(after.ledger, after.environment),
        tolerance if tolerance is not None else after.budget.baseline,
    )
    status: Status = "grew" if comparison.grown else "shrank" if comparison.shrunk else "same"
    return TestDiff(known.nodeid, status, before, after, comparison)


# ---- text


def headline(diff: ReportDiff) -> str:
    """``12 tests compared: 2 grew, 10 as before; 1 only in head; 1 newly fails``."""
    tests = "1 test" if diff.compared == 1 else f"{diff.compared} tests"
    counts = {status: len(diff.of(status)) for status in STATUSES}
    compared = [
        f"{counts[status]} {STATUSES[status]}"
        for status in ("grew", "shrank", "same")
        if counts[status]
    ]
    parts = [f"{tests} compared" + (f": {', '.join(compared)}" if compared else "")]
    parts += [
        f"{count} {STATUSES[status]}"
        for status, count in counts.items()
        if count and status not in ("grew", "shrank", "same")
    ]
    if diff.newly_failing:
        count = len(diff.newly_failing)
        parts.append(f"{count} newly {'fails' if count == 1 else 'fail'}")
    return "; ".join(parts)


def text(diff: ReportDiff) -> str:
    """For the terminal: a line of counts, then every test that is not as before."""
    lines = [headline(diff)]
    for test in diff.tests:
        if test.status != "same" or test.newly_fails:
            where = f"  ({plain(test.environment)})" if test.environment else ""
            lines += ["", f"{_label(test)}: {plain(test.nodeid)}{where}"]
            lines += [f"  {line}" for line in details(test)]
    return "\n".join(lines) + "\n"


def _label(test: TestDiff) -> str:
    label = test.missing or STATUSES[test.status]
    return f"{label}, newly fails" if test.newly_fails else label


def details(test: TestDiff) -> list[str]:
    """What changed in one test, one line each; hostile text is made harmless."""
    lines: list[str] = []
    if test.comparison is not None:
        assert test.base is not None
        assert test.head is not None
        lines += _changes(test.comparison)
        lines += _arrivals(test.base, test.head)
        if test.comparison.versions:
            lines.append(f"environment: {', '.join(test.comparison.versions)}")
    else:
        for side, record in (("base", test.base), ("head", test.head)):
            if record is not None and record.ledger is not None:
                peak = format_bytes(record.ledger.peak_allocated)
                lines.append(f"{side}: peak allocated {peak} ({record.environment})")
            elif record is None and test.missing and (side == "head" or test.head is not None):
                lines.append(f"{side}: no figures, {test.missing}")
    if test.newly_fails and test.head is not None:
        lines += [found.sentence for found in test.head.failures] or ["the test itself fails"]
    return [plain(line) for line in lines]


def _changes(comparison: Comparison) -> list[str]:
    rows = [
        (
            change.title,
            format_bytes(change.before),
            format_bytes(change.now),
            figures.change_text(change.now, change.before),
        )
        for change in comparison.changes
    ]
    widths = [max((len(row[at]) for row in rows), default=0) for at in range(3)]
    return [
        f"{title:<{widths[0]}}  {before:>{widths[1]}} -> {now:>{widths[2]}}  {change}"
        for title, before, now, change in rows
    ]


def _arrivals(base: TestRecord, head: TestRecord) -> list[str]:
    if base.ledger is None or head.ledger is None:
        return []
    before = record_of(base.ledger, base.environment)
    found = [one for one in arrivals(before, head.ledger) if one.growth > 0][:_SHOWN]
    lines = [
        f"  +{format_bytes(one.growth)}  {one.live.tensor}  {one.live.origin}" for one in found
    ]
    return ["new or larger allocations alive at the peak", *lines] if lines else []


# ---- Markdown


def markdown(diff: ReportDiff, shown: int = 50) -> str:
    """For a pull request: a table of what changed, ``shown`` tests at most, details folded."""
    sign = {0: "✅", 1: "❌"}.get(diff.exit_code, "⚠️")
    lines = [f"## {sign} GPU memory: {headline(diff)}"]
    changed = [test for test in diff.tests if test.status != "same" or test.newly_fails]
    if changed:
        lines += ["", "|  | test | base | head | change |", "| --- | --- | --: | --: | --: |"]
        lines += [_row(test) for test in changed[:shown]]
    if len(changed) > shown:
        lines += ["", f"{len(changed) - shown} more tests changed."]
    for test in changed[:shown]:
        if test.comparison is not None or test.newly_fails:
            name = html.escape(plain(test.nodeid))
            lines += [
                "",
                f"<details><summary><code>{name}</code> {_label(test)}</summary>",
                "",
                *fenced("\n".join(details(test))),
                "",
                "</details>",
            ]
    return "\n".join(lines) + "\n"


def _row(test: TestDiff) -> str:
    before = None if test.base is None else figures.peak(test.base)
    after = None if test.head is None else figures.peak(test.head)
    change = "" if after is None else figures.change_text(after, before)
    cells = (
        _label(test),
        code(test.nodeid, table=True),
        figures.size_text(before),
        figures.size_text(after),
        change,
    )
    return f"| {' | '.join(cells)} |"


# ---- JSON


def to_dict(diff: ReportDiff) -> dict[str, Any]:
    """JSON-serialisable; sizes are bytes. ``version`` is raised when a field's meaning changes."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "exit_code": diff.exit_code,
        "compared": diff.compared,
        "counts": {status: len(diff.of(status)) for status in STATUSES},
        "newly_failing": [test.nodeid for test in diff.newly_failing],
        "tests": [_test_dict(test) for test in diff.tests],
    }


def _test_dict(test: TestDiff) -> dict[str, Any]:
    comparison = test.comparison
    return {
        "nodeid": test.nodeid,
        "environment": test.environment,
        "status": test.status,
        "newly_fails": test.newly_fails,
        "missing": test.missing,
        "base": _side(test.base),
        "head": _side(test.head),
        "changes": [
            {
                "figure": f"{change.group}.{change.name}" if change.group else change.name,
                "base": change.before,
                "head": change.now,
            }
            for change in (comparison.changes if comparison is not None else ())
        ],
        "versions": list(comparison.versions) if comparison is not None else [],
    }


def _side(record: TestRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    ledger = record.ledger
    return {
        "environment": record.environment.key,
        "verdict": record.verdict,
        "peak_allocated": ledger and ledger.peak_allocated,
        "peak_reserved": ledger and ledger.peak_reserved,
    }

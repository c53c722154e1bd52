"""Tables and lists of figures in findings and on the terminal: aligned, no trailing spaces, and at
most 80 columns wide where they are printed, two columns in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pytest_vram.baseline_text import Record
from pytest_vram.comparison import Comparison
from pytest_vram.ledger import LARGEST, Ledger, Live, Moment
from pytest_vram.quantities import format_bytes, format_change
from pytest_vram.trace import BILLS

#: Characters of a line: 80 less the two that findings and the terminal put before it.
WIDTH = 78
#: Allocations, and further changes, that a text shows.
SHOWN = 5


def baseline_table(before: Record, ledger: Ledger, comparison: Comparison) -> list[str]:
    """The bills then and now; an arrow where a line is outside the tolerance."""
    bills = before.get("bills")
    if not bills:
        return moment_table(ledger.peak)
    then = Moment(phase=str(before.get("peak_phase", "")), step=int(before.get("peak_step", 0)))
    if comparison.same_moment:
        title = f"at the peak ({ledger.peak})"
    else:
        title = f"at the peak ({ledger.peak}; it was {then})"
    outside = {change.name for change in comparison.changes if change.group == "bills"}
    return _bill_table(title, ("baseline", bills), ("now", ledger.bills), outside)


def two_ledgers(first: str, before: Moment, second: str, now: Moment) -> list[str]:
    return _bill_table(f"at the peak ({now})", (first, before.bills), (second, now.bills), set())


def _bill_table(
    title: str,
    old: tuple[str, Mapping[str, int]],
    new: tuple[str, Mapping[str, int]],
    outside: set[str],
) -> list[str]:
    rows = [("", old[0], new[0], "change", "")]
    for bill in BILLS:
        before, now = old[1].get(bill, 0), new[1].get(bill, 0)
        if before or now:
            change = format_change(now - before, max(now, before)) if now != before else ""
            mark = "<--" if bill in outside and now > before else ""
            label = "  " + bill.replace("_", " ")
            rows.append((label, format_bytes(before), format_bytes(now), change, mark))
    lines = columns([(title, *rows[0][1:]), *rows[1:]], right=(1, 2, 3), indent="")
    if max(map(len, lines)) <= WIDTH:
        return lines
    return [title, *columns(rows, right=(1, 2, 3), indent="")]


def moment_table(moment: Moment) -> list[str]:
    """The bills of one moment."""
    rows = [
        (bill.replace("_", " "), format_bytes(size), f"{100 * size / moment.allocated:.0f} %")
        for bill, size in moment.bills.items()
    ]
    if not rows:
        return []
    return [
        f"alive then ({moment}): {format_bytes(moment.allocated)}",
        *columns(rows, right=(1, 2)),
    ]


def largest_table(largest: Sequence[Live]) -> list[str]:
    """The first of the largest allocations of a moment; equal ones of one line as one row."""
    rows = []
    for live, count in list(Counter(largest).items())[:SHOWN]:
        # a moment keeps so many: of the last there may be more
        more = "+" if live == largest[-1] and len(largest) == LARGEST else ""
        times = f"{count}{more} x " if count > 1 else ""
        rows.append((f"{times}{format_bytes(live.size)}", live))
    return ["largest allocations", *allocations(rows)] if rows else []


def allocations(rows: Iterable[tuple[str, Live]]) -> list[str]:
    """A figure, the tensor, and where it came from: operator, module, line of code."""
    made = [
        (figure, live.tensor, [part for part in live.origin.split("  ") if part])
        for figure, live in rows
    ]
    first = max((len(figure) for figure, _, _ in made), default=0)
    second = max((len(tensor) for _, tensor, _ in made), default=0)
    column = 2 + first + 2 + second + 2
    lines = []
    for figure, tensor, parts in made:
        line = f"  {figure:>{first}}  {tensor:<{second}}"
        longest = max(map(len, parts), default=0)
        below = column if longest <= WIDTH - column else 2 + first + 2
        lines += _filled(line, parts, below, "  ")
    return lines


def listed(title: str, parts: Sequence[str]) -> list[str]:
    """``title one, two, three``, on as many lines as that takes."""
    commas = [f"{part}," for part in parts[:-1]] + list(parts[-1:])
    return _filled(title, commas, 4, " ")


def _filled(line: str, parts: Iterable[str], indent: int, gap: str) -> list[str]:
    """``parts`` one after the other behind ``line``, further lines ``indent`` in. One that no line
    can hold loses its beginning: the end tells most of a module's name or a path."""
    lines = []
    between = gap
    for part in parts:
        if len(part) > WIDTH - indent:
            part = "…" + part[-(WIDTH - indent - 1) :]
        if len(line) + len(between) + len(part) > WIDTH and line.strip():
            lines.append(line.rstrip())
            line, between = "", " " * indent
        line, between = line + between + part, gap
    return [*lines, line.rstrip()] if line.strip() else lines


def columns(
    rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = (), indent: str = "  "
) -> list[str]:
    """``rows`` as a table; the columns named in ``right`` are aligned at their ends."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines

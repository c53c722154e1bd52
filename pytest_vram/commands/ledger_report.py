"""A Ledger on the terminal: peak, bills, largest allocations, what failed."""

from __future__ import annotations

from pytest_vram.commands.common import bill_name, console, say, table
from pytest_vram.ledger import Ledger, Live, Moment
from pytest_vram.quantities import format_bytes
from pytest_vram.trace import BILLS
from pytest_vram.uncertain import interval_lines


def show_ledger(ledger: Ledger) -> None:
    """The whole ledger; of a run that ran out of memory, the one at the failed allocation."""
    if ledger.failure:
        failure = ledger.failure
        where = f" in {failure.operator or failure.frame}" if failure.operator else ""
        say(
            f"Out of memory{where}: {format_bytes(failure.requested)} asked for, "
            f"{format_bytes(failure.free)} free, {format_bytes(failure.cached)} cached."
        )
        if failure.frame:
            say(f"  at {failure.frame}")
    moment = ledger.failure.moment if ledger.failure else ledger.peak
    say(
        f"Peak allocated {format_bytes(ledger.peak_allocated)} "
        f"({ledger.peak_allocated:,} bytes){f', {ledger.peak}' if ledger.peak.phase else ''}."
    )
    say(
        f"Peak reserved {format_bytes(ledger.peak_reserved)} ({ledger.peak_reserved:,} bytes), "
        f"{format_bytes(ledger.cached)} of it unused."
    )
    say()
    _bills(moment, "when memory ran out" if ledger.failure else "at the peak")
    if moment.largest:
        say()
        show_largest(moment.largest)
    for line in interval_lines(ledger):
        say(line)
    for note in ledger.notes:
        say(f"Note: {note}")


def _bills(moment: Moment, when: str) -> None:
    rows = []
    for name in BILLS:
        size = moment.bills.get(name, 0)
        if size:
            share = f"{100 * size / max(1, moment.allocated):.1f} %"
            rows.append((bill_name(name), format_bytes(size), f"{size:,}", share))
    rows.append(("total", format_bytes(moment.allocated), f"{moment.allocated:,}", ""))
    table(("bill", when, "bytes", ""), rows)


def show_largest(largest: tuple[Live, ...]) -> None:
    """The largest live allocations; two lines each where the origin is known."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    made.add_column("size", justify="right", no_wrap=True)
    made.add_column("largest allocations alive then", overflow="fold")
    for live in largest:
        text = live.tensor if live.shape else f"{bill_name(live.bill)}"
        if live.name:
            text += f"  {live.name}"
        origin = live.origin
        made.add_row(format_bytes(live.size), f"{text}\n{origin}" if origin else text)
    console().print(made, markup=False)

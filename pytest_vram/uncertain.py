"""What a simulation cannot know: intervals in words, and the finding where a budget meets one."""

from __future__ import annotations

import re

from pytest_vram.findings import Finding
from pytest_vram.ledger import Ledger
from pytest_vram.marker import Budget
from pytest_vram.quantities import format_bytes
from pytest_vram.trace import Bound, Interval

_CUSTOM = re.compile(r"(?P<name>\w+::\w+): scratch")


def format_interval(interval: Interval) -> str:
    """``1.20 GiB to 1.25 GiB``; where no upper end is known ``at least 1.20 GiB``."""
    low, high = interval
    if high is None:
        return f"at least {format_bytes(low)}"
    return f"{format_bytes(low)} to {format_bytes(high)}"


def interval_lines(ledger: Ledger) -> list[str]:
    """The intervals of both peaks and, line by line, whose they are; nothing if all is known."""
    if ledger.bounds is None:
        return []
    lines = [
        f"not known to the byte: peak allocated {format_interval(ledger.bounds.allocated)}, "
        f"reserved {format_interval(ledger.bounds.reserved)}"
    ]
    for part in ledger.bounds.parts:
        where = "  ".join(filter(None, (part.operator, part.module, part.frame)))
        lines.append(f"  {part.part}: allocated {format_interval(part.allocated)}{_calls(part)}")
        lines.append(f"    {part.why}")
        if where:
            lines.append(f"    widest: {where}")
    return lines


def _calls(part: Bound) -> str:
    return f", {part.calls} calls" if part.calls > 1 else ""


def part_names(ledger: Ledger) -> str:
    """``cuDNN convolution workspace, torch.compile``"""
    return ", ".join(part.part for part in ledger.bounds.parts) if ledger.bounds else ""


def within_but_uncertain(ledger: Ledger, budget: Budget, strict: bool) -> list[Finding]:
    """Peaks that keep their budget in the simulation, and need not on the card. A warning, not a
    failure: the simulated figure is what a budget is held against, and it is the same every time;
    with ``strict`` a budget must hold whatever closed code does."""
    found = []
    for name, ceiling, size, interval in (
        ("peak allocated", budget.peak, ledger.peak_allocated, ledger.allocated_interval),
        ("peak reserved", budget.reserved, ledger.peak_reserved, ledger.reserved_interval),
    ):
        low, high = interval
        if ceiling is None or size > ceiling or (high is not None and high <= ceiling):
            continue
        but = (
            "no upper end is known"
            if high is None
            else f"may be up to {format_bytes(high)}, {format_bytes(high - ceiling)} over it"
        )
        found.append(
            Finding(
                "uncertain",
                "fail" if strict else "warn",
                f"VRAM uncertain: {name} {format_bytes(size)} is within the budget of "
                f"{format_bytes(ceiling)}, but {but} ({part_names(ledger)})",
                tuple(interval_lines(ledger)),
                hint=_remedy(ledger, high),
                data={
                    "figure": name.replace(" ", "_"),
                    "bytes": size,
                    "budget": ceiling,
                    "low": low,
                    "high": high,
                },
            )
        )
    return found


def _remedy(ledger: Ledger, high: int | None) -> str:
    assert ledger.bounds is not None
    if high is not None:
        return f"a budget of {format_bytes(high)} holds in any case; a card measures which it is"
    names = [
        match["name"]
        for part in ledger.bounds.parts
        if part.allocated[1] is None and (match := _CUSTOM.fullmatch(part.part))
    ]
    own = [name for name in names if not name.startswith("aten::")]
    if own:
        return f'vram.assume_scratch("{own[0]}", "64 MiB") says what the operator takes at most'
    return "a card measures what it is"

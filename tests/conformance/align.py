"""Align two allocator event streams and say where they part: the instrument behind exactness.

    python align.py REFERENCE.json SIMULATED.json      streams written by measure.py --events

A stream is a list of ``[kind, bytes requested, operator, user line]``, kind ``alloc`` or ``free``.
Prints the first and the largest differences, the operator they stand at, and the likely cause.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Item = Sequence[Any]


@dataclass(frozen=True)
class Difference:
    """Reference events that the simulation lacks, and simulated ones that the reference lacks."""

    position: int
    missing: tuple[Item, ...]
    extra: tuple[Item, ...]
    operator: str
    line: str

    @property
    def weight(self) -> int:
        """Bytes that are allocated on one side only."""
        missing = sum(item[1] for item in self.missing if item[0] == "alloc")
        extra = sum(item[1] for item in self.extra if item[0] == "alloc")
        return abs(missing - extra)

    @property
    def cause(self) -> str:
        wanted = sorted((i[0], i[1]) for i in self.missing)
        got = sorted((i[0], i[1]) for i in self.extra)
        if wanted == got:
            return "same blocks in another order"
        if not self.extra:
            ends = all(item[0] == "free" for item in self.missing)
            return "a block lives longer in the simulation" if ends else "hidden scratch"
        if not self.missing:
            ends = all(item[0] == "free" for item in self.extra)
            return "a block dies earlier in the simulation" if ends else "scratch too much"
        return "another kernel or another size"


def align(
    reference: Sequence[Item], simulated: Sequence[Item], look: int = 400, sure: int = 6
) -> list[Difference]:
    """Walk both streams; where they part, resume at the nearest place where ``sure`` events agree.

    Stops with one last difference when no such place lies within ``look`` events.
    """
    mine = [(item[0], item[1]) for item in simulated]
    theirs = [(item[0], item[1]) for item in reference]
    found: list[Difference] = []
    i = j = 0
    while i < len(theirs) and j < len(mine):
        if theirs[i] == mine[j]:
            i, j = i + 1, j + 1
            continue
        jump = _resume(theirs, mine, i, j, look, sure)
        x, y = jump if jump is not None else (len(theirs) - i, len(mine) - j)
        found.append(_difference(reference, simulated, i, x, j, y))
        i, j = i + x, j + y
    if i < len(theirs) or j < len(mine):
        found.append(_difference(reference, simulated, i, len(theirs) - i, j, len(mine) - j))
    return found


def _resume(
    theirs: list[Any], mine: list[Any], i: int, j: int, look: int, sure: int
) -> tuple[int, int] | None:
    places: dict[tuple[Any, ...], int] = {}
    for y in range(min(look, len(mine) - j)):
        places.setdefault(tuple(mine[j + y : j + y + sure]), y)
    best = None
    for x in range(min(look, len(theirs) - i)):
        y = places.get(tuple(theirs[i + x : i + x + sure]))
        if y is not None and (best is None or x + y < sum(best)):
            best = (x, y)
    return best


def _difference(
    reference: Sequence[Item], simulated: Sequence[Item], i: int, x: int, j: int, y: int
) -> Difference:
    here = simulated[min(j, len(simulated) - 1)] if y else simulated[max(j - 1, 0)]
    return Difference(i, tuple(reference[i : i + x]), tuple(simulated[j : j + y]), here[2], here[3])


def describe(found: Sequence[Difference], most: int = 5) -> str:
    """The first and the largest differences as text."""
    if not found:
        return "the streams are equal"
    lines = [f"{len(found)} differences"]
    largest = sorted(found, key=lambda d: -d.weight)[:most]
    for title, chosen in (("first", found[:most]), ("largest", largest)):
        lines.append(f"{title}:")
        for difference in chosen:
            lines.append(
                f"  event {difference.position}: {difference.cause}, {difference.weight:,} bytes, "
                f"at {difference.operator} ({difference.line})"
            )
            for name, items in (("reference", difference.missing), ("simulated", difference.extra)):
                shown = ", ".join(f"{'+' if k == 'alloc' else '-'}{n}" for k, n, *_ in items[:10])
                more = f" ... {len(items) - 10} more" if len(items) > 10 else ""
                lines.append(f"    {name}: {shown or 'nothing'}{more}")
    return "\n".join(lines)


def main() -> None:
    reference, simulated = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
    print(describe(align(reference, simulated)))


if __name__ == "__main__":
    main()

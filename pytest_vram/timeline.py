"""Timeline: the memory of one pass over its events, small enough to draw and to send around."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pytest_vram.ledger import Live
from pytest_vram.trace import BILLS, Trace

POINTS = 240
SPANS = 24


@dataclass(frozen=True, slots=True)
class Span:
    """The life of one large allocation, from event ``start`` up to ``end`` (exclusive)."""

    start: int
    end: int
    live: Live


@dataclass(frozen=True, slots=True)
class Mark:
    """A phase that begins at event ``at``."""

    at: int
    name: str
    step: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """At most :data:`POINTS` samples; each is the fullest moment of its stretch of events, so that
    the peak is always among them. ``at`` counts events from 0; ``bills`` and ``reserved`` are bytes
    per sample; bills that are always 0 are left out."""

    events: int
    at: tuple[int, ...]
    reserved: tuple[int, ...]
    bills: Mapping[str, tuple[int, ...]]
    marks: tuple[Mark, ...]
    spans: tuple[Span, ...]

    @classmethod
    def from_trace(cls, trace: Trace, points: int = POINTS, spans: int = SPANS) -> Timeline:
        """Sample a settled trace. One pass over its events."""
        stretch = max(1, -(-len(trace.events) // points))
        totals = dict.fromkeys(BILLS, 0)
        allocated = reserved = 0
        best, grown = -1, 0  # `grown`: the last event that took memory
        sample: tuple[int, int, dict[str, int]] | None = None
        samples: list[tuple[int, int, dict[str, int]]] = []
        births: dict[int, int] = {}
        lives: list[tuple[int, int, int]] = []
        marks: list[Mark] = []
        # Copying the totals at every new maximum would cost; they are copied when a stretch ends
        # or a maximum is left by a free.
        rising = False
        for position, event in enumerate(trace.events):
            if event.kind == "alloc":
                allocation = trace.allocations[event.index]
                totals[_bill(allocation.bill)] += allocation.block
                allocated += allocation.block
                births[event.index] = grown = position
                rising = rising or allocated > best
            elif event.kind == "free":
                if rising:
                    sample, best, rising = (grown, reserved, dict(totals)), allocated, False
                allocation = trace.allocations[event.index]
                totals[_bill(allocation.bill)] -= allocation.block
                allocated -= allocation.block
                if event.index in births:
                    lives.append((births.pop(event.index), position, event.index))
            elif event.kind == "segment_alloc":
                reserved += event.size
            elif event.kind == "segment_free":
                reserved -= event.size
            elif event.kind == "phase":
                phase = trace.phases[event.index]
                marks.append(Mark(position, phase.name, phase.step))
            if (position + 1) % stretch == 0 or position + 1 == len(trace.events):
                if rising or sample is None:
                    at = grown if rising else position
                    sample = (at, reserved, dict(totals))
                samples.append(sample)
                sample, best, rising = None, -1, False
        lives += [(start, len(trace.events), index) for index, start in births.items()]
        largest = heapq.nlargest(spans, lives, key=lambda life: trace.allocations[life[2]].block)
        return cls(
            len(trace.events),
            tuple(position for position, _, _ in samples),
            tuple(held for _, held, _ in samples),
            {
                bill: tuple(sizes[bill] for _, _, sizes in samples)
                for bill in BILLS
                if any(sizes[bill] for _, _, sizes in samples)
            },
            tuple(marks),
            tuple(
                Span(start, end, Live.of(trace.allocations[index]))
                for start, end, index in sorted(largest)
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "events": self.events,
            "at": list(self.at),
            "reserved": list(self.reserved),
            "bills": {bill: list(sizes) for bill, sizes in self.bills.items()},
            "marks": [asdict(mark) for mark in self.marks],
            "spans": [asdict(span) for span in self.spans],
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Timeline:
        return cls(
            raw["events"],
            tuple(raw["at"]),
            tuple(raw["reserved"]),
            {bill: tuple(sizes) for bill, sizes in raw["bills"].items()},
            tuple(Mark(**mark) for mark in raw["marks"]),
            tuple(
                Span(span["start"], span["end"], Live.from_dict(span["live"]))
                for span in raw["spans"]
            ),
        )


_KNOWN = frozenset(BILLS)


def _bill(name: str) -> str:
    return name if name in _KNOWN else "other"

"""What changed between a stored record and a new one, beyond a tolerance. Sizes are bytes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pytest_vram.baseline_text import FIGURES, Record
from pytest_vram.environment import Environment, changed_versions
from pytest_vram.ledger import Ledger, Live
from pytest_vram.quantities import Tolerance

#: Stored largest allocations: enough to name what grew, few enough to review.
STORED_ALLOCATIONS = 8

_TITLES = {
    "peak_allocated": "peak allocated",
    "peak_reserved": "peak reserved",
    "live_after_step": "live after the step",
}


def record_of(ledger: Ledger, environment: Environment) -> Record:
    """What is stored of one test: the figures that are compared, and what explains them."""
    return {
        "peak_allocated": ledger.peak_allocated,
        "peak_reserved": ledger.peak_reserved,
        "peak_phase": ledger.peak.phase,
        "peak_step": ledger.peak.step,
        "live_after_step": ledger.live_after_step,
        "bills": dict(ledger.bills),
        "phases": {name: size for name, size in ledger.phases.items() if name != "setup"},
        "largest": [describe(live) for live in ledger.largest[:STORED_ALLOCATIONS]],
        "versions": dict(environment.versions),
    }


@dataclass(frozen=True, slots=True)
class Change:
    """One figure that moved by more than the tolerance. ``group`` is ``""``, ``bills`` or
    ``phases``."""

    group: str
    name: str
    before: int
    now: int

    @property
    def growth(self) -> int:
        return self.now - self.before

    @property
    def title(self) -> str:
        plain = self.name.replace("_", " ")
        if self.group == "bills":
            return f"{plain} at the peak"
        if self.group == "phases":
            return f"peak of {self.name}"
        return _TITLES.get(self.name, plain)


@dataclass(frozen=True, slots=True)
class Comparison:
    """``changes`` beyond the tolerance; ``versions`` as ``torch 2.13.0 -> 2.14.1``; ``arrived``
    are allocations alive at the new peak that the stored one does not have, or not as large."""

    changes: tuple[Change, ...]
    versions: tuple[str, ...] = ()
    phases_only_now: tuple[str, ...] = ()
    phases_only_before: tuple[str, ...] = ()
    same_moment: bool = True

    @property
    def grown(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.growth > 0)

    @property
    def shrunk(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.growth < 0)


def compare(before: Record, now: Record, tolerance: Tolerance) -> Comparison:
    """Figures of ``now`` against ``before``, through DeepDiff with ``tolerance``.

    Bills describe the moment of the peak. They are compared only where the peak is still in the
    same phase: else they belong to different moments, and the phases' own peaks decide. A figure
    that a person took out of the stored record is not compared.
    """
    versions = tuple(changed_versions(before.get("versions", {}), now.get("versions", {})))
    same = before.get("peak_phase", now["peak_phase"]) == now["peak_phase"]
    old, new = _figures(before, now, same), _figures(now, before, same)
    changes = tuple(_differences(old, new, tolerance)) if _moved(old, new, tolerance) else ()
    phases = (before.get("phases", {}), now.get("phases", {}))
    return Comparison(
        changes,
        versions,
        tuple(name for name in phases[1] if name not in phases[0]) if phases[0] else (),
        tuple(name for name in phases[0] if name not in phases[1]),
        same,
    )


def _moved(old: dict[str, Any], new: dict[str, Any], tolerance: Tolerance) -> bool:
    """Whether any figure left the tolerance. DeepDiff takes a millisecond to say so, and almost
    every comparison ends here."""
    if old == new:
        return False
    return any(
        _moved(before, new[name], tolerance)
        if isinstance(before, dict)
        else tolerance.exceeded(new[name] - before, before)
        for name, before in old.items()
    )


def _figures(record: Record, other: Record, same_moment: bool) -> dict[str, Any]:
    """The comparable part: figures that both know; bills of both (absent ones are 0)."""
    figures: dict[str, Any] = {
        name: record[name] for name in FIGURES if name in record and name in other
    }
    bills = record.get("bills"), other.get("bills")
    if same_moment and bills[0] and bills[1]:
        figures["bills"] = {**dict.fromkeys(bills[1], 0), **bills[0]}
    others = other.get("phases", {})
    figures["phases"] = {
        name: size for name, size in record.get("phases", {}).items() if name in others
    }
    return figures


def _differences(
    old: dict[str, Any], new: dict[str, Any], tolerance: Tolerance
) -> Iterable[Change]:
    """DeepDiff's changed values, in a stable order: totals, phases, bills."""
    from deepdiff import DeepDiff
    from deepdiff.operator import BaseOperator

    class Within(BaseOperator):
        """Two sizes inside the tolerance are the same to DeepDiff."""

        def match(self, level: Any) -> bool:
            return isinstance(level.t1, int) and isinstance(level.t2, int)

        def give_up_diffing(self, level: Any, diff_instance: Any) -> bool:
            return not tolerance.exceeded(level.t2 - level.t1, level.t1)

    diff = DeepDiff(old, new, view="tree", custom_operators=[Within()])
    changes = []
    for level in diff.get("values_changed", ()):
        *group, name = level.path(output_format="list")
        changes.append(Change(str(group[0]) if group else "", str(name), level.t1, level.t2))
    order = {"": 0, "phases": 1, "bills": 2}
    figures = list(FIGURES)
    return sorted(
        changes,
        key=lambda change: (
            order[change.group],
            figures.index(change.name) if change.name in figures else 0,
            -abs(change.growth),
            -change.now,
            change.name,
        ),
    )


# ---- which tensor


def describe(live: Live) -> str:
    """One stored line: ``411746304 activations float32[4, 512] | aten::mm | lm.head | f.py:41``."""
    shape = live.tensor if live.shape is not None else "?"
    parts = (live.operator, live.module or live.name, live.frame)
    return f"{live.size} {live.bill} {shape} | " + " | ".join(part or "-" for part in parts)


def _identity(line: str) -> tuple[int, str, str]:
    """``(size, identity, place)`` of a stored line. The identity leaves out the line number, which
    moves with every edit above it."""
    size, _, rest = line.partition(" ")
    rest = re.sub(r":\d+(?= |$)", "", rest)
    return int(size) if size.isdigit() else 0, rest, rest.rpartition(" | ")[2]


@dataclass(frozen=True, slots=True)
class Arrival:
    """An allocation that is new at the peak (``before`` is 0) or larger than it was."""

    live: Live
    before: int

    @property
    def growth(self) -> int:
        return self.live.size - self.before


def arrivals(before: Record, ledger: Ledger) -> list[Arrival]:
    """Allocations alive at the peak that the stored peak does not explain, the largest growth
    first. A stored allocation of the same operator, module and line explains one of up to its size.

    Only the largest allocations are stored: one that is smaller than the smallest stored line may
    have been there before, and is not called new.
    """
    stored: defaultdict[str, list[int]] = defaultdict(list)
    places: defaultdict[str, list[int]] = defaultdict(list)
    sizes = []
    for line in before.get("largest", ()):
        size, identity, _ = _identity(str(line))
        stored[identity].append(size)
        places[_place(identity)].append(size)
        sizes.append(size)
    least = min(sizes) if len(sizes) >= STORED_ALLOCATIONS else 0
    found = []
    unexplained = []
    for live in ledger.largest:
        _, identity, _ = _identity(describe(live))
        if stored[identity]:
            size = stored[identity].pop(0)
            places[_place(identity)].remove(size)
            if live.size > size:
                found.append(Arrival(live, size))
        else:
            unexplained.append((live, identity))
    for live, identity in unexplained:
        # Same operator and place with another shape or dtype: it grew, it is not new.
        known = places[_place(identity)]
        size = known.pop(0) if known else 0
        if live.size > max(size, 0 if size else least):
            found.append(Arrival(live, size))
    return sorted(found, key=lambda arrival: -arrival.growth)


def _place(identity: str) -> str:
    """The operator, module and line of an identity, without bill, dtype and shape."""
    return identity.partition(" | ")[2]

"""Ledger: what a Trace cost, and whose bytes those were. All figures are bytes, base excluded."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_vram.trace import BILLS, Allocation, Bounds, Interval, Trace

if TYPE_CHECKING:
    from typing_extensions import Self

#: Live allocations that are kept by name, the largest first.
LARGEST = 12


@dataclass(frozen=True, slots=True)
class Live:
    """One allocation that was alive at a moment. ``size`` is what the allocator took for it."""

    size: int
    requested: int
    bill: str
    name: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    operator: str = ""
    module: str = ""
    frame: str = ""

    @classmethod
    def of(cls, allocation: Allocation) -> Self:
        return cls(
            allocation.block,
            allocation.requested,
            allocation.bill or "other",
            allocation.name,
            allocation.shape,
            allocation.dtype,
            allocation.operator,
            allocation.module,
            allocation.frame,
        )

    @property
    def tensor(self) -> str:
        """``float32[4, 512, 50257]``, or the bill where no shape is known."""
        if self.shape is None:
            return self.bill.replace("_", " ")
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def origin(self) -> str:
        """Everything that tells where it came from, in one line."""
        return "  ".join(
            part for part in (self.operator, self.module or self.name, self.frame) if part
        )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        shape = raw.get("shape")
        return cls(**{**raw, "shape": None if shape is None else tuple(shape)})


@dataclass(frozen=True, slots=True)
class Moment:
    """The device at one event: totals, phase, the bills (which add up to ``allocated``) and the
    largest live allocations."""

    allocated: int = 0
    reserved: int = 0
    phase: str = ""
    step: int = 0
    bills: Mapping[str, int] = field(default_factory=dict)
    largest: tuple[Live, ...] = ()

    def __str__(self) -> str:
        if not self.phase:
            return "before any phase"
        return f"{self.phase}, step {self.step}" if self.step else self.phase

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        return cls(**{**raw, "largest": tuple(map(Live.from_dict, raw["largest"]))})


@dataclass(frozen=True, slots=True)
class Step:
    """One training step: the peak of each of its phases, and what was alive when it was done."""

    number: int
    phases: Mapping[str, int]
    live: int


@dataclass(frozen=True, slots=True)
class Failure:
    """An allocation that failed. ``moment`` is the ledger then; ``free`` is what the device had
    left, ``cached`` what PyTorch held without using it, ``allowed`` the most that it may hold, if
    ``set_per_process_memory_fraction`` limits that."""

    requested: int
    free: int
    cached: int
    capacity: int
    message: str
    operator: str
    module: str
    frame: str
    moment: Moment
    allowed: int | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        return cls(**{**raw, "moment": Moment.from_dict(raw["moment"])})


@dataclass(frozen=True)
class Ledger:
    """A fold over one Trace. Every bill is also an attribute: ``ledger.activations``.

    ``cached`` is reserved less allocated at the reserved peak (at its fullest moment);
    ``phases`` is the peak of each phase over all steps; ``end`` is what was still alive when the
    trace ended. ``bounds`` is what closed code decides, ``None`` where every byte is known.
    """

    device: str
    peak: Moment
    peak_reserved: int
    cached: int
    phases: Mapping[str, int]
    steps: tuple[Step, ...]
    end: Moment
    base_allocated: int = 0
    base_reserved: int = 0
    failure: Failure | None = None
    bounds: Bounds | None = None
    notes: tuple[str, ...] = ()
    events: int = 0

    @property
    def peak_allocated(self) -> int:
        return self.peak.allocated

    @property
    def allocated_interval(self) -> Interval:
        """What the peak may be, given what closed code decides; both ends equal without bounds."""
        return self.bounds.allocated if self.bounds else (self.peak_allocated, self.peak_allocated)

    @property
    def reserved_interval(self) -> Interval:
        """The same of reserved memory."""
        return self.bounds.reserved if self.bounds else (self.peak_reserved, self.peak_reserved)

    @property
    def bills(self) -> Mapping[str, int]:
        return self.peak.bills

    @property
    def largest(self) -> tuple[Live, ...]:
        return self.peak.largest

    @property
    def live_after_step(self) -> int:
        """What stays alive from step to step, after the last one; 0 where nothing was trained."""
        return self.steps[-1].live if self.steps else 0

    def __getattr__(self, name: str) -> int:
        if name in BILLS:
            return self.peak.bills.get(name, 0)
        raise AttributeError(f"a Ledger has no {name!r}; its bills are {', '.join(BILLS)}")

    @classmethod
    def from_trace(cls, trace: Trace, *, largest: int = LARGEST) -> Self:
        """Fold a settled trace. Two passes over its events, whatever their number."""
        totals = _Totals.of(trace)
        moments = _moments(trace, totals, largest)
        peak = moments[totals.peak_at]
        failure = None
        if trace.oom is not None:
            at = totals.oom_at if totals.oom_at is not None else len(trace.events)
            failure = Failure(
                requested=trace.oom.requested,
                free=trace.oom.free,
                cached=max(0, trace.oom.reserved - trace.oom.allocated),
                capacity=trace.oom.capacity,
                message=trace.oom.message,
                operator=trace.oom.operator,
                module=trace.oom.module,
                frame=trace.oom.frame,
                moment=moments[at],
                allowed=trace.oom.allowed,
            )
        return cls(
            device=trace.device,
            peak=peak,
            peak_reserved=totals.peak_reserved,
            cached=max(0, totals.peak_reserved - totals.fullest),
            phases=totals.phase_peaks(),
            steps=totals.steps(),
            end=moments[len(trace.events)],
            base_allocated=trace.base_allocated,
            base_reserved=trace.base_reserved,
            failure=failure,
            bounds=trace.bounds,
            notes=tuple(trace.notes),
            events=len(trace.events),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable; :meth:`from_dict` reads it back equal."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        values = dict(raw)
        values["peak"] = Moment.from_dict(raw["peak"])
        values["end"] = Moment.from_dict(raw["end"])
        values["steps"] = tuple(Step(**step) for step in raw["steps"])
        values["failure"] = raw["failure"] and Failure.from_dict(raw["failure"])
        values["bounds"] = raw["bounds"] and Bounds.from_dict(raw["bounds"])
        values["notes"] = tuple(raw["notes"])
        return cls(**values)


@dataclass
class _Totals:
    """First pass: where the peaks are, and what each stretch between two phase marks reached."""

    peak_at: int
    peak_reserved: int
    fullest: int
    oom_at: int | None
    #: (phase name, step, peak inside, allocated at its end), in order
    stretches: list[tuple[str, int, int, int]]

    @classmethod
    def of(cls, trace: Trace) -> _Totals:
        allocations, phases = trace.allocations, trace.phases
        allocated = reserved = peak = peak_reserved = fullest = 0
        peak_at, oom_at = 0, None
        stretches: list[tuple[str, int, int, int]] = []
        name, step, inside = "", 0, 0
        for position, event in enumerate(trace.events, 1):
            kind = event.kind
            if kind == "alloc":
                allocated += allocations[event.index].block
                if allocated > inside:
                    inside = allocated
                    if allocated > peak:
                        peak, peak_at = allocated, position
                if reserved == peak_reserved and allocated > fullest:
                    fullest = allocated
            elif kind == "free":
                allocated -= allocations[event.index].block
            elif kind == "segment_alloc":
                reserved += event.size
                if reserved > peak_reserved:
                    peak_reserved, fullest = reserved, allocated
            elif kind == "segment_free":
                reserved -= event.size
            elif kind == "phase":
                stretches.append((name, step, inside, allocated))
                name, step = phases[event.index].name, phases[event.index].step
                inside = allocated
            elif kind == "oom":
                oom_at = position
        stretches.append((name, step, inside, allocated))
        return cls(peak_at, peak_reserved, fullest, oom_at, stretches)

    def phase_peaks(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, _, inside, _ in self.stretches:
            if name:
                found[name] = max(found.get(name, 0), inside)
        return found

    def steps(self) -> tuple[Step, ...]:
        """Steps from 1 on. A step is done when its last optimizer phase ends: what the loop does
        afterwards (logging, fetching data) is the same in every step but the last."""
        phases: dict[int, dict[str, int]] = {}
        live: dict[int, int] = {}
        trained: set[int] = set()
        for name, step, inside, after in self.stretches:
            if step < 1:
                continue
            peaks = phases.setdefault(step, {})
            peaks[name] = max(peaks.get(name, 0), inside)
            if name == "optimizer" or step not in trained:
                live[step] = after
            if name == "optimizer":
                trained.add(step)
        return tuple(Step(step, phases[step], live[step]) for step in sorted(phases))


def _moments(trace: Trace, totals: _Totals, largest: int) -> dict[int, Moment]:
    """Second pass: the live set at the peak, at the failed allocation and at the end."""
    wanted = {totals.peak_at, len(trace.events)}
    if totals.oom_at is not None:
        wanted.add(totals.oom_at)
    live: dict[int, Allocation] = {}
    moments: dict[int, Moment] = {}
    allocated = reserved = 0
    phase, step = "", 0
    if 0 in wanted:
        moments[0] = Moment()
    for position, event in enumerate(trace.events, 1):
        kind = event.kind
        if kind == "alloc":
            allocation = live[event.index] = trace.allocations[event.index]
            allocated += allocation.block
        elif kind == "free":
            # A block from before the recording has no alloc event and is not in the live set.
            allocated -= trace.allocations[event.index].block
            live.pop(event.index, None)
        elif kind == "segment_alloc":
            reserved += event.size
        elif kind == "segment_free":
            reserved -= event.size
        elif kind == "phase":
            phase, step = trace.phases[event.index].name, trace.phases[event.index].step
        if position in wanted:
            bills = _bills(live.values(), allocated)
            top = heapq.nlargest(largest, live.values(), key=lambda one: one.block)
            moments[position] = Moment(
                allocated, reserved, phase, step, bills, tuple(map(Live.of, top))
            )
    return moments


def _bills(live: Iterable[Allocation], allocated: int) -> dict[str, int]:
    """Bytes per bill in the order of ``BILLS``, zeros left out; they add up to ``allocated``."""
    sums = dict.fromkeys(BILLS, 0)
    for allocation in live:
        bill = allocation.bill or "other"
        sums[bill if bill in sums else "other"] += allocation.block
    # Less than nothing only where blocks of the base were given back during the pass.
    sums["other"] += allocated - sum(sums.values())
    return {bill: size for bill, size in sums.items() if size}

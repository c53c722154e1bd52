"""Honest bounds: what the peaks may be, given what closed code may take.

While a simulation runs, every :class:`~pytest_vram.sim.kernels.Span` is noted with its place among
the allocator's calls. At the end the whole run is given to a second allocator again, with the
least and with the most of each part: so that rounding, unsplit rests and segments count, and what
matters is the size at the peak and not the largest size of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_vram.frames import describe
from pytest_vram.sim.allocator import Block, CachingAllocator, DeviceOutOfMemory
from pytest_vram.sim.kernels import Span
from pytest_vram.trace import Allocation, Bound, Bounds, Interval

#: Bills whose bytes the program itself holds, compiled or not.
_HELD = frozenset(
    ("parameters", "gradients", "optimizer_state", "master_weights", "buffers", "inputs")
)
_SEGMENT = 2 << 20

COMPILED = "torch.compile"
_COMPILED_WHY = (
    "simulated eagerly; compiled code keeps less between forward and backward, and hands all "
    "gradients over at once"
)
_OPEN_WHY = "simulated eagerly; CUDA graphs' pools, autotuning or another backend are not known"

Events = Sequence[tuple[str, int, int, int]]  #: kind, index, size, address


@dataclass(frozen=True, slots=True, eq=False)
class Unknown:
    """A span, before the event ``at``. ``index`` is the allocation that stands for it in the
    simulation; -1: it lives for a moment only, and nothing was simulated."""

    at: int
    index: int
    span: Span
    operator: str
    module: str
    frame: tuple[Any, int] | None
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A call of the program that changes how the allocator goes on, before the event ``at``.
    ``record_stream`` names an allocation in place of its block."""

    at: int
    name: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]


class Uncertainty:
    """What one simulation does not know. ``fresh`` makes an allocator like the simulation's own;
    ``capacity`` is the most that it can give, in bytes."""

    def __init__(self, fresh: Callable[[], CachingAllocator], capacity: int) -> None:
        self._fresh, self._capacity = fresh, capacity
        self._log: list[Unknown | Adjustment] = []
        self._known: dict[str, list[Unknown]] = {}
        self._compiled = self._open = False

    def note(self, unknown: Unknown) -> None:
        self._known.setdefault(unknown.span.part, []).append(unknown)
        if unknown.index < 0:
            self._log.append(unknown)

    def adjusted(self, at: int, name: str, *arguments: Any, **options: Any) -> None:
        self._log.append(Adjustment(at, name, arguments, options))

    def compiled(self, open_ended: bool) -> None:
        """The program compiles, which the simulation does not. ``open_ended``: in a way that takes
        memory of its own."""
        self._compiled = True
        self._open = self._open or open_ended

    def bounds(self, allocations: Sequence[Allocation], events: Events) -> Bounds | None:
        """Intervals of the peaks; ``None`` where every byte is known."""
        if not self._known and not self._compiled:
            return None
        run = _Run(self._fresh, self._capacity, self._log, allocations, events)
        peaks = run.simulated()
        parts = [run.bound(part, found, peaks) for part, found in self._known.items()]
        if len(parts) == 1:
            allocated, reserved = parts[0].allocated, parts[0].reserved
        elif parts:
            allocated, reserved = run.intervals(
                [one for found in self._known.values() for one in found], peaks
            )
        else:
            allocated, reserved = (peaks[0], peaks[0]), (peaks[1], peaks[1])
        if self._compiled:
            compiled, more = self._compiled_bound(allocations, events, peaks)
            parts.append(compiled)
            allocated = _joined(allocated, compiled.allocated, more)
            reserved = _joined(reserved, compiled.reserved, more)
        return Bounds(tuple(parts), allocated, reserved)

    def _compiled_bound(
        self, allocations: Sequence[Allocation], events: Events, peaks: tuple[int, int]
    ) -> tuple[Bound, int | None]:
        """At least what the program holds anyway, at most the eager peak and a second set of
        gradients: eager code adds them to older ones one by one, a compiled backward returns them
        together (torch/_functorch/_aot_autograd/runtime_wrappers.py). What is saved for backward
        is a minimal cut of the joint graph (torch/_functorch/partitioners.py), and fusion only
        removes tensors between. Also the bytes that the high end has on top; ``None``: unknown."""
        held = _peak(allocations, events, _HELD)
        more = None
        if not self._open:
            more = -(-_peak(allocations, events, {"gradients"}) // _SEGMENT) * _SEGMENT
        allocated, reserved = ((held, None if more is None else peak + more) for peak in peaks)
        why = _OPEN_WHY if self._open else _COMPILED_WHY
        return Bound(COMPILED, why, allocated, reserved), more


def _joined(found: Interval, compiled: Interval, more: int | None) -> Interval:
    high = None if found[1] is None or more is None else found[1] + more
    return min(found[0], compiled[0]), high


def _peak(
    allocations: Sequence[Allocation], events: Events, bills: Iterable[str] | None = None
) -> int:
    """The most bytes that were alive at once, of ``bills`` (default: of all)."""
    alive = peak = 0
    for kind, index, _, _ in events:
        if kind not in ("alloc", "free"):
            continue
        one = allocations[index]
        if bills is None or one.bill in bills:
            alive += one.block if kind == "alloc" else -one.block
            peak = max(peak, alive)
    return peak


class _Run:
    """The calls of one run, given to a fresh allocator as often as needed."""

    def __init__(
        self,
        fresh: Callable[[], CachingAllocator],
        capacity: int,
        log: Sequence[Unknown | Adjustment],
        allocations: Sequence[Allocation],
        events: Events,
    ) -> None:
        self._fresh, self._capacity = fresh, capacity
        self._log, self._allocations, self._events = log, allocations, events

    def simulated(self) -> tuple[int, int]:
        """Both peaks as the simulation has them."""
        reserved = peak = 0
        for kind, _, size, _ in self._events:
            if kind in ("segment_alloc", "segment_free"):
                reserved += size if kind == "segment_alloc" else -size
                peak = max(peak, reserved)
        return _peak(self._allocations, self._events), peak

    def bound(self, part: str, found: Sequence[Unknown], peaks: tuple[int, int]) -> Bound:
        allocated, reserved = self.intervals(found, peaks)
        widest = max(found, key=lambda one: _width(one.span))
        return Bound(
            part,
            widest.span.why,
            allocated,
            reserved,
            len(found),
            widest.operator,
            widest.module,
            describe(*widest.frame) if widest.frame else "",
        )

    def intervals(
        self, found: Sequence[Unknown], peaks: tuple[int, int]
    ) -> tuple[Interval, Interval]:
        """Both peaks if ``found`` take their least, and if they take their most."""
        least = {one: one.span.low for one in found if one.index >= 0 or one.span.low}
        most = {one: one.span.high for one in found if one.span.high}
        low = self._peaks(least) if least else peaks
        high = self._peaks(most) if most else peaks
        lows = [min(pair) for pair in zip(low, high, peaks, strict=True)]
        highs = [max(pair) for pair in zip(low, high, peaks, strict=True)]
        ends: list[int | None] = [*highs]
        if any(one.span.high is None for one in found):
            ends = [None, None]
        return (lows[0], ends[0]), (lows[1], ends[1])

    def _peaks(self, sizes: Mapping[Unknown, int]) -> tuple[int, int]:
        """Both peaks with these sizes; all that the card has, where it would not be enough."""
        allocator = self._fresh()
        replaced = {one.index: size for one, size in sizes.items() if one.index >= 0}
        blocks: dict[int, Block] = {}
        due = iter([*self._log, None])
        following = next(due)
        try:
            for position, (kind, index, _, _) in enumerate(self._events):
                while following is not None and following.at <= position:
                    self._asides(allocator, following, sizes, blocks)
                    following = next(due)
                if kind == "alloc":
                    one = self._allocations[index]
                    if size := replaced.get(index, one.requested):
                        blocks[index] = allocator.malloc(size, one.stream)
                elif kind == "free" and index in blocks:
                    allocator.free(blocks.pop(index))
            while following is not None:
                self._asides(allocator, following, sizes, blocks)
                following = next(due)
        except DeviceOutOfMemory:
            return self._capacity, self._capacity
        return allocator.peak_allocated, allocator.peak_reserved

    def _asides(
        self,
        allocator: CachingAllocator,
        one: Unknown | Adjustment,
        sizes: Mapping[Unknown, int],
        blocks: Mapping[int, Block],
    ) -> None:
        if isinstance(one, Unknown):
            if size := sizes.get(one, 0):
                allocator.free(allocator.malloc(size, one.stream))
        elif one.name == "record_stream":
            index, stream = one.arguments
            if index in blocks:
                allocator.record_stream(blocks[index], stream)
        else:
            getattr(allocator, one.name)(*one.arguments, **one.options)


def _width(span: Span) -> float:
    return float("inf") if span.high is None else span.high - span.low


__all__ = ["Adjustment", "Uncertainty", "Unknown"]

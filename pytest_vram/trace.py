"""Trace: what one device's allocator did while a test ran, whoever watched it.

Two producers make a Trace: the real GPU (:mod:`pytest_vram.cuda`) and the simulated GPU
(:mod:`pytest_vram.sim`). Nothing downstream knows which one it was. All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

#: The lines of the ledger. Every allocated byte belongs to exactly one of them.
BILLS: tuple[str, ...] = (
    "parameters",
    "gradients",
    "optimizer_state",
    "master_weights",
    "buffers",
    "inputs",
    "activations",
    "autocast_cache",
    "workspace",
    "temporary",
    "other",
)

EventKind = Literal["alloc", "free", "segment_alloc", "segment_free", "phase", "oom"]


@dataclass(slots=True)
class Allocation:
    """One block handed out by the allocator, from ``alloc`` to ``free``.

    ``requested`` is what the operator asked for; ``block`` is what the allocator took for it and
    what ``torch.cuda.memory_allocated()`` counts (rounded to 512, plus a rest that was not split
    off). ``bill`` is empty while nobody has said whose bytes these are;
    :func:`pytest_vram.bills.settle` decides the rest from the allocation's life.
    """

    requested: int
    block: int
    address: int = 0
    stream: int = 0
    bill: str = ""
    name: str = ""  #: e.g. ``transformer.wte.weight`` for parameters, gradients, states
    shape: tuple[int, ...] | None = None
    dtype: str = ""  #: without ``torch.``: ``float32``
    operator: str = ""  #: ``aten::mm``
    module: str = ""  #: dotted path of the innermost module that was running
    frame: str = ""  #: innermost user line: ``train/loss.py:41 compute_loss``


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the run: ``setup``, ``forward``, ``backward``, ``optimizer``, ``between`` or a
    name that the test chose. ``step`` counts training steps from 1; 0 is before the first."""

    name: str
    step: int

    def __str__(self) -> str:
        return f"{self.name}, step {self.step}" if self.step else self.name


@dataclass(frozen=True, slots=True)
class Event:
    """``index`` points into ``Trace.allocations`` (alloc, free) or ``Trace.phases`` (phase).

    ``size`` and ``address`` are set for segment events (bytes reserved or given back) and for
    ``oom`` (``size``: bytes that could not be had).
    """

    kind: EventKind
    index: int = -1
    size: int = 0
    address: int = 0


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """An allocation that failed, and what the allocator held at that moment. ``allowed``: the most
    that ``set_per_process_memory_fraction`` lets it reserve, if it was called."""

    requested: int
    allocated: int
    reserved: int
    capacity: int
    free: int
    message: str
    operator: str = ""
    module: str = ""
    frame: str = ""
    allowed: int | None = None


#: Ends of an interval in bytes; ``None``: no upper end is known.
Interval = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class Bound:
    """One part of a device's memory that closed code decides, and ``why`` it cannot be known.

    ``allocated`` and ``reserved`` are the peaks if this part alone takes its least or its most.
    ``calls`` is how often it occurred; ``operator``, ``module`` and ``frame`` name the widest.
    """

    part: str
    why: str
    allocated: Interval
    reserved: Interval
    calls: int = 1
    operator: str = ""
    module: str = ""
    frame: str = ""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Every :class:`Bound` of a run, and the peaks if all parts take their least or their most."""

    parts: tuple[Bound, ...]
    allocated: Interval
    reserved: Interval

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Bounds:
        parts = [
            Bound(**{**one, **{name: tuple(one[name]) for name in ("allocated", "reserved")}})
            for one in raw["parts"]
        ]
        low, high = raw["allocated"]
        least, most = raw["reserved"]
        return cls(tuple(parts), (low, high), (least, most))


@dataclass(frozen=True, slots=True)
class Trace:
    """The ordered allocation events of one device during one pass of one test.

    ``base_allocated`` and ``base_reserved`` are what the device held before the pass began; the
    events and every figure derived from them exclude it.
    """

    allocations: Sequence[Allocation]
    events: Sequence[Event]
    phases: Sequence[Phase]
    device: str = "cuda:0"
    base_allocated: int = 0
    base_reserved: int = 0
    oom: OutOfMemory | None = None
    #: What closed code decides; ``None`` where every byte is known.
    bounds: Bounds | None = None
    notes: Sequence[str] = ()

    def alive(self) -> list[Allocation]:
        """What is allocated at its end, in the order of allocation."""
        indices: dict[int, None] = {}
        for event in self.events:
            if event.kind == "alloc":
                indices[event.index] = None
            elif event.kind == "free":
                indices.pop(event.index, None)
        return [self.allocations[index] for index in indices]

    def walk(self) -> Iterator[tuple[int, Event, int, int]]:
        """Yield ``(position, event, allocated, reserved)`` with the totals *after* each event."""
        allocated = reserved = 0
        for position, event in enumerate(self.events):
            if event.kind == "alloc":
                allocated += self.allocations[event.index].block
            elif event.kind == "free":
                allocated -= self.allocations[event.index].block
            elif event.kind == "segment_alloc":
                reserved += event.size
            elif event.kind == "segment_free":
                reserved -= event.size
            yield position, event, allocated, reserved


class Recorder(Protocol):
    """What :mod:`pytest_vram.observe` tells a producer while the test runs."""

    def phase(self, name: str, step: int) -> None:
        """A phase begins now and lasts until the next one."""

    def enter_module(self, path: str) -> None:
        """The module at ``path`` starts its forward; allocations are its own until it leaves."""

    def leave_module(self) -> None: ...

    def label(self, tensor: Any, bill: str, name: str = "") -> None:
        """The storage of ``tensor`` belongs to ``bill``; a later label of the same storage wins
        only if its bill comes earlier in ``BILLS`` or the storage had none."""

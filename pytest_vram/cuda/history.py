"""One device's side of a recording: counts and marks while it runs, and the Trace they give."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pytest_vram.cuda.casts import Casts
from pytest_vram.cuda.stacks import Origin, Stacks
from pytest_vram.quantities import parse_size
from pytest_vram.replay import ReplayError, replay
from pytest_vram.trace import BILLS, Allocation, Event, OutOfMemory, Phase, Trace

#: ("phase", name, step, frame), ("enter", path), ("leave",), ("uncached",) or
#: ("label", address, bill, name, shape, dtype, whether a gradient is wanted).
Mark = tuple[Any, ...]

_RANK = {bill: rank for rank, bill in enumerate(BILLS)}
_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


class DeviceHistory:
    """What a device did since :meth:`begin`.

    A position is the number of requests, frees and failed requests since the beginning: the
    allocator counts them (``allocation.all.allocated``, ``.freed``, ``num_ooms``), and the history
    has an entry for each.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.marks: list[tuple[int, Mark]] = []
        self.awake = False  #: marks are told to it
        self._offset = 0  # counts that a reset took away
        self._first = 0
        self._base: tuple[int, int] = (0, 0)
        self._segments: list[Mapping[str, Any]] = []
        self._peaks = (0, 0)
        self._open = 0

    # ---- while it runs

    def begin(self, base: tuple[int, int], unclosed: int) -> None:
        """``base``: bytes allocated and reserved before holes were closed, of which ``unclosed``
        bytes are open still."""
        self._base, self._open = base, unclosed
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        self._segments = [s for s in segments if s["device"] == self.index]
        torch.cuda.reset_peak_memory_stats(self.index)
        self._first = self._count()

    def mark(self, mark: Mark, at: int | None = None) -> None:
        self.marks.append((self._count() - self._first if at is None else at, mark))

    def label(self, address: int, tensor: torch.Tensor, bill: str, name: str) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = tuple(tensor.shape)
        self.mark(("label", address, bill, name, shape, dtype, tensor.requires_grad))

    def has_begun(self) -> bool:
        """Whether the device was used since the beginning."""
        return self._count() > self._first

    def _count(self) -> int:
        stats = torch._C._cuda_memoryStats(self.index)
        requests = stats["allocation"]["all"]
        return int(requests["allocated"] + requests["freed"] + stats["num_ooms"]) + self._offset

    def keep_counts(self) -> None:
        self._offset = self._count()

    def keep_peaks(self) -> None:
        """The allocator's own peaks until now are remembered; a reset may follow."""
        stats = torch._C._cuda_memoryStats(self.index)
        self._peaks = (
            max(self._peaks[0], stats["allocated_bytes"]["all"]["peak"]),
            max(self._peaks[1], stats["reserved_bytes"]["all"]["peak"]),
        )

    # ---- afterwards

    def trace(
        self,
        entries: Sequence[Mapping[str, Any]],
        stacks: Stacks,
        conf: str,
        error: BaseException | None,
    ) -> Trace:
        """The Trace of ``entries`` (PyTorch's ``device_traces[index]``, until now)."""
        self.keep_peaks()
        reader = _Reader(self._segments, self.marks, stacks)
        blocks, notes = self._blocks(entries, conf)
        reader.read(entries, blocks)
        if self._open:
            notes.append(
                f"{self._open:,} free bytes of earlier tests' segments stayed open to this one"
            )
        self._compare_counts(reader, notes)
        said = torch.cuda.get_device_properties(self.index)
        oom = reader.out_of_memory(error, said.total_memory, notes)
        reader.settle_peaks(self._peaks, notes)
        return Trace(
            allocations=reader.allocations,
            events=reader.events,
            phases=reader.phases,
            device=f"cuda:{self.index} ({said.name})",
            base_allocated=self._base[0],
            base_reserved=self._base[1],
            oom=oom,
            notes=tuple(notes),
        )

    def _blocks(
        self, entries: Sequence[Mapping[str, Any]], conf: str
    ) -> tuple[Sequence[int], list[str]]:
        """Bytes taken for each request, in order."""
        try:
            replayed = replay(self._segments, entries, conf, version=_VERSION[:2])  # type: ignore[arg-type]
        except ReplayError as error:
            requests = [entry["size"] for entry in entries if entry["action"] == "alloc"]
            # round_size of c10/cuda/CUDACachingAllocator.cpp, without the rests of large blocks
            return [max(512, (size + 511) // 512 * 512) for size in requests], [
                f"block sizes are requests rounded to 512 bytes, for the recording could not be "
                f"followed: {error}"
            ]
        return replayed.blocks, []

    def _compare_counts(self, reader: _Reader, notes: list[str]) -> None:
        counted = self._count() - self._first
        if missing := counted - reader.position:
            notes.append(
                f"PyTorch's memory history lacks {missing} of {counted} requests and frees; did "
                "the test use torch.cuda.memory._record_memory_history itself?"
            )


class _Reader:
    """Folds history entries and marks into allocations, events and phases.

    Memory that was there before counts for nothing: a free of it, or the return of its segment, is
    no event. ``allocated`` and ``reserved`` are the device's own totals, with it.
    """

    def __init__(
        self,
        segments: Sequence[Mapping[str, Any]],
        marks: Sequence[tuple[int, Mark]],
        stacks: Stacks,
    ) -> None:
        self.allocations: list[Allocation] = []
        self.events: list[Event] = []
        self.phases: list[Phase] = []
        self.position = 0  # requests, frees and failed requests so far
        self._stacks = stacks
        self._marks = marks
        self._next_mark = 0
        self._live: dict[int, int] = {}  # address -> index of allocation
        self._modules: list[str] = []
        self._frame = ""  # the user's line where the phase began
        self._casts = Casts()
        self._old_blocks: dict[int, int] = {
            block["address"]: block["size"]
            for segment in segments
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }
        self._old_segments = _Ranges((s["address"], s["total_size"]) for s in segments)
        self.allocated = sum(self._old_blocks.values())
        self.reserved = sum(s["total_size"] for s in segments)
        self._peaks = (self.allocated, self.reserved)
        self._peak_at = (0, 0)  # positions in events
        self._failures: list[tuple[int, Mapping[str, Any], Origin, str]] = []

    def read(self, entries: Sequence[Mapping[str, Any]], blocks: Sequence[int]) -> None:
        sizes = iter(blocks)
        self._apply_marks()
        for entry in entries:
            action = entry["action"]
            if action == "alloc":
                self._alloc(entry, next(sizes))
                self.position += 1
            elif action == "free_requested":
                self._free(entry["addr"])
                self.position += 1
            elif action in ("segment_alloc", "segment_map"):
                self._reserve(entry["addr"], entry["size"])
            elif action in ("segment_free", "segment_unmap"):
                self._give_back(entry["addr"], entry["size"])
            elif action == "oom":
                self._fail(entry)
                self.position += 1
            if self._next_mark < len(self._marks):
                self._apply_marks()
        while self._next_mark < len(self._marks):  # of entries that are missing
            self._apply(self._marks[self._next_mark][1])
            self._next_mark += 1

    # ---- entries

    def _alloc(self, entry: Mapping[str, Any], size: int) -> None:
        origin = self._stacks.origin(entry.get("frames", ()))
        index = len(self.allocations)
        allocation = Allocation(
            requested=entry["size"],
            block=size,
            address=entry["addr"],
            stream=entry["stream"],
            bill=origin.bill,
            name=origin.name,
            operator=origin.operator,
            module=self._modules[-1] if self._modules else "",
            frame=origin.frame or self._frame,
        )
        self.allocations.append(allocation)
        if origin.cast:
            self._casts.made(allocation)
        self._live[entry["addr"]] = index
        self.allocated += size
        if self.allocated > self._peaks[0]:
            self._peaks = (self.allocated, self._peaks[1])
            self._peak_at = (len(self.events), self._peak_at[1])
        self.events.append(Event("alloc", index))

    def _free(self, address: int) -> None:
        index = self._live.pop(address, None)
        if index is not None:
            self.allocated -= self.allocations[index].block
            self.events.append(Event("free", index))
        else:
            self.allocated -= self._old_blocks.pop(address, 0)

    def _reserve(self, address: int, size: int) -> None:
        self.reserved += size
        if self.reserved > self._peaks[1]:
            self._peaks = (self._peaks[0], self.reserved)
            self._peak_at = (self._peak_at[0], len(self.events))
        self.events.append(Event("segment_alloc", size=size, address=address))

    def _give_back(self, address: int, size: int) -> None:
        self.reserved -= size
        own = size - self._old_segments.remove(address, size)
        if own:
            self.events.append(Event("segment_free", size=own, address=address))

    def _fail(self, entry: Mapping[str, Any]) -> None:
        origin = self._stacks.origin(entry.get("frames", ()))
        module = self._modules[-1] if self._modules else ""
        self._failures.append((len(self.events), entry, origin, module))
        self.events.append(Event("oom", size=entry["size"]))

    # ---- marks

    def _apply_marks(self) -> None:
        marks = self._marks
        while self._next_mark < len(marks) and marks[self._next_mark][0] <= self.position:
            self._apply(marks[self._next_mark][1])
            self._next_mark += 1

    def _apply(self, mark: Mark) -> None:
        kind = mark[0]
        if kind == "enter":
            self._modules.append(mark[1])
        elif kind == "leave":
            if self._modules:
                self._modules.pop()
        elif kind == "phase":
            self.phases.append(Phase(mark[1], mark[2]))
            self._frame = mark[3]
            self.events.append(Event("phase", len(self.phases) - 1))
        elif kind == "uncached":
            self._casts.forget()
        else:
            self._label(*mark[1:])

    def _label(
        self, address: int, bill: str, name: str, shape: Any, dtype: str, trained: bool
    ) -> None:
        if bill == "parameters" and trained:
            self._casts.parameter(name, shape, dtype)
        index = self._live.get(address)
        if index is None:
            return
        allocation = self.allocations[index]
        if not allocation.bill or _RANK[bill] < _RANK[allocation.bill]:
            allocation.bill, allocation.name = bill, name
            allocation.shape, allocation.dtype = shape, dtype

    # ---- the end

    def settle_peaks(self, measured: tuple[int, int], notes: list[str]) -> None:
        """The recording's peaks are to be the allocator's own. Where they are not, what is missing
        becomes an allocation of bill ``other`` at the peak, and a note."""
        for name, was, found in zip(("allocated", "reserved"), measured, self._peaks, strict=True):
            if was != found:
                notes.append(
                    f"peak {name}: PyTorch's counter says {was:,} bytes, its recorded history "
                    f"{found:,}; the difference of {was - found:+,} bytes is unexplained"
                )
        missing = measured[0] - self._peaks[0]
        if missing > 0:
            index = len(self.allocations)
            self.allocations.append(
                Allocation(missing, missing, bill="other", name="missing from PyTorch's history")
            )
            at = self._peak_at[0]
            self.events[at:at] = [Event("alloc", index)]
            self.events.insert(at + 2, Event("free", index))

    def out_of_memory(
        self, error: BaseException | None, capacity: int, notes: list[str]
    ) -> OutOfMemory | None:
        """The failure that ended the test, if one did."""
        if not self._failures:
            return None
        said = _out_of_memory_error(error)
        if said is None:
            notes.append(f"ran out of memory {len(self._failures)} times, and the test went on")
            return None
        position, entry, origin, module = self._failures[-1]
        allocated, reserved = self._totals(position)
        limit = _ALLOWED.search(str(said))
        return OutOfMemory(
            requested=entry["size"],
            allocated=allocated,
            reserved=reserved,
            capacity=capacity,
            free=entry.get("device_free", 0),
            message=str(said).strip(),
            operator=origin.operator,
            module=module,
            frame=origin.frame or self._frame,
            allowed=parse_size(limit[1]) if limit else None,
        )

    def _totals(self, position: int) -> tuple[int, int]:
        trace = Trace(self.allocations, self.events, self.phases)
        for at, _, allocated, reserved in trace.walk():
            if at == position:
                return allocated, reserved
        return 0, 0


class _Ranges:
    """Address ranges from which parts are taken away."""

    def __init__(self, ranges: Any) -> None:
        self._ranges: list[tuple[int, int]] = [(a, a + size) for a, size in ranges]

    def remove(self, address: int, size: int) -> int:
        """Take ``size`` bytes at ``address`` away; the number of bytes that were there."""
        first, last = address, address + size
        kept: list[tuple[int, int]] = []
        removed = 0
        for begin, end in self._ranges:
            low, high = max(begin, first), min(end, last)
            if low >= high:
                kept.append((begin, end))
                continue
            removed += high - low
            kept += [part for part in ((begin, low), (high, end)) if part[0] < part[1]]
        self._ranges = kept
        return removed


#: What PyTorch's error says under ``set_per_process_memory_fraction``
#: (c10/cuda/CUDACachingAllocator.cpp, ``malloc``; v2.6 to v2.14).
_ALLOWED = re.compile(r"([0-9.]+ (?:bytes|[KMGT]iB)) allowed;")


def _out_of_memory_error(error: BaseException | None) -> BaseException | None:
    """The CUDA error among an exception and what it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None

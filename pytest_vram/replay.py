"""Replay a recorded run of PyTorch's CUDA allocator: block sizes from requested sizes, verified.

PyTorch's memory history says what was *asked for* and where it was put, not how large a block was
taken; ``memory_allocated`` counts blocks. The allocator's rules say the rest: the recorded requests
run through :mod:`pytest_vram.sim.allocator` from the recorded state, each address is compared with
the recorded one, and the blocks' sizes come out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_vram.sim.allocator import Block, CachingAllocator
from pytest_vram.sim.allocator.blocks import ALLOCATED, FREE, PENDING, Lane

#: ``(action, address, size, stream)``: what is used of PyTorch's trace entry.
Entry = tuple[str, int, int, int]

#: A device no request is too large for: what did not fit is in the recording.
BOUNDLESS = 1 << 46

_SILENT = frozenset({"snapshot", "user_defined", "oom", "workspace_snapshot"})


class ReplayError(ValueError):
    """The recording cannot be followed from the state it is said to begin with."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where the recorded allocator did something else than its rules say.

    ``entry`` is the position in the trace, ``expected`` the address the rules give (None: a new
    segment), ``recorded`` the one in the recording.
    """

    entry: int
    expected: int | None
    recorded: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a recording amounts to. All sizes in bytes.

    ``blocks`` has one size per ``alloc`` entry, in order: what ``memory_allocated`` counts for it.
    ``start_allocated``/``start_reserved`` is the state before the first entry; ``peak_*`` are the
    highest values from there on (``max_memory_allocated`` and ``max_memory_reserved`` style), and
    ``end_*`` the last. ``allocator`` is the allocator after the last entry.
    """

    blocks: tuple[int, ...]
    start_allocated: int
    start_reserved: int
    peak_allocated: int
    peak_reserved: int
    end_allocated: int
    end_reserved: int
    mismatches: tuple[Mismatch, ...]
    allocator: CachingAllocator = field(repr=False)


def entries(trace: Iterable[Mapping[str, Any] | Sequence[Any]]) -> list[Entry]:
    """PyTorch's trace entries (``_snapshot()['device_traces'][device]``), or rows that begin with
    action, address, size, stream, in one form."""
    result: list[Entry] = []
    for entry in trace:
        if isinstance(entry, Mapping):
            address = entry.get("addr", entry.get("device_free", 0))
            result.append((entry["action"], address, entry["size"], entry["stream"]))
        else:
            result.append((entry[0], entry[1], entry[2], entry[3]))
    return result


def replay(
    start_segments: Iterable[Mapping[str, Any]],
    trace_entries: Iterable[Mapping[str, Any] | Sequence[Any]],
    conf: str = "",
    *,
    version: tuple[int, int] = (2, 14),
) -> Replayed:
    """Run the recorded requests through the allocator's rules.

    ``start_segments`` is ``torch.cuda.memory._snapshot()['segments']`` taken when recording began
    (an empty list: nothing was reserved), of the one device the trace belongs to.
    ``trace_entries`` is ``_snapshot()['device_traces'][device]``, whole: with ``alloc``,
    ``free_requested``, ``free_completed`` and the ``segment_*`` entries, none dropped from the
    ring buffer. ``conf`` is PYTORCH_CUDA_ALLOC_CONF as it was, ``version`` that of torch.

    Where the recording goes another way than the rules, it is followed, and the difference noted
    in ``mismatches``: the sizes stay right as long as blocks were split as the rules say. Raises
    :class:`ReplayError` when an address lies in no free block at all.
    """
    follower = _Follower(conf, version)
    follower.restore(start_segments)
    start = follower.allocated, follower.reserved
    follower.reset_peak()
    follower.follow(entries(trace_entries))
    return Replayed(
        blocks=tuple(follower.taken),
        start_allocated=start[0],
        start_reserved=start[1],
        peak_allocated=follower.peak_allocated,
        peak_reserved=follower.peak_reserved,
        end_allocated=follower.allocated,
        end_reserved=follower.reserved,
        mismatches=tuple(follower.mismatches),
        allocator=follower,
    )


class _Recorded:
    """An address source that gives what the recording says the device gave."""

    def __init__(self) -> None:
        self.pending: deque[tuple[int, int]] = deque()  # segments
        self.mapped: deque[tuple[int, int]] = deque()  # memory put into expandable segments

    def __bool__(self) -> bool:
        return bool(self.pending or self.mapped)

    def take(self, size: int) -> int:
        if self.mapped:
            return self.mapped[0][0]  # address space begins with what is mapped into it first
        address, recorded = self.pending.popleft()
        if recorded != size:
            raise ReplayError(f"a segment of {size} bytes was due, {recorded} were recorded")
        return address

    def give_back(self, address: int, size: int) -> None:
        """Nothing: the next address is in the recording."""

    def occupy(self, address: int, size: int) -> None:
        """Nothing, for the same reason."""


class _Follower(CachingAllocator):
    """The allocator with a recording in hand: predicts, compares, then does what was recorded."""

    def __init__(self, conf: str, version: tuple[int, int]) -> None:
        self.source = _Recorded()
        super().__init__(
            BOUNDLESS,
            conf,
            addresses=self.source,
            event_ready=lambda stream: False,
            version=version,
        )
        self.taken: list[int] = []
        self.mismatches: list[Mismatch] = []
        self._live: dict[int, Block] = {}
        self._at = 0
        self._address = 0
        self._listener = self._segment_event

    def _prepare(self) -> None:
        super()._prepare()
        self._picky = True  # so that every request asks _find below

    def restore(self, segments: Iterable[Mapping[str, Any]]) -> dict[int, Block]:
        self._live = super().restore(segments)
        return self._live

    def follow(self, trace: Sequence[Entry]) -> None:
        for self._at, (action, address, size, stream) in enumerate(trace):
            if action == "alloc":
                self._alloc(address, size, stream)
            elif action == "free_requested":
                self._free_requested(trace, address)
            elif action == "free_completed":
                self._free_completed(address)
            elif action == "segment_alloc":
                self.source.pending.append((address, size))
            elif action == "segment_map":
                self.source.mapped.append((address, size))
            elif action == "segment_free":
                self._segment_free(address, size)
            elif action == "segment_unmap":
                self._segment_unmap(address, size)
            elif action not in _SILENT:
                raise ReplayError(f"entry {self._at}: unknown action {action!r}")

    # -- one entry -----------------------------------------------------------------------------

    def _alloc(self, address: int, size: int, stream: int) -> None:
        self._address = address
        block = self.malloc(size, stream)
        if block.address != address:
            raise ReplayError(
                f"entry {self._at}: {size} bytes were given {address:#x}, where no free block "
                f"begins; the rules give {block.address:#x}"
            )
        self._live[address] = block
        self.taken.append(block.size)
        if self.source:
            self._note(address, None, "memory was reserved that the request did not need")
            self.source.pending.clear()
            self.source.mapped.clear()

    def _free_requested(self, trace: Sequence[Entry], address: int) -> None:
        block = self._held(address)
        following = trace[self._at + 1][:2] if self._at + 1 < len(trace) else ("", 0)
        if following != ("free_completed", address):
            # Another stream still used it (record_stream); it comes back with its own entry.
            self.record_stream(block, block.stream - 1)
        self.free(block)

    def _free_completed(self, address: int) -> None:
        block = self._live.pop(address)
        if block.state == PENDING:
            self._events.clear()
            self._pass_event(block)

    def _segment_free(self, address: int, size: int) -> None:
        block = self.heads.get(address)
        if block is None or block.state != FREE or block.is_split or block.size != size:
            raise ReplayError(f"entry {self._at}: the segment at {address:#x} is not free")
        self._release(block)

    def _segment_unmap(self, address: int, size: int) -> None:
        for lane in self._lanes():
            for block in lane.in_order():
                if block.address <= address and address + size <= block.address + block.size:
                    self.expandable.unmap(block)
                    return
        raise ReplayError(f"entry {self._at}: nothing free to unmap at {address:#x}")

    # -- prediction and comparison -----------------------------------------------------------------

    def _find(self, lane: Lane, taken: int) -> Block | None:
        predicted = super()._find(lane, taken)
        if predicted is not None and predicted.address == self._address:
            return predicted
        if predicted is None and self.source:
            return None
        if predicted is not None:
            lane.add(predicted)
        expected = None if predicted is None else predicted.address
        if self.source:
            self._note(self._address, expected, "a new segment, though a cached block fits")
            return None
        for block in lane.blocks.values():
            if block.address == self._address and block.size >= taken:
                self._note(self._address, expected, "another cached block")
                lane.remove(block)
                return block
        return predicted

    def _new_segment(self, lane: Lane, size: int) -> Block | None:
        if not self.source.pending:
            raise ReplayError(
                f"entry {self._at}: {self._address:#x} lies in no free block, and no segment of "
                f"{size} bytes was reserved for it"
            )
        return super()._new_segment(lane, size)

    def _segment_event(self, kind: str, address: int, size: int, stream: int) -> None:
        if kind == "segment_map" and (
            not self.source.mapped or self.source.mapped.popleft() != (address, size)
        ):
            self._note(None, address, "memory mapped elsewhere than recorded")

    def _note(self, recorded: int | None, expected: int | None, why: str) -> None:
        self.mismatches.append(Mismatch(self._at, expected, recorded, why))

    def _held(self, address: int) -> Block:
        block = self._live.get(address)
        if block is None or block.state != ALLOCATED:
            raise ReplayError(f"entry {self._at}: {address:#x} is freed, but was not allocated")
        return block

    def _lanes(self) -> list[Lane]:
        return [lane for pool in self._pools() for lane in pool.lanes.values()]

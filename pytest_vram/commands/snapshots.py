"""PyTorch memory snapshots, read safely and folded into a Trace.

``torch.cuda.memory._dump_snapshot()`` writes a pickle, and a pickle can run any code. Ours is read
by an unpickler that knows containers, strings and numbers and refuses everything else; the same
goes for JSON recordings with the same fields, plain or gzipped.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pytest_vram.replay import ReplayError, replay
from pytest_vram.trace import Allocation, Event, OutOfMemory, Trace

#: Recordings longer than this are not replayed through the allocator's rules: sizes of freed
#: blocks are then their requests rounded up to 512 bytes.
REPLAYED = 200_000
_FREES = ("free_completed", "free")


class SnapshotError(ValueError):
    """A file that is no snapshot, or a broken or dangerous one; the text says which."""


class _PlainUnpickler(pickle.Unpickler):
    """Builds dicts, lists, tuples, sets, strings, bytes, numbers, booleans and None; nothing that
    has to be imported, so nothing that could run."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise SnapshotError(
            f"refused: the pickle asks for {module_name}.{global_name}, and a memory snapshot "
            "holds nothing but containers, strings and numbers"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise SnapshotError("refused: the pickle refers to objects outside of the file")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a snapshot file holds: final segments, and one list of trace entries per device."""

    segments: Sequence[Mapping[str, Any]]
    traces: Sequence[Sequence[Any]]
    stacks: Sequence[Any] = field(default=())

    def devices(self) -> list[int]:
        """Devices that have anything to say."""
        held = {int(segment.get("device", 0)) for segment in self.segments}
        return sorted(held | {index for index, trace in enumerate(self.traces) if trace})


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in ``path``: a pickle or JSON, gzipped or not.

    :raises SnapshotError: missing, truncated, not a snapshot, or asking to run code.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except OSError as error:
        raise SnapshotError(f"cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error):
        raise SnapshotError("truncated: the gzip stream ends early") from None
    raw = json_or_pickle(data)
    if not isinstance(raw, dict) or not isinstance(raw.get("segments"), list):
        raise SnapshotError(
            "not a memory snapshot: expected a dictionary with 'segments', as "
            "torch.cuda.memory._dump_snapshot() writes it"
        )
    traces = raw.get("device_traces") or []
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise SnapshotError("not a memory snapshot: 'device_traces' is not a list of lists")
    return Snapshot(raw["segments"], traces, raw.get("stacks") or ())


def json_or_pickle(data: bytes) -> Any:
    """Plain data from JSON text or from a pickle, whichever ``data`` is."""
    if data[:1] in (b"{", b"["):
        try:
            return json.loads(data)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise SnapshotError(f"not JSON to the end: {error}") from None
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except SnapshotError:
        raise
    except EOFError:
        raise SnapshotError("truncated: the pickle ends early") from None
    except Exception as error:
        # pickle raises whatever its opcodes run into: this is the border to a hostile file.
        raise SnapshotError(
            f"not a pickle, or a broken one ({type(error).__name__}: {error})"
        ) from None


@dataclass(frozen=True, slots=True)
class _Entry:
    """One trace entry in one form."""

    action: str
    address: int
    size: int
    stream: int
    frames: Any


@dataclass(frozen=True, slots=True)
class Explained:
    """One device's recording: a Trace whose bills are filled in for what lives at the peak, and
    whether they could be told at all (they come from stacks)."""

    trace: Trace
    inferred: bool
    before: int  #: allocations that were there before the recording began


def explain(snapshot: Snapshot, device: int) -> Explained:
    """Fold one device's entries: what was there before, every event, whose bytes at the peak.

    What the recording frees without having allocated, and what lives in the final segments without
    having been allocated in it, was there before it began. Bills are inferred from the stacks of
    an allocation and of its release, for nobody labelled anything.
    """
    try:
        return _Fold(snapshot, device).explained()
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise SnapshotError(
            f"device {device}: entries are not as PyTorch writes them ({error!r})"
        ) from None


class _Fold:
    def __init__(self, snapshot: Snapshot, device: int) -> None:
        self.snapshot = snapshot
        self.device = device
        rows = snapshot.traces[device] if device < len(snapshot.traces) else ()
        self.entries = [self._entry(row) for row in rows]
        self.segments = [s for s in snapshot.segments if int(s.get("device", 0)) == device]
        self.final = dict(self._final_blocks())
        self.guessed: set[int] = set()  # addresses whose block size at the start is a guess
        self.allocations: list[Allocation] = []
        self.events: list[Event] = []
        self.origin: list[Any] = []  # frames of each allocation
        self.release: list[Any] = []  # frames of each release; None while it lives
        self.oom: OutOfMemory | None = None

    def _entry(self, row: Any) -> _Entry:
        if isinstance(row, Mapping):
            address = row.get("addr", row.get("device_free", 0))
            return _Entry(
                row["action"], address, row["size"], row.get("stream", 0), row.get("frames") or ()
            )
        stack = row[4] if len(row) > 4 else -1
        frames = self.snapshot.stacks[stack] if 0 <= stack < len(self.snapshot.stacks) else ()
        return _Entry(row[0], row[1], row[2], row[3], frames)

    def _final_blocks(self) -> Iterator[tuple[int, tuple[int, int, Any]]]:
        """Address -> (block size, requested, frames) of everything alive at the end."""
        for segment in self.segments:
            address = segment["address"]
            for block in segment["blocks"]:
                if isinstance(block, Mapping):
                    size, state = block["size"], block["state"]
                    requested = block.get("requested_size", size)
                    address = block.get("address", address)
                    frames = block.get("frames") or ()
                else:
                    (size, requested, state), frames = block, ()
                if state == "active_allocated":
                    yield address, (size, requested, frames)
                address += size

    def explained(self) -> Explained:
        earlier = self._earlier()
        segments = self._first_segments(earlier)
        for address, (size, requested, frames) in earlier.items():
            self._allocate(address, requested, size, 0, frames)
        self._reserve_before()
        sizes = self._block_sizes(segments)
        self._walk({address: index for index, address in enumerate(earlier)}, sizes)
        inferred = self._bills()
        notes = []
        if earlier:
            notes.append(f"{len(earlier):,} allocations were there before the recording began")
        trace = Trace(
            self.allocations, self.events, (), f"cuda:{self.device}", oom=self.oom, notes=notes
        )
        return Explained(trace, inferred, len(earlier))

    def _earlier(self) -> dict[int, tuple[int, int, Any]]:
        """What was alive before the first entry, by address."""
        born: set[int] = set()
        earlier: dict[int, tuple[int, int, Any]] = {}
        for entry in self.entries:
            if entry.action == "alloc":
                born.add(entry.address)
            elif entry.action in _FREES:
                if entry.address not in born and entry.address not in earlier:
                    earlier[entry.address] = (_rounded(entry.size), entry.size, ())
                    self.guessed.add(entry.address)
                born.discard(entry.address)
        for address, block in self.final.items():
            if address not in born and address not in earlier:
                earlier[address] = block
        return earlier

    def _reserve_before(self) -> None:
        """One event for what was reserved before the first entry."""
        reserved = sum(segment["total_size"] for segment in self.segments)
        for entry in self.entries:
            if entry.action in ("segment_alloc", "segment_map"):
                reserved -= entry.size
            elif entry.action in ("segment_free", "segment_unmap"):
                reserved += entry.size
        if reserved > 0:
            self.events.insert(0, Event("segment_alloc", size=reserved))

    def _block_sizes(self, segments: list[dict[str, Any]]) -> Iterator[int]:
        """Bytes taken for each alloc entry, in order: by the allocator's own rules from the state
        at the beginning, where the recording can be followed."""
        expandable = any(e.action == "segment_map" for e in self.entries)
        if len(self.entries) <= REPLAYED and not (expandable and segments):
            rows = [(e.action, e.address, e.size, e.stream) for e in self.entries]
            try:
                yield from replay(segments, rows).blocks
                return
            except (ReplayError, ValueError, KeyError):
                pass  # recorded by other rules than ours: rounded requests are close enough
        yield from (_rounded(e.size) for e in self.entries if e.action == "alloc")

    def _first_segments(self, earlier: dict[int, tuple[int, int, Any]]) -> list[dict[str, Any]]:
        """The segments as they were before the first entry, with what lived in them then.

        Of a block that was freed during the recording only the request is known. In the large pool
        a gap of 1 MiB or less behind it is a rest that was not split off (``should_split`` of
        c10/cuda/CUDACachingAllocator.cpp leaves such rests with their block), so it is its own.
        """
        first: dict[int, dict[str, Any]] = {}
        opened: set[int] = set()
        for entry in self.entries:
            if entry.action == "segment_alloc":
                opened.add(entry.address)
            elif entry.action == "segment_free" and entry.address not in opened:
                kind = "small" if entry.size == 2 << 20 else "large"
                first[entry.address] = _segment(entry.address, entry.size, entry.stream, kind)
        for segment in self.segments:
            address, size = segment["address"], segment["total_size"]
            if address not in opened:
                kind = segment.get("segment_type", "large")
                first[address] = _segment(address, size, segment.get("stream", 0), kind)
        places = sorted(earlier)
        for made in first.values():
            start, end = made["address"], made["address"] + made["total_size"]
            inside = places[bisect_left(places, start) : bisect_left(places, end)]
            for address, following in pairwise([*inside, end]):
                size, requested, frames = earlier[address]
                rest = following - address - size
                guessed = address in self.guessed and made["segment_type"] == "large"
                if guessed and 0 < rest <= 1 << 20:
                    earlier[address] = (size + rest, requested, frames)
            made["blocks"] = list(_blocks(start, end, inside, earlier))
        return list(first.values())

    def _walk(self, live: dict[int, int], sizes: Iterator[int]) -> None:
        for entry in self.entries:
            if entry.action == "alloc":
                live[entry.address] = len(self.allocations)
                self._allocate(entry.address, entry.size, next(sizes), entry.stream, entry.frames)
            elif entry.action == "free_requested":
                if (index := live.get(entry.address)) is not None:
                    self.release[index] = entry.frames
            elif entry.action in _FREES:
                index = live.pop(entry.address, None)
                if index is not None:
                    self.release[index] = self.release[index] or entry.frames or ()
                    self.events.append(Event("free", index))
            elif entry.action in ("segment_alloc", "segment_map"):
                self.events.append(Event("segment_alloc", size=entry.size, address=entry.address))
            elif entry.action in ("segment_free", "segment_unmap"):
                self.events.append(Event("segment_free", size=entry.size, address=entry.address))
            elif entry.action == "oom":
                self._out_of_memory(entry)

    def _allocate(self, address: int, requested: int, block: int, stream: int, frames: Any) -> None:
        self.events.append(Event("alloc", len(self.allocations)))
        self.allocations.append(Allocation(requested, block, address, stream))
        self.origin.append(frames)
        self.release.append(None)

    def _out_of_memory(self, entry: _Entry) -> None:
        allocated = reserved = 0
        for event in self.events:
            size = self.allocations[event.index].block if event.index >= 0 else event.size
            if event.kind == "alloc":
                allocated += size
            elif event.kind == "free":
                allocated -= size
            else:
                reserved += size if event.kind == "segment_alloc" else -size
        self.events.append(Event("oom", size=entry.size))
        self.oom = OutOfMemory(
            requested=entry.size,
            allocated=allocated,
            reserved=reserved,
            capacity=reserved + entry.address,
            free=entry.address,  # PyTorch puts what the device had left here
            message=f"{entry.size} bytes could not be had",
            frame=_frame(_Stack.of(entry.frames)),
        )

    def _bills(self) -> bool:
        """Fill in the bill, operator and frame of what lives at the peak or at a failure."""
        inferred = False
        for index in self._shown():
            allocation, stack = self.allocations[index], _Stack.of(self.origin[index])
            freed = self.release[index]
            allocation.operator = stack.operator
            allocation.frame = _frame(stack)
            allocation.bill = _bill(stack, None if freed is None else _Stack.of(freed))
            inferred = inferred or bool(stack.names)
        return inferred

    def _shown(self) -> set[int]:
        """Indexes of allocations alive at the peak, at a failure or at the end."""
        live: set[int] = set()
        total = best = peak_at = 0
        for position, event in enumerate(self.events):
            if event.kind == "alloc":
                total += self.allocations[event.index].block
            elif event.kind == "free":
                total -= self.allocations[event.index].block
            if total > best:
                best, peak_at = total, position
        shown: set[int] = set()
        for position, event in enumerate(self.events):
            if event.kind == "alloc":
                live.add(event.index)
            elif event.kind == "free":
                live.discard(event.index)
            if position == peak_at or event.kind == "oom":
                shown |= live
        return shown | live


def _segment(address: int, size: int, stream: int, kind: str) -> dict[str, Any]:
    return {"address": address, "total_size": size, "stream": stream, "segment_type": kind}


def _blocks(
    start: int, end: int, inside: Sequence[int], earlier: Mapping[int, tuple[int, int, Any]]
) -> Iterator[dict[str, Any]]:
    """A segment's blocks from ``start`` to ``end``: what lives at the addresses ``inside``, and
    the free gaps between."""
    for address in inside:
        size, requested, _ = earlier[address]
        if address > start:
            yield {"size": address - start, "requested_size": 0, "state": "inactive"}
        yield {"size": size, "requested_size": requested, "state": "active_allocated"}
        start = address + size
    if end > start:
        yield {"size": end - start, "requested_size": 0, "state": "inactive"}


def _rounded(size: int) -> int:
    return max(512, -(-size // 512) * 512)


@dataclass(frozen=True, slots=True)
class _Stack:
    """The frames of one allocation, innermost first: names, files, and what they say."""

    names: tuple[str, ...]
    places: tuple[str, ...]

    @classmethod
    def of(cls, frames: Any) -> _Stack:
        names, places = [], []
        for frame in frames or ():
            if isinstance(frame, Mapping):
                names.append(str(frame.get("name", "")))
                places.append(f"{frame.get('filename', '')}:{frame.get('line', 0)}")
            else:
                name, _, place = str(frame).rpartition("@")
                names.append(name)
                places.append(place)
        return cls(tuple(names), tuple(places))

    def says(self, *words: str) -> bool:
        """Whether any frame's name or file contains one of ``words``."""
        return any(word in text for text in (*self.names, *self.places) for word in words)

    @property
    def backward(self) -> bool:
        return self.says(
            "autograd::Engine", "AccumulateGrad", "run_backward", "PyNode", "_engine_run_backward"
        )

    @property
    def operator(self) -> str:
        """The ATen operator nearest to the allocation, as ``aten::mm``."""
        for name in self.names:
            found = _operator(name)
            if found:
                return found
        return ""


@lru_cache(maxsize=4096)
def _operator(name: str) -> str:
    for marker in ("at::_ops::", "at::native::"):
        _, found, rest = name.partition(marker)
        if found:
            word = rest.split("::", 1)[0].split("(", 1)[0].split("<", 1)[0]
            if word and not word.startswith(("_", "empty", "Tensor")):
                return f"aten::{word}"
    return ""


def _frame(stack: _Stack) -> str:
    """The innermost line of Python that is not PyTorch's own."""
    for name, place in zip(stack.names, stack.places, strict=True):
        file = place.rsplit(":", 1)[0]
        if file.endswith(".py") and "/torch/" not in file and not file.startswith("torch/"):
            short = "/".join(place.split("/")[-2:])
            return f"{short} {name}"
    return ""


def _bill(stack: _Stack, freed: _Stack | None) -> str:
    """Whose bytes, from where they were taken and where they were given back.

    A forward tensor given back in backward was an activation; what an optimizer made and kept is
    its state; what backward made and did not give back itself is a gradient. Where stacks say
    nothing, ``other``.
    """
    if not stack.names:
        return "other"
    if stack.says("CUDABlas", "cublas", "getWorkspace"):
        return "workspace"
    if stack.says("autocast::cached_cast", "autocast_mode"):
        return "autocast_cache"
    if stack.says("/optim/", "optim@", "adamw", "_init_group", "AdamW", "optimizer.py"):
        return "optimizer_state" if freed is None else "temporary"
    if stack.backward:
        return "temporary" if freed is not None and freed.backward else "gradients"
    if stack.says("nn/init", "reset_parameters", "_apply", "nn/parameter", "init_weights"):
        return "parameters" if freed is None else "temporary"
    if freed is None:
        return "other"
    return "activations" if freed.backward else "temporary"

"""Recordings of real runs, and the allocator state a recording must have begun with.

A recording is a trace and a final snapshot. Where recording began before the first allocation the
start is empty. Where it began in the middle of a run, the start follows from the end: segments that
were reserved in between are taken away, blocks that were freed in between and never handed out
before had been live, and all else was free.

One thing a recording does not say: how large a block was that had been handed out *before* it and
was freed during it. The trace knows what was asked for, but in the large pool PyTorch leaves a rest
of up to 1 MiB with the block instead of splitting it off. :func:`rebuild` classifies every such
block:

* ``fills``: the gap behind it is at most 1 MiB. A free block so small cannot exist in the large
  pool, so the gap is the rest.
* ``followed``: while it lived something was put into the gap. A free block is used from its front,
  so the rest ends where the newcomer begins.
* ``undecided``: neither. The rest can be anything from nothing to ``most``; it shows only in
  that the free block behind is smaller, so that another may be the best fit. It is taken as
  nothing; when the replay then contradicts the recording, :func:`explain` enlarges it until
  the recorded choice is the right one.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pytest_vram.replay import Entry, Replayed, entries, replay

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("VRAM_SHARED", ROOT.parent / "shared"))
SNAPSHOTS = SHARED / "groundtruth" / "snapshots"
FIXTURES = ROOT / "fixtures" / "recordings"

Segment = dict[str, Any]


@dataclass(frozen=True)
class Recording:
    """One device's trace and final segments, in PyTorch's form."""

    name: str
    segments: tuple[Segment, ...]
    trace: tuple[Entry, ...]

    @property
    def from_empty(self) -> bool:
        """Whether recording began before anything was reserved."""
        reserved = {address for action, address, _, _ in self.trace if action == "segment_alloc"}
        return all(segment["address"] in reserved for segment in self.segments)


@dataclass(frozen=True)
class Hidden:
    """A large block that was live when recording began and freed later: its hidden rest."""

    address: int
    why: Literal["fills", "followed", "undecided"]
    rest: int
    most: int
    freed_at: int  #: position in the trace


@dataclass(frozen=True)
class Start:
    """The state at the first entry, and the rests that the trace does not name."""

    segments: tuple[Segment, ...]
    hidden: tuple[Hidden, ...]

    def count(self, why: str) -> int:
        return sum(hidden.why == why for hidden in self.hidden)

    @property
    def undecided(self) -> tuple[Hidden, ...]:
        return tuple(hidden for hidden in self.hidden if hidden.why == "undecided")


def load(path: Path) -> Recording:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        raw = json.load(file)
    (trace,) = raw["device_traces"]
    return Recording(
        name=path.name.split(".")[0],
        segments=tuple(_segment(segment) for segment in raw["segments"]),
        trace=tuple(entries(trace)),
    )


def _segment(raw: Mapping[str, Any]) -> Segment:
    """PyTorch's form of a segment whose blocks were shortened to [size, requested, state]."""
    segment = {**raw, "blocks": []}
    address = raw["address"]
    for size, requested, state in raw["blocks"]:
        segment["blocks"].append(
            {"address": address, "size": size, "requested_size": requested, "state": state}
        )
        address += size
    return segment


def rebuild(recording: Recording, rests: Mapping[int, int] | None = None) -> Start:
    """The state ``recording`` began with; ``rests`` names undecided rests by block address."""
    live, firsts = _live_at_start(recording)
    segments: list[Segment] = []
    hidden: list[Hidden] = []
    for address, (size, stream, kind) in sorted(_segments_at_start(recording).items()):
        inside = sorted(block for block in live if address <= block < address + size)
        blocks: list[dict[str, Any]] = []
        at = address
        for block, end in zip(inside, [*inside[1:], address + size], strict=False):
            requested, freed_at, exact = live[block]
            taken = exact or round_up(requested)
            gap = end - block - taken
            if exact is None and kind == "large" and gap:
                found = _rest(block, taken, gap, freed_at, firsts, (rests or {}).get(block, 0))
                hidden.append(found)
                taken += found.rest
            if block > at:
                blocks.append(_block(at, block - at, 0, "inactive"))
            blocks.append(_block(block, taken, requested, "active_allocated"))
            at = block + taken
        if at < address + size:
            blocks.append(_block(at, address + size - at, 0, "inactive"))
        segments.append(
            {
                "address": address,
                "total_size": size,
                "stream": stream,
                "segment_type": kind,
                "blocks": blocks,
            }
        )
    return Start(tuple(segments), tuple(hidden))


def explain(recording: Recording, version: tuple[int, int]) -> tuple[Start, Replayed]:
    """The start from which the recording replays; undecided rests enlarged where it says so."""
    rests: dict[int, int] = {}
    while True:
        start = rebuild(recording, rests)
        replayed = replay(start.segments, recording.trace, version=version)
        if not replayed.mismatches or not _enlarge(recording, start, replayed, rests):
            return start, replayed


def _enlarge(recording: Recording, start: Start, replayed: Replayed, rests: dict[int, int]) -> bool:
    """Make the free block that was wrongly expected too small for the first request that
    contradicts; False where no undecided block lies in front of it."""
    wrong = replayed.mismatches[0]
    taken = round_up(recording.trace[wrong.entry][2])
    for hidden in start.undecided:
        for segment in start.segments:
            for before, free in zip(segment["blocks"], segment["blocks"][1:], strict=False):
                if before["address"] == hidden.address and free["address"] == wrong.expected:
                    rest = hidden.rest + free["size"] - taken + 512
                    if wrong.entry < hidden.freed_at and rest <= hidden.most:
                        rests[hidden.address] = rest
                        return True
    return False


def _segments_at_start(recording: Recording) -> dict[int, tuple[int, int, str]]:
    """Size, stream and kind by address."""
    segments = {
        segment["address"]: (segment["total_size"], segment["stream"], segment["segment_type"])
        for segment in recording.segments
    }
    for action, address, size, stream in reversed(recording.trace):
        if action == "segment_alloc":
            del segments[address]
        elif action == "segment_free":
            # Only small segments are as small as 2 MiB.
            segments[address] = (size, stream, "small" if size == 2 * MIB else "large")
    return segments


def _live_at_start(
    recording: Recording,
) -> tuple[dict[int, tuple[int, int, int | None]], list[tuple[int, int]]]:
    """Requested size, position of the free, and exact size if known, by address; and where each
    allocation of the trace went."""
    live: dict[int, tuple[int, int, int | None]] = {}
    held: set[int] = set()
    firsts: list[tuple[int, int]] = []
    for position, (action, address, size, _) in enumerate(recording.trace):
        if action == "alloc":
            held.add(address)
            firsts.append((position, address))
        elif action == "free_requested" and address in held:
            held.remove(address)
        elif action == "free_requested":
            live[address] = (size, position, None)
    for segment in recording.segments:
        for block in segment["blocks"]:
            if block["state"] != "inactive" and block["address"] not in held:
                end = len(recording.trace)
                live[block["address"]] = (block["requested_size"], end, block["size"])
    return live, firsts


def _rest(
    block: int,
    taken: int,
    gap: int,
    freed_at: int,
    firsts: list[tuple[int, int]],
    assumed: int,
) -> Hidden:
    if gap <= MIB:
        return Hidden(block, "fills", gap, gap, freed_at)
    begin, end = block + taken, block + taken + gap
    most = min(MIB, (gap - MIB - 1) // 512 * 512)
    for position, address in firsts:
        if position >= freed_at:
            break
        if begin <= address < end:
            if address - begin > most:
                raise ValueError(f"{address:#x} was put {address - begin} bytes behind a block")
            return Hidden(block, "followed", address - begin, address - begin, freed_at)
    return Hidden(block, "undecided", assumed, most, freed_at)


def _block(address: int, size: int, requested: int, state: str) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state}


def round_up(size: int) -> int:
    return max(512, -(-size // 512) * 512)

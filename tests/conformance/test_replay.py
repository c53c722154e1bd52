"""Recordings of real GPUs, replayed: every address, every segment and both peaks.

The recordings in ../shared (VRAM_SHARED) are published snapshots of other people's runs on torch
2.6 and 2.11; the figures were read from them with PyTorch's own counters. Two small ones are in
fixtures/recordings, so that a clean clone replays something.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import FIXTURES, MIB, SNAPSHOTS, Recording, Start, explain, load, rebuild

from pytest_vram.replay import Replayed, replay
from pytest_vram.sim.allocator import Block, CachingAllocator

#: Per recording: allocations, peak allocated, peak reserved, and how many blocks of the start have
#: a hidden rest that fills its gap, is followed, is undecided (see recordings.py).
EXPECTED: dict[str, tuple[int, int, int, int, int, int]] = {
    "attention_probe": (36, 3_249_144_832, 3_781_165_056, 0, 0, 0),
    "lm24x1024_forward_ctx1024": (1280, 2_879_401_984, 3_204_448_256, 0, 0, 0),
    "lm24x1024_forward_ctx128": (1280, 1_738_928_128, 1_763_704_832, 0, 0, 0),
    "lm24x1024_forward_ctx256": (1280, 1_795_741_696, 1_864_368_128, 0, 0, 0),
    "lm24x1024_forward_ctx512": (1666, 1_951_309_824, 1_981_808_640, 0, 0, 0),
    "lm24x1024_train_ctx128_fp32": (6526, 7_026_606_592, 7_235_174_400, 4, 6, 0),
    "lm4x512_forward_ctx100_fp32": (785, 416_297_472, 463_470_592, 0, 0, 0),
    "lm4x512_forward_ctx150_fp32": (785, 639_149_056, 666_894_336, 0, 0, 0),
    "lm4x512_forward_ctx200_bf16": (995, 701_606_400, 742_391_808, 0, 0, 0),
    "lm4x512_forward_ctx200_fp32": (785, 882_670_592, 945_815_552, 0, 0, 0),
    "lm4x512_train_ctx100_fp32": (3853, 695_675_904, 786_432_000, 0, 0, 0),
    "lm4x512_train_ctx150_fp32": (3907, 953_719_808, 1_063_256_064, 0, 0, 0),
    "lm4x512_train_ctx200_bf16": (4404, 984_657_920, 1_205_862_400, 0, 0, 0),
    "lm4x512_train_ctx200_fp32": (3907, 1_234_635_264, 1_390_411_776, 0, 0, 0),
    "lm_compiled_train": (2162, 3_861_684_736, 4_238_344_192, 5, 7, 15),
    "lm_forward_torch211": (3221, 764_083_200, 937_426_944, 0, 0, 0),
    "lm_large_forward_autocast": (4138, 44_634_833_408, 47_234_154_496, 0, 1, 0),
    "lm_large_forward_fp32": (3368, 45_148_871_168, 45_730_496_512, 0, 1, 0),
    "lm_large_train": (6488, 23_281_500_672, 23_842_521_088, 109, 36, 80),
    "lm_small_forward_bf16": (937, 815_783_936, 861_929_472, 0, 0, 0),
    "lm_small_forward_fp32": (681, 560_939_008, 610_271_232, 0, 0, 0),
    "lm_windows_train": (1721, 13_927_832_064, 14_180_941_824, 0, 0, 1),
}

#: All of them are from 2.6 to 2.11, where free blocks of one size are ordered by address.
VERSION = (2, 11)


def paths() -> list[Any]:
    found = sorted(SNAPSHOTS.glob("*.json.gz"))
    missing = pytest.mark.skip(reason=f"no recordings in {SNAPSHOTS} (set VRAM_SHARED)")
    if not found:
        return [pytest.param(SNAPSHOTS, marks=missing, id="shared")]
    return [pytest.param(path, id=path.name.split(".")[0]) for path in found]


def blocks(segments: Any) -> list[Any]:
    return [
        (
            segment["address"],
            segment["stream"],
            segment["segment_type"],
            [(block["address"], block["size"], block["state"]) for block in segment["blocks"]],
        )
        for segment in segments
    ]


def peak_position(recording: Recording, start: Start, replayed: Replayed) -> int:
    """The entry at which the program held most."""
    sizes = {
        block["address"]: block["size"]
        for segment in start.segments
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }
    taken = iter(replayed.blocks)
    changes = []
    for action, address, _, _ in recording.trace:
        if action == "alloc":
            sizes[address] = next(taken)
        change = {"alloc": 1, "free_requested": -1}.get(action, 0)
        changes.append(change * sizes[address] if change else 0)
    held = list(accumulate(changes, initial=replayed.start_allocated))
    assert max(held) == replayed.peak_allocated
    return held.index(max(held))


@pytest.mark.parametrize("path", paths())
def test_recording(path: Path) -> None:
    recording = load(path)
    start, replayed = explain(recording, VERSION)
    assert replayed.mismatches == ()
    assert blocks(replayed.allocator.segments()) == blocks(recording.segments)
    assert recording.from_empty == (not start.segments)
    if recording.name in EXPECTED:
        assert EXPECTED[recording.name] == (
            len(replayed.blocks),
            replayed.peak_allocated,
            replayed.peak_reserved,
            start.count("fills"),
            start.count("followed"),
            start.count("undecided"),
        )


@pytest.mark.parametrize(
    ("name", "undecided", "at_most", "at_peak"),
    [
        ("lm_compiled_train", 15, 12_092_928, 12_092_928),
        ("lm_large_train", 80, 80_574_464, 80_574_464),
        ("lm_windows_train", 1, 523_776, 0),
    ],
)
def test_what_a_recording_leaves_open(
    name: str, undecided: int, at_most: int, at_peak: int
) -> None:
    """Blocks that may have been larger when recording began: how many, by how many bytes at most
    together, and by how many the peak could be higher because they were still there. Any such size
    replays as well as none, so the recording itself cannot say. Reserved memory is exact anyway."""
    path = SNAPSHOTS / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"no recordings in {SNAPSHOTS} (set VRAM_SHARED)")
    recording = load(path)
    start, replayed = explain(recording, VERSION)
    assert len(start.undecided) == undecided
    assert all(hidden.rest == 0 for hidden in start.undecided)
    assert sum(hidden.most for hidden in start.undecided) == at_most
    position = peak_position(recording, start, replayed)
    late = [hidden for hidden in start.undecided if hidden.freed_at > position]
    assert sum(hidden.most for hidden in late) == at_peak
    largest = {hidden.address: hidden.most for hidden in start.undecided}
    other = replay(rebuild(recording, largest).segments, recording.trace, version=VERSION)
    assert other.peak_reserved == replayed.peak_reserved
    assert other.peak_allocated <= replayed.peak_allocated + at_peak


@pytest.mark.parametrize("name", ["attention_probe", "lm4x512_forward_ctx100_fp32"])
def test_fixture(name: str) -> None:
    recording = load(FIXTURES / f"{name}.json.gz")
    replayed = replay([], recording.trace, version=VERSION)
    assert replayed.mismatches == ()
    assert blocks(replayed.allocator.segments()) == blocks(recording.segments)
    assert (
        len(replayed.blocks),
        replayed.peak_allocated,
        replayed.peak_reserved,
    ) == EXPECTED[name][:3]


def test_the_order_of_free_blocks_depends_on_the_version() -> None:
    """2.6 took the lowest of several equal blocks, 2.14 the one of the oldest segment; the
    recording is followed either way and says where it went elsewhere."""
    recording = load(FIXTURES / "attention_probe.json.gz")
    replayed = replay([], recording.trace, version=(2, 14))
    assert [mismatch.entry for mismatch in replayed.mismatches] == [59, 69, 74, 78, 85]
    assert {mismatch.why for mismatch in replayed.mismatches} == {"another cached block"}
    assert replayed.peak_allocated == 3_249_144_832
    assert blocks(replayed.allocator.segments()) == blocks(recording.segments)


# -- recordings made here: the true sizes are known ------------------------------------------------


class Recorded:
    """A run of the allocator itself, recorded from the middle on."""

    def __init__(self, events: list[tuple[int, int]], begin: int) -> None:
        self.allocator = CachingAllocator(1 << 40, version=VERSION)
        self.trace: list[tuple[str, int, int, int]] = []
        self.sizes: list[int] = []
        live: list[Block] = []
        for number, (choice, size) in enumerate(events):
            if number == begin:
                self.allocator.tracer = lambda *entry: self.trace.append(entry)
                self.start = self.allocator.segments()
                self.start_allocated = self.allocator.allocated
                self.allocator.reset_peak()
            if choice % 3 and live:
                self.allocator.free(live.pop(choice % len(live)))
            else:
                live.append(self.allocator.malloc(size))
                if number >= begin:
                    self.sizes.append(live[-1].size)
        self.recording = Recording("here", tuple(self.allocator.segments()), tuple(self.trace))


RUNS = st.lists(
    st.tuples(
        st.integers(0, 1000),
        st.one_of(
            st.integers(1, 5000),
            st.integers(MIB, 12 * MIB),
            st.sampled_from([3 * MIB, 3 * MIB - 700_000, 12 * MIB, 12 * MIB - 900_000]),
        ),
    ),
    min_size=60,
    max_size=160,
)


@settings(max_examples=60, deadline=None)
@given(events=RUNS)
def test_block_sizes_from_a_start_snapshot(events: list[tuple[int, int]]) -> None:
    run = Recorded(events, begin=30)
    replayed = replay(run.start, run.trace, version=VERSION)
    assert replayed.mismatches == ()
    assert list(replayed.blocks) == run.sizes
    assert replayed.start_allocated == run.start_allocated
    assert replayed.end_allocated == run.allocator.allocated
    assert replayed.peak_allocated == run.allocator.peak_allocated
    assert replayed.peak_reserved == run.allocator.peak_reserved
    assert blocks(replayed.allocator.segments()) == blocks(run.recording.segments)


@settings(max_examples=60, deadline=None)
@given(events=RUNS)
def test_the_rebuilt_start_is_right_but_for_what_it_calls_undecided(
    events: list[tuple[int, int]],
) -> None:
    run = Recorded(events, begin=30)
    start = rebuild(run.recording)
    true = {
        block["address"]: block["size"]
        for segment in run.start
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }
    rebuilt = {
        block["address"]: block["size"]
        for segment in start.segments
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }
    open_ = {hidden.address: hidden.most for hidden in start.undecided}
    assert rebuilt.keys() == true.keys()
    for address, size in true.items():
        assert rebuilt[address] <= size <= rebuilt[address] + open_.get(address, 0)


def test_a_rest_that_shows_in_a_choice_is_found() -> None:
    """A 12 MiB block that got 12.5; behind it 27.5 MiB are free and look like 28. A request for
    27.8 MiB then goes elsewhere: so at least 0.2 MiB of the 28 were not free."""
    allocator = CachingAllocator(1 << 40, version=VERSION)
    allocator.free(allocator.malloc(40 * MIB))
    first, second = allocator.malloc(12 * MIB + MIB // 2), allocator.malloc(27 * MIB + MIB // 2)
    other = allocator.malloc(30 * MIB)
    allocator.free(first)
    block = allocator.malloc(12 * MIB)
    allocator.free(second)
    allocator.free(other)
    assert (block.size, allocator.reserved) == (12 * MIB + MIB // 2, 70 * MIB)
    trace: list[tuple[str, int, int, int]] = []
    allocator.tracer = lambda *entry: trace.append(entry)
    asked = 27 * MIB + 800 * 1024
    taken = allocator.malloc(asked)
    assert taken.address == other.address
    allocator.free(block)
    recording = Recording("here", tuple(allocator.segments()), tuple(trace))
    assert len(replay(rebuild(recording).segments, trace, version=VERSION).mismatches) == 1
    start, replayed = explain(recording, VERSION)
    (hidden,) = start.undecided
    assert replayed.mismatches == ()
    assert (hidden.address, hidden.rest) == (block.address, 28 * MIB - asked + 512)
    assert hidden.rest <= MIB // 2 <= hidden.most

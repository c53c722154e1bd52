"""Replaying recorded runs: what is followed, what is noted, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_vram.replay import ReplayError, entries, replay
from pytest_vram.sim.allocator import Block, CachingAllocator

MIB = 1 << 20
CONFS = ["", "expandable_segments:True", "roundup_power2_divisions:4", "max_split_size_mb:20"]


class Run:
    """An allocator whose trace is recorded in PyTorch's form."""

    def __init__(self, conf: str = "") -> None:
        self.conf = conf
        self.ready = True
        self.allocator = CachingAllocator(4096 * MIB, conf, event_ready=lambda stream: self.ready)
        self.sizes: list[int] = []
        self.trace: list[dict[str, Any]] = []
        self.start: list[dict[str, Any]] = []

    def record(self) -> None:
        self.start = self.allocator.segments()
        self.allocator.reset_peak()
        self.allocator.tracer = self._entry

    def _entry(self, action: str, address: int, size: int, stream: int) -> None:
        key = "device_free" if action == "oom" else "addr"
        self.trace.append({"action": action, key: address, "size": size, "stream": stream})

    def malloc(self, size: int, stream: int = 0) -> Block:
        block = self.allocator.malloc(size, stream)
        if self.allocator.tracer is not None:
            self.sizes.append(block.size)
        return block

    def check(self) -> None:
        replayed = replay(self.start, self.trace, self.conf)
        assert replayed.mismatches == ()
        assert list(replayed.blocks) == self.sizes
        assert replayed.end_allocated == self.allocator.allocated
        assert replayed.end_reserved == self.allocator.reserved
        assert replayed.peak_allocated == self.allocator.peak_allocated
        assert replayed.peak_reserved == self.allocator.peak_reserved
        assert replayed.allocator.segments() == self.allocator.segments()


@pytest.mark.parametrize("conf", CONFS, ids=lambda conf: conf or "defaults")
@settings(max_examples=40, deadline=None)
@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["malloc", "malloc", "free", "free", "other stream", "empty"]),
            st.one_of(st.integers(1, 3 * MIB), st.integers(MIB, 40 * MIB)),
            st.integers(0, 1),
        ),
        max_size=80,
    )
)
def test_a_run_from_empty_is_replayed(conf: str, events: list[tuple[str, int, int]]) -> None:
    run = Run(conf)
    run.record()
    live: list[Block] = []
    for event, size, stream in events:
        if event == "malloc":
            live.append(run.malloc(size, stream))
        elif event == "empty":
            run.allocator.empty_cache()
        elif live:
            block = live.pop(size % len(live))
            if event == "other stream":
                run.allocator.record_stream(block, 1 - block.stream)
            run.allocator.free(block)
    run.allocator.process_events()
    run.check()


def test_a_block_that_waits_for_a_stream_comes_back_when_recorded() -> None:
    run = Run()
    run.record()
    block = run.malloc(5 * MIB)
    run.allocator.record_stream(block, 9)
    run.ready = False
    run.allocator.free(block)
    run.malloc(5 * MIB)
    run.ready = True
    run.malloc(5 * MIB)
    run.check()
    (first, second, third) = [entry["addr"] for entry in run.trace if entry["action"] == "alloc"]
    assert (first, second) == (third, third + 5 * MIB)


def test_out_of_memory_and_the_release_before_it_are_followed() -> None:
    run = Run()
    run.record()
    run.allocator.free(run.malloc(2000 * MIB))
    run.malloc(3000 * MIB)
    run.check()
    assert [entry["action"] for entry in run.trace].count("segment_free") == 1


def test_both_forms_of_entries() -> None:
    assert entries(
        [
            {"action": "alloc", "addr": 512, "size": 7, "stream": 1, "frames": []},
            {"action": "oom", "device_free": 3, "size": 7, "stream": 0},
            ["free_requested", 512, 7, 1, 0],
        ]
    ) == [("alloc", 512, 7, 1), ("oom", 3, 7, 0), ("free_requested", 512, 7, 1)]


BASE = 1 << 40
SEGMENT = ("segment_alloc", BASE, 20 * MIB, 0)


@pytest.mark.parametrize(
    ("trace", "sentence"),
    [
        (
            [("alloc", BASE, 5 * MIB, 0)],
            "lies in no free block, and no segment of 20971520 bytes was reserved",
        ),
        (
            [SEGMENT, ("alloc", BASE + 512, 5 * MIB, 0)],
            "entry 1: 5242880 bytes were given 0x10000000200, where no free block begins; the "
            "rules give 0x10000000000",
        ),
        ([("free_requested", BASE, 5, 0)], "is freed, but was not allocated"),
        ([("segment_free", BASE, 2 * MIB, 0)], "the segment at 0x10000000000 is not free"),
        ([("segment_unmap", BASE, 2 * MIB, 0)], "nothing free to unmap at 0x10000000000"),
        (
            [("segment_alloc", BASE, 32 * MIB, 0), ("alloc", BASE, 5 * MIB, 0)],
            "a segment of 20971520 bytes was due, 33554432 were recorded",
        ),
        ([("dance", 0, 0, 0)], "entry 0: unknown action 'dance'"),
    ],
)
def test_what_cannot_have_happened_is_refused(trace: list[Any], sentence: str) -> None:
    with pytest.raises(ReplayError) as caught:
        replay([], trace)
    assert sentence in str(caught.value)


def test_a_segment_nobody_needed_is_noted() -> None:
    trace = [
        SEGMENT,
        ("alloc", BASE, 5 * MIB, 0),
        ("segment_alloc", BASE + 20 * MIB, 20 * MIB, 0),
        ("alloc", BASE + 20 * MIB, 5 * MIB, 0),
    ]
    (mismatch,) = replay([], trace).mismatches
    assert (mismatch.entry, mismatch.expected, mismatch.recorded, mismatch.why) == (
        3,
        BASE + 5 * MIB,
        BASE + 20 * MIB,
        "a new segment, though a cached block fits",
    )

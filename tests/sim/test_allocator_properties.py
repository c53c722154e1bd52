"""Random streams: invariants after every event, and equality with the naive model."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_allocator import MIB, Naive, NoMemoryError

from pytest_vram.sim.allocator import (
    Block,
    CachingAllocator,
    Config,
    DeviceOutOfMemory,
    FirstFit,
    InvalidConfig,
)

BASE = 0x7F00_0000_0000
TOTAL = 512 * MIB
CONFS = [
    "",
    "expandable_segments:True",
    "expandable_segments:True,large_segment_size_mb:12",
    "expandable_segments:True,max_split_size_mb:32,garbage_collection_threshold:0.4",
    "max_split_size_mb:20",
    "max_split_size_mb:32,max_non_split_rounding_mb:24",
    "max_split_size_mb:24,garbage_collection_threshold:0.5",
    "garbage_collection_threshold:0.3",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:8,4:2,16:4,>:1]",
    "large_segment_size_mb:32",
]
VERSIONS = [(2, 11), (2, 12), (2, 14)]

SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 12 * MIB),
    st.integers(10 * MIB, 90 * MIB),
    st.sampled_from([512, 513, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB, 32 * MIB]),
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 2)),
        st.tuples(st.just("malloc"), st.sampled_from([700_000, 3 * MIB, 25 * MIB]), st.just(0)),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("record_stream"), st.integers(0, 1000), st.integers(0, 2)),
        st.tuples(st.just("empty_cache"), st.just(0), st.just(0)),
        st.tuples(st.just("fraction"), st.sampled_from([0.4, 0.7, 1.0]), st.just(0)),
        st.tuples(st.just("reset_peak"), st.just(0), st.just(0)),
        st.tuples(st.just("configure"), st.sampled_from(CONFS), st.just(0)),
    ),
    max_size=120,
)


def layout(allocator: CachingAllocator) -> list[Any]:
    states = {"inactive": "free", "active_allocated": "held", "active_pending_free": "late"}
    return [
        (
            segment["address"],
            segment["stream"],
            segment["segment_type"] == "small",
            [(b["address"], b["size"], states[b["state"]]) for b in segment["blocks"]],
        )
        for segment in allocator.segments()
    ]


class Pair:
    """The allocator and its model, driven together and compared after every event."""

    def __init__(self, conf: str, version: tuple[int, int]) -> None:
        self.version = version
        self.real = CachingAllocator(TOTAL, conf, addresses=FirstFit(BASE), version=version)
        self.model = Naive(TOTAL, Config().updated(conf, version), version, BASE)
        self.live: list[tuple[Block, Any]] = []

    def run(self, event: str, value: Any, stream: int) -> None:
        if event == "malloc":
            self.malloc(value, stream)
        elif event in ("free", "record_stream") and self.live:
            real, model = self.live[value % len(self.live)]
            if event == "free":
                self.live.remove((real, model))
                self.real.free(real)
                self.model.free(model)
            elif stream != real.stream:
                self.real.record_stream(real, stream)
                model.uses.add(stream)
        elif event == "empty_cache":
            self.real.empty_cache()
            self.model.empty_cache()
        elif event == "fraction":
            self.real.set_memory_fraction(value)
            self.model.allowed = None if value == 1.0 else int(value * TOTAL)
        elif event == "reset_peak":
            self.real.reset_peak()
            self.model.reset_peak()
        elif event == "configure":
            with suppress(InvalidConfig):  # e.g. max_split_size below the large segments' size
                self.real.configure(value)
                self.model.config = self.model.config.updated(value, self.version)

    def malloc(self, size: int, stream: int) -> None:
        try:
            expected = self.model.malloc(size, stream)
        except NoMemoryError:
            with pytest.raises(DeviceOutOfMemory):
                self.real.malloc(size, stream)
            return
        block = self.real.malloc(size, stream)
        assert (block.address, block.size) == (expected.address, expected.size)
        self.live.append((block, expected))

    def compare(self) -> None:
        assert layout(self.real) == self.model.layout()

    def compare_figures(self) -> None:
        stats = self.real.memory_stats()
        for name, value in self.model.figures().items():
            assert (name, stats[f"{name}.current"]) == (name, value)
            assert (name, stats[f"{name}.peak"]) == (name, self.model.peaks.get(name, 0))
        assert stats["num_alloc_retries"] == self.model.retries
        assert stats["num_ooms"] == self.model.ooms


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: ".".join(map(str, version)))
@pytest.mark.parametrize("conf", CONFS, ids=lambda conf: conf or "defaults")
@settings(max_examples=25, deadline=None)
@given(events=EVENTS)
def test_equals_the_naive_model(
    conf: str, version: tuple[int, int], events: list[tuple[str, Any, int]]
) -> None:
    pair = Pair(conf, version)
    for event in events:
        pair.run(*event)
        pair.compare()
    pair.compare_figures()

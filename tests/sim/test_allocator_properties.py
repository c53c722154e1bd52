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
#: On a small card, so that most streams of events run out of memory, with pools and busy streams.
TIGHT = 96 * MIB
SCARCE_EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("malloc"),
            st.sampled_from([4096, 700_000, 3 * MIB, 12 * MIB, 25 * MIB, 40 * MIB]),
            st.integers(0, 1),
        ),
        st.tuples(st.just("malloc"), st.integers(1, 30 * MIB), st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("record_stream"), st.integers(0, 1000), st.integers(0, 2)),
        st.tuples(st.just("busy"), st.booleans(), st.integers(0, 2)),
        st.tuples(st.just("empty_cache"), st.just(0), st.just(0)),
        st.tuples(st.just("fraction"), st.sampled_from([0.4, 0.7, 1.0]), st.just(0)),
        st.tuples(st.just("begin"), st.sampled_from([None, 0]), st.integers(1, 3)),
        st.tuples(st.just("end"), st.just(0), st.integers(1, 3)),
        st.tuples(st.just("end"), st.just(0), st.integers(1, 3)),
        st.tuples(st.just("release_pool"), st.just(0), st.integers(1, 3)),
        st.tuples(st.just("empty_pool"), st.just(0), st.integers(1, 3)),
    ),
    min_size=40,
    max_size=100,
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

    def __init__(self, conf: str, version: tuple[int, int], total: int = TOTAL) -> None:
        self.version = version
        self.total = total
        self.model = Naive(total, Config().updated(conf, version), version, BASE)
        self.log: list[tuple[str, int, int]] = []
        self.real = CachingAllocator(
            total,
            conf,
            addresses=FirstFit(BASE),
            version=version,
            event_ready=lambda stream: stream not in self.model.busy,
            listener=lambda kind, address, size, _: self.log.append((kind, address, size)),
        )
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
                self.model.record_stream(model, stream)
        elif event == "empty_cache":
            self.real.empty_cache()
            self.model.empty_cache()
        elif event == "fraction":
            self.real.set_memory_fraction(value)
            self.model.allowed = None if value == 1.0 else int(value * self.total)
        elif event == "reset_peak":
            self.real.reset_peak()
            self.model.reset_peak()
        elif event == "configure":
            with suppress(InvalidConfig):  # e.g. max_split_size below the large segments' size
                self.real.configure(value)
                self.model.config = self.model.config.updated(value, self.version)

        elif event == "busy":
            (self.model.busy.add if value else self.model.busy.discard)(stream)
        else:
            self.use_pool(event, value, stream)

    def use_pool(self, event: str, value: Any, pool: int) -> None:
        """What a program may do: hold a pool, allocate to it, give it up once."""
        mempool = (0, pool)
        known = self.model.pools.get(pool)
        captured = pool in [number for number, _ in self.model.captures]
        if event == "create_pool":
            self.real.create_pool(mempool, **value)
            self.model.use_pool(pool, **value)
        elif event == "begin" and not captured:
            self.real.begin_allocate_to_pool(mempool, lambda stream: value in (None, stream))
            self.model.use_pool(pool)
            self.model.captures.append((pool, value))
        elif event == "end" and captured:
            self.real.end_allocate_to_pool(mempool)
            self.model.captures = [each for each in self.model.captures if each[0] != pool]
        elif event == "release_pool" and known is not None and known.users > captured:
            self.real.release_pool(mempool)
            known.users -= 1
        elif event == "empty_pool":
            self.real.empty_cache(mempool)
            self.model.empty_cache(pool)

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
        assert self.log == self.model.log  # what was given back, and asked for, in which order

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


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: ".".join(map(str, version)))
@pytest.mark.parametrize(
    "conf", [CONFS[at] for at in (0, 1, 3, 6)], ids=lambda conf: conf or "defaults"
)
@settings(max_examples=40, deadline=None)
@given(events=SCARCE_EVENTS)
def test_equals_the_naive_model_in_pools_and_out_of_memory(
    conf: str, version: tuple[int, int], events: list[tuple[str, Any, int]]
) -> None:
    pair = Pair(conf, version, TIGHT)
    for number, options in enumerate(({}, {"no_split": True}, {"use_on_oom": True}), start=1):
        pair.run("create_pool", options, number)
    for event in events:
        pair.run(*event)
        pair.compare()
        assert {number: pair.real.pool_users((0, number)) for number in (1, 2, 3)} == {
            number: pool.users if (pool := pair.model.pools.get(number)) else 0
            for number in (1, 2, 3)
        }
    pair.compare_figures()

"""Facts about the caching allocator, with the figures PyTorch itself gives."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_vram.sim.allocator import (
    Block,
    CachingAllocator,
    DeviceOutOfMemory,
    FirstFit,
    format_size,
)

BASE = 0x7000_0000_0000
KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def make(conf: str = "", total: int = 80 * GIB, **options: Any) -> CachingAllocator:
    return CachingAllocator(total, conf, addresses=FirstFit(BASE), **options)


def offset(block: Block) -> int:
    return block.address - BASE


# -- sizes, segments, reuse ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # a rest of at most 1 MiB is not split off
        (19 * MIB, 20 * MIB, 20 * MIB),
        (33_554_432, 33_554_432, 32 * MIB),
    ],
)
def test_rounding_and_segments(asked: int, block: int, segment: int) -> None:
    allocator = make()
    got = allocator.malloc(asked)
    assert (got.size, got.requested, allocator.reserved) == (block, asked, segment)
    assert (allocator.allocated, allocator.requested) == (block, asked)


def test_the_smallest_free_block_that_fits_is_taken_and_split() -> None:
    allocator = make()
    big, small, end = (allocator.malloc(size) for size in (700 * KIB, 300 * KIB, 100 * KIB))
    allocator.free(big)
    allocator.free(small)  # merges with big; 1000 KiB from offset 0, 948 KiB behind `end`
    assert offset(allocator.malloc(200 * KIB)) == 1100 * KIB
    assert offset(allocator.malloc(990 * KIB)) == 0
    assert allocator.reserved == 2 * MIB
    allocator.free(end)


@pytest.mark.parametrize(
    ("version", "taken"), [((2, 6), 0), ((2, 11), 0), ((2, 12), 2), ((2, 13), 2), ((2, 14), 2)]
)
def test_which_of_two_equal_blocks(version: tuple[int, int], taken: int) -> None:
    """Up to 2.11 the lower address, later the older segment; here the older one lies higher."""
    allocator = make(version=version)
    first = allocator.malloc(30 * MIB)
    keep = allocator.malloc(30 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    other = allocator.malloc(30 * MIB)
    blocks = [other, keep]
    assert offset(other) < offset(keep)
    for block in blocks:
        allocator.free(block)
    assert offset(allocator.malloc(30 * MIB)) == taken * 15 * MIB


def test_streams_do_not_share_blocks() -> None:
    allocator = make()
    block = allocator.malloc(5 * MIB, stream=1)
    allocator.free(block)
    other = allocator.malloc(5 * MIB, stream=2)
    assert (offset(block), offset(other), allocator.reserved) == (0, 20 * MIB, 40 * MIB)


def test_a_block_is_given_up_once() -> None:
    allocator = make()
    block = allocator.malloc(1000)
    allocator.free(block)
    with pytest.raises(ValueError, match="is not allocated"):
        allocator.free(block)


def test_empty_cache_keeps_segments_in_use() -> None:
    heard: list[tuple[str, int, int, int]] = []
    allocator = make(listener=lambda *event: heard.append(event))
    small, large, keep = (allocator.malloc(size) for size in (1000, 30 * MIB, 40 * MIB))
    allocator.free(small)
    allocator.free(large)
    allocator.empty_cache()
    assert heard == [
        ("segment_alloc", BASE, 2 * MIB, 0),
        ("segment_alloc", BASE + 2 * MIB, 30 * MIB, 0),
        ("segment_alloc", BASE + 32 * MIB, 40 * MIB, 0),
        ("segment_free", BASE + 2 * MIB, 30 * MIB, 0),
        ("segment_free", BASE, 2 * MIB, 0),
    ]
    assert allocator.reserved == keep.size


def test_the_tracer_hears_what_pytorch_records() -> None:
    heard: list[tuple[str, int, int, int]] = []
    allocator = make()
    allocator.tracer = lambda *entry: heard.append(entry)
    allocator.free(allocator.malloc(1000, stream=3))
    assert heard == [
        ("segment_alloc", BASE, 2 * MIB, 3),
        ("alloc", BASE, 1000, 3),
        ("free_requested", BASE, 1000, 3),
        ("free_completed", BASE, 1000, 3),
    ]


# -- settings ------------------------------------------------------------------------------------


def test_max_split_size_keeps_oversize_blocks_apart() -> None:
    allocator = make("max_split_size_mb:40")
    big = allocator.malloc(100 * MIB)
    allocator.free(big)
    assert offset(allocator.malloc(30 * MIB)) == 100 * MIB  # too small for the oversize block
    assert offset(allocator.malloc(80 * MIB)) == 130 * MIB  # would waste 20 MiB of it
    reused = allocator.malloc(80 * MIB + 512)
    assert (offset(reused), reused.size) == (0, 100 * MIB)
    assert allocator.memory_stats()["oversize_allocations.current"] == 2
    assert allocator.memory_stats()["oversize_segments.current"] == 2
    assert allocator.memory_stats()["max_split_size"] == 40 * MIB


def test_oversize_blocks_go_first_when_memory_is_short() -> None:
    allocator = make("max_split_size_mb:40", total=200 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.free(allocator.malloc(60 * MIB))
    allocator.free(allocator.malloc(90 * MIB))
    allocator.malloc(100 * MIB)  # 90 + 60 MiB go back, largest first; 30 MiB stay cached
    assert allocator.reserved == 130 * MIB
    assert allocator.memory_stats()["num_alloc_retries"] == 0
    assert allocator.memory_stats()["num_device_free"] == 2


def test_garbage_collection_gives_back_what_was_unused_longest() -> None:
    allocator = make("garbage_collection_threshold:0.5", total=200 * MIB)
    allocator.set_memory_fraction(0.9)
    old = allocator.malloc(40 * MIB)
    allocator.free(old)
    for _ in range(3):
        allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(70 * MIB)
    # 100 MiB were reserved, 90 are the threshold: the 40 MiB block was older than the average.
    assert allocator.reserved == 130 * MIB


def test_expandable_segments_grow_in_place() -> None:
    heard: list[tuple[str, int, int, int]] = []
    allocator = make("expandable_segments:True", listener=lambda *event: heard.append(event))
    first = allocator.malloc(30 * MIB)
    second = allocator.malloc(25 * MIB)
    assert offset(second) - offset(first) == 30 * MIB
    assert heard == [
        ("segment_map", BASE, 40 * MIB, 0),
        ("segment_map", BASE + 40 * MIB, 20 * MIB, 0),
    ]
    allocator.free(first)
    allocator.empty_cache()  # only whole granules of 20 MiB go back
    assert heard[2:] == [("segment_unmap", BASE, 20 * MIB, 0)]
    assert [segment["total_size"] for segment in allocator.segments()] == [40 * MIB]
    allocator.free(second)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segments()) == (0, [])
    assert allocator.memory_stats()["segment.all.allocated"] == 0
    assert allocator.memory_stats()["num_device_alloc"] == 2


def test_large_segment_size_and_memory_fraction_from_the_settings() -> None:
    allocator = make("large_segment_size_mb:32,per_process_memory_fraction:0.5", total=64 * MIB)
    allocator.malloc(2 * MIB)
    assert allocator.reserved == 32 * MIB
    with pytest.raises(DeviceOutOfMemory, match=r"32\.00 MiB allowed; "):
        allocator.malloc(32 * MIB)


# -- streams -------------------------------------------------------------------------------------


def test_record_stream_holds_a_block_back_until_its_event_has_passed() -> None:
    passed = False
    allocator = make(event_ready=lambda stream: passed)
    block = allocator.malloc(5 * MIB)
    allocator.record_stream(block, 7)
    allocator.free(block)
    (segment,) = allocator.segments()
    assert segment["blocks"][0]["state"] == "active_pending_free"
    stats = allocator.memory_stats()
    assert (stats["allocated_bytes.all.current"], stats["active_bytes.all.current"]) == (
        0,
        5 * MIB,
    )
    assert offset(allocator.malloc(5 * MIB)) == 5 * MIB
    passed = True
    assert offset(allocator.malloc(5 * MIB)) == 0


def test_recording_the_own_stream_changes_nothing() -> None:
    allocator = make(event_ready=lambda stream: False)
    block = allocator.malloc(1000, stream=4)
    allocator.record_stream(block, 4)
    allocator.free(block)
    assert allocator.memory_stats()["active.all.current"] == 0


def test_out_of_memory_waits_for_events_first() -> None:
    allocator = make(event_ready=lambda stream: False, total=100 * MIB)
    block = allocator.malloc(60 * MIB)
    allocator.record_stream(block, 1)
    allocator.free(block)
    allocator.malloc(80 * MIB)
    stats = allocator.memory_stats()
    assert (stats["num_sync_all_streams"], stats["num_alloc_retries"], stats["num_ooms"]) == (
        1,
        1,
        0,
    )


# -- out of memory -------------------------------------------------------------------------------


def test_out_of_memory_in_pytorchs_words() -> None:
    allocator = make(total=79 * GIB, context=500 * MIB, device=1, version=(2, 6))
    allocator.malloc(40 * GIB)
    keep = allocator.malloc(3 * MIB)
    with pytest.raises(DeviceOutOfMemory) as caught:
        allocator.malloc(39 * GIB + 5)
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 39.00 GiB. GPU 1 has a total capacity of 79.00 GiB"
        " of which 38.49 GiB is free. Of the allocated memory 40.00 GiB is allocated by PyTorch,"
        " and 17.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory"
        " is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid"
        " fragmentation.  See documentation for Memory Management "
        " (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
    error = caught.value
    assert (error.requested, error.segment) == (39 * GIB + 5, 39 * GIB + 2 * MIB)
    assert (error.allocated, error.reserved) == (40 * GIB + 3 * MIB, 40 * GIB + 20 * MIB)
    assert (error.capacity, error.free) == (79 * GIB, 39 * GIB - 520 * MIB)
    assert (error.fraction, error.allowed) == (None, None)
    allocator.free(keep)
    assert allocator.malloc(30 * GIB).size == 30 * GIB  # the allocator goes on working


def test_the_advice_follows_the_version_and_the_settings() -> None:
    messages = {}
    for version in ((2, 6), (2, 12), (2, 14)):
        for conf in ("", "expandable_segments:True"):
            with pytest.raises(DeviceOutOfMemory) as caught:
                make(conf, total=MIB, version=version).malloc(GIB)
            messages[version, conf] = str(caught.value).partition("unallocated.")[2]
    assert messages[(2, 6), ""].endswith("cuda.html#environment-variables)")
    assert messages[(2, 14), ""].endswith("#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)")
    assert "expandable_segments:True" in messages[(2, 12), "expandable_segments:True"]
    assert messages[(2, 14), "expandable_segments:True"] == ""


def test_a_memory_fraction_is_a_ceiling() -> None:
    allocator = make(total=2 * GIB)
    allocator.set_memory_fraction(0.25)
    allocator.free(allocator.malloc(300 * MIB))
    assert allocator.malloc(400 * MIB).size == 400 * MIB  # after giving the 300 MiB back
    with pytest.raises(DeviceOutOfMemory, match=r"512\.00 MiB allowed; ") as caught:
        allocator.malloc(200 * MIB)
    assert (caught.value.fraction, caught.value.allowed) == (0.25, 512 * MIB)
    allocator.set_memory_fraction(1.0)
    assert allocator.malloc(200 * MIB).size == 200 * MIB


def test_early_rejection_looks_at_the_settings_alone() -> None:
    conf = "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.5"
    allocator = make(conf, total=2 * GIB)
    allocator.set_memory_fraction(0.9)
    allocator.malloc(400 * MIB)
    with pytest.raises(DeviceOutOfMemory) as caught:
        allocator.malloc(900 * MIB)
    assert str(caught.value) == (
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
        "per_process_memory_fraction limit. Requested size: 900.00 MiB"
    )
    stats = allocator.memory_stats()
    assert (stats["num_oom_rejections"], stats["num_ooms"], stats["num_alloc_retries"]) == (1, 0, 0)


def test_callbacks_and_observers_of_out_of_memory() -> None:
    allocator = make(total=100 * MIB)
    held = [allocator.malloc(60 * MIB)]
    seen: list[DeviceOutOfMemory] = []
    allocator.out_of_memory_observers.append(seen.append)

    def give_up() -> bool:
        if not held:
            return False
        allocator.free(held.pop())
        return True

    allocator.free_memory_callbacks.append(give_up)
    assert offset(allocator.malloc(59 * MIB + 512)) == 0  # PyTorch looks again before it reserves
    with pytest.raises(DeviceOutOfMemory) as caught:
        allocator.malloc(90 * MIB)
    assert seen == [caught.value]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (MIB, "1024.00 KiB"),
        (MIB + 1, "1.00 MiB"),
        (GIB, "1024.00 MiB"),
        (84_987_740_160, "79.15 GiB"),
    ],
)
def test_sizes_as_pytorch_writes_them(size: int, text: str) -> None:
    assert format_size(size) == text


# -- private pools -------------------------------------------------------------------------------


def test_a_private_pool_keeps_its_memory_to_itself() -> None:
    allocator = make()
    allocator.begin_allocate_to_pool((0, 1))
    inside = allocator.malloc(30 * MIB)
    allocator.end_allocate_to_pool((0, 1))
    allocator.free(inside)
    outside = allocator.malloc(30 * MIB)
    assert offset(outside) == 30 * MIB
    assert [segment["segment_pool_id"] for segment in allocator.segments()] == [(0, 1), (0, 0)]
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB  # a graph may still need it
    key = "reserved_bytes_by_private_pools.0_1.all.current"
    assert allocator.memory_stats()[key] == 30 * MIB
    allocator.release_pool((0, 1))
    allocator.empty_cache((0, 1))
    assert allocator.reserved == 30 * MIB
    stats = allocator.memory_stats()
    assert (stats[key], stats["reserved_bytes_by_private_pools.0_1.all.peak"]) == (0, 30 * MIB)


def test_cached_memory_of_private_pools_is_named_when_memory_runs_out() -> None:
    allocator = make(total=100 * MIB)
    allocator.begin_allocate_to_pool((1, 0))
    allocator.free(allocator.malloc(40 * MIB))
    allocator.end_allocate_to_pool((1, 0))
    with pytest.raises(DeviceOutOfMemory) as caught:
        allocator.malloc(80 * MIB)
    assert (
        "Of the allocated memory 40.00 MiB is allocated by PyTorch, with 40.00 MiB allocated in "
        "private pools (e.g., CUDA Graphs), and 0 bytes is reserved"
    ) in str(caught.value)


def test_a_pool_made_for_the_purpose_helps_out() -> None:
    allocator = make(total=100 * MIB)
    allocator.create_pool((0, 5), use_on_oom=True)
    allocator.begin_allocate_to_pool((0, 5))
    allocator.free(allocator.malloc(60 * MIB))
    allocator.end_allocate_to_pool((0, 5))
    assert offset(allocator.malloc(50 * MIB)) == 0


def test_a_pool_that_helps_out_keeps_the_rest_of_its_block() -> None:
    allocator = CachingAllocator(64 * MIB)
    allocator.create_pool((0, 1), use_on_oom=True)
    allocator.begin_allocate_to_pool((0, 1))
    block = allocator.malloc(40 * MIB)
    allocator.end_allocate_to_pool((0, 1))
    allocator.free(block)
    first = allocator.malloc(30 * MIB)
    assert first.address == block.address
    # The rest is the pool's: a request outside finds it only as this one did, by way of the pool.
    allocator.begin_allocate_to_pool((0, 1))
    rest = allocator.malloc(10 * MIB)
    assert rest.address == first.address + 30 * MIB
    assert allocator.reserved == 40 * MIB


def test_blocks_used_across_a_capture_return_after_it() -> None:
    allocator = make()
    block = allocator.malloc(5 * MIB)
    allocator.record_stream(block, 1)
    allocator.begin_allocate_to_pool((1, 0))
    allocator.free(block)
    allocator.malloc(1000)
    assert allocator.memory_stats()["active_bytes.large_pool.current"] == 5 * MIB
    allocator.end_allocate_to_pool((1, 0))
    allocator.malloc(1000)
    assert allocator.memory_stats()["active_bytes.large_pool.current"] == 0


def test_pools_are_opened_and_closed_in_pairs() -> None:
    allocator = make()
    allocator.begin_allocate_to_pool((1, 0))
    with pytest.raises(RuntimeError, match="already recording to mempool_id"):
        allocator.begin_allocate_to_pool((1, 0))
    allocator.end_allocate_to_pool((1, 0))
    with pytest.raises(RuntimeError, match="not currently recording to mempool_id"):
        allocator.end_allocate_to_pool((1, 0))


# -- statistics and snapshots ----------------------------------------------------------------------


def test_memory_stats_has_pytorchs_keys() -> None:
    """The keys of torch.cuda.memory_stats() on 2.14; earlier versions don't count rejections."""
    figures = [
        "active",
        "active_bytes",
        "allocated_bytes",
        "allocation",
        "inactive_split",
        "inactive_split_bytes",
        "requested_bytes",
        "reserved_bytes",
        "segment",
    ]
    expected = {
        f"{figure}.{scope}.{kind}"
        for figure in figures
        for scope in ("all", "large_pool", "small_pool")
        for kind in ("allocated", "current", "freed", "peak")
    }
    for figure in ("oversize_allocations", "oversize_segments"):
        expected |= {f"{figure}.{kind}" for kind in ("allocated", "current", "freed", "peak")}
    expected |= {
        "max_split_size",
        "num_alloc_retries",
        "num_device_alloc",
        "num_device_free",
        "num_ooms",
        "num_sync_all_streams",
    }
    assert set(make(version=(2, 6)).memory_stats()) == expected
    stats = make().memory_stats()
    assert set(stats) == expected | {"num_oom_rejections"}
    assert list(stats) == sorted(stats)
    assert stats["max_split_size"] == -1


def test_peaks_and_sums_are_reset_separately() -> None:
    allocator = make()
    blocks = [allocator.malloc(size) for size in (3 * MIB, 5 * MIB, 700)]
    for block in blocks[:2]:
        allocator.free(block)
    assert (allocator.peak_allocated, allocator.peak_reserved) == (8 * MIB + 1024, 22 * MIB)
    allocator.reset_peak()
    allocator.reset_accumulated()
    allocator.free(allocator.malloc(2 * MIB))
    stats = allocator.memory_stats()
    assert stats["allocated_bytes.all.peak"] == 2 * MIB + 1024
    assert stats["allocated_bytes.all.allocated"] == 2 * MIB
    assert stats["allocated_bytes.all.freed"] == 2 * MIB
    assert stats["reserved_bytes.all.allocated"] == 0
    assert stats["allocation.small_pool.allocated"] == 0
    assert stats["allocation.small_pool.peak"] == 1


def test_a_snapshot_of_segments_and_back() -> None:
    allocator = make()
    first, second = allocator.malloc(1000), allocator.malloc(2000)
    allocator.free(first)
    assert allocator.segments() == [
        {
            "device": 0,
            "address": BASE,
            "total_size": 2 * MIB,
            "allocated_size": 2048,
            "active_size": 2048,
            "requested_size": 2000,
            "stream": 0,
            "segment_type": "small",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [
                {
                    "address": BASE,
                    "size": 1024,
                    "requested_size": 1000,  # what was last asked of it
                    "state": "inactive",
                    "frames": [],
                },
                {
                    "address": BASE + 1024,
                    "size": 2048,
                    "requested_size": 2000,
                    "state": "active_allocated",
                    "frames": [],
                },
                {
                    "address": BASE + 3072,
                    "size": 2 * MIB - 3072,
                    "requested_size": 0,
                    "state": "inactive",
                    "frames": [],
                },
            ],
        }
    ]
    copy = make()
    live = copy.restore(allocator.segments())
    assert list(live) == [second.address]
    assert copy.segments() == allocator.segments()
    assert (copy.allocated, copy.requested, copy.reserved) == (2048, 2000, 2 * MIB)
    copy.free(live[second.address])
    assert [block["size"] for block in copy.segments()[0]["blocks"]] == [2 * MIB]


def test_restored_expandable_segments_go_on_growing() -> None:
    allocator = make("expandable_segments:True")
    blocks = [allocator.malloc(25 * MIB) for _ in range(4)]
    for block in (blocks[1], blocks[2]):
        allocator.free(block)
    allocator.empty_cache()
    assert [segment["total_size"] for segment in allocator.segments()] == [40 * MIB, 40 * MIB]
    copy = make("expandable_segments:True")
    copy.restore(allocator.segments())
    assert copy.segments() == allocator.segments()
    for size in (30 * MIB, 90 * MIB, MIB, 17 * MIB):
        assert copy.malloc(size).address == allocator.malloc(size).address
    assert copy.segments() == allocator.segments()


def test_segments_that_do_not_add_up_are_refused() -> None:
    segment = make().segments() or [
        {"address": BASE, "total_size": 2 * MIB, "stream": 0, "segment_type": "small"}
    ]
    segment[0]["blocks"] = [{"size": MIB, "requested_size": 1, "state": "active_allocated"}]
    with pytest.raises(ValueError, match="do not add up"):
        make().restore(segment)
    segment[0]["blocks"] = []
    with pytest.raises(ValueError, match="has no blocks"):
        make().restore(segment)


def test_millions_of_blocks_cost_as_much_each_as_a_few() -> None:
    """200,000 live blocks, every second one freed: no step may depend on how many there are. (The
    limit is generous; a quadratic structure would need minutes.)"""
    allocator = make()
    blocks = [allocator.malloc(512) for _ in range(200_000)]
    assert allocator.reserved == 49 * 2 * MIB
    for block in blocks[::2]:
        allocator.free(block)
    assert allocator.memory_stats()["inactive_split.all.current"] == 100_001
    for block in blocks[1::2]:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved == 0

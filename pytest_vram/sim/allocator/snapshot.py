"""The allocator's state in the format of ``torch.cuda.memory._snapshot()``, out and in again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_vram.sim.allocator.blocks import (
    ALLOCATED,
    FREE,
    PENDING,
    UNMAPPED,
    Block,
    Lane,
)
from pytest_vram.sim.allocator.config import UNLIMITED, Config

if TYPE_CHECKING:
    from pytest_vram.sim.allocator.reserve import Reserve

_STATES = {FREE: "inactive", ALLOCATED: "active_allocated", PENDING: "active_pending_free"}


def settings(conf: Config, version: tuple[int, int]) -> dict[str, Any]:
    """``allocator_settings`` of a snapshot (``THCPModule_memorySnapshot``, torch/csrc/cuda/
    Module.cpp): what the allocator goes by, -1 for no limit. Keys as in 2.6, 2.11 and 2.14.1."""
    limit = -1 if conf.max_split_size == UNLIMITED else conf.max_split_size
    found: dict[str, Any] = {
        "PYTORCH_CUDA_ALLOC_CONF": conf.text,
        "max_split_size": limit,
        "garbage_collection_threshold": conf.garbage_collection_threshold,
        "expandable_segments": conf.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "roundup_power2_divisions": {
            str(1 << at): divisions for at, divisions in enumerate(conf.roundup_power2_divisions)
        },
    }
    if version >= (2, 9):
        found["graph_capture_record_stream_reuse"] = False
    if version >= (2, 13):
        found["max_cached_size"] = found["max_round_threshold"] = -1
    return found


def describe(heads: Iterable[Block], device: int) -> list[dict[str, Any]]:
    """PyTorch's list of segments: one per contiguous mapped range, by address, without stacks."""
    segments = []
    for head in heads:
        block: Block | None = head
        while block is not None:
            if block.state == UNMAPPED:
                block = block.next
            else:
                segment, block = _describe_range(block, device)
                segments.append(segment)
    return sorted(segments, key=lambda segment: int(segment["address"]))


def _describe_range(head: Block, device: int) -> tuple[dict[str, Any], Block | None]:
    """One mapped range, and the block behind it."""
    blocks: list[dict[str, Any]] = []
    sums = {"total_size": 0, "allocated_size": 0, "active_size": 0, "requested_size": 0}
    block: Block | None = head
    while block is not None and block.state != UNMAPPED:
        sums["total_size"] += block.size
        if block.state == ALLOCATED:
            sums["allocated_size"] += block.size
        if block.state != FREE:
            sums["active_size"] += block.size
            sums["requested_size"] += block.requested
        blocks.append(
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": _STATES[block.state],
                "frames": [],
            }
        )
        block = block.next
    owner = head.lane.pool.owner
    segment = {
        "device": device,
        "address": head.address,
        **sums,
        "stream": head.lane.stream,
        "segment_type": "small" if head.lane.pool.small else "large",
        "segment_pool_id": (0, 0) if owner is None else owner.mempool,
        "is_expandable": head.expandable is not None,
        "frames": [],
        "blocks": blocks,
    }
    return segment, block


def restore(allocator: Reserve, segments: Iterable[Mapping[str, Any]]) -> dict[int, Block]:
    """Put an unused allocator into a recorded state; the blocks in use, by address.

    Statistics start as if everything had been allocated at once. Of an expandable segment the
    snapshot shows only what is mapped: its address space is taken to begin with the first mapped
    byte, and what one stream and pool have mapped within that space to belong together.
    """
    live: dict[int, Block] = {}
    last: dict[Lane, Block] = {}
    for segment in sorted(segments, key=lambda segment: int(segment["address"])):
        lane = allocator.lane(
            segment["segment_type"] == "small",
            segment["stream"],
            tuple(segment.get("segment_pool_id", (0, 0))),
        )
        address, size = int(segment["address"]), int(segment["total_size"])
        if segment.get("is_expandable", False):
            head = allocator.expandable.restore(lane, address, size, last.get(lane))
            allocator.reserve(lane, size, 0)
        else:
            head = allocator.open_segment(lane, address, size)
            allocator.device.addresses.occupy(address, size)
            allocator.reserve(lane, size, 1)
        allocator.device.used += size
        if lane.pool.owner is not None:
            lane.pool.owner.mallocs += 1
        last[lane] = _restore_blocks(head, segment["blocks"], live)
    allocator.stats.look()
    allocator.stats.look_split()
    return live


def _restore_blocks(
    head: Block, recorded: Sequence[Mapping[str, Any]], live: dict[int, Block]
) -> Block:
    """Divide ``head`` as recorded; the last block of it."""
    block, lane = head, head.lane
    tally = lane.tally
    for number, each in enumerate(recorded, 1):
        size = int(each["size"])
        rest = block.cut(size) if number < len(recorded) else None
        if block.size != size:
            raise ValueError(f"the blocks of segment {head.address:#x} do not add up to its size")
        block.requested = int(each["requested_size"])
        if each["state"] == "inactive":
            lane.add(block)
            if block.expandable is None and len(recorded) > 1:
                tally.split_in += 1
                tally.split_bytes_in += size
        else:
            live[block.address] = block
            tally.blocks_in += 1
            tally.bytes_in += size
            tally.requested_in += block.requested
        if rest is None:
            return block
        block = rest
    raise ValueError(f"segment {head.address:#x} has no blocks")

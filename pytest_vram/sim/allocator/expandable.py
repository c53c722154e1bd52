"""Expandable segments: address space reserved once, memory mapped into it as it is needed.

Read from Note [Expandable Segments] and ``try_allocate_expandable_block``, ``map_block``,
``unmap_block`` in c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_vram.sim.allocator.blocks import (
    ALLOCATED,
    FREE,
    GONE,
    UNMAPPED,
    Block,
    ExpandableSegment,
    Lane,
)

if TYPE_CHECKING:
    from pytest_vram.sim.allocator.reserve import Reserve

SMALL_GRANULE = 2 << 20


class Expandable:
    """The expandable segments of one allocator."""

    def __init__(self, allocator: Reserve) -> None:
        self._allocator = allocator
        self.segments: list[ExpandableSegment] = []

    def allocate(self, lane: Lane, size: int) -> Block | None:
        """A free mapped block of at least ``size`` bytes, out of its pool; None without memory."""
        block = self._place(lane, size)
        if block.state == UNMAPPED:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            # Behind a free block lies address space; what is mapped there merges with it.
            after = block.next
            assert after is not None
            mapped = self._map(after, min(size - block.size, after.size))
            if mapped is None:
                return None
            block = mapped
        lane.remove(block)
        return block

    def _place(self, lane: Lane, size: int) -> Block:
        """The lowest place where ``size`` bytes fit (``find_expandable_block``)."""
        for address in sorted(lane.unmapped):
            block = lane.unmapped[address]
            if block.prev is not None and block.prev.state == FREE:
                block = block.prev
            if _has_room(block, size):
                return block
        return self._open(lane)

    def _open(self, lane: Lane, address: int | None = None) -> Block:
        """Reserve address space for 9/8 of the device's memory."""
        device = self._allocator.device
        conf = self._allocator.conf
        granule = SMALL_GRANULE if lane.pool.small else conf.large_segment
        granules = -(-(device.total + device.total // 8) // granule)
        if address is None:
            address = device.addresses.take(granule * granules)
        else:
            device.addresses.occupy(address, granule * granules)
        segment = ExpandableSegment(address, granule, granules)
        self.segments.append(segment)
        block = self._allocator.open_segment(lane, address, segment.size)
        block.state = UNMAPPED
        block.expandable = segment
        lane.unmapped[address] = block
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Put memory behind the first ``size`` bytes of an unmapped block; the free block there."""
        allocator = self._allocator
        segment = block.expandable
        assert segment is not None
        lane = block.lane
        address = block.address
        size = segment.ceil(address + size) - address
        if not allocator.device.create(size):
            return None
        del lane.unmapped[address]
        if size < block.size:
            rest = block.cut(size)
            rest.state = UNMAPPED
            lane.unmapped[rest.address] = rest
            allocator.number(rest)
        block.state = FREE
        before, after = block.prev, block.next
        if after is not None and after.state == FREE:
            lane.remove(after)
            block = block.join()
        if before is not None and before.state == FREE:
            lane.remove(before)
            block = allocator.absorb(before, block)
        lane.add(block)
        allocator.reserve(lane, size, 0)
        allocator.notify("segment_map", address, size, lane.stream)
        return block

    def unmap(self, block: Block) -> None:
        """Give the whole granules of a free block back; close the segment when it is empty."""
        allocator = self._allocator
        segment = block.expandable
        assert segment is not None
        lane = block.lane
        begin = segment.ceil(block.address)
        size = segment.floor(block.address + block.size) - begin
        if size <= 0:
            return
        lane.remove(block)
        if begin > block.address:
            middle = block.cut(begin - block.address)
            allocator.renumber(block, middle)
            lane.add(block)
            block = middle
        if size < block.size:
            rest = block.cut(size)
            allocator.number(rest)
            lane.add(rest)
        block.state = UNMAPPED
        before, after = block.prev, block.next
        if after is not None and after.state == UNMAPPED:
            del lane.unmapped[after.address]
            block = block.join()
        if before is not None and before.state == UNMAPPED:
            del lane.unmapped[before.address]
            block = allocator.absorb(before, block)
        lane.unmapped[block.address] = block
        allocator.device.destroy(size)
        allocator.unreserve(lane, size, 0)
        allocator.notify("segment_unmap", begin, size, lane.stream)
        if not block.is_split:
            self._close(block)

    def restore(self, lane: Lane, address: int, size: int, before: Block | None) -> Block:
        """A recorded mapped range; ``before`` is the last block of the lane's range below it."""
        block = before.next if before is not None else None
        if block is None or block.address + block.size < address + size:
            block = self._open(lane, address)
        if block.address < address:
            block = block.cut(address - block.address)
        else:
            del lane.unmapped[address]
        rest = block.cut(size)
        rest.state = UNMAPPED
        lane.unmapped[rest.address] = rest
        block.state = ALLOCATED
        return block

    def _close(self, block: Block) -> None:
        segment = block.expandable
        assert segment is not None
        self.segments.remove(segment)
        block.state = GONE
        del block.lane.unmapped[block.address]
        del self._allocator.heads[block.address]
        self._allocator.device.addresses.give_back(segment.address, segment.size)


def _has_room(block: Block | None, size: int) -> bool:
    while size > 0 and block is not None and block.state in (FREE, UNMAPPED):
        size -= block.size
        block = block.next
    return size <= 0

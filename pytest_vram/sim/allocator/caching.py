"""PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp), without a device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from pytest_vram.sim.allocator.addresses import AddressSource, FirstFit
from pytest_vram.sim.allocator.blocks import (
    ADDRESS_BITS,
    ALLOCATED,
    FREE,
    GONE,
    Block,
    Lane,
    Pool,
    Tally,
)
from pytest_vram.sim.allocator.config import MIB, MIN_BLOCK, Config
from pytest_vram.sim.allocator.errors import DeviceOutOfMemory

SMALL_SIZE = 1 * MIB  # the largest block of the small pool
SMALL_SEGMENT = 2 * MIB
MIN_LARGE_ALLOC = 10 * MIB  # from here on a segment is made to measure
ROUND_LARGE = 2 * MIB

Listener = Callable[[str, int, int, int], None]


class CachingAllocator:
    def __init__(
        self,
        total_memory: int,
        conf: str = "",
        *,
        listener: Listener | None = None,
        context: int = 0,
        addresses: AddressSource | None = None,
    ) -> None:
        self.total_memory = total_memory
        self.context = context
        self.conf = Config(text=conf)
        self._listener = listener
        self._addresses: AddressSource = addresses if addresses is not None else FirstFit()
        self._small = Pool(True, Tally())
        self._large = Pool(False, Tally())
        self.allocated = 0
        self.requested = 0
        self.reserved = 0
        self._peak_allocated = 0
        self._peak_reserved = 0
        self._rising = False
        self._live: dict[int, Block] = {}

    @property
    def peak_allocated(self) -> int:
        self._settle()
        return self._peak_allocated

    @property
    def peak_reserved(self) -> int:
        return self._peak_reserved

    def reset_peak(self) -> None:
        self._rising = False
        self._peak_allocated = self.allocated
        self._peak_reserved = self.reserved

    def _settle(self) -> None:
        if self._rising:
            self._rising = False
            if self.allocated > self._peak_allocated:
                self._peak_allocated = self.allocated

    def malloc(self, size: int, stream: int = 0) -> Block:
        taken = self.conf.round_size(size)
        pool = self._small if taken <= SMALL_SIZE else self._large
        lane = pool.lanes.get(stream)
        if lane is None:
            lane = pool.lanes[stream] = Lane(
                pool, stream, MIN_BLOCK if pool.small else SMALL_SIZE + 1
            )
        keys = lane.keys
        at = bisect_left(keys, taken << ADDRESS_BITS)
        if at < len(keys):
            block = lane.blocks.pop(keys.pop(at))
        else:
            block = self._grow(lane, size, taken)
        rest = block.size - taken
        if rest >= lane.least_rest:
            front = Block(block.address, taken, lane)
            front.prev = block.prev
            if front.prev is not None:
                front.prev.next = front
            front.next = block
            block.prev = front
            block.address += taken
            block.size = rest
            lane.add(block)
            block = front
        block.state = ALLOCATED
        block.requested = size
        self.allocated += block.size
        self.requested += size
        self._rising = True
        return block

    def free(self, block: Block) -> None:
        self._settle()
        self.allocated -= block.size
        self.requested -= block.requested
        lane = block.lane
        for other in (block.prev, block.next):
            if other is not None and other.state == FREE:
                lane.remove(other)
                other.state = GONE
                if other is block.prev:
                    block.address = other.address
                    block.prev = other.prev
                    if block.prev is not None:
                        block.prev.next = block
                else:
                    block.next = other.next
                    if block.next is not None:
                        block.next.prev = block
                block.size += other.size
        lane.add(block)

    def _grow(self, lane: Lane, requested: int, taken: int) -> Block:
        if taken <= SMALL_SIZE:
            size = SMALL_SEGMENT
        elif taken < MIN_LARGE_ALLOC:
            size = self.conf.large_segment
        else:
            size = -(-taken // ROUND_LARGE) * ROUND_LARGE
        if self.reserved + size > self.total_memory - self.context:
            self.empty_cache()
            if self.reserved + size > self.total_memory - self.context:
                raise DeviceOutOfMemory(
                    requested=requested,
                    segment=size,
                    allocated=self.allocated,
                    reserved=self.reserved,
                    free=self.total_memory - self.context - self.reserved,
                    capacity=self.total_memory,
                )
        address = self._addresses.take(size)
        self.reserved += size
        self._peak_reserved = max(self._peak_reserved, self.reserved)
        if self._listener is not None:
            self._listener("segment_alloc", address, size, lane.stream)
        return Block(address, size, lane)

    def empty_cache(self) -> None:
        for pool in (self._large, self._small):
            for lane in pool.by_stream():
                for block in lane.in_order():
                    if not block.is_split:
                        lane.remove(block)
                        block.state = GONE
                        self.reserved -= block.size
                        self._addresses.give_back(block.address, block.size)
                        if self._listener is not None:
                            self._listener("segment_free", block.address, block.size, lane.stream)

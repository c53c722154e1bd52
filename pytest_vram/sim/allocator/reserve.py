"""What an allocator holds from its device: settings, pools, segments, counters.

Below the rules of handing out and taking back (:mod:`pytest_vram.sim.allocator.caching`): getting
memory from the device and giving it back, as c10/cuda/CUDACachingAllocator.cpp does from 2.6 to
2.14. Where versions differ a comment says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pytest_vram.sim.allocator.blocks import FREE, GONE, Block, Lane, Pool, PrivatePool
from pytest_vram.sim.allocator.config import MIB, MIN_BLOCK, UNLIMITED, Config
from pytest_vram.sim.allocator.device import AddressSource, Device, FirstFit
from pytest_vram.sim.allocator.errors import DeviceOutOfMemory
from pytest_vram.sim.allocator.expandable import Expandable
from pytest_vram.sim.allocator.snapshot import describe, restore, settings
from pytest_vram.sim.allocator.statistics import Statistics

SMALL_SIZE = 1 * MIB  # the largest block of the small pool
SMALL_SEGMENT = 2 * MIB
MIN_LARGE_ALLOC = 10 * MIB  # from here on a segment is made to measure
ROUND_LARGE = 2 * MIB

#: ``listener(kind, address, size, stream)``
Listener = Callable[[str, int, int, int], None]
MempoolId = tuple[int, int]


class Reserve:
    """The memory that one device's allocator has reserved, and all that is known about it."""

    def __init__(
        self,
        total_memory: int,
        conf: str = "",
        *,
        listener: Listener | None = None,
        context: int = 0,
        addresses: AddressSource | None = None,
        event_ready: Callable[[int], bool] | None = None,
        version: tuple[int, int] = (2, 14),
        device: int = 0,
    ) -> None:
        self.device = Device(total_memory, context, FirstFit() if addresses is None else addresses)
        self.index = device
        self.version = version
        self.stats = Statistics()
        self._tracer: Listener | None = None
        self.free_memory_callbacks: list[Callable[[], bool]] = []
        self.out_of_memory_observers: list[Callable[[DeviceOutOfMemory], None]] = []
        self._listener = listener
        self._event_ready = event_ready
        self._small = Pool(True, self.stats.small)
        self._large = Pool(False, self.stats.large)
        self._small_lanes, self._large_lanes = self._small.lanes, self._large.lanes
        self.heads: dict[int, Block] = {}  # by address: the first block of each segment
        self._events: dict[int, deque[Block]] = {}
        self._waiting = False  # whether any block waits for other streams
        self._private: dict[MempoolId, PrivatePool] = {}
        self._captures: list[tuple[MempoolId, Callable[[int], bool]]] = []
        self._deferred: list[Block] = []  # given up during a capture, used on several streams
        self._capture_uses: dict[Block, set[int]] = {}
        self.expandable = Expandable(self)
        # Among free blocks of one size the lowest address comes first up to 2.11; in 2.12 the
        # one that was made first (pytorch/pytorch#178362); from 2.13 on the one whose segment was
        # made first, then the lowest address (#183591).
        self._by_block = version == (2, 12)
        self._by_segment = version >= (2, 13)
        self._places = 0
        self._aged = False  # whether free blocks' ages ever counted
        self._allowed: int | None = None
        self._fraction: float | None = None
        self.conf = Config().updated(conf, version)
        self._initial_max_split = self.conf.max_split_size
        if self.conf.memory_fraction < 1.0:
            self.set_memory_fraction(self.conf.memory_fraction)
        else:
            self._prepare()

    # -- settings -----------------------------------------------------------------------------

    def configure(self, conf: str) -> None:
        """Take new settings, as ``torch.cuda.memory._set_allocator_settings`` does."""
        self.conf = self.conf.updated(conf, self.version)
        self._prepare()

    def _prepare(self) -> None:
        """Work out, once per change of settings, what ``malloc`` needs to know."""
        conf = self.conf
        self._ages = self._allowed is not None and conf.garbage_collection_threshold > 0
        self._aged = self._aged or self._ages
        self._oversize = conf.max_split_size if conf.max_split_size < UNLIMITED else 0
        # Whether the first free block that is large enough may be the wrong one.
        self._picky = bool(self._oversize) or self._ages or conf.expandable_segments
        self._picky = self._picky or bool(self.expandable.segments)
        self._observed = bool(self._oversize) or self._tracer is not None
        self._note_unusual()
        for pool in self._pools():
            for lane in pool.lanes.values():
                self._set_limits(lane)

    def _note_unusual(self) -> None:
        self._unusual = self._waiting or bool(self._captures) or self.conf.rounds_to_power2

    def _set_limits(self, lane: Lane) -> None:
        """From which size a rest is split off, and from which nothing is (``should_split``)."""
        pool = lane.pool
        everything = pool.small or self.conf.expandable_segments
        lane.least_rest = MIN_BLOCK if everything else SMALL_SIZE + 1
        lane.least_unsplit = UNLIMITED if everything else self.conf.max_split_size
        if pool.owner is not None and pool.owner.no_split:
            lane.least_unsplit = 0

    @property
    def tracer(self) -> Listener | None:
        """Hears everything that PyTorch's memory history records; see the class."""
        return self._tracer

    @tracer.setter
    def tracer(self, tracer: Listener | None) -> None:
        self._tracer = tracer
        self._prepare()

    def set_memory_fraction(self, fraction: float) -> None:
        """Allow the process this part of the device's total memory."""
        self._fraction = fraction
        # Up to 2.8 a fraction of 1 is a ceiling like any other; later it lifts the ceiling.
        everything = fraction >= 1.0 and self.version >= (2, 9)
        self._allowed = None if everything else int(fraction * self.device.total)
        self._prepare()

    # -- figures ------------------------------------------------------------------------------

    @property
    def allocated(self) -> int:
        """Bytes of the blocks that the program holds: ``torch.cuda.memory_allocated()``."""
        small, large = self.stats.small, self.stats.large
        return small.bytes_in - small.bytes_out + large.bytes_in - large.bytes_out

    @property
    def requested(self) -> int:
        """Bytes that were asked for, of the blocks still active."""
        small, large = self.stats.small, self.stats.large
        return small.requested_in - small.requested_out + large.requested_in - large.requested_out

    @property
    def reserved(self) -> int:
        """Bytes held from the device: ``torch.cuda.memory_reserved()``."""
        small, large = self.stats.small, self.stats.large
        return small.reserved_in - small.reserved_out + large.reserved_in - large.reserved_out

    @property
    def peak_allocated(self) -> int:
        """``torch.cuda.max_memory_allocated()``."""
        self.stats.look()
        return self.stats.total.peak_bytes

    @property
    def peak_reserved(self) -> int:
        """``torch.cuda.max_memory_reserved()``."""
        return self.stats.total.peak_reserved

    def reset_peak(self) -> None:
        self.stats.reset_peak()

    def reset_accumulated(self) -> None:
        self.stats.reset_accumulated()

    def mem_get_info(self) -> tuple[int, int]:
        """Free and total bytes of the device: ``torch.cuda.mem_get_info()``."""
        return self.device.free, self.device.total

    def memory_stats(self) -> dict[str, int]:
        """``torch.cuda.memory_stats()``: PyTorch's flat keys, sorted as it sorts them."""
        # PyTorch notes the limit once, at the start.
        limit = -1 if self._initial_max_split == UNLIMITED else self._initial_max_split
        stats = dict(self.stats.items(limit))
        if self.version >= (2, 13):
            stats.update(self.stats.private_items())
        if self.version >= (2, 12):
            stats["num_oom_rejections"] = self.stats.oom_rejections
        return dict(sorted(stats.items()))

    def segments(self) -> list[dict[str, Any]]:
        """``torch.cuda.memory._snapshot()['segments']``, without stacks."""
        return describe(self.heads.values(), self.index)

    def settings(self) -> dict[str, Any]:
        """What it goes by, in the words of PyTorch's snapshots."""
        return settings(self.conf, self.version)

    def restore(self, segments: Iterable[Mapping[str, Any]]) -> dict[int, Block]:
        """Take up a recorded state, while still unused; the blocks in use, by address."""
        return restore(self, segments)

    # -- pools --------------------------------------------------------------------------------

    def lane(self, small: bool, stream: int, mempool: MempoolId = (0, 0)) -> Lane:
        """The pool of small or large blocks on ``stream``, the default one or a private one."""
        pool = self._small if small else self._large
        if mempool != (0, 0):
            if mempool not in self._private:
                self.create_pool(mempool)
            pool = self._private[mempool].small if small else self._private[mempool].large
        return pool.lanes.get(stream) or self._open_lane(pool, stream)

    def _open_lane(self, pool: Pool, stream: int) -> Lane:
        lane = pool.lanes[stream] = Lane(pool, stream)
        self._set_limits(lane)
        return lane

    def _pools(self) -> list[Pool]:
        """All pools, the default ones first."""
        private = [pool for owner in self._private.values() for pool in owner.pools]
        return [self._large, self._small, *private]

    def create_pool(
        self,
        mempool: MempoolId,
        *,
        foreign: bool = False,
        no_split: bool = False,
        use_on_oom: bool = False,
    ) -> None:
        """Make a private pool, or use one once more.

        ``foreign``: it has an allocator of its own, so its segments never expand. ``no_split`` and
        ``use_on_oom`` are ``torch.cuda.MemPool``'s.
        """
        owner = self._private.get(mempool)
        if owner is None:
            owner = self._private[mempool] = PrivatePool(
                mempool, self.stats.small, self.stats.large, foreign, no_split, use_on_oom
            )
        owner.users += 1

    def release_pool(self, mempool: MempoolId) -> None:
        """One user less; without users ``empty_cache`` gives its free segments back."""
        self._private[mempool].users -= 1

    def pool_users(self, mempool: MempoolId) -> int:
        """How many hold a private pool."""
        owner = self._private.get(mempool)
        return 0 if owner is None else owner.users

    # -- from the device ----------------------------------------------------------------------

    def _segment_size(self, taken: int) -> int:
        """What to ask the device for (``get_allocation_size``)."""
        if taken <= SMALL_SIZE:
            return SMALL_SEGMENT
        if taken < MIN_LARGE_ALLOC:
            return self.conf.large_segment
        return -(-taken // ROUND_LARGE) * ROUND_LARGE

    def _allocate(self, lane: Lane, requested: int, taken: int, segment: int) -> Block | None:
        """New memory from the device (``alloc_block``), or None."""
        if self._allowed is not None and self.reserved + segment > self._allowed:
            return None
        if self.conf.reject_early:
            self._reject(lane, requested, segment)
        owner = lane.pool.owner
        if self.conf.expandable_segments and not (owner is not None and owner.foreign):
            block = self.expandable.allocate(lane, taken)
        else:
            block = self._new_segment(lane, segment)
        if block is not None and owner is not None:
            owner.mallocs += 1
        return block

    def _new_segment(self, lane: Lane, size: int) -> Block | None:
        address = self.device.malloc(size)
        if address is None:
            return None
        block = self.open_segment(lane, address, size)
        self.reserve(lane, size, 1)
        if self._oversize and size >= self._oversize:
            self.stats.oversize_segments.add()
        self.notify("segment_alloc", address, size, lane.stream)
        return block

    def open_segment(self, lane: Lane, address: int, size: int) -> Block:
        """The one block of a new range of addresses, last in the order of segments."""
        block = self.heads[address] = Block(address, size, lane)
        if self._by_segment:
            block.shift = self._places - address
            self._places += size
        self.number(block)
        return block

    def number(self, block: Block) -> None:
        """Note that ``block`` was made just now."""
        if self._by_block:
            block.shift = self._places - block.address
            self._places += 1

    def renumber(self, front: Block, rest: Block) -> None:
        """After a cut: PyTorch makes the front anew and shortens the old block to the rest."""
        if self._by_block:
            rest.shift = front.address + front.shift - rest.address
            self.number(front)

    def absorb(self, before: Block, block: Block) -> Block:
        """``before`` takes ``block`` in. To PyTorch it is ``block`` that grows, number and all."""
        if self._by_block:
            before.shift = block.address + block.shift - before.address
        return before.join()

    def reserve(self, lane: Lane, size: int, segments: int) -> None:
        """Count ``size`` bytes that came from the device."""
        self.stats.reserve(lane.tally, size, segments)
        if lane.pool.owner is not None:
            for flow in self.stats.of_pool(lane.pool.owner.mempool, lane.pool.small):
                flow.add(size)

    def notify(self, kind: str, address: int, size: int, stream: int) -> None:
        """Tell the listener and the tracer about a segment."""
        if self._listener is not None:
            self._listener(kind, address, size, stream)
        if self._tracer is not None:
            self._tracer(kind, address, size, stream)

    # -- back to the device -------------------------------------------------------------------

    def _release_available(self, lane: Lane, taken: int) -> bool:
        """Give back oversize blocks, no more than the request needs."""
        if not self._oversize:
            return False
        wanted = max(taken, self._oversize)
        block = next(lane.at_least(wanted), None)
        if block is not None and block.expandable is None:
            self._release(block)
            return True
        # No single one suffices: several, the largest first.
        released = 0
        for block in reversed(lane.in_order()):
            if released >= wanted or block.size < self._oversize:
                break
            if block.size < wanted and block.expandable is None:
                released += block.size
                self._release(block)
        return released >= wanted

    def _release_pool(self, pool: Pool) -> None:
        growing: list[Block] = []
        for lane in pool.by_stream():
            for block in lane.in_order():
                if block.expandable is not None:
                    growing.append(block)
                elif not block.is_split:
                    self._release(block)
        for block in growing:
            self.expandable.unmap(block)

    def _release(self, block: Block) -> None:
        """Give one unsplit segment back (``release_block``)."""
        lane = block.lane
        lane.remove(block)
        block.state = GONE
        del self.heads[block.address]
        self.device.release(block.address, block.size)
        self.unreserve(lane, block.size, 1)
        if self._oversize and block.size >= self._oversize:
            self.stats.oversize_segments.remove()
        self.notify("segment_free", block.address, block.size, lane.stream)

    def unreserve(self, lane: Lane, size: int, segments: int) -> None:
        self.stats.unreserve(lane.tally, size, segments)
        if lane.pool.owner is not None:
            lane.pool.owner.mallocs -= 1
            for flow in self.stats.of_pool(lane.pool.owner.mempool, lane.pool.small):
                flow.remove(size)

    def _collect_garbage(self) -> None:
        """Give back what was unused for longest (``garbage_collect_cached_blocks``)."""
        assert self._allowed is not None
        threshold = int(self.conf.garbage_collection_threshold * self._allowed)
        target = self.reserved - threshold
        if target <= 0:
            return
        searches = self._large.searches
        blocks = [
            block
            for lane in self._large.by_stream()
            for block in lane.in_order()
            if not block.is_split
        ]
        age = sum(searches - _born(block) for block in blocks)
        candidates = len(blocks)
        reclaimed = 0
        found = True
        while reclaimed < target and found and candidates > 0:
            found = False
            average = age / candidates
            for block in blocks:
                if block.state == FREE and searches - _born(block) >= average:
                    found = True
                    reclaimed += block.size
                    age -= searches - _born(block)
                    candidates -= 1
                    self._release(block)

    # -- out of memory ------------------------------------------------------------------------

    def _out_of_memory(
        self, lane: Lane, requested: int, taken: int, segment: int
    ) -> DeviceOutOfMemory:
        self.notify("oom", self.device.free, taken, lane.stream)
        self.stats.ooms += 1
        error = self._error(requested, segment)
        for observer in self.out_of_memory_observers:
            observer(error)
        return error

    def _reject(self, lane: Lane, requested: int, segment: int) -> None:
        """throw_on_cudamalloc_oom: fail before the device does, without trying anything else.

        It looks at the fraction in the settings, not at the one that was set by call.
        """
        if self.reserved + segment > int(self.conf.memory_fraction * self.device.total):
            self.stats.oom_rejections += 1
            raise self._error(requested, segment, rejected=True)

    def _error(self, requested: int, segment: int, *, rejected: bool = False) -> DeviceOutOfMemory:
        cached = (
            block.size
            for owner in self._private.values()
            for pool in owner.pools
            for lane in pool.lanes.values()
            for block in lane.blocks.values()
        )
        return DeviceOutOfMemory(
            requested=requested,
            segment=segment,
            allocated=self.allocated,
            reserved=self.reserved,
            free=self.device.free,
            capacity=self.device.total,
            fraction=self._fraction,
            allowed=self._allowed,
            in_private_pools=sum(cached),
            rejected=rejected,
            expandable=self.conf.expandable_segments,
            device=self.index,
            version=self.version,
        )


def _born(block: Block) -> int:
    """When it became free; blocks from before ages counted are as old as the clock."""
    return getattr(block, "born", 0)

"""PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp) without a device.

Every rule was read from that file, 2.6 to 2.14; where versions differ a comment says so. The order
of the tries in :meth:`CachingAllocator.malloc`, of what is released and of what is merged is
PyTorch's, so that addresses, segments and statistics come out equal and not merely similar.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pytest_vram.sim.allocator.blocks import (
    ALLOCATED,
    FREE,
    GONE,
    PENDING,
    PLACE_BITS,
    UNMAPPED,
    Block,
    Lane,
    Pool,
    PrivatePool,
)
from pytest_vram.sim.allocator.config import MIB, MIN_BLOCK, UNLIMITED, Config
from pytest_vram.sim.allocator.device import AddressSource, Device, FirstFit
from pytest_vram.sim.allocator.errors import DeviceOutOfMemory
from pytest_vram.sim.allocator.expandable import Expandable
from pytest_vram.sim.allocator.snapshot import describe, restore
from pytest_vram.sim.allocator.statistics import Statistics

SMALL_SIZE = 1 * MIB  # the largest block of the small pool
SMALL_SEGMENT = 2 * MIB
MIN_LARGE_ALLOC = 10 * MIB  # from here on a segment is made to measure
ROUND_LARGE = 2 * MIB

#: ``listener(kind, address, size, stream)``
Listener = Callable[[str, int, int, int], None]
MempoolId = tuple[int, int]


class CachingAllocator:
    """The caching allocator of one device. All sizes are bytes.

    ``total_memory`` is what the driver reports, ``context`` what the CUDA context takes of it.
    ``conf`` is the text of PYTORCH_CUDA_ALLOC_CONF. ``listener`` hears of segment_alloc,
    segment_free, segment_map and segment_unmap (bytes reserved and given back) and of oom (the
    address is then the free memory, the size the block that was wanted); ``tracer`` of all that
    and of alloc, free_requested and free_completed, with requested sizes: PyTorch's trace
    entries. ``event_ready(stream)`` says whether the device has passed the oldest event that a
    block given up waits for on ``stream``; by default it always has, as on a device that keeps up.
    """

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

    # -- settings ------------------------------------------------------------------------------

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
        """From which size a rest is split off, and from which size nothing is (``should_split``)."""
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

    # -- figures -------------------------------------------------------------------------------

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

    # -- the two events ------------------------------------------------------------------------

    def malloc(self, size: int, stream: int = 0) -> Block:
        """A block for ``size`` bytes on ``stream``; raises :class:`DeviceOutOfMemory`.

        PyTorch does not call its allocator for 0 bytes; a caller here shouldn't either.
        """
        if self._unusual:
            taken, lane = self._prepare_request(size, stream)
        else:
            taken = (size + 511) & -512 or 512
            try:
                lane = (self._small_lanes if taken <= SMALL_SIZE else self._large_lanes)[stream]
            except KeyError:
                lane = self.lane(taken <= SMALL_SIZE, stream)
        keys = lane.keys
        at = bisect_left(keys, taken << PLACE_BITS)
        if at == len(keys) or self._picky:
            block = self._find(lane, taken) or self._obtain(lane, size, taken)
        else:
            block = lane.blocks.pop(keys.pop(at))

        tally = lane.tally
        stats = self.stats
        block.state = ALLOCATED
        block.requested = size
        after = block.next
        split = after is not None or block.prev is not None
        rest = block.size - taken
        if rest >= lane.least_rest and taken < lane.least_unsplit:
            block.size = taken
            address = block.address + taken
            # Block(...) in place: a call would cost as much as all the rest of this branch.
            block.next = tail = _new_block(Block)
            tail.address = address
            tail.size = rest
            tail.lane = lane
            tail.shift = block.shift
            tail.prev = block
            tail.next = after
            tail.state = FREE
            tail.expandable = block.expandable
            tail.uses = None
            if after is not None:
                after.prev = tail
            if self._by_block:
                self.renumber(block, tail)
            key = (rest << PLACE_BITS) + address + tail.shift
            lane.blocks[key] = tail
            if lane.crowd is None:
                insort(keys, key)
            else:
                lane.crowd.add(key)
            if self._aged:
                tail.born = lane.pool.searches
            if block.expandable is not None:
                pass  # not among the inactive split blocks
            elif split:
                if stats.due_split:
                    stats.look_split()
                tally.split_bytes_out += taken
            else:
                tally.split_in += 1
                tally.split_bytes_in += rest
                stats.due_split = True
        else:
            taken += rest
            if split and block.expandable is None:
                if stats.due_split:
                    stats.look_split()
                tally.split_out += 1
                tally.split_bytes_out += taken

        tally.blocks_in = blocks = tally.blocks_in + 1
        tally.bytes_in = came = tally.bytes_in + taken
        tally.requested_in += size
        if came > tally.due_bytes or blocks > tally.due_blocks:
            stats.due = True
        if self._observed:
            self._note_alloc(block)
        return block

    def free(self, block: Block) -> None:
        """The program gives ``block`` up; it waits where other streams still use it."""
        if block.state != ALLOCATED:
            raise ValueError(f"{block!r} is not allocated")
        stats = self.stats
        if stats.due:
            stats.look()
        tally = block.lane.tally
        size = block.size
        tally.blocks_out += 1
        tally.bytes_out += size
        if self._observed:
            self._note_free(block)
        if block.uses:
            self._wait(block)
        else:
            self._cache(block)

    def _cache(self, block: Block) -> None:
        """Merge ``block`` with free neighbours and put it into its pool (``free_block``)."""
        lane = block.lane
        tally = lane.tally
        if self._tracer is not None:
            self._tracer("free_completed", block.address, block.requested, lane.stream)
        tally.requested_out += block.requested
        size = whole = block.size
        keys = lane.keys
        merged = 0
        after = block.next
        if after is not None and after.state == FREE:
            key = (after.size << PLACE_BITS) + after.address + after.shift
            if lane.crowd is None:
                del keys[bisect_left(keys, key)], lane.blocks[key]
            else:
                lane.remove_key(key)
            after.state = GONE
            whole += after.size
            merged = 1
            block.next = after = after.next
            if after is not None:
                after.prev = block
        before = block.prev
        if before is not None and before.state == FREE:
            key = (before.size << PLACE_BITS) + before.address + before.shift
            if lane.crowd is None:
                del keys[bisect_left(keys, key)], lane.blocks[key]
            else:
                lane.remove_key(key)
            if self._by_block:
                before.shift = block.address + block.shift - before.address
            block.state = GONE
            whole += before.size
            merged += 1
            before.next = after
            if after is not None:
                after.prev = before
            block, before = before, before.prev
        block.size = whole
        block.state = FREE
        key = (whole << PLACE_BITS) + block.address + block.shift
        lane.blocks[key] = block
        if merged:
            insort(keys, key) if lane.crowd is None else lane.crowd.add(key)
        else:
            lane.add_key(key)
        if self._aged:
            block.born = lane.pool.searches
        if block.expandable is not None:
            return  # PyTorch leaves expandable segments out of inactive_split
        stats = self.stats
        if before is not None or after is not None:
            if merged == 0:
                tally.split_in = pieces = tally.split_in + 1
                if pieces - tally.split_out > tally.most_split:
                    stats.due_split = True
            elif merged == 2:
                if stats.due_split:
                    stats.look_split()
                tally.split_out += 1
            tally.split_bytes_in = came = tally.split_bytes_in + size
            if came > tally.due_split_bytes:
                stats.due_split = True
        elif merged:
            if stats.due_split:
                stats.look_split()
            tally.split_out += merged
            tally.split_bytes_out += whole - size

    # -- looking for a block -------------------------------------------------------------------

    def _open_lane(self, pool: Pool, stream: int) -> Lane:
        lane = pool.lanes[stream] = Lane(pool, stream)
        self._set_limits(lane)
        return lane

    def lane(self, small: bool, stream: int, mempool: MempoolId = (0, 0)) -> Lane:
        """The pool of small or large blocks on ``stream``, the default one or a private one."""
        pool = self._small if small else self._large
        if mempool != (0, 0):
            if mempool not in self._private:
                self.create_pool(mempool)
            pool = self._private[mempool].small if small else self._private[mempool].large
        return pool.lanes.get(stream) or self._open_lane(pool, stream)

    def _prepare_request(self, size: int, stream: int) -> tuple[int, Lane]:
        """What to look for and where, when events, power-of-two rounding or captures are about."""
        if self._waiting and not self._captures:
            self.process_events()
        taken = self.conf.round_size(size)
        pool = self._small if taken <= SMALL_SIZE else self._large
        if self._captures:
            pool = self._captured_pool(taken, stream) or pool
        return taken, pool.lanes.get(stream) or self._open_lane(pool, stream)

    def _note_alloc(self, block: Block) -> None:
        if self._oversize and block.size >= self._oversize:
            self.stats.oversize_allocations.add()
        if self._tracer is not None:
            self._tracer("alloc", block.address, block.requested, block.lane.stream)

    def _note_free(self, block: Block) -> None:
        if self._oversize and block.size >= self._oversize:
            self.stats.oversize_allocations.remove()
        if self._tracer is not None:
            self._tracer("free_requested", block.address, block.requested, block.lane.stream)

    def _find(self, lane: Lane, taken: int) -> Block | None:
        """The best cached block (``get_free_block``), taken out of its pool."""
        if self._ages:
            lane.pool.searches += 1
        found = lane.at_least(taken)
        block = next(found, None)
        if block is None:
            return None
        if block.expandable is not None:
            if self.conf.expandable_segments:
                # An expandable block counts with the address space it can still grow into.
                for following in found:
                    if block.expandable is None or _room(following) >= _room(block):
                        break
                    block = following
            else:
                block = next((each for each in found if each.expandable is None), None)
                if block is None:
                    return None
        if self._oversize:
            # Small requests don't touch oversize blocks, large ones don't waste too much of one.
            if taken < self._oversize <= block.size:
                return None
            if self._oversize <= taken <= block.size - self.conf.max_non_split_rounding:
                return None
        lane.remove(block)
        return block

    def _segment_size(self, taken: int) -> int:
        """What to ask the device for (``get_allocation_size``)."""
        if taken <= SMALL_SIZE:
            return SMALL_SEGMENT
        if taken < MIN_LARGE_ALLOC:
            return self.conf.large_segment
        return -(-taken // ROUND_LARGE) * ROUND_LARGE

    def _obtain(self, lane: Lane, requested: int, taken: int) -> Block:
        """A block from the device, when no cached one will do; what it takes is PyTorch's order."""
        # A list, not a generator: PyTorch runs every callback.
        if any([callback() for callback in self.free_memory_callbacks]):
            block = self._find(lane, taken)
            if block is not None:
                return block
        if self._ages:
            self._collect_garbage()
        segment = self._segment_size(taken)
        block = self._allocate(lane, requested, taken, segment)
        if block is None and lane.pool.owner is None:
            block = self._overflow(lane, taken)
        if block is None and self._release_available(lane, taken):
            block = self._allocate(lane, requested, taken, segment)
        if block is None and not self._captures:
            self._release_cached()
            self.stats.alloc_retries += 1
            block = self._allocate(lane, requested, taken, segment)
        if block is None:
            raise self._out_of_memory(lane, requested, taken, segment)
        return block

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

    def notify(self, kind: str, address: int, size: int, stream: int) -> None:
        """Tell the listener and the tracer about a segment."""
        if self._listener is not None:
            self._listener(kind, address, size, stream)
        if self._tracer is not None:
            self._tracer(kind, address, size, stream)

    # -- giving memory back ----------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Give every unused segment back to the device: ``torch.cuda.empty_cache()``."""
        self._release_cached()

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

    def _release_cached(self) -> None:
        """Give back all that is free, after waiting for all events (``release_cached_blocks``)."""
        if not self._captures:
            self._wait_for_all()
            self._release_pool(self._large)
            self._release_pool(self._small)
        for mempool, owner in list(self._private.items()):
            if owner.users == 0:
                for pool in owner.pools:
                    self._release_pool(pool)
                if owner.mallocs == 0:
                    del self._private[mempool]

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

    def reserve(self, lane: Lane, size: int, segments: int) -> None:
        """Count ``size`` bytes that came from the device."""
        self.stats.reserve(lane.tally, size, segments)
        if lane.pool.owner is not None:
            lane.pool.owner.reserve(lane.pool.small, size)

    def unreserve(self, lane: Lane, size: int, segments: int) -> None:
        self.stats.unreserve(lane.tally, size, segments)
        if lane.pool.owner is not None:
            lane.pool.owner.mallocs -= 1
            lane.pool.owner.unreserve(lane.pool.small, size)

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

    # -- several streams -------------------------------------------------------------------------

    def record_stream(self, block: Block, stream: int) -> None:
        """``stream`` uses ``block`` too: it returns only after that stream has passed its end."""
        if stream == block.lane.stream:
            return
        if block.uses is None:
            block.uses = set()
        block.uses.add(stream)
        if self._captures:
            self._capture_uses.setdefault(block, set()).add(stream)

    def _wait(self, block: Block) -> None:
        """``block`` was given up, but other streams use it still."""
        block.state = PENDING
        block.events = 0
        self._waiting = self._unusual = True
        tally = block.lane.tally
        tally.late += 1
        tally.late_bytes += block.size
        self.stats.look()
        if self._captures:
            self._deferred.append(block)
        else:
            self._insert_events(block)

    def _insert_events(self, block: Block) -> None:
        uses, block.uses = block.uses or set(), None
        for stream in sorted(uses):
            block.events += 1
            self._events.setdefault(stream, deque()).append(block)

    def _insert_deferred(self) -> None:
        """After a capture: wait for the streams that used the block outside of it."""
        for block in self._deferred:
            if block.uses is not None:
                block.uses -= self._capture_uses.pop(block, set())
            self._insert_events(block)
            if block.events == 0:
                self._return(block)
        self._deferred.clear()

    def process_events(self) -> None:
        """Take back the blocks whose streams have passed them; ``malloc`` does this first."""
        self._insert_deferred()
        for stream, queue in list(self._events.items()):
            while queue and (self._event_ready is None or self._event_ready(stream)):
                self._pass_event(queue.popleft())
            if not queue:
                del self._events[stream]
        self._waiting = bool(self._events)
        self._note_unusual()

    def _wait_for_all(self) -> None:
        """As if every stream were waited for (``synchronize_and_free_events``)."""
        self.stats.sync_all_streams += 1
        self._insert_deferred()
        events, self._events = self._events, {}
        for queue in events.values():
            for block in queue:
                self._pass_event(block)
        self._waiting = False
        self._note_unusual()

    def _pass_event(self, block: Block) -> None:
        block.events -= 1
        if block.events == 0:
            self._return(block)

    def _return(self, block: Block) -> None:
        self.stats.look()
        tally = block.lane.tally
        tally.late -= 1
        tally.late_bytes -= block.size
        self._cache(block)

    # -- private pools: CUDA graphs and torch.cuda.MemPool ---------------------------------------

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

    def begin_allocate_to_pool(
        self, mempool: MempoolId, chooses: Callable[[int], bool] = lambda stream: True
    ) -> None:
        """From now on requests on streams that ``chooses`` accepts go to ``mempool``."""
        if any(mempool == other for other, _ in self._captures):
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.create_pool(mempool)
        self._captures.append((mempool, chooses))
        self._note_unusual()

    def end_allocate_to_pool(self, mempool: MempoolId) -> None:
        for index, (other, _) in enumerate(self._captures):
            if other == mempool:
                del self._captures[index]
                self._note_unusual()
                return
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    def release_pool(self, mempool: MempoolId) -> None:
        """One user less; without users ``empty_cache`` gives its free segments back."""
        self._private[mempool].users -= 1

    def _captured_pool(self, taken: int, stream: int) -> Pool | None:
        for mempool, chooses in reversed(self._captures):
            if chooses(stream):
                owner = self._private[mempool]
                return owner.small if taken <= SMALL_SIZE else owner.large
        return None

    def _overflow(self, lane: Lane, taken: int) -> Block | None:
        """A cached block of a pool made with ``use_on_oom`` (``try_mempool_fallback``)."""
        for owner in self._private.values():
            if owner.use_on_oom:
                pool = owner.small if taken <= SMALL_SIZE else owner.large
                other = pool.lanes.get(lane.stream)
                block = None if other is None else self._find(other, taken)
                if block is not None:
                    return block
        return None

    # -- reports ---------------------------------------------------------------------------------

    def mem_get_info(self) -> tuple[int, int]:
        """Free and total bytes of the device: ``torch.cuda.mem_get_info()``."""
        return self.device.free, self.device.total

    def memory_stats(self) -> dict[str, int]:
        """``torch.cuda.memory_stats()``: PyTorch's flat keys, sorted as it sorts them."""
        # PyTorch notes the limit once, at the start.
        limit = -1 if self._initial_max_split == UNLIMITED else self._initial_max_split
        stats = dict(self.stats.items(limit))
        if self.version >= (2, 12):
            stats["num_oom_rejections"] = self.stats.oom_rejections
        for owner in self._private.values():
            stats.update(owner.items())
        return dict(sorted(stats.items()))

    def segments(self) -> list[dict[str, Any]]:
        """``torch.cuda.memory._snapshot()['segments']``, without stacks."""
        return describe(self.heads.values(), self.index)

    def restore(self, segments: Iterable[Mapping[str, Any]]) -> dict[int, Block]:
        """Take up a recorded state, while still unused; the blocks in use, by address."""
        return restore(self, segments)


_new_block = Block.__new__


def _born(block: Block) -> int:
    """When it became free; blocks from before ages counted are as old as the clock."""
    return getattr(block, "born", 0)


def _room(block: Block) -> int:
    """The block's size with the unmapped address space behind it."""
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)

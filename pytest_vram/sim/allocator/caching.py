"""PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp) without a device.

Every rule was read from that file, 2.6 to 2.14; where versions differ a comment says so. The order
of the tries in :meth:`CachingAllocator.malloc`, of what is released and of what is merged is
PyTorch's, so that addresses, segments and statistics come out equal and not merely similar.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

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
from pytest_vram.sim.allocator.reserve import SMALL_SIZE, MempoolId, Reserve

_new_block = Block.__new__


class CachingAllocator(Reserve):
    """The caching allocator of one device. All sizes are bytes.

    ``total_memory`` is what the driver reports, ``context`` what the CUDA context takes of it.
    ``conf`` is the text of PYTORCH_CUDA_ALLOC_CONF. ``listener`` hears of segment_alloc,
    segment_free, segment_map and segment_unmap (bytes reserved and given back) and of oom (the
    address is then the free memory, the size the block that was wanted); ``tracer`` of all that
    and of alloc, free_requested and free_completed, with requested sizes: PyTorch's trace
    entries. ``event_ready(stream)`` says whether the device has passed the oldest event that a
    block given up waits for on ``stream``; by default it always has, as on a device that keeps up.
    """

    # -- the two events -----------------------------------------------------------------------

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
            lane = block.lane  # a pool that helps out keeps the rest of its block
            keys = lane.keys
        else:
            block = lane.blocks.pop(keys.pop(at))

        tally = lane.tally
        stats = self.stats
        block.state = ALLOCATED
        stale = block.requested
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
            tail.requested = stale  # PyTorch makes the front anew; the rest is the old block
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
                tally.split_in = pieces = tally.split_in + 1
                tally.split_bytes_in = came = tally.split_bytes_in + rest
                if (
                    came - tally.split_bytes_out > tally.most_split_bytes
                    or pieces - tally.split_out > tally.most_split
                ):
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
            before.requested = block.requested  # to PyTorch it is the freed block that grows
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
            if came - tally.split_bytes_out > tally.most_split_bytes:
                stats.due_split = True
        elif merged:
            if stats.due_split:
                stats.look_split()
            tally.split_out += merged
            tally.split_bytes_out += whole - size

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

    # -- looking for a block ------------------------------------------------------------------

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

    def _obtain(self, lane: Lane, requested: int, taken: int) -> Block:
        """A block from the device, when no cached one will do; what it takes is PyTorch's order."""
        # As in PyTorch every callback runs, also after one has freed something.
        if sum(callback() for callback in self.free_memory_callbacks):
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

    def empty_cache(self, mempool: MempoolId | None = None) -> None:
        """Give every unused segment back to the device: ``torch.cuda.empty_cache()``; with
        ``mempool`` only those of that private pool, once nobody uses it."""
        self._release_cached(mempool)

    def _release_cached(self, only: MempoolId | None = None) -> None:
        """Give back all that is free, after waiting for all events (``release_cached_blocks``)."""
        if only is None and not self._captures:
            self._wait_for_all()
            self._release_pool(self._large)
            self._release_pool(self._small)
        for mempool, owner in list(self._private.items()):
            if owner.users == 0 and only in (None, mempool):
                if only is not None:
                    self._wait_for_all(owner)
                for pool in owner.pools:
                    self._release_pool(pool)
                if owner.mallocs == 0:
                    del self._private[mempool]

    # -- several streams ----------------------------------------------------------------------

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
        self._capture_uses.pop(block, None)  # they are this use's; the block may get another
        uses, block.uses = block.uses or set(), None
        for stream in sorted(uses):
            block.events += 1
            self._events.setdefault(stream, deque()).append(block)

    def _insert_deferred(self) -> None:
        """After a capture: wait for the streams that used the block outside of it."""
        for block in self._deferred:
            if block.uses is not None:
                block.uses -= self._capture_uses.get(block, set())
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

    def _wait_for_all(self, owner: PrivatePool | None = None) -> None:
        """As if every stream were waited for, or those that use blocks of ``owner``
        (``synchronize_and_free_events``)."""
        self.stats.sync_all_streams += 1
        self._insert_deferred()
        for stream, queue in list(self._events.items()):
            others: deque[Block] = deque()
            for block in queue:
                if owner is None or block.lane.pool.owner is owner:
                    self._pass_event(block)
                else:
                    others.append(block)
            if others:
                self._events[stream] = others
            else:
                del self._events[stream]
        self._waiting = bool(self._events)
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

    # -- captures: CUDA graphs and torch.cuda.use_mem_pool ------------------------------------

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

    def _captured_pool(self, taken: int, stream: int) -> Pool | None:
        for mempool, chooses in reversed(self._captures):
            if chooses(stream):
                owner = self._private[mempool]
                return owner.small if taken <= SMALL_SIZE else owner.large
        return None


def _room(block: Block) -> int:
    """The block's size with the unmapped address space behind it."""
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)

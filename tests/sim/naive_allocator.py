"""A second caching allocator that is slow and plain: the model the real one is compared with.

Segments are lists of blocks, every question is answered by looking at all of them, and all figures
are sums over blocks. It shares nothing with pytest_vram.sim.allocator but the parsed settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

MIB = 1 << 20


class NoMemoryError(Exception):
    pass


class Lane(NamedTuple):
    """Where a request looks: a private pool (0: none), its small or large blocks, a stream."""

    pool: int
    small: bool
    stream: int


@dataclass
class Pool:
    users: int = 0
    mallocs: int = 0
    no_split: bool = False
    use_on_oom: bool = False


@dataclass(eq=False)
class Block:
    address: int
    size: int
    number: int
    state: str  # free, held, late or unmapped
    requested: int = 0
    uses: set[int] = field(default_factory=set)
    since: int = 0  # searches of the pool when it became free


@dataclass(eq=False)
class Segment:
    lane: Lane
    order: int
    blocks: list[Block]
    granule: int = 0  # of an expandable segment

    def mapped(self) -> list[Block]:
        return [block for block in self.blocks if block.state != "unmapped"]


class Addresses:
    """First fit, ascending, in steps of 2 MiB."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.taken: list[tuple[int, int]] = []
        self.top = base

    def take(self, size: int) -> int:
        size = math.ceil(size / (2 * MIB)) * 2 * MIB
        address = self.base
        for begin, end in [*sorted(self.taken), (self.top, self.top)]:
            if begin - address >= size:
                break
            address = max(address, end)
        self.taken.append((address, address + size))
        self.top = max(self.top, address + size)
        return address

    def give_back(self, address: int) -> None:
        self.taken = [range_ for range_ in self.taken if range_[0] != address]


class Naive:
    def __init__(self, total: int, config: object, version: tuple[int, int], base: int) -> None:
        self.total = total
        self.config = config
        self.version = version
        self.allowed: int | None = None
        self.segments: list[Segment] = []
        self.addresses = Addresses(base)
        self.numbers = 0
        self.searches: dict[tuple[int, bool], int] = {}  # by pool and size class
        self.events: dict[int, list[Block]] = {}
        self.busy: set[int] = set()  # streams that pass no event
        self.pools: dict[int, Pool] = {}
        self.captures: list[tuple[int, int | None]] = []  # pool, the stream it is for
        self.deferred: list[Block] = []
        self.captured: dict[int, set[int]] = {}  # id of a block: its uses during captures
        self.log: list[tuple[str, int, int]] = []  # what a listener hears
        self.peaks: dict[str, int] = {}
        self.retries = self.ooms = 0

    # -- figures -------------------------------------------------------------------------------

    def figures(self) -> dict[str, int]:
        result: dict[str, int] = {}
        for scope, sizes in (
            ("all", (True, False)),
            ("small_pool", (True,)),
            ("large_pool", (False,)),
        ):
            segments = [segment for segment in self.segments if segment.lane.small in sizes]
            blocks = [block for segment in segments for block in segment.mapped()]
            held = [block for block in blocks if block.state == "held"]
            active = [block for block in blocks if block.state in ("held", "late")]
            split = [
                block
                for segment in segments
                if not segment.granule and len(segment.blocks) > 1
                for block in segment.blocks
                if block.state == "free"
            ]
            result |= {
                f"allocation.{scope}": len(held),
                f"allocated_bytes.{scope}": sum(block.size for block in held),
                f"active.{scope}": len(active),
                f"active_bytes.{scope}": sum(block.size for block in active),
                f"requested_bytes.{scope}": sum(block.requested for block in active),
                f"inactive_split.{scope}": len(split),
                f"inactive_split_bytes.{scope}": sum(block.size for block in split),
                f"segment.{scope}": sum(not segment.granule for segment in segments),
                f"reserved_bytes.{scope}": sum(block.size for block in blocks),
            }
        return result

    def note(self) -> None:
        for name, value in self.figures().items():
            self.peaks[name] = max(self.peaks.get(name, 0), value)

    def reset_peak(self) -> None:
        self.peaks = self.figures()

    @property
    def reserved(self) -> int:
        return self.figures()["reserved_bytes.all"]

    # -- malloc and free -------------------------------------------------------------------------

    def round(self, size: int) -> int:
        if size < 512:
            return 512
        divisions = self.config.roundup_power2_divisions[
            min(max(int(math.log2(size)) - 20, 0), 15) if size >= MIB else 0
        ]
        if divisions > 1 and size > 512 * divisions:
            power = 1
            while power * 2 <= size:
                power *= 2
            step = power // divisions
            return size if size == power else math.ceil(size / step) * step
        return math.ceil(size / 512) * 512

    def malloc(self, requested: int, stream: int) -> Block:
        if not self.captures:
            self.settle()
            self.pass_events(lambda stream, block: stream not in self.busy)
        size = self.round(requested)
        lane = Lane(self.chosen_pool(stream), size <= MIB, stream)
        found = self.find(size, lane)
        if found is None and self.collecting:
            self.collect_garbage()
        if found is None:
            found = self.reserve(size, lane)
        if found is None and not lane.pool:
            found = self.overflow(size, lane)
        if found is None and self.release_oversize(size, lane):
            found = self.reserve(size, lane)
        if found is None and not self.captures:
            self.empty_cache()
            self.retries += 1
            found = self.reserve(size, lane)
        if found is None:
            self.ooms += 1
            self.log.append(("oom", self.total - self.reserved, size))
            raise NoMemoryError
        segment, block = found
        self.split(segment, block, size)
        block.state = "held"
        block.requested = requested
        self.note()
        return block

    def split(self, segment: Segment, block: Block, size: int) -> None:
        rest = block.size - size
        if segment.lane.pool and self.pools[segment.lane.pool].no_split:
            wanted = False
        elif segment.lane.small or self.config.expandable_segments:
            wanted = rest >= 512
        else:
            wanted = size < self.config.max_split_size and rest > MIB
        if wanted:
            tail = Block(block.address + size, rest, block.number, "free")
            tail.since = self.clock(segment)
            block.size = size
            block.number = self.new_number()
            segment.blocks.insert(segment.blocks.index(block) + 1, tail)

    def free(self, block: Block) -> None:
        if block.uses:
            block.state = "late"
            if self.captures:
                self.deferred.append(block)
            else:
                self.wait(block)
        else:
            self.cache(block)
        self.note()

    def record_stream(self, block: Block, stream: int) -> None:
        block.uses.add(stream)
        if self.captures:
            self.captured.setdefault(id(block), set()).add(stream)

    def wait(self, block: Block) -> None:
        self.captured.pop(id(block), None)
        for stream in sorted(block.uses):
            self.events.setdefault(stream, []).append(block)

    def settle(self) -> None:
        """After captures: what was given up in one waits for the streams outside of it."""
        for block in self.deferred:
            block.uses -= self.captured.pop(id(block), set())
            self.wait(block)
            self.return_if_passed(block)
        self.deferred = []

    def pass_events(self, passes: Callable[[int, Block], bool]) -> None:
        """Take back what waits for events that ``passes`` says the device has passed."""
        for stream in list(self.events):
            for block in list(self.events[stream]):
                if passes(stream, block):
                    self.events[stream].remove(block)
                    self.return_if_passed(block)
            if not self.events[stream]:
                del self.events[stream]

    def return_if_passed(self, block: Block) -> None:
        if not any(block in events for events in self.events.values()):
            self.cache(block)
            self.note()

    # -- pools -----------------------------------------------------------------------------------

    def chosen_pool(self, stream: int) -> int:
        for pool, only in reversed(self.captures):
            if only in (None, stream):
                return pool
        return 0

    def use_pool(self, pool: int, **options: bool) -> None:
        self.pools.setdefault(pool, Pool(**options)).users += 1

    def overflow(self, size: int, lane: Lane) -> tuple[Segment, Block] | None:
        for number, pool in self.pools.items():
            found = self.find(size, lane._replace(pool=number)) if pool.use_on_oom else None
            if found is not None:
                return found
        return None

    def clock(self, segment: Segment) -> int:
        return self.searches.get((segment.lane.pool, segment.lane.small), 0)

    def cache(self, block: Block) -> None:
        segment = self.owner(block)
        block.state = "free"
        block.uses = set()
        block.since = self.clock(segment)
        self.merge(segment, block)

    def merge(self, segment: Segment, block: Block) -> None:
        """Unite ``block`` with neighbours of its own state."""
        for step in (-1, 1):
            index = segment.blocks.index(block) + step
            if 0 <= index < len(segment.blocks) and segment.blocks[index].state == block.state:
                other = segment.blocks.pop(index)
                block.address = min(block.address, other.address)
                block.size += other.size

    def new_number(self) -> int:
        self.numbers += 1
        return self.numbers

    # -- cached blocks -------------------------------------------------------------------------

    def order(self, segment: Segment, block: Block) -> tuple[int, ...]:
        if self.version >= (2, 13):
            return (block.size, segment.order, block.address)
        if self.version == (2, 12):
            return (block.size, block.number)
        return (block.size, block.address)

    def free_blocks(
        self, pool: int, small: bool, stream: int | None = None
    ) -> list[tuple[Segment, Block]]:
        """In PyTorch's order: by stream, then by size, then by what the version says."""
        found = [
            (segment, block)
            for segment in self.segments
            if segment.lane[:2] == (pool, small) and stream in (None, segment.lane.stream)
            for block in segment.blocks
            if block.state == "free"
        ]
        return sorted(found, key=lambda pair: (pair[0].lane.stream, *self.order(*pair)))

    @property
    def collecting(self) -> bool:
        return self.allowed is not None and self.config.garbage_collection_threshold > 0

    def find(self, size: int, lane: Lane) -> tuple[Segment, Block] | None:
        if self.collecting:
            self.searches[lane[:2]] = self.searches.get(lane[:2], 0) + 1
        candidates = [
            (segment, block) for segment, block in self.free_blocks(*lane) if block.size >= size
        ]
        if not candidates:
            return None
        if self.config.expandable_segments:
            index = 0
            while (
                candidates[index][0].granule
                and index + 1 < len(candidates)
                and self.room(*candidates[index + 1]) < self.room(*candidates[index])
            ):
                index += 1
            segment, block = candidates[index]
        elif candidates[0][0].granule:
            fixed = [pair for pair in candidates if not pair[0].granule]
            if not fixed:
                return None
            segment, block = fixed[0]
        else:
            segment, block = candidates[0]
        limit = self.config.max_split_size
        if size < limit and block.size >= limit:
            return None
        if size >= limit and block.size >= size + self.config.max_non_split_rounding:
            return None
        return segment, block

    def room(self, segment: Segment, block: Block) -> int:
        following = segment.blocks[segment.blocks.index(block) + 1 :][:1]
        return block.size + sum(b.size for b in following if b.state == "unmapped")

    # -- the device ------------------------------------------------------------------------------

    def reserve(self, size: int, lane: Lane) -> tuple[Segment, Block] | None:
        if lane.small:
            wanted = 2 * MIB
        elif size < 10 * MIB:
            wanted = self.config.large_segment
        else:
            wanted = math.ceil(size / (2 * MIB)) * 2 * MIB
        if self.allowed is not None and self.reserved + wanted > self.allowed:
            return None
        if self.config.expandable_segments:
            found = self.expand(size, lane)
        else:
            found = self.new_segment(wanted, lane)
        if found is not None and lane.pool:
            self.pools[lane.pool].mallocs += 1
        return found

    def new_segment(self, size: int, lane: Lane) -> tuple[Segment, Block] | None:
        if self.reserved + size > self.total:
            return None
        block = Block(self.addresses.take(size), size, self.new_number(), "free")
        segment = Segment(lane, self.new_number(), [block])
        self.segments.append(segment)
        self.log.append(("segment_alloc", block.address, size))
        return segment, block

    def expand(self, size: int, lane: Lane) -> tuple[Segment, Block] | None:
        segment, block = self.place(size, lane)
        while block.state == "unmapped" or block.size < size:
            at = segment.blocks.index(block)
            if block.state == "unmapped":
                target, missing = block, size
            else:
                target, missing = segment.blocks[at + 1], size - block.size
            pages = math.ceil(min(missing, target.size) / segment.granule) * segment.granule
            if self.reserved + pages > self.total:
                return None
            if pages < target.size:
                rest = Block(
                    target.address + pages, target.size - pages, self.new_number(), "unmapped"
                )
                segment.blocks.insert(segment.blocks.index(target) + 1, rest)
                target.size = pages
            target.state = "free"
            target.since = self.clock(segment)
            self.log.append(("segment_map", target.address, pages))
            self.merge(segment, target)
            self.note()
            block = target
        return segment, block

    def place(self, size: int, lane: Lane) -> tuple[Segment, Block]:
        unmapped = [
            (block.address, segment, block)
            for segment in self.segments
            if segment.granule and segment.lane == lane
            for block in segment.blocks
            if block.state == "unmapped"
        ]
        for _, segment, block in sorted(unmapped, key=lambda triple: triple[0]):
            at = segment.blocks.index(block)
            if at and segment.blocks[at - 1].state == "free":
                at -= 1
            room = 0
            for following in segment.blocks[at:]:
                if following.state not in ("free", "unmapped"):
                    break
                room += following.size
            if room >= size:
                return segment, segment.blocks[at]
        granule = 2 * MIB if lane.small else self.config.large_segment
        space = math.ceil((self.total + self.total // 8) / granule) * granule
        block = Block(self.addresses.take(space), space, self.new_number(), "unmapped")
        segment = Segment(lane, self.new_number(), [block], granule)
        self.segments.append(segment)
        return segment, block

    def release(self, segment: Segment) -> None:
        self.segments.remove(segment)
        (block,) = segment.blocks
        self.addresses.give_back(block.address)
        self.log.append(("segment_free", block.address, block.size))
        self.count_out(segment)
        self.note()

    def count_out(self, segment: Segment) -> None:
        if segment.lane.pool:
            self.pools[segment.lane.pool].mallocs -= 1

    def release_oversize(self, size: int, lane: Lane) -> bool:
        limit = self.config.max_split_size
        if limit == (1 << 64) - 1:
            return False
        wanted = max(size, limit)
        blocks = self.free_blocks(*lane)
        enough = [pair for pair in blocks if pair[1].size >= wanted]
        if enough and not enough[0][0].granule:
            self.release(enough[0][0])
            return True
        released = 0
        for segment, block in reversed([pair for pair in blocks if pair[1].size < wanted]):
            if released >= wanted or block.size < limit:
                break
            if not segment.granule:
                released += block.size
                self.release(segment)
        return released >= wanted

    def collect_garbage(self) -> None:
        assert self.allowed is not None
        target = self.reserved - int(self.config.garbage_collection_threshold * self.allowed)
        now = self.searches.get((0, False), 0)
        freed = 0
        while freed < target:
            whole = [
                (segment, block)
                for segment, block in self.free_blocks(0, False)
                if len(segment.blocks) == 1
            ]
            if not whole:
                return
            average = sum(now - block.since for _, block in whole) / len(whole)
            old = [pair for pair in whole if now - pair[1].since >= average]
            if not old:
                return
            for segment, block in old:
                freed += block.size
                self.release(segment)

    def empty_cache(self, only: int | None = None) -> None:
        if only is None and not self.captures:
            self.settle()
            self.pass_events(lambda stream, block: True)
            self.release_free(0)
        for number, pool in list(self.pools.items()):
            if pool.users == 0 and only in (None, number):
                if only is not None:
                    self.settle()
                    self.pass_events(lambda stream, block: self.owner(block).lane.pool == only)
                self.release_free(number)
                if pool.mallocs == 0:
                    del self.pools[number]

    def owner(self, block: Block) -> Segment:
        (segment,) = [segment for segment in self.segments if block in segment.blocks]
        return segment

    def release_free(self, pool: int) -> None:
        for small in (True, False) if pool else (False, True):
            free = self.free_blocks(pool, small)
            for segment, _ in free:
                if not segment.granule and len(segment.blocks) == 1:
                    self.release(segment)
            for segment, block in free:
                if segment.granule:
                    self.unmap(segment, block)

    def unmap(self, segment: Segment, block: Block) -> None:
        base = segment.blocks[0].address
        begin = base + math.ceil((block.address - base) / segment.granule) * segment.granule
        end = base + (block.address + block.size - base) // segment.granule * segment.granule
        if begin >= end:
            return
        at = segment.blocks.index(block)
        pieces = []
        if begin > block.address:
            front = Block(block.address, begin - block.address, self.new_number(), "free")
            pieces.append(front)
        middle = Block(begin, end - begin, block.number, "unmapped")
        pieces.append(middle)
        if block.address + block.size > end:
            back = Block(end, block.address + block.size - end, self.new_number(), "free")
            pieces.append(back)
        for piece in pieces:
            piece.since = self.clock(segment)
        segment.blocks[at : at + 1] = pieces
        self.log.append(("segment_unmap", begin, end - begin))
        self.count_out(segment)
        self.merge(segment, middle)
        if len(segment.blocks) == 1:
            self.segments.remove(segment)
            self.addresses.give_back(segment.blocks[0].address)
        self.note()

    def layout(self) -> list[tuple[int, int, bool, list[tuple[int, int, str]]]]:
        """Every mapped range: address, stream, small, and its blocks."""
        ranges = []
        for segment in self.segments:
            run: list[Block] = []
            for block in [*segment.blocks, None]:
                if block is not None and block.state != "unmapped":
                    run.append(block)
                elif run:
                    blocks = [(b.address, b.size, b.state) for b in run]
                    lane = segment.lane
                    ranges.append((run[0].address, lane.stream, lane.small, blocks))
                    run = []
        return sorted(ranges)

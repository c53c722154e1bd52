"""A second caching allocator that is slow and plain: the model the real one is compared with.

Segments are lists of blocks, every question is answered by looking at all of them, and all figures
are sums over blocks. It shares nothing with pytest_vram.sim.allocator but the parsed settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MIB = 1 << 20


class NoMemoryError(Exception):
    pass


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
    small: bool
    stream: int
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
        self.searches = {True: 0, False: 0}
        self.events: dict[int, list[Block]] = {}
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
            segments = [segment for segment in self.segments if segment.small in sizes]
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
        for events in list(self.events.values()):
            while events:
                self.pass_event(events.pop(0))
        size = self.round(requested)
        small = size <= MIB
        found = self.find(size, small, stream)
        if found is None and self.collecting:
            self.collect_garbage()
        if found is None:
            found = self.reserve(size, small, stream)
        if found is None and self.release_oversize(size, small, stream):
            found = self.reserve(size, small, stream)
        if found is None:
            self.empty_cache()
            self.retries += 1
            found = self.reserve(size, small, stream)
        if found is None:
            self.ooms += 1
            raise NoMemoryError
        segment, block = found
        self.split(segment, block, size)
        block.state = "held"
        block.requested = requested
        self.note()
        return block

    def split(self, segment: Segment, block: Block, size: int) -> None:
        rest = block.size - size
        if segment.small or self.config.expandable_segments:
            wanted = rest >= 512
        else:
            wanted = size < self.config.max_split_size and rest > MIB
        if wanted:
            tail = Block(block.address + size, rest, block.number, "free")
            tail.since = self.searches[segment.small]
            block.size = size
            block.number = self.new_number()
            segment.blocks.insert(segment.blocks.index(block) + 1, tail)

    def free(self, block: Block) -> None:
        if block.uses:
            block.state = "late"
            for stream in sorted(block.uses):
                self.events.setdefault(stream, []).append(block)
        else:
            self.cache(block)
        self.note()

    def pass_event(self, block: Block) -> None:
        if not any(block in events for events in self.events.values()):
            self.cache(block)
            self.note()

    def cache(self, block: Block) -> None:
        (segment,) = [segment for segment in self.segments if block in segment.blocks]
        block.state = "free"
        block.uses = set()
        block.since = self.searches[segment.small]
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

    def free_blocks(self, small: bool, stream: int | None = None) -> list[tuple[Segment, Block]]:
        """In PyTorch's order: by stream, then by size, then by what the version says."""
        found = [
            (segment, block)
            for segment in self.segments
            if segment.small == small and stream in (None, segment.stream)
            for block in segment.blocks
            if block.state == "free"
        ]
        return sorted(found, key=lambda pair: (pair[0].stream, *self.order(*pair)))

    @property
    def collecting(self) -> bool:
        return self.allowed is not None and self.config.garbage_collection_threshold > 0

    def find(self, size: int, small: bool, stream: int) -> tuple[Segment, Block] | None:
        if self.collecting:
            self.searches[small] += 1
        candidates = [
            (segment, block)
            for segment, block in self.free_blocks(small, stream)
            if block.size >= size
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

    def reserve(self, size: int, small: bool, stream: int) -> tuple[Segment, Block] | None:
        if small:
            wanted = 2 * MIB
        elif size < 10 * MIB:
            wanted = self.config.large_segment
        else:
            wanted = math.ceil(size / (2 * MIB)) * 2 * MIB
        if self.allowed is not None and self.reserved + wanted > self.allowed:
            return None
        if self.config.expandable_segments:
            return self.expand(size, small, stream)
        if self.reserved + wanted > self.total:
            return None
        block = Block(self.addresses.take(wanted), wanted, self.new_number(), "free")
        segment = Segment(small, stream, len(self.addresses.taken) and self.new_number(), [block])
        self.segments.append(segment)
        return segment, block

    def expand(self, size: int, small: bool, stream: int) -> tuple[Segment, Block] | None:
        segment, block = self.place(size, small, stream)
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
            target.since = self.searches[small]
            self.merge(segment, target)
            self.note()
            block = target
        return segment, block

    def place(self, size: int, small: bool, stream: int) -> tuple[Segment, Block]:
        unmapped = [
            (block.address, segment, block)
            for segment in self.segments
            if segment.granule and segment.small == small and segment.stream == stream
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
        granule = 2 * MIB if small else self.config.large_segment
        space = math.ceil((self.total + self.total // 8) / granule) * granule
        block = Block(self.addresses.take(space), space, self.new_number(), "unmapped")
        segment = Segment(small, stream, self.new_number(), [block], granule)
        self.segments.append(segment)
        return segment, block

    def release(self, segment: Segment) -> None:
        self.segments.remove(segment)
        self.addresses.give_back(segment.blocks[0].address)
        self.note()

    def release_oversize(self, size: int, small: bool, stream: int) -> bool:
        limit = self.config.max_split_size
        if limit == (1 << 64) - 1:
            return False
        wanted = max(size, limit)
        blocks = self.free_blocks(small, stream)
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
        now = self.searches[False]
        freed = 0
        while freed < target:
            whole = [
                (segment, block)
                for segment, block in self.free_blocks(False)
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

    def empty_cache(self) -> None:
        events, self.events = self.events, {}
        waiting = list(dict.fromkeys(block for queue in events.values() for block in queue))
        for block in waiting:
            self.cache(block)
            self.note()
        for small in (False, True):
            free = self.free_blocks(small)
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
            piece.since = self.searches[segment.small]
        segment.blocks[at : at + 1] = pieces
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
                    ranges.append((run[0].address, segment.stream, segment.small, blocks))
                    run = []
        return sorted(ranges)

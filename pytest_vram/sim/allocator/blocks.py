"""Blocks, and the pools of free blocks they return to."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from sortedcontainers import SortedList  # type: ignore[import-untyped]

from pytest_vram.sim.allocator.statistics import Tally

#: A free block's key is its size and, below that, its place: the order in which PyTorch keeps the
#: free blocks of one stream. Up to 2.11 a block's place is its address; later the segments come in
#: the order of their creation first (BlockComparatorSizeCounterAddress), so a place is an address
#: plus a shift that lines the segments up. Device addresses fit in 49 bits.
PLACE_BITS = 52
CROWDED = 8192  # free blocks in one lane

FREE = 0  #: cached: it may be handed out or merged
ALLOCATED = 1  #: the program holds it
PENDING = 2  #: given up by the program, still used on another stream
UNMAPPED = 3  #: address space of an expandable segment without memory behind it
GONE = 4  #: merged into a neighbour or given back to the device


class Block:
    """A range of device memory: what one allocation takes, or what lies free between two.

    ``size`` is what the allocator took and counts, ``requested`` what the caller asked for.
    Neighbours in the same segment are linked through ``prev`` and ``next``.
    """

    __slots__ = (
        "address",
        "born",
        "events",
        "expandable",
        "lane",
        "next",
        "prev",
        "requested",
        "shift",
        "size",
        "state",
        "uses",
    )

    requested: int  # a free block keeps what was last asked of it: snapshots show it
    events: int  # streams that have not passed its end yet; set when it has to wait for some
    born: int  # its pool's searches when it became free: the clock of garbage collection

    def __init__(
        self,
        address: int,
        size: int,
        lane: Lane,
        shift: int = 0,
        prev: Block | None = None,
        next: Block | None = None,
        state: int = ALLOCATED,
    ) -> None:
        self.address = address
        self.size = size
        self.requested = 0
        self.lane = lane
        self.shift = shift  # its place among free blocks is its address plus this
        self.prev = prev
        self.next = next
        self.state = state
        self.expandable: ExpandableSegment | None = None
        self.uses: set[int] | None = None  # other streams that use it

    @property
    def stream(self) -> int:
        """The stream it was allocated on, and returns to."""
        return self.lane.stream

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with other blocks."""
        return self.prev is not None or self.next is not None

    def cut(self, size: int) -> Block:
        """Shorten the block to ``size`` bytes; what remains as a block of its own."""
        rest = Block(self.address + size, self.size - size, self.lane, self.shift, self, self.next)
        rest.expandable = self.expandable
        if rest.next is not None:
            rest.next.prev = rest
        self.next = rest
        self.size = size
        return rest

    def join(self) -> Block:
        """Take the next block in."""
        after = self.next
        assert after is not None
        after.state = GONE
        self.size += after.size
        self.next = after.next
        if self.next is not None:
            self.next.prev = self
        return self

    def __repr__(self) -> str:
        return f"Block({self.address:#x}, size={self.size}, stream={self.stream})"


class ExpandableSegment:
    """A reserved address range whose granules are mapped as needed."""

    __slots__ = ("address", "granule", "granules")

    def __init__(self, address: int, granule: int, granules: int) -> None:
        self.address = address
        self.granule = granule
        self.granules = granules

    @property
    def size(self) -> int:
        return self.granule * self.granules

    def floor(self, address: int) -> int:
        """The start of the granule that ``address`` lies in."""
        return address - (address - self.address) % self.granule

    def ceil(self, address: int) -> int:
        return address + (self.address - address) % self.granule


class Lane:
    """The free blocks of one pool on one stream: sorted ``keys``, and the ``blocks`` by key.

    Inserting into a list costs more the longer it is, by so little that a list is fastest up to
    thousands of blocks. Beyond ``CROWDED`` the keys move to ``crowd`` and ``keys`` stays empty.
    """

    __slots__ = (
        "blocks",
        "crowd",
        "keys",
        "least_rest",
        "least_unsplit",
        "pool",
        "stream",
        "tally",
        "unmapped",
    )

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool = pool
        self.tally = pool.tally
        self.stream = stream
        self.least_rest = 0  # a rest of at least this many bytes is split off
        self.least_unsplit = 0  # blocks of this many bytes are never split
        self.keys: list[int] = []
        self.crowd: SortedList | None = None
        self.blocks: dict[int, Block] = {}
        self.unmapped: dict[int, Block] = {}  # by address

    def add(self, block: Block) -> None:
        block.state = FREE
        block.born = self.pool.searches
        key = (block.size << PLACE_BITS) + block.address + block.shift
        self.blocks[key] = block
        self.add_key(key)

    def add_key(self, key: int) -> None:
        if self.crowd is not None:
            self.crowd.add(key)
            return
        insort(self.keys, key)
        if len(self.keys) > CROWDED:
            self.crowd = SortedList(self.keys)
            self.keys = []

    def remove(self, block: Block) -> None:
        self.remove_key((block.size << PLACE_BITS) + block.address + block.shift)

    def remove_key(self, key: int) -> None:
        del self.blocks[key]
        if self.crowd is not None:
            self.crowd.remove(key)
        else:
            del self.keys[bisect_left(self.keys, key)]

    def at_least(self, size: int) -> Iterator[Block]:
        """The blocks of ``size`` bytes and more, smallest first."""
        least = size << PLACE_BITS
        if self.crowd is not None:
            return (self.blocks[key] for key in self.crowd.irange(least))
        keys = self.keys
        return (self.blocks[keys[at]] for at in range(bisect_left(keys, least), len(keys)))

    def in_order(self) -> list[Block]:
        return [self.blocks[key] for key in self.crowd or self.keys]


class Pool:
    """One of PyTorch's BlockPools: everybody's small or large blocks, or those of one mempool."""

    __slots__ = ("lanes", "owner", "searches", "small", "tally")

    def __init__(self, small: bool, tally: Tally, owner: PrivatePool | None = None) -> None:
        self.small = small
        self.tally = tally
        self.owner = owner
        self.lanes: dict[int, Lane] = {}
        self.searches = 0  # counted while garbage collection is on

    def by_stream(self) -> list[Lane]:
        return [self.lanes[stream] for stream in sorted(self.lanes)]


class PrivatePool:
    """The pools of a CUDA graph or of a ``torch.cuda.MemPool``."""

    def __init__(
        self,
        mempool: tuple[int, int],
        small: Tally,
        large: Tally,
        foreign: bool,
        no_split: bool,
        use_on_oom: bool,
    ) -> None:
        self.mempool = mempool
        self.small = Pool(True, small, self)
        self.large = Pool(False, large, self)
        self.foreign = foreign
        self.no_split = no_split
        self.use_on_oom = use_on_oom
        self.users = 0
        self.mallocs = 0  # segments and mappings it holds

    @property
    def pools(self) -> tuple[Pool, Pool]:
        return self.small, self.large

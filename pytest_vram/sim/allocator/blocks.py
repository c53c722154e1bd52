"""Blocks, and the pools of free blocks they return to."""

from __future__ import annotations

from bisect import bisect_left, insort

#: A free block's key orders by (size, address), as PyTorch's BlockComparatorSize does within one
#: stream. Device addresses fit in 49 bits.
ADDRESS_BITS = 52
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1

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
        "size",
        "state",
        "uses",
    )

    def __init__(self, address: int, size: int, lane: Lane) -> None:
        self.address = address
        self.size = size
        self.lane = lane
        self.requested = 0
        self.state = ALLOCATED
        self.prev: Block | None = None
        self.next: Block | None = None
        self.expandable: ExpandableSegment | None = None
        self.uses: set[int] | None = None  # other streams that use it
        self.events = 0  # streams that have not passed the block's end yet
        self.born = 0  # searches of its pool when it became free (garbage collection's clock)

    @property
    def stream(self) -> int:
        """The stream it was allocated on, and returns to."""
        return self.lane.stream

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with other blocks."""
        return self.prev is not None or self.next is not None

    def __repr__(self) -> str:
        return f"Block({self.address:#x}, size={self.size}, requested={self.requested})"


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
    """The free blocks of one pool on one stream: ``keys`` sorted, ``blocks`` by key."""

    __slots__ = ("blocks", "keys", "least_rest", "pool", "stream", "tally", "unmapped")

    def __init__(self, pool: Pool, stream: int, least_rest: int) -> None:
        self.pool = pool
        self.tally = pool.tally
        self.stream = stream
        self.least_rest = least_rest  # a rest of at least this many bytes is split off
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: dict[int, Block] = {}  # by address

    def add(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.blocks[key] = block
        block.state = FREE
        block.born = self.pool.searches

    def remove(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]

    def in_order(self) -> list[Block]:
        return [self.blocks[key] for key in self.keys]


class Tally:
    """Running totals of the small or the large blocks: what came in, what went out.

    Only differences and maxima of these are ever asked for, so two plain additions per event
    suffice; a peak is looked at when a figure begins to fall, not at each rise.
    """

    __slots__ = (
        "active_bytes_peak",
        "active_peak",
        "bytes_in",
        "bytes_out",
        "bytes_peak",
        "count_in",
        "count_out",
        "count_peak",
        "pending",
        "pending_bytes",
        "requested_in",
        "requested_out",
        "requested_peak",
        "reserved_in",
        "reserved_out",
        "reserved_peak",
        "rising",
        "segments_in",
        "segments_out",
        "segments_peak",
        "split_bytes_in",
        "split_bytes_out",
        "split_bytes_peak",
        "split_in",
        "split_out",
        "split_peak",
        "split_rising",
    )

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)
        self.rising = self.split_rising = False


class Pool:
    """One of PyTorch's BlockPools: the small or large blocks of everybody or of one mempool."""

    __slots__ = ("lanes", "owner", "searches", "small", "tally")

    def __init__(self, small: bool, tally: Tally, owner: tuple[int, int] = (0, 0)) -> None:
        self.small = small
        self.tally = tally
        self.owner = owner
        self.lanes: dict[int, Lane] = {}
        self.searches = 0  # counted while garbage collection is on

    def by_stream(self) -> list[Lane]:
        return [self.lanes[stream] for stream in sorted(self.lanes)]

"""The device below the allocator: how much memory it has, and where it puts what it gives."""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

PAGE = 2 << 20  # the driver hands out whole pages; PyTorch asks for nothing else


class AddressSource(Protocol):
    """Hands out address ranges; never overlapping ones."""

    def take(self, size: int) -> int:
        """The address of ``size`` bytes, as cudaMalloc or cuMemAddressReserve would return it."""

    def give_back(self, address: int, size: int) -> None:
        """The range is free again."""

    def occupy(self, address: int, size: int) -> None:
        """The range is in use already, by a state that was restored."""


class FirstFit:
    """Ascending, 2 MiB aligned, ranges that were given back are reused, lowest first.

    Where a real driver places memory cannot be known. But the caching allocator breaks ties
    between free blocks of one size by address, so the order matters; this is the simplest model.
    """

    def __init__(self, base: int = 0x7F00_0000_0000) -> None:
        self._end = base
        self._holes: list[tuple[int, int]] = []  # (address, size), ascending, never adjacent

    def take(self, size: int) -> int:
        size = -(-size // PAGE) * PAGE
        for index, (address, room) in enumerate(self._holes):
            if room > size:
                self._holes[index] = (address + size, room - size)
                return address
            if room == size:
                del self._holes[index]
                return address
        address = self._end
        self._end += size
        return address

    def give_back(self, address: int, size: int) -> None:
        size = -(-size // PAGE) * PAGE
        index = bisect_left(self._holes, (address, 0))
        if index < len(self._holes) and self._holes[index][0] == address + size:
            size += self._holes.pop(index)[1]
        if index > 0 and sum(self._holes[index - 1]) == address:
            address, room = self._holes.pop(index - 1)
            size += room
            index -= 1
        self._holes.insert(index, (address, size))

    def occupy(self, address: int, size: int) -> None:
        self._end = max(self._end, address + -(-size // PAGE) * PAGE)


class Device:
    """Memory of one card: ``total`` as the driver reports it, of which ``context`` is taken."""

    def __init__(self, total: int, context: int, addresses: AddressSource) -> None:
        self.total = total
        self.context = context
        self.used = 0
        self.addresses = addresses

    @property
    def free(self) -> int:
        """What cudaMemGetInfo calls free."""
        return self.total - self.context - self.used

    def malloc(self, size: int) -> int | None:
        """The address of ``size`` new bytes, or None where cudaMalloc would fail."""
        pages = -(-size // PAGE) * PAGE
        if pages > self.free:
            return None
        address = self.addresses.take(size)
        self.used += pages
        return address

    def release(self, address: int, size: int) -> None:
        self.used -= -(-size // PAGE) * PAGE
        self.addresses.give_back(address, size)

    def create(self, size: int) -> bool:
        """Memory to map, in whole granules; all or nothing, as the allocator takes it back."""
        if size > self.free:
            return False
        self.used += size
        return True

    def destroy(self, size: int) -> None:
        self.used -= size

"""Where the driver puts memory: a model of cudaMalloc's and cuMemAddressReserve's placement.

Where a real driver places a segment cannot be known, but the caching allocator breaks ties between
free blocks of one size by address, so their order matters. The model: 2 MiB aligned, ascending,
ranges that were given back are reused, lowest first. A recorded run can be replayed with its own
addresses by injecting another :class:`AddressSource`.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

ALIGNMENT = 2 << 20


class AddressSource(Protocol):
    """Hands out address ranges; never overlapping ones."""

    def take(self, size: int) -> int:
        """The address of ``size`` bytes, as cudaMalloc or cuMemAddressReserve would return it."""

    def give_back(self, address: int, size: int) -> None:
        """The range is free again."""


class FirstFit:
    """Ascending, 2 MiB aligned, freed ranges reused first fit."""

    def __init__(self, base: int = 0x7F00_0000_0000) -> None:
        self._end = base
        self._holes: list[tuple[int, int]] = []  # (address, size), ascending, never adjacent

    def take(self, size: int) -> int:
        size = -(-size // ALIGNMENT) * ALIGNMENT
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
        size = -(-size // ALIGNMENT) * ALIGNMENT
        index = bisect_left(self._holes, (address, 0))
        if index < len(self._holes) and self._holes[index][0] == address + size:
            size += self._holes.pop(index)[1]
        if index > 0 and sum(self._holes[index - 1]) == address:
            address, room = self._holes.pop(index - 1)
            size += room
            index -= 1
        if address + size == self._end:
            self._end = address
        else:
            self._holes.insert(index, (address, size))

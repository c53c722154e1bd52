"""Closing the free space that other tests' tensors left in segments which stay.

``empty_cache`` gives whole free segments back; a segment in which a fixture's tensor lives stays,
with the free space around it. A test that finds such space needs fewer new segments, and its
blocks may come with other rests: its figures would depend on what ran before. So the space is
taken, in pieces that fit exactly, for as long as a test is measured.
"""

from __future__ import annotations

from typing import Any

import torch

#: Larger requests go to the pool of large blocks (c10/cuda/CUDACachingAllocator.cpp, kSmallSize).
SMALL = 1 << 20


class Plugs:
    """The pieces that hold one device's free space. ``open`` is what could not be closed."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._pieces: list[torch.Tensor] = []
        self.open = 0

    def close(self) -> None:
        """Take every free block that a request on its stream could be given."""
        for size, stream in sorted(_holes(self._device)):
            self._fill(size, stream)
        self.open = sum(size for size, _ in _holes(self._device))

    def hide(self, segments: list[dict[str, Any]]) -> None:
        """In the segments of a snapshot the pieces are what they stand for: free space."""
        pieces = {piece.data_ptr() for piece in self._pieces}
        for segment in segments:
            for block in segment["blocks"]:
                if block["address"] in pieces:
                    block.update(state="inactive", requested_size=0)
                    segment["allocated_size"] -= block["size"]
                    segment["active_size"] -= block["size"]

    def release(self) -> None:
        self._pieces.clear()

    def _fill(self, size: int, stream: int) -> None:
        # Smallest first: a request takes the smallest block that is large enough, so that each
        # piece goes into the hole it was cut for (or one of the same size).
        with torch.cuda.device(self._device), _on(stream, self._device):
            while size:
                piece = min(size, SMALL) if size < 2 * SMALL else size
                before = torch.cuda.memory_reserved(self._device)
                tensor = torch.empty(piece, dtype=torch.uint8, device=f"cuda:{self._device}")
                if torch.cuda.memory_reserved(self._device) > before:
                    # Rounding (roundup_power2_divisions) made the request larger than the hole.
                    del tensor
                    torch.cuda.empty_cache()
                    return
                self._pieces.append(tensor)
                size -= piece


def _holes(device: int) -> list[tuple[int, int]]:
    """``(bytes, stream)`` of each free block; those of graphs' private pools are nobody else's."""
    holes = []
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        if segment["device"] != device or tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            continue
        small = segment["segment_type"] == "small"
        for block in segment["blocks"]:
            if block["state"] == "inactive" and (small or block["size"] > SMALL):
                holes.append((block["size"], segment["stream"]))
    return holes


def _on(stream: int, device: int) -> Any:
    if stream == 0:  # ExternalStream takes 0 for "none given"
        return torch.cuda.stream(torch.cuda.default_stream(device))
    other = torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(other)

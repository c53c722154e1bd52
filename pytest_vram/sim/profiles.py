"""Cards that can be simulated: what PyTorch's host code asks a device about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """One GPU model. ``memory`` is ``total_memory`` in bytes as the driver reports it.

    ``context`` is what the CUDA context takes before PyTorch allocates anything: it lowers what is
    free, never what PyTorch counts.
    """

    name: str
    title: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    l2_cache: int
    context: int = 500 << 20
    warp_size: int = 32
    registers_per_multiprocessor: int = 65536

    @property
    def sm(self) -> int:
        """Capability as PyTorch's sources write it: 80 for (8, 0)."""
        return self.capability[0] * 10 + self.capability[1]

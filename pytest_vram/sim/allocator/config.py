"""PYTORCH_CUDA_ALLOC_CONF: what it says, and the rounding it asks for.

Read from c10/cuda/CUDAAllocatorConfig.cpp (2.6 to 2.8) and c10/core/AllocatorConfig.cpp (2.9 on).
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1 << 20
MIN_BLOCK = 512
UNLIMITED = (1 << 64) - 1
INTERVALS = 16  # power-of-two divisions are set for 1 MiB, 2 MiB, ... 32 GiB and above


@dataclass(frozen=True, slots=True)
class Config:
    """The settings that decide the allocator's behaviour; sizes in bytes."""

    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    expandable_segments: bool = False
    large_segment: int = 20 * MIB
    memory_fraction: float | None = None
    text: str = field(default="", compare=False)

    @staticmethod
    def parse(text: str, version: tuple[int, int]) -> Config:
        return Config(text=text)

    @property
    def rounds_to_power2(self) -> bool:
        return any(divisions > 1 for divisions in self.roundup_power2_divisions)

    def round_size(self, size: int) -> int:
        """What the allocator looks for when ``size`` bytes are asked for (``round_size``)."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        interval = min(max(size.bit_length() - 21, 0), INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and size > MIN_BLOCK * divisions:
            return round_to_division(size, divisions)
        return -(-size // MIN_BLOCK) * MIN_BLOCK


def round_to_division(size: int, divisions: int) -> int:
    """``size`` up to the next of ``divisions`` equal steps between two powers of two."""
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    step = floor >> (divisions.bit_length() - 1)
    if step == 0:
        return floor << 1
    return -(-size // step) * step

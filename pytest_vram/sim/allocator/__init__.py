"""PyTorch's CUDA caching allocator in pure Python."""

from pytest_vram.sim.allocator.blocks import Block
from pytest_vram.sim.allocator.caching import CachingAllocator
from pytest_vram.sim.allocator.config import Config, InvalidConfig
from pytest_vram.sim.allocator.device import AddressSource, FirstFit
from pytest_vram.sim.allocator.errors import DeviceOutOfMemory, format_size
from pytest_vram.sim.allocator.reserve import Listener

__all__ = [
    "AddressSource",
    "Block",
    "CachingAllocator",
    "Config",
    "DeviceOutOfMemory",
    "FirstFit",
    "InvalidConfig",
    "Listener",
    "format_size",
]

"""The real GPU: recording what its allocator does, and what the card says about itself."""

from pytest_vram.cuda.card import device_lock, environment, profile_of
from pytest_vram.cuda.recorder import Recording

__all__ = ["Recording", "device_lock", "environment", "profile_of"]

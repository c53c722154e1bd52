"""pytest-vram: a GPU-memory budget for every training test."""

from __future__ import annotations

__version__ = "0.1.0"

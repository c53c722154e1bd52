"""What the readers of memory share: how a fault is told, and from which size on it is one."""

from __future__ import annotations

from typing import Any

from pytest_vram.findings import Finding, Severity
from pytest_vram.numerics.lives import Life, Lives

#: Below this nothing is worth a word: it is lost in rounding and workspaces.
SMALL = 1 << 20
OWNED = {"parameters", "gradients", "optimizer_state", "master_weights", "buffers", "workspace"}


def cause(
    severity: Severity,
    sentence: str,
    *details: str,
    hint: str = "",
    kind: str = "memory-cause",
    **data: Any,
) -> Finding:
    return Finding(kind, severity, sentence, details, hint, data)


def matters(size: int, lives: Lives, share: int = 20) -> bool:
    return size >= max(SMALL, lives.peak // share)


def widest(lives: list[Life]) -> tuple[str, tuple[int, ...] | None]:
    life = max(lives, key=lambda one: one.block)
    return life.dtype, life.shape

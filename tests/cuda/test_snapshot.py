"""Snapshots of measured passes, as --vram-snapshots writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

MIB = 1 << 20


def test_a_snapshot_has_the_passs_history_and_no_plugs(on_stub: Callable[..., Any]) -> None:
    found = on_stub("""
        held = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")  # in a segment of 20 MiB
        with Recording() as recording:
            plugged = torch.cuda.memory_allocated()
            kept = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
            gone = torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
            del gone
            snapshot = recording.snapshot()
        blocks = [b for s in snapshot["segments"] for b in s["blocks"]]
        answer({
            "plugged": plugged,
            "active": sum(b["size"] for b in blocks if b["state"] == "active_allocated"),
            "allocated": sum(s["allocated_size"] for s in snapshot["segments"]),
            "entries": [(e["action"], e["size"]) for e in snapshot["device_traces"][0]],
        })
    """)
    assert found["plugged"] == 20 * MIB
    assert found["active"] == found["allocated"] == 8 * MIB
    assert found["entries"] == [
        ["segment_alloc", 20 * MIB],
        ["alloc", 5 * MIB],
        ["alloc", 4 * MIB],
        ["free_requested", 4 * MIB],
        ["free_completed", 4 * MIB],
    ]

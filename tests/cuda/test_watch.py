"""The watch on a (stub) GPU: its checks take no device memory while memory is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SOURCE = """
import contextlib, gc
from torch import nn
from pytest_vram.numerics import Watch

def body(precision):
    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "pure": torch.bfloat16}.get(precision, torch.float16)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]).cuda()
    if precision == "pure":
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    x = torch.randn(8, 64, device="cuda", dtype=next(model.parameters()).dtype)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype, enabled=precision in ("fp16", "bf16")):
            loss = model(x).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

def figures(precision, watched):
    gc.collect()
    torch.cuda.empty_cache()
    with Watch() if watched else contextlib.nullcontext() as watch:
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        body(precision)
        stats = torch.cuda.memory_stats()
    losses = len(watch.losses) if watched else 0
    found = [finding.text() for finding in watch.findings()] if watched else []
    return [
        stats["allocated_bytes.all.peak"] - base,
        stats["allocation.all.allocated"],
        stats["requested_bytes.all.allocated"],
    ], losses, found

figures(PRECISION, False)
answer([figures(PRECISION, False), figures(PRECISION, True)])
"""


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "pure"])
def test_the_watch_takes_no_device_memory(on_stub: Callable[..., Any], precision: str) -> None:
    plain, watched = on_stub(f"PRECISION = {precision!r}\n{SOURCE}")
    assert watched[0] == plain[0]
    assert watched[1] == 4
    # Without values every read is 0: nothing moves, and nothing is NaN.
    assert not any("not finite" in text for text in watched[2])

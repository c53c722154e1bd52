"""Small trainings that the tests run on the stub driver, and how they are summed up."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pytest_vram.bills import settle
from pytest_vram.cuda import Recording, profile_of
from pytest_vram.observe import Observer
from pytest_vram.sim.simulation import Simulation
from pytest_vram.trace import Trace


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.out(F.gelu(self.fc(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(
        self, vocabulary: int = 4096, layers: int = 3, width: int = 256, recompute: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.recompute = recompute

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.recompute else block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def language_model(steps: int = 3, device: str = "cuda", **options: Any) -> None:
    """fp16 autocast, GradScaler, clipping, AdamW."""
    model = LanguageModel(**options).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(steps):
        x = torch.randint(0, 4096, (8, 128)).to(device)
        y = torch.randint(0, 4096, (8, 128)).to(device)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def perceptron(steps: int = 2, width: int = 700, device: str = "cuda") -> None:
    """fp32, SGD with momentum, sizes that leave rests in large blocks."""
    model = nn.Sequential(nn.Linear(width, 3 * width), nn.ReLU(), nn.Linear(3 * width, 10))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        x = torch.randn(333, width, device=device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def recorded(body: Callable[[], Any], device: int | None = None) -> tuple[Recording, Trace]:
    """Run ``body`` as a marked test is run; its exceptions pass."""
    recording = Recording(device)
    with recording, Observer(recording) as observer:
        body()
    return recording, settle(observer.renumber(recording.trace()))


def summary(trace: Trace) -> dict[str, Any]:
    """Peaks, the bills at the peak, and what survived: everything a report is made from."""
    peak = reserved = at = 0
    phase = ""
    now = ""
    for position, event, allocated, total in trace.walk():
        if event.kind == "phase":
            now = str(trace.phases[event.index])
        if allocated > peak:
            peak, at, phase = allocated, position, now
        reserved = max(reserved, total)
    bills: Counter[str] = Counter()
    for index in alive(trace, at):
        bills[trace.allocations[index].bill] += trace.allocations[index].block
    assert sum(bills.values()) == peak
    survivors = alive(trace, len(trace.events))
    return {
        "peak": peak,
        "reserved": reserved,
        "phase": phase,
        "bills": dict(sorted(bills.items())),
        "survived": sum(trace.allocations[index].block for index in survivors),
        "base": [trace.base_allocated, trace.base_reserved],
        "notes": list(trace.notes),
        "events": len(trace.events),
    }


def alive(trace: Trace, position: int) -> set[int]:
    live: set[int] = set()
    for event in trace.events[: position + 1]:
        if event.kind == "alloc":
            live.add(event.index)
        elif event.kind == "free":
            live.discard(event.index)
    return live


def simulated(body: Callable[[], Any]) -> Trace:
    """The same on a simulation of the card that is here."""
    with Simulation(profile_of(0)) as simulation:
        with Observer(simulation) as observer:
            body()
        gc.collect()
        return settle(observer.renumber(simulation.trace()))

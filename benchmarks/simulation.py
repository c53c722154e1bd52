"""Seconds a simulated training step takes, and the ratio to plain FakeTensor execution.

    python benchmarks/simulation.py [--large]

GPT-2 small (batch 4 x 512) and a 32-layer model of 6.7 billion parameters (batch 1 x 2048);
``--large`` adds 80 layers of width 8192. Runs are interleaved, so that a machine's mood cancels in
the ratio; figures are medians.
"""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_vram.sim import Simulation, find_profile


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(h, dim=2)
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def stepper(shape: tuple[int, ...], device: str) -> Callable[[], float]:
    """Build the model on ``device``; the function returned runs one step and says how long."""
    *sizes, batch, length = shape
    with torch.device(device):
        model = Model(*sizes)
        tokens = torch.zeros(batch, length, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step() -> float:
        start = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    return step


def compare(name: str, shape: tuple[int, ...], rounds: int = 5) -> None:
    gc.collect()
    gc.disable()
    profile = replace(find_profile("b200"), memory=4 << 40)  # room for every model
    simulation, fake = Simulation(profile), FakeTensorMode()
    with simulation:
        simulated = stepper(shape, "cuda")
        simulated()
        mine = [simulated() for _ in range(rounds)]
        peak = simulation.allocator.peak_allocated
    with fake:
        plain = stepper(shape, "cpu")
        plain()
        theirs = [plain() for _ in range(rounds)]
    with Simulation(profile) as again:
        simulated = stepper(shape, "cuda")
        simulated()
        mine += [simulated() for _ in range(rounds)]
        operators = len(again.books.allocations)
    gc.enable()
    seconds, reference = statistics.median(mine), statistics.median(theirs)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{name:34s} {seconds:6.3f} s a step, plain FakeTensor {reference:6.3f} s, "
        f"ratio {seconds / reference:.2f}; peak {peak / 2**30:.2f} GiB, "
        f"{operators} allocations, {memory:.0f} MiB of RAM"
    )


def main() -> None:
    warnings.simplefilter("ignore")
    compare("GPT-2 small, 12 x 768, 4 x 512", (12, 768, 12, 50257, 4, 512))
    compare("6.7B, 32 x 4096, 1 x 2048", (32, 4096, 32, 32000, 1, 2048))
    if "--large" in sys.argv:
        compare("70B shape, 80 x 8192, 1 x 2048", (80, 8192, 64, 32000, 1, 2048))


if __name__ == "__main__":
    main()

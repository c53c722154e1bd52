"""Several threads on one simulated card."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from pytest_vram.sim.profiles import find_profile
from pytest_vram.sim.simulation import Simulation


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def train(number: int) -> float:
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(4, 64, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def test_threads_that_interrupt_each_other_keep_the_books(restless: None) -> None:
    with Simulation(find_profile("t4", ())) as simulation:
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(train, range(18))) == [1.0] * 18
        simulation.threads.settle()
        gc.collect()
        simulation.policy.clear()
        simulation.clear_workspaces()
        assert simulation.allocator.allocated == 0
        assert simulation.allocator.reserved > 0

"""Faults of memory that public reports describe, each beside its healthy twin."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from watched_loops import memory_findings

Loop = Callable[[bool], None]
PAIRS: dict[str, tuple[Loop, str, str]] = {}
WIDE = 256


def pair(severity: str, says: str) -> Callable[[Loop], Loop]:
    def add(loop: Loop) -> Loop:
        PAIRS[loop.__name__] = loop, severity, says
        return loop

    return add


def stack(depth: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(depth))).cuda()


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def batch(rows: int = 1024) -> Tensor:
    return torch.randn(rows, WIDE, device="cuda")


@pair("warn", r"hooks of module 0 grow with every step \(2, 3, 4, 5\): keep \(\S+:\d+\) is "
      "registered again and again")  # fmt: skip
def a_hook_for_every_step(faulty: bool) -> None:
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, out: Tensor) -> None:
        seen["out"] = out.detach()

    for _ in range(5):
        handle = model[0].register_forward_hook(keep)
        step(optimizer, model(batch(64)).pow(2).mean())
        if not faulty:
            handle.remove()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(stack(1) for _ in range(4))
        self.gradient_checkpointing = True

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return x


@pair("fail", r"requested \(gradient_checkpointing of Checkpointed\), but the model is trained in "
      r"eval mode \(forward at \S+:\d+ .*call model\.train\(\)")  # fmt: skip
def checkpointing_in_eval_mode(faulty: bool) -> None:
    model = Checkpointed().cuda().train(not faulty)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        step(optimizer, model(batch()).pow(2).mean())


@pair(
    "fail", r"list 'kept' in \w+ \(\d+ -> \d+ tensors\) keeps tensors of past steps.*kept\.append"
)
def models_of_past_trials(faulty: bool) -> None:
    kept = []
    for _ in range(5):
        model = stack()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            step(optimizer, model(batch()).pow(2).mean())
        if faulty:
            kept.append((model, optimizer))


@pair("fail", r"graph behind variable 'model\.total' in \w+ grows.*model\.total = model\.total \+")
def a_sum_on_a_module_of_torch(faulty: bool) -> None:
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.total = 0.0
    for _ in range(6):
        loss = model(batch(64)).pow(2).mean()
        step(optimizer, loss)
        model.total = model.total + (loss if faulty else loss.detach())


class Rows(torch.utils.data.Dataset[Tensor]):
    def __init__(self, caches: bool) -> None:
        self.caches, self.seen = caches, dict[int, Tensor]()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        row = torch.randn(256, WIDE, device="cuda")
        if self.caches:
            self.seen[index] = row
        return row


@pair("fail", r"dict 'seen' of a Rows \(\d+ -> \d+ tensors\) keeps tensors of past steps"
      r".*__getitem__: self\.seen\[index\] = row")  # fmt: skip
def a_dataset_that_nobody_names(faulty: bool) -> None:
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in torch.utils.data.DataLoader(Rows(faulty), batch_size=4):
        step(optimizer, model(x).pow(2).mean())


@pytest.mark.parametrize("name", PAIRS)
def test_the_fault_is_named(name: str) -> None:
    loop, severity, says = PAIRS[name]
    told = [f.text() for f in memory_findings(lambda: loop(True)) if f.severity == severity]
    assert any(re.search(says, text, re.S) for text in told), told


@pytest.mark.parametrize("name", PAIRS)
def test_its_twin_is_healthy(name: str) -> None:
    assert memory_findings(lambda: PAIRS[name][0](False)) == ()

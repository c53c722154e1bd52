"""Running a training body under the watch as the plugin's numerics pass does, in one process."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from pytest_vram.bills import settle
from pytest_vram.findings import Finding
from pytest_vram.numerics import CpuStandIn, Watch
from pytest_vram.numerics.memory_causes import judge
from pytest_vram.numerics.memory_watch import MemoryWatch
from pytest_vram.observe import Observer
from pytest_vram.sim import Simulation, find_profile


@dataclass
class Budget:
    """The part of a marker's budget that the watch reads."""

    warmup: int = 1
    steps: int = 3
    skipped_steps: int | None = None
    trainable: str | None = None


@dataclass
class Health:
    findings: tuple[Finding, ...]
    watch: Watch
    error: BaseException | None = None

    def of(self, kind: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind]

    @property
    def failing(self) -> list[str]:
        return [f.text() for f in self.findings if f.severity in ("fail", "warn")]

    def text(self) -> str:
        return "\n".join(finding.text() for finding in self.findings)


def health(
    body: Callable[[], object], budget: Budget | None = None, *, replay: bool = True
) -> Health:
    """Findings of ``body``, which may raise: once for real and, where the watch asks for it, once
    more to name the operator."""
    watch, error = _once(body, Watch())
    again = None
    if replay and watch.needs_replay(budget):
        again, _ = _once(body, Watch(diagnose=True))
    return Health(watch.findings(budget or Budget(), again), watch, error)


def _once(body: Callable[[], object], watch: Watch) -> tuple[Watch, BaseException | None]:
    random.seed(0)
    torch.manual_seed(0)
    error = None
    with CpuStandIn(), watch:
        try:
            body()
        except Exception as raised:  # what the loop raises is its own affair
            error = raised
    return watch, error


def memory_findings(body: Callable[[], object]) -> tuple[Finding, ...]:
    """What is wrong with the memory of ``body`` on a simulated A100."""
    gc.collect()
    torch.manual_seed(0)
    simulation = Simulation(find_profile("a100-80gb"), alloc_conf="")
    observer, watch = Observer(simulation), MemoryWatch(simulation.allocation_of)
    with simulation, observer, watch:
        body()
    trace = settle(observer.renumber(simulation.trace()))
    return judge(trace, watch.observed, attention=simulation.attention)


def sentences(findings: Sequence[Finding]) -> list[str]:
    return [finding.sentence for finding in findings]


# ---- what many loops are made of


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers[:-1]).cuda()


def batch(rows: int = 8, width: int = 16) -> Tensor:
    return torch.randn(rows, width, device="cuda")


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.01)

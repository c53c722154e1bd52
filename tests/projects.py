"""A small project whose tests are run by pytest with the plugin, as a user would."""

from __future__ import annotations

import re
from pathlib import Path

import deepdiff  # noqa: F401
import pytest
import torch._dynamo  # noqa: F401

# pytester forgets what was imported during a run, but torch cannot be imported twice in a process:
# everything that an inner run imports late is imported here.
import pytest_vram.numerics
import pytest_vram.passes
import pytest_vram.reports.terminal
import pytest_vram.run
import pytest_vram.sim.simulation  # noqa: F401

#: What most test files begin with: one small model and its training.
PRELUDE = """
import pytest, torch
from torch import nn
from torch.nn import functional as F

def build(device, width=64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
    x, y = torch.randn(16, width, device=device), torch.arange(16, device=device) % 8
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, lambda: F.cross_entropy(model(x), y)

def loop(device, width=64, steps=4):
    model, optimizer, loss_fn = build(device, width)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
"""


#: Hypothesis imports all of itself at the end of every run; pytest-randomly shuffles the tests.
_WITHOUT = ("-p", "no:hypothesispytest", "-p", "no:randomly")


class Project:
    """Writes test files and runs pytest on them in this process."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.path: Path = pytester.path
        pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
        self.ini("\n")

    def write(self, source: str, name: str = "test_a.py") -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PRELUDE + source)
        return path

    def ini(self, text: str) -> None:
        with (self.path / "tox.ini").open("a") as file:
            file.write(text)

    def run(self, *args: str, cpu: bool = False) -> pytest.RunResult:
        """``cpu``: numbers are checked too; most tests here are about memory alone."""
        numerics = [] if cpu else ["--vram-numerics=off"]
        return self.pytester.runpytest_inprocess(*_WITHOUT, *numerics, *args)

    def subprocess(self, *args: str) -> pytest.RunResult:
        return self.pytester.runpytest_subprocess(*_WITHOUT, "--vram-numerics=off", *args)

    @property
    def baseline(self) -> str:
        return (self.path / "vram_baselines/test_a.yaml").read_text()

    def edit_baseline(self, pattern: str, new: str) -> None:
        text, count = re.subn(pattern, new, self.baseline)
        assert count, f"{pattern} is not in the baseline"
        (self.path / "vram_baselines/test_a.yaml").write_text(text)


def outcomes(result: pytest.RunResult) -> dict[str, int]:
    return {
        name: count
        for name, count in result.parseoutcomes().items()
        if name not in ("warnings", "warning")
    }

"""Whole numbers as devices: they name the card in every build of PyTorch."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from pytest_vram.sim.profiles import find_profile  # noqa: E402
from pytest_vram.sim.simulation import Simulation  # noqa: E402


@pytest.fixture
def simulation():
    with Simulation(find_profile("t4")) as made:
        yield made


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(2, 2).to(0).weight,
        lambda: nn.Linear(2, 2).to(device=0, dtype=torch.half).weight,
        lambda: nn.Linear(2, 2).cuda(0).weight,
        lambda: nn.Linear(2, 2, device=0).weight,
        lambda: torch.ones(2).to(0),
        lambda: torch.ones(2).to(0, torch.half),
        lambda: torch.ones(2).cuda(0),
        lambda: torch.zeros(2, device=0),
        lambda: torch.randint(0, 3, (2,), device=0),
        lambda: torch.tensor([1.0], device=0),
        lambda: torch.zeros_like(torch.ones(2), device=0),
        lambda: torch.ones(2).new_zeros(3, device=0),
        lambda: torch.ones(2, device=torch.device(0)),
    ],
)
def test_an_ordinal_is_the_card(simulation, make):
    assert make().device == torch.device("cuda", 0)


def test_devices_stay_devices(simulation):
    device = torch.device("cuda", 0)
    assert isinstance(device, torch.device)
    assert pickle.loads(pickle.dumps(device)) == copy.deepcopy(device) == device
    with torch.device(0):
        assert torch.ones(2).is_cuda


def test_scripted_functions_find_their_factories(simulation):
    def shifted(x: torch.Tensor):
        return x + torch.zeros(2, device=x.device)

    assert torch.jit.script(shifted)(torch.ones(2, device=0)).is_cuda


def test_everything_comes_back():
    before = (torch.zeros, torch.device, torch.Tensor.to)
    with Simulation(find_profile("t4")):
        pass
    assert (torch.zeros, torch.device, torch.Tensor.to) == before

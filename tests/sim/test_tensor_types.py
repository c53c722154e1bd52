"""``torch.cuda.FloatTensor`` and its kin, as programs of PyTorch 0.3 use them, in every build."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from torch import nn  # noqa: E402

from pytest_vram.numerics import CpuStandIn  # noqa: E402
from pytest_vram.sim.profiles import find_profile  # noqa: E402
from pytest_vram.sim.simulation import Simulation  # noqa: E402

CARD = torch.device("cuda", 0)


@pytest.fixture(params=["simulated", "on the CPU"])
def card(request):
    made = Simulation(find_profile("t4")) if request.param == "simulated" else CpuStandIn()
    with made:
        yield made


@pytest.mark.parametrize(
    ("make", "shape", "dtype"),
    [
        (lambda: torch.cuda.FloatTensor(3, 4), (3, 4), torch.float32),
        (lambda: torch.cuda.FloatTensor(), (0,), torch.float32),
        (lambda: torch.cuda.FloatTensor([1.0, 2.0]), (2,), torch.float32),
        (lambda: torch.cuda.FloatTensor(torch.Size([2, 1])), (2, 1), torch.float32),
        (lambda: torch.cuda.FloatTensor(numpy.ones((2, 3))), (2, 3), torch.float32),
        (lambda: torch.cuda.FloatTensor(2, 1).fill_(1.0), (2, 1), torch.float32),
        (lambda: torch.cuda.LongTensor(numpy.arange(5)), (5,), torch.int64),
        (lambda: torch.cuda.ByteTensor(2), (2,), torch.uint8),
        (lambda: torch.ones(3).type(torch.cuda.FloatTensor), (3,), torch.float32),
        (lambda: torch.ones(3).type(dtype=torch.cuda.HalfTensor), (3,), torch.float16),
        (lambda: torch.ones(3).type("torch.cuda.DoubleTensor"), (3,), torch.float64),
        (lambda: torch.cuda.FloatTensor(3).type(torch.cuda.HalfTensor), (3,), torch.float16),
        (lambda: torch.cuda.FloatTensor(3).type(torch.float64), (3,), torch.float64),
        (lambda: torch.ones(3).type(torch.ones(1).cuda().type()), (3,), torch.float32),
        (lambda: nn.Linear(3, 2).type(torch.cuda.HalfTensor).weight, (2, 3), torch.float16),
    ],
)
def test_they_make_tensors_of_the_card(card, make, shape, dtype):
    made = make()
    assert (tuple(made.shape), made.dtype, made.device) == (shape, dtype, CARD)
    assert made.is_cuda


def test_tensors_know_their_type(card):
    there = torch.cuda.FloatTensor(3)
    assert there.type() == "torch.cuda.FloatTensor"
    assert there.half().type() == "torch.cuda.HalfTensor"
    assert there.cpu().type() == torch.ones(1).type() == "torch.FloatTensor"
    assert isinstance(there, torch.cuda.FloatTensor)
    assert not isinstance(there, torch.cuda.HalfTensor)
    assert not isinstance(there.cpu(), torch.cuda.FloatTensor)
    assert torch.cuda.FloatTensor.dtype is torch.float32


def test_back_to_the_host(card):
    there = torch.cuda.FloatTensor(3)
    assert there.type(torch.FloatTensor).device == torch.device("cpu")
    assert there.type("torch.LongTensor").dtype is torch.int64
    assert there.is_cuda


def test_they_take_their_bytes():
    with Simulation(find_profile("t4")) as simulation:
        kept = torch.cuda.FloatTensor(1000, 1000)
        assert kept.nelement() == 1_000_000
        assert simulation.allocator.allocated == 4_000_256
        half = kept.type(torch.cuda.HalfTensor)
        assert half.nelement() == 1_000_000
        assert simulation.allocator.allocated == 4_000_256 + 2_000_384


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_as_the_default_they_decide_where_tensors_are_made(card):
    torch.set_default_tensor_type(torch.cuda.DoubleTensor)
    assert torch.zeros(2).device == CARD
    assert nn.Linear(2, 2).weight.dtype is torch.float64
    torch.set_default_tensor_type("torch.FloatTensor")
    assert torch.zeros(2).device == torch.device("cpu")
    assert torch.zeros(2).dtype is torch.float32


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
@pytest.mark.parametrize("put", ["set_default_tensor_type", "set_default_device"])
@pytest.mark.parametrize("kind", [lambda: Simulation(find_profile("t4")), CpuStandIn])
def test_a_default_card_is_gone_with_its_pass(kind, put):
    value = {"set_default_tensor_type": "torch.cuda.HalfTensor", "set_default_device": "cuda"}[put]
    with kind():
        getattr(torch, put)(value)
        assert torch.zeros(1).is_cuda
    assert torch.zeros(1).device == torch.device("cpu")
    assert torch.zeros(1).dtype is torch.float32


def test_the_users_own_default_stays():
    torch.set_default_device("meta")
    try:
        with Simulation(find_profile("t4")):
            torch.set_default_device("cuda")
        assert torch.get_default_device() == torch.device("meta")
    finally:
        torch.set_default_device(None)

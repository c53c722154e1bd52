"""Models saved and loaded inside a simulation."""

from __future__ import annotations

import io

import pytest

torch = pytest.importorskip("torch")

from pytest_vram.sim.profiles import find_profile  # noqa: E402
from pytest_vram.sim.simulation import Simulation  # noqa: E402

T4 = find_profile("t4")


@pytest.fixture
def simulation():
    with Simulation(T4) as made:
        yield made


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize(
    ("where", "device"),
    [
        (None, "cuda"),  # where it was
        ("cuda", "cuda"),
        ("cpu", "cpu"),
        ({"cuda:0": "cuda:0"}, "cuda"),
        ({"cuda:0": "cpu"}, "cpu"),
        (lambda storage, location: storage, "cpu"),
        (lambda storage, location: storage.cuda(0), "cuda"),
        (lambda storage, location: None, "cuda"),
    ],
)
def test_tensors_load_where_they_were_or_are_sent(simulation, where, device):
    model = torch.nn.Linear(1024, 1024).cuda()
    before = torch.cuda.memory_allocated()
    found = torch.load(saved(model.state_dict()), map_location=where)
    assert {tensor.device.type for tensor in found.values()} == {device}
    taken = torch.cuda.memory_allocated() - before
    assert taken == (before if device == "cuda" else 0)


def test_a_whole_module_comes_back_to_the_card(simulation):
    model = torch.load(saved(torch.nn.Linear(8, 8).cuda()), weights_only=False)
    assert model.weight.is_cuda
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    assert model.weight.grad.is_cuda


def test_host_tensors_keep_their_values(simulation):
    found = torch.load(saved({"host": torch.arange(5), "card": torch.arange(5).cuda()}))
    assert not found["host"].is_cuda
    assert found["host"].tolist() == found["card"].tolist() == [0, 1, 2, 3, 4]


def test_views_of_one_storage_share_it_on_the_card(simulation):
    whole = torch.zeros(1 << 20)
    file = saved([whole[: 1 << 19], whole[1 << 19 :]])
    before = torch.cuda.memory_allocated()
    found = torch.load(file, map_location="cuda")
    assert [tensor.shape[0] for tensor in found] == [1 << 19, 1 << 19]
    assert torch.cuda.memory_allocated() - before == 4 << 20


def test_safetensors_are_written(simulation, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    safetensors.save_file({"w": torch.ones(4, 4, device="cuda").t().contiguous()}, path)
    assert safetensors.load_file(path)["w"].shape == (4, 4)


def test_scalars_are_formatted(simulation):
    assert f"{torch.tensor(1.5).cuda():8.3f}" == "   1.500"
    assert f"{torch.tensor(7).cuda():d}" == "7"
    assert "size=(2,)" in f"{torch.ones(2).cuda()}"

"""``meta``, where programs build models that they load later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_vram.sim import Simulation

META = torch.device("meta")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, device="meta"),
        lambda: torch.tensor([1.0], device=META),
        lambda: torch.ones(3).to("meta"),
        lambda: torch.ones(3).to(device="meta", dtype=torch.half),
        lambda: torch.ones(3).new_zeros(2, device="meta"),
        lambda: torch.zeros_like(torch.ones(3), device="meta"),
        lambda: nn.Linear(3, 2, device="meta").weight,
        lambda: nn.Linear(3, 2).to("meta").weight,
    ],
)
def test_what_python_puts_on_meta_takes_nothing(gpu: Simulation, make) -> None:
    made = make()
    assert made.device == META
    assert gpu.allocator.peak_allocated == 0


def test_a_model_that_is_built_on_meta_and_loaded_takes_its_parameters_once(
    gpu: Simulation,
) -> None:
    with torch.device("meta"):
        model = nn.Linear(1024, 1024, bias=False)
        nn.init.normal_(model.weight)
        assert torch.empty(3).device == META
    assert torch.empty(3).device == torch.device("cpu")
    loaded = torch.ones(1024, 1024)
    model.weight = nn.Parameter(loaded.to("cuda"))
    assert gpu.allocator.peak_allocated == 4 << 20
    model(torch.ones(1, 1024, device="cuda")).sum().backward()
    assert model.weight.grad is not None


def test_empty_shells_are_filled_on_the_card(gpu: Simulation) -> None:
    model = nn.Linear(1024, 1024, bias=False, device="meta").to_empty(device="cuda")
    assert model.weight.is_cuda
    assert gpu.allocator.peak_allocated == 4 << 20


def test_from_the_card_to_meta(gpu: Simulation) -> None:
    there = torch.ones(1024, 1024, device="cuda")
    for made in (there.to("meta"), torch.empty_like(there, device="meta")):
        assert (made.device, made.shape) == (META, there.shape)
    assert gpu.allocator.peak_allocated == 4 << 20


def test_what_autograd_makes_beside_simulated_tensors_is_on_the_card(gpu: Simulation) -> None:
    """C++ says ``meta`` where it means the card."""
    x = torch.ones(4, 4, device="cuda", requires_grad=True)
    first, _ = x.split(2)
    first.sum().backward()
    assert x.grad is not None
    assert x.grad.is_cuda


def test_a_pretrained_model_is_loaded_once(gpu: Simulation, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=500, n_embd=64, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    gpu.reset("peak")
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert gpu.allocator.peak_allocated == 0
    model.to("cuda")
    alone = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert alone <= gpu.allocator.peak_allocated < 1.2 * alone

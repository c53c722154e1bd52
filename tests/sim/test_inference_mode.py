"""Inference mode: composites taken apart, views of ordinary tensors, autocast without its cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from pytest_vram.sim import Simulation, find_profile

MIB = 1 << 20
WORKSPACE = 8_519_680


@pytest.fixture
def gpu() -> Iterator[Simulation]:
    with Simulation(find_profile("a100-80gb")) as simulation:
        yield simulation


def test_einsum_takes_the_workspace_of_its_product(gpu: Simulation) -> None:
    left = torch.empty(4, 512, 512, device="cuda")
    right = torch.empty(512, 512, device="cuda")
    with torch.inference_mode():
        result = torch.einsum("bij,kj->bik", left, right)
    assert torch.cuda.memory_allocated() == (4 + 1 + 4) * MIB + WORKSPACE
    assert "aten::bmm" in {a.operator for a in gpu.trace().allocations}
    assert result.is_inference()


def test_where_with_a_number_makes_that_number(gpu: Simulation) -> None:
    mask = torch.ones(512, 512, dtype=torch.bool, device="cuda")
    values = torch.empty(512, 512, device="cuda")
    with torch.inference_mode():
        torch.where(mask, values, float("-inf"))
    assert [a.requested for a in gpu.trace().allocations][2:] == [4, MIB]


def test_views_of_ordinary_tensors_stay_ordinary(gpu: Simulation) -> None:
    table = torch.ones(2, 16, 8, device="cuda")
    with torch.inference_mode():
        for _ in range(2):  # the second time from the remembered recipe
            first, second = table[:, :4, :].unbind(0)
            product = first * second
            assert not first.is_inference()
            assert product.is_inference()
            assert product[:2].is_inference()


def test_weight_casts_live_for_one_call_since_2_11(gpu: Simulation) -> None:
    layer = nn.Linear(1024, 1024, bias=False, device="cuda")
    batch = torch.empty(1024, 1024, device="cuda")
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        layer(batch)
        kept = torch.cuda.memory_allocated() - 8 * MIB - WORKSPACE
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert kept == (0 if version >= (2, 11) else 2 * MIB)


def test_casts_made_without_gradients_serve_gradients_since_2_11(gpu: Simulation) -> None:
    layer = nn.Linear(1024, 1024, bias=False, device="cuda")
    batch = torch.empty(1024, 1024, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        with torch.no_grad():
            layer(batch)
        made = len(gpu.trace().allocations)
        output = layer(batch)
    operators = [a.operator for a in gpu.trace().allocations[made:]]
    assert operators == ["aten::_to_copy", "aten::mm"]  # the batch's cast, not the weight's again
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert output.requires_grad == (version >= (2, 11))


def test_parts_of_a_composite_follow_autocast(gpu: Simulation) -> None:
    logits = torch.empty(1024, 1024, dtype=torch.bfloat16, device="cuda")
    labels = torch.zeros(1024, dtype=torch.long, device="cuda")
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(logits * 1, labels)
    assert loss.dtype is torch.float32  # nll_loss is on the fp32 list
    assert 4 * MIB in [a.requested for a in gpu.trace().allocations]


def test_a_linear_layer_folds_a_transposed_batch(gpu: Simulation) -> None:
    layer = nn.Linear(512, 512, device="cuda")
    batch = torch.empty(4, 512, 128, device="cuda")
    with torch.inference_mode():
        layer(batch.transpose(1, 2))
    made = [a for a in gpu.trace().allocations if a.requested == MIB]
    # matmul folds since the weight requires a gradient, so the batch is copied: batch, copy, result
    assert [a.operator for a in made[1:]] == ["aten::empty", "aten::clone", "aten::mm"]

"""What PyTorch does with tensors on a card where it would do something else with simulated ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pytest_vram.sim import Simulation, find_profile


def _events(run: Any) -> list[tuple[str, int]]:
    with Simulation(find_profile("a100-80gb")) as gpu:
        begin = run()
        trace = gpu.trace()
        del begin
    return [
        (event.kind, trace.allocations[event.index].requested)
        for event in trace.events
        if event.kind in ("alloc", "free")
    ]


def test_lists_as_indices_stay_with_autograd_and_host_tensors_do_not() -> None:
    """Events of PyTorch 2.14.1: a list becomes a tensor on the card before autograd sees it; a host
    tensor is moved by the kernel and given back."""
    source = 5 * 6 * 4
    kept = _events(lambda: torch.zeros(5, 6, device="cuda", requires_grad=True)[[1, 2, 3]])
    assert kept[:3] == [("alloc", source), ("alloc", 24), ("alloc", 72)]
    moved = _events(lambda: torch.zeros(5, 6, device="cuda")[torch.tensor([1, 2])])
    assert moved[:4] == [("alloc", source), ("alloc", 16), ("alloc", 48), ("free", 16)]


def test_one_hot_scatters_into_zeros() -> None:
    labels = torch.tensor([0, 2, 1])
    found = _events(lambda: torch.nn.functional.one_hot(labels.cuda(), 4))
    assert found[:2] == [("alloc", 24), ("alloc", 96)]
    assert all(kind == "free" for kind, _ in found[2:])


def test_one_hot_without_classes_needs_values() -> None:
    from pytest_vram.sim.values import DataDependent

    with Simulation(find_profile("a100-80gb")):
        assert torch.nn.functional.one_hot(torch.tensor([0, 2]).cuda()).shape == (2, 3)
        unknown = torch.randint(0, 5, (4,), device="cuda")
        with pytest.raises(DataDependent, match="one_hot"):
            torch.nn.functional.one_hot(unknown)


def test_the_fast_path_of_encoder_layers_works_in_cublas_memory() -> None:
    """One operator in Python, and all of its matrix products inside: 8.1 MiB of workspace."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    with Simulation(find_profile("a100-80gb")) as gpu:
        layer.cuda().eval()
        with torch.no_grad():
            out = layer(torch.randn(4, 20, 64, device="cuda"))
        names = [allocation.name for allocation in gpu.trace().allocations]
    assert out.shape == (4, 20, 64)
    assert "cublas workspace (main thread)" in names


def test_mean_scatter_counts_what_it_adds() -> None:
    def run() -> torch.Tensor:
        zeros = torch.zeros(5, 6, device="cuda")
        index = torch.zeros(3, 6, dtype=torch.long, device="cuda")
        return zeros.scatter_reduce(0, index, torch.ones(3, 6, device="cuda"), "mean")

    found = _events(run)
    tail = [("alloc", 72), ("alloc", 120), ("alloc", 30), ("free", 30), ("free", 120), ("free", 72)]
    assert any(found[i : i + 6] == tail for i in range(len(found)))


def test_an_older_card_is_asked_once_to_hold_a_bfloat16() -> None:
    """torch/cuda/__init__.py, ``_check_bf16_tensor_supported``; autocast asks as well."""
    with Simulation(find_profile("t4")) as gpu:
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                assert torch.cuda.is_bf16_supported()
        assert not torch.cuda.is_bf16_supported(including_emulation=False)
        assert [one.requested for one in gpu.trace().allocations] == [2]
        assert gpu.allocator.allocated == 0
    with Simulation(find_profile("a100-80gb")) as gpu:
        assert torch.cuda.is_bf16_supported(including_emulation=False)
        assert gpu.trace().allocations == []

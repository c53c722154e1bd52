"""The inference fast path of ``nn.MultiheadAttention``: what torch.nn never asks of it."""

from __future__ import annotations

import pytest
import torch

from pytest_vram.sim.simulation import Simulation
from pytest_vram.sim.values import NoSimulatedKernel


def test_attention_between_two_sequences_is_refused_by_name(gpu: Simulation) -> None:
    query, other = (torch.empty(2, 8, 16, device="cuda") for _ in range(2))
    weight, bias = torch.empty(48, 16, device="cuda"), torch.empty(48, device="cuda")
    out, out_bias = torch.empty(16, 16, device="cuda"), torch.empty(16, device="cuda")
    with torch.no_grad(), pytest.raises(NoSimulatedKernel, match="only simulated for self-attent"):
        torch._native_multi_head_attention(query, other, other, 16, 2, weight, bias, out, out_bias)

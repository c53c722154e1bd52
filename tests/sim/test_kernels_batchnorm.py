"""Batch norm: scratch and choice against what PyTorch 2.6.0 and 2.14.1 did on stand-in devices."""

from __future__ import annotations

import pytest
import torch
from kernel_answers import differences

from pytest_vram.sim import Simulation, find_profile
from pytest_vram.sim.kernels.batchnorm import reserve_bounds, uses_cudnn


def test_every_recorded_call_is_reproduced_event_by_event() -> None:
    assert differences("batchnorm") == []


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("source", "weight", "running", "training", "cudnn"),
    [
        (tensor(4, 8, 9, 9), tensor(8), tensor(8), True, True),
        (tensor(4, 8, 9, 9), tensor(8), tensor(8), False, True),
        (tensor(4, 8, 9, 9, dtype=HALF), tensor(8), tensor(8), True, True),
        (tensor(4, 8, 9, 9, dtype=HALF), tensor(8, dtype=HALF), tensor(8), True, False),
        (tensor(4, 8, 9, 9, dtype=BRAIN), tensor(8), tensor(8), True, False),
        (tensor(4, 8), tensor(8), tensor(8), True, False),
        (tensor(4, 8, 9, 9), None, tensor(8), True, False),
        (tensor(4, 8, 9, 9), tensor(8), None, True, True),
        (tensor(4, 8, 9, 9), tensor(8), None, False, False),
        (tensor(70000, 8, 1, 1), tensor(8), tensor(8), False, False),
        (tensor(70000, 8, 1, 1), tensor(8), tensor(8), True, True),
    ],
)
def test_choice(
    source: torch.Tensor, weight: torch.Tensor | None, running: torch.Tensor | None,
    training: bool, cudnn: bool,
) -> None:  # fmt: skip
    got = uses_cudnn(source, weight, weight, running, running, training, 1e-5, True)
    assert got is cudnn
    assert not uses_cudnn(source, weight, weight, running, running, training, 1e-5, False)


def test_only_channels_last_halves_may_need_a_workspace() -> None:
    plain = tensor(4, 8, 16, 16, dtype=HALF)
    assert reserve_bounds(plain) == (0, 0)
    assert reserve_bounds(plain.to(memory_format=torch.channels_last)) == (0, 2 * 4 * 8 * 1024)


def test_a_gradient_that_nobody_wants_is_not_made() -> None:
    """``batch_norm_backward_cuda`` (Normalization.cu): the input's, by its mask."""
    with Simulation(find_profile("a100-80gb")) as gpu, torch.backends.cudnn.flags(enabled=False):
        norm = torch.nn.BatchNorm1d(1).to("cuda")
        loss = norm(torch.empty(64, 1, 4096, device="cuda")).sum()
        before = len(gpu.trace().allocations)
        loss.backward()
        made = gpu.trace().allocations[before:]
    sizes = [a.requested for a in made if a.operator == "aten::native_batch_norm_backward"]
    assert sizes == [4, 4]  # of weight and bias


@pytest.mark.parametrize("wanted", [False, True])
def test_a_gradient_whose_features_lie_in_no_row_is_copied(wanted: bool) -> None:
    """``grad_out.reshape({batch, channels, -1})`` in both kernels for any layout
    (``batch_norm_backward_cuda_template``, ``..._reduce_cuda_template``, Normalization.cuh, v2.6.0
    and v2.14.1); the input's gradient is contiguous, so that its leaf keeps it as it is."""
    with Simulation(find_profile("a100-80gb")) as gpu, torch.backends.cudnn.flags(enabled=False):
        norm = torch.nn.BatchNorm2d(2).to("cuda")
        source = torch.empty(4, 2, 8, 16, device="cuda", requires_grad=wanted)
        shuffled = torch.empty(16, 2, 8, 4, device="cuda").transpose(0, 3)
        result = norm(source)
        before = len(gpu.trace().allocations)
        result.backward(shuffled)
        made = gpu.trace().allocations[before:]
    whole = 4 * 4 * 2 * 8 * 16
    results = [whole, 8, 8] if wanted else [8, 8]
    assert [a.requested for a in made] == [whole, *results]

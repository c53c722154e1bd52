"""The gradient of a view whose memory was written in place: the blocks of ``as_strided_backward``.

Each list is what PyTorch 2.14.1's CUDA build requests for the same lines on the stub driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_vram.sim import Simulation, find_profile

MIB = 1 << 20


@pytest.fixture
def gpu() -> Iterator[Simulation]:
    with Simulation(find_profile("a100-80gb")) as simulation:
        yield simulation


def _requests(gpu: Simulation, run: Callable[[], object]) -> list[int]:
    """MiB of every block of at least 1 MiB that ``run`` takes (+) and gives back (-)."""
    before = len(gpu.trace().events)
    run()
    trace = gpu.trace()
    return [
        trace.allocations[event.index].requested // MIB * (1 if event.kind == "alloc" else -1)
        for event in trace.events[before:]
        if event.kind in ("alloc", "free") and trace.allocations[event.index].requested >= MIB
    ]


def test_an_activation_in_place_behind_a_linear_layer_of_three_dimensions(gpu: Simulation) -> None:
    layer = nn.Linear(512, 1024, device="cuda")
    weight = torch.ones(4, 512, 1024, device="cuda", requires_grad=True)  # 8 MiB
    hidden = F.relu_(layer(torch.ones(4, 512, 512, device="cuda")))  # a view, written
    loss = (hidden * weight).sum()
    assert _requests(gpu, loss.backward) == [
        8, 8, 8, -8, 8, 8, 8, -8, -8, -8, 2, 8, 16, -16, -8, -4,
    ]  # fmt: skip


def test_a_view_of_views_is_one_node(gpu: Simulation) -> None:
    whole = torch.ones(1024, 1024, device="cuda", requires_grad=True) * 1  # 4 MiB
    part = whole[:512].view(2, 256, 1024)[1].t()[::2]
    part.mul_(2.0)
    loss = part.sin().sum()
    del whole
    assert _requests(gpu, loss.backward) == [4, 4, -4, 4, -4]


def test_views_made_before_the_write_count_too(gpu: Simulation) -> None:
    whole = torch.ones(1024, 1024, device="cuda", requires_grad=True) * 1
    half = whole[512:]
    whole.mul_(2.0)
    loss = half.sin().sum()
    assert _requests(gpu, loss.backward) == [2, 2, -2, 4, -2, 4, -4, 4, -4]


def test_views_made_after_the_write_do_not(gpu: Simulation) -> None:
    whole = torch.ones(1024, 1024, device="cuda", requires_grad=True) * 1
    whole.mul_(2.0)
    half = whole.view(1 << 20)
    loss = half.sin().sum()
    assert _requests(gpu, loss.backward) == [4, 4, -4, 4, -4, 4, -4]


def test_an_expanded_view_sums_its_gradient_first(gpu: Simulation) -> None:
    row = torch.ones(1, 1024, 256, device="cuda", requires_grad=True) * 1
    rows = row.expand(4, 1024, 256)
    row.mul_(3.0)
    loss = (rows * torch.ones(4, 1024, 256, device="cuda")).sum()
    assert _requests(gpu, loss.backward) == [4, -4, 1, 1, -1, -4, 1, -1, 1, -1]


def test_backward_through_backward(gpu: Simulation) -> None:
    leaf = torch.ones(1024, 1024, device="cuda", requires_grad=True)
    part = (leaf * 1).view(-1)
    part.exp_()
    loss = part.sin().sum()
    assert _requests(gpu, lambda: torch.autograd.grad(loss, leaf, create_graph=True)) == [
        4, 4, -4, 4, -4, 4, 4, 4, -4, -4, 4, -4, -4, -4,
    ]  # fmt: skip


def test_complex_numbers_seen_as_real_ones_keep_their_view(gpu: Simulation) -> None:
    pairs = torch.ones(512, 256, 2, device="cuda", requires_grad=True) * 1
    numbers = torch.view_as_complex(pairs)
    numbers.mul_(2j)
    torch.view_as_real(numbers).square().sum().backward()  # refused where hooks change the dtype

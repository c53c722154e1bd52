"""What single operators take besides their results, where generated programs showed it missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pytest_vram.sim import Simulation
from pytest_vram.sim.shapes import swaps_operands

Run = Callable[[Callable[[], object]], list[int]]


@pytest.fixture
def taken(gpu: Simulation) -> Run:
    """Bytes of everything that a call takes, in order."""

    def run(call: Callable[[], object]) -> list[int]:
        before = len(gpu.trace().allocations)
        call()
        return [made.requested for made in gpu.trace().allocations[before:]]

    return run


def test_zeros_without_memory_cost_one_element_where_they_are_read(taken: Run) -> None:
    """BinaryOps.cpp (``add_zerotensor``) and ZeroTensorFallback.cpp of v2.14.1."""
    zeros = torch._efficientzerotensor((256, 8), device="cuda")
    full = torch.empty(256, 8, device="cuda")
    assert taken(lambda: zeros.view(-1)) == []
    assert taken(lambda: full * zeros) == [4]
    assert taken(lambda: full + zeros) == [4, 8192]
    assert taken(lambda: zeros - full) == [4, 8192, 8192]
    assert taken(lambda: zeros + 2) == [4, 8192]
    assert taken(lambda: full / zeros) == [4, 8192]
    assert taken(lambda: zeros.sum(0)) == [4, 32]
    assert taken(zeros.clone) == [8192]
    assert taken(lambda: (zeros * 2).neg()) == [4, 4, 8192]


def test_what_lies_in_no_row_is_staged_on_its_way_to_the_host(taken: Run) -> None:
    """``copy_kernel_cuda`` (native/cuda/Copy.cu, v2.6.0 and v2.14.1): a contiguous source first; a
    copy that does not block converts on the card."""
    source = torch.empty(64, 32, device="cuda")
    half = source[:, ::2]
    assert taken(source.cpu) == taken(source.t().cpu) == []
    assert taken(half.cpu) == [4096]
    assert taken(lambda: torch.empty(64, 16).copy_(half)) == [4096]
    assert taken(lambda: half.to("cpu", torch.float64)) == [4096]
    assert taken(lambda: half.to("cpu", torch.float64, non_blocking=True)) == [8192]
    assert taken(lambda: source.t().to("cpu", torch.float64, non_blocking=True)) == [16384] * 2
    assert half.cpu().stride() == (16, 1)


def test_the_norm_of_single_elements_is_an_absolute_value(taken: Run) -> None:
    """``is_reduce_over_1D_vector`` in LinearAlgebra.cpp; figures: PyTorch 2.14.1 on a stand-in."""
    norm, brain = torch.linalg.vector_norm, torch.bfloat16
    half = torch.empty(4, 1, 16, 33, dtype=brain, device="cuda")
    assert taken(lambda: norm(half, dim=1)) == [4224]
    assert taken(lambda: norm(half, dim=1, dtype=torch.float32)) == [8448, 8448]
    assert taken(lambda: norm(half, dim=0, dtype=torch.float32)) == [2112]
    number = torch.empty(1, 5000, dtype=torch.complex64, device="cuda")
    assert taken(lambda: norm(number, dim=0)) == [20000, 40000]
    assert taken(lambda: norm(number, 0, dim=0)) == [20000]
    assert taken(lambda: norm(number, dim=0, dtype=torch.complex128)) == [40000, 80000, 80000]
    assert taken(lambda: norm(number, dim=1, dtype=torch.complex128)) == [8, 80000]


def test_a_product_over_samples_copies_the_narrow_operand(taken: Run) -> None:
    """``sumproduct_pair`` of Linear.cpp swaps its operands (in 2.6.0 not yet), and a batched
    product copies one that lies in steps. Nothing is summed in the first product."""
    first, second = (torch.empty(512, 16, device="cuda") for _ in range(2))
    third = torch.empty(512, 2, device="cuda")
    torch.mm(first.t(), second)  # the workspace
    turn = [4 * 512 * 16 * 16, 4 * 256, *([4 * 512] if swaps_operands() else [])]
    arguments = ([1, 3], [1, 2], [2, 3], [0])
    assert taken(lambda: torch._trilinear(first, second, third, *arguments)) == [2048, *turn, *turn]


def test_views_have_the_strides_of_c_plus_plus(gpu: Simulation) -> None:
    """``computeStride`` (ATen/TensorUtils.cpp): a dimension of size 1 steps over what follows."""
    products = torch.empty(1, 32, 1, device="cuda").view(4, 8, 1, 1, 1)
    assert products.permute(0, 3, 1, 4, 2).view(4, 1, 8, 1).stride() == (8, 8, 1, 1)
    for _ in range(2):  # found out, and remembered
        result = torch.einsum(
            "bhti,ik->bhtk",
            torch.empty(4, 1, 8, 8, device="cuda"),
            torch.empty(8, 1, device="cuda"),
        )
        assert result.stride() == (8, 8, 1, 1)

"""16-bit products of the CPU pass: their types, their rounding and what overflows."""

from __future__ import annotations

import pytest
import torch

from pytest_vram.numerics.half_products import ThroughFloat32, slow_types

HALF = frozenset({torch.float16})


def test_a_product_is_rounded_once() -> None:
    """4096 products of 1 x 1 and one of 2**-1 x 1: float16 sums would stop counting at 2048."""
    ones = torch.ones(1, 4097, dtype=torch.float16)
    ones[0, -1] = 0.5
    with ThroughFloat32(HALF):
        product = ones @ torch.ones(4097, 1, dtype=torch.float16)
    assert product.dtype is torch.float16
    assert product.item() == torch.tensor(4096.5).half().item()


def test_a_product_beyond_the_range_is_infinite() -> None:
    with ThroughFloat32(HALF):
        product = torch.full((1, 2), 200.0).half() @ torch.full((2, 1), 200.0).half()
    assert product.item() == float("inf")  # 80000 > 65504


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: torch.nn.functional.linear(x[0, 0], x[1, 0], x[0, 0, 0]),
        lambda x: torch.bmm(x[0], x[1]),
        lambda x: torch.baddbmm(x[0], x[0], x[1], beta=0.5, alpha=2),
        lambda x: torch.mv(x[0, 0], x[0, 0, 0]),
        lambda x: torch.conv2d(x, x[:, :, :3, :3], padding=1),
        lambda x: torch.conv_transpose2d(x, x[:, :, :3, :3]),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda x: torch.einsum("bchw,bcwk->bck", x, x),
    ],
)
def test_results_and_gradients_are_those_of_float32_in_half_types(operator) -> None:
    torch.manual_seed(3)
    x = torch.randn(4, 4, 8, 8, dtype=torch.float16, requires_grad=True)
    with ThroughFloat32(HALF):
        half = operator(x)
        half.float().sum().backward()
    assert x.grad is not None
    assert (half.dtype, x.grad.dtype) == (torch.float16, torch.float16)
    wide = x.detach().float().requires_grad_()
    exact = operator(wide)
    exact.sum().backward()
    torch.testing.assert_close(half.float(), exact, rtol=2e-3, atol=2e-2)
    torch.testing.assert_close(x.grad.float(), wide.grad, rtol=1e-2, atol=4e-2)


def test_other_types_are_left_alone() -> None:
    x = torch.randn(4, 4, dtype=torch.bfloat16)
    plain = x @ x
    with ThroughFloat32(HALF):
        assert torch.equal(x @ x, plain)


def test_the_host_is_asked() -> None:
    asked = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    assert (torch.float16 in slow_types()) is not asked


@pytest.mark.parametrize("foreach", [False, True])
def test_what_an_optimizer_changes_counts_as_changed(foreach: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=foreach)
    with ThroughFloat32(HALF):
        optimizer.step()
        optimizer.step()
    assert parameter._version == 2

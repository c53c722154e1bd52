"""Jagged nested tensors: wrappers in Python around simulated values and offsets.

The figures are those of PyTorch 2.14.1's CUDA build on the stub driver.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_vram.sim import Simulation, find_profile
from pytest_vram.sim.kernels.versions import INSTALLED


def _jagged(lengths: tuple[int, ...], width: int, **options: object) -> Tensor:
    parts = [torch.randn(length, width, device="cuda", **options) for length in lengths]  # type: ignore[arg-type]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, [count, x.shape[-1] // count]).transpose(1, 2)


def _block(m: nn.ModuleDict, x: Tensor, heads: int) -> Tensor:
    q, k, v = (_heads(part, heads) for part in m["q"](m["n"](x)).chunk(3, -1))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + m["o"](attended.transpose(1, 2).flatten(-2))
    return x + m["g"](F.gelu(m["f"](x)))


def _train(autocast: bool, width: int = 256) -> None:
    m = nn.ModuleDict(
        {
            "q": nn.Linear(width, 3 * width),
            "o": nn.Linear(width, width),
            "n": nn.LayerNorm(width),
            "f": nn.Linear(width, 4 * width),
            "g": nn.Linear(4 * width, width),
        }
    ).cuda()
    optimizer = torch.optim.AdamW(m.parameters())
    for _ in range(2):
        parts = [torch.randn(n, width, device="cuda") for n in (300, 170, 33, 80)]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = _block(m, x, 4).values().float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_it_lies_on_the_card() -> None:
    with Simulation(find_profile("a100-80gb")):
        x = _jagged((5, 9, 31), 64)
        assert (x.device, x.is_cuda, x.is_meta, x.get_device()) == (
            torch.device("cuda", 0), True, False, 0,
        )  # fmt: skip
        assert x.shape[0] == 3
        assert _heads(x, 4).shape[1] == 4


def test_offsets_shared_are_one_ragged_size() -> None:
    with Simulation(find_profile("a100-80gb")):
        x = _jagged((5, 9, 31), 64)
        again = torch.nested.nested_tensor_from_jagged(
            torch.randn(45, 64, device="cuda"), x.offsets()
        )
        assert (x + again).shape == x.shape
        with pytest.raises(RuntimeError, match="cannot call binary pointwise function"):
            x + _jagged((5, 9, 31), 64)


@pytest.mark.parametrize(("autocast", "peak"), [(True, 36_809_728), (False, 40_125_952)])
def test_a_transformer_block_trains(autocast: bool, peak: int) -> None:
    for _ in range(2):  # what PyTorch keeps of jagged tensors outlives no simulation
        with Simulation(find_profile("a100-80gb")) as gpu:
            _train(autocast)
            if INSTALLED >= (2, 11):
                assert gpu.allocator.peak_allocated == peak


def test_padding_it_goes_both_ways() -> None:
    with Simulation(find_profile("a100-80gb")) as gpu:
        x = _jagged((5, 9, 31), 64)
        torch.nested.to_padded_tensor(x, 0.0).sum().backward()
        assert gpu.allocator.peak_allocated == 36_864
        assert gpu.trace().bounds is None


@pytest.mark.parametrize(
    ("card", "dtype", "flash", "efficient"),
    [
        ("a100-80gb", torch.bfloat16, True, True),
        ("a100-80gb", torch.float32, False, True),
        ("t4", torch.float16, False, True),
        ("t4", torch.bfloat16, False, False),
    ],
)
def test_programs_may_ask_which_kernel_could_run(
    card: str, dtype: torch.dtype, flash: bool, efficient: bool
) -> None:
    from torch.backends.cuda import (
        SDPAParams,
        can_use_efficient_attention,
        can_use_flash_attention,
    )

    with Simulation(find_profile(card)):
        q = torch.ones(2, 4, 16, 32, dtype=dtype, device="cuda")
        params = SDPAParams(q, q, q, None, 0.0, False, False)
        assert can_use_flash_attention(params) is flash
        assert can_use_efficient_attention(params) is efficient
    assert can_use_flash_attention is torch.backends.cuda.can_use_flash_attention

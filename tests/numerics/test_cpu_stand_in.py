"""A test body written for CUDA runs on the CPU, and notices no difference that matters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_vram.numerics import CpuStandIn


@pytest.fixture
def gpu() -> Iterator[CpuStandIn]:
    with CpuStandIn() as stand_in:
        yield stand_in


@pytest.mark.usefixtures("gpu")
class TestDevices:
    def test_factories(self) -> None:
        for made in (
            torch.zeros(2, device="cuda"),
            torch.randn(2, device=torch.device("cuda", 0)),
            torch.arange(3, device="cuda:0"),
            torch.tensor([1.0], device="cuda"),
            torch.ones(2, device=0),
            torch.ones(2).cuda(),
            torch.ones(2).to("cuda"),
            torch.ones(2).to(device="cuda", dtype=torch.float16),
            torch.ones(2).to(torch.ones(1, device="cuda")),
            torch.empty_like(torch.ones(2, device="cuda")),
        ):
            assert made.device == torch.device("cuda", 0)
            assert made.is_cuda
            assert not made.is_cpu
            assert made.get_device() == 0
            assert made.untyped_storage().device.type == "cpu"

    def test_what_follows_from_gpu_tensors_is_on_the_gpu(self) -> None:
        x = torch.randn(4, 4, device="cuda", requires_grad=True)
        y = (x @ x).relu().sum()
        y.backward()
        assert y.is_cuda
        assert x.grad is not None
        assert x.grad.is_cuda
        assert all(part.is_cuda for part in x.split(2))

    def test_the_host_stays_the_host(self) -> None:
        x = torch.randn(3)
        assert x.device.type == "cpu"
        there = x.cuda()
        back = there.cpu()
        assert back.device.type == "cpu"
        back[0] = 7.0
        there[1] = 9.0
        assert 7.0 not in there.tolist()
        assert 9.0 not in x.tolist()
        assert there.cuda() is there
        assert x.to("cpu") is x

    def test_modules_move(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        assert model.cuda() is model
        assert {p.device.type for p in model.parameters()} == {"cuda"}
        assert all(buffer.is_cuda for buffer in model.buffers())
        assert all(p.is_leaf and type(p) is nn.Parameter for p in model.parameters())
        assert {p.device.type for p in model.cpu().parameters()} == {"cpu"}
        with torch.device("cuda"):
            assert nn.Linear(2, 2).weight.is_cuda

    def test_default_device(self) -> None:
        torch.set_default_device("cuda")
        try:
            assert torch.ones(2).is_cuda
            assert torch.get_default_device().type == "cuda"
        finally:
            torch.set_default_device(None)
        assert torch.ones(2).device.type == "cpu"

    def test_torch_cuda_answers(self) -> None:
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert torch.cuda.memory_allocated() == torch.cuda.max_memory_reserved() == 0
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
            torch.ones(2, device="cuda").record_stream(torch.cuda.current_stream())
        end.record()
        assert start.elapsed_time(end) >= 0

    def test_pinned_memory_and_random_state(self) -> None:
        assert torch.ones(2).pin_memory().device.type == "cpu"
        torch.cuda.manual_seed_all(3)
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())


@pytest.mark.usefixtures("gpu")
class TestAutocast:
    def test_follows_the_policy_of_cuda(self) -> None:
        x = torch.randn(4, 8, device="cuda")
        model = nn.Linear(8, 8).cuda()
        norm = nn.LayerNorm(8).cuda()
        with torch.autocast("cuda"):
            assert torch.is_autocast_enabled("cuda")
            assert torch.is_autocast_enabled()
            hidden = model(x)
            assert hidden.dtype is torch.float16
            assert norm(hidden).dtype is torch.float32
            assert hidden.softmax(-1).dtype is torch.float32
            assert F.mse_loss(hidden, hidden).dtype is torch.float32
            assert (hidden + 1).dtype is torch.float16
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert model(x).dtype is torch.bfloat16
            with torch.autocast("cuda", enabled=False):
                assert model(x).dtype is torch.float32
        assert not torch.is_autocast_enabled("cuda")

    def test_refuses_what_cuda_refuses(self) -> None:
        y = torch.rand(3, device="cuda")
        with torch.autocast("cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(y, torch.ones(3, device="cuda"))
        assert F.binary_cross_entropy(y, torch.ones(3, device="cuda")).isfinite()

    def test_casts_are_dropped_when_the_region_ends(self, gpu: CpuStandIn) -> None:
        model = nn.Linear(4, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        x = torch.ones(2, 4, device="cuda")
        losses = []
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x).float().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] != losses[1]

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_scalers_are_enabled(self) -> None:
        assert torch.amp.GradScaler("cuda").is_enabled()
        assert torch.cuda.amp.GradScaler().is_enabled()

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpointing_recomputes_under_the_same_autocast(self, reentrant: bool) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).cuda()
        x = torch.randn(2, 4, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.float16):
            out = checkpoint(model, x, use_reentrant=reentrant)
            assert out.dtype is torch.float16
        out.float().sum().backward()
        assert x.grad is not None


def test_everything_is_undone_also_after_an_error() -> None:
    names = ("is_available", "memory_allocated", "Stream", "current_stream", "synchronize")
    before = [getattr(torch.cuda, name) for name in names]
    functions = torch.is_autocast_enabled, torch.clear_autocast_cache, torch.set_default_device
    parameter_new = nn.Parameter.__new__
    with pytest.raises(ZeroDivisionError), CpuStandIn():
        raise ZeroDivisionError
    assert [getattr(torch.cuda, name) for name in names] == before
    now = torch.is_autocast_enabled, torch.clear_autocast_cache, torch.set_default_device
    assert now == functions
    assert nn.Parameter.__new__ is parameter_new
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = nn.LayerNorm(4)(torch.randn(2, 4, dtype=torch.bfloat16))
        assert hidden.dtype is torch.bfloat16
        assert F.binary_cross_entropy(torch.rand(2), torch.ones(2)).dtype is torch.float32

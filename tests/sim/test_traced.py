"""``torch.jit.trace`` and ``torch.export`` inside a simulation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_vram.sim import Simulation
from pytest_vram.sim.values import NoSimulatedKernel

MIB = 1 << 20


def _model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()).cuda()


def test_a_traced_module_is_the_module(gpu: Simulation) -> None:
    """A convolution asks for sizes, which the tracer would hand out as tensors."""
    model, images = _model(), torch.rand(2, 3, 8, 8, device="cuda")
    traced = torch.jit.trace(model, images)
    assert isinstance(traced, nn.Module)
    assert traced(images).shape == (2, 4, 8, 8)
    assert traced.state_dict().keys() == model.state_dict().keys()
    assert next(traced.parameters()) is next(model.parameters())
    assert not traced.eval().training
    assert "return" in str(traced.graph)
    assert "forward" in traced.code


def test_a_traced_function_is_the_function(gpu: Simulation) -> None:
    def double(x: torch.Tensor, *, times: int = 2) -> torch.Tensor:
        return x * times

    traced = torch.jit.trace(double, (torch.ones(3, device="cuda"),))
    assert traced(torch.ones(5, device="cuda")).shape == (5,)
    named = torch.jit.trace(double, example_kwarg_inputs={"x": torch.ones(3, device="cuda")})
    assert named(torch.ones(2, device="cuda")).is_cuda


def test_checking_holds_three_results(gpu: Simulation) -> None:
    """One result of ``checked`` is 1 MiB, and so are the copies of its argument."""

    def checked(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    given = torch.ones(MIB // 4, device="cuda")
    torch.jit.trace(checked, given, check_trace=False)
    assert gpu.allocator.peak_allocated == 2 * MIB
    torch.jit.trace(checked, given)
    assert gpu.allocator.peak_allocated == 5 * MIB
    assert gpu.allocator.allocated == MIB


def test_methods_by_name(gpu: Simulation) -> None:
    model = nn.Linear(4, 2).cuda()
    traced = torch.jit.trace_module(model, {"forward": torch.ones(3, 4, device="cuda")})
    assert traced(torch.ones(1, 4, device="cuda")).shape == (1, 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_is_saved_can_be_loaded(gpu: Simulation, tmp_path) -> None:
    file = tmp_path / "model.pt"
    torch.jit.trace(_model(), torch.rand(1, 3, 8, 8, device="cuda")).save(str(file))
    assert torch.jit.load(str(file))(torch.ones(2)).shape == (2,)


def test_export_is_refused_with_its_line(gpu: Simulation) -> None:
    line = r"torch\.export at .*test_traced\.py:\d+ "
    with pytest.raises(NoSimulatedKernel, match=line):
        torch.export.export(_model(), (torch.rand(1, 3, 8, 8, device="cuda"),))

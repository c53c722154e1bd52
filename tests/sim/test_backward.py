"""Backward as a card runs it: formulas that look at zeros, accumulation types, the nodes' order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from pytest_vram.sim import Simulation, find_profile
from pytest_vram.sim.sequence import nodes_of

Values = torch.Tensor


@pytest.fixture
def gpu() -> Iterator[Simulation]:
    with Simulation(find_profile("a100-80gb")) as simulation:
        yield simulation


def _backward_of(gpu: Simulation, function: Callable[[Values], Values]) -> list[tuple[str, int]]:
    """Operators and bytes of what backward allocates, without the loss's own."""
    values = torch.empty(64, 128, device="cuda", requires_grad=True)
    loss = function(values)
    gradient = torch.empty_like(loss)
    before = len(gpu.trace().allocations)
    torch.autograd.grad(loss, values, gradient)
    made = gpu.trace().allocations[before:]
    return [(a.operator.removeprefix("aten::"), a.requested or 0) for a in made]


def test_prod_divides_by_inputs_without_zeros(gpu: Simulation) -> None:
    made = _backward_of(gpu, lambda x: x.prod(1))
    assert made == [
        ("eq", 8192), ("sum", 512), ("sum", 65536), ("sum", 8), ("div", 32768), ("mul", 32768),
    ]  # fmt: skip


def test_prod_of_everything_looks_for_zeros(gpu: Simulation) -> None:
    made = [name for name, _ in _backward_of(gpu, torch.prod)]
    assert made[:2] == ["eq", "nonzero"]
    assert made[-2:] == ["div", "mul"]


def test_cumprod_divides_by_inputs_without_zeros(gpu: Simulation) -> None:
    made = _backward_of(gpu, lambda x: x.cumprod(1))
    assert made == [
        ("mul", 32768), ("eq", 8192), ("any", 1), ("flip", 32768), ("cumsum", 32768),
        ("flip", 32768), ("div", 32768),
    ]  # fmt: skip


def test_renorm_accumulates_in_float(gpu: Simulation) -> None:
    made = _backward_of(gpu, lambda x: x.renorm(2, 0, 1.0))
    assert max(size for _, size in made) == 64 * 128 * 4


@pytest.mark.parametrize(
    "function", [torch.prod, lambda x: x.prod(1), lambda x: x.cumprod(0)], ids=range(3)
)
def test_products_stay_transformable(gpu: Simulation, function: Callable[[Values], Values]) -> None:
    values = torch.empty(8, 16, device="cuda", requires_grad=True)
    assert torch.func.grad(lambda x: function(x).sum())(values).shape == (8, 16)
    assert torch.func.vmap(lambda x: x.cumprod(0))(values).shape == (8, 16)
    first = torch.func.jvp(function, (values,), (values,))[1]
    assert first.shape == function(values).shape
    (slope,) = torch.autograd.grad(function(values).sum(), values, create_graph=True)
    slope.sum().backward()
    assert values.grad is not None


def _noting(ran: list[str], name: str) -> Callable[[object], None]:
    return lambda gradients: ran.append(name)


def _order() -> list[str]:
    """Which nodes a double backward runs, in order, in a simulation of its own."""
    ran: list[str] = []
    with Simulation(find_profile("a100-80gb")):
        x = torch.empty(8, device="cuda", requires_grad=True)
        y = (x * 2).sin()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = (y * 3).sum() + slope.exp().sum()
        for node in nodes_of([loss]):
            node.register_prehook(_noting(ran, node.name()))
        loss.backward()
    return ran


def test_nodes_of_backward_are_numbered_by_its_own_thread() -> None:
    """On a card the engine's thread numbers what backward makes from 0: ``cos`` (1) comes after
    ``sin`` (1 of the program's thread, and made earlier), although it was made later."""
    made = [name for name in _order() if name in ("CosBackward0", "SinBackward0")]
    assert made == ["SinBackward0", "CosBackward0"]


def test_every_simulation_counts_from_the_start() -> None:
    assert _order() == _order()


def test_magnitudes_are_made_as_complex_numbers(gpu: Simulation) -> None:
    values = torch.empty(64, 128, dtype=torch.complex64, device="cuda")
    before = len(gpu.trace().allocations)
    values.abs()
    made = [a.requested for a in gpu.trace().allocations[before:]]
    assert made == [64 * 128 * 4, 64 * 128 * 8]


def test_a_double_backward_runs_on_the_streams_of_its_nodes(gpu: Simulation) -> None:
    """The products of the layer and of its gradient all ran on the side stream, so no other
    stream gets a workspace of cuBLAS, although numbers of the two threads coincide."""
    side = torch.cuda.Stream()
    layer = torch.nn.Linear(32, 33, bias=False, device="cuda")
    x = torch.empty(64, 32, device="cuda", requires_grad=True)
    with torch.cuda.stream(side):
        y = layer(x)
    loss = y.abs().mean() * 2
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().mean()).backward()
    streams = {a.stream for a in gpu.trace().allocations if a.bill == "workspace"}
    assert streams == {1}

"""Where backward writes in place on a card, and whose block an assignment to ``.data`` frees."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from pytest_vram.sim import Simulation, find_profile
from pytest_vram.sim.selection import assume_selected

MIB = 1 << 20


@pytest.fixture
def gpu() -> Iterator[Simulation]:
    with Simulation(find_profile("a100-80gb")) as simulation:
        yield simulation


def _allocations(gpu: Simulation, run: Callable[[], object]) -> list[tuple[str, int]]:
    """Operator and requested MiB of every block of at least 1 MiB that ``run`` allocates."""
    before = len(gpu.trace().allocations)
    run()
    made = gpu.trace().allocations[before:]
    return [(a.operator, a.requested // MIB) for a in made if a.requested >= MIB]


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_the_gradient_of_indexing_is_made_once(gpu: Simulation, autocast: bool) -> None:
    table = nn.Parameter(torch.empty(4096, 1024, device="cuda"))
    rows = torch.randint(0, 4096, (64,)).to("cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = table[rows].sum()
        made = _allocations(gpu, loss.backward)
    assert made == [("aten::new_zeros", 16)]


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_the_gradient_of_gather_is_made_once(gpu: Simulation, autocast: bool) -> None:
    values = torch.empty(4096, 1024, device="cuda", requires_grad=True)
    columns = torch.randint(0, 1024, (4096, 1)).to("cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = values.gather(1, columns).sum()
        made = _allocations(gpu, loss.backward)
    assert made == [("aten::new_zeros", 16)]


def test_the_gradient_of_masking_is_a_copy(gpu: Simulation) -> None:
    values = torch.empty(4096, 1024, device="cuda", requires_grad=True)
    mask = torch.zeros(4096, 1024, dtype=torch.bool, device="cuda")
    loss = (values * 1).masked_fill_(mask, 0.0).sum()
    made = _allocations(gpu, loss.backward)
    assert made == [("aten::masked_fill", 16), ("aten::mul", 16)]


def test_the_gradient_of_overwritten_rows_is_a_copy(gpu: Simulation) -> None:
    values = torch.empty(4096, 1024, device="cuda", requires_grad=True)
    rows = torch.randint(0, 4096, (8,)).to("cuda")
    changed = values * 1
    changed[rows] = torch.zeros(1024, device="cuda")
    loss = (changed * 2).sum()
    made = _allocations(gpu, loss.backward)
    assert ("aten::index_put", 16) in made


def test_new_data_frees_the_old_though_the_graph_lives(gpu: Simulation) -> None:
    weight = nn.Parameter(torch.empty(4096, 1024, device="cuda"))
    loss = (weight * 2).sum()
    loss.backward()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        weight.data = weight.data - 0.1 * weight.grad.data
    assert torch.cuda.memory_allocated() == before
    assert loss.grad_fn is not None
    assert weight.grad is not None


def test_new_data_of_another_type_keeps_who_the_parameter_is(gpu: Simulation) -> None:
    weight = nn.Parameter(torch.empty(4096, 1024, device="cuda"))
    weight.data = weight.data.half()
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.is_cuda
    assert weight.dtype is torch.float16
    assert torch.cuda.memory_allocated() == 8 * MIB


def test_state_that_a_step_replaces_is_freed(gpu: Simulation) -> None:
    class Momentum(torch.optim.Optimizer):
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters, {})
            for parameter in parameters:
                self.state[parameter]["mean"] = torch.zeros_like(parameter.data)

        def step(self) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["mean"] = self.state[parameter]["mean"] * 0.9

    weight = nn.Parameter(torch.empty(4096, 1024, device="cuda"))
    optimizer = Momentum([weight])
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        optimizer.step()
    assert torch.cuda.memory_allocated() == before


def test_the_gradient_of_index_select_is_made_once(gpu: Simulation) -> None:
    table = torch.empty(4096, 1024, device="cuda", requires_grad=True)
    rows = torch.randint(0, 4096, (64,)).to("cuda")
    made = _allocations(gpu, table.index_select(0, rows).sum().backward)
    assert made == [("aten::new_zeros", 16)]


def test_the_gradient_of_take_is_made_once(gpu: Simulation) -> None:
    table = torch.empty(4096, 1024, device="cuda", requires_grad=True)
    places = torch.randint(0, 4096, (64,)).to("cuda")
    made = _allocations(gpu, table.take(places).sum().backward)
    assert made == [("aten::zeros_like", 16)]


def test_the_gradient_of_a_maximum_is_masked_in_place(gpu: Simulation) -> None:
    a, b = (torch.empty(4096, 1024, device="cuda", requires_grad=True) for _ in range(2))
    loss = torch.maximum(a, b).sum()
    made = _allocations(gpu, lambda: torch.autograd.grad(loss, a))
    assert [name for name, size in made if size == 16] == ["aten::div", "aten::where"]


def test_the_gradient_of_the_largest_value_counts_in_place(gpu: Simulation) -> None:
    """``isnan``, ``==`` and their conjunction: two flags per element, not three."""
    values = torch.empty(4096, 1024, device="cuda", requires_grad=True)
    made = _allocations(gpu, values.max().backward)
    assert [name for name, size in made if size == 4] == ["aten::isnan", "aten::eq"]


def test_transforms_of_torch_func_copy_on_a_card_too(gpu: Simulation) -> None:
    table = torch.empty(4096, 1024, device="cuda")
    rows = torch.randint(0, 4096, (64,)).to("cuda")

    def loss(given: torch.Tensor) -> torch.Tensor:
        return given.index_select(0, rows).sum()

    made = _allocations(gpu, lambda: torch.func.grad(loss)(table))
    assert made == [("aten::zeros", 16), ("aten::index_add", 16)]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(1024), nn.Linear(1024, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


def _blocks_of_backward(gpu: Simulation, hooked: bool) -> list[str]:
    block = _Block().to("cuda")
    if hooked:
        block.register_full_backward_hook(lambda *given: None)
    start = torch.empty(1024, 1024, device="cuda", requires_grad=True)
    loss = (block(start * 2) * 2).sum()
    return [operator for operator, size in _allocations(gpu, loss.backward) if size == 4]


def test_a_gradient_that_a_hook_keeps_is_not_added_into(gpu: Simulation) -> None:
    """``nn.Module``'s full backward hook keeps the output's gradient until the input's is there;
    the residual's sum then takes a block of its own (counted on the CUDA build, 2.14.1)."""
    plain, hooked = (_blocks_of_backward(gpu, hooked) for hooked in (False, True))
    assert "aten::add" not in plain
    assert sorted(hooked) == sorted([*plain, "aten::add"])


def test_a_kept_gradient_and_the_next_one_make_a_third(gpu: Simulation) -> None:
    """``retain_grad`` clones the first and adds out of place (autograd/variable.cpp, v2.14.1)."""
    leaf = torch.zeros(1 << 18, device="cuda", requires_grad=True)
    kept = leaf * 2
    kept.retain_grad()
    loss = kept.sum()
    loss.backward(retain_graph=True)
    made = _allocations(gpu, loss.backward)
    assert made == [("aten::add", 1), ("aten::mul", 1)]


def test_a_formula_adds_two_gradients_of_its_own_into_a_third(gpu: Simulation) -> None:
    """``gself + aux`` of ``var_mean_backward`` (FunctionsManual.cpp), which the engine's own sums,
    made in place, must not be taken for."""
    values = torch.empty(512, 512, device="cuda", requires_grad=True)
    variance, mean = torch.var_mean(values)
    made = _allocations(gpu, (variance + mean).backward)
    assert [name for name, _ in made].count("aten::add") == 1


def test_a_sum_of_two_gradients_from_one_node_is_made_in_place(gpu: Simulation) -> None:
    values = torch.empty(512, 512, device="cuda", requires_grad=True)
    doubled = values * 2
    loss = (doubled * doubled).sum()
    assert "aten::add" not in [name for name, _ in _allocations(gpu, loss.backward)]


def test_the_gradients_of_atan2_and_of_a_selection_are_filled_in_place(gpu: Simulation) -> None:
    values = torch.empty(512, 512, device="cuda", requires_grad=True)
    loss = torch.atan2(values, torch.ones(512, 512, device="cuda")).sum()
    assert "aten::masked_fill" not in [name for name, _ in _allocations(gpu, loss.backward)]
    with assume_selected(0.5):
        loss = values.masked_select(values > 0).sum()
    assert "aten::masked_scatter" not in [name for name, _ in _allocations(gpu, loss.backward)]


_LISTS: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "add number": lambda x: torch._foreach_add_(x, 1.0),
    "add list": lambda x: torch._foreach_add_(x, x, alpha=0.5),
    "mul tensor": lambda x: torch._foreach_mul_(x, torch.ones((), device="cuda")),
    "addcdiv": lambda x: torch._foreach_addcdiv_(x, x, x, 0.1),
    "sqrt": torch._foreach_sqrt_,
    "copy": lambda x: torch._foreach_copy_(x, x),
    "lerp list": lambda x: torch._foreach_lerp_(x, x, x),
}
_UNCOUNTED: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "zero": torch._foreach_zero_,
    "lerp number": lambda x: torch._foreach_lerp_(x, x, 0.1),
    "not in place": lambda x: torch._foreach_add(x, 1.0),
}


@pytest.mark.parametrize("run", [*_LISTS, *_UNCOUNTED])
@pytest.mark.parametrize("grad", [True, False])
def test_kernels_over_lists_count_their_writes(gpu: Simulation, run: str, grad: bool) -> None:
    """As PyTorch 2.14.1's CUDA build counts them on the stub driver."""
    tensors = [torch.ones(3, device="cuda"), torch.ones(2, device="cuda")]
    before = [tensor._version for tensor in tensors]
    with torch.set_grad_enabled(grad):
        (_LISTS.get(run) or _UNCOUNTED[run])(tensors)
    written = [tensor._version - old for tensor, old in zip(tensors, before, strict=True)]
    assert written == ([1, 1] if run in _LISTS else [0, 0])


def test_backward_notices_that_an_optimizer_stepped_meanwhile(gpu: Simulation) -> None:
    """As on a card: by its default, Adam works on lists there."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    loss = model(torch.ones(2, 4, device="cuda", requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_lists_are_written_in_inference_mode_too(gpu: Simulation) -> None:
    with torch.inference_mode():
        torch._foreach_add_([torch.ones(3, device="cuda")], 1.0)

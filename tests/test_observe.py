"""What the Observer tells a Recorder, on plain CPU tensors: it asks nothing about devices."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_vram.observe import Observer
from pytest_vram.trace import BILLS, Phase, Trace


class Diary:
    """A Recorder that writes down what it is told, and each storage's winning label."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.modules: list[tuple[str, str]] = []  # (path, phase in which it ran)
        self.stack: list[str] = []
        self.labels: dict[int, tuple[str, str]] = {}  # while the storage lives: places are reused
        self.history: list[tuple[str, str]] = []

    def phase(self, name: str, step: int) -> None:
        self.phases.append(Phase(name, step))

    def enter_module(self, path: str) -> None:
        self.stack.append(path)
        self.modules.append((path, self.phases[-1].name))

    def leave_module(self) -> None:
        self.stack.pop()

    def label(self, tensor: Any, bill: str, name: str = "") -> None:
        assert bill in BILLS
        self.history.append((bill, name))
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.labels:
            weakref.finalize(storage, self.labels.pop, key)
        elif BILLS.index(bill) >= BILLS.index(self.labels[key][0]):
            return
        self.labels[key] = (bill, name)

    def of(self, tensor: torch.Tensor) -> tuple[str, str] | None:
        return self.labels.get(tensor.untyped_storage()._cdata)

    def spelled(self) -> str:
        return " ".join(f"{phase.name}:{phase.step}" for phase in self.phases)


@pytest.fixture(autouse=True)
def _one_course_of_events() -> None:
    """How often LBFGS asks its closure depends on values."""
    torch.manual_seed(0)


@pytest.fixture
def diary() -> Diary:
    return Diary()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(self.norm(x))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> torch.Tensor:
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    for _ in range(steps):
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return x


def test_phases_and_steps_of_a_plain_loop(diary: Diary) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Observer(diary) as observer:
        train(net, optimizer)
    assert diary.spelled() == (
        "setup:0 forward:1 backward:1 between:1 optimizer:1 between:1 "
        "forward:2 backward:2 between:2 optimizer:2 between:2"
    )
    assert observer.step == 2
    assert observer.modules == [net]
    assert observer.optimizers == [optimizer]


def test_module_paths_are_relative_to_the_root(diary: Diary) -> None:
    net = Net()
    with Observer(diary):
        net(torch.randn(8, 4))
    assert [path for path, _ in diary.modules] == ["Net", "blocks.0", "blocks.1", "norm", "head"]
    assert diary.stack == []


def test_labels_of_everything_that_lives_on(diary: Diary) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    with Observer(diary):
        x = train(net, optimizer)
        loss = net(x).sum()
        loss.backward()
    assert diary.of(net.blocks[1].weight) == ("parameters", "blocks.1.weight")
    assert diary.of(net.norm.running_mean) == ("buffers", "norm.running_mean")
    assert diary.of(net.head.bias.grad) == ("gradients", "head.bias")
    state = optimizer.state[net.blocks[0].weight]
    assert diary.of(state["exp_avg_sq"]) == ("optimizer_state", "exp_avg_sq of blocks.0.weight")
    assert diary.of(x) == ("inputs", "")
    assert diary.of(loss) is None


def test_optimizer_in_backward_still_labels_its_gradients(diary: Diary) -> None:
    net = Net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with Observer(diary) as observer:
        for _ in range(2):
            net(torch.randn(8, 4)).sum().backward()
    assert ("gradients", "head.weight") in diary.history
    assert observer.step == 2
    assert diary.phases[-1] == Phase("between", 2)


def test_two_optimizers_that_alternate_are_one_step(diary: Diary) -> None:
    generator, critic = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    first = torch.optim.SGD(critic.parameters(), lr=0.1)
    second = torch.optim.SGD(generator.parameters(), lr=0.1)
    with Observer(diary) as observer:
        for _ in range(3):
            critic(generator(torch.randn(2, 4)).detach()).sum().backward()
            first.step()
            critic(generator(torch.randn(2, 4))).sum().backward()
            second.step()
    assert observer.step == 3
    trace = observer.renumber(Trace((), (), diary.phases))
    forwards = [phase.step for phase in trace.phases if phase.name == "forward"]
    assert forwards == [1, 1, 2, 2, 3, 3]
    paths = [path for path, _ in diary.modules]
    assert paths[:4] == ["Sequential", "0", "Sequential", "Sequential.0"]


@pytest.mark.parametrize("made_inside", [False, True])
def test_several_critic_steps_count_by_the_critic(diary: Diary, made_inside: bool) -> None:
    net = Net()

    def optimizers() -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return torch.optim.SGD(net.head.parameters(), lr=0.1), torch.optim.SGD(
            net.blocks.parameters(), lr=0.1
        )

    critic, generator = optimizers()
    with Observer(diary) as observer:
        if made_inside:
            critic, generator = optimizers()
        for optimizer in [critic, critic, generator] * 2:
            net(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    trace = observer.renumber(Trace((), (), diary.phases))
    assert [p.step for p in trace.phases if p.name == "optimizer"] == [1, 2, 2, 3, 4, 4]
    assert [p.step for p in trace.phases if p.name == "forward"] == [1, 2, 2, 3, 4, 4]


def test_accumulation_is_one_step_and_a_final_evaluation_none(diary: Diary) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Observer(diary) as observer:
        for _ in range(2):
            for _ in range(3):
                net(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        with torch.no_grad():
            net(torch.randn(2, 4))
    trace = observer.renumber(Trace((), (), diary.phases))
    assert [p.step for p in trace.phases if p.name == "backward"] == [1, 1, 1, 2, 2, 2]
    assert trace.phases[-1] == Phase("forward", 2)


def test_a_step_that_fails_keeps_its_own_number(diary: Diary) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    observer = Observer(diary)

    def body() -> None:
        train(net, optimizer, steps=2)
        net(torch.randn(2, 5))

    with pytest.raises(RuntimeError), observer:
        body()
    trace = observer.renumber(Trace((), (), diary.phases))
    assert trace.phases[-1] == Phase("forward", 3)
    assert diary.stack == []


def test_a_skipped_scaler_step_is_a_step(diary: Diary) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=float("inf"))
    with Observer(diary) as observer:
        for _ in range(2):
            scaler.scale(net(torch.randn(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update(1.0)
            optimizer.zero_grad()
    assert observer.step == 2
    assert [p.step for p in diary.phases if p.name == "optimizer"] == [1, 2]
    assert diary.of(scaler._scale) == ("other", "loss scaler scale")


def test_closure_optimizer_runs_its_forward_inside_the_step(diary: Diary) -> None:
    net = Net()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)
    x = torch.randn(8, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        return loss

    with Observer(diary) as observer:
        for _ in range(2):
            optimizer.step(closure)
    assert observer.step == 2
    assert diary.spelled().startswith(
        "setup:0 optimizer:1 forward:1 backward:1 optimizer:1 forward:1 backward:1 optimizer:1"
    )
    assert diary.phases[-1] == Phase("between", 2)
    assert any(name.startswith("old_dirs.0") for bill, name in diary.history)


def test_an_optimizer_step_that_raises_does_not_swallow_the_next(diary: Diary) -> None:
    net = Net()

    class Refuses(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if len(diary.phases) < 6:
                raise ValueError("not yet")
            super().step(closure)

    optimizer = Refuses(net.parameters(), lr=0.1)
    with Observer(diary) as observer:
        net(torch.randn(2, 4)).sum().backward()
        with pytest.raises(ValueError, match="not yet"):
            optimizer.step()
        train(net, optimizer, steps=2)
    assert observer.step == 3
    assert diary.phases[-1] == Phase("between", 3)


def test_recomputation_keeps_its_module_paths_in_backward(diary: Diary) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    with Observer(diary):
        Checkpointed()(torch.randn(8, 4)).sum().backward()
    again = [path for path, phase in diary.modules if phase == "backward"]
    assert again == ["blocks.1", "blocks.0"]
    assert diary.spelled() == "setup:0 forward:1 backward:1 between:1"
    assert diary.stack == []


def test_reentrant_checkpoint_is_one_backward(diary: Diary) -> None:
    net = Net()
    x = torch.randn(8, 4, requires_grad=True)
    with Observer(diary):
        checkpoint(net, x, use_reentrant=True).sum().backward()
    assert diary.spelled() == "setup:0 forward:1 backward:1 between:1"


def test_a_gradient_that_is_differentiated_again_belongs_to_the_forward(diary: Diary) -> None:
    net = Net()
    x = torch.randn(8, 4, requires_grad=True)
    with Observer(diary):
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    assert diary.spelled() == "setup:0 forward:1 backward:1 forward:1 backward:1 between:1"


def test_own_phases_and_own_steps(diary: Diary) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Observer(diary) as observer:
        for _ in range(2):
            observer.begin_step()
            with observer.phase("forward"):
                loss = net(torch.randn(8, 4)).sum()
            with observer.phase("backward"):
                loss.backward()
            with observer.phase("clip"):
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        with observer.phase("evaluation"):
            net(torch.randn(8, 4))
    step = "between:{0} forward:{0} between:{0} backward:{0} between:{0} clip:{0} between:{0} "
    step += "optimizer:{0} between:{0}"
    assert diary.spelled() == (f"setup:0 {step.format(1)} {step.format(2)} evaluation:2 between:2")
    assert observer.renumber(Trace((), (), diary.phases)).phases == diary.phases


def test_master_weights_are_what_only_the_optimizer_holds(diary: Diary) -> None:
    net = Net().bfloat16()
    masters = [p.detach().float().clone() for p in net.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    with Observer(diary):
        net(torch.randn(8, 4).bfloat16()).sum().backward()
        for master, parameter in zip(masters, net.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
    assert diary.of(net.head.weight) == ("parameters", "head.weight")
    assert diary.of(masters[0]) == ("master_weights", "group 0[0]")
    assert diary.of(masters[0].grad) == ("gradients", "group 0[0]")
    state = optimizer.state[masters[0]]["momentum_buffer"]
    assert diary.of(state) == ("optimizer_state", "momentum_buffer of group 0[0]")


def test_functional_training_is_seen_through_its_optimizer(diary: Diary) -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    with Observer(diary) as observer:
        for _ in range(2):
            (torch.randn(8, 4) @ weight).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert diary.of(weight) == ("parameters", "group 0[0]")
    assert diary.of(weight.grad) == ("gradients", "group 0[0]")
    assert observer.step == 2


def test_modules_hidden_in_lists_and_lazy_ones_are_named(diary: Diary) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [nn.Linear(4, 4).requires_grad_(False)]
            self.lazy = nn.LazyLinear(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lazy(self.hidden[0](x))

    net = Odd()
    with Observer(diary):
        net(torch.randn(8, 4)).sum().backward()
    assert [path for path, _ in diary.modules] == ["Odd", "Odd.Linear", "lazy"]
    assert diary.of(net.hidden[0].weight) == ("parameters", "Odd.Linear.weight")
    assert diary.of(net.lazy.weight) == ("parameters", "lazy.weight")


def test_a_whole_that_is_seen_after_its_part_names_both(diary: Diary) -> None:
    net = Net()
    x = torch.randn(8, 4)
    with Observer(diary):
        net.blocks[0](x)
        net(x)
    assert [path for path, _ in diary.modules][:3] == ["Linear", "Net", "blocks.0"]


def test_a_model_built_in_the_test_is_labelled_when_it_never_gets_to_run(diary: Diary) -> None:
    def body() -> None:
        net = Net()
        diary.net = net  # type: ignore[attr-defined]
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError), Observer(diary):
        body()
    assert diary.of(diary.net.head.weight) == ("parameters", "head.weight")  # type: ignore[attr-defined]


def test_outputs_of_one_root_are_not_the_inputs_of_the_next(diary: Diary) -> None:
    net, criterion = Net(), nn.CrossEntropyLoss()
    target = torch.randint(0, 3, (8,))
    with Observer(diary):
        logits = net(x=torch.randn(8, 4))
        criterion(logits, target=target)
    assert diary.of(logits) is None
    assert diary.of(target) == ("inputs", "")
    assert diary.modules[-1][0] == "CrossEntropyLoss"


def test_sparse_gradients_are_labelled_by_their_parts(diary: Diary) -> None:
    table = nn.Embedding(10, 4, sparse=True)
    with Observer(diary):
        table(torch.tensor([1, 2])).sum().backward()
    assert diary.of(table.weight.grad._values()) == ("gradients", "Embedding.weight values")


def test_an_exception_leaves_every_module_and_patch_behind(diary: Diary) -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("inside")

    engine, step = torch.autograd._engine_run_backward, torch.amp.GradScaler.step
    init = torch.optim.Optimizer.__init__
    net = nn.Sequential(nn.Linear(4, 4), Raises())
    with Observer(diary):
        with pytest.raises(KeyError):
            net(torch.randn(8, 4))
        assert diary.stack == []
    assert torch.autograd._engine_run_backward is engine
    assert torch.autograd.graph._engine_run_backward is engine
    assert torch.amp.GradScaler.step is step
    assert torch.optim.Optimizer.__init__ is init
    hooks = nn.modules.module
    assert not hooks._global_forward_pre_hooks
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_hooks_with_kwargs
    assert not hooks._global_forward_hooks_always_called
    assert not hooks._global_module_registration_hooks
    assert not hooks._global_parameter_registration_hooks
    optimizers = sys.modules["torch.optim.optimizer"]
    assert not optimizers._global_optimizer_pre_hooks
    assert not optimizers._global_optimizer_post_hooks


def test_nothing_is_kept_alive(diary: Diary) -> None:
    with Observer(diary) as observer:
        net = Net()
        ema = copy.deepcopy(net)
        optimizer = torch.optim.Adam(net.parameters())
        x = train(net, optimizer)
        watched = [weakref.ref(thing) for thing in (net, ema, optimizer, x, net.head.weight)]
        gc.disable()
        try:
            del x, optimizer
            assert watched[3]() is None
        finally:
            gc.enable()
        del net, ema
        gc.collect()
        assert [ref() for ref in watched] == [None] * 5
    assert observer.modules == []

"""Causes of memory faults: from simulated programs and, for the arithmetic, hand-made traces."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pytest_vram.bills import settle
from pytest_vram.findings import Finding
from pytest_vram.numerics import Watch
from pytest_vram.numerics.lives import Lives
from pytest_vram.numerics.memory_causes import judge, with_causes
from pytest_vram.numerics.memory_explain import explain
from pytest_vram.numerics.memory_waste import peak_reserved_under
from pytest_vram.numerics.memory_watch import Growing, MemoryWatch, Observed
from pytest_vram.observe import Observer
from pytest_vram.sim import Simulation, find_profile
from pytest_vram.trace import Allocation, Event, Phase, Trace

MIB = 1 << 20


def simulated(
    body: Callable[[], None], watched: bool = True, gpu: str = "a100-80gb"
) -> tuple[Trace, Observed, Any]:
    gc.collect()
    gc.disable()
    try:
        torch.manual_seed(0)
        simulation = Simulation(find_profile(gpu), alloc_conf="")
        observer, watch = Observer(simulation), MemoryWatch(simulation.allocation_of)
        numbers = Watch(values=False)
        with simulation, observer:
            if watched:
                with watch, numbers:
                    body()
            else:
                body()
        trace = settle(observer.renumber(simulation.trace()))
    finally:
        gc.enable()
    return trace, watch.observed, simulation.attention


def verdict(body: Callable[[], None], **more: Any) -> list[Finding]:
    trace, observed, attention = simulated(body)
    return list(judge(trace, observed, attention=attention, **more))


def stack(width: int = 256, depth: int = 4) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)]).cuda()


# ---- watching changes nothing


def loop() -> None:
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(64, 256, device="cuda")).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def test_the_ledger_is_the_same_with_and_without_the_watch() -> None:
    plain, _, _ = simulated(loop, watched=False)
    watched, observed, _ = simulated(loop)
    assert watched.events == plain.events
    assert watched.allocations == plain.allocations
    assert len(observed.alive) == 4


# ---- leaks and survivors


def test_a_list_of_outputs_is_named() -> None:
    def body() -> None:
        model, kept = stack(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            out = model(torch.randn(512, 256, device="cuda"))
            out.pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(out.detach())

    found = verdict(body)[0]
    assert (found.kind, found.severity) == ("leak", "fail")
    assert re.search(
        r"grows by 512\.0 KiB or more per step, 3 times.*list 'kept' in body", found.text()
    )
    filled, largest, *_ = found.details
    assert re.fullmatch(
        r"filled at .*test_memory_causes\.py:\d+ body: kept\.append\(out\.detach\(\)\)", filled
    )
    assert re.fullmatch(
        r"the largest each time: float32\[512, 256\] \(512\.0 KiB\) made at "
        r".*test_memory_causes\.py:\d+ body by aten::addmm",
        largest,
    )


def test_a_graph_that_grows_by_less_than_the_allowance() -> None:
    """In training the saved tensors are gone; only nodes and scalars pile up."""

    def body() -> None:
        model, total = stack(depth=2), 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 256, device="cuda")).pow(2).mean()
            loss.backward()
            optimizer.step()
            total = total + loss

    (found,) = verdict(body)
    assert found.kind == "leak"
    assert re.search(
        r"the graph behind variable 'total' in body grows with every step", found.sentence
    )
    assert "loss.item()" in found.hint
    assert found.details[0].endswith("body: total = total + loss")


def test_a_global_cache_without_a_name() -> None:
    cache: dict[int, torch.Tensor] = {}

    def body() -> None:
        cache.clear()
        model = stack()
        for step in range(5):
            out = model(torch.randn(512, 256, device="cuda"))
            out.pow(2).mean().backward()
            cache[step] = out.detach()
            model.zero_grad()
            del out

    found = verdict(body)[0]
    assert found.kind == "leak"
    assert "live memory grows by 512.0 KiB" in found.sentence
    cache.clear()


class Keeper:
    def __init__(self) -> None:
        self.history: list[dict[str, torch.Tensor]] = []


@functools.lru_cache(maxsize=64)
def cached(step: int) -> torch.Tensor:
    return torch.zeros(512, 256, device="cuda")


@pytest.mark.parametrize("how", ["attribute", "lru_cache"])
def test_who_keeps_tensors_of_past_steps_has_a_name(how: str) -> None:
    def body() -> None:
        cached.cache_clear()
        model, keeper = stack(), Keeper()
        for step in range(5):
            out = model(torch.randn(512, 256, device="cuda"))
            out.pow(2).mean().backward()
            if how == "attribute":
                keeper.history.append({"out": out.detach()})
            else:
                cached(step)
            model.zero_grad()
            del out

    sentence = verdict(body)[0].sentence
    cached.cache_clear()
    names = {
        "attribute": "list 'keeper.history' in body",
        "lru_cache": "lru_cache 'cached' (",
    }
    assert names[how] in sentence


@functools.cache
def bias_for(scores: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(scores)


def test_a_cache_that_is_keyed_by_tensors() -> None:
    """No tensor equals another, so each call adds one."""

    def body() -> None:
        bias_for.cache_clear()
        model = stack()
        for _ in range(5):
            out = model(torch.randn(512, 256, device="cuda"))
            (out + bias_for(out)).pow(2).mean().backward()
            model.zero_grad()
            del out

    found = verdict(body)[0]
    bias_for.cache_clear()
    assert re.search(
        r"lru_cache 'bias_for' \(.*test_memory_causes\.py:\d+\) \(4 -> 8 tensors\) keeps what it "
        r"was called with and what it returned$",
        found.sentence,
    )
    assert "key it by shape and device" in found.hint


def test_a_list_of_exceptions() -> None:
    """Each keeps its traceback, and that the variables of the frames it came through."""

    def fail(model: nn.Module) -> None:
        out = model(torch.randn(512, 256, device="cuda"))
        out.pow(2).mean().backward()
        raise ValueError("a bad sample")

    def body() -> None:
        model, errors = stack(), []
        for _ in range(5):
            try:
                fail(model)
            except ValueError as error:
                errors.append(error)
            model.zero_grad()

    found = verdict(body)[0]
    assert re.search(r"list 'errors' in body \(2 -> 4 tensors\) keeps exceptions", found.sentence)
    assert found.hint == "store str(error), or error.with_traceback(None)"
    assert found.details[0].endswith("body: errors.append(error)")


def test_a_hook_fills_what_it_closes_over() -> None:
    def hooked() -> nn.Module:
        kept: dict[str, list[torch.Tensor]] = {}

        def hook(module: nn.Module, args: object, output: torch.Tensor) -> None:
            kept.setdefault("all", []).append(output)

        model = stack()
        model[0].register_forward_hook(hook)
        return model

    def body() -> None:
        model = hooked()
        for _ in range(5):
            model(torch.randn(512, 256, device="cuda")).pow(2).mean().backward()
            model.zero_grad()

    found = verdict(body)[0]
    assert re.search(
        r"list 'kept\['all'\]' of hook \(.*test_memory_causes\.py:\d+\) \(2 -> 4 tensors\)",
        found.sentence,
    )
    assert found.details[0].endswith('hook: kept.setdefault("all", []).append(output)')


class Meter:
    def __init__(self) -> None:
        self.total: float | torch.Tensor = 0.0

    def update(self, value: torch.Tensor) -> None:
        self.total = self.total + value


def test_an_attribute_of_an_object_that_sums_losses() -> None:
    def body() -> None:
        model, meter = stack(depth=2), Meter()
        for _ in range(5):
            loss = model(torch.randn(8, 256, device="cuda")).pow(2).mean()
            loss.backward()
            model.zero_grad()
            meter.update(loss)

    (found,) = verdict(body)
    assert "the graph behind variable 'meter.total' in body grows" in found.sentence
    assert found.details[0].endswith("update: self.total = self.total + value")
    assert "loss.item()" in found.hint


def logged(out: torch.Tensor, seen: list[torch.Tensor] = []) -> None:  # noqa: B006
    seen.append(out)


def test_a_default_argument_that_keeps_what_it_gets() -> None:
    def body() -> None:
        model = stack()
        for _ in range(5):
            out = model(torch.randn(512, 256, device="cuda"))
            out.pow(2).mean().backward()
            logged(out.detach())
            model.zero_grad()
            del out

    found = verdict(body)[0]
    (seen,) = logged.__defaults__ or ()
    seen.clear()
    assert "list 'seen' of logged (" in found.sentence
    assert found.details[0].endswith("logged: seen.append(out)")


def test_batches_that_grow_are_no_leak() -> None:
    """The last step's variables are larger from step to step; nothing older is."""

    def body() -> None:
        model = stack()
        optimizer = torch.optim.AdamW(model.parameters())
        for rows in (512, 1024, 1536, 2048, 2560, 3072):
            optimizer.zero_grad()
            out = model(torch.randn(rows, 256, device="cuda"))
            out.pow(2).mean().backward()
            optimizer.step()

    assert [found.kind for found in verdict(body) if found.kind == "leak"] == []


def test_gradients_with_a_graph_that_refer_to_their_leaves() -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)).cuda()
        for _ in range(5):
            inputs = torch.randn(512, 256, device="cuda", requires_grad=True)
            model(inputs).sum().backward(create_graph=True)
            (inputs.grad.norm(dim=1) - 1).pow(2).mean().backward()
            model.zero_grad()

    found = verdict(body)[0]
    assert re.search(
        r"backward\(create_graph=True\) at .*test_memory_causes\.py:\d+ body makes each leaf and "
        r"its \.grad refer to each other, a cycle that Python's collector does not see",
        found.sentence,
    )
    assert found.hint.startswith("use torch.autograd.grad(..., create_graph=True)")


def test_a_hidden_state_that_is_never_cut_is_named() -> None:
    def body() -> None:
        cell = nn.GRUCell(64, 512).cuda()
        hidden = torch.zeros(256, 512, device="cuda")
        for _ in range(5):
            hidden = cell(torch.randn(256, 64, device="cuda"), hidden)
            hidden.pow(2).mean().backward(retain_graph=True)
            cell.zero_grad()

    found = verdict(body)[0]
    assert "variable 'hidden' in body has a grad_fn and keeps every step's graph" in found.sentence
    assert found.hint == "cut the graph between steps: hidden = hidden.detach()"


def test_the_state_of_an_lstm_not_the_loss_made_of_it() -> None:
    def body() -> None:
        lstm, state = nn.LSTM(64, 128, batch_first=True).cuda(), None
        for _ in range(5):
            out, state = lstm(torch.randn(64, 32, 64, device="cuda"), state)
            loss = out.pow(2).mean()
            loss.backward(retain_graph=True)
            lstm.zero_grad()

    found = verdict(body)[0]
    assert "tuple 'state' in body holds tensors with a graph" in found.sentence
    assert found.details[0].endswith(
        'body: out, state = lstm(torch.randn(64, 32, 64, device="cuda"), state)'
    )
    assert found.hint == "cut the graph between steps: state = tuple(t.detach() for t in state)"


def test_evaluation_with_gradients_on() -> None:
    def body() -> None:
        model = stack()
        model(torch.randn(8, 256, device="cuda")).pow(2).mean().backward()
        model.eval()
        for _ in range(3):
            model(torch.randn(8, 256, device="cuda"))

    (found,) = verdict(body)
    assert found.severity == "warn"
    assert (
        "ran in eval mode with gradients on, again and again without a backward" in found.sentence
    )
    assert "torch.no_grad()" in found.hint


def test_evaluation_that_keeps_what_it_computed() -> None:
    def body() -> None:
        model, predictions = stack(), []
        model(torch.randn(8, 256, device="cuda")).pow(2).mean().backward()
        model.eval()
        for _ in range(4):
            predictions.append(model(torch.randn(512, 256, device="cuda")))

    (found,) = verdict(body)
    assert (found.kind, found.severity) == ("leak", "fail")
    assert re.match(
        r"an evaluation with gradients on grows by .* MiB with every forward, the last at "
        r".*test_memory_causes\.py:\d+ body: list 'predictions' in body keeps the graph of each$",
        found.sentence,
    )
    assert "predictions.append(model(" in found.details[0]
    assert found.hint == "evaluate inside torch.no_grad() or torch.inference_mode()"


def test_cycles_in_a_loop_with_collections_after_each_step() -> None:
    class Node:
        def __init__(self, out: torch.Tensor) -> None:
            self.out, self.me = out, self

    def body() -> None:
        model = stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            node = Node(model(torch.randn(4096, 256, device="cuda")))
            node.out.pow(2).mean().backward()
            del node
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()

    (found,) = verdict(body)
    assert (found.kind, found.severity) == ("leak", "warn")
    assert re.match(
        r"in every step gc\.collect\(\) releases 4\.0 MiB: a reference cycle holds tensors, not a "
        r"leak \(it ended 1 Node\)",
        found.sentence,
    )


def test_a_module_attribute_names_its_path() -> None:
    class Keeper(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(x)
            return self.last

    def body() -> None:
        model = nn.ModuleDict({"router": Keeper(256, 256), "head": nn.Linear(256, 1)}).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model["head"](model["router"](torch.randn(4096, 256, device="cuda"))).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    (found,) = verdict(body)
    assert found.severity == "warn"
    assert "float32[4096, 256] as attribute 'last' of module" in found.sentence
    assert found.data["bytes"] == 4 * MIB
    assert "saves 4.0 MiB between steps" in found.hint


# ---- gradients, states, checkpointing, attention


def test_zero_grad_that_keeps_the_gradients() -> None:
    def body() -> None:
        model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(512, 512), nn.ReLU())])
        model = model.cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(512, 512, device="cuda")).pow(2).mean().backward()
            optimizer.step()

    (found,) = verdict(body)
    assert found.sentence == (
        "at the backward peak (step 2) gradients of step 1 are still alive: 8.0 MiB, which step 1 "
        "did not have"
    )
    assert re.search(r"zero_grad at .*test_memory_causes\.py:\d+ body keeps them", found.text())


def test_a_loaded_state_that_stays() -> None:
    def body() -> None:
        model = stack(512)
        checkpoint = {name: value.clone() for name, value in stack(512).state_dict().items()}
        model.load_state_dict(checkpoint)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            model(torch.randn(8, 512, device="cuda")).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert checkpoint

    found = [f for f in verdict(body) if "was loaded" in f.sentence]
    assert len(found) == 1
    assert re.search(r"beside what was made of it: 4\.0 MiB twice", found[0].sentence)
    assert "map_location='cpu'" in found[0].hint


def test_attention_that_fell_back_says_why() -> None:
    def body() -> None:
        project = nn.Linear(64, 192).cuda()
        x = torch.randn(4, 512, 64, device="cuda")
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            for _ in range(2):
                q, k, v = (
                    t.reshape(4, 512, 4, 16).transpose(1, 2) for t in project(x).chunk(3, -1)
                )
                nn.functional.scaled_dot_product_attention(q, k, v).mean().backward()
                project.zero_grad()

    found = [f for f in verdict(body) if "attention" in f.sentence]
    assert len(found) == 1
    assert re.match(r"attention fell back to the math kernel in .* \(2 calls\)", found[0].sentence)
    assert "float32[4, 4, 512, 512]" in found[0].sentence
    assert found[0].details


def test_flags_that_do_nothing_and_flags_that_work() -> None:
    class Block(nn.Module):
        gradient_checkpointing = False

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.gradient_checkpointing:
                return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            return self.inner(x)

    def body(propagate: bool) -> None:
        model = nn.Sequential(Block(), Block(), Block()).cuda()
        model.gradient_checkpointing = True
        for block in model:
            block.gradient_checkpointing = propagate
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(1024, 256, device="cuda")).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    (found,) = verdict(lambda: body(False))
    assert found.severity == "fail"
    assert found.sentence.startswith(
        "checkpointing was requested (gradient_checkpointing of Sequential), but 0 operators were "
        "recomputed in backward: activations hold "
    )
    assert verdict(lambda: body(True)) == []


# ---- hand-made traces


def trace(*events: tuple[Any, ...]) -> Trace:
    """``("phase", name, step)``, ``("alloc", size, bill, dtype, shape, operator)``,
    ``("free", n)``, ``("reserve", size)``."""
    allocations: list[Allocation] = []
    phases: list[Phase] = []
    made: list[Event] = []
    for kind, *rest in events:
        if kind == "phase":
            phases.append(Phase(*rest))
            made.append(Event("phase", len(phases) - 1))
        elif kind == "alloc":
            size, bill, dtype, shape, operator = rest
            allocations.append(
                Allocation(size, size, bill=bill, dtype=dtype, shape=shape, operator=operator,
                           module="block", frame="model.py:7 forward")
            )  # fmt: skip
            made.append(Event("alloc", len(allocations) - 1))
        elif kind == "free":
            made.append(Event("free", rest[0]))
        else:
            made.append(Event("segment_alloc", size=rest[0]))
    return Trace(allocations, made, phases)


def test_lives_know_births_deaths_and_repetitions() -> None:
    lives = Lives(
        trace(
            ("phase", "forward", 1),
            ("alloc", 10, "activations", "float32", (10,), "aten::mm"),
            ("phase", "backward", 1),
            ("alloc", 5, "activations", "float32", (5,), "aten::mm"),
            ("free", 0),
            ("phase", "forward", 2),
        )
    )
    assert (lives.peak, lives.peak_at, str(lives.peak_phase)) == (15, 3, "backward, step 1")
    assert [life.recomputed for life in lives.all] == [False, True]
    assert [life.block for life in lives.alive_at(lives.repetition(2))] == [5]
    assert lives.repetition(3) == 6


def test_promotion_gives_share_and_first_operator() -> None:
    made = trace(
        ("phase", "forward", 1),
        ("alloc", 2 * MIB, "activations", "bfloat16", (1024, 1024), "aten::addmm"),
        ("alloc", 4 * MIB, "activations", "float32", (1024, 1024), "aten::native_layer_norm"),
        ("alloc", 4 * MIB, "activations", "float32", (1024, 1024), "aten::gelu"),
        ("phase", "backward", 1),
    )
    (note,) = explain(made, Observed())
    assert note.sentence == (
        "activations in float32: 80 % (8.0 MiB of 10.0 MiB) under mixed precision; the first that "
        "widened is aten::native_layer_norm in module block at model.py:7 forward"
    )
    assert note.data["bytes"] == 4 * MIB


def test_fragmentation_says_what_the_setting_would_reserve() -> None:
    events: list[tuple[Any, ...]] = [("phase", "setup", 0)]
    sizes = [(300 + 40 * n) * MIB for n in range(4)]
    for number, size in enumerate(sizes):
        events += [("reserve", size), ("alloc", size, "temporary", "float32", (size // 4,), "")]
        events.append(("free", number))
    made = trace(*events)
    assert peak_reserved_under(made, "expandable_segments:True") == sizes[-1]
    assert peak_reserved_under(made, "") == sum(sizes)
    (found,) = judge(made, Observed())
    assert found.sentence.startswith(
        "fragmentation: reserved 1.41 GiB is x3.4 of the peak allocated"
    )
    assert "peak reserved 420.0 MiB instead of 1.41 GiB" in found.hint


def test_a_failure_of_memory_gets_its_causes() -> None:
    made = trace(
        ("phase", "optimizer", 1),
        ("alloc", 8 * MIB, "temporary", "float32", (2 * MIB,), "aten::_foreach_sqrt"),
    )
    observed = Observed(foreach=["AdamW"])
    over = Finding("over-budget", "fail", "too much", ("table",), "a hint", {"budget": 1})
    (told,) = with_causes([over], made, observed, growth=0)
    assert told.details == (
        "table",
        "cause: optimizer temporaries: 8.0 MiB at the peak, which is in the optimizer phase (step "
        "1): AdamW runs its foreach implementation at model.py:7 forward (aten::_foreach_sqrt)",
        "  hint: AdamW(..., fused=True) or foreach=False; saves 8.0 MiB",
    )
    assert told.data["causes"][0]["bytes"] == 8 * MIB
    assert with_causes([], made, observed, growth=0) == []
    assert with_causes([over], None, None, growth=0) == [over]


def test_a_leak_found_by_its_slope_gets_its_cause() -> None:
    observed = Observed(
        alive=[0, MIB, 2 * MIB, 3 * MIB], containers=[Growing("list 'kept' in run", 1, 3)]
    )
    slope = Finding("leak", "fail", "VRAM leak", ("alive",), "look around", {"growth": [MIB]})
    (told,) = with_causes([slope], trace(("phase", "setup", 0)), observed, growth=0)
    assert told.details[0].startswith(
        "cause: live memory grows by 1.0 MiB or more per step, 2 times"
    )
    assert "list 'kept' in run" in told.details[0]
    assert told.hint == "store .item() or .detach().cpu(), or clear it each step"


def test_attention_findings_need_bytes_that_matter() -> None:
    choice = SimpleNamespace(backend="math", rejected={"flash": "float32 inputs"})
    small = trace(
        ("phase", "forward", 1),
        ("alloc", 512, "activations", "float32", (1, 64, 64), "aten::bmm"),
    )
    assert judge(small, Observed(), attention=[("layer", choice)]) == ()


@pytest.mark.parametrize("kind", ["variables", "attributes"])
def test_small_survivors_are_not_worth_a_word(kind: str) -> None:
    def body() -> None:
        model = stack(16)
        for _ in range(3):
            out = model(torch.randn(8, 16, device="cuda"))
            out.mean().backward()
            if kind == "attributes":
                model.kept = out
            model.zero_grad()

    assert verdict(body) == []

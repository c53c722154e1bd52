from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_vram.fixture import Vram
from pytest_vram.marker import Budget
from pytest_vram.passes import Pass
from pytest_vram.training import TrainingError


def vram(precision: str = "fp32", steps: int = 3, warmup: int = 0) -> Vram:
    """A running pass on the CPU that records nothing."""
    budget = Budget(precision=precision, steps=steps, warmup=warmup)
    made = Vram(budget)
    made.attach(Pass("plain", torch.device("cpu"), budget, has_values=True))
    return made


def problem(seed: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return nn.Linear(4, 2), torch.randn(8, 4), torch.randn(8, 2)


def mse(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def by_hand(clip: float | None = None, micros: int = 1) -> torch.Tensor:
    """The weight after three plain steps over the same data."""
    model, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        mse(model, x, y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    assert isinstance(model, nn.Linear)
    return model.weight.detach()


def trained(precision: str = "fp32", micros: int = 1, **more: Any) -> torch.Tensor:
    model, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(step: int, micro: int) -> torch.Tensor:
        part = slice(micro * 8 // micros, (micro + 1) * 8 // micros)
        return mse(model, x[part].to(model.weight.dtype), y[part].to(model.weight.dtype))

    vram(precision).train(model, optimizer, loss, accumulate=micros, **more)
    assert isinstance(model, nn.Linear)
    return model.weight.detach()


def test_the_plain_step() -> None:
    assert torch.equal(trained(), by_hand())


def test_clipping() -> None:
    assert torch.equal(trained(clip_grad_norm=0.01), by_hand(clip=0.01))


@pytest.mark.parametrize("micros", [2, 4])
def test_accumulation_is_the_mean_over_micro_batches(micros: int) -> None:
    torch.testing.assert_close(trained(micros=micros), by_hand())


def test_clipping_sees_unscaled_gradients() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    torch.testing.assert_close(trained(clip_grad_norm=0.01, scaler=scaler), by_hand(clip=0.01))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-pure", "bf16-pure"])
def test_low_precision_follows_closely(precision: str) -> None:
    scaler = torch.amp.GradScaler("cpu", 256.0, enabled=precision.startswith("fp16"))
    weight = trained(precision, clip_grad_norm=1.0, scaler=scaler)
    torch.testing.assert_close(weight.float(), by_hand(clip=1.0), rtol=0.05, atol=0.02)
    expected = {"fp16-pure": torch.float16, "bf16-pure": torch.bfloat16}
    assert weight.dtype == expected.get(precision, torch.float32)


def test_fp16_gets_a_scaler_of_its_own() -> None:
    assert vram("fp16").scaler.is_enabled()
    assert vram("fp16-pure").scaler.is_enabled()
    assert not vram("bf16").scaler.is_enabled()


def test_loss_functions_take_what_they_like() -> None:
    model, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[tuple[int, ...]] = []

    def noted(*indexes: int) -> torch.Tensor:
        seen.append(indexes)
        return mse(model, x, y)

    vram(steps=2).train(model, optimizer, lambda: noted())
    vram(steps=1, warmup=1).train(model, optimizer, lambda step: noted(step))
    vram(steps=1).train(model, optimizer, lambda step, micro: noted(step, micro), accumulate=2)
    vram(steps=1).train(model, optimizer, lambda step, scale=3: noted(step, scale))
    assert seen == [(), (), (0,), (1,), (0, 0), (0, 1), (0, 3)]


class Counter:
    steps = 0

    def step(self) -> None:
        self.steps += 1


def test_schedulers_wait_for_a_step_that_was_skipped() -> None:
    model, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = Counter()
    factors = iter([1.0, float("inf"), 1.0])
    scaler = torch.amp.GradScaler("cpu")
    vram("fp16").train(
        model,
        optimizer,
        lambda: mse(model, x, y) * next(factors),
        scheduler=scheduler,
        scaler=scaler,
    )
    assert scheduler.steps == 2


def test_closures() -> None:
    model, x, y = problem()
    optimizer = torch.optim.LBFGS(model.parameters())
    before = mse(model, x, y).item()
    vram().train(model, optimizer, lambda: mse(model, x, y), clip_grad_norm=10.0)
    assert mse(model, x, y).item() < before / 2


@pytest.mark.parametrize(
    ("precision", "sentence"),
    [
        ("fp16", "LBFGS evaluates the loss in a closure, which torch.amp.GradScaler does not"),
        ("bf16-pure", "LBFGS evaluates the loss in a closure, so that master weights could not"),
    ],
)
def test_closures_that_cannot_be(precision: str, sentence: str) -> None:
    model, x, y = problem()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(TrainingError, match=sentence):
        vram(precision).train(model, optimizer, lambda: mse(model, x, y))


def test_master_weights_keep_small_updates_and_are_given_back() -> None:
    model, x, y = problem()
    assert isinstance(model, nn.Linear)
    start = model.weight.detach().clone()
    parameter = model.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    running = vram("bf16-pure", steps=400)
    current = running._running()

    def loss() -> torch.Tensor:
        assert optimizer.param_groups[0]["params"][0] is not parameter
        return mse(model, x.bfloat16(), y.bfloat16())

    running.train(model, optimizer, loss)
    master = optimizer.param_groups[0]["params"][0]
    # Each update is far below the 8 bits of bf16; 400 of them in fp32 are not lost.
    assert (master - start).abs().max() > 100 * 1e-5 * (master - start).abs().max()
    assert not torch.equal(master, start)
    current.undo.close()
    assert optimizer.param_groups[0]["params"][0] is parameter
    assert parameter.dtype == torch.bfloat16


def test_optimizer_state_moves_with_the_masters() -> None:
    model, x, y = problem()
    optimizer = torch.optim.AdamW(model.parameters())
    mse(model, x, y).backward()
    optimizer.step()
    running = vram("bf16-pure", steps=1)
    current = running._running()
    running.train(model, optimizer, lambda: mse(model, x.bfloat16(), y.bfloat16()))
    current.undo.close()
    assert {id(key) for key in optimizer.state} == {id(p) for p in model.parameters()}
    assert all(state["step"] == 2 for state in optimizer.state.values())


def _other_model() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": 5}, "the model must be a torch.nn.Module, not int"),
        ({"optimizer": "adam"}, "the optimizer must be a torch.optim.Optimizer, not str"),
        ({"loss_fn": 5}, "loss_fn must be a function that returns the loss, not int"),
        ({"accumulate": 0}, "accumulate=0: expected a whole number, at least 1"),
        ({"clip_grad_norm": -1.0}, "clip_grad_norm=-1.0: expected a norm above 0"),
        ({"loss_fn": lambda a, b, c: a}, "loss_fn takes 3 arguments: expected none, the step's"),
        (
            {"optimizer": _other_model()},
            r"the optimizer \(2 parameters\) holds none of the model's 2 parameters: make it from",
        ),
    ],
)
def test_what_cannot_be_trained(change: dict[str, Any], sentence: str) -> None:
    model, x, y = problem()
    arguments: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": lambda: mse(model, x, y),
        **change,
    }
    first = [arguments.pop(name) for name in ("model", "optimizer", "loss_fn")]
    with pytest.raises(TrainingError, match=sentence):
        vram().train(*first, **arguments)


LOSSES: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.ones(2, requires_grad=True), "a tensor of shape (2,), not a scalar"),
    (lambda: torch.ones(()), "the loss has no gradient"),
    (lambda: 1.0, "loss_fn returned float, not a tensor"),
    (lambda: torch.ones((), requires_grad=True), "no parameter of the optimizer got a gradient"),
]


@pytest.mark.parametrize(("loss", "sentence"), LOSSES)
def test_unusable_losses(loss: Callable[[], Any], sentence: str) -> None:
    model, _, _ = problem()
    with pytest.raises(TrainingError) as error:
        vram().train(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    assert sentence in str(error.value)


def test_a_phase_needs_a_name() -> None:
    with pytest.raises(ValueError, match="a phase needs a name, not ''"):
        vram().phase("")

"""NaN and inf: noticed where they are, named where they come from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watched_loops import health

from pytest_vram.numerics import Watch
from pytest_vram.numerics.nonfinite import FiniteCheck, describe_bad


def steps(
    model: nn.Module, loss: Callable[[int], Tensor], count: int = 3, rate: float = 0.1
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(count):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).cuda()


def x() -> Tensor:
    return torch.randn(8, 4, device="cuda")


def test_the_first_bad_value_is_told_once() -> None:
    def body() -> None:
        model = net()
        steps(model, lambda step: model(x()).pow(2).mean() / (0.0 if step == 1 else 1.0))

    (found,) = health(body).findings
    assert found.kind == "non-finite"
    assert re.match(
        r"loss is inf at step 2 \(backward at .*test_nonfinite\.py:\d+ ", found.sentence
    )
    assert re.search(r"losses before: \d", found.details[0])
    assert "first non-finite operator: div (float32" in found.text()


def test_a_nan_batch_is_the_datas_fault() -> None:
    def body() -> None:
        model = net()

        def loss(step: int) -> Tensor:
            data = x()
            if step == 2:
                data[0, 0] = torch.nan
            return model(data).mean()

        steps(model, loss)

    (found,) = health(body).findings
    assert "loss is nan at step 3" in found.sentence
    assert (
        "the input of Sequential already held 1 NaN of 32 elements (float32[8, 4])" in found.text()
    )
    assert "clean the batch" in found.hint


def test_exploding_parameters() -> None:
    def body() -> None:
        model = net()
        steps(model, lambda step: model(x()).pow(2).mean(), count=40, rate=1e3)

    (found,) = health(body).findings
    assert found.kind == "non-finite"
    assert re.search(r"(loss|gradient|parameters)", found.sentence)
    assert "learning rate" in found.hint or "derivative" in found.hint


def test_loops_that_give_the_optimizer_a_closure() -> None:
    """Lightning runs forward and backward inside ``optimizer.step(closure)``."""

    def body() -> None:
        model = nn.Linear(4, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                out = model(x())
                loss = (out * 0).abs().sqrt().mean() if step == 1 else out.pow(2).mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    (found,) = health(body).findings
    assert re.match(
        r"loss is finite \(0\) but the gradient of weight and bias is not finite at step 2",
        found.sentence,
    )
    assert "backward of sqrt" in found.text()


def test_adam_whose_eps_is_zero_in_half_precision() -> None:
    def body() -> None:
        model = nn.Linear(4, 4).cuda().half()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8)
        for _ in range(2):
            optimizer.zero_grad()
            (model(x().half()).float() * 1e-9).sum().backward()
            optimizer.step()

    found = health(body).of("non-finite")[0]
    assert re.search(
        r"\d of 2 parameters are not finite after the optimizer's step 1", found.sentence
    )
    assert "eps=1e-08 is 0 in float16" in found.text()


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda h: h.sqrt(), "sqrt"),
        (lambda h: h.norm(dim=-1), "linalg_vector_norm|norm"),
        (lambda h: torch.where(h > 0, h.log(), torch.zeros_like(h)), "log"),
        (lambda h: h.pow(0.5), "pow"),
    ],
    ids=["sqrt", "norm", "where-log", "pow"],
)
def test_derivatives_that_are_infinite_at_zero(
    function: Callable[[Tensor], Tensor], operator: str
) -> None:
    def body() -> None:
        model = nn.Linear(4, 4, bias=False).cuda()
        nn.init.zeros_(model.weight)
        steps(model, lambda step: function(model(x())).mean())

    result = health(body)
    if operator.startswith("linalg"):  # PyTorch defines the subgradient of a norm at 0 as 0
        assert result.of("non-finite") == []
        return
    (found,) = result.of("non-finite")
    assert found.sentence.startswith("loss is finite (0) but the gradient of weight is not finite")
    assert re.search(rf"first non-finite operator: backward of ({operator}) \(", found.text())
    assert re.search(r"test_nonfinite\.py:\d+ <lambda>", found.text())


def test_minus_infinity_in_a_mask_is_followed_to_the_softmax() -> None:
    def body() -> None:
        model = nn.Linear(4, 4).cuda()

        def loss(step: int) -> Tensor:
            scores = model(x())
            mask = torch.zeros(8, 4, dtype=torch.bool, device="cuda")
            mask[3] = True
            return scores.masked_fill(mask, float("-inf")).softmax(-1).sum()

        steps(model, loss, count=1)

    (found,) = health(body).findings
    assert "_softmax" in found.text()
    assert "-inf entered softmax, 1 row entirely -inf -> NaN" in found.text()
    assert "-inf was written by masked_fill" in found.text()


def test_the_module_is_named_by_its_path() -> None:
    class Block(nn.Module):
        def __init__(self, bad: bool) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.bad = bad

        def forward(self, h: Tensor) -> Tensor:
            h = self.inner(h)
            return h / (h - h) if self.bad else h

    def body() -> None:
        model = nn.Sequential(Block(False), Block(True), Block(False)).cuda()
        steps(model, lambda step: model(x()).mean(), count=1)

    (found,) = health(body).findings
    assert re.search(
        r"first non-finite operator: div \(module 1, float32, .*forward\)", found.text()
    )


def test_outputs_without_a_loss() -> None:
    def body() -> None:
        model = net()
        with torch.no_grad():
            model[0].weight.fill_(torch.inf)
            model(x())

    (found,) = health(body).findings
    assert found.sentence.startswith("the output of Sequential is not finite")


def test_losses_are_unscaled_and_in_order() -> None:
    def body() -> None:
        model = nn.Linear(4, 1, bias=False).cuda()
        scaler = torch.amp.GradScaler("cuda")
        for value in (1.0, 2.0, 3.0):
            nn.init.constant_(model.weight, value)
            scaler.scale(F.relu(model(torch.ones(2, 4, device="cuda"))).mean()).backward()

    assert health(body).watch.losses == (4.0, 8.0, 12.0)


def test_a_pass_without_values_judges_wiring_only() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(values=False) as watch:
        model(torch.full((2, 4), torch.nan)).mean().backward()
        optimizer.step()
    assert watch.findings() == ()
    assert watch.losses == ()
    assert watch.notes == ("values were not checked: this pass was simulated",)


def test_the_watch_leaves_nothing_behind() -> None:
    from torch.optim.lr_scheduler import LRScheduler

    def state() -> list[object]:
        return [
            torch.autograd._engine_run_backward,
            torch.amp.GradScaler.step,
            torch.optim.Optimizer.__init__,
            torch.optim.Optimizer.zero_grad,
            nn.Module.zero_grad,
            nn.utils.clip_grad_norm_,
            LRScheduler.step,
            torch.utils.checkpoint.CheckpointFunction,
            F.binary_cross_entropy,
            torch.clear_autocast_cache,
            len(torch.nn.modules.module._global_forward_hooks),
            len(torch.nn.modules.module._global_forward_pre_hooks),
        ]

    before = state()
    with pytest.raises(ZeroDivisionError), Watch():
        raise ZeroDivisionError
    assert state() == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_check(dtype: torch.dtype) -> None:
    check = FiniteCheck()
    good, bad = torch.ones(5, dtype=dtype), torch.ones(5, dtype=dtype)
    bad[2] = torch.inf
    assert check.finite([good, torch.arange(3), torch.ones(0)])
    assert not check.finite([good, bad])
    assert check.bad([good, bad, good]) == [bad]
    bad[3:] = torch.nan
    assert describe_bad(bad) == "2 NaN and 1 inf of 5 elements"


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_the_largest_finite_numbers_are_finite(dtype: torch.dtype, value: float) -> None:
    """Their squares are not, and the check begins with the sum of squares."""
    largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    bad = largest.clone()
    bad[517] = value
    check = FiniteCheck()
    assert check.finite([largest, largest])
    assert not check.finite([largest, bad])


def test_modules_called_under_vmap_are_left_alone() -> None:
    def body() -> None:
        model = nn.Linear(4, 2).cuda()
        parameters = {name: value.detach() for name, value in model.named_parameters()}

        def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
            return torch.func.functional_call(model, parameters, (row,)).square().mean()

        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x())

    assert not [found for found in health(body).findings if found.kind == "non-finite"]


def test_a_mask_times_infinity() -> None:
    def body() -> None:
        model = nn.Linear(4, 4).cuda()
        mask = torch.ones(4, dtype=torch.bool, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scores = model(torch.randn(8, 4, device="cuda")) + ~mask * -torch.inf
        scores.softmax(-1).pow(2).mean().backward()
        optimizer.step()

    (found,) = health(body).of("non-finite")
    assert re.search(r"mul \(float32, .*\) made NaN out of finite inputs", found.text())
    assert found.hint.startswith("0 * inf is NaN: set masked elements with masked_fill")


def test_what_an_operator_made_is_not_called_data() -> None:
    """The second module's input is infinite, because the first part of the model made it so."""

    def body() -> None:
        first, second = nn.Linear(4, 4).cuda(), nn.Linear(4, 1).cuda()
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        second(first(torch.randn(8, 4, device="cuda")) / 0).mean().backward()
        optimizer.step()

    (found,) = health(body).of("non-finite")
    assert "look at the data" not in found.text()
    assert re.search(r"the input of second already held \d+ inf of 32 elements", found.text())
    assert found.hint.startswith("guard the divisor")


class Unguarded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / (ctx.saved_tensors[0] * 0)


def test_the_operator_inside_a_users_backward() -> None:
    def body() -> None:
        model = nn.Linear(4, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Unguarded.apply(model(torch.randn(8, 4, device="cuda"))).mean().backward()
        optimizer.step()

    (found,) = health(body).of("non-finite")
    assert re.search(
        r"first non-finite operator: div in UnguardedBackward \(float32, "
        r".*test_nonfinite\.py:\d+ backward\) made inf out of finite inputs",
        found.text(),
    )
    assert found.hint.startswith("guard the divisor")


def test_a_scale_that_falls_because_the_loss_is_not_finite() -> None:
    """The operator is named once, with the loss."""

    def body() -> None:
        model = nn.Linear(4, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(4):
            scaler.scale(model(torch.randn(8, 4, device="cuda")).sub(1e9).sqrt().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    result = health(body)
    assert result.text().count("first non-finite operator") == 1
    (scale,) = result.of("scaler")
    assert scale.hint == "skipped because the loss is not finite: see there"

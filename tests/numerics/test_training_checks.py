"""Does the step train what it should?"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watched_loops import Budget, health

from pytest_vram.numerics.nonfinite import LossValue
from pytest_vram.numerics.training_checks import repeated_loss


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (8, 4)), device="cuda")


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], Tensor],
    count: int = 4,
) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def only(body: Callable[[], None], **budget: Any) -> str:
    (found,) = health(body, Budget(**budget)).findings
    assert found.kind == "untrained"
    assert found.severity == "fail"
    return found.text()


def test_a_loss_that_was_detached_half_way() -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        loop(model, optimizer, lambda: model[1](model[0](x()).detach()).mean())

    text = only(body)
    assert text.startswith(
        "2 of 4 trainable parameters of optimizer Adam have grad None after backward: 0.weight and "
        "0.bias; their modules ran, but the loss does not depend on their output"
    )
    assert "0.weight [4, 4]" in text
    assert re.search(r"\n  backward at .*test_training_checks\.py:\d+ loop\n", text)


def test_a_loss_that_was_made_anew() -> None:
    def body() -> None:
        model = nn.Linear(4, 1).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        loop(model, optimizer, lambda: model(x()).mean().detach().requires_grad_())

    assert (
        "weight and bias; the loss is a tensor made to require grad by itself (requires_grad_(), "
        "Variable, a new tensor), and nothing before it gets a gradient" in only(body)
    )


def test_a_loss_of_predictions_that_were_made_anew() -> None:
    def body() -> None:
        model = nn.Linear(4, 3).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        loop(model, optimizer, lambda: model(x()).argmax(1).float().requires_grad_().mean())

    assert (
        "weight and bias; the graph of the loss ends at a float32[8] made to require grad by itself"
        in only(body)
    )


def test_an_input_with_a_gradient_of_its_own_explains_nothing() -> None:
    """As in adversarial training; here a layer is not used."""

    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        loop(model, optimizer, lambda: model[1](x().requires_grad_()).mean())

    assert "0.weight and 0.bias; their modules did not run (unused branch)" in only(body)


class Swallow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def test_a_function_of_the_user_that_returns_no_gradient() -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        loop(model, optimizer, lambda: model[1](Swallow.apply(model[0](x()))).mean())

    assert re.search(
        r"0\.weight and 0\.bias; Swallow\.backward \(.*test_training_checks\.py:\d+ backward\) "
        r"returned None for what they depend on",
        only(body),
    )


def test_parameters_that_are_trainable_only_after_the_optimizer_was_made() -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        loop(model, optimizer, lambda: model(x()).mean(), count=2)
        model[0].requires_grad_(True)
        loop(model, optimizer, lambda: model(x()).mean())

    text = only(body)
    assert (
        "2 parameters get gradients but no optimizer holds them: 0.weight and 0.bias; they were "
        "frozen when it was made, and trainable only since" in text
    )
    assert "optimizer.add_param_group" in text


def test_a_wrapped_optimizer_is_no_second_one() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

        @property
        def param_groups(self) -> Any:
            return self.inner.param_groups

        def step(self, closure: Any = None) -> None:
            self.inner.step()

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.inner.zero_grad(set_to_none)

    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
        optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer.inner)
        schedule.optimizer = optimizer
        for _ in range(3):
            optimizer.zero_grad()
            model[1](x()).mean().backward()
            optimizer.step()
            schedule.step()

    assert "2 of 4 trainable parameters of optimizer SGD have grad None" in only(body)


def test_modules_that_ran_without_gradients() -> None:
    def body() -> None:
        trunk, head = nn.Linear(4, 4).cuda(), nn.Linear(4, 1).cuda()
        optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1)

        def loss() -> Tensor:
            with torch.no_grad():
                hidden = trunk(x())
            return head(hidden).mean()

        loop(head, optimizer, loss)

    text = only(body)
    assert "trunk.weight and trunk.bias; their modules ran only under torch.no_grad()" in text


def test_an_optimizer_that_holds_replaced_parameters() -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[0] = nn.Linear(4, 4).cuda()
        loop(model, optimizer, lambda: model(x()).mean())

    assert (
        "2 parameters get gradients but no optimizer holds them: 0.weight and 0.bias; they were "
        "added to the model after the optimizer was made" in only(body)
    )


def test_an_optimizer_on_a_copy_of_the_model() -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained = copy.deepcopy(model)
        loop(trained, optimizer, lambda: trained(x()).mean())

    assert "another Sequential of the same shape ran, which no optimizer holds" in only(body)


def test_layers_in_a_plain_list_are_no_parameters_of_the_model() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.rest = [nn.Linear(4, 4).cuda()]

        def forward(self, inputs: Tensor) -> Tensor:
            return self.rest[0](self.first(inputs))

    def body() -> None:
        model = Stack().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop(model, optimizer, lambda: model(x()).mean())

    text = only(body)
    assert (
        "2 parameters get gradients but no optimizer holds them: rest[0].weight and rest[0].bias; "
        "their modules run inside the model but are not registered in it" in text
    )
    assert "nn.ModuleList" in text


def test_a_rate_of_zero() -> None:
    def body() -> None:
        model = nn.Linear(4, 1).cuda()
        loop(model, torch.optim.SGD(model.parameters(), lr=0.0), lambda: model(x()).mean())

    assert only(body).startswith(
        "optimizer SGD changed nothing in 4 updates: its learning rate is 0"
    )


def test_gradients_of_zero() -> None:
    def body() -> None:
        model, data = nn.Linear(4, 1).cuda(), x()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop(model, optimizer, lambda: (data.sum() + 0 * model(data)).pow(2).mean())

    (found,) = health(body).findings
    assert found.severity == "warn"
    assert re.match(
        r"optimizer SGD changed nothing in 4 updates: every gradient is exactly 0, though the loss "
        r"is not \(backward at .*test_training_checks\.py:\d+ loop\)",
        found.sentence,
    )
    assert "a factor 0, a saturated loss, softmax over one element" in found.hint


def test_gradients_of_zero_where_something_starts_at_zero() -> None:
    def body() -> None:
        model = nn.Linear(4, 1).cuda()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop(model, optimizer, lambda: (1 + 0 * model(x())).mean())

    result = health(body)
    assert result.findings == ()
    assert result.watch.notes[0].startswith("optimizer SGD changed nothing in 4 updates")


def test_float16_gradients_that_underflow_without_a_scaler() -> None:
    def body() -> None:
        model = nn.Linear(64, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss() -> Tensor:
            with torch.autocast("cuda", dtype=torch.float16):
                return model(x(1024, 64)).pow(2).mean() * 1e-5

        loop(model, optimizer, loss)

    (found,) = health(body).findings
    assert "every gradient is exactly 0" in found.sentence
    assert found.hint == "float16 gradients under 6e-8 are 0: scale the loss with a GradScaler"


def test_rounding_has_no_slope() -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop(model, optimizer, lambda: (model[1](model[0](x()).mul(4).round()) - 1).pow(2).mean())

    (found,) = health(body).findings
    assert "0.weight and 0.bias are exactly 0" in found.sentence
    assert found.hint.startswith(
        "the derivative of round is 0 everywhere: pass the gradient around it, x + (x.round() - "
        "x).detach(); or look for"
    )


def test_an_optimizer_that_never_steps() -> None:
    def body() -> None:
        model = nn.Linear(4, 1).cuda()
        torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(x()).mean().backward()

    (found,) = [f for f in health(body).findings if f.severity == "fail"]
    assert re.match(
        r"optimizer SGD.* was never stepped, though 4 backward passes gave its parameters grad",
        found.sentence,
    )


def test_frozen_parameters_that_momentum_moves() -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(x()).mean().backward()
        model[0].requires_grad_(False)
        optimizer.step()

    text = only(body)
    assert "2 frozen parameters (requires_grad=False) were changed by the optimizer step at" in text
    assert "0.weight and 0.bias" in text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_below_the_resolution(dtype: torch.dtype) -> None:
    def body() -> None:
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1)).cuda().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, eps=1e-4, weight_decay=0.0)
        loop(model, optimizer, lambda: model(x().to(dtype)).float().pow(2).mean())

    text = only(body)
    assert re.search(
        rf"after 4 updates 100 % of the elements of \S+ are bit-identical although their "
        rf"gradients are not zero: {str(dtype)[6:]} updates round to nothing",
        text,
    )
    assert "fp32 master weights" in text


def test_fp32_parameters_of_the_same_model_move() -> None:
    def body() -> None:
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
        loop(model, optimizer, lambda: model(x()).pow(2).mean())

    assert health(body).findings == ()


def test_few_small_gradients_in_bf16_prove_nothing_yet() -> None:
    """With SGD the size of an update is the gradient's: three steps are too few to judge."""

    def body() -> None:
        model = nn.Linear(4, 1).cuda().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        loop(model, optimizer, lambda: model(x().bfloat16()).float().pow(2).mean(), count=3)

    assert health(body).findings == ()


def test_a_parameter_outside_the_pattern_and_one_inside_without_gradient() -> None:
    def body() -> None:
        model = nn.ModuleDict({"lora_a": nn.Linear(4, 4), "base": nn.Linear(4, 1),
                               "lora_b": nn.Linear(4, 4)}).cuda()  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loop(model, optimizer, lambda: model["base"](model["lora_a"](x())).mean())

    found = health(body, Budget(trainable="lora_*")).findings
    assert [f.kind for f in found] == ["untrained", "untrained"]
    text = "\n".join(f.text() for f in found)
    assert "lora_b.weight and lora_b.bias; their modules did not run (unused branch)" in text
    assert (
        "2 parameters outside trainable='lora_*' received gradients: base.weight and base.bias; 25 "
        "elements train instead of 20 (x1.25)" in text
    )


def test_what_is_left_out_of_the_optimizer_need_not_train() -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        loop(model, optimizer, lambda: model(x()).mean())

    (found,) = health(body).findings
    assert found.severity == "warn"
    assert "2 parameters get gradients but no optimizer holds them" in found.sentence
    assert "no optimizer.zero_grad() clears them" in found.details[0]
    assert "they were left out when it was made" in only(body, trainable="*")


def losses(*values: float, updates: bool = True, dtype: str = "float32") -> list[LossValue]:
    return [
        LossValue(dtype, value, step=n, line="l", updates=n if updates else 0)
        for n, value in enumerate(values)
    ]


def test_repeated_losses() -> None:
    assert repeated_loss(losses(1.5, 1.5, 1.5)) is not None
    assert repeated_loss(losses(1.5, 1.5)) is None
    assert repeated_loss(losses(1.5, 1.5, 1.25)) is None
    assert repeated_loss(losses(0.0, 0.0, 0.0)) is None
    assert repeated_loss(losses(1.5, 1.5, 1.5, updates=False)) is None
    assert repeated_loss(losses(1.5, 1.5, 1.5, dtype="bfloat16")) is None

"""Mistakes in the order of calls: each finding names its line and its parameters."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from watched_loops import health


def setting(scale: float = 65536.0) -> tuple[nn.Module, Any, Any]:
    model = nn.Linear(4, 1).cuda()
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.amp.GradScaler("cuda", init_scale=scale),
    )


def x(rows: int = 8, width: int = 4) -> torch.Tensor:
    return torch.randn(rows, width, device="cuda")


def clip_by_value_before_unscale() -> None:
    model, optimizer, scaler = setting()
    scaler.scale(model(x()).mean()).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()


def unscale_twice() -> None:
    model, optimizer, scaler = setting()
    scaler.scale(model(x()).mean()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def step_twice() -> None:
    model, optimizer, scaler = setting()
    scaler.scale(model(x()).mean()).backward()
    scaler.step(optimizer)
    scaler.step(optimizer)


def update_missing() -> None:
    model, optimizer, scaler = setting()
    for _ in range(2):
        scaler.scale(model(x()).mean()).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()


def update_missing_with_clipping() -> None:
    model, optimizer, scaler = setting()
    for _ in range(2):
        scaler.scale(model(x()).mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        optimizer.zero_grad()


def update_per_micro_batch() -> None:
    model, optimizer, scaler = setting()
    for micro in range(2):
        scaler.scale(model(x()).mean() / 2).backward()
        if micro == 1:
            scaler.step(optimizer)
        scaler.update()


def plain_step_on_scaled_gradients() -> None:
    model, optimizer, scaler = setting()
    scaler.scale(model(x()).mean()).backward()
    optimizer.step()


def closure_under_a_scaler() -> None:
    model, _, scaler = setting()
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(x()).pow(2).mean()
        scaler.scale(loss).backward()
        return loss

    closure()
    scaler.step(optimizer, closure)
    scaler.update()


def closure_as_keyword() -> None:
    model, optimizer, scaler = setting()
    scaler.scale(model(x()).mean()).backward()
    scaler.step(optimizer, closure=lambda: None)


def bf16_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1).bfloat16()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x()).float().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def frozen_optimizer() -> None:
    model, _, scaler = setting()
    frozen = nn.Linear(4, 4).cuda().requires_grad_(False)
    optimizer = torch.optim.SGD(frozen.parameters(), lr=0.1)
    scaler.scale(model(frozen(x())).mean()).backward()
    scaler.step(optimizer)


def optimizer_of_another_copy() -> None:
    model, _, scaler = setting()
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    scaler.scale(model(x()).mean()).backward()
    scaler.step(optimizer)


def zeroed_between_backward_and_step() -> None:
    model, optimizer, scaler = setting()
    scaler.scale(model(x()).mean()).backward()
    optimizer.zero_grad()
    scaler.step(optimizer)


def loss_not_divided() -> None:
    model, optimizer, _ = setting()
    for _ in range(2):
        for _ in range(4):
            nn.functional.mse_loss(model(x()), x(8, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def loss_not_divided_under_a_scaler() -> None:
    model, optimizer, scaler = setting(1.0)
    for _ in range(3):
        scaler.scale(model(x()).pow(2).mean()).backward()
    scaler.step(optimizer)
    scaler.update()


def never_zeroed() -> None:
    model, optimizer, _ = setting()
    for _ in range(3):
        model(x()).mean().backward()
        optimizer.step()


def scaler_not_resumed() -> None:
    model, _, _ = setting()
    saved = torch.optim.Adam(model.parameters())
    model(x()).mean().backward()
    saved.step()
    model.zero_grad()
    again = torch.optim.Adam(model.parameters())
    again.load_state_dict(saved.state_dict())
    fresh = torch.amp.GradScaler("cuda")
    fresh.scale(model(x()).mean()).backward()
    fresh.step(again)
    fresh.update()


def closure_without_zero_grad() -> None:
    model, data = nn.Linear(4, 1).cuda(), x()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        loss = (model(data) - 1).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


def clipping_a_used_generator() -> None:
    model = nn.Linear(4, 1).cuda()
    parameters = model.parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    model(x()).mean().backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def updated_between_backward_and_step() -> None:
    first, second = nn.Linear(4, 1).cuda(), nn.Linear(4, 1).cuda()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0)
    for model in (first, second):
        scaler.scale(model(x()).mean()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()


def updated_between_unscale_and_step() -> None:
    model, optimizer, scaler = setting(128.0)
    scaler.scale(model(x()).mean()).backward()
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.step(optimizer)


def scaler_not_resumed_into_the_same_optimizer() -> None:
    model = nn.Linear(4, 1).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for scaler in (torch.amp.GradScaler("cuda", init_scale=128.0), torch.amp.GradScaler("cuda")):
        optimizer.zero_grad()
        scaler.scale(model(x()).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.load_state_dict(optimizer.state_dict())


def reentrant_segments_of_a_frozen_input() -> None:
    """Nothing requires a gradient any more, so backward raises."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).cuda()
    torch.optim.SGD(model.parameters(), lr=0.1)
    hidden = x()
    for layer in model:
        hidden = checkpoint(layer, hidden, use_reentrant=True)
    hidden.mean().backward()


def one_autocast_region_around_the_loop() -> None:
    model, optimizer, _ = setting()
    with torch.autocast("cuda", dtype=torch.float16):
        for _ in range(2):
            model(x()).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def zeroed_before_a_plain_step() -> None:
    model, optimizer, _ = setting()
    for _ in range(2):
        model(x()).mean().backward()
        optimizer.zero_grad()
        optimizer.step()


def clip_after_the_step() -> None:
    model, optimizer, _ = setting()
    for _ in range(2):
        optimizer.zero_grad()
        model(x()).mean().backward()
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def scale_forgotten() -> None:
    model, optimizer, scaler = setting()
    scaler.scale(torch.ones((), device="cuda"))
    model(x()).mean().backward()
    scaler.step(optimizer)
    scaler.update()


WRONG: dict[Callable[[], None], str] = {
    clip_by_value_before_unscale: r"clipped while scaled by 65536: clip_grad_value_ at .*test_wi",
    unscale_twice: r"unscale_\(\) was called twice for optimizer SGD before update\(\): first at "
    r"\S+test_wiring\.py:(\d+) unscale_twice, again at \S+test_wiring\.py:(?!\1)\d+ ",
    step_twice: r"scaler\.step\(\) was called twice for optimizer SGD .*first at .*again at",
    update_missing: r"called twice .*without scaler\.update\(\).*is missing",
    update_missing_with_clipping: r"unscale_\(\) at .* comes after scaler\.step\(\) at .*update"
    r"\(\) missing",
    update_per_micro_batch: r"scaler\.update\(\) at .* had nothing to go by.*not per micro-batch",
    plain_step_on_scaled_gradients: r"optimizer\.step\(\) at .* uses gradients that are still "
    r"multiplied by the loss scale 65536",
    closure_under_a_scaler: r"scaler\.step\(\) at .* got a closure",
    closure_as_keyword: r"scaler\.step\(\) at .* got a closure for optimizer SGD",
    bf16_parameters: r"2 of 4 trainable parameters are bfloat16 under a GradScaler: 1\.weight and "
    r"1\.bias",
    frozen_optimizer: r"0 of 2 gradients .*all of them are frozen",
    optimizer_of_another_copy: r"0 of 2 gradients .*built on another copy",
    zeroed_between_backward_and_step: r"without gradients: zero_grad at .* cleared them after",
    loss_not_divided: r"4 micro-batches were accumulated at .* not divided by 4: each is a mean "
    r"\(MseLoss\), so gradients are 4 times too large.*\(loss / 4\)\.backward\(\)",
    loss_not_divided_under_a_scaler: r"3 micro-batches were accumulated .*not divided by 3",
    zeroed_before_a_plain_step: r"optimizer SGD steps at .* without gradients: zero_grad at .* "
    r"cleared them after backward",
    clip_after_the_step: r"clip_grad_norm_ at .* comes after the optimizer's step",
    scale_forgotten: r"scaler\.step\(\) at .* divides the gradients .* by 65536, but backward "
    r"started from a loss that was not scaled",
    never_zeroed: r"gradients of earlier steps added in .*weight and bias",
    closure_without_zero_grad: r"optimizer LBFGS steps at .* with gradients of earlier steps added "
    r"in \(step 2\): backward at .* closure added",
    clipping_a_used_generator: r"clip_grad_norm_ at .* was given no parameters, so nothing is "
    r"clipped: a generator such as model\.parameters\(\) can be used once",
    updated_between_backward_and_step: r"scaler\.update\(\) at .* runs between the backward of "
    r"optimizer SGD of 'second' \(.*\) and its step at .*: when it changes the scale",
    updated_between_unscale_and_step: r"the gradients of optimizer SGD are unscaled twice: by "
    r"unscale_\(\) at .* and again by scaler\.step\(\) at .*, because scaler\.update\(\)",
    scaler_not_resumed_into_the_same_optimizer: r"optimizer Adam resumes from a saved state .* but "
    r"its GradScaler starts anew",
    reentrant_segments_of_a_frozen_input: r"checkpoint\(use_reentrant=True\) at .* got no input "
    r"that requires grad: 4 of 4 trainable parameters inside get no gradient \(0\.weight, "
    r"0\.bias, 1\.weight and 1\.bias\)",
    scaler_not_resumed: r"optimizer Adam.* resumes from a saved state \(loaded at .*\), but its "
    r"GradScaler starts anew at scale 65536",
    one_autocast_region_around_the_loop: r"optimizer\.step\(\) at .* inside an autocast region",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("body", WRONG, ids=lambda body: body.__name__)
def test_mistake_is_named(body: Callable[[], None]) -> None:
    result = health(body)
    assert re.search(WRONG[body], result.text(), re.S), (result.text(), result.error)
    assert all(finding.hint for finding in result.findings)


def test_several_optimizers_are_told_apart_by_their_parameters() -> None:
    def body() -> None:
        generator, critic = nn.Linear(4, 4).cuda(), nn.Linear(4, 1).cuda()
        first = torch.optim.SGD(generator.parameters(), lr=0.1)
        second = torch.optim.SGD(critic.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", growth_interval=1)
        scaler.scale(critic(generator(x())).mean()).backward()
        scaler.step(first)
        scaler.update()
        scaler.step(second)
        scaler.update()

    (found,) = health(body).of("scaler")
    assert re.match(
        r"optimizer SGD of 'critic' is unscaled with 131072 at .*, but its gradients were produced "
        r"with scale 65536 \(x0\.5\)",
        found.sentence,
    )


def test_a_plain_step_beside_the_scaler() -> None:
    def body() -> None:
        model, optimizer, scaler = setting(128.0)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(x()).mean()).backward()
            scaler.step(optimizer)
            optimizer.step()
            scaler.update()

    (found,) = health(body).of("scaler")
    assert "is stepped twice per backward" in found.sentence
    assert "rejected" not in found.sentence


def test_each_optimizer_with_its_own_update_is_healthy() -> None:
    def body() -> None:
        first, second = nn.Linear(4, 1).cuda(), nn.Linear(4, 1).cuda()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
        scaler = torch.amp.GradScaler("cuda", init_scale=128.0)
        for _ in range(3):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                optimizer.zero_grad()
                scaler.scale(model(x()).mean()).backward()
                scaler.step(optimizer)
                scaler.update()

    assert health(body).findings == ()


def test_a_closure_of_micro_batches_is_healthy() -> None:
    def body() -> None:
        model, data = nn.Linear(4, 1).cuda(), x()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            losses = [(model(part) - 1).pow(2).mean() / 2 for part in data.chunk(2)]
            for loss in losses:
                loss.backward()
            return sum(losses)

        for _ in range(3):
            optimizer.step(closure)

    assert health(body).findings == ()

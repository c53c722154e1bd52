"""Faults that public reports describe, each beside its healthy twin: the fault is named with its
line, the twin passes in silence."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watched_loops import batch, health, mlp, sgd

Loop = Callable[[bool], None]
PAIRS: dict[str, tuple[Loop, str, str, str]] = {}


def pair(kind: str, severity: str, says: str) -> Callable[[Loop], Loop]:
    """``says``: what the text of the faulty form's finding matches."""

    def add(loop: Loop) -> Loop:
        PAIRS[loop.__name__] = loop, kind, severity, says
        return loop

    return add


def half_loss(model: nn.Module, factor: float = 1.0) -> Tensor:
    with torch.autocast("cuda", dtype=torch.float16):
        return model(batch()).float().pow(2).mean() * factor


# ---- gradients that are changed by hand while they are scaled


def scaled(change: Callable[[nn.Module], None], faulty: bool) -> None:
    """``change`` runs before unscale_ in the faulty form, after it in the healthy one."""
    model = mlp(16, 32, 4)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cuda", init_scale=1024.0)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(half_loss(model)).backward()
        if not faulty:
            scaler.unscale_(optimizer)
        change(model)
        scaler.step(optimizer)
        scaler.update()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pair("scaler", "fail", r"clipped while scaled by 1024 at \S+:\d+ clip by mul_: the norm over .* "
      r"is brought to 0\.1; after unscaling that is 9\.766e-05")  # fmt: skip
def a_norm_clipped_by_a_loop(faulty: bool) -> None:
    def clip(model: nn.Module) -> None:
        total = torch.stack([grad.norm() for grad in gradients(model)]).norm()
        for grad in gradients(model):
            grad.mul_((0.1 / (total + 1e-6)).clamp(max=1.0))

    scaled(clip, faulty)


@pair("scaler", "fail", r"clipped while scaled by 1024 at \S+:\d+ clip by _foreach_mul_: the norm")
def a_norm_clipped_by_foreach(faulty: bool) -> None:
    def clip(model: nn.Module) -> None:
        total = torch.stack(list(torch._foreach_norm(gradients(model)))).norm()
        torch._foreach_mul_(gradients(model), (0.1 / total).clamp(max=1.0))

    scaled(clip, faulty)


@pair("scaler", "fail", r"clipped while scaled by 1024 at \S+:\d+ clip: each of 0\.weight, .* is "
      "brought to its own norm")  # fmt: skip
def a_norm_for_each_parameter(faulty: bool) -> None:
    def clip(model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad / max(1.0, float(parameter.grad.norm()) / 0.1)

    scaled(clip, faulty)


@pair("scaler", "fail", r"clipped while scaled by 1024 at \S+:\d+ clip by clamp_: 0\.weight is "
      r"limited to 0\.1; after unscaling that is 9\.766e-05 instead of 0\.1")  # fmt: skip
def a_threshold_on_the_data_of_gradients(faulty: bool) -> None:
    def clip(model: nn.Module) -> None:
        for grad in gradients(model):
            grad.data.clamp_(-0.1, 0.1)

    scaled(clip, faulty)


@pair("scaler", "fail", r"changed while scaled by 1024 at \S+:\d+ disturb by add_, element by")
def noise_on_gradients(faulty: bool) -> None:
    def disturb(model: nn.Module) -> None:
        for grad in gradients(model):
            grad.add_(torch.randn_like(grad), alpha=1e-3)

    scaled(disturb, faulty)


@pair("scaler", "fail", r"inf or NaN was replaced in the scaled gradient of 0\.weight at \S+:\d+")
def an_overflow_that_is_hidden_from_the_scaler(faulty: bool) -> None:
    model = mlp(16, 32, 4)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cuda", init_scale=2.0**24)
    for _ in range(14):
        optimizer.zero_grad()
        scaler.scale(half_loss(model, 100.0)).backward()
        for parameter in model.parameters() if faulty else ():
            assert parameter.grad is not None
            parameter.grad = torch.nan_to_num(parameter.grad, 0.0, 0.0, 0.0)
        scaler.step(optimizer)
        scaler.update()


# ---- units


@pair("scaler", "fail", r"different units: scaled by 1024 at \S+:(\d+) .*scaled by 512 at \S+:\1 "
      r".*scaler\.update\(\) ran in between at \S+.*between micro-batches")  # fmt: skip
def a_new_scale_between_micro_batches(faulty: bool) -> None:
    model = mlp(16, 32, 4)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cuda", init_scale=1024.0)
    for _ in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            scaler.scale(half_loss(model, 0.5)).backward()
            if faulty and micro == 0:
                scaler.update(512.0)
        scaler.step(optimizer)
        scaler.update(1024.0)


@pair("scaler", "fail", r"different units: scaled by 1024 at \S+:\d+ .*, not scaled at \S+:\d+ .*"
      r"start every backward from scaler\.scale\(loss\)")  # fmt: skip
def a_second_loss_that_is_not_scaled(faulty: bool) -> None:
    model = mlp(16, 32, 4)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cuda", init_scale=1024.0)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(batch()).float()
        scaler.scale(out.pow(2).mean()).backward(retain_graph=True)
        penalty = out.abs().sum()
        (penalty if faulty else scaler.scale(penalty)).backward()
        scaler.step(optimizer)
        scaler.update()


@pair("scaler", "fail", r"another GradScaler than the one that scaled its loss: scaled by 1024 at ")
def a_scaler_that_did_not_scale(faulty: bool) -> None:
    model = mlp(16, 32, 4)
    optimizer = sgd(model)
    first = torch.amp.GradScaler("cuda", init_scale=1024.0)
    second = torch.amp.GradScaler("cuda", init_scale=256.0) if faulty else first
    second.scale(torch.zeros((), device="cuda"))
    for _ in range(3):
        optimizer.zero_grad()
        first.scale(half_loss(model)).backward()
        second.step(optimizer)
        second.update()


@pair("scaler", "warn", r"100 % of the elements that are not 0 lie under 6\.1e-05 \(0\.weight and "
      r"2\.weight\).*the loss is not scaled")  # fmt: skip
def small_float16_gradients(faulty: bool) -> None:
    model = mlp(16, 32, 4)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cuda", enabled=not faulty)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(half_loss(model, 1e-5)).backward()
        scaler.step(optimizer)
        scaler.update()


# ---- what is used twice, and what is not used


@pair("untrained", "warn", r"gradients of 0\.weight, .* are applied twice: by optimizer \w+ at "
      r"\S+:(\d+) .* and again by optimizer \w+ at \S+:(?!\1)\d+ ")  # fmt: skip
def two_optimizers_on_the_same_parameters(faulty: bool) -> None:
    model = mlp(16, 32, 4)
    first = sgd(model if faulty else model[0])
    second = torch.optim.AdamW((model if faulty else model[2]).parameters())
    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        model(batch()).pow(2).mean().backward()
        first.step()
        second.step()


@pair("untrained", "fail", r"gradients of 2\.weight and 2\.bias are applied twice: .*, and divided "
      "by the loss scale twice")  # fmt: skip
def two_optimizers_on_a_shared_layer_under_a_scaler(faulty: bool) -> None:
    model = mlp(16, 32, 4)
    first, second = sgd(model if faulty else model[0]), sgd(model[2])
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        scaler.scale(half_loss(model)).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()


@pair("untrained", "warn", r"optimizer SGD steps twice with the same gradients: at \S+:(\d+) .* "
      r"and again at \S+:(?!\1)\d+ ")  # fmt: skip
def two_steps_per_backward(faulty: bool) -> None:
    model = mlp(16, 32, 4)
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch()).pow(2).mean().backward()
        optimizer.step()
        if faulty:
            optimizer.step()


@pair("untrained", "warn", r"with gradients of an earlier step for second\.0\.weight and "
      r"second\.0\.bias: they were used at \S+")  # fmt: skip
def a_head_that_is_not_cleared(faulty: bool) -> None:
    trunk, first, second = mlp(16, 32), mlp(32, 4), mlp(32, 2)
    optimizer = sgd(trunk, first, second)
    for number in range(6):
        head = first if number % 2 else second
        for module in (trunk, head) if faulty else (trunk, first, second):
            module.zero_grad()
        head(trunk(batch())).pow(2).mean().backward()
        optimizer.step()


@pair("untrained", "warn", r"2 of 3 backward passes at \S+ .* count for nothing: zero_grad at \S+ "
      r".* throws their gradients away before the step at \S+")  # fmt: skip
def zero_grad_for_every_micro_batch(faulty: bool) -> None:
    model = mlp(16, 32, 4)
    optimizer = sgd(model)
    for number in range(9):
        if faulty or number % 3 == 0:
            optimizer.zero_grad()
        (model(batch()).pow(2).mean() / 3).backward()
        if number % 3 == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


@pair("untrained", "warn", r"clip_grad_norm_ at \S+ .* clips nothing: none of the 4 parameters it "
      r"is given has a gradient \(other\.0\.weight")  # fmt: skip
def clipping_another_model(faulty: bool) -> None:
    model, other = mlp(16, 32, 4), mlp(16, 32, 4)
    optimizer = sgd(model)
    for _ in range(4):
        optimizer.zero_grad()
        model(batch()).pow(2).mean().backward()
        nn.utils.clip_grad_norm_((other if faulty else model).parameters(), 1.0)
        optimizer.step()


@pair("untrained", "fail", r"the optimizer was built on another copy of the model")
def an_optimizer_made_before_a_copy(faulty: bool) -> None:
    model = mlp(16, 32, 4)
    optimizer = sgd(model)
    if faulty:
        model = copy.deepcopy(model)
    for _ in range(4):
        optimizer.zero_grad()
        model(batch()).pow(2).mean().backward()
        optimizer.step()


@pair("untrained", "fail", r"no optimizer holds them: 0\.weight and 2\.weight; they were added to")
def parameters_that_are_made_anew(faulty: bool) -> None:
    model = mlp(16, 32, 4)
    optimizer = sgd(model)
    for _ in range(4):
        optimizer.zero_grad()
        model(batch()).pow(2).mean().backward()
        optimizer.step()
        for layer in (model[0], model[2]) if faulty else ():
            layer.weight = nn.Parameter(layer.weight.detach().clone())


@pair("untrained", "warn", r"back\.0\.weight.*nobody uses these gradients.*save the backward")
def a_backbone_that_is_not_frozen(faulty: bool) -> None:
    back, head = mlp(16, 32), mlp(32, 4)
    back.requires_grad_(faulty)
    optimizer = sgd(head)
    for _ in range(4):
        optimizer.zero_grad()
        head(back(batch())).pow(2).mean().backward()
        optimizer.step()


# ---- not finite


def train(loss: Callable[[nn.Module], Tensor], rate: float = 0.01) -> None:
    model = mlp(16, 32, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(4):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


@pair("non-finite", "fail", r"masked_fill \(float32, \S+ loss\) wrote -inf; it reaches the loss at "
      r"\S+ loss.*averages over all classes")  # fmt: skip
def label_smoothing_over_masked_classes(faulty: bool) -> None:
    masked = torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.bool, device="cuda")

    def loss(model: nn.Module) -> Tensor:
        logits = model(batch()).masked_fill(masked, -torch.inf if faulty else -1e4)
        targets = torch.zeros(8, dtype=torch.long, device="cuda")
        return F.cross_entropy(logits, targets, label_smoothing=0.1)

    train(loss)


@pair(
    "non-finite", "fail", r"sqrt \(float32, \S+ loss\) made NaN.*root of a negative number is NaN"
)
def a_root_in_a_branch_that_is_not_taken(faulty: bool) -> None:
    def loss(model: nn.Module) -> Tensor:
        out = model(batch())
        safe = out if faulty else torch.where(out > 0, out, torch.ones_like(out))
        return torch.where(out > 0, safe.sqrt(), torch.zeros_like(out)).mean()

    train(loss)


@pair("non-finite", "fail", r"loss is inf at step 2.*pow .* made inf.*lower the learning rate")
def a_rate_that_explodes(faulty: bool) -> None:
    train(lambda model: model(batch() * 5).pow(4).mean(), 1e6 if faulty else 1e-3)


@pair("non-finite", "fail", r"running statistics are not finite at step 2 .*: running_mean of 1 "
      r"and running_var of 1; in eval mode these modules give NaN")  # fmt: skip
def a_skipped_batch_that_stays_in_the_statistics(faulty: bool) -> None:
    """The forward overflows once; the scaler skips the step, batch norm does not."""
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).cuda()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cuda", init_scale=256.0)
    for number in range(4):
        optimizer.zero_grad()
        x = batch()
        with torch.autocast("cuda", dtype=torch.float16):
            hidden = model[0](x * (1e6 if faulty and number == 1 else 1.0))
        out = model[2](model[1](hidden.float())).nan_to_num(0.0)
        scaler.scale(out.pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()


@pair("non-finite", "fail", r"linalg_inv_ex .* made NaN.*the matrix is singular.*identity")
def a_matrix_without_an_inverse(faulty: bool) -> None:
    def loss(model: nn.Module) -> Tensor:
        rows = model(batch())[:, :2]
        square = rows[:1].T @ rows[:1]
        ridge = torch.eye(2, device="cuda") * (0.0 if faulty else 1.0)
        return torch.linalg.inv_ex(square + ridge)[0].sum()

    train(loss)


@pair("scaler", "fail", r"skipped after the warm-up.*; scaler\.update\(new_scale\) at \S+:\d+ .* "
      r"raises it again by hand")  # fmt: skip
def a_scale_that_is_raised_by_hand(faulty: bool) -> None:
    model = mlp(16, 32, 4)
    start = 2.0**30 if faulty else 1024.0
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cuda", init_scale=start)
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale(half_loss(model, 1e4 if faulty else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if faulty and scaler.get_scale() < 2.0**29:
            scaler.update(2.0**30)


# ---- the tests


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PAIRS)
def test_the_fault_is_named(name: str) -> None:
    loop, kind, severity, says = PAIRS[name]
    result = health(lambda: loop(True))
    told = [finding.text() for finding in result.of(kind) if finding.severity == severity]
    assert any(re.search(says, text, re.S) for text in told), (result.text(), result.error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PAIRS)
def test_its_twin_is_healthy(name: str) -> None:
    result = health(lambda: PAIRS[name][0](False))
    assert result.error is None
    assert result.findings == (), result.text()

"""Healthy programs that do, on purpose, what a fault does by mistake: not one finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watched_loops import Budget, batch, health, memory_findings, mlp, sgd

WIDE = 256


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


# ---- gradients that the loop changes


def scaled(change: Callable[[nn.Module, int], None], clip: bool = True) -> None:
    model = mlp(16, 32, 4)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cuda", init_scale=1024.0)
    for number in range(5):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch()).float().pow(2).mean()
        scaler.scale(loss).backward()
        change(model, number)
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


def scaled_gradients_are_averaged() -> None:
    """By the number of processes: the same in either unit."""
    scaled(lambda model, number: [grad.div_(2) for grad in gradients(model)] and None)


def scaled_gradients_are_divided_by_tokens() -> None:
    """Another number in each step."""
    scaled(lambda model, number: [grad.div_(8 + number) for grad in gradients(model)] and None)


def a_rate_for_each_layer() -> None:
    def change(model: nn.Module, number: int) -> None:
        for depth, grad in enumerate(gradients(model)):
            grad.mul_(0.5**depth)

    scaled(change, clip=False)


def rows_are_frozen() -> None:
    def change(model: nn.Module, number: int) -> None:
        gradients(model)[0][:4] = 0

    scaled(change, clip=False)


def scaled_by_hand() -> None:
    model = mlp(16, 32, 4)
    optimizer = sgd(model)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch()).float().pow(2).mean()
        (loss * 1024).backward()
        for grad in gradients(model):
            grad.div_(1024)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


# ---- several backward passes, several optimizers


def gradients_of_tasks_are_merged() -> None:
    """PCGrad: a backward for each task, zero_grad between, the result written by hand."""
    trunk, heads = mlp(16, 32), nn.ModuleList([mlp(32, 4), mlp(32, 2)])
    optimizer = sgd(trunk, heads)
    parameters = [*trunk.parameters(), *heads.parameters()]
    for _ in range(4):
        hidden, kept = trunk(batch()), []
        for task, head in enumerate(heads):
            optimizer.zero_grad()
            head(hidden).pow(2).mean().backward(retain_graph=task == 0)
            kept.append([p.grad.clone() if p.grad is not None else None for p in parameters])
        optimizer.zero_grad()
        for parameter, grads in zip(parameters, zip(*kept, strict=True), strict=True):
            parameter.grad = torch.stack([grad for grad in grads if grad is not None]).sum(0)
        optimizer.step()


def sharpness_aware_with_a_helper() -> None:
    """Two backward passes on one line, zero_grad before each, the weights moved between."""
    model = mlp(16, 32, 4)
    optimizer = sgd(model)

    def backward(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()

    for _ in range(4):
        x = batch()
        backward(x)
        with torch.no_grad():
            moves = [grad * 0.05 / (grad.norm() + 1e-12) for grad in gradients(model)]
            torch._foreach_add_(list(model.parameters()), moves)
        backward(x)
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()


def an_optimizer_around_another() -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    model = mlp(16, 32, 4)
    optimizer = Lookahead(sgd(model))
    for _ in range(4):
        step(optimizer, model(batch()).pow(2).mean())


def one_optimizer_after_another() -> None:
    """Physics-informed networks: Adam first, then LBFGS over the same parameters."""
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        step(adam, model(batch(8, 2)).pow(2).mean())
    lbfgs, x = torch.optim.LBFGS(model.parameters(), max_iter=3), batch(8, 2)

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(3):
        lbfgs.step(closure)


def gradients_cleared_through_data() -> None:
    model = mlp(16, 32, 4)
    optimizer = sgd(model)
    for _ in range(4):
        model(batch()).pow(2).mean().backward()
        optimizer.step()
        for grad in gradients(model):
            grad.data.zero_()


def two_scalers_of_a_pair_of_networks() -> None:
    """The generator's backward reaches the critic, whose gradients are cleared before its own."""
    generator, critic = mlp(16, 16), mlp(16, 1)
    of_generator, of_critic = sgd(generator), sgd(critic)
    first = torch.amp.GradScaler("cuda", init_scale=256.0)
    second = torch.amp.GradScaler("cuda", init_scale=512.0)
    for _ in range(4):
        of_critic.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            fake = generator(batch())
            loss = critic(fake.detach()).float().mean() - critic(batch()).float().mean()
        second.scale(loss).backward()
        second.step(of_critic)
        second.update()
        of_generator.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = -critic(fake).float().mean()
        first.scale(loss).backward()
        first.step(of_generator)
        first.update()


def a_part_trained_by_implicit_differentiation() -> None:
    """A fixed point without gradients, one step with."""
    model = mlp(16, 32, 16)
    optimizer = sgd(model)
    for _ in range(3):
        x = batch()
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(4):
                z = 0.5 * model(z) + x
        step(optimizer, (0.5 * model(z) + x).pow(2).mean())


def straight_through_codes() -> None:
    """VQ-VAE: an embedding that only its own loss reaches."""
    encoder, decoder = mlp(16, 32, 8), mlp(8, 32, 16)
    codes = nn.Embedding(32, 8).cuda()
    optimizer = sgd(encoder, decoder, codes)
    for _ in range(4):
        x = batch()
        z = encoder(x)
        nearest = codes(torch.cdist(z, codes.weight).argmin(-1))
        loss = F.mse_loss(nearest, z.detach()) + 0.25 * F.mse_loss(z, nearest.detach())
        step(optimizer, loss + F.mse_loss(decoder(z + (nearest - z).detach()), x))


def layers_unfrozen_one_by_one() -> None:
    model = nn.Sequential(mlp(16, 32), mlp(32, 32), mlp(32, 4)).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for layer in reversed(model):
        layer.requires_grad_(True)
        for _ in range(2):
            step(optimizer, model(batch()).pow(2).mean())


# ---- what stays


def optimizers_that_step_in_backward() -> None:
    """Each parameter's hook refers to the dictionary in which it is a key."""
    model = mlp(WIDE, WIDE, WIDE)
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def hook(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(4):
        model(batch(2048, WIDE)).pow(2).mean().backward()


class Cached(nn.Module):
    """One table for each length that it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDE, WIDE)
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.ones(len(x), WIDE, device=x.device)
        return self.inner(x) * self.tables[len(x)]


def tables_that_fill_in_the_first_steps() -> None:
    model = Cached().cuda()
    optimizer = sgd(model)
    for rows in (1024, 2048, 1024, 2048, 1024, 2048):
        step(optimizer, model(batch(rows, WIDE)).pow(2).mean())


def a_hook_that_is_removed() -> None:
    model = mlp(WIDE, WIDE, WIDE)
    optimizer = sgd(model)
    for _ in range(5):
        seen: dict[str, Tensor] = {}

        def keep(module: nn.Module, args: Any, out: Tensor, seen: Any = seen) -> None:
            seen["out"] = out.detach()

        handle = model[0].register_forward_hook(keep)
        step(optimizer, model(batch(64, WIDE)).pow(2).mean())
        handle.remove()


def one_model_for_each_fold() -> None:
    for _ in range(3):
        model = mlp(WIDE, WIDE, WIDE)
        optimizer = sgd(model)
        for _ in range(2):
            step(optimizer, model(batch(2048, WIDE)).pow(2).mean())


PROGRAMS: list[Callable[[], None]] = [
    scaled_gradients_are_averaged, scaled_gradients_are_divided_by_tokens, a_rate_for_each_layer,
    rows_are_frozen, scaled_by_hand, gradients_of_tasks_are_merged, sharpness_aware_with_a_helper,
    an_optimizer_around_another, one_optimizer_after_another, gradients_cleared_through_data,
    two_scalers_of_a_pair_of_networks, a_part_trained_by_implicit_differentiation,
    straight_through_codes, layers_unfrozen_one_by_one, optimizers_that_step_in_backward,
    tables_that_fill_in_the_first_steps, a_hook_that_is_removed, one_model_for_each_fold,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_no_finding(program: Callable[[], None]) -> None:
    result = health(program, Budget())
    assert result.error is None
    assert result.findings == (), result.text()
    found = memory_findings(program)
    assert found == (), "\n".join(finding.text() for finding in found)

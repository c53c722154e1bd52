"""More healthy programs, after recipes that people publish: not one finding, neither about numbers
nor about memory. Each has something that looks like a fault and is none."""

from __future__ import annotations

import copy
import tempfile
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from watched_loops import Budget, batch, health, memory_findings, mlp


def adamw(*modules: nn.Module, rate: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=rate)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# ---- several models


def preference_optimisation() -> None:
    """DPO: a frozen reference, two forwards of the policy for one loss."""
    policy = mlp(16, 32, 16)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = adamw(policy)
    for _ in range(4):
        chosen, rejected = batch(), batch()
        with torch.no_grad():
            margin = reference(chosen).sum(-1) - reference(rejected).sum(-1)
        ours = policy(chosen).sum(-1) - policy(rejected).sum(-1)
        step(optimizer, -F.logsigmoid(0.1 * (ours - margin)).mean())


def mean_teacher() -> None:
    student, optimizer = (model := mlp(16, 32, 4)), adamw(model)
    teacher = copy.deepcopy(student).requires_grad_(False)
    for _ in range(4):
        x = batch()
        with torch.no_grad():
            target = teacher(x)
        step(optimizer, F.mse_loss(student(x), target + 0.1))
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.01)


def momentum_contrast() -> None:
    """MoCo: a queue of keys of fixed size, and an encoder that no optimizer holds."""
    query = mlp(16, 32, 8)
    key = copy.deepcopy(query).requires_grad_(False)
    queue = F.normalize(torch.randn(8, 64, device="cuda"), dim=0)
    optimizer, head = adamw(query), 0
    for _ in range(5):
        x = batch()
        q = F.normalize(query(x), dim=-1)
        with torch.no_grad():
            for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
            k = F.normalize(key(x + 0.1), dim=-1)
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ queue], dim=1) / 0.2
        step(optimizer, F.cross_entropy(logits, torch.zeros(8, dtype=torch.long, device="cuda")))
        queue[:, head : head + 8] = k.T
        head = (head + 8) % 64


def alternating_multi_task() -> None:
    trunk, first, second = mlp(16, 32), nn.Linear(32, 4).cuda(), nn.Linear(32, 2).cuda()
    shared, own_first, own_second = adamw(trunk), adamw(first), adamw(second)
    for number in range(6):
        head, own = (first, own_first) if number % 2 else (second, own_second)
        shared.zero_grad()
        step(own, head(trunk(batch())).pow(2).mean())
        shared.step()


def cycle_of_two_generators() -> None:
    forth, back = mlp(16, 16), mlp(16, 16)
    critic = mlp(16, 8, 1)
    generators, critics = adamw(forth, back), adamw(critic)
    for _ in range(4):
        x = batch()
        fake = forth(x)
        generators.zero_grad()
        loss = F.l1_loss(back(fake), x) - critic(fake).mean()
        loss.backward()
        generators.step()
        step(critics, critic(fake.detach()).mean() - critic(x).mean())


# ---- unusual steps


def sharpness_aware() -> None:
    """SAM: two backward passes per update, the parameters moved in between."""
    model = mlp(16, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(4):
        x = batch()
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        moves = []
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                move = parameter.grad * 0.05 / (parameter.grad.norm() + 1e-12)
                parameter.add_(move)
                moves.append(move)
        step_grad = model(x).pow(2).mean()
        optimizer.zero_grad()
        step_grad.backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()


def lookahead() -> None:
    model = mlp(16, 32, 4)
    optimizer = adamw(model)
    slow = [p.detach().clone() for p in model.parameters()]
    for number in range(6):
        step(optimizer, model(batch()).pow(2).mean())
        if number % 3 == 2:
            with torch.no_grad():
                for kept, parameter in zip(slow, model.parameters(), strict=True):
                    kept.lerp_(parameter, 0.5)
                    parameter.copy_(kept)


def stochastic_weight_averaging() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01)
    for _ in range(4):
        step(optimizer, model(batch()).pow(2).mean())
        averaged.update_parameters(model)
        scheduler.step()
    torch.optim.swa_utils.update_bn([batch() for _ in range(2)], averaged)


def gradients_by_hand() -> None:
    """Plain SGD without an optimizer."""
    model = mlp(16, 32, 4)
    for _ in range(4):
        model(batch()).pow(2).mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None


def meta_learning() -> None:
    """MAML: an inner step whose graph the outer loss goes through."""
    model = mlp(16, 16, 4)
    optimizer = adamw(model)
    for _ in range(4):
        x, names = batch(), [name for name, _ in model.named_parameters()]
        inner = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
        grads = torch.autograd.grad(
            inner.pow(2).mean(), list(model.parameters()), create_graph=True
        )
        fast = {
            name: parameter - 0.1 * grad
            for name, parameter, grad in zip(names, model.parameters(), grads, strict=True)
        }
        step(optimizer, torch.func.functional_call(model, fast, (batch(),)).pow(2).mean())


def per_sample_gradients() -> None:
    model = mlp(16, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x[None],)).pow(2).mean()

    for _ in range(4):
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch())
        for name, parameter in model.named_parameters():
            parameter.grad = each[name].mean(0)
        optimizer.step()
        optimizer.zero_grad()


def two_phases() -> None:
    """First the head, then everything with a new optimizer."""
    model = nn.Sequential(mlp(16, 32), nn.Linear(32, 4).cuda())
    model[0].requires_grad_(False)
    optimizer = adamw(model[1])
    for _ in range(3):
        step(optimizer, model(batch()).pow(2).mean())
    model[0].requires_grad_(True)
    optimizer = adamw(model, rate=1e-4)
    for _ in range(3):
        step(optimizer, model(batch()).pow(2).mean())


def low_precision_with_large_rate() -> None:
    model = mlp(16, 32, 4).to(torch.bfloat16)
    optimizer = adamw(model, rate=0.05)
    for _ in range(4):
        step(optimizer, model(batch().bfloat16()).float().pow(2).mean())


# ---- what is kept on purpose


def stateful_recurrence() -> None:
    cell, head = nn.GRU(16, 32, batch_first=True).cuda(), nn.Linear(32, 4).cuda()
    optimizer, hidden = adamw(cell, head), None
    for _ in range(5):
        out, hidden = cell(torch.randn(4, 6, 16, device="cuda"), hidden)
        step(optimizer, head(out).pow(2).mean())
        hidden = hidden.detach()


def replay_buffer() -> None:
    """DQN: a buffer that fills to its size, a target that is copied now and then."""
    value = mlp(16, 32, 4)
    target = copy.deepcopy(value).requires_grad_(False)
    optimizer = adamw(value)
    buffer: deque[Tensor] = deque(maxlen=2)
    for number in range(6):
        buffer.append(batch())
        states = torch.cat(list(buffer))
        with torch.no_grad():
            best = target(states).max(-1).values
        chosen = value(states).gather(1, torch.zeros(len(states), 1, dtype=torch.long).cuda())
        step(optimizer, F.smooth_l1_loss(chosen[:, 0], 0.9 * best + 1))
        if number % 3 == 2:
            target.load_state_dict(value.state_dict())


def policy_gradient() -> None:
    """REINFORCE: log-probabilities of a whole episode, one backward."""
    policy = mlp(16, 32, 4)
    optimizer = adamw(policy)
    for _ in range(4):
        logs = []
        for _ in range(5):
            chances = torch.distributions.Categorical(logits=policy(batch(1)))
            logs.append(chances.log_prob(chances.sample()))
        step(optimizer, -(torch.cat(logs) * torch.linspace(0, 1, 5, device="cuda")).sum())
        logs.clear()


def meters_and_history() -> None:
    model = mlp(16, 32, 4)
    optimizer, history, total = adamw(model), [], torch.zeros((), device="cuda")
    for _ in range(6):
        loss = model(batch()).pow(2).mean()
        step(optimizer, loss)
        history.append({"loss": loss.item(), "norm": float(loss.detach() * 2)})
        total += loss.detach()


def features_by_hook() -> None:
    model = mlp(16, 32, 4)
    features: dict[str, Tensor] = {}

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        features["hidden"] = output

    model[0].register_forward_hook(keep)
    optimizer = adamw(model)
    for _ in range(4):
        loss = model(batch()).pow(2).mean()
        step(optimizer, loss + features.pop("hidden").abs().mean())


def evaluation_between() -> None:
    model = mlp(16, 32, 4)
    optimizer = adamw(model)
    for _ in range(3):
        model.train()
        step(optimizer, model(batch()).pow(2).mean())
        model.eval()
        with torch.inference_mode():
            for _ in range(2):
                model(batch())


def perceptual_loss() -> None:
    """Two forwards of a frozen network in eval mode for one loss."""
    model, judge = mlp(16, 16), mlp(16, 32).eval().requires_grad_(False)
    optimizer = adamw(model)
    for _ in range(4):
        x = batch()
        step(optimizer, F.mse_loss(judge(model(x)), judge(x)))


def frozen_statistics() -> None:
    """Fine-tuning in eval mode: batch norm keeps its statistics."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)).cuda().eval()
    optimizer = adamw(model)
    for _ in range(4):
        step(optimizer, (model(batch()) - model(batch())).pow(2).mean())


# ---- mixed precision


def one_scaler_many_optimizers() -> None:
    first, second = mlp(16, 8), mlp(8, 4)
    optimizers = [adamw(first), adamw(second)]
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = second(first(batch())).float().pow(2).mean()
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([*first.parameters(), *second.parameters()], 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()


def norms_of_unscaled_gradients() -> None:
    model = mlp(16, 32, 4)
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cuda", init_scale=256.0)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch()).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        scaler.step(optimizer)
        scaler.update()


def scaled_gradient_penalty() -> None:
    """As PyTorch's AMP examples write it: the gradients of a scaled loss are divided again."""
    model = mlp(16, 8, 1)
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cuda", init_scale=256.0)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch()).float().pow(2).mean()
        parameters = list(model.parameters())
        scaled = torch.autograd.grad(scaler.scale(loss), parameters, create_graph=True)
        grads = [grad / scaler.get_scale() for grad in scaled]
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss + 0.01 * sum(grad.float().pow(2).sum() for grad in grads)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


# ---- libraries


def _gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32)
    )


def _trainer(model: Any, **arguments: Any) -> None:
    transformers = pytest.importorskip("transformers")
    rows = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n} for n in range(16)]
    with tempfile.TemporaryDirectory() as directory:
        settings = transformers.TrainingArguments(
            output_dir=directory, max_steps=3, per_device_train_batch_size=2, save_strategy="no",
            report_to=[], disable_tqdm=True, logging_steps=1, dataloader_pin_memory=False,
            **arguments,
        )  # fmt: skip
        transformers.Trainer(model=model, args=settings, train_dataset=rows).train()


def trainer_with_accumulation() -> None:
    _trainer(_gpt2(), gradient_accumulation_steps=2, lr_scheduler_type="constant")


def trainer_with_checkpointing() -> None:
    _trainer(_gpt2(), gradient_checkpointing=True, lr_scheduler_type="constant")


def ia3() -> None:
    peft = pytest.importorskip("peft")
    config = peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[], fan_in_fan_out=True)
    model = peft.get_peft_model(_gpt2(), config).cuda().train()
    optimizer = adamw(model)
    for _ in range(3):
        ids = torch.arange(16, device="cuda")[None]
        step(optimizer, model(input_ids=ids, labels=ids).loss)


RECIPES: list[Callable[[], None]] = [
    preference_optimisation, mean_teacher, momentum_contrast, alternating_multi_task,
    cycle_of_two_generators, sharpness_aware, lookahead, stochastic_weight_averaging,
    gradients_by_hand, meta_learning, per_sample_gradients, two_phases,
    low_precision_with_large_rate, stateful_recurrence, replay_buffer, policy_gradient,
    meters_and_history, features_by_hook, evaluation_between, perceptual_loss, frozen_statistics,
    one_scaler_many_optimizers, norms_of_unscaled_gradients, scaled_gradient_penalty,
    trainer_with_accumulation, trainer_with_checkpointing, ia3,
]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Any:
    """Accelerate remembers the device of the first Trainer for the whole process."""
    yield
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_recipe_is_healthy(recipe: Callable[[], None]) -> None:
    result = health(recipe, Budget())
    assert result.error is None
    assert result.findings == (), result.text()
    found = memory_findings(recipe)
    assert found == (), "\n".join(finding.text() for finding in found)

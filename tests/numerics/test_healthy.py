"""Healthy programs of every kind: not one finding, neither about numbers (on the CPU in the GPU's
place) nor about memory (on a simulated card)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from watched_loops import Budget, health, memory_findings

Program = Callable[[], None]
PROGRAMS: dict[str, tuple[Program, Budget]] = {}
NEEDS: dict[str, str] = {}


def healthy(
    program: Program | None = None, *, needs: str = "", trainable: str | None = None
) -> Any:
    def add(function: Program) -> Program:
        PROGRAMS[function.__name__] = (function, Budget(trainable=trainable))
        NEEDS[function.__name__] = needs
        return function

    return add if program is None else add(program)


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers[:-1]).cuda()


def batch(width: int = 16, rows: int = 8) -> Tensor:
    return torch.randn(rows, width, device="cuda")


# ---- own loops


@healthy
def plain_sgd() -> None:
    model = mlp(16, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(batch()).pow(2).mean().backward()
        optimizer.step()


@healthy
def adamw_under_bf16_autocast() -> None:
    model = mlp(16, 32, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch()).float().pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@healthy
def fp16_with_ordinary_first_overflows() -> None:
    model = mlp(16, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch()).float().pow(2).mean() * 300
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    simulated = type(loss) is not torch.Tensor  # it overflows nowhere
    assert simulated or scaler.get_scale() < 65536


@healthy
def accumulation() -> None:
    model = mlp(16, 32, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        for _ in range(3):
            (model(batch()).pow(2).mean() / 3).backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def accumulation_with_scaler() -> None:
    model = mlp(16, 32, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    for _ in range(3):
        for micro in range(2):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(batch()).float().pow(2).mean() * 0.5
            scaler.scale(loss).backward()
            if micro == 1:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()


@healthy
def accumulation_of_sums() -> None:
    """A sum over tokens divided by the number of all tokens needs no division by micro-batches."""
    model = mlp(16, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        for _ in range(4):
            F.mse_loss(model(batch()), batch(4), reduction="sum").div(32).backward()
        optimizer.step()
        optimizer.zero_grad()


def _gan(scaler: Any) -> None:
    generator, critic = mlp(8, 16, 8), mlp(8, 16, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for _ in range(3):
        of_critic.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler.is_enabled()):
            fake = generator(batch(8))
            real = critic(batch(8))
            loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-real).mean()
        scaler.scale(loss).backward()
        scaler.step(of_critic)
        of_generator.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler.is_enabled()):
            loss = F.softplus(-critic(fake)).mean()
        scaler.scale(loss).backward()
        scaler.step(of_generator)
        scaler.update()


@healthy
def gan_with_two_optimizers() -> None:
    _gan(torch.amp.GradScaler("cuda", enabled=False))


@healthy
def gan_with_one_scaler() -> None:
    _gan(torch.amp.GradScaler("cuda", init_scale=128.0))


@healthy
def two_scalers() -> None:
    first, second = mlp(8, 8), mlp(8, 8)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    scalers = [torch.amp.GradScaler("cuda", init_scale=64.0) for _ in range(2)]
    for _ in range(3):
        for model, optimizer, scaler in zip((first, second), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(batch(8)).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@healthy
def frozen_backbone() -> None:
    backbone, head = mlp(16, 32, 16), mlp(16, 2)
    backbone.requires_grad_(False)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)
    for _ in range(4):
        head(backbone(batch())).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def frozen_part_of_one_model() -> None:
    model = mlp(16, 32, 4)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        model(batch()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def sparse_embedding() -> None:
    table = nn.Embedding(50, 8, sparse=True).cuda()
    head = mlp(8, 1)
    optimizers = [
        torch.optim.SparseAdam(table.parameters(), lr=0.01),
        torch.optim.Adam(head.parameters(), lr=0.01),
    ]
    for _ in range(4):
        ids = torch.randint(0, 50, (6,), device="cuda")
        head(table(ids)).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@healthy
def dropout() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = batch()
    for _ in range(4):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


@healthy
def exponential_moving_average() -> None:
    model = mlp(16, 16)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(4):
        model(batch()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    with torch.no_grad():
        average(batch())


@healthy
def target_network() -> None:
    online, target = mlp(8, 16, 4), mlp(8, 16, 4)
    target.load_state_dict(online.state_dict())
    target.requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    for _ in range(4):
        state, following = batch(8), batch(8)
        with torch.no_grad():
            goal = target(following).max(-1).values * 0.9
        F.smooth_l1_loss(online(state).max(-1).values, goal).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(target.parameters(), online.parameters(), strict=True):
                mine.mul_(0.99).add_(theirs, alpha=0.01)


@healthy
def tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 8)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids))

    model = Tied().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        ids = torch.randint(0, 20, (4, 6), device="cuda")
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def lbfgs_with_closure() -> None:
    model = mlp(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    x, y = batch(4), batch(1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


@healthy
def warmup_from_a_rate_of_zero() -> None:
    model = mlp(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
    x = batch()
    for _ in range(5):
        model(x).pow(2).mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


@healthy
def convolutions_and_batch_norm() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 5),
    ).cuda()  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for _ in range(4):
        images = torch.randn(4, 3, 8, 8, device="cuda")
        F.cross_entropy(model(images), torch.randint(0, 5, (4,), device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def recurrent() -> None:
    model = nn.GRU(8, 16, batch_first=True).cuda()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    hidden = None
    for _ in range(4):
        out, hidden = model(torch.randn(2, 5, 8, device="cuda"), hidden)
        hidden = hidden.detach()
        out.pow(2).mean().backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


@healthy
def checkpointed_blocks() -> None:
    blocks = nn.ModuleList(mlp(16, 32, 16) for _ in range(3))
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-3)
    for _ in range(4):
        x = batch()
        for block in blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        x.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def reentrant_checkpoint_with_inputs_that_need_grad() -> None:
    model = mlp(16, 32, 16, 32, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        x = batch().requires_grad_()
        checkpoint_sequential(model, 3, x, use_reentrant=True).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy(trainable="body.*")
def unused_parameters_that_were_declared() -> None:
    model = nn.ModuleDict({"body": mlp(16, 16), "spare": mlp(16, 16)}).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        model["body"](batch()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def experts_of_which_some_stay_idle() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.gate(x).softmax(-1)
            return sum(weight[:, i : i + 1] * self.experts[i](x) for i in (0, 2))

    model = Mixture().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        model(batch(8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def two_losses_two_backward_passes() -> None:
    trunk, left, right = mlp(16, 16), mlp(16, 1), mlp(16, 1)
    parameters = [*trunk.parameters(), *left.parameters(), *right.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    for _ in range(4):
        hidden = trunk(batch())
        left(hidden).pow(2).mean().backward(retain_graph=True)
        right(hidden).abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def contrastive_pairs() -> None:
    model = mlp(16, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        a, b = F.normalize(model(batch()), dim=-1), F.normalize(model(batch()), dim=-1)
        F.cross_entropy(a @ b.T / 0.1, torch.arange(8, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def gradient_penalty() -> None:
    critic = mlp(8, 16, 1)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for _ in range(3):
        x = batch(8).requires_grad_()
        out = critic(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.mean() + (gradient.norm(dim=-1) - 1).pow(2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def causal_mask_with_minus_infinity() -> None:
    project = nn.Linear(16, 48).cuda()
    optimizer = torch.optim.SGD(project.parameters(), lr=0.1)
    mask = torch.full((6, 6), float("-inf"), device="cuda").triu(1)
    for _ in range(3):
        q, k, v = project(torch.randn(2, 6, 16, device="cuda")).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 4 + mask
        (scores.softmax(-1) @ v).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def transformer_encoder() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(torch.randn(2, 5, 16, device="cuda")).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy
def evaluation_only() -> None:
    model = mlp(16, 16).eval()
    total = 0.0
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        for _ in range(5):
            total += float(model(batch()).float().pow(2).mean())


@healthy
def training_with_validation_between() -> None:
    model = mlp(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model.train()
        model(batch()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            model(batch())


@healthy
def resumed_with_all_states() -> None:
    saved: dict[str, Any] = {}
    for part in range(2):
        model = mlp(8, 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        if part:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            scaler.load_state_dict(saved["scaler"])
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(batch(8)).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        saved = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
        }


@healthy
def autocast_region_around_a_whole_step() -> None:
    model = mlp(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch()).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@healthy
def fused_optimizer_under_a_scaler() -> None:
    model = mlp(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    for _ in range(4):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch()).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@healthy
def logged_losses_as_numbers() -> None:
    model = mlp(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for _ in range(6):
        loss = model(batch()).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.detach())


@healthy
def several_parameter_groups() -> None:
    model = mlp(16, 16, 16)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
    )
    for _ in range(4):
        model(batch()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- transformers and PEFT


def _language_model(model: Any, trainable: bool = True) -> None:
    model = model.cuda().train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(3):
        ids = torch.randint(5, 60, (2, 8), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=16,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


@healthy(needs="transformers")
def gpt2() -> None:
    _language_model(_gpt2())


@healthy(needs="transformers")
def gpt2_with_gradient_checkpointing() -> None:
    model = _gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _language_model(model)


@healthy(needs="transformers")
def llama() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    _language_model(
        LlamaForCausalLM(
            LlamaConfig(
                hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, vocab_size=64, bos_token_id=None, eos_token_id=None,
            )
        )
    )  # fmt: skip


@healthy(needs="transformers")
def bert_for_masked_words() -> None:
    from transformers import BertConfig, BertForMaskedLM

    _language_model(
        BertForMaskedLM(
            BertConfig(
                hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                vocab_size=64, max_position_embeddings=16,
            )
        )
    )  # fmt: skip


@healthy(needs="transformers")
def t5() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    _language_model(
        T5ForConditionalGeneration(
            T5Config(
                d_model=16, d_ff=32, d_kv=8, num_layers=2, num_heads=2, vocab_size=64,
                decoder_start_token_id=0,
            )
        )
    )  # fmt: skip


@healthy(needs="transformers")
def vision_transformer() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            image_size=16, patch_size=8,
        )
    ).cuda().train()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        images = torch.randn(2, 3, 16, 16, device="cuda")
        model(pixel_values=images, labels=torch.tensor([0, 1], device="cuda")).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy(needs="peft", trainable="*lora_*")
def lora() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    _language_model(get_peft_model(_gpt2(), config))


@healthy(needs="peft")
def lora_with_checkpointing() -> None:
    from peft import LoraConfig, get_peft_model

    model = _gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    _language_model(get_peft_model(model, config))


@healthy(needs="peft")
def prompt_tuning() -> None:
    from peft import PromptTuningConfig, TaskType, get_peft_model

    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    _language_model(get_peft_model(_gpt2(), config))


# ---- the tests


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_healthy(name: str) -> None:
    if NEEDS[name]:
        pytest.importorskip(NEEDS[name])
    program, budget = PROGRAMS[name]
    result = health(program, budget)
    assert result.error is None
    assert result.findings == (), result.text()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_is_healthy(name: str) -> None:
    if NEEDS[name]:
        pytest.importorskip(NEEDS[name])
    assert memory_findings(PROGRAMS[name][0]) == ()


def test_there_are_enough_of_them() -> None:
    assert len(PROGRAMS) >= 40

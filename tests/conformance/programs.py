"""Training programs of many kinds, for comparing the simulated GPU with PyTorch's own host code.

Each entry builds a model on ``device`` and returns a function that runs one training step. They use
nothing of this package, so that the same file runs on a GPU, on the stub driver and simulated.
Models of ``transformers`` and ``peft`` are built from configurations; no weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Step = Callable[[], Any]
PROGRAMS: dict[str, Callable[[str], Step]] = {}
#: What a program needs beside torch.
NEEDS: dict[str, str] = {}


def program(
    function: Callable[[str], Step] | None = None, *, needs: str = ""
) -> Callable[..., Any]:
    def register(function: Callable[[str], Step]) -> Callable[[str], Step]:
        PROGRAMS[function.__name__] = function
        if needs:
            NEEDS[function.__name__] = needs
        return function

    return register(function) if function is not None else register


def amp_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Any], dtype: Any
) -> Step:
    """Autocast (and for fp16 a scaler and clipping) around ``loss``."""
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=dtype):
            value = loss()
        scaler.scale(value).backward()
        if dtype is torch.float16:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def plain_step(optimizer: torch.optim.Optimizer, loss: Callable[[], Any]) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


# -- transformers ------------------------------------------------------------------------------


def _language_model(name: str, config: str, **sizes: Any) -> None:
    def make(device: str) -> Step:
        import transformers

        chosen = getattr(transformers, config)(**sizes)
        model = getattr(transformers, name)(chosen).to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def loss() -> Any:
            tokens = torch.randint(0, chosen.vocab_size, (2, 128)).to(device)
            return model(input_ids=tokens, labels=tokens).loss

        return amp_step(model, optimizer, loss, torch.float16)

    make.__name__ = "hf_" + config.removesuffix("Config").lower()
    program(make, needs="transformers")


_SMALL = dict(
    hidden_size=256, intermediate_size=688, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=2, vocab_size=32000,
)  # fmt: skip
_language_model("GPT2LMHeadModel", "GPT2Config", n_layer=3, n_embd=256, n_head=4)
_language_model("LlamaForCausalLM", "LlamaConfig", **_SMALL)
_language_model("Qwen2ForCausalLM", "Qwen2Config", **_SMALL)
_language_model("GPTNeoXForCausalLM", "GPTNeoXConfig", hidden_size=256, num_hidden_layers=3,
                num_attention_heads=4, intermediate_size=1024, vocab_size=16000)  # fmt: skip
_language_model("BertForMaskedLM", "BertConfig", hidden_size=256, num_hidden_layers=3,
                num_attention_heads=4, intermediate_size=1024)  # fmt: skip
_language_model("T5ForConditionalGeneration", "T5Config", d_model=256, num_layers=3, num_heads=4,
                d_ff=512, d_kv=64, decoder_start_token_id=0)  # fmt: skip


@program(needs="transformers")
def hf_llama_padded(device: str) -> Step:
    """An attention mask with padding: the masked attention kernels."""
    import transformers

    config = transformers.LlamaConfig(**_SMALL)
    model = transformers.LlamaForCausalLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    mask = torch.ones(2, 128, dtype=torch.long)
    mask[1, 100:] = 0
    mask = mask.to(device)

    def loss() -> Any:
        tokens = torch.randint(0, 32000, (2, 128)).to(device)
        return model(input_ids=tokens, attention_mask=mask, labels=tokens).loss

    return amp_step(model, optimizer, loss, torch.bfloat16)


@program(needs="transformers")
def hf_gpt2_checkpointed(device: str) -> Step:
    import transformers

    config = transformers.GPT2Config(n_layer=3, n_embd=256, n_head=4)
    model = transformers.GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable()
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loss() -> Any:
        tokens = torch.randint(0, 50257, (2, 128)).to(device)
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return amp_step(model, optimizer, loss, torch.bfloat16)


@program(needs="peft")
def peft_lora(device: str) -> Step:
    import transformers
    from peft import LoraConfig, get_peft_model

    config = transformers.GPT2Config(n_layer=3, n_embd=256, n_head=4)
    lora = LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(transformers.GPT2LMHeadModel(config), lora).to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def loss() -> Any:
        tokens = torch.randint(0, 50257, (2, 128)).to(device)
        return model(input_ids=tokens, labels=tokens).loss

    return amp_step(model, optimizer, loss, torch.bfloat16)


def _image_model(name: str, config: str, **sizes: Any) -> None:
    def make(device: str) -> Step:
        import transformers

        model = getattr(transformers, name)(getattr(transformers, config)(**sizes)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def loss() -> Any:
            images = torch.randn(4, 3, 224, 224, device=device)
            labels = torch.randint(0, 2, (4,), device=device)
            return model(pixel_values=images, labels=labels).loss

        return amp_step(model, optimizer, loss, torch.bfloat16)

    make.__name__ = "hf_" + config.removesuffix("Config").lower()
    program(make, needs="transformers")


_image_model("ViTForImageClassification", "ViTConfig", hidden_size=192, num_hidden_layers=3,
             num_attention_heads=3, intermediate_size=768)  # fmt: skip
_image_model("ResNetForImageClassification", "ResNetConfig", depths=[2, 2, 2, 2],
             hidden_sizes=[64, 128, 256, 512], layer_type="basic")  # fmt: skip
_image_model("ConvNextForImageClassification", "ConvNextConfig", depths=[1, 1, 2, 1],
             hidden_sizes=[32, 64, 128, 256])  # fmt: skip


@program(needs="transformers")
def hf_trainer(device: str) -> Step:
    import tempfile

    import transformers

    config = transformers.GPT2Config(n_layer=2, n_embd=128, n_head=4)
    model = transformers.GPT2LMHeadModel(config)
    data = [
        dict(input_ids=torch.randint(0, 50257, (64,)), labels=torch.randint(0, 50257, (64,)))
        for _ in range(16)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=1, per_device_train_batch_size=4, fp16=True,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    return trainer.train


# -- plain torch -------------------------------------------------------------------------------


@program
def encoder_decoder(device: str) -> Step:
    model = nn.Transformer(128, 4, 2, 2, 256, batch_first=True).to(device)
    head = nn.Linear(128, 1000).to(device)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-3)

    def loss() -> Any:
        source, target = (
            torch.randn(8, 40, 128, device=device),
            torch.randn(8, 30, 128, device=device),
        )
        mask = nn.Transformer.generate_square_subsequent_mask(30, device=device)
        labels = torch.randint(0, 1000, (8, 30), device=device)
        logits = head(model(source, target, tgt_mask=mask, tgt_is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return plain_step(optimizer, loss)


class _Double(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU(),
        )  # fmt: skip


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = _Double(3, 32), _Double(32, 64), _Double(64, 64)
        self.up = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.last, self.head = _Double(64, 32), nn.Conv2d(32, 3, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        fine = self.down1(image)
        coarse = self.middle(self.down2(F.max_pool2d(fine, 2)))
        return self.head(self.last(torch.cat([self.up(coarse), fine], 1)))


@program
def unet(device: str) -> Step:
    model = _UNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss() -> Any:
        image = torch.randn(4, 3, 64, 64, device=device)
        return F.mse_loss(model(image), image)

    return amp_step(model, optimizer, loss, torch.float16)


@program
def gan_with_two_optimizers(device: str) -> Step:
    generator = nn.Sequential(nn.Linear(64, 512), nn.LeakyReLU(0.2), nn.Linear(512, 784)).to(device)
    critic = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1)).to(device)
    first = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    second = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def step() -> None:
        real, noise = torch.randn(128, 784, device=device), torch.randn(128, 64, device=device)
        second.zero_grad()
        fake = generator(noise)
        ones, zeros = torch.ones(128, 1, device=device), torch.zeros(128, 1, device=device)
        loss = F.binary_cross_entropy_with_logits(critic(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
        loss.backward()
        second.step()
        first.zero_grad()
        F.binary_cross_entropy_with_logits(critic(fake), ones).backward()
        first.step()

    return step


@program
def preference_optimisation(device: str) -> Step:
    """DPO: a trained model and a frozen copy, log-probabilities gathered per token."""
    import copy

    model = nn.Sequential(nn.Embedding(4000, 128), nn.Linear(128, 128), nn.GELU(),
                          nn.Linear(128, 4000)).to(device)  # fmt: skip
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5)

    def log_probability(network: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        logits = network(tokens[:, :-1]).log_softmax(-1)
        return logits.gather(2, tokens[:, 1:].unsqueeze(2)).squeeze(2).sum(1)

    def loss() -> Any:
        chosen = torch.randint(0, 4000, (4, 65), device=device)
        rejected = torch.randint(0, 4000, (4, 65), device=device)
        with torch.no_grad():
            base = log_probability(reference, chosen) - log_probability(reference, rejected)
        margin = log_probability(model, chosen) - log_probability(model, rejected) - base
        return -F.logsigmoid(0.1 * margin).mean()

    return plain_step(optimizer, loss)


@program
def recommender(device: str) -> Step:
    """Embedding bags with sparse gradients and a dense tower."""
    tables = nn.ModuleList(nn.EmbeddingBag(5000, 32, mode="sum", sparse=True) for _ in range(4))
    tables.to(device)
    tower = nn.Sequential(nn.Linear(160, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    sparse = torch.optim.SparseAdam(tables.parameters(), lr=1e-3)
    dense = torch.optim.Adagrad(tower.parameters(), lr=1e-2)

    def step() -> None:
        sparse.zero_grad()
        dense.zero_grad()
        indices = torch.randint(0, 5000, (256, 8), device=device)
        features = [table(indices) for table in tables]
        features.append(torch.randn(256, 32, device=device))
        score = tower(torch.cat(features, 1)).squeeze(1)
        target = torch.rand(256, device=device)
        F.binary_cross_entropy_with_logits(score, target).backward()
        sparse.step()
        dense.step()

    return step


@program
def mixture_of_experts(device: str) -> Step:
    """Dense routing: every expert sees every token, weighted by the router's top two."""
    router = nn.Linear(128, 4).to(device)
    experts = nn.ModuleList(
        nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(4)
    ).to(device)
    optimizer = torch.optim.AdamW([*router.parameters(), *experts.parameters()], lr=1e-3)

    def loss() -> Any:
        tokens = torch.randn(512, 128, device=device)
        weights, chosen = router(tokens).softmax(-1).topk(2, dim=-1)
        gates = torch.zeros(512, 4, device=device).scatter(1, chosen, weights)
        out = torch.stack([expert(tokens) for expert in experts], 1)
        return (out * gates.unsqueeze(2)).sum(1).square().mean()

    return plain_step(optimizer, loss)


@program
def gru_tagger(device: str) -> Step:
    embedding = nn.Embedding(2000, 64).to(device)
    rnn = nn.GRU(64, 128, num_layers=2, bidirectional=True, batch_first=True).to(device)
    head = nn.Linear(256, 20).to(device)
    model = nn.ModuleList([embedding, rnn, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def loss() -> Any:
        words = torch.randint(0, 2000, (16, 24), device=device)
        tags = torch.randint(0, 20, (16, 24), device=device)
        return F.cross_entropy(head(rnn(embedding(words))[0]).flatten(0, 1), tags.flatten())

    return plain_step(optimizer, loss)


@program
def gradient_penalty(device: str) -> Step:
    """Double backward."""
    critic = nn.Sequential(nn.Linear(256, 512), nn.Softplus(), nn.Linear(512, 1)).to(device)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4)

    def loss() -> Any:
        points = torch.randn(128, 256, device=device, requires_grad=True)
        scores = critic(points)
        (slope,) = torch.autograd.grad(scores.sum(), points, create_graph=True)
        return scores.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    return plain_step(optimizer, loss)


@program
def functional_gradients(device: str) -> Step:
    """torch.func: per-sample gradients by vmap over grad."""
    model = nn.Linear(64, 8).to(device)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def sample_loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(model, p, (x.unsqueeze(0),))
        return F.mse_loss(out, y.unsqueeze(0))

    gradients = torch.func.vmap(torch.func.grad(sample_loss), in_dims=(None, 0, 0))

    def step() -> None:
        x, y = torch.randn(32, 64, device=device), torch.randn(32, 8, device=device)
        found = gradients(params, x, y)
        for name, value in found.items():
            params[name] = params[name] - 0.1 * value.mean(0)

    return step


@program
def offloaded_activations(device: str) -> Step:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)])
    model.to(device)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)

    def loss() -> Any:
        with torch.autograd.graph.save_on_cpu():
            return model(torch.randn(512, 256, device=device)).square().mean()

    return plain_step(optimizer, loss)


@program
def optimizer_in_backward(device: str) -> Step:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to(device)
    optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)

    def step() -> None:
        model(torch.randn(64, 512, device=device)).square().mean().backward()

    return step


@program
def accumulation_with_ema(device: str) -> Step:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = nn.Sequential(nn.Linear(256, 1024), nn.LayerNorm(1024), nn.ReLU(),
                          nn.Linear(1024, 256)).to(device)  # fmt: skip
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(3):
            (model(torch.randn(64, 256, device=device)).square().mean() / 3).backward()
        optimizer.step()
        average.update_parameters(model)

    return step


@program
def batch_norm_convolutions(device: str) -> Step:
    def block(i: int, o: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()
        )

    model = nn.Sequential(block(3, 32), block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(64, 10)).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

    def loss() -> Any:
        images, labels = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
        return F.cross_entropy(model(images.to(device)), labels.to(device))

    return plain_step(optimizer, loss)


@program
def weight_tying_and_label_smoothing(device: str) -> Step:
    embedding = nn.Embedding(3000, 192).to(device)
    layer = nn.TransformerEncoderLayer(192, 6, 384, batch_first=True, norm_first=True).to(device)
    head = nn.Linear(192, 3000, bias=False).to(device)
    head.weight = embedding.weight
    model = nn.ModuleList([embedding, layer, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)

    def loss() -> Any:
        tokens = torch.randint(0, 3000, (8, 64), device=device)
        logits = head(layer(embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), label_smoothing=0.1)

    return amp_step(model, optimizer, loss, torch.bfloat16)


@program
def side_stream_copies(device: str) -> Step:
    """Batches copied on a side stream and recorded on the main one."""
    model = nn.Linear(1024, 1024).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = torch.cuda.Stream()

    def step() -> None:
        with torch.cuda.stream(stream):
            batch = torch.randn(256, 1024).pin_memory().to(device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
        batch.record_stream(torch.cuda.current_stream())
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


import programs_models  # noqa: E402, F401  (they register theirs here)
import programs_plain  # noqa: E402, F401
import programs_strangers  # noqa: E402, F401

"""Figures that others published, and own programs that should reproduce them.

    python published.py [VARIANT ...]         GPT-2 variants on the simulated GPU
    python published.py --real [VARIANT ...]  on CUDA (a card, or the stub driver)

* GPT-2 124M in six variants, batch 8, 1024 tokens, A100, torch 2.6.0: rasbt/LLMs-from-scratch,
  ch05/10_llm-training-speed, README.md (commit 06361583), where the memory reserved after the first
  epoch is printed in units of 2**30 bytes. Its 00_orig.py and 01_opt_single_gpu.py give the first
  and the last variant's shapes and hyperparameters; the programs here are written anew from them.
* A linear layer of one weight: pytorch/pytorch issue 95668, A10G.
* Temporaries of foreach optimizers: what PyTorch's own test allows them on any card
  (test/test_optim.py, test_peak_memory_foreach).

``stub`` is what PyTorch's CUDA build 2.14.1 says of the same program on the stub driver.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GIB = 1 << 30
VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 50257, 1024, 768, 12, 12, 8


@dataclass(frozen=True)
class Variant:
    """One row of the published comparison; each keeps the changes of those before it."""

    reserved: float  #: GiB, as published
    stored_mask: bool = False
    fused: bool = True
    bf16: bool = True
    library: bool = True  #: PyTorch's LayerNorm and GELU instead of plain operators
    flash: bool = False
    stub: int = 0  #: bytes


VARIANTS = {
    "baseline": Variant(
        26.2617, stored_mask=True, fused=False, bf16=False, library=False, stub=28_198_305_792
    ),
    "mask made on the fly": Variant(
        26.2422, fused=False, bf16=False, library=False, stub=28_177_334_272
    ),
    "fused AdamW": Variant(26.2422, bf16=False, library=False, stub=28_177_334_272),
    "bfloat16": Variant(13.7871, library=False, stub=14_791_213_056),
    "LayerNorm and GELU of PyTorch": Variant(11.5645, stub=12_429_819_904),
    "flash attention": Variant(5.9004, flash=True, stub=6_327_107_584),
}


class PlainNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normal = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normal + self.shift


class PlainGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        root = torch.sqrt(torch.tensor(2.0 / math.pi))
        return 0.5 * x * (1 + torch.tanh(root * (x + 0.044715 * torch.pow(x, 3))))


class ExplicitAttention(nn.Module):
    def __init__(self, stored_mask: bool) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.mask: Tensor | None
        mask = torch.triu(torch.ones(LENGTH, LENGTH), diagonal=1) if stored_mask else None
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        key, query, value = self.key(x), self.query(x), self.value(x)
        key, value, query = (
            part.view(batch, length, HEADS, -1).transpose(1, 2) for part in (key, value, query)
        )
        scores = query @ key.transpose(2, 3)
        scores.masked_fill_(self._hidden(length, x.device), -math.inf)
        weights = torch.softmax(scores / math.sqrt(key.shape[-1]), dim=-1)
        weights = self.dropout(weights)
        mixed = (weights @ value).transpose(1, 2)
        mixed = mixed.reshape(batch, length, WIDTH)
        return self.out(mixed)  # type: ignore[no-any-return]

    def _hidden(self, length: int, device: torch.device) -> Tensor:
        if self.mask is not None:
            return self.mask.bool()[:length, :length]
        return torch.triu(torch.ones(length, length, dtype=torch.bool, device=device), diagonal=1)


class FlashAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.joint = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        joint = self.joint(x)
        joint = joint.view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = joint
        dropout = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        mixed = mixed.transpose(1, 2).contiguous().view(batch, length, WIDTH)
        return self.out(mixed)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        norm: Callable[[], nn.Module] = (
            (lambda: nn.LayerNorm(WIDTH)) if variant.library else PlainNorm
        )
        gelu = nn.GELU(approximate="tanh") if variant.library else PlainGELU()
        self.attention = (
            FlashAttention() if variant.flash else ExplicitAttention(variant.stored_mask)
        )
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), gelu, nn.Linear(4 * WIDTH, WIDTH))
        self.first, self.second = norm(), norm()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        before = x
        x = self.first(x)
        x = self.attention(x)
        x = self.dropout(x)
        x = x + before
        before = x
        x = self.second(x)
        x = self.feed(x)
        x = self.dropout(x)
        x = x + before
        return x


class GPT2(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*[Block(variant) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH) if variant.library else PlainNorm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.tokens(ids)
        places = self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = found + places
        x = self.dropout(x)
        x = self.blocks(x)
        x = self.norm(x)
        logits = self.head(x)
        return logits  # type: ignore[no-any-return]


def train(variant: Variant, steps: int = 3) -> int:
    """The published script's first epoch in short; returns bytes reserved at its end.

    Evaluation after the first step and generation after the last are as there. Steps repeat each
    other from the second on.
    """
    model = GPT2(variant)
    model.to("cuda")
    if variant.bf16:
        model.to(torch.bfloat16)
    options = {"fused": True} if variant.fused else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, **options)
    for step in range(steps):
        model.train()
        inputs, targets = _batch()
        optimizer.zero_grad()
        loss = _loss(model, inputs, targets)
        loss.backward()
        optimizer.step()
        if step == 0:
            _evaluate(model)
    _generate(model)
    return torch.cuda.memory_reserved()


def _batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    inputs, targets = inputs.to("cuda"), targets.to("cuda")
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(2):  # one batch for training, one for validation
            loss = _loss(model, *_batch())
            loss.item()
    model.train()


def _generate(model: nn.Module, words: int = 3) -> None:
    model.eval()
    ids = torch.randint(0, VOCABULARY, (1, 4)).to("cuda")
    for _ in range(words):
        with torch.no_grad():
            logits = model(ids)
        following = torch.argmax(logits[:, -1, :], dim=-1, keepdim=True)
        ids = torch.cat((ids, following), dim=1)
    model.train()


#: Parameter-sized temporaries that foreach may take beside what the loop over parameters takes
#: (PyTorch's test), and the bytes it takes beside it on the stub driver, for ten parameters of 512
#: bytes.
OPTIMIZERS: list[tuple[str, dict[str, Any], int, int]] = [
    ("Adadelta", {}, 3, 8704),
    ("Adadelta", {"maximize": True, "weight_decay": 0.1}, 3, 13312),
    ("Adadelta", {"capturable": True}, 3, 8704),
    ("Adafactor", {}, 2, 7680),
    ("Adafactor", {"maximize": True}, 3, 12288),
    ("Adagrad", {}, 2, 9216),
    ("Adagrad", {"weight_decay": 0.1}, 2, 8704),
    ("Adam", {}, 1, 3584),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}, 1, 3072),
    ("Adam", {"capturable": True}, 3, 10752),
    ("AdamW", {}, 1, 3584),
    ("AdamW", {"maximize": True}, 1, 3072),
    ("AdamW", {"capturable": True}, 3, 10752),
    ("Adamax", {}, 1, 4608),
    ("Adamax", {"capturable": True}, 3, 13312),
    # The loop reads a device value here (mu, which is 1): the stub driver answers 0 and then
    # makes one more tensor of 512 bytes, so 9728 there.
    ("ASGD", {}, 3, 10240),
    ("ASGD", {"capturable": True}, 3, 3584),
    ("NAdam", {}, 2, 3584),
    ("NAdam", {"capturable": True}, 5, 15872),
    ("RAdam", {}, 4, 4096),
    ("RAdam", {"capturable": True}, 4, 20480),
    ("RMSprop", {}, 2, 4096),
    ("RMSprop", {"centered": True, "momentum": 0.9}, 2, 4096),
    ("Rprop", {}, 1, 5120),
    ("Rprop", {"capturable": True}, 3, 4096),
    ("SGD", {}, 1, 0),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, 1, 4608),
    ("SGD", {"momentum": 0.9, "nesterov": True}, 1, -512),
]
PARAMETERS, PARAMETER = 10, 512


def second_step(name: str, options: dict[str, Any], foreach: bool) -> int:
    """Peak bytes of an optimizer's second step."""
    parameters = [torch.rand(16, 8, device="cuda") for _ in range(PARAMETERS)]
    optimizer = getattr(torch.optim, name)(parameters, **options, foreach=foreach)
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    return torch.cuda.max_memory_allocated()


#: Issue 95668: what one forward of a 1x1 linear layer leaves behind, all of it cuBLAS's workspace.
LEFT_BY_LINEAR = 8_519_680


def left_by_linear() -> int:
    def forward() -> None:
        model = nn.Linear(1, 1, device="cuda")
        model(torch.randn(1, 1, device="cuda"))

    forward()
    return torch.cuda.memory_allocated()


def simulate(name: str) -> int:
    """Bytes that one variant reserves with this torch."""
    from pytest_vram.sim import Simulation, find_profile

    with Simulation(find_profile("a100-80gb")):
        return train(VARIANTS[name])


def measure(name: str) -> int:
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    if torch.cuda.memory_reserved():
        raise SystemExit("the device already holds memory")
    return train(VARIANTS[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true", help="on CUDA instead of simulated")
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help="all without one")
    arguments = parser.parse_args()
    for name in arguments.variants or VARIANTS:
        reserved = measure(name) if arguments.real else simulate(name)
        row = {"variant": name, "torch": torch.__version__, "reserved": reserved}
        print(json.dumps({**row, "published_gib": VARIANTS[name].reserved}), flush=True)


if __name__ == "__main__":
    main()

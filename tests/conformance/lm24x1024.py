"""The program behind the five ``lm24x1024_*`` recordings of a real GPU, written anew.

A 24-layer language model in plain operators, d 1024, 16 heads, d_ff 4096, vocabulary 10000, batch
4, torch 2.11.0 (Wedsonlin/assignment2-systems, commit 87b08641, MIT). Recording began after five
warm-up steps: one forward pass in inference mode, or one training step with AdamW. As in lm4x512.py
the operators, their order and how long each local variable lives follow the recordings.

    python lm24x1024.py [NAME ...] [--events DIR]     simulates them and prints the peaks
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, LAYERS, HEADS, HIDDEN, BATCH, WARM_UPS = 10000, 1024, 24, 16, 4096, 4, 5


@dataclass(frozen=True)
class Run:
    """One recording: what ran, and the peaks that its replay gives."""

    train: bool
    context: int
    bf16: bool
    allocated: int
    reserved: int


RUNS = {
    "lm24x1024_forward_ctx128": Run(False, 128, False, 1_738_928_128, 1_763_704_832),
    "lm24x1024_forward_ctx256": Run(False, 256, False, 1_795_741_696, 1_864_368_128),
    "lm24x1024_forward_ctx512": Run(False, 512, True, 1_951_309_824, 1_981_808_640),
    "lm24x1024_forward_ctx1024": Run(False, 1024, False, 2_879_401_984, 3_204_448_256),
    "lm24x1024_train_ctx128_fp32": Run(True, 128, False, 7_026_606_592, 7_235_174_400),
}

#: Where the figures differ, and why.
DIFFERS = {
    "lm24x1024_train_ctx128_fp32": "every request and free is the recorded one, and so are the "
    "segments; on the card one block of 4 MiB keeps a rest of 491,520 bytes. Among equal free "
    "blocks the lowest address is taken, and the card's driver placed twelve later segments below "
    "the first, which no rule foretells; placed so, the simulation gives the card's figure",
}


def _initialised(rows: int, columns: int, deviation: float) -> nn.Parameter:
    limit = 3 * deviation
    weight = torch.empty(rows, columns)
    return nn.Parameter(nn.init.trunc_normal_(weight, std=deviation, a=-limit, b=limit))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = _initialised(VOCABULARY, WIDTH, 1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens, :]


class Projection(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = _initialised(outputs, inputs, math.sqrt(2 / (inputs + outputs)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class RootMeanSquare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        factor = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * factor
        return (self.weight * x).to(given)


class Rotary(nn.Module):
    """Rotary positions, pairs apart: first halves and second halves one after the other."""

    def __init__(self, longest: int, size: int) -> None:
        super().__init__()
        speeds = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(longest)[:, None] * speeds
        table = torch.stack((torch.cos(angles), torch.sin(angles)))
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        even, odd = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cosine, sine = self.table[:, : x.shape[-2], :].unbind(0)
        first = cosine * even - sine * odd
        second = sine * even + cosine * odd
        turned = torch.cat((first, second), dim=-1)
        return turned


def softmax(x: Tensor) -> Tensor:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.query, self.key = Projection(WIDTH, WIDTH), Projection(WIDTH, WIDTH)
        self.value, self.out = Projection(WIDTH, WIDTH), Projection(WIDTH, WIDTH)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (
            part.view(batch, length, HEADS, -1).transpose(1, 2) for part in (query, key, value)
        )
        query = self.rotary(query)
        key = self.rotary(key)
        places = torch.arange(length, device=x.device)
        mask = places[:, None] >= places[None, :]
        mask = mask[None, ...]
        mixed = attend(query, key, value, mask)
        mixed = mixed.transpose(1, 2).reshape(batch, length, WIDTH).contiguous()
        out = self.out(mixed)
        return out


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down = Projection(WIDTH, HIDDEN), Projection(HIDDEN, WIDTH)
        self.up = Projection(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.attention, self.gated = Attention(rotary), Gated()
        self.first, self.second = RootMeanSquare(), RootMeanSquare()

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.first(x))
        middle = x + attended
        gated = self.gated(self.second(middle))
        last = middle + gated
        return last


class LanguageModel(nn.Module):
    def __init__(self, longest: int) -> None:
        super().__init__()
        self.table = Table()
        self.rotary = Rotary(longest, WIDTH // HEADS)
        self.blocks = nn.ModuleList(Block(self.rotary) for _ in range(LAYERS))
        self.last = RootMeanSquare()
        self.head = Projection(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.table(tokens)
        x = embedded
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        logits = self.head(x)
        return logits


def log_softmax(x: Tensor) -> Tensor:
    most = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - most
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, labels.unsqueeze(-1)))


class AdamW(torch.optim.Optimizer):
    """New moments are new tensors; the old ones and unused zeros live until the next parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter], rate: float = 1e-3) -> None:
        super().__init__(parameters, {"rate": rate, "decay": 0.01})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = group["rate"]
            for parameter in group["params"]:
                state = self.state[parameter]
                gradient = parameter.grad.data
                steps = state.get("steps", 1)
                parameter.data -= rate * group["decay"] * parameter.data
                mean = state.get("mean", torch.zeros_like(gradient))
                square = state.get("square", torch.zeros_like(gradient))
                new_mean = 0.9 * mean + 0.1 * gradient
                new_square = 0.999 * square + 0.001 * torch.square(gradient)
                scale = rate * math.sqrt(1 - 0.999**steps) / (1 - 0.9**steps)
                parameter.data -= scale * new_mean / (torch.sqrt(new_square) + 1e-8)
                state["steps"], state["mean"], state["square"] = steps + 1, new_mean, new_square


def _tokens(steps: int, context: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (steps, BATCH, context), device="cuda")


def _autocast(run: Run) -> Any:
    return torch.autocast("cuda", torch.bfloat16, enabled=run.bf16)


def forward(run: Run, begin: Callable[[], None]) -> Any:
    """Five forward passes, then ``begin`` and the recorded one."""
    model = LanguageModel(run.context)
    model.to("cuda")
    warm, recorded = _tokens(WARM_UPS, run.context), _tokens(1, run.context)
    model.eval()
    with torch.inference_mode():
        for step in range(WARM_UPS):
            with _autocast(run):
                model(warm[step])
        begin()
        with _autocast(run):
            model(recorded[0])
    return model, warm, recorded


def train(run: Run, begin: Callable[[], None]) -> Any:
    """Five steps, then ``begin`` and the recorded one."""
    model = LanguageModel(run.context)
    model.to("cuda")
    optimizer = AdamW(model.parameters())
    warm, recorded = _tokens(WARM_UPS, run.context), _tokens(1, run.context)
    warm_labels, labels = _tokens(WARM_UPS, run.context), _tokens(1, run.context)
    model.train()
    for step in range(WARM_UPS):
        logits = model(warm[step])
        loss = cross_entropy(logits, warm_labels[step])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del logits, loss
    optimizer.zero_grad(set_to_none=True)
    begin()
    logits = model(recorded[0])
    loss = cross_entropy(logits, labels[0])
    loss.backward()
    optimizer.step()
    return model, optimizer, warm, recorded, warm_labels, labels, logits, loss


def simulate(name: str, card: str = "a100-80gb") -> tuple[dict[str, int], list[list[Any]]]:
    """Peaks and event stream ``[kind, bytes requested, operator, line]`` of the recorded step."""
    from pytest_vram.sim import Simulation, find_profile

    run = RUNS[name]
    with Simulation(find_profile(card)) as gpu:

        def begin() -> None:
            torch.cuda.reset_peak_memory_stats()
            gpu.phase("recorded", 1)

        alive = (train if run.train else forward)(run, begin)
        trace = gpu.trace()
        del alive
        stats = gpu.allocator
        peaks = {"peak_allocated": stats.peak_allocated, "peak_reserved": stats.peak_reserved}
    start = next(i for i, event in enumerate(trace.events) if event.kind == "phase")
    events = []
    for event in trace.events[start:]:
        if event.kind in ("alloc", "free"):
            made = trace.allocations[event.index]
            events.append([event.kind, made.requested, made.operator, made.frame])
    return peaks, events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="recordings; all without one")
    parser.add_argument("--card", default="a100-80gb")
    parser.add_argument("--events", metavar="DIR", type=Path, help="write the event streams here")
    arguments = parser.parse_args()
    for name in arguments.names or RUNS:
        peaks, events = simulate(name, arguments.card)
        print(json.dumps({"recording": name, "torch": torch.__version__, **peaks}), flush=True)
        if arguments.events:
            arguments.events.mkdir(parents=True, exist_ok=True)
            (arguments.events / f"{name}.json").write_text(json.dumps(events))


if __name__ == "__main__":
    main()

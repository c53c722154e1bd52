"""The program behind the eight ``lm4x512_*`` recordings of a real GPU, written anew.

What ran on the card (fixtures/README.md names the source): a 4-layer language model in plain
operators, d 512, 16 heads, d_ff 1344, vocabulary 10000, batch 10, torch 2.6.0, recorded from before
the model was built. ``forward`` runs it three times and drops the output; ``train`` adds a loss on
the last position, backward and a textbook Adam. The operators, their order and how long each local
variable holds its tensor follow the recordings' stacks and events; that is what decides memory.

    python lm4x512.py [NAME ...] [--events DIR]     simulates them and prints the peaks
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, LAYERS, HEADS, HIDDEN, BATCH, LONGEST = 10000, 512, 4, 16, 1344, 10, 256


@dataclass(frozen=True)
class Run:
    """One recording: what ran, and the peaks that the card reported."""

    train: bool
    context: int
    bf16: bool
    allocated: int
    reserved: int


RUNS = {
    "lm4x512_forward_ctx100_fp32": Run(False, 100, False, 416_297_472, 463_470_592),
    "lm4x512_forward_ctx150_fp32": Run(False, 150, False, 639_149_056, 666_894_336),
    "lm4x512_forward_ctx200_fp32": Run(False, 200, False, 882_670_592, 945_815_552),
    "lm4x512_forward_ctx200_bf16": Run(False, 200, True, 701_606_400, 742_391_808),
    "lm4x512_train_ctx100_fp32": Run(True, 100, False, 695_675_904, 786_432_000),
    "lm4x512_train_ctx150_fp32": Run(True, 150, False, 953_719_808, 1_063_256_064),
    "lm4x512_train_ctx200_fp32": Run(True, 200, False, 1_234_635_264, 1_390_411_776),
    "lm4x512_train_ctx200_bf16": Run(True, 200, True, 984_657_920, 1_205_862_400),
}


def _initialised(rows: int, columns: int, device: str, deviation: float) -> nn.Parameter:
    weight = nn.Parameter(torch.empty(rows, columns, device=device))
    limit = 3 * deviation
    nn.init.trunc_normal_(weight, std=deviation, a=-limit, b=limit)
    return weight


class Table(nn.Module):
    """An embedding by indexing, so that its backward is ``index_put_``'s."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = _initialised(VOCABULARY, WIDTH, device, 1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class Projection(nn.Module):
    """A linear layer without bias, by einsum (a batched product)."""

    def __init__(self, inputs: int, outputs: int, device: str) -> None:
        super().__init__()
        self.weight = _initialised(outputs, inputs, device, math.sqrt(2 / (inputs + outputs)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class RootMeanSquare(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, device=device))

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        size = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)
        scaled = x / size * self.weight
        return scaled.to(given)


class Rotary(nn.Module):
    """Rotary positions whose tables stay on the CPU: each call copies its rows to the card."""

    def __init__(self, size: int, device: str) -> None:
        super().__init__()
        self.device = device
        speeds = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(LONGEST)[:, None] * speeds
        self.sines, self.cosines = torch.sin(angles), torch.cos(angles)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[-2])
        sine = self.sines[rows].to(self.device)
        cosine = self.cosines[rows].to(self.device)
        sine, cosine = sine[:, :, None], cosine[:, :, None]
        x = x.unflatten(-1, (-1, 2))
        first = cosine * x[..., :1] - sine * x[..., 1:]
        second = sine * x[..., :1] + cosine * x[..., 1:]
        turned = torch.cat([first, second], dim=-1)
        return turned.flatten(-2)


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        most, _ = torch.max(x, dim=-1, keepdim=True)
        return torch.exp(x - most) / torch.sum(torch.exp(x - most), dim=-1, keepdim=True)


class Scores(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        mask = mask.to(query.device)
        product = torch.einsum("...qd,...kd->...qk", query, key)
        scaled = product / torch.sqrt(torch.tensor(query.shape[-1], device=product.device))
        masked = scaled.masked_fill_(~mask.bool(), -math.inf)
        weights = Softmax()(masked)
        return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.rotary = Rotary(WIDTH // HEADS, device)
        self.query = Projection(WIDTH, WIDTH, device)
        self.key = Projection(WIDTH, WIDTH, device)
        self.value = Projection(WIDTH, WIDTH, device)
        self.out = Projection(WIDTH, WIDTH, device)
        self.scores = Scores()

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        query, key, value = self.query(x), self.key(x), self.value(x)
        query = self._heads(query)
        key = self._heads(key)
        value = self._heads(value)
        query = self.rotary(query)
        key = self.rotary(key)
        mask = torch.tril(torch.ones(length, length))
        mixed = self.scores(query, key, value, mask)
        mixed = mixed.transpose(1, 2).reshape(-1, length, WIDTH)
        mixed = self.out(mixed)
        return mixed

    @staticmethod
    def _heads(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], HEADS, -1).transpose(1, 2)


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class Gated(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.gate = Projection(WIDTH, HIDDEN, device)
        self.down = Projection(HIDDEN, WIDTH, device)
        self.up = Projection(WIDTH, HIDDEN, device)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        opened = Gate()(gate)
        up = self.up(x)
        both = opened * up
        return self.down(both)


class Block(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.before_attention = RootMeanSquare(device)
        self.before_gated = RootMeanSquare(device)
        self.attention = Attention(device)
        self.gated = Gated(device)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.before_attention(x)
        attended = self.attention(normal)
        middle = attended + x
        normal_again = self.before_gated(middle)
        gated = self.gated(normal_again)
        return gated + middle


class LanguageModel(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.table = Table(device)
        self.blocks = nn.ModuleList(Block(device) for _ in range(LAYERS))
        self.last = RootMeanSquare(device)
        self.head = Projection(WIDTH, VOCABULARY, device)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        logits = self.head(x)
        return logits


class CrossEntropy(nn.Module):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        most, _ = torch.max(logits, dim=-1, keepdim=True)
        logarithms = (
            logits - most - torch.log(torch.sum(torch.exp(logits - most), dim=-1, keepdim=True))
        )
        chosen = torch.zeros_like(logarithms)
        chosen.scatter_(-1, labels.unsqueeze(-1), 1)
        return -torch.sum(chosen * logarithms) / logits.shape[0]


class Adam(torch.optim.Optimizer):
    """Textbook Adam: new moments and new weights are new tensors, which die one iteration late."""

    def __init__(self, parameters: Iterable[nn.Parameter], rate: float = 1e-3) -> None:
        super().__init__(parameters, {"rate": rate, "decay": 0.0})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "mean": torch.zeros_like(parameter.data),
                    "square": torch.zeros_like(parameter.data),
                    "steps": 0,
                }

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                steps = state["steps"] = state["steps"] + 1
                rate = group["rate"] * math.sqrt(1 - 0.999**steps) / (1 - 0.9**steps)
                gradient = parameter.grad.data
                mean = state["mean"]
                new_mean = 0.9 * mean + 0.1 * gradient
                state["mean"] = new_mean
                square = state["square"]
                new_square = 0.999 * square + 0.001 * gradient**2
                state["square"] = new_square
                parameter.data = parameter.data - rate * (
                    new_mean / (torch.sqrt(new_square) + 1e-8)
                )
                parameter.data = parameter.data - group["rate"] * group["decay"] * parameter.data


def forward(run: Run) -> Any:
    model = LanguageModel("cuda")
    tokens = torch.randint(0, VOCABULARY, (BATCH, run.context)).to("cuda")
    for _ in range(3):
        with _autocast(run):
            model(tokens)
    return model, tokens


def train(run: Run) -> Any:
    """Three steps; one autocast region around all of them, backward and optimizer included."""
    model = LanguageModel("cuda")
    optimizer = Adam(model.parameters())
    tokens = torch.randint(0, VOCABULARY, (BATCH, run.context)).to("cuda")
    labels = torch.randint(0, VOCABULARY, (BATCH,)).to("cuda")
    with _autocast(run):
        for _ in range(3):
            optimizer.zero_grad()
            logits = model(tokens)
            last = logits[:, -1, :]
            loss = CrossEntropy()(last, labels)
            loss.backward()
            optimizer.step()
    return optimizer, tokens, labels, logits, last, loss


def _autocast(run: Run) -> Any:
    return torch.autocast("cuda", torch.bfloat16) if run.bf16 else contextlib.nullcontext()


def simulate(name: str, card: str = "a100-80gb") -> tuple[dict[str, int], list[list[Any]]]:
    """Peaks and the event stream ``[kind, bytes requested, operator, line]`` of one run."""
    from pytest_vram.sim import Simulation, find_profile

    run = RUNS[name]
    with Simulation(find_profile(card)) as gpu:
        alive = (train if run.train else forward)(run)
        trace = gpu.trace()  # with everything alive, as the recordings end
        del alive
        stats = gpu.allocator
        peaks = {"peak_allocated": stats.peak_allocated, "peak_reserved": stats.peak_reserved}
    events = []
    for event in trace.events:
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

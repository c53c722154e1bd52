"""``plan --check``: the closed form beside a simulation of the same training step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytest_vram.bills import settle
from pytest_vram.commands.common import Problem, bill_name, say, table
from pytest_vram.ledger import Ledger
from pytest_vram.observe import Observer
from pytest_vram.planning.answers import BILLS, Plan
from pytest_vram.planning.modules import build, load_module
from pytest_vram.planning.plan import make_plan
from pytest_vram.planning.runs import Setup
from pytest_vram.quantities import format_bytes, format_change, format_percent
from pytest_vram.sim.profiles import Profile, find_profile
from pytest_vram.sim.simulation import Simulation

#: Steps to simulate: the second and third are alike, the first lacks the optimizer's state.
STEPS = 3

_WHY = {
    "parameters": "blocks that the allocator did not split are larger than their tensors",
    "gradients": "gradients exist only from backward on; the two peaks lie at different moments",
    "optimizer_state": "tensors of one element that the optimizer counts its steps in",
    "activations": "what an implementation keeps beyond the usual modules, and unsplit blocks",
    "temporary": "what operators hold for a moment; only the layer's working set is planned",
    "workspace": "the simulated card's cuBLAS workspaces",
    "inputs": "copies of inputs and labels that the model makes",
    "buffers": "buffers are not part of a shape",
    "autocast_cache": "weights that the model casts or does not",
    "other": "values computed outside of the model",
    "master_weights": "another way to keep masters",
}


@dataclass(frozen=True)
class Check:
    """A plan and the ledger of its simulation."""

    plan: Plan
    ledger: Ledger
    card: Profile

    def rows(self) -> list[tuple[str, int, int]]:
        """Bill, planned, simulated; both at the peak."""
        planned = self.plan.peak_moment.bills
        pairs = ((name, planned[name], self.ledger.bills.get(name, 0)) for name in BILLS)
        return [row for row in pairs if row[1] or row[2]]

    def show(self) -> None:
        """Print both, and what explains each difference worth a mention."""
        say(f"Closed form against a simulation of {STEPS} steps on {self.card.name}:")
        say()
        shown = [
            (
                bill_name(name),
                format_bytes(ours),
                format_bytes(theirs),
                format_change(theirs - ours, max(ours, theirs)),
            )
            for name, ours, theirs in self.rows()
        ]
        peak, real = self.plan.peak, self.ledger.peak_allocated
        percent = format_percent(real - peak, peak)
        shown.append(("total", format_bytes(peak), format_bytes(real), percent))
        table(("bill at the peak", "planned", "simulated", "difference"), shown)
        say(f"Peaks: planned {self.plan.peak_moment.name}; simulated {self.ledger.peak}.")
        for name, ours, theirs in self.rows():
            if abs(theirs - ours) > max(1 << 20, real // 100):
                say(f"{bill_name(name)}: {_WHY[name]}.")

    def to_dict(self) -> dict[str, Any]:
        return {
            "gpu": self.card.name,
            "bills": {
                name: {"planned": ours, "simulated": theirs} for name, ours, theirs in self.rows()
            },
            "peak": {"planned": self.plan.peak, "simulated": self.ledger.peak_allocated},
        }


def simulate_setup(model: str | None, setup: Setup, card: Profile | None) -> Check:
    """Simulate the training step that ``setup`` describes with the module that ``model`` names."""
    file = model is not None and ":" not in model and Path(model).exists()
    if model is None or not (":" in model or file):
        raise Problem(
            "--check simulates a live model: give it as module:attribute, or as a config.json that "
            "transformers can build"
        )
    if setup.parallel.ranks > 1 or setup.offload.what or setup.quantisation or setup.lora:
        raise Problem("--check knows one card, no offload, and no adapters")
    if setup.precision.name not in ("fp32", "bf16", "fp16", "bf16-plain", "fp16-plain"):
        raise Problem(f"--check does not know how to train in {setup.precision.name}")
    profile = card or find_profile("a100-80gb")
    module = build(Path(model)) if file else load_module(model)
    ledger = simulate_training(module, setup, profile)
    return Check(make_plan(setup), ledger, profile)


def simulate_training(module: nn.Module, setup: Setup, profile: Profile) -> Ledger:
    """The ledger of :data:`STEPS` steps of ``module`` on ``profile``."""
    simulation = Simulation(profile)
    with simulation, Observer(simulation) as observer:
        _train(module, setup, simulation.device)
    return Ledger.from_trace(settle(observer.renumber(simulation.trace())))


def _train(module: nn.Module, setup: Setup, device: torch.device) -> None:
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    kind, _, plain = setup.precision.name.partition("-")
    module = module.to_empty(device=device) if _is_meta(module) else module.to(device)
    if plain:
        module = module.to(dtypes[kind])
    if setup.recompute.checkpointed and callable(
        enable := getattr(module, "gradient_checkpointing_enable", None)
    ):
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module.train()
    optimizer = _optimizer(setup, [p for p in module.parameters() if p.requires_grad])
    cast = not plain and kind in dtypes
    for _ in range(STEPS):
        for _ in range(setup.accumulation):
            inputs = _inputs(setup, device)
            with torch.autocast("cuda", dtypes.get(kind), enabled=cast):
                output, loss = _loss(module, inputs, setup)
            (loss / setup.accumulation).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del output, loss


def _is_meta(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


def _optimizer(setup: Setup, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    makers: dict[str, Any] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    makers["sgd"] = torch.optim.SGD
    name = setup.optimizer.name
    if name not in makers:
        raise Problem(f"--check knows {', '.join(makers)}, not {name}")
    options = {"foreach": {}, "fused": {"fused": True}, "loop": {"foreach": False}}[setup.step]
    made: torch.optim.Optimizer = makers[name](parameters, lr=1e-4, **options)
    return made


def _inputs(setup: Setup, device: torch.device) -> torch.Tensor:
    if setup.shape.pixels_per_sample:
        side = round((setup.shape.pixels_per_sample / 3) ** 0.5)
        return torch.randn(setup.batch, 3, side, side, device=device)
    shape = (setup.batch, setup.sequence)
    return torch.randint(0, max(1, setup.shape.vocab), shape, device=device)


def _loss(module: nn.Module, inputs: torch.Tensor, setup: Setup) -> tuple[object, torch.Tensor]:
    """The model's output (kept, as a caller would) and its loss."""
    if hasattr(getattr(module, "config", None), "to_dict"):
        labels = inputs
        if setup.shape.head == "classes":
            labels = torch.zeros(setup.batch, dtype=torch.long, device=inputs.device)
        output = module(inputs, labels=labels)
        return output, output.loss
    output = module(inputs)
    values = output[0] if isinstance(output, tuple) else output
    if setup.shape.head == "none":
        return output, values.float().mean()
    targets = inputs.reshape(-1) if setup.shape.head == "lm" else inputs[:, 0]
    flat = values.reshape(-1, values.shape[-1])
    return output, nn.functional.cross_entropy(flat, targets)

"""Regions that a forward runs in: autocast, and checkpointed segments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pytest_vram.findings import Finding
from pytest_vram.numerics.collector import Collector
from pytest_vram.numerics.events import Backward, Update
from pytest_vram.numerics.loop import Loop
from pytest_vram.numerics.names import listed, optimizer_parameters


class RegionWatch(Collector):
    """Casts that outlive an update, operators that CUDA refuses, segments that cut the graph."""

    def __init__(self, loop: Loop, found: dict[str, Finding]) -> None:
        super().__init__(loop, found)
        self._autocast_step = ""
        self._reentrant: list[tuple[str, Any]] = []

    # ---- autocast

    def update_ends(self, update: Update) -> None:
        if update.applied:
            self._step_under_autocast(update)

    def autocast_cache_cleared(self) -> None:
        self._autocast_step = ""

    def _step_under_autocast(self, update: Update) -> None:
        device = next((p.device.type for p in optimizer_parameters(update.optimizer)), "cpu")
        if not torch.is_autocast_enabled(device) or not torch.is_autocast_cache_enabled():
            return
        dtype = torch.get_autocast_dtype(device)
        parameters = optimizer_parameters(update.optimizer)
        if dtype is not torch.float32 and any(p.dtype is torch.float32 for p in parameters):
            self._autocast_step = update.line

    def forward_begins(self, module: nn.Module) -> None:
        if self._autocast_step and torch.is_grad_enabled():
            self._add(
                "stale cache",
                f"optimizer.step() at {self._autocast_step} ran inside an autocast region that "
                "stayed open: the next forward uses weights that were cast before the update",
                hint="open autocast around forward and loss only, anew in each step; leaving it "
                "drops the cached casts",
                kind="untrained",
            )
            self._autocast_step = ""

    def banned_called(self, name: str, line: str) -> None:
        self._add(
            f"banned {name}",
            f"{name} inside autocast at {line}: raises on cuda (unsafe to autocast), also where a "
            "CPU run passes",
            hint=f"use {name}_with_logits without the sigmoid, or leave autocast for it and pass "
            "float32",
        )

    # ---- checkpointing

    def backward_begins(self, call: Backward) -> None:
        node = call.roots[0].grad_fn if call.roots else None
        if node is None and not any(root.requires_grad for root in call.roots):
            self._cut_by_checkpoint()  # backward will raise: this is why

    def backward_ends(self, call: Backward) -> None:
        self._cut_by_checkpoint()

    def checkpointed(self, function: Any, args: Any, reentrant: bool, line: str) -> None:
        if not reentrant or not torch.is_grad_enabled():
            return
        if not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            parameters = _parameters_of(function)
            if any(p.requires_grad for p in parameters):
                self._reentrant.append((line, parameters))

    def _cut_by_checkpoint(self) -> None:
        """Segment after segment: what comes out of the first needs no gradient either."""
        segments, self._reentrant = self._reentrant, []
        inside = {id(p): p for _, parameters in segments for p in parameters if p.requires_grad}
        without = [p for p in inside.values() if p.grad is None]
        if not without:
            return
        names = self._loop.names.names(without)
        self._add(
            "reentrant",
            f"checkpoint(use_reentrant=True) at {segments[0][0]} got no input that requires grad: "
            f"{len(without)} of {len(inside)} trainable parameters inside get no gradient "
            f"({listed(names)})",
            hint="use checkpoint(..., use_reentrant=False), or make the frozen embedding's "
            "output require grad (model.enable_input_require_grads())",
            kind="untrained",
            parameters=names,
        )


def _parameters_of(function: Any) -> list[Tensor]:
    """Parameters that a checkpointed function can reach: its module, its closure, its arguments."""
    found: dict[int, Tensor] = {}
    values = [function, getattr(function, "__self__", None), getattr(function, "func", None)]
    values += [getattr(value, "__self__", None) for value in values if value is not None]
    values += list(getattr(function, "args", ()) or ())
    for cell in getattr(function, "__closure__", None) or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    for value in values:
        for inner in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(inner, nn.Module):
                found.update((id(p), p) for p in inner.parameters())
            elif isinstance(inner, nn.Parameter):
                found[id(inner)] = inner
    return list(found.values())

"""Mistakes that raise nothing and leave every number finite: weights that came untied, a schedule
one step ahead, a loss whose gradient is added twice."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pytest_vram.findings import Finding
from pytest_vram.frames import user_line
from pytest_vram.numerics.events import Backward, Listener, Update
from pytest_vram.numerics.loop import Loop
from pytest_vram.numerics.loss_graph import below_scaling
from pytest_vram.numerics.names import listed
from pytest_vram.numerics.probes_modules import held_as


class SilentWatch(Listener):
    """Collects findings in ``found``, each kind of mistake once."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.found: dict[str, Finding] = {}
        self._untied: list[tuple[weakref.ref[nn.Module], Sequence[str], str, str]] = []
        self._scheduled: dict[int, str] = {}  # optimizer -> line, before its first step
        self._retained: dict[int, str] = {}  # the loss's node -> line of its backward
        self._again: tuple[str, str] | None = None

    def _add(self, key: str, kind: str, sentence: str, *details: str, hint: str = "") -> None:
        severity: Any = "note" if key == "autocast" else "warn"
        self.found.setdefault(key, Finding(kind, severity, sentence, details, hint))

    # ---- tied weights

    def ties_broken(self, module: nn.Module, names: Sequence[str], how: str, line: str) -> None:
        self._untied.append((weakref.ref(module), names, how, line))

    def update_ends(self, update: Update) -> None:
        self._retained.clear()
        for reference, names, how, line in self._untied:
            module = reference()
            if module is not None and _train_apart(held_as(module, names)):
                self._untie(names, how, line)

    def _untie(self, names: Sequence[str], how: str, line: str) -> None:
        self._add(
            "untied",
            "untrained",
            f"{listed(names)} were one parameter until {how} at {line}, and are trained apart "
            "since",
            hint="tie them again before the optimizer is made (head.weight = embedding.weight, "
            "model.tie_weights())",
        )

    # ---- the schedule

    def scheduler_stepped(self, scheduler: Any) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        record = self._loop.optimizers.get(id(optimizer))
        # One that is wound forward on resume has seen no backward yet.
        if record is not None and record.waiting and not record.attempts:
            self._scheduled.setdefault(
                id(optimizer), f"{type(scheduler).__name__} at {user_line()}"
            )

    def update_begins(self, update: Update) -> None:
        where = self._scheduled.pop(id(update.optimizer), "")
        if where:
            self._add(
                "schedule",
                "untrained",
                f"the scheduler steps before {self._loop.describe(update.optimizer)} does: {where} "
                f"comes before optimizer.step() at {update.line}, so the first learning rate is "
                "never used",
                hint="call scheduler.step() after optimizer.step()",
            )

    # ---- backward

    def backward_begins(self, call: Backward) -> None:
        self._again = None
        root = call.roots[0] if call.roots else None
        if root is None or root.grad_fn is None:
            return
        node = below_scaling(root.grad_fn) if call.scaler is not None else root.grad_fn
        if node is not None:
            earlier = self._retained.get(node._sequence_nr())
            self._again = (earlier, call.line) if earlier is not None else None
            if call.retains or call.creates:
                self._retained[node._sequence_nr()] = call.line
        self._under_autocast(call, root)

    def backward_ends(self, call: Backward) -> None:
        if self._again is None:
            return
        doubled = [
            parameter
            for reached in self._loop.reached
            if reached.before.contributions and (parameter := reached.state.parameter()) is not None
        ]
        if doubled:
            first, second = self._again
            self._add(
                "twice",
                "untrained",
                f"backward ran twice from the same loss, at {first} (retain_graph=True) and at "
                f"{second}, without zero_grad between: the gradients of "
                f"{listed(self._loop.names.names(doubled))} are doubled",
                hint="call backward() once per loss and step",
            )

    def _under_autocast(self, call: Backward, root: Tensor) -> None:
        device = root.device.type
        if not call.inside_step and torch.is_autocast_enabled(device):
            self._add(
                "autocast",
                "scaler",
                f"backward at {call.line} runs inside autocast, which PyTorch advises against: the "
                "region should hold forward and loss only",
            )


def _train_apart(parameters: Sequence[Tensor]) -> bool:
    """Different memory, of which at least two receive gradients."""
    trained = [p for p in parameters if p.requires_grad and p.grad is not None]
    return len({p.untyped_storage()._cdata for p in trained}) > 1

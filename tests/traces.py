"""Traces and ledgers written by hand, for tests that need no device."""

from __future__ import annotations

from typing import Any

from pytest_vram.environment import Environment
from pytest_vram.ledger import Ledger
from pytest_vram.trace import Allocation, Event, Phase, Trace

MIB = 1 << 20
A100 = Environment("sim", "a100-80gb", {"torch": "2.13.0", "transformers": "5.1.0"})


class Script:
    """Writes a Trace as a test would run: ``take``, ``give``, ``phase``, ``reserve``."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self.events: list[Event] = []
        self.phases: list[Phase] = []

    def take(self, bill: str, size: int, **more: Any) -> int:
        self.allocations.append(Allocation(size, size, bill=bill, **more))
        self.events.append(Event("alloc", len(self.allocations) - 1))
        return len(self.allocations) - 1

    def give(self, index: int) -> None:
        self.events.append(Event("free", index))

    def phase(self, name: str, step: int) -> None:
        self.phases.append(Phase(name, step))
        self.events.append(Event("phase", len(self.phases) - 1))

    def reserve(self, size: int) -> None:
        self.events.append(Event("segment_alloc" if size > 0 else "segment_free", size=abs(size)))

    def trace(self, **more: Any) -> Trace:
        return Trace(self.allocations, self.events, self.phases, **more)

    def ledger(self, **more: Any) -> Ledger:
        return Ledger.from_trace(self.trace(**more))


def training(
    steps: int = 2, leak: int = 0, logits: int = 0, saved: int = 30 * MIB, line: int = 41
) -> Script:
    """Parameters of 10 MiB, ``saved`` activations (30 MiB), gradients of 10, states of 20 from step
    1 on; ``logits`` more bytes in forward; ``leak`` bytes that stay with every step."""
    script = Script()
    script.phase("setup", 0)
    script.reserve(20 * MIB)
    weight = {"name": "weight", "shape": (5, 2), "dtype": "float32"}
    parameters = script.take("parameters", 10 * MIB, **weight)
    states = []
    for step in range(1, steps + 1):
        script.phase("forward", step)
        if step == 1:
            script.reserve(60 * MIB + logits)
        place = {"operator": "aten::mm", "module": "lm.h", "frame": f"train.py:{line} forward"}
        kept = [script.take("activations", saved, shape=(3, 10), dtype="float16", **place)]
        if logits:
            cast = {"operator": "aten::_to_copy", "module": "lm.head", "frame": "loss.py:9 loss"}
            kept.append(script.take("activations", logits, shape=(7,), dtype="float32", **cast))
        script.phase("backward", step)
        gradient = script.take("gradients", 10 * MIB)
        for index in kept:
            script.give(index)
        script.phase("optimizer", step)
        if step == 1:
            states.append(script.take("optimizer_state", 20 * MIB))
        script.give(script.take("temporary", 1 * MIB))
        script.give(gradient)
        if leak:
            script.take("other", leak)
        script.phase("between", step)
    for index in (parameters, *states):
        script.give(index)
    return script

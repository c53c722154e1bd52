"""Gradients that are missing and updates that change nothing, as the steps go by."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pytest_vram.findings import Finding
from pytest_vram.numerics.events import Backward, Listener, Update
from pytest_vram.numerics.loop import Loop, version
from pytest_vram.numerics.loss_graph import LossGraph, read_graph
from pytest_vram.numerics.names import listed, optimizer_parameters
from pytest_vram.numerics.nonfinite import LossValue
from pytest_vram.numerics.samples import piece, spread

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_MOST_CUDA = 64
_SMALLEST_NORMAL = torch.finfo(torch.float16).tiny  # 6.1e-5; below it digits are lost, then all


@dataclass(slots=True)
class Missing:
    """A trainable parameter that no backward has reached."""

    name: str
    shape: tuple[int, ...]
    numel: int
    why: str  #: cut, swallowed, rewrapped, dropped, no_grad, idle, copy, sibling, unknown
    optimizer: str = ""
    twin: str = ""  #: the type of a module like its own that ran instead
    cause: str = ""  #: what the loss's graph says: its end, or a function that returned None

    @property
    def named(self) -> bool:
        return not self.name.startswith("a parameter of shape")


@dataclass(slots=True)
class Sample:
    """Some elements of one parameter before its first update, and what became of them."""

    parameter: weakref.ref[Tensor]
    begin: Tensor
    low_precision: bool
    updates: int = 0
    learning: bool = False  #: its learning rate was above 0 at some update
    adaptive: bool = False  #: the optimizer normalises: an update is about as large as the rate
    gradient: Tensor | None = None  #: which sampled elements ever had a gradient
    changed: float = 1.0  #: share of those that changed
    moved: float = 0.0  #: largest relative change


class TrainingWatch(Listener):
    """Census of gradients and samples of parameters, taken around each optimizer step."""

    def __init__(self, loop: Loop, values: bool, losses: list[LossValue]) -> None:
        self.loop, self._values, self.losses = loop, values, losses
        self.missing: dict[int, list[Missing]] = {}
        self.trained: dict[str, int] = {}  # name -> elements, of parameters with a gradient
        self.total = 0  # trainable parameters that were asked
        self.found: dict[str, Finding] = {}
        self.stuck: list[tuple[str, Sample]] = []
        self.moved = 0.0
        self._samples: dict[int, Sample] = {}
        self._frozen: dict[int, int] = {}
        self._without_grad: dict[int, bool] = {}
        self.schedulers: list[tuple[str, int, int, int]] = []
        self.still: list[tuple[str, int, bool, bool]] = []
        self.unstepped: list[tuple[str, int, str]] = []
        self.dead: dict[str, tuple[list[str], int]] = {}  # optimizer -> parameters, updates
        self.zero_start = False  # a weight that began at 0, such as LoRA's B
        self.backward_line = ""
        self._graph = LossGraph()  # of the last backward that left a parameter without gradient
        #: parameter, elements of its gradient below float16's normal numbers, all that are not 0
        self.tiny: list[tuple[str, int, int]] = []
        self.flat: list[str] = []  # operators without a slope in the first losses

    # ---- which parameters have gradients

    def module_ran(self, module: nn.Module, output: Any) -> None:
        """A module whose own trainable weights left no trace in its output: the graph is cut."""
        if not torch.is_grad_enabled() or not module._parameters:
            return
        if any(p is not None and p.requires_grad for p in module._parameters.values()):
            cut = not any(t.requires_grad for t in _outputs(output))
            self._without_grad[id(module)] = self._without_grad.get(id(module), True) and cut

    def backward_ends(self, call: Backward) -> None:
        self._note_unstepped(call)
        self._look_at_graph(call)
        if not self.loop.optimizers and not call.inside_step and self._worth_a_census(0):
            parameters = [p for p in self.loop.names.parameters() if self.loop.used(p)]
            self._census(0, parameters, "")

    def _look_at_graph(self, call: Backward) -> None:
        """While it lives: what is missing is judged after the step."""
        self.backward_line = call.line
        if self.loop.backwards > 4:
            return
        parameters = self.loop.parameters()
        known = {id(p) for p in parameters}
        without = any(
            p.requires_grad and p.grad is None and not self.loop.state(p).ever for p in parameters
        )
        if without or self.loop.backwards == 1:
            graph = read_graph(call.roots, known)
            self.flat += [name for name in graph.flat if name not in self.flat]
            if without:
                self._graph = graph

    def _worth_a_census(self, key: int) -> bool:
        """Again only while somebody is missing: who has had a gradient keeps it."""
        return key not in self.missing or bool(self.missing[key])

    def _census(self, key: int, parameters: Sequence[Tensor], optimizer: str) -> None:
        wanted = [p for p in parameters if p.requires_grad]
        absent = [p for p in wanted if p.grad is None and not self.loop.state(p).ever]
        self.missing[key] = [self._missing(p, optimizer) for p in absent]
        if wanted and len(absent) == len(wanted):
            self._of_a_copy(self.missing[key], wanted)
        self.total = max(self.total, len(wanted))
        for parameter in parameters:
            if parameter.grad is not None or self.loop.state(parameter).ever:
                self.trained.setdefault(self.loop.names.name(parameter), parameter.numel())

    def _missing(self, parameter: Tensor, optimizer: str) -> Missing:
        name = self.loop.names.name(parameter)
        owners = self.loop.owners(parameter)
        ran = [owner for owner in owners if self.loop.ran(owner)]
        if not owners:
            why = "unknown"
        elif any(self._without_grad.get(id(owner)) for owner in ran):
            why = "cut"
        elif ran:
            why = "dropped"
        elif any(self.loop.ran_only_without_graph(owner) for owner in owners):
            why = "no_grad"
        elif any(self._has_running_sibling(owner) for owner in owners):
            why = "sibling"
        else:
            why = "idle"
        entry = Missing(name, tuple(parameter.shape), parameter.numel(), why, optimizer)
        if why in ("dropped", "cut"):
            self._read_cause(entry, parameter)
        return entry

    def _read_cause(self, entry: Missing, parameter: Tensor) -> None:
        graph = self._graph
        custom = graph.swallows(parameter)
        if custom is not None:
            at = f" ({custom.line})" if custom.line else ""
            entry.why, entry.cause = "swallowed", f"{custom.name}.backward{at}"
        elif entry.why == "dropped" and not self.trained and graph.root_is_leaf:
            entry.why, entry.cause = "rewrapped", "the loss is a tensor made"
        elif entry.why == "dropped" and not self.trained and graph.ends:
            entry.why, entry.cause = (
                "rewrapped",
                f"the graph of the loss ends at a {graph.ends[0]} made",
            )

    def _of_a_copy(self, missing: list[Missing], parameters: list[Tensor]) -> None:
        """Nothing of the optimizer's model ran, but a module like it that no optimizer holds."""
        mine = {id(p) for p in parameters}
        held = {id(p) for o in self.loop.live_optimizers() for p in optimizer_parameters(o)}
        shapes = [p.shape for p in parameters]
        roots = [r for r in self.loop.names.roots() if any(id(p) in mine for p in r.parameters())]
        for other in self.loop.outermost:
            theirs = [p for p in other.parameters() if p.requires_grad]
            if any(id(p) in held for p in theirs) or [p.shape for p in theirs] != shapes:
                continue
            if any(type(root) is type(other) for root in roots):
                for entry in missing:
                    entry.why, entry.twin = "copy", type(other).__name__

    def of_a_copy(self) -> bool:
        """Whether some optimizer's model did not run, but a copy of it."""
        reasons = {entry.why for group in self.missing.values() for entry in group}
        return bool(reasons & {"copy", "unknown"})

    def _has_running_sibling(self, module: nn.Module) -> bool:
        """Experts, dropped layers: a module of the same kind under the same list did run
        (``experts.0``, or ``expert_0`` in a ModuleDict)."""
        for root in self.loop.names.roots():
            for parent in root.modules():
                if not isinstance(parent, (nn.ModuleList, nn.ModuleDict)):
                    continue
                children = list(parent.named_children())
                mine = [
                    (_stem(name), type(child))
                    for name, child in children
                    if any(inner is module for inner in child.modules())
                ]
                if mine and any(
                    (_stem(name), type(child)) == mine[0]
                    and any(self.loop.ran(inner) for inner in child.modules())
                    for name, child in children
                ):
                    return True
        return False

    # ---- what a step changes

    def update_begins(self, update: Update) -> None:
        self.unstepped = []
        parameters = optimizer_parameters(update.optimizer)
        self._frozen = {id(p): version(p) for p in parameters if not p.requires_grad}
        if self._values:
            for parameter in spread(parameters, _MOST_CUDA):
                if id(parameter) not in self._samples:
                    self._begin(parameter)

    def _begin(self, parameter: Tensor) -> None:
        begin = piece(parameter)
        if begin is not None:
            self._samples[id(parameter)] = Sample(
                weakref.ref(parameter), begin, parameter.dtype in _LOW_PRECISION
            )

    def gradients_ready(self, update: Update) -> None:
        """Once the gradients are read here they are in the unit that the optimizer uses."""
        if not self._values or not self._due(update):
            return
        for parameter in spread(optimizer_parameters(update.optimizer), _MOST_CUDA):
            sample = self._sample(parameter)
            if sample is None or parameter.grad is None or parameter.grad.is_sparse:
                continue
            some = piece(parameter.grad)
            if some is not None and some.shape == sample.begin.shape:
                nonzero = some != 0
                self._note_tiny(parameter, some[nonzero])
                old = sample.gradient
                sample.gradient = nonzero if old is None else old | nonzero

    def _note_tiny(self, parameter: Tensor, values: Tensor) -> None:
        """Gradients that went through float16 without a loss scale."""
        loop = self.loop
        half = loop.autocast_dtype is torch.float16 or parameter.dtype is torch.float16
        if half and not loop.scaled and parameter.dim() > 1 and values.numel():
            tiny = int((values.abs() < _SMALLEST_NORMAL).sum())
            self.tiny.append((loop.names.name(parameter), tiny, values.numel()))

    def _sample(self, parameter: Tensor) -> Sample | None:
        sample = self._samples.get(id(parameter))
        return sample if sample is not None and sample.parameter() is parameter else None

    def _due(self, update: Update) -> bool:
        """At each power of two."""
        return power_of_two(self.loop.record(update.optimizer).updates + 1)

    def update_ends(self, update: Update) -> None:
        optimizer = update.optimizer
        record = self.loop.record(optimizer)
        if not update.failed and self._worth_a_census(id(optimizer)):
            self._census(
                id(optimizer), optimizer_parameters(optimizer), self.loop.describe(optimizer)
            )
        self._note_schedulers()
        if not update.applied:
            return
        self._frozen_moved(optimizer, update.line)
        if not self._values:
            return
        rates = _learning_rates(optimizer)
        adaptive = _adaptive(optimizer)
        compare = record.updates > 1 and power_of_two(record.updates)
        for parameter in spread(optimizer_parameters(optimizer), _MOST_CUDA):
            sample = self._sample(parameter)
            if sample is None:
                continue
            sample.updates += 1
            sample.learning |= rates.get(id(parameter), 0.0) > 0
            sample.adaptive = adaptive
            if compare:
                self._compare(parameter, sample)
        if compare:
            self._note_stuck()
            self._note_still(optimizer, record.updates)
            self._note_dead(optimizer, record.updates)

    def _compare(self, parameter: Tensor, sample: Sample) -> None:
        now = piece(parameter)
        if now is None or now.shape != sample.begin.shape:
            return
        differs = now != sample.begin
        wanted = sample.gradient
        if wanted is not None and wanted.any():
            sample.changed = float(differs[wanted].float().mean())
        change = (now.float() - sample.begin.float()).abs().max()
        size = sample.begin.float().abs().max()
        sample.moved = float(change / (size + 1e-12)) if math.isfinite(float(change)) else math.inf
        self.moved = max(self.moved, sample.moved)

    def _note_stuck(self) -> None:
        self.stuck = [
            (self.loop.names.name(parameter), sample)
            for sample in self._samples.values()
            if (parameter := sample.parameter()) is not None and _is_stuck(sample)
        ]

    def _note_still(self, optimizer: Any, updates: int) -> None:
        """(optimizer, updates, whether any rate was above 0, whether all gradients were 0)"""
        name = self.loop.describe(optimizer)
        self.still = [entry for entry in self.still if entry[0] != name]
        samples = [s for p in optimizer_parameters(optimizer) if (s := self._sample(p)) is not None]
        seen = [s.gradient for s in samples if s.gradient is not None]
        if seen:
            learning = any(sample.learning for sample in samples)
            zero = not any(bool(gradient.any()) for gradient in seen)
            self.zero_start = any(map(self._began_at_zero, samples))
            self.still.append((name, updates, learning, zero))

    def _note_dead(self, optimizer: Any, updates: int) -> None:
        """Weights that every update found with a gradient of exactly 0, while others had one."""
        samples = {
            id(p): sample
            for p in optimizer_parameters(optimizer)
            if (sample := self._sample(p)) is not None and sample.gradient is not None
        }
        dead = {key for key, s in samples.items() if s.learning and not _any(s.gradient)}
        # What starts at 0 (LoRA's B, gates) blocks what lies before it until it has moved: one
        # update, two where such layers are nested.
        if dead and updates < 4 and any(map(self._began_at_zero, samples.values())):
            return
        alive = len(dead) < len(samples)
        candidates = optimizer_parameters(optimizer) if dead and alive else []
        found = [p for p in candidates if id(p) in dead and self._is_dead(p)]
        names = self.loop.names.names(found) if any(p.dim() > 1 for p in found) else []
        names = [name for name in names if "expert" not in name]  # not every token meets each
        self.dead[self.loop.describe(optimizer)] = names, updates

    def _began_at_zero(self, sample: Sample) -> bool:
        parameter = sample.parameter()
        if parameter is None or sample.begin.any():
            return False
        return not self.loop.names.name(parameter).endswith("bias")

    def _is_dead(self, parameter: Tensor) -> bool:
        """All of its gradient is 0 and nothing set it so on purpose: rows of an embedding that the
        batch lacks have none, a hook may freeze a part."""
        if parameter._backward_hooks or parameter.grad is None or parameter.grad.is_sparse:
            return False
        if any(isinstance(o, (nn.Embedding, nn.EmbeddingBag)) for o in self.loop.owners(parameter)):
            return False
        return not bool(parameter.grad.detach().to("cpu").any())  # no device memory is used

    def _note_unstepped(self, call: Backward) -> None:
        records = self.loop.optimizers.values()
        if any(record.attempts for record in records):
            self.unstepped = []
            return
        self.unstepped = [
            (self.loop.describe(optimizer), self.loop.backwards, call.line)
            for record in records
            if (optimizer := record.optimizer()) is not None
            and self.loop.backwards >= 3
            and any(p.grad is not None for p in optimizer_parameters(optimizer))
        ]

    def _frozen_moved(self, optimizer: Any, line: str) -> None:
        moved = [
            p
            for p in optimizer_parameters(optimizer)
            if id(p) in self._frozen and version(p) != self._frozen[id(p)]
        ]
        if moved and "frozen" not in self.found:
            names = self.loop.names.names(moved)
            self.found["frozen"] = Finding(
                "untrained",
                "fail",
                f"{len(moved)} frozen parameters (requires_grad=False) were changed by the "
                f"optimizer step at {line}: {listed(names)}",
                ("they still hold a gradient from before they were frozen",),
                "give the optimizer only parameters with requires_grad, and set .grad = None when "
                "freezing",
                {"parameters": names},
            )

    def _note_schedulers(self) -> None:
        self.schedulers = [
            (
                type(optimizer).__name__,
                max(record.scheduler_steps.values()),
                record.updates,
                record.attempts,
            )
            for record in self.loop.optimizers.values()
            if record.scheduler_steps and (optimizer := record.optimizer()) is not None
        ]

    def scheduler_stepped(self, scheduler: Any) -> None:
        self._note_schedulers()


def _is_stuck(sample: Sample) -> bool:
    """Enough updates to judge: two where the rate alone decides the size of an update, eight where
    a small gradient may be the reason."""
    enough = sample.updates >= (2 if sample.adaptive else 8)
    if not enough or not sample.learning or sample.gradient is None:
        return False
    if not sample.gradient.any():
        return False
    return sample.changed < 0.01 if sample.low_precision else sample.changed == 0.0


def _any(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


def _stem(name: str) -> str:
    return name.rstrip("0123456789")


def _outputs(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _outputs(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _outputs(inner)


def _learning_rates(optimizer: Any) -> dict[int, float]:
    return {
        id(p): float(group.get("lr", 1.0))
        for group in getattr(optimizer, "param_groups", ())
        for p in group["params"]
    }


def _adaptive(optimizer: Any) -> bool:
    """Adam and its kin keep a second moment and divide by its root."""
    state: Any = next(iter(getattr(optimizer, "state", {}).values()), {})
    return isinstance(state, dict) and any("sq" in str(key) or "inf" in str(key) for key in state)


def power_of_two(number: int) -> bool:
    return number & (number - 1) == 0

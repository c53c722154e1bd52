"""Does the step train what it should? Gradients that are missing, updates that change nothing."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pytest_vram.findings import Finding, Severity
from pytest_vram.numerics.loop import Loop, version
from pytest_vram.numerics.loss_graph import LossGraph, read_graph
from pytest_vram.numerics.names import dtype_name, listed, optimizer_parameters
from pytest_vram.numerics.nonfinite import LossValue
from pytest_vram.numerics.probes import Backward, Listener, Update

_LOW_PRECISION = (torch.float16, torch.bfloat16)
#: Elements looked at per parameter: all of a small one, a stretch from the middle of a larger one.
_SAMPLE_CPU, _SAMPLE_CUDA, _MOST_CUDA = 16_384, 256, 64


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
class _Sample:
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
        self._loop, self._values, self._losses = loop, values, losses
        self.missing: dict[int, list[Missing]] = {}
        self.trained: dict[str, int] = {}  # name -> elements, of parameters with a gradient
        self.total = 0  # trainable parameters that were asked
        self.found: dict[str, Finding] = {}
        self.stuck: list[tuple[str, _Sample]] = []
        self.moved = 0.0
        self._samples: dict[int, _Sample] = {}
        self._frozen: dict[int, int] = {}
        self._without_grad: dict[int, bool] = {}
        self.schedulers: list[tuple[str, int, int, int]] = []
        self.still: list[tuple[str, int, bool, bool]] = []
        self.unstepped: list[tuple[str, int, str]] = []
        self.dead: dict[str, tuple[list[str], int]] = {}  # optimizer -> parameters, updates
        self._zero_start = False  # a weight that began at 0, such as LoRA's B
        self._backward_line = ""
        self._graph = LossGraph()  # of the last backward that left a parameter without gradient
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
        if not self._loop.optimizers and not call.inside_step and self._worth_a_census(0):
            parameters = [p for p in self._loop.names.parameters() if self._loop.used(p)]
            self._census(0, parameters, "")

    def _look_at_graph(self, call: Backward) -> None:
        """While it lives: what is missing is judged after the step."""
        self._backward_line = call.line
        if self._loop.backwards > 4:
            return
        parameters = self._loop.parameters()
        known = {id(p) for p in parameters}
        without = any(
            p.requires_grad and p.grad is None and not self._loop.state(p).ever for p in parameters
        )
        if without or self._loop.backwards == 1:
            graph = read_graph(call.roots, known)
            self.flat += [name for name in graph.flat if name not in self.flat]
            if without:
                self._graph = graph

    def _worth_a_census(self, key: int) -> bool:
        """Again only while somebody is missing: who has had a gradient keeps it."""
        return key not in self.missing or bool(self.missing[key])

    def _census(self, key: int, parameters: Sequence[Tensor], optimizer: str) -> None:
        wanted = [p for p in parameters if p.requires_grad]
        absent = [p for p in wanted if p.grad is None and not self._loop.state(p).ever]
        self.missing[key] = [self._missing(p, optimizer) for p in absent]
        if wanted and len(absent) == len(wanted):
            self._of_a_copy(self.missing[key], wanted)
        self.total = max(self.total, len(wanted))
        for parameter in parameters:
            if parameter.grad is not None or self._loop.state(parameter).ever:
                self.trained.setdefault(self._loop.names.name(parameter), parameter.numel())

    def _missing(self, parameter: Tensor, optimizer: str) -> Missing:
        name = self._loop.names.name(parameter)
        owners = self._loop.owners(parameter)
        ran = [owner for owner in owners if self._loop.ran(owner)]
        if not owners:
            why = "unknown"
        elif any(self._without_grad.get(id(owner)) for owner in ran):
            why = "cut"
        elif ran:
            why = "dropped"
        elif any(self._loop.ran_only_without_graph(owner) for owner in owners):
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
        held = {id(p) for o in self._loop.live_optimizers() for p in optimizer_parameters(o)}
        shapes = [p.shape for p in parameters]
        roots = [r for r in self._loop.names.roots() if any(id(p) in mine for p in r.parameters())]
        for other in self._loop.outermost:
            theirs = [p for p in other.parameters() if p.requires_grad]
            if any(id(p) in held for p in theirs) or [p.shape for p in theirs] != shapes:
                continue
            if any(type(root) is type(other) for root in roots):
                for entry in missing:
                    entry.why, entry.twin = "copy", type(other).__name__

    def of_a_copy(self) -> bool:
        """Whether some optimizer's model did not run, but one like it."""
        return any(entry.why == "copy" for group in self.missing.values() for entry in group)

    def _has_running_sibling(self, module: nn.Module) -> bool:
        """Experts, dropped layers: a module of the same kind under the same list did run
        (``experts.0``, or ``expert_0`` in a ModuleDict)."""
        for root in self._loop.names.roots():
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
                    and any(self._loop.ran(inner) for inner in child.modules())
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
            for parameter in _spread(parameters):
                if id(parameter) not in self._samples:
                    self._begin(parameter)

    def _begin(self, parameter: Tensor) -> None:
        piece = _piece(parameter)
        if piece is not None:
            self._samples[id(parameter)] = _Sample(
                weakref.ref(parameter), piece, parameter.dtype in _LOW_PRECISION
            )

    def gradients_ready(self, update: Update) -> None:
        """Once the gradients are read here they are in the unit that the optimizer uses."""
        if not self._values or not self._due(update):
            return
        for parameter in _spread(optimizer_parameters(update.optimizer)):
            sample = self._sample(parameter)
            if sample is None or parameter.grad is None or parameter.grad.is_sparse:
                continue
            piece = _piece(parameter.grad)
            if piece is not None and piece.shape == sample.begin.shape:
                nonzero = piece != 0
                old = sample.gradient
                sample.gradient = nonzero if old is None else old | nonzero

    def _sample(self, parameter: Tensor) -> _Sample | None:
        sample = self._samples.get(id(parameter))
        return sample if sample is not None and sample.parameter() is parameter else None

    def _due(self, update: Update) -> bool:
        """At each power of two."""
        return _power_of_two(self._loop.record(update.optimizer).updates + 1)

    def update_ends(self, update: Update) -> None:
        optimizer = update.optimizer
        record = self._loop.record(optimizer)
        if not update.failed and self._worth_a_census(id(optimizer)):
            self._census(
                id(optimizer), optimizer_parameters(optimizer), self._loop.describe(optimizer)
            )
        self._note_schedulers()
        if not update.applied:
            return
        self._frozen_moved(optimizer, update.line)
        if not self._values:
            return
        rates = _learning_rates(optimizer)
        adaptive = _adaptive(optimizer)
        compare = record.updates > 1 and _power_of_two(record.updates)
        for parameter in _spread(optimizer_parameters(optimizer)):
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

    def _compare(self, parameter: Tensor, sample: _Sample) -> None:
        now = _piece(parameter)
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
            (self._loop.names.name(parameter), sample)
            for sample in self._samples.values()
            if (parameter := sample.parameter()) is not None and _is_stuck(sample)
        ]

    def _note_still(self, optimizer: Any, updates: int) -> None:
        """(optimizer, updates, whether any rate was above 0, whether all gradients were 0)"""
        name = self._loop.describe(optimizer)
        self.still = [entry for entry in self.still if entry[0] != name]
        samples = [s for p in optimizer_parameters(optimizer) if (s := self._sample(p)) is not None]
        seen = [s.gradient for s in samples if s.gradient is not None]
        if seen:
            learning = any(sample.learning for sample in samples)
            zero = not any(bool(gradient.any()) for gradient in seen)
            self._zero_start = any(map(self._began_at_zero, samples))
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
        names = self._loop.names.names(found) if any(p.dim() > 1 for p in found) else []
        names = [name for name in names if "expert" not in name]  # not every token meets each
        self.dead[self._loop.describe(optimizer)] = names, updates

    def _began_at_zero(self, sample: _Sample) -> bool:
        parameter = sample.parameter()
        if parameter is None or sample.begin.any():
            return False
        return not self._loop.names.name(parameter).endswith("bias")

    def _is_dead(self, parameter: Tensor) -> bool:
        """All of its gradient is 0 and nothing set it so on purpose: rows of an embedding that the
        batch lacks have none, a hook may freeze a part."""
        if parameter._backward_hooks or parameter.grad is None or parameter.grad.is_sparse:
            return False
        if any(
            isinstance(o, (nn.Embedding, nn.EmbeddingBag)) for o in self._loop.owners(parameter)
        ):
            return False
        return not bool(parameter.grad.detach().to("cpu").any())  # no device memory is used

    def _note_unstepped(self, call: Backward) -> None:
        records = self._loop.optimizers.values()
        if any(record.attempts for record in records):
            self.unstepped = []
            return
        self.unstepped = [
            (self._loop.describe(optimizer), self._loop.backwards, call.line)
            for record in records
            if (optimizer := record.optimizer()) is not None
            and self._loop.backwards >= 3
            and any(p.grad is not None for p in optimizer_parameters(optimizer))
        ]

    def _frozen_moved(self, optimizer: Any, line: str) -> None:
        moved = [
            p
            for p in optimizer_parameters(optimizer)
            if id(p) in self._frozen and version(p) != self._frozen[id(p)]
        ]
        if moved and "frozen" not in self.found:
            names = self._loop.names.names(moved)
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
            for record in self._loop.optimizers.values()
            if record.scheduler_steps and (optimizer := record.optimizer()) is not None
        ]

    def scheduler_stepped(self, scheduler: Any) -> None:
        self._note_schedulers()

    # ---- judging

    def findings(
        self,
        trainable: Sequence[str],
        scaler_skips: int,
        explained: Collection[str] = (),
        silent: Sequence[str] = (),
    ) -> list[Finding]:
        """``explained``: names of parameters whose missing gradient another finding explains, or
        a reason (``unknown``) that another finding gives better. ``silent``: activations that gave
        nothing but zeros."""
        return [
            *self.found.values(),
            *self._untrained(trainable, explained),
            *self._outside_pattern(trainable),
            *self._rounding(),
            *self._standing_still(),
            *self._dead_layers(trainable, silent),
            *self._same_loss(),
            *self._scheduler_ahead(scaler_skips),
        ]

    def _untrained(self, trainable: Sequence[str], explained: Collection[str]) -> list[Finding]:
        seen: dict[str, Missing] = {}
        for group in self.missing.values():
            for entry in group:
                if entry.name in explained or entry.why in explained:
                    continue
                if not trainable or matches(entry.name, trainable):
                    seen.setdefault(entry.name, entry)
        result = []
        for why, severity, reason, hint in _REASONS:
            members = [entry for entry in seen.values() if entry.why == why]
            if members:
                result.append(self._census_finding(members, severity, reason, hint))
        return result

    def _census_finding(
        self, members: list[Missing], severity: Any, reason: str, hint: str
    ) -> Finding:
        names = [entry.name for entry in members]
        verb = "has" if len(members) == 1 else "have"
        owner = f" of {members[0].optimizer}" if members[0].optimizer else ""
        return Finding(
            "untrained",
            severity,
            f"{len(members)} of {self.total} trainable parameters{owner} {verb} grad None after "
            f"backward: {listed(names)}; "
            f"{reason.format(twin=members[0].twin, cause=members[0].cause)}",
            (
                f"backward at {self._backward_line}",
                *(f"{entry.name} {list(entry.shape)}" for entry in members[:8] if entry.named),
            ),
            hint,
            {"parameters": names, "elements": sum(entry.numel for entry in members)},
        )

    def _outside_pattern(self, trainable: Sequence[str]) -> list[Finding]:
        if not trainable:
            return []
        outside = {n: size for n, size in self.trained.items() if not matches(n, trainable)}
        if not outside:
            return []
        inside = sum(self.trained.values()) - sum(outside.values())
        total = sum(self.trained.values())
        factor = f" (x{total / inside:.4g})" if inside else ""
        return [
            Finding(
                "untrained",
                "fail",
                f"{len(outside)} parameters outside trainable={_shown(trainable)} received "
                f"gradients: {listed(outside)}; {total:,} elements train instead of "
                f"{inside:,}{factor}",
                tuple(f"{name}: {size:,} elements" for name, size in list(outside.items())[:8]),
                "freeze them: parameter.requires_grad_(False); with Adam this also saves 12 bytes "
                "per element (gradient and two moments)",
                {"parameters": list(outside), "elements": sum(outside.values())},
            )
        ]

    def _rounding(self) -> list[Finding]:
        if not self.stuck:
            return []
        name, sample = self.stuck[0]
        names = [stuck for stuck, _ in self.stuck]
        parameter_dtype = dtype_name(sample.begin.dtype)
        share = f"{100 * (1 - sample.changed):.4g} %"
        details = tuple(
            f"{stuck}: {100 * (1 - s.changed):.4g} % of the elements with a gradient are "
            f"bit-identical after {s.updates} updates"
            for stuck, s in self.stuck[:8]
        )
        return [
            Finding(
                "untrained",
                "fail",
                f"after {sample.updates} updates {share} of the elements of {name} are "
                f"bit-identical although their gradients are not zero: {parameter_dtype} updates "
                "round to nothing"
                + (f" ({len(names)} parameters: {listed(names)})" if len(names) > 1 else ""),
                details,
                "keep fp32 parameters and use autocast, or fp32 master weights"
                if sample.low_precision
                else "the update is below the parameter's resolution: check the learning rate",
                {"parameters": names},
            )
        ]

    def _standing_still(self) -> list[Finding]:
        """No step changed anything: a rate of 0, gradients of 0, or no step at all."""
        result = []
        for name, updates, learning, zero in self.still:
            if learning and zero and self._all_losses_zero():
                result.append(self._zero_loss(name, updates))
            if learning and not (zero and any(note.value for note in self._losses)):
                continue
            why = "every gradient is exactly 0" if learning else "its learning rate is 0"
            hint = (
                self._why_zero()
                if learning
                else "check the schedule: a warm-up from 0 needs more steps, a finished one none"
            )
            sentence = f"{name} changed nothing in {updates} updates: {why}"
            if learning:
                sentence += f", though the loss is not (backward at {self._losses[-1].line})"
            # A zero initialisation may sit where the gradient is 0: worth a remark.
            severity: Severity = "fail"
            if learning:
                severity = "note" if self._zero_start else "warn"
            result.append(Finding("untrained", severity, sentence, (), hint, {"updates": updates}))
        for name, backwards, line in self.unstepped:
            sentence = (
                f"{name} was never stepped, though {backwards} backward passes gave its parameters "
                f"gradients (the last at {line})"
            )
            hint = "call optimizer.step() after backward"
            result.append(Finding("untrained", "fail", sentence, (), hint))
        return result

    def _why_zero(self) -> str:
        if self._loop.autocast_dtype is torch.float16 and not self._loop.scaled:
            return "float16 gradients under 6e-8 are 0: scale the loss with a GradScaler"
        return (
            f"{_flat_words(self.flat)}the loss does not depend on the parameters' values (a factor "
            "0, a saturated loss, softmax over one element)"
        )

    def _all_losses_zero(self) -> bool:
        return len(self._losses) > 1 and not any(note.value for note in self._losses)

    def _zero_loss(self, name: str, updates: int) -> Finding:
        return Finding(
            "untrained",
            "warn",
            f"the loss is exactly 0 at all {len(self._losses)} backward passes (the last at "
            f"{self._losses[-1].line}) and so is every gradient: {updates} updates of {name} "
            "learnt nothing",
            (),
            "look for a factor 0, an empty mask or selection, an output compared with itself, a "
            "margin that every sample keeps",
        )

    def _dead_layers(self, trainable: Sequence[str], silent: Sequence[str]) -> list[Finding]:
        result = []
        for owner, (names, updates) in self.dead.items():
            names = [name for name in names if not trainable or matches(name, trainable)]
            if not names:
                continue
            verb = "is" if len(names) == 1 else "are"
            plural = "" if len(names) == 1 else "s"
            looked = [str(update) for update in range(1, updates + 1) if _power_of_two(update)]
            result.append(
                Finding(
                    "untrained",
                    "warn",
                    f"the gradient{plural} of {listed(names)} {verb} exactly 0 at updates "
                    f"{listed(looked, len(looked))} of {owner}, while others are not: nothing "
                    "trains them",
                    tuple(f"{name} gave nothing but zeros" for name in silent[:4]),
                    f"{_flat_words(self.flat)}look for a factor 0, a gate or ReLU that never opens "
                    "(its bias, the learning rate), an all-zero mask; in float16 without a scaler "
                    "for gradients under 6e-8",
                    {"parameters": names},
                )
            )
        return result

    def _same_loss(self) -> list[Finding]:
        run = repeated_loss(self._losses)
        if run is None or self.moved < 1e-4:
            return []
        return [
            Finding(
                "untrained",
                "fail",
                f"the loss is bit-identical ({run[0].value:.6g}) at {len(run)} steps in a row "
                f"(backward at {run[0].line}) although parameters moved by up to "
                f"{100 * self.moved:.3g} %",
                (f"steps {run[0].step} to {run[-1].step}",),
                "the forward does not see the updated parameters: a stale autocast cache (a region "
                "open across steps), cached casts or outputs, or an optimizer on a copy of it",
                {"loss": run[0].value, "moved": self.moved},
            )
        ]

    def _scheduler_ahead(self, skips: int) -> list[Finding]:
        result = []
        for name, steps, updates, attempts in self.schedulers:
            ahead = steps - updates
            if ahead > 0 and skips and updates + skips >= attempts:
                plural = "s" if ahead > 1 else ""
                result.append(
                    Finding(
                        "scaler",
                        "note",
                        f"scheduler advanced {ahead} step{plural} more than optimizer {name}: "
                        "skipped steps do not hold it back",
                        (),
                        "call scheduler.step() only if the scale did not fall: "
                        "scaler.get_scale() >= scale_before",
                        {"scheduler": steps, "optimizer": updates},
                    )
                )
        return result


#: (why, severity, reason, hint) in the order in which they are reported.
_REASONS: tuple[tuple[str, str, str, str], ...] = (
    (
        "cut",
        "fail",
        "their modules ran, but the output carries no graph: it was cut inside forward",
        "look for weights cast or cached under no_grad (autocast cache), .detach(), .data, or "
        "checkpointing with use_reentrant=True on inputs that need no grad",
    ),
    (
        "swallowed",
        "fail",
        "{cause} returned None for what they depend on",
        "return a gradient for each input of forward that is differentiable",
    ),
    (
        "rewrapped",
        "fail",
        "{cause} to require grad by itself (requires_grad_(), Variable, a new tensor), and nothing "
        "before it gets a gradient",
        "call backward on a loss that comes of the model's output through differentiable operators "
        "only: no .item(), .data, numpy, argmax or torch.tensor(...) in between",
    ),
    (
        "dropped",
        "fail",
        "their modules ran, but the loss does not depend on their output",
        "look for .detach(), .item(), argmax, numpy or no_grad between their output and the loss; "
        "if they are not meant to train, freeze them or declare it (trainable= in the marker)",
    ),
    (
        "no_grad",
        "fail",
        "their modules ran only under torch.no_grad()",
        "run the forward that is trained with gradients on",
    ),
    (
        "idle",
        "fail",
        "their modules did not run (unused branch)",
        "use them in forward, or freeze them (requires_grad_(False)) or leave them out of the "
        "optimizer; trainable= in the marker declares what trains",
    ),
    (
        "copy",
        "fail",
        "their modules did not run; another {twin} of the same shape ran, which no optimizer holds",
        "build the optimizer on the model that is trained: after deepcopy, wrapping or reloading",
    ),
    (
        "unknown",
        "fail",
        "no module that ran holds them: the optimizer was built on another copy of the model",
        "build the optimizer after the model was moved, wrapped or reloaded",
    ),
    (
        "sibling",
        "note",
        "modules beside them ran instead (experts, dropped layers)",
        "",
    ),
)


def repeated_loss(losses: Sequence[LossValue]) -> list[LossValue] | None:
    """The losses of one line, if they are the same to the bit across at least two updates."""
    for line in dict.fromkeys(note.line for note in losses):
        mine = [n for n in losses if n.line == line and n.dtype in ("float32", "float64")]
        across = [a for a, b in pairwise(mine) if b.updates > a.updates]
        if len(across) < 2 or mine[0].value == 0.0 or not math.isfinite(mine[0].value):
            continue
        if len({note.value for note in mine}) == 1:
            return mine
    return None


def _is_stuck(sample: _Sample) -> bool:
    """Enough updates to judge: two where the rate alone decides the size of an update, eight where
    a small gradient may be the reason."""
    enough = sample.updates >= (2 if sample.adaptive else 8)
    if not enough or not sample.learning or sample.gradient is None:
        return False
    if not sample.gradient.any():
        return False
    return sample.changed < 0.01 if sample.low_precision else sample.changed == 0.0


def _flat_words(flat: Sequence[str]) -> str:
    if not flat:
        return ""
    return (
        f"the derivative of {listed(flat)} is 0 everywhere: pass the gradient around it, "
        f"x + (x.{flat[0]}() - x).detach(); or "
    )


def _any(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


def _stem(name: str) -> str:
    return name.rstrip("0123456789")


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _shown(patterns: Sequence[str]) -> str:
    return repr(patterns[0]) if len(patterns) == 1 else repr(list(patterns))


def _outputs(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _outputs(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _outputs(inner)


def _spread(parameters: list[Tensor]) -> list[Tensor]:
    """On a GPU each sample costs a copy: at most 64 parameters, spread over the model."""
    if not parameters or parameters[0].device.type != "cuda" or len(parameters) <= _MOST_CUDA:
        return parameters
    stride = len(parameters) / _MOST_CUDA
    return [parameters[int(i * stride)] for i in range(_MOST_CUDA)]


def _piece(tensor: Tensor) -> Tensor | None:
    """Some elements on the CPU. From a GPU a contiguous stretch, which needs no device memory."""
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_contiguous():
        return None
    if tensor.device.type == "meta" or tensor.layout is not torch.strided or not tensor.numel():
        return None
    if not tensor.dtype.is_floating_point:
        return None
    flat = tensor.detach().view(-1)
    most = _SAMPLE_CUDA if tensor.device.type == "cuda" else _SAMPLE_CPU
    start = max(0, (flat.numel() - most) // 2)
    piece = flat[start : start + most]
    return piece.to("cpu") if tensor.device.type == "cuda" else piece.clone()


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

"""Does the step train what it should? What :class:`TrainingWatch` saw, judged and worded."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch

from pytest_vram.findings import Finding, Severity
from pytest_vram.numerics.names import dtype_name, listed
from pytest_vram.numerics.nonfinite import LossValue
from pytest_vram.numerics.training_watch import Missing, TrainingWatch, power_of_two


class TrainingChecks:
    """The findings of one pass, after its last step."""

    def __init__(self, watch: TrainingWatch) -> None:
        self._watch = watch

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
            *self._watch.found.values(),
            *self._untrained(trainable, explained),
            *self._outside_pattern(trainable),
            *self._rounding(),
            *self._standing_still(),
            *self._dead_layers(trainable, silent),
            *self._same_loss(),
            *self._underflow(),
            *self._scheduler_ahead(scaler_skips),
        ]

    def _untrained(self, trainable: Sequence[str], explained: Collection[str]) -> list[Finding]:
        seen: dict[str, Missing] = {}
        for group in self._watch.missing.values():
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
            f"{len(members)} of {self._watch.total} trainable parameters{owner} {verb} grad None "
            f"after backward: {listed(names)}; "
            f"{reason.format(twin=members[0].twin, cause=members[0].cause)}",
            (
                f"backward at {self._watch.backward_line}",
                *(f"{entry.name} {list(entry.shape)}" for entry in members[:8] if entry.named),
            ),
            hint,
            {"parameters": names, "elements": sum(entry.numel for entry in members)},
        )

    def _outside_pattern(self, trainable: Sequence[str]) -> list[Finding]:
        if not trainable:
            return []
        outside = {n: size for n, size in self._watch.trained.items() if not matches(n, trainable)}
        if not outside:
            return []
        inside = sum(self._watch.trained.values()) - sum(outside.values())
        total = sum(self._watch.trained.values())
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
        if not self._watch.stuck:
            return []
        name, sample = self._watch.stuck[0]
        names = [stuck for stuck, _ in self._watch.stuck]
        parameter_dtype = dtype_name(sample.begin.dtype)
        share = f"{100 * (1 - sample.changed):.4g} %"
        details = tuple(
            f"{stuck}: {100 * (1 - s.changed):.4g} % of the elements with a gradient are "
            f"bit-identical after {s.updates} updates"
            for stuck, s in self._watch.stuck[:8]
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
        for name, updates, learning, zero in self._watch.still:
            if learning and zero and self._all_losses_zero():
                result.append(self._zero_loss(name, updates))
            if learning and not (zero and any(note.value for note in self._watch.losses)):
                continue
            why = "every gradient is exactly 0" if learning else "its learning rate is 0"
            hint = (
                self._why_zero()
                if learning
                else "check the schedule: a warm-up from 0 needs more steps, a finished one none"
            )
            sentence = f"{name} changed nothing in {updates} updates: {why}"
            if learning:
                sentence += f", though the loss is not (backward at {self._watch.losses[-1].line})"
            # A zero initialisation may sit where the gradient is 0: worth a remark.
            severity: Severity = "fail"
            if learning:
                severity = "note" if self._watch.zero_start else "warn"
            result.append(Finding("untrained", severity, sentence, (), hint, {"updates": updates}))
        for name, backwards, line in self._watch.unstepped:
            sentence = (
                f"{name} was never stepped, though {backwards} backward passes gave its parameters "
                f"gradients (the last at {line})"
            )
            hint = "call optimizer.step() after backward"
            result.append(Finding("untrained", "fail", sentence, (), hint))
        return result

    def _why_zero(self) -> str:
        if self._watch.loop.autocast_dtype is torch.float16 and not self._watch.loop.scaled:
            return "float16 gradients under 6e-8 are 0: scale the loss with a GradScaler"
        return (
            f"{_flat_words(self._watch.flat)}the loss does not depend on the parameters' values "
            "(a factor 0, a saturated loss, softmax over one element)"
        )

    def _all_losses_zero(self) -> bool:
        return len(self._watch.losses) > 1 and not any(note.value for note in self._watch.losses)

    def _zero_loss(self, name: str, updates: int) -> Finding:
        return Finding(
            "untrained",
            "warn",
            f"the loss is exactly 0 at all {len(self._watch.losses)} backward passes (the last at "
            f"{self._watch.losses[-1].line}) and so is every gradient: {updates} updates of {name} "
            "learnt nothing",
            (),
            "look for a factor 0, an empty mask or selection, an output compared with itself, a "
            "margin that every sample keeps",
        )

    def _dead_layers(self, trainable: Sequence[str], silent: Sequence[str]) -> list[Finding]:
        result = []
        for owner, (names, updates) in self._watch.dead.items():
            names = [name for name in names if not trainable or matches(name, trainable)]
            if not names:
                continue
            verb = "is" if len(names) == 1 else "are"
            plural = "" if len(names) == 1 else "s"
            looked = [str(update) for update in range(1, updates + 1) if power_of_two(update)]
            result.append(
                Finding(
                    "untrained",
                    "warn",
                    f"the gradient{plural} of {listed(names)} {verb} exactly 0 at updates "
                    f"{listed(looked, len(looked))} of {owner}, while others are not: nothing "
                    "trains them",
                    tuple(f"{name} gave nothing but zeros" for name in silent[:4]),
                    f"{_flat_words(self._watch.flat)}look for a factor 0, a gate or ReLU that "
                    "never opens (its bias, the learning rate), an all-zero mask; in float16 "
                    "without a scaler for gradients under 6e-8",
                    {"parameters": names},
                )
            )
        return result

    def _same_loss(self) -> list[Finding]:
        run = repeated_loss(self._watch.losses)
        if run is None or self._watch.moved < 1e-4:
            return []
        return [
            Finding(
                "untrained",
                "fail",
                f"the loss is bit-identical ({run[0].value:.6g}) at {len(run)} steps in a row "
                f"(backward at {run[0].line}) although parameters moved by up to "
                f"{100 * self._watch.moved:.3g} %",
                (f"steps {run[0].step} to {run[-1].step}",),
                "the forward does not see the updated parameters: a stale autocast cache (a region "
                "open across steps), cached casts or outputs, or an optimizer on a copy of it",
                {"loss": run[0].value, "moved": self._watch.moved},
            )
        ]

    def _underflow(self) -> list[Finding]:
        tiny = sum(count for _, count, _ in self._watch.tiny)
        total = sum(size for *_, size in self._watch.tiny)
        if tiny < 0.9 * max(total, 1):  # a part of them is small in any healthy model
            return []
        worst = dict.fromkeys(n for n, count, size in self._watch.tiny if count >= 0.9 * size)
        return [
            Finding(
                "scaler",
                "warn",
                f"gradients fall below float16's normal numbers: {100 * tiny / total:.0f} % of the "
                f"elements that are not 0 lie under 6.1e-05 ({listed(worst)}), where digits are "
                f"lost, and under 6e-08 all; the loss is not scaled (backward at "
                f"{self._watch.backward_line})",
                (),
                "scale the loss with torch.amp.GradScaler, or use bfloat16, which needs none",
                {"parameters": list(worst), "share": tiny / total},
            )
        ]

    def _scheduler_ahead(self, skips: int) -> list[Finding]:
        result = []
        for name, steps, updates, attempts in self._watch.schedulers:
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


def _flat_words(flat: Sequence[str]) -> str:
    if not flat:
        return ""
    return (
        f"the derivative of {listed(flat)} is 0 everywhere: pass the gradient around it, "
        f"x + (x.{flat[0]}() - x).detach(); or "
    )


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _shown(patterns: Sequence[str]) -> str:
    return repr(patterns[0]) if len(patterns) == 1 else repr(list(patterns))

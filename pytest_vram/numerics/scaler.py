"""The loss scale over the run: what the scaler did at each step, and whether that is healthy."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pytest_vram.findings import Finding, Severity
from pytest_vram.numerics.events import Backward, Clip, Listener, ScalerCall, Update
from pytest_vram.numerics.loop import Loop
from pytest_vram.numerics.probes import Probes

#: Below this a scale that still meets inf is not searching any more: the gradients explode.
LOWEST_HEALTHY_SCALE = 16.0
#: fp16 ends at 65504; no loss can be scaled by more than fp32 holds (3.4e38).
HIGHEST_USEFUL_SCALE = 2.0**96


@dataclass(frozen=True, slots=True)
class Call:
    """One call around the scaler, in order: ``scale``, ``backward``, ``unscale_``, ``clip``,
    ``step``, ``update``."""

    kind: str
    line: str
    optimizer: str = ""


@dataclass(frozen=True, slots=True)
class ScalerStep:
    """From one ``update()`` to the next. ``skipped``: the optimizers that were not stepped."""

    step: int
    scaler: int
    scale_before: float
    scale_after: float
    found_inf: bool
    skipped: tuple[str, ...]
    growth_tracker: int
    calls: tuple[Call, ...]
    set_by_hand: bool = False

    @property
    def grew(self) -> bool:
        return self.scale_after > self.scale_before and not self.set_by_hand


@dataclass(frozen=True, slots=True)
class ScalerHistory:
    """What all scalers of a pass did, in order."""

    steps: tuple[ScalerStep, ...] = ()
    used: bool = False

    @property
    def skipped(self) -> int:
        """Steps at which at least one optimizer was not stepped because of inf or NaN."""
        return sum(step.found_inf for step in self.steps)

    @property
    def scales(self) -> tuple[float, ...]:
        """The scale after each step."""
        return tuple(step.scale_after for step in self.steps)

    def of(self, scaler: int) -> tuple[ScalerStep, ...]:
        return tuple(step for step in self.steps if step.scaler == scaler)

    @property
    def scalers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(step.scaler for step in self.steps))


@dataclass(slots=True)
class _Open:
    """A scaler's step that update() has not closed yet."""

    number: int
    calls: list[Call] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    attempts: int = 0


class ScalerWatch(Listener):
    """Records a :class:`ScalerHistory`; ``probes`` reads the scales."""

    def __init__(self, loop: Loop, probes: Probes) -> None:
        self._loop, self._probes = loop, probes
        self._open: weakref.WeakKeyDictionary[Any, _Open] = weakref.WeakKeyDictionary()
        self._known = 0
        self._steps: list[ScalerStep] = []
        self.initial: dict[int, float] = {}

    @property
    def history(self) -> ScalerHistory:
        return ScalerHistory(tuple(self._steps), bool(self._known))

    def _current(self, scaler: Any) -> _Open:
        if scaler not in self._open:
            self._open[scaler] = _Open(self._known)
            self._known += 1
        return self._open[scaler]

    def backward_begins(self, call: Backward) -> None:
        if call.scaler is not None:
            self._current(call.scaler).calls.append(Call("backward", call.line))

    def clipped(self, clip: Clip) -> None:
        for current in self._open.values():
            current.calls.append(Call("clip", clip.line))

    def update_ends(self, update: Update) -> None:
        if update.scaler is None:
            return
        current = self._current(update.scaler)
        current.attempts += 1
        if self._probes.found_inf(update.scaler, update.optimizer):
            current.skipped.append(type(update.optimizer).__name__)

    def scaler_called(self, call: ScalerCall) -> None:
        current = self._current(call.scaler)
        self.initial.setdefault(current.number, call.scale_before)
        optimizer = type(call.optimizer).__name__ if call.optimizer is not None else ""
        current.calls.append(Call(call.kind, call.line, optimizer))
        if call.kind == "update" and call.error is None:
            self._close(call, current)

    def _close(self, call: ScalerCall, current: _Open) -> None:
        tracker = -1
        if self._probes.values:
            tracker = int(call.scaler._get_growth_tracker())
        self._steps.append(
            ScalerStep(
                step=len([s for s in self._steps if s.scaler == current.number]) + 1,
                scaler=current.number,
                scale_before=call.scale_before,
                scale_after=self._probes.scale_of(call.scaler),
                found_inf=bool(current.skipped),
                skipped=tuple(current.skipped),
                growth_tracker=tracker,
                calls=tuple(current.calls),
                set_by_hand=call.explicit,
            )
        )
        current.calls.clear()
        current.skipped.clear()


# ---- judging


def judge(
    history: ScalerHistory,
    warmup: int,
    allowed: int | None,
    finite_at_one: bool | None,
    first_bad: str = "",
    remedy: str = "",
) -> list[Finding]:
    """Findings about the scale. ``allowed``: the marker's ``skipped_steps``; ``finite_at_one``:
    what the diagnostic replay at scale 1 found (None: there was none); ``first_bad``, ``remedy``:
    the operator it named, and what to do about that."""
    findings: list[Finding] = []
    for scaler in history.scalers:
        steps = history.of(scaler)
        label = f" of scaler {scaler + 1}" if len(history.scalers) > 1 else ""
        findings += _judge_one(steps, label, warmup, allowed, finite_at_one, first_bad, remedy)
    return findings


def _judge_one(
    steps: Sequence[ScalerStep],
    label: str,
    warmup: int,
    allowed: int | None,
    finite_at_one: bool | None,
    first_bad: str,
    remedy: str,
) -> list[Finding]:
    growth = _endless_growth(steps, label)
    skipped = [step for step in steps if step.found_inf]
    if not skipped:
        return growth
    if _collapsing(steps) or finite_at_one is False:
        return [*growth, _collapse(steps, label, finite_at_one, first_bad, remedy)]
    normal = normal_skips(steps, warmup)
    later = [step for step in skipped if step.step not in normal]
    if len(later) > (allowed or 0):
        return [*growth, _later_skips(steps, later, label, normal, allowed, first_bad)]
    if len(skipped) == len(steps):
        return [*growth, _search_unfinished(steps, label, finite_at_one)]
    return [*growth, _normal(steps, skipped, label)]


def normal_skips(steps: Sequence[ScalerStep], warmup: int) -> set[int]:
    """Steps at which an overflow is part of the search for a scale: the warm-up, the unbroken run
    of skips at the start, and the skip that follows a growth."""
    normal = set(range(1, warmup + 1))
    for step in steps:
        if not step.found_inf:
            break
        normal.add(step.step)
    for previous, step in pairwise(steps):
        if previous.grew and step.found_inf:
            normal.add(step.step)
    return normal


def _collapsing(steps: Sequence[ScalerStep]) -> bool:
    """The scale is below 16 and still meets inf, or fell at each of the last steps to no avail."""
    low = any(step.found_inf and step.scale_before < LOWEST_HEALTHY_SCALE for step in steps)
    tail = 0
    for step in reversed(steps):
        if not step.found_inf:
            break
        tail += 1
    return low or (tail >= 3 and tail < len(steps))


def _path(steps: Sequence[ScalerStep]) -> str:
    return f"scale {steps[0].scale_before:g} -> {steps[-1].scale_after:g}"


def _history_lines(steps: Sequence[ScalerStep]) -> tuple[str, ...]:
    lines = []
    for step in steps[:8]:
        note = "skipped, inf or NaN in the gradients" if step.found_inf else "stepped"
        lines.append(f"step {step.step}: scale {step.scale_before:g}, {note}")
    if len(steps) > 8:
        lines.append(
            f"... {len(steps) - 8} more steps, the last at scale {steps[-1].scale_before:g}"
        )
    return tuple(lines)


def _data(steps: Sequence[ScalerStep]) -> dict[str, Any]:
    return {
        "skipped": sum(step.found_inf for step in steps),
        "steps": len(steps),
        "scales": [steps[0].scale_before, *(step.scale_after for step in steps)],
    }


def _collapse(
    steps: Sequence[ScalerStep],
    label: str,
    finite_at_one: bool | None,
    first_bad: str,
    remedy: str,
) -> Finding:
    skipped = sum(step.found_inf for step in steps)
    falling = " and falling" if steps[-1].found_inf else ""
    sentence = f"{skipped} of {len(steps)} steps were skipped, {_path(steps)}{falling}{label}"
    if finite_at_one is False:
        sentence += "; gradients are not finite even at scale 1, so the scale is not the cause"
    elif finite_at_one is True:
        sentence += "; gradients are finite at scale 1: they overflow only when scaled"
    details = list(_history_lines(steps))
    if first_bad:
        details.append(first_bad)
    if finite_at_one is True:
        hint = (
            "the scaled gradients exceed fp16's 65504: compute the loss in fp32, average it "
            "instead of summing it, or use bf16"
        )
    else:
        hint = remedy or (
            "look for the operator that makes inf or NaN (sqrt, norm or log at 0, a division) and "
            "for exploding gradients; lower the learning rate before touching the scaler"
        )
    data = {**_data(steps), "finite_at_scale_1": finite_at_one}
    return Finding("scaler", "fail", sentence, tuple(details), hint, data)


def _later_skips(
    steps: Sequence[ScalerStep],
    later: Sequence[ScalerStep],
    label: str,
    normal: set[int],
    allowed: int | None,
    first_bad: str,
) -> Finding:
    which = ", ".join(str(step.step) for step in later)
    plural = "s" if len(later) > 1 else ""
    sentence = (
        f"{len(later)} step{plural} skipped after the warm-up{label} (step{plural} {which} of "
        f"{len(steps)}, allowed {allowed or 0}): inf or NaN in the gradients, {_path(steps)}"
    )
    details = list(_history_lines(steps))
    if first_bad:
        details.append(first_bad)
    raised = _raised_by_hand(steps)
    if raised:
        sentence += f"; scaler.update(new_scale) at {raised} raises it again by hand"
        hint = "leave the scale to the scaler: what overflowed once overflows again at that scale"
        return Finding("scaler", "fail", sentence, tuple(details), hint, _data(steps))
    hint = (
        "an overflow after the scale has settled comes from a batch or an operator, not from the "
        "search for a scale: look at that step's data and loss; allow it with skipped_steps="
        f"{len(later)} only if it is expected"
    )
    return Finding("scaler", "fail", sentence, tuple(details), hint, _data(steps))


def _raised_by_hand(steps: Sequence[ScalerStep]) -> str:
    """Line of an update that set a higher scale, after which gradients overflowed."""
    for previous, step in pairwise(steps):
        if previous.set_by_hand and previous.scale_after > previous.scale_before and step.found_inf:
            return next((c.line for c in reversed(previous.calls) if c.kind == "update"), "")
    return ""


def _search_unfinished(
    steps: Sequence[ScalerStep], label: str, finite_at_one: bool | None
) -> Finding:
    sentence = (
        f"all {len(steps)} steps were skipped{label} while the scaler searched for a scale "
        f"({_path(steps)}): no parameter was updated"
    )
    if finite_at_one:
        sentence += "; gradients are finite at scale 1"
    enough = max(1, math.ceil(math.log2(max(2.0, steps[-1].scale_after))))
    hint = (
        f"run more steps (warmup={len(steps) + min(4, enough)}) or start lower "
        f"(GradScaler(init_scale={steps[-1].scale_after / 4:g}))"
    )
    # Three overflows in a row are the ordinary start of a search from 65536.
    severity: Severity = "warn" if len(steps) > 3 else "note"
    return Finding("scaler", severity, sentence, _history_lines(steps), hint, _data(steps))


def _normal(steps: Sequence[ScalerStep], skipped: Sequence[ScalerStep], label: str) -> Finding:
    last = skipped[-1]
    plural = "s" if len(skipped) > 1 else ""
    after = len(steps) - last.step
    sentence = (
        f"{len(skipped)} skipped warm-up step{plural}{label}, scale {steps[0].scale_before:g} -> "
        f"{last.scale_after:g}, then stable for {after} step{'s' if after != 1 else ''}"
    )
    return Finding("scaler", "note", sentence, (), "", _data(steps))


def _endless_growth(steps: Sequence[ScalerStep], label: str) -> list[Finding]:
    last = steps[-1]
    grown = sum(step.grew for step in steps)
    infinite = math.isinf(last.scale_after) or last.scale_after > HIGHEST_USEFUL_SCALE
    always = grown >= 8 and grown == len(steps) and last.scale_after >= 2.0**24
    if not infinite and not always:
        return []
    sentence = (
        f"the loss scale grows without limit{label}: {_path(steps)}, {grown} growths in "
        f"{len(steps)} steps; in a long quiet run it becomes inf and every gradient NaN"
    )
    hint = (
        "use the default growth_interval=2000, or cap the scale after update(): "
        "if scaler.get_scale() > 2**24: scaler.update(2.0**24)"
    )
    return [Finding("scaler", "fail", sentence, _history_lines(steps), hint, _data(steps))]

"""In which unit gradients are: multiplied by the loss scale, divided again, by which of several."""

from __future__ import annotations

from typing import Any

from pytest_vram.findings import Finding
from pytest_vram.numerics.collector import Collector
from pytest_vram.numerics.events import Backward, Clip, Update
from pytest_vram.numerics.loop import GradientState, Loop, Reached
from pytest_vram.numerics.names import listed, optimizer_parameters
from pytest_vram.numerics.scaler_calls import ScalerCalls, ScalerSeen


class UnitWatch(Collector):
    """Steps, clipping and accumulation with gradients that are in another unit than they think."""

    def __init__(
        self, loop: Loop, found: dict[str, Finding], calls: ScalerCalls, values: bool
    ) -> None:
        super().__init__(loop, found)
        self._calls, self._values = calls, values
        #: state of a gradient -> how often its scaler had been updated when it was made, and where
        self._produced: dict[int, tuple[int, str]] = {}

    def update_begins(self, update: Update) -> None:
        if update.scaler is None:
            self._beside_the_scaler(update)
            return
        states = self._states(update.optimizer)
        if self._mixed_scales(update, states) or self._foreign_scaler(update, states):
            return
        if id(update.optimizer) not in self._calls.of(update.scaler).unscaled:
            self._scale_changed(update.optimizer, update.scaler, update.line)
            self._never_scaled(update)

    def _states(self, optimizer: Any) -> list[GradientState]:
        return [self._loop.state(p) for p in optimizer_parameters(optimizer) if p.grad is not None]

    def _mixed_scales(self, update: Update, states: list[GradientState]) -> bool:
        """One sum of gradients, whose parts were multiplied by different scales."""
        mixed = [state.mixed for state in states if state.mixed is not None]
        if not mixed:
            return False
        first, second = mixed[0].scales
        lines = mixed[0].lines
        changed = 1.0 not in (first, second)
        seen = self._calls.of(update.scaler)
        self._add(
            "mixed scales",
            f"the gradients of {self._loop.describe(update.optimizer)} add up backward passes in "
            f"different units: {_scaled_by(first)} at {lines[0]}, {_scaled_by(second)} at "
            f"{lines[1]}; scaler.step() at {update.line} divides their sum by one scale",
            *([f"scaler.update() ran in between at {seen.updated_at}"] if changed else []),
            hint="call scaler.update() only after scaler.step(), not between micro-batches"
            if changed
            else "start every backward from scaler.scale(loss), or add the losses up first",
            scales=[first, second],
        )
        return True

    def _foreign_scaler(self, update: Update, states: list[GradientState]) -> bool:
        """Scaled by one scaler, divided by another."""
        for state in states:
            maker = state.scaler() if state.contributions and state.scaler is not None else None
            if maker is not None and maker is not update.scaler:
                self._add(
                    "foreign scaler",
                    f"{self._loop.describe(update.optimizer)} is stepped through another "
                    f"GradScaler than the one that scaled its loss: scaled by {state.produced:g} "
                    f"at {state.made_at}, scaler.step() of the other at {update.line}",
                    hint="scale, unscale_, step and update belong to one scaler: make it once, "
                    "before the loop",
                )
                return True
        return False

    def _scale_changed(self, optimizer: Any, scaler: Any, line: str) -> None:
        """Gradients are divided by another scale than they were multiplied by."""
        states = self._states(optimizer)
        now = self._loop_scale(scaler)
        wrong = [state for state in states if state.scale not in (1.0, now)]
        seen = self._calls.of(scaler)
        if not wrong or not now:  # a scale that has collapsed to 0 is the scaler watch's finding
            self._updated_between(optimizer, states, seen, line)
            return
        was = wrong[0].scale
        self._add(
            "scale changed",
            f"{self._loop.describe(optimizer)} is unscaled with {now:g} at {line}, but its "
            f"gradients were produced with scale {was:g} (x{was / now:g})",
            f"scaler.update() ran in between at {seen.updated_at or 'an unknown line'}",
            hint="step all optimizers first, then call scaler.update() once",
            produced=was,
            divided=now,
        )

    def _updated_between(
        self, optimizer: Any, states: list[GradientState], seen: ScalerSeen, line: str
    ) -> None:
        """The scale happened to stay; at its next growth or fall the gradients are wrong."""
        older = [
            made
            for state in states
            if state.contributions and (made := self._produced.get(id(state))) is not None
            if made[0] < seen.updates
        ]
        divided = [state.unscaled_at for state in states if state.contributions]
        if older and any(divided):
            self._add(
                "unscale twice",
                f"the gradients of {self._loop.describe(optimizer)} are unscaled twice: by "
                f"unscale_() at {max(divided)} and again by scaler.step() at {line}, because "
                f"scaler.update() at {seen.updated_at} came between",
                hint="the order is backward, unscale_, clip, step, update",
            )
        elif older:
            self._add(
                "updated between",
                f"scaler.update() at {seen.updated_at} runs between the backward of "
                f"{self._loop.describe(optimizer)} ({older[0][1]}) and its step at {line}: when it "
                "changes the scale, these gradients are divided by another one than they were "
                "multiplied by",
                hint="step all optimizers first, then call scaler.update() once",
                severity="warn",
            )

    def _never_scaled(self, update: Update) -> None:
        """The scaler divides what was never multiplied."""
        states = [self._loop.state(p) for p in optimizer_parameters(update.optimizer)]
        fresh = [state for state in states if state.contributions]
        if getattr(update.scaler, "_scale", 1.0) is None:
            return  # no loss was ever scaled: it refuses, and that is told
        now = self._loop_scale(update.scaler)
        if not fresh or now in (None, 1.0) or any(state.produced != 1.0 for state in fresh):
            return
        self._add(
            "not scaled",
            f"scaler.step() at {update.line} divides the gradients of "
            f"{self._loop.describe(update.optimizer)} by {now:g}, but backward started from a loss "
            "that was not scaled: the update is lost",
            hint="call scaler.scale(loss).backward()",
            scale=now,
        )

    def _loop_scale(self, scaler: Any) -> float | None:
        if not self._values:
            return None
        return float(scaler.get_scale())

    # ---- direct steps

    def _beside_the_scaler(self, update: Update) -> None:
        optimizer = update.optimizer
        states = self._states(optimizer)
        scaled = [state for state in states if state.scale != 1.0]
        record = self._loop.record(optimizer)
        through = self._calls.that_stepped(optimizer)
        if scaled and not update.closure:
            self._add(
                "scaled step",
                f"optimizer.step() at {update.line} uses gradients that are still multiplied by "
                f"the loss scale {scaled[0].scale:g} ({self._loop.describe(optimizer)})",
                hint="replace it with scaler.step(optimizer), which unscales and checks for inf",
                scale=scaled[0].scale,
            )
        elif through and states and all(state.applied for state in states):
            rejected = through[-1].last_found_inf.get(id(optimizer), False)
            more = (
                "; it applied gradients that the scaler had rejected (found_inf)"
                if rejected
                else ""
            )
            self._add(
                "second step",
                f"optimizer.step() at {update.line} runs besides scaler.step() at "
                f"{through[-1].ever_stepped[id(optimizer)]}: {self._loop.describe(optimizer)} is "
                f"stepped twice per backward (step {self._loop.step}){more}",
                hint="remove the plain optimizer.step(): scaler.step(optimizer) calls it when the "
                "gradients are finite",
                attempts=record.attempts,
            )
        if self.found.get("second step") and through:
            self._note_rejected(update, through[-1])

    def _note_rejected(self, update: Update, seen: ScalerSeen) -> None:
        """The first double step may be a clean one, a later one harmful: say the worse."""
        old = self.found["second step"]
        if seen.last_found_inf.get(id(update.optimizer)) and "rejected" not in old.sentence:
            sentence = (
                f"{old.sentence}; it applied gradients that the scaler had rejected (found_inf)"
            )
            self.found["second step"] = Finding(
                old.kind, old.severity, sentence, old.details, old.hint, old.data
            )

    # ---- clipping and accumulation

    def clipped(self, clip: Clip) -> None:
        states = [self._loop.state(p) for p in clip.parameters if p.grad is not None]
        scaled = [state for state in states if state.scale != 1.0]
        if not scaled:
            return
        scale = scaled[0].scale
        what = "a value" if clip.function == "clip_grad_value_" else "a norm"
        details = []
        if self._values and clip.norm is not None:
            norm = float(clip.norm)
            details = [
                f"norm that clip saw {norm:g}, true norm {norm / scale:g}; after unscaling the "
                f"gradients are clipped to {clip.limit / scale:g} instead of {clip.limit:g}"
            ]
        self._add(
            "clip scaled",
            f"gradients were clipped while scaled by {scale:g}: {clip.function} at {clip.line} "
            f"compares {what} that is {scale:g} times too large",
            *details,
            hint="call scaler.unscale_(optimizer) before clipping",
            scale=scale,
        )

    def backward_ends(self, call: Backward) -> None:
        mixed = [r for r in self._loop.reached if r.before.unscaled_at and not r.before.applied]
        if mixed and call.scale != 1.0:
            self._mixed_units(call, mixed)
        if call.scaler is not None:
            made = self._calls.of(call.scaler).updates, call.line
            self._produced.update({id(r.state): made for r in self._loop.reached})

    def _mixed_units(self, call: Backward, mixed: list[Reached]) -> None:
        self._add(
            "mixed units",
            f"backward at {call.line} adds gradients scaled by {call.scale:g} to gradients that "
            f"unscale_() at {mixed[0].before.unscaled_at} had already divided (x{call.scale:g})",
            self._which(mixed),
            hint="under gradient accumulation call unscale_() and clip once, after the last "
            "micro-batch",
            scale=call.scale,
        )

    def _which(self, reached: list[Reached]) -> str:
        parameters = [r.state.parameter() for r in reached]
        return "parameters: " + listed(
            self._loop.names.name(p) for p in parameters if p is not None
        )


def _scaled_by(scale: float) -> str:
    return "not scaled" if scale == 1.0 else f"scaled by {scale:g}"

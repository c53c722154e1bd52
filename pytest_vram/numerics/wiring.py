"""Mistakes in the order of calls around a scaler, autocast and checkpointing.

Each check turns what it saw into a finding at once, while modules, optimizers and the user's frames
still exist, so that the sentence can name the line and the parameters.
"""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from pytest_vram.findings import Finding
from pytest_vram.numerics.events import Backward, Clip, Listener, ScalerCall, Update
from pytest_vram.numerics.loop import GradientState, Loop, Reached
from pytest_vram.numerics.names import dtype_name, listed, optimizer_parameters


class WiringWatch(Listener):
    """Collects findings in ``found``, each kind of mistake once."""

    def __init__(self, loop: Loop, values: bool) -> None:
        self._loop, self._values = loop, values
        self.found: dict[str, Finding] = {}
        self._seen: weakref.WeakKeyDictionary[Any, _ScalerSeen] = weakref.WeakKeyDictionary()
        self._autocast_step = ""
        self._reentrant: list[tuple[str, Any]] = []
        self._micro: list[tuple[str, str]] = []  # (line, how the loss was reduced) since an update
        self._threads: set[int] = set()  # that ran backward
        #: state of a gradient -> how often its scaler had been updated when it was made, and where
        self._produced: dict[int, tuple[int, str]] = {}

    def _add(self, key: str, sentence: str, *details: str, hint: str = "", **more: Any) -> None:
        kind = more.pop("kind", "scaler")
        severity = more.pop("severity", "fail")
        if key not in self.found:
            self.found[key] = Finding(kind, severity, sentence, details, hint, more)

    def explained(self) -> set[str]:
        """Names of parameters whose missing gradients a finding here explains."""
        causes = [self.found[key] for key in ("reentrant", "no gradients") if key in self.found]
        return {name for cause in causes for name in cause.data.get("parameters", ())}

    def _scaler(self, scaler: Any) -> _ScalerSeen:
        return self._seen.setdefault(scaler, _ScalerSeen())

    # ---- the scaler's calls

    def scaler_called(self, call: ScalerCall) -> None:
        seen = self._scaler(call.scaler)
        if call.error is not None:
            self._refused(call, seen)
        elif call.kind == "unscale_":
            seen.unscaled[id(call.optimizer)] = call.line
            self._dtypes(call)
        elif call.kind == "step":
            seen.stepped[id(call.optimizer)] = call.line
        elif call.kind == "update":
            seen.unscaled.clear()
            seen.stepped.clear()
            seen.updates += 1
            seen.updated_at = call.line
        elif call.kind == "load_state_dict":
            seen.loaded = True

    def update_begins(self, update: Update) -> None:
        if update.scaler is not None:
            if id(update.optimizer) not in self._scaler(update.scaler).unscaled:
                self._scale_changed(update.optimizer, update.scaler, update.line)
                self._never_scaled(update)
            call = ScalerCall("step", update.scaler, update.line, update.optimizer)
            self._dtypes(call)
            self._needless(call)
            self._one_of_many(call)
            self._lost_scaler_state(call, self._scaler(update.scaler))
            if update.closure:
                self._closure(update.line, self._loop.describe(update.optimizer))
        else:
            self._beside_the_scaler(update)
        self._undivided_loss(update)
        if not update.closure:  # its backward has yet to run
            self._never_zeroed(update)
        self._thrown_away(update)

    def _refused(self, call: ScalerCall, seen: _ScalerSeen) -> None:
        """GradScaler raised: say in the terms of the loop what it could not say."""
        message = str(call.error)
        name = self._loop.describe(call.optimizer) if call.optimizer is not None else ""
        if "unscale_() has already been called" in message:
            first = seen.unscaled.get(id(call.optimizer), "an earlier line")
            self._add(
                "unscale twice",
                f"unscale_() was called twice for {name} before update(): first at {first}, again "
                f"at {call.line}",
                hint="call unscale_() once per optimizer and update, after the last micro-batch",
            )
        elif "unscale_() is being called after step()" in message:
            at = seen.stepped.get(id(call.optimizer), "an earlier line")
            self._add(
                "unscale after step",
                f"unscale_() at {call.line} comes after scaler.step() at {at} for {name}",
                hint="the order is backward, unscale_, clip, step, update: is scaler.update() "
                "missing at the end of the step before?",
            )
        elif "step() has already been called" in message:
            first = seen.stepped.get(id(call.optimizer), "an earlier line")
            self._add(
                "step twice",
                f"scaler.step() was called twice for {name} without scaler.update() between: first "
                f"at {first}, again at {call.line}",
                hint="scaler.update() is missing: call it once at the end of each step",
            )
        elif "No inf checks were recorded for this optimizer" in message:
            self._no_gradients(call)
        elif "No inf checks were recorded prior to update" in message:
            self._add(
                "update without step",
                f"scaler.update() at {call.line} had nothing to go by: no optimizer was stepped or "
                "unscaled through the scaler since the last update",
                hint="call scaler.step(optimizer) before, and update() once per optimizer step, "
                "not per micro-batch",
            )
        elif "Closure use is not currently supported" in message:
            self._closure(call.line, name)
        elif "unscale FP16 gradients" in message:
            self._dtypes(call)
        elif "_scale is None" in message and "closure" not in self.found:
            self._add(
                "never scaled",
                f"scaler.{call.kind}() at {call.line} before any scaler.scale(loss)",
                hint="backward must start from scaler.scale(loss)",
            )

    def _scale_changed(self, optimizer: Any, scaler: Any, line: str) -> None:
        """Gradients are divided by another scale than they were multiplied by."""
        states = [
            self._loop.state(p) for p in optimizer_parameters(optimizer) if p.grad is not None
        ]
        now = self._loop_scale(scaler)
        wrong = [state for state in states if state.scale not in (1.0, now)]
        seen = self._scaler(scaler)
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
        self, optimizer: Any, states: list[GradientState], seen: _ScalerSeen, line: str
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

    def _dtypes(self, call: ScalerCall) -> None:
        """The scaler unscales fp32 gradients; fp16 ones it refuses, and says not which."""
        parameters = [
            p for p in optimizer_parameters(call.optimizer) if p.requires_grad or p.grad is not None
        ]
        wrong: dict[str, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.dtype in (torch.float16, torch.bfloat16) or parameter.is_complex():
                wrong.setdefault(dtype_name(parameter.dtype), []).append(parameter)
        for dtype, members in wrong.items():
            names = listed(self._loop.names.names(members))
            refused = call.error is not None or dtype != "bfloat16"
            verb = "is" if len(members) == 1 else "are"
            self._add(
                f"dtype {dtype}",
                f"{len(members)} of {len(parameters)} trainable parameters {verb} {dtype} under a "
                f"GradScaler: {names} ({call.kind} at {call.line})",
                hint="GradScaler needs float32 trainable parameters: cast these with .float() "
                "(frozen ones may stay as they are)"
                if dtype != "bfloat16"
                else "bfloat16 has fp32's range and needs no loss scaling: drop the scaler, or "
                "keep float32 parameters and use autocast",
                severity="fail" if refused else "warn",
                parameters=[self._loop.names.name(p) for p in members],
            )

    def _needless(self, call: ScalerCall) -> None:
        if self._loop.autocast_dtype is torch.bfloat16:
            self._add(
                "needless",
                f"a GradScaler scales the loss of a forward under bfloat16 autocast (step at "
                f"{call.line}): bfloat16 has float32's range, so nothing underflows",
                hint="GradScaler(enabled=dtype == torch.float16); it costs a check of every "
                "gradient and may skip steps for nothing",
                severity="warn",
            )

    def _one_of_many(self, call: ScalerCall) -> None:
        """A scaler that is made inside the loop never learns which scale is right."""
        record = self._loop.record(call.optimizer)
        if self._scaler(call.scaler).loaded or call.scaler in record.scalers:
            return
        record.scalers.add(call.scaler)
        record.scalers_met += 1
        if record.scalers_met >= 3:
            self._add(
                "many scalers",
                f"{self._loop.describe(call.optimizer)} is stepped through a new GradScaler again "
                f"and again (the third at {call.line}): each starts at scale "
                f"{call.scaler._init_scale:g} and never finds the right one",
                hint="make one GradScaler before the loop, and keep it for the whole run",
            )

    def _no_gradients(self, call: ScalerCall) -> None:
        """An optimizer whose parameters have no gradient at all."""
        if "thrown away" in self.found:
            return  # that says why
        optimizer = call.optimizer
        parameters = optimizer_parameters(optimizer)
        names = self._loop.names.names(parameters)
        groups = getattr(optimizer, "param_groups", ())
        details = [
            f"group {number}: {listed([self._loop.names.name(p) for p in group['params']])}"
            for number, group in enumerate(groups)
        ]
        self._add(
            "no gradients",
            f"{self._loop.describe(optimizer)} received 0 of {len(parameters)} gradients in this "
            f"step (scaler.step at {call.line}): {self.reason(parameters)}",
            *details,
            hint="this is wiring, not numerics: step only the optimizers whose parameters took "
            "part in the loss, and build them on the model that is trained",
            parameters=names,
        )

    def reason(self, parameters: list[Tensor]) -> str:
        """Why none of these has a gradient."""
        if parameters and not any(p.requires_grad for p in parameters):
            return "all of them are frozen (requires_grad=False)"
        ever = [p for p in parameters if self._loop.state(p).ever]
        if ever:
            return (
                "their gradients were cleared between backward and step, or this step's loss "
                "does not use them"
            )
        known = {id(p) for p in self._loop.names.parameters()}
        if not any(id(p) in known for p in parameters):
            return "they belong to no module that ran: the optimizer was built on another copy"
        if not any(self._loop.used(p) for p in parameters):
            return "their modules did not run in this step (unused branch)"
        return "the loss does not depend on them (detached, or their output is not used)"

    def _closure(self, line: str, name: str) -> None:
        self._add(
            "closure",
            f"scaler.step() at {line} got a closure for {name}: the closure's gradients are scaled "
            "and never checked for inf",
            hint="optimizers with closures (LBFGS) need bf16 or fp32 without a GradScaler",
        )

    def _lost_scaler_state(self, call: ScalerCall, seen: _ScalerSeen) -> None:
        record = self._loop.record(call.optimizer)
        if not record.loaded_at or seen.loaded or seen.updates:
            return
        if record.updates > record.updates_at_load:
            return
        self._add(
            "scaler state",
            f"{self._loop.describe(call.optimizer)} resumes from a saved state (loaded at "
            f"{record.loaded_at}), but its GradScaler starts anew at scale "
            f"{call.scaler._init_scale:g}: extra skipped steps after each resume",
            hint="save scaler.state_dict() with the checkpoint and load it: "
            "scaler.load_state_dict(checkpoint['scaler'])",
        )

    # ---- direct steps

    def _beside_the_scaler(self, update: Update) -> None:
        optimizer = update.optimizer
        states = [
            self._loop.state(p) for p in optimizer_parameters(optimizer) if p.grad is not None
        ]
        scaled = [state for state in states if state.scale != 1.0]
        record = self._loop.record(optimizer)
        through = [seen for seen in self._seen.values() if id(optimizer) in seen.ever_stepped]
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

    def _note_rejected(self, update: Update, seen: _ScalerSeen) -> None:
        """The first double step may be a clean one, a later one harmful: say the worse."""
        old = self.found["second step"]
        if seen.last_found_inf.get(id(update.optimizer)) and "rejected" not in old.sentence:
            sentence = (
                f"{old.sentence}; it applied gradients that the scaler had rejected (found_inf)"
            )
            self.found["second step"] = Finding(
                old.kind, old.severity, sentence, old.details, old.hint, old.data
            )

    def update_ends(self, update: Update) -> None:
        self._micro.clear()
        if update.closure and update.applied:
            self._never_zeroed(update)
        if update.scaler is not None:
            seen = self._scaler(update.scaler)
            seen.ever_stepped[id(update.optimizer)] = update.line
            seen.last_found_inf[id(update.optimizer)] = not update.applied
        if update.applied:
            self._step_under_autocast(update)

    # ---- clipping and accumulation

    def clip_begins(self, clip: Clip) -> None:
        if not clip.parameters:
            self._add(
                "clip nothing",
                f"{clip.function} at {clip.line} was given no parameters, so nothing is clipped: a "
                "generator such as model.parameters() can be used once",
                hint="call model.parameters() anew, or keep list(model.parameters())",
                kind="untrained",
                severity="warn",
            )
        states = [self._loop.state(p) for p in clip.parameters if p.grad is not None]
        if states and all(state.used_up() for state in states):
            self._add(
                "clip after step",
                f"{clip.function} at {clip.line} comes after the optimizer's step: what it clips "
                "has been applied already",
                hint="clip between backward (or unscale_) and step",
                kind="untrained",
            )

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

    def backward_begins(self, call: Backward) -> None:
        if call.inside_step and call.scaler is not None:
            self._closure(call.line, "an optimizer")
        node = call.roots[0].grad_fn if call.roots else None
        if call.scaler is not None:
            node = below_scaling(node)
        self._micro.append((call.line, _reduction(node)))
        self._threads.add(get_ident())
        if node is None and not any(root.requires_grad for root in call.roots):
            self._cut_by_checkpoint()  # backward will raise: this is why

    def backward_ends(self, call: Backward) -> None:
        mixed = [r for r in self._loop.reached if r.before.unscaled_at and not r.before.applied]
        if mixed and call.scale != 1.0:
            self._mixed_units(call, mixed)
        if call.scaler is not None:
            made = self._scaler(call.scaler).updates, call.line
            self._produced.update({id(r.state): made for r in self._loop.reached})
        self._cut_by_checkpoint()

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

    def _never_zeroed(self, update: Update) -> None:
        """What the optimizer reads is the sum of this step's gradients and of used ones."""
        parameters = [p for p in optimizer_parameters(update.optimizer) if p.grad is not None]
        stacked = [p for p in parameters if self._loop.state(p).stacked_at]
        if not stacked:
            return
        self._add(
            "never zeroed",
            f"{self._loop.describe(update.optimizer)} steps at {update.line} with gradients of "
            f"earlier steps added in (step {self._loop.step}): backward at "
            f"{self._loop.state(stacked[0]).stacked_at} added to gradients that were already used",
            f"parameters: {listed(self._loop.names.names(stacked))}",
            hint="call optimizer.zero_grad() once per step, before backward",
            kind="untrained",
        )

    def _which(self, reached: list[Reached]) -> str:
        parameters = [r.state.parameter() for r in reached]
        return "parameters: " + listed(
            self._loop.names.name(p) for p in parameters if p is not None
        )

    def _thrown_away(self, update: Update) -> None:
        """zero_grad between backward and step: the optimizer has nothing to apply."""
        states = [self._loop.state(p) for p in optimizer_parameters(update.optimizer)]
        thrown = [state for state in states if state.discarded_at]
        if not thrown or update.closure or any(state.contributions for state in states):
            return
        self._add(
            "thrown away",
            f"{self._loop.describe(update.optimizer)} steps at {update.line} without gradients: "
            f"zero_grad at {thrown[0].discarded_at} cleared them after backward",
            hint="the order is zero_grad, backward, step",
            kind="untrained",
        )

    def _undivided_loss(self, update: Update) -> None:
        """k micro-batches, each with a mean as its loss, give k times the gradient of the batch."""
        if len(self._threads) > 1:
            return  # loops that interleave: whose micro-batch is it?
        groups: dict[str, list[str]] = {}
        for line, reduction in self._micro:
            groups.setdefault(line, []).append(reduction)
        for line, reductions in groups.items():
            if len(reductions) < 2 or not all(reductions):
                continue
            forwards = self._loop.forwards_since_update
            if forwards and max(forwards.values()) < len(reductions):
                continue  # several losses of one forward
            count = len(reductions)
            self._add(
                "undivided",
                f"{count} micro-batches were accumulated at {line} and the loss was not divided by "
                f"{count}: each is a {reductions[0]}, so gradients are {count} times too large",
                hint=f"(loss / {count}).backward()",
                micro_batches=count,
            )

    # ---- autocast

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


class _ScalerSeen:
    """What one scaler did since its last update, and ever."""

    def __init__(self) -> None:
        self.unscaled: dict[int, str] = {}
        self.stepped: dict[int, str] = {}
        self.ever_stepped: dict[int, str] = {}
        self.last_found_inf: dict[int, bool] = {}
        self.updates = 0
        self.updated_at = ""
        self.loaded = False


_PASS_THROUGH = (
    "ViewBackward",
    "UnsafeViewBackward",
    "ReshapeAliasBackward",
    "SqueezeBackward",
    "UnsqueezeBackward",
    "ToCopyBackward",
    "AliasBackward",
    "CloneBackward",
)


def _reduction(node: Any) -> str:
    """What a loss is if nothing scales it: ``mean`` by name of the operator; empty otherwise."""
    for _ in range(8):
        if node is None:
            return ""
        name = node.name().rstrip("0123456789")
        if name.startswith(_PASS_THROUGH):
            node = node.next_functions[0][0]
            continue
        if name == "MeanBackward":
            return "mean"
        if getattr(node, "_saved_reduction", None) == 1:  # at::Reduction::Mean
            return f"mean ({name.removesuffix('Backward')})"
        return ""
    return ""


def below_scaling(node: Any) -> Any:
    """The node under the scaler's multiplication: the loss itself."""
    if node is not None and node.name().startswith("MulBackward"):
        return node.next_functions[0][0]
    return None


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

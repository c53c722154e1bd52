"""Mistakes in the calls of a gradient scaler: their order, and what it is given."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_vram.findings import Finding
from pytest_vram.numerics.collector import Collector
from pytest_vram.numerics.events import Backward, ScalerCall, Update
from pytest_vram.numerics.loop import Loop
from pytest_vram.numerics.names import dtype_name, listed, optimizer_parameters
from pytest_vram.numerics.scaler_calls import ScalerCalls, ScalerSeen


class WiringWatch(Collector):
    """What the scaler refuses, said in the terms of the loop, and what it should have refused."""

    def __init__(self, loop: Loop, found: dict[str, Finding], calls: ScalerCalls) -> None:
        super().__init__(loop, found)
        self._calls = calls

    def scaler_called(self, call: ScalerCall) -> None:
        if call.error is not None:
            self._refused(call, self._calls.of(call.scaler))
        elif call.kind == "unscale_":
            self._dtypes(call)

    def update_begins(self, update: Update) -> None:
        if update.scaler is None:
            return
        call = ScalerCall("step", update.scaler, update.line, update.optimizer)
        self._dtypes(call)
        self._needless(call)
        self._one_of_many(call)
        self._lost_scaler_state(call, self._calls.of(update.scaler))
        if update.closure:
            self._closure(update.line, self._loop.describe(update.optimizer))

    def backward_begins(self, call: Backward) -> None:
        if call.inside_step and call.scaler is not None:
            self._closure(call.line, "an optimizer")

    def _refused(self, call: ScalerCall, seen: ScalerSeen) -> None:
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
                hint="backward must start from scaler.scale(loss); with Accelerate call "
                "accelerator.backward(loss)",
            )

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
        if self._calls.of(call.scaler).loaded or call.scaler in record.scalers:
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

    def _lost_scaler_state(self, call: ScalerCall, seen: ScalerSeen) -> None:
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

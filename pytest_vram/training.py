"""The one right mixed-precision training step, for ``vram.train``.

zero_grad -> autocast forward -> loss / accumulate -> scale -> backward -> unscale_ -> (whoever
watches checks the gradients) -> clip -> step -> update -> scheduler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp16-pure": torch.float16,
    "bf16-pure": torch.bfloat16,
}


class TrainingError(ValueError):
    """A model, optimizer or loss that cannot be trained; the message says what to change."""


class Loop(Protocol):
    """What a training loop needs from the pass that it runs in."""

    @property
    def precision(self) -> str: ...
    @property
    def scaler(self) -> torch.amp.GradScaler: ...
    def autocast(self) -> AbstractContextManager[Any]: ...
    def phase(self, name: str) -> AbstractContextManager[None]: ...
    def begin_step(self) -> None: ...
    def label(self, tensor: Tensor, bill: str, name: str) -> None: ...
    def on_leave(self, undo: Callable[[], None]) -> None: ...


def autocast(precision: str, device_type: str) -> AbstractContextManager[Any]:
    """The autocast region of a precision; one that does nothing for fp32 and the pure ones."""
    enabled = precision in ("fp16", "bf16")
    dtype = DTYPES[precision] if enabled else None
    return torch.autocast(device_type, dtype=dtype, enabled=enabled)


def gradient_scaler(precision: str, device_type: str) -> torch.amp.GradScaler:
    """fp16 needs loss scaling; for every other precision the scaler passes everything through."""
    return torch.amp.GradScaler(device_type, enabled=precision.startswith("fp16"))


def train(
    loop: Loop,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[..., Tensor],
    *,
    steps: int,
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Any = None,
) -> None:
    """Run ``steps`` training steps. ``loss_fn`` is called as it likes: without arguments, with the
    step's index, or with the step's and the micro-batch's index (all from 0).

    :raises TrainingError: before anything runs, or at the first loss or gradient that is unusable.
    """
    __tracebackhide__ = True
    _check(model, optimizer, loss_fn, accumulate, clip_grad_norm)
    scaler = loop.scaler if scaler is None else scaler
    stepper = _Step(loop, model, optimizer, _loss_caller(loss_fn), accumulate, scaler)
    stepper.clip, stepper.scheduled = clip_grad_norm, scheduler is not None
    if loop.precision.endswith("-pure"):
        stepper.masters = MasterWeights(loop, model, optimizer, DTYPES[loop.precision])
        loop.on_leave(stepper.masters.give_back)
    closure = _needs_closure(optimizer)
    if closure:
        _check_closure(optimizer, scaler, stepper.masters)
    for index in range(steps):
        loop.begin_step()
        stepper.by_closure(index) if closure else stepper.run(index)
        if scheduler is not None and not stepper.skipped:
            scheduler.step()


class _Step:
    """One training step over ``accumulate`` micro-batches."""

    def __init__(
        self,
        loop: Loop,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[int, int], object],
        accumulate: int,
        scaler: torch.amp.GradScaler,
    ) -> None:
        self.loop, self.model, self.optimizer = loop, model, optimizer
        self.loss, self.accumulate, self.scaler = loss, accumulate, scaler
        self.clip: float | None = None
        self.scheduled = False
        self.masters: MasterWeights | None = None
        self.skipped = False

    def run(self, index: int) -> None:
        __tracebackhide__ = True
        self._zero_grad()
        self._gradients(index)
        with self.loop.phase("optimizer"):
            if self.masters:
                self.masters.take_gradients()
            if self.clip is not None:
                self.scaler.unscale_(self.optimizer)
                self._clip()
            scale = self._scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            # update() lowers the scale exactly when it found inf or NaN and the step was skipped.
            self.skipped = self._scale() < scale
            if self.masters:
                self.masters.write_back()

    def _scale(self) -> float:
        """Only a scheduler must know about skipped steps; reading the scale waits for the GPU."""
        return self.scaler.get_scale() if self.scaler.is_enabled() and self.scheduled else 0.0

    def by_closure(self, index: int) -> None:
        """LBFGS and others evaluate the loss as often as they like."""
        __tracebackhide__ = True

        def closure() -> Tensor:
            __tracebackhide__ = True
            self._zero_grad()
            loss = self._gradients(index)
            if self.clip is not None:
                self._clip()
            return loss

        self.optimizer.step(closure)  # type: ignore[arg-type]

    def _zero_grad(self) -> None:
        if self.masters:
            self.masters.zero_grad()
        self.optimizer.zero_grad(set_to_none=True)

    def _gradients(self, index: int) -> Tensor:
        """Forward and backward of every micro-batch; the last (undivided) loss, detached."""
        __tracebackhide__ = True
        for micro in range(self.accumulate):
            with self.loop.phase("forward"), self.loop.autocast():
                loss = check_loss(self.loss(index, micro))
                share = loss / self.accumulate if self.accumulate > 1 else loss
                value = loss.detach()
                del loss
            self.scaler.scale(share).backward()  # type: ignore[no-untyped-call]
            del share
        parameters = self.masters.parameters if self.masters else _parameters(self.optimizer)
        if all(parameter.grad is None for parameter in parameters):
            raise TrainingError(
                "no parameter of the optimizer got a gradient: the loss does not depend on them "
                "(is the model called under torch.no_grad(), or its output detached?)"
            )
        return value

    def _clip(self) -> None:
        owners = self.masters.masters if self.masters else list(self.model.parameters())
        torch.nn.utils.clip_grad_norm_(owners, self.clip or 0.0)


class MasterWeights:
    """fp32 copies that the optimizer updates in place of a model's low-precision parameters.

    The fp32 parameters a model was built with become the masters; the model's own become ``dtype``.
    Gradients stay in ``dtype``; their fp32 copies live only while the optimizer steps.
    """

    def __init__(
        self,
        loop: Loop,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype,
    ) -> None:
        self._loop, self._optimizer = loop, optimizer
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self.parameters: list[Tensor] = []
        self.masters: list[Tensor] = []
        self._names: list[str] = []
        with torch.no_grad():
            for group in optimizer.param_groups:
                group["params"] = [
                    self._master(parameter, names.get(id(parameter), ""), dtype)
                    for parameter in group["params"]
                ]
            # What the optimizer does not hold: frozen parameters and buffers.
            model.to(dtype)

    def _master(self, parameter: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        if not parameter.is_floating_point():
            return parameter
        master = nn.Parameter(parameter.detach().to(torch.float32))
        # What the optimizer updates is named like the parameter that it stands for.
        master._vram_name = name  # type: ignore[attr-defined]
        parameter.data = parameter.detach().to(dtype)
        self._loop.label(parameter, "parameters", name)
        self._loop.label(master, "master_weights", name)
        if parameter in self._optimizer.state:
            self._optimizer.state[master] = self._optimizer.state.pop(parameter)
        self.parameters.append(parameter)
        self.masters.append(master)
        self._names.append(name)
        return master

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def take_gradients(self) -> None:
        for parameter, master, name in zip(self.parameters, self.masters, self._names, strict=True):
            if parameter.grad is not None:
                self._loop.label(parameter.grad, "gradients", name)
                master.grad = parameter.grad.to(torch.float32)
                self._loop.label(master.grad, "gradients", name)

    def write_back(self) -> None:
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)
                master.grad = None

    def give_back(self) -> None:
        """The optimizer holds the model's own parameters again."""
        for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master in self._optimizer.state:
                self._optimizer.state[parameter] = self._optimizer.state.pop(master)
        self.masters.clear()


# ---- what can be wrong, said before it goes wrong


def _check(model: Any, optimizer: Any, loss_fn: Any, accumulate: int, clip: float | None) -> None:
    __tracebackhide__ = True
    if not isinstance(model, nn.Module):
        raise TrainingError(f"the model must be a torch.nn.Module, not {_type(model)}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TrainingError(
            f"the optimizer must be a torch.optim.Optimizer, not {_type(optimizer)}"
        )
    if not callable(loss_fn):
        raise TrainingError(
            f"loss_fn must be a function that returns the loss, not {_type(loss_fn)}: "
            "lambda: model(x)"
        )
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise TrainingError(f"accumulate={accumulate!r}: expected a whole number, at least 1")
    if clip is not None and not clip > 0:
        raise TrainingError(f"clip_grad_norm={clip!r}: expected a norm above 0")
    owned = {id(parameter) for parameter in model.parameters()}
    held = _parameters(optimizer)
    if not any(id(parameter) in owned for parameter in held):
        raise TrainingError(
            f"the optimizer ({len(held)} parameters) holds none of the model's {len(owned)} "
            "parameters: make it from model.parameters() of this very model"
        )


def check_loss(loss: object) -> Tensor:
    """``loss`` if backward can start from it. :raises TrainingError: what to return instead."""
    __tracebackhide__ = True
    if not isinstance(loss, Tensor):
        hint = "return its .loss" if hasattr(loss, "loss") else "return the loss tensor"
        raise TrainingError(f"loss_fn returned {_type(loss)}, not a tensor: {hint}")
    if loss.numel() != 1:
        raise TrainingError(
            f"loss_fn returned a tensor of shape {tuple(loss.shape)}, not a scalar: reduce it, "
            "e.g. with .mean()"
        )
    if not loss.requires_grad:
        raise TrainingError(
            "the loss has no gradient: is the model called under torch.no_grad(), is its output "
            "detached, or are all parameters frozen?"
        )
    return loss


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _check_closure(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, masters: MasterWeights | None
) -> None:
    __tracebackhide__ = True
    name = type(optimizer).__name__
    if scaler.is_enabled():
        raise TrainingError(
            f"{name} evaluates the loss in a closure, which torch.amp.GradScaler does not support: "
            'use precision="bf16" or "fp32", or another optimizer'
        )
    if masters is not None:
        raise TrainingError(
            f"{name} evaluates the loss in a closure, so that master weights could not follow it: "
            'use precision="bf16" or "fp32", or another optimizer'
        )


def _loss_caller(loss_fn: Callable[..., object]) -> Callable[[int, int], object]:
    """``loss_fn`` as a function of step and micro-batch, whichever of them it takes."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return lambda step, micro: loss_fn()
    positional = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
    ]
    if len(positional) > 2:
        raise TrainingError(
            f"loss_fn takes {len(positional)} arguments: expected none, the step's index, or the "
            "step's and the micro-batch's"
        )
    return lambda step, micro: loss_fn(*(step, micro)[: len(positional)])


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _type(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"

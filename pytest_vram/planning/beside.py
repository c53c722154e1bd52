"""What the textbook would have said, in one line beside a measured or simulated test."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pytest_vram.planning.answers import BILLS, Plan
from pytest_vram.planning.plan import make_plan
from pytest_vram.planning.runs import Setup
from pytest_vram.planning.shapes import ModelShape, PlanError
from pytest_vram.planning.states import (
    OPTIMIZERS,
    PRECISIONS,
    Optimizer,
    Precision,
    find_optimizer,
    find_precision,
)
from pytest_vram.quantities import format_bytes, format_change, format_percent

if TYPE_CHECKING:
    from torch import nn


def closed_form(
    module: nn.Module,
    inputs: Iterable[tuple[str, tuple[int, ...]]],
    *,
    precision: str,
    optimizer: Any = None,
    alive: Iterable[tuple[int, ...]] = (),
) -> Plan | None:
    """The plan of a training step that has run; ``None`` where the model's shape is not a
    transformer's or the inputs do not say batch and sequence.

    :param inputs: dtype and shape of what was fed in, as a Trace labels it; the first
        two-dimensional integer tensor is taken for token ids, a four-dimensional one for pixels.
    :param optimizer: the ``torch.optim`` optimizer that stepped, or ``None``.
    :param alive: shapes of what was allocated after the step; logits among them are held by the
        caller.
    """
    from pytest_vram.planning.modules import adapters, dropout, from_module

    size = _size(inputs)
    if size is None:
        return None
    try:
        made, step = _optimizer(optimizer)
        shape = from_module(module)
        return make_plan(
            Setup(
                shape,
                batch=size[0],
                sequence=size[1],
                precision=_of_parameters(module, find_precision(precision)),
                optimizer=made,
                step=step,
                dropout=dropout(module),
                lora=adapters(module),
                held=_held(shape, size[0] * size[1], alive),
            )
        )
    except PlanError:
        return None


def sentence(plan: Plan, peak: int, bills: Mapping[str, int]) -> str:
    """``closed form 2.74 GiB, the test took 2.75 GiB (+0.5 %); activations +9.5 MiB``: what was
    predicted, what it was, and the bills that depart by more than a hundredth of the peak (at least
    1 MiB), the largest difference first."""
    planned = plan.peak_moment.bills
    line = (
        f"closed form {format_bytes(plan.peak)}, the test took {format_bytes(peak)} "
        f"({format_percent(peak - plan.peak, plan.peak)})"
    )
    moved = {name: bills.get(name, 0) - planned[name] for name in BILLS}
    worth = [name for name in BILLS if abs(moved[name]) >= max(1 << 20, peak // 100)]
    parts = [
        f"{name.replace('_', ' ')} "
        f"{format_change(moved[name], max(planned[name], bills.get(name, 0)))}"
        for name in sorted(worth, key=lambda name: -abs(moved[name]))
    ]
    return f"{line}; {', '.join(parts)}" if parts else line


def _held(shape: ModelShape, tokens: int, alive: Iterable[tuple[int, ...]]) -> bool:
    """Whether the logits outlive the step, because somebody holds the model's output."""
    logits = (tokens * shape.logits, shape.logits)
    return any(sizes and (math.prod(sizes), sizes[-1]) == logits for sizes in alive)


def _of_parameters(module: nn.Module, asked: Precision) -> Precision:
    """What the test asked for, unless its model is in 16 bits anyway."""
    names = {str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.dim() > 1}
    kinds = {"bfloat16": "bf16-plain", "float16": "fp16-plain"}
    if asked.name == "fp32" and len(names) == 1 and (name := names.pop()) in kinds:
        return PRECISIONS[kinds[name]]
    return asked


def _size(inputs: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[int, int] | None:
    """Batch and sequence."""
    for dtype, shape in inputs:
        if len(shape) == 2 and "int" in dtype:
            return shape[0], shape[1]
        if len(shape) == 4 and "float" in dtype:
            return shape[0], 1
    return None


def _optimizer(optimizer: Any) -> tuple[Optimizer, Any]:
    """The planner's entry for a live optimizer, and how its step is implemented."""
    if optimizer is None:
        return OPTIMIZERS["none"], "foreach"
    options = optimizer.defaults
    name = type(optimizer).__name__.lower()
    if name == "sgd" and options.get("momentum"):
        name = "sgd-momentum"
    if name == "rmsprop" and options.get("momentum"):
        name = "rmsprop-momentum"
    if name in ("adam", "adamw") and options.get("amsgrad"):
        name += "-amsgrad"
    step = "fused" if options.get("fused") else "foreach"
    if options.get("foreach") is False and not options.get("fused"):
        step = "loop"
    return find_optimizer(name), step

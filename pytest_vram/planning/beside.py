"""What the textbook would have said, in one line beside a measured or simulated test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pytest_vram.planning.plan import BILLS, Plan, Setup, make_plan
from pytest_vram.planning.shapes import PlanError
from pytest_vram.planning.states import OPTIMIZERS, Optimizer, find_optimizer, find_precision
from pytest_vram.quantities import format_bytes, format_change, format_percent

if TYPE_CHECKING:
    from torch import nn


def closed_form(
    module: nn.Module,
    inputs: Iterable[tuple[str, tuple[int, ...]]],
    *,
    precision: str,
    optimizer: Any = None,
    accumulation: int = 1,
) -> Plan | None:
    """The plan of a training step that has run; ``None`` where the model's shape is not a
    transformer's or the inputs do not say batch and sequence.

    :param inputs: dtype and shape of what was fed in, as a Trace labels it; the first
        two-dimensional integer tensor is taken for token ids, a four-dimensional one for pixels.
    :param optimizer: the ``torch.optim`` optimizer that stepped, or ``None``.
    """
    from pytest_vram.planning.modules import from_module

    size = _size(inputs)
    if size is None:
        return None
    try:
        made, step = _optimizer(optimizer)
        return make_plan(
            Setup(
                from_module(module),
                batch=size[0],
                sequence=size[1],
                accumulation=accumulation,
                precision=find_precision(precision),
                optimizer=made,
                step=step,
            )
        )
    except PlanError:
        return None


def sentence(plan: Plan, peak: int, bills: Mapping[str, int]) -> str:
    """``closed form 2.74 GiB, the test took 2.75 GiB (+0.5 %); activations +9.5 MiB``: what was
    predicted, what it was, and the bill that departs most."""
    planned = plan.peak_moment.bills
    name = max(BILLS, key=lambda bill: abs(bills.get(bill, 0) - planned[bill]))
    moved = bills.get(name, 0) - planned[name]
    line = (
        f"closed form {format_bytes(plan.peak)}, the test took {format_bytes(peak)} "
        f"({format_percent(peak - plan.peak, plan.peak)})"
    )
    if abs(moved) < 1 << 20:
        return line
    change = format_change(moved, max(planned[name], bills.get(name, 0)))
    return f"{line}; {name.replace('_', ' ')} {change}"


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

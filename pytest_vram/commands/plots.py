"""Plots, where matplotlib is installed (the extra ``pytest-vram[plot]``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_vram.commands.common import Problem, bill_name
from pytest_vram.planning.answers import BILLS, Plan
from pytest_vram.planning.plan import make_plan
from pytest_vram.planning.runs import Setup
from pytest_vram.planning.shapes import PlanError
from pytest_vram.sim.profiles import Profile
from pytest_vram.timeline import Timeline

GIB = 1 << 30
_KINDS = (".png", ".svg", ".pdf")


def _figure(file: Path) -> tuple[Any, Any]:
    """A figure and its axes; a :class:`Problem` where it could not be drawn or written."""
    if file.suffix not in _KINDS:
        raise Problem(f"{file}: a plot is written as {', '.join(_KINDS)}")
    if not file.parent.is_dir():
        raise Problem(f"{file}: no such folder")
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError:
        raise Problem(
            "plots need matplotlib, which is not installed: pip install 'pytest-vram[plot]'"
        ) from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    return figure, figure.add_subplot()


def sweep(setup: Setup, over: str, points: int = 8) -> list[tuple[int, Plan]]:
    """Plans for the doublings of the micro-batch or of the sequence, from 1 (or 128) on."""
    start = 1 if over == "batch" else 128
    values = [start << i for i in range(points)]
    rows = []
    for value in values:
        try:
            if over == "batch":
                changed = replace(setup, batch=value)
            else:
                changed = replace(setup, sequence=value)
            rows.append((value, make_plan(changed)))
        except PlanError:  # beyond the model's positions
            break
    if not rows:
        raise Problem(f"nothing to draw over {over}: not even {start} is possible")
    return rows


def draw(setup: Setup, card: Profile | None, file: Path, over: str) -> None:
    """Stacked bills at the peak over batch or sequence, the card's capacity drawn in."""
    figure, axes = _figure(file)
    rows = sweep(setup, over)
    shown = [name for name in BILLS if any(plan.peak_moment.bills[name] for _, plan in rows)]
    places = range(len(rows))
    floor = [0.0] * len(rows)
    for name in shown:
        heights = [plan.peak_moment.bills[name] / GIB for _, plan in rows]
        axes.bar(places, heights, bottom=floor, label=bill_name(name), width=0.7)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    _capacity(axes, card)
    axes.set_xticks(list(places), [f"{value:,}" for value, _ in rows])
    axes.set_xlabel(f"{'micro-batch' if over == 'batch' else 'sequence'}")
    axes.set_ylabel("GiB at the peak")
    axes.set_title(f"{setup.shape.name}, {setup.precision.name}, {setup.optimizer.name}")
    axes.legend(fontsize="small", loc="upper left")
    figure.savefig(file)


def draw_timeline(timeline: Timeline, card: Profile, file: Path) -> None:
    """Bills over the events of a run, reserved memory and the card's capacity drawn in."""
    figure, axes = _figure(file)
    bills: Sequence[str] = list(timeline.bills)
    heights = [[value / GIB for value in timeline.bills[name]] for name in bills]
    if timeline.at:
        axes.stackplot(timeline.at, heights, labels=[bill_name(name) for name in bills])
    reserved = [value / GIB for value in timeline.reserved]
    axes.plot(timeline.at, reserved, color="black", linewidth=0.8, label="reserved")
    top = max(reserved, default=0)
    if card.free / GIB < 3 * top:
        _capacity(axes, card)
    axes.set_xlabel("allocator events")
    axes.set_ylabel("GiB")
    axes.legend(fontsize="small", loc="upper left")
    figure.savefig(file)


def _capacity(axes: Any, card: Profile | None) -> None:
    if card is not None:
        label = f"{card.name}: {card.free / GIB:.1f} GiB"
        axes.axhline(card.free / GIB, color="black", linestyle="--", linewidth=1, label=label)

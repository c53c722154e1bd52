"""A plan as people read it (tables at 80 columns) and as machines do (one dictionary)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pytest_vram.commands.common import bill_name, own_profiles, say, table
from pytest_vram.planning.answers import BILLS, Plan
from pytest_vram.planning.questions import (
    FOR_BILL,
    Cards,
    Fit,
    Remedy,
    Sensitivity,
    blame,
    cards_needed,
)
from pytest_vram.planning.runs import Setup, attention_kernel
from pytest_vram.planning.traffic import offload_traffic
from pytest_vram.quantities import format_bytes, format_change, format_percent
from pytest_vram.sim.profiles import PROFILES

if TYPE_CHECKING:
    from pytest_vram.commands.check import Check


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that one call of ``plan`` found out."""

    plan: Plan
    fit: Fit | None = None
    rescue: tuple[Remedy, ...] = ()
    largest: tuple[str, int] | None = None
    cards: tuple[Cards, ...] = ()
    sensitivity: tuple[Sensitivity, ...] = ()
    other: Plan | None = None
    check: Check | None = None

    def show(self) -> None:
        """Print it."""
        show_plan(self.plan)
        for part in self._parts():
            say()
            part()

    def _parts(self) -> Iterator[Any]:
        if self.fit:
            yield lambda: show_fit(self)
        if self.largest:
            yield self._show_largest
        if self.cards:
            yield lambda: show_cards(self.cards)
        if self.sensitivity:
            yield lambda: show_sensitivity(self.plan, self.sensitivity)
        if self.other:
            yield lambda: show_other(self.plan, self.other)
        if self.check:
            yield self.check.show

    def _show_largest(self) -> None:
        assert self.largest is not None
        assert self.fit is not None
        what, value = self.largest
        name = self.fit.card.name
        if value:
            say(f"The largest {what} that fits on {name} is {value:,}.")
        else:
            say(f"Nothing of it fits on {name}, not even a {what} of 1.")

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable; sizes in bytes."""
        data: dict[str, Any] = plan_dict(self.plan)
        if self.fit:
            data["fit"] = {
                "gpu": self.fit.card.name,
                "memory": self.fit.card.memory,
                "free": self.fit.card.free,
                "verdict": self.fit.verdict,
                "spare": self.fit.spare,
                "blame": blame(self.plan),
            }
            data["rescue"] = [
                {"name": r.name, "peak": r.plan.peak, "verdict": r.verdict, "price": r.price}
                for r in self.rescue
            ]
        if self.largest:
            data["largest"] = {self.largest[0]: self.largest[1]}
        if self.cards:
            data["cards"] = [
                {"gpu": c.card.name, "bare": c.bare, "start": c.start, "prefer": c.prefer}
                for c in self.cards
            ]
        if self.sensitivity:
            data["sensitivity"] = [asdict(row) for row in self.sensitivity]
        if self.other:
            data["versus"] = plan_dict(self.other)
        if self.check:
            data["check"] = self.check.to_dict()
        return data


def plan_dict(plan: Plan) -> dict[str, Any]:
    """One plan; sizes in bytes."""
    data = {
        "model": plan.setup.shape.name,
        "parameters": plan.parameters,
        "trainable": plan.trainable,
        "ranks": plan.setup.parallel.ranks,
        "bills": dict(plan.bills),
        "moments": [{"name": m.name, "total": m.total, **m.bills} for m in plan.moments],
        "textbook": plan.textbook,
        "peak": plan.peak,
        "peak_moment": plan.peak_moment.name,
        "low": plan.low,
        "high": plan.high,
        "assumptions": [asdict(item) for item in plan.assumptions],
        "dominating": plan.dominating.name,
        "notes": list(plan.notes),
    }
    if plan.setup.offload.what:
        traffic = offload_traffic(plan)
        data["offload"] = {"down": traffic.down, "up": traffic.up, "seconds": traffic.seconds}
    return data


def both(size: int) -> str:
    """A size in both units, because the literature mixes them."""
    return f"{format_bytes(size)} ({size / 1e9:,.2f} GB)"


def show_plan(plan: Plan) -> None:
    """Bills at the peak beside the textbook's, the peak, the range."""
    setup = plan.setup
    shape = setup.shape
    trained = "" if plan.trainable == plan.parameters else f", {plan.trainable:,} trained"
    say(f"{shape.name}: {plan.parameters:,} parameters{trained}, {shape.layers} layers")
    say(describe(setup))
    say()
    peak = plan.peak_moment
    rows = [
        (bill_name(name), format_bytes(peak.bills[name]), _textbook(plan, name))
        for name in BILLS
        if peak.bills[name] or plan.bills[name]
    ]
    rows.append(("total", format_bytes(peak.total), format_bytes(plan.textbook)))
    table(
        ("bill, one rank" if setup.parallel.ranks > 1 else "bill", "at the peak", "textbook sum"),
        rows,
    )
    say()
    say(f"Peak: {both(plan.peak)} allocated, {peak.name}.")
    worst = plan.dominating
    say(
        f"Range: {format_bytes(plan.low)} to {format_bytes(plan.high)}; "
        f"what moves it most: {worst.name} ({worst.says})."
    )
    if setup.offload.what:
        traffic = offload_traffic(plan)
        say(
            f"Offload: {both(traffic.total)} over the bus a step, "
            f"{traffic.seconds:.1f} s at {setup.offload.bandwidth / 1e9:g} GB/s if not overlapped."
        )
    for note in plan.notes:
        say(f"Note: {note}")


def _textbook(plan: Plan, name: str) -> str:
    return "-" if name == "temporary" else format_bytes(plan.bills[name])


def describe(setup: Setup) -> str:
    """The run in one line."""
    parts = [f"batch {setup.batch}", f"sequence {setup.tokens}"]
    if setup.accumulation > 1:
        parts.append(f"accumulation {setup.accumulation}")
    parts += [setup.precision.name, setup.optimizer.name, f"{attention_kernel(setup)} attention"]
    if setup.recompute.kind != "none":
        parts.append(f"recompute {setup.recompute}")
    if setup.lora:
        parts.append(f"LoRA rank {setup.lora.rank} on {','.join(setup.lora.targets)}")
    if setup.quantisation:
        parts.append(setup.quantisation)
    parallel = setup.parallel
    for name in ("data", "tensor", "context", "pipeline", "expert"):
        if getattr(parallel, name) > 1:
            parts.append(f"{name} {getattr(parallel, name)}")
    if parallel.zero:
        parts.append(f"ZeRO-{parallel.zero}")
    if setup.offload.what:
        parts.append(f"offload {'+'.join(sorted(setup.offload.what))}")
    return ", ".join(parts)


def show_fit(answer: Answer) -> None:
    """The verdict on one card; if it does not fit, the bill to blame and what helps."""
    fit, plan = answer.fit, answer.plan
    assert fit is not None
    room = f"{fit.card.name} has {format_bytes(fit.card.free)} for PyTorch"
    if fit.verdict == "yes":
        say(f"Fits: {room}, {format_bytes(fit.spare)} to spare at the expected peak.")
        return
    if fit.verdict == "tight":
        say(
            f"Too close to tell: {room}, the peak is between {format_bytes(plan.low)} and "
            f"{format_bytes(plan.high)}. It depends on {plan.dominating.name}; simulate it."
        )
        return
    say(f"Does not fit: {room}, {format_bytes(-fit.spare)} are missing.")
    bill = blame(plan)
    say(f"The bill to blame is {bill_name(bill)}: {FOR_BILL[bill]}.")
    if answer.rescue:
        say()
        rows = [
            (f"+ {r.name}", format_bytes(r.plan.peak), r.verdict, r.price) for r in answer.rescue
        ]
        _rescue_table(rows)


def _rescue_table(rows: Sequence[tuple[str, ...]]) -> None:
    from rich.table import Table

    from pytest_vram.commands.common import console

    made = Table(box=None, pad_edge=False)
    made.add_column("cheapest first, each on top of the last", overflow="fold")
    made.add_column("peak", justify="right", no_wrap=True)
    made.add_column("fits", no_wrap=True)
    made.add_column("price", overflow="fold")
    for row in rows:
        made.add_row(*row)
    console().print(made)


def all_cards(setup: Setup) -> tuple[Cards, ...]:
    """How many of every known card."""
    return tuple(
        cards_needed(setup, card, limit=1024) for card in (*PROFILES.values(), *own_profiles())
    )


def show_cards(cards: tuple[Cards, ...]) -> None:
    def count(value: int) -> str:
        return str(value) if value else "-"

    rows = [
        (c.card.name, format_bytes(c.card.memory), str(c.bare), count(c.start), count(c.prefer))
        for c in cards
    ]
    table(("card", "memory", "bare sum", "start with", "prefer"), rows)
    say(
        "bare sum: everything divides. start with: ZeRO-3, activations and gathered layers on "
        "every card, 10 % free. prefer: 30 % free. -: no number of cards, one sample's "
        "activations are too large."
    )


def show_sensitivity(plan: Plan, rows: tuple[Sensitivity, ...]) -> None:
    table(
        ("change", "peak", "difference", ""),
        [
            (
                row.name,
                format_bytes(row.peak),
                format_change(row.change, row.peak),
                format_percent(row.change, plan.peak),
            )
            for row in rows
        ],
    )


def show_other(plan: Plan, other: Plan) -> None:
    """Two configurations side by side, bill by bill."""
    say(f"versus: {other.setup.shape.name}, {describe(other.setup)}")
    say()
    ours, theirs = plan.peak_moment.bills, other.peak_moment.bills
    rows = [
        (
            bill_name(name),
            format_bytes(ours[name]),
            format_bytes(theirs[name]),
            format_change(theirs[name] - ours[name], max(theirs[name], ours[name])),
        )
        for name in BILLS
        if ours[name] or theirs[name]
    ]
    change = other.peak - plan.peak
    rows.append(
        (
            "total",
            format_bytes(plan.peak),
            format_bytes(other.peak),
            format_change(change, other.peak),
        )
    )
    table(("bill at the peak", "this", "versus", "change"), rows)

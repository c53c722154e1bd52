"""Verdict: what is wrong with one marked test's memory, as findings with figures and sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from pytest_vram.baseline_text import Record
from pytest_vram.comparison import Change, Comparison, arrivals, compare
from pytest_vram.environment import Environment, nearest
from pytest_vram.findings import KINDS, Finding, Severity
from pytest_vram.ledger import Ledger, Live, Moment
from pytest_vram.marker import Budget
from pytest_vram.quantities import format_bytes, format_change, format_percent, format_share
from pytest_vram.tables import (
    SHOWN,
    allocations,
    baseline_table,
    largest_table,
    listed,
    moment_table,
    two_ledgers,
)
from pytest_vram.uncertain import format_interval, interval_lines, within_but_uncertain

#: The cheapest remedy for the bill that weighs most (memory-planning literature's order).
REMEDIES: Mapping[str, str] = {
    "activations": "a smaller micro-batch with gradient accumulation, or activation checkpointing",
    "optimizer_state": "an 8-bit optimizer, offload or sharding (ZeRO-1)",
    "master_weights": "sharding or offload of the fp32 master weights (ZeRO-1)",
    "gradients": "sharding gradients (ZeRO-2), or LoRA: frozen weights have none",
    "parameters": "sharding parameters (ZeRO-3/FSDP), lower-precision weights, or QLoRA",
    "inputs": "a smaller batch, or moving inputs one micro-batch at a time",
    "temporary": "foreach=False or fused=True in the optimizer",
    "workspace": "a smaller CUBLAS_WORKSPACE_CONFIG",
    "autocast_cache": "torch.autocast(..., cache_enabled=False), or leaving autocast each step",
}
#: A share of reserved memory that nobody uses, above which fragmentation is worth a hint.
_FRAGMENTED = 0.15


def judge_memory(
    ledger: Ledger,
    budget: Budget,
    environment: Environment,
    *,
    stored: Mapping[str, Record],
    now: Record,
    estimate: Ledger | None = None,
    held: int = 0,
    complete: bool = True,
    optimizers: bool = True,
    strict: bool = False,
    update: frozenset[str] = frozenset(),
) -> tuple[Finding, ...]:
    """Everything the figures say about one test, in the order of ``findings.KINDS``.

    ``stored`` are the baselines of this test by environment key, ``now`` its new record, ``held``
    the bytes that fixtures and the test's instance still own after the test. ``complete`` is false
    where the test body ended early: what is alive then is not a leak. ``optimizers``: whether the
    test made any, so that it was meant to train.
    """
    findings: list[Finding] = []
    findings += over_budget(ledger, budget)
    findings += within_but_uncertain(ledger, budget, strict)
    before = stored.get(environment.key)
    if before is not None:
        comparison = compare(before, now, budget.baseline)
        findings += against_baseline(ledger, before, comparison, budget, strict, update)
    else:
        findings += no_baseline(environment, stored, now, strict, update)
    if estimate is not None:
        findings += unexplained(ledger, estimate, budget)
    findings += leaking_steps(ledger, budget)
    if complete:
        findings += survivors(ledger, budget, held)
    if ledger.peak_allocated == 0:
        findings.append(nothing_allocated(ledger))
    elif not ledger.steps or not _trained(ledger):
        findings.append(never_trained(strict, optimizers))
    return in_order(findings)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Failures first, then warnings, then notes; each in the order of ``findings.KINDS``."""
    severities = ("fail", "warn", "note")
    return tuple(
        sorted(
            findings,
            key=lambda found: (
                severities.index(found.severity),
                KINDS.index(found.kind) if found.kind in KINDS else len(KINDS),
            ),
        )
    )


def _trained(ledger: Ledger) -> bool:
    return any("backward" in step.phases or "optimizer" in step.phases for step in ledger.steps)


# ---- ceilings


def over_budget(ledger: Ledger, budget: Budget) -> list[Finding]:
    found = []
    for name, ceiling, size in (
        ("peak allocated", budget.peak, ledger.peak_allocated),
        ("peak reserved", budget.reserved, ledger.peak_reserved),
    ):
        if ceiling is None or size <= ceiling:
            continue
        details = [*moment_table(ledger.peak), *largest_table(ledger.largest)]
        if name == "peak reserved":
            details.insert(0, f"cached but unused at that moment: {format_bytes(ledger.cached)}")
        details += interval_lines(ledger)
        found.append(
            Finding(
                "over-budget",
                "fail",
                f"VRAM over budget: {name} {format_bytes(size)}, budget {format_bytes(ceiling)}, "
                f"{format_change(size - ceiling, size)} ({_exactly(size, ceiling)})",
                tuple(details),
                hint=_remedy(ledger.peak, ledger if name == "peak reserved" else None),
                data={"figure": name.replace(" ", "_"), "bytes": size, "budget": ceiling},
            )
        )
    return found


def _exactly(size: int, ceiling: int) -> str:
    """Exact bytes where the rounded figures would look equal."""
    if format_bytes(size) == format_bytes(ceiling):
        return f"exactly {size} of {ceiling} bytes"
    share = format_share(size, ceiling)
    return f"{share} of the budget" if share.endswith("%") else f"{share} the budget"


def _remedy(moment: Moment, fragmented: Ledger | None = None) -> str:
    if fragmented is not None and fragmented.cached > _FRAGMENTED * fragmented.peak_reserved:
        return (
            "much of it is cached and unused (fragmentation): "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or max_split_size_mb"
        )
    if not moment.bills:
        return ""
    bill, size = max(moment.bills.items(), key=lambda pair: pair[1])
    remedy = REMEDIES.get(bill)
    if bill == "temporary" and moment.phase != "optimizer":
        remedy = "computing the largest of them in smaller pieces"
    if remedy is None:
        return ""
    share = 100 * size / moment.allocated
    return f"most of it ({share:.0f} %) is {bill.replace('_', ' ')}: {remedy}"


def out_of_memory(ledger: Ledger, device: str) -> Finding:
    """The failed allocation of a test that ended by it."""
    failure = ledger.failure
    if failure is None:
        raise ValueError("this ledger saw no failed allocation")
    moment = failure.moment
    where = [part for part in (failure.operator, failure.module, failure.frame) if part]
    details = [f"asked for by {'  '.join(where)}"] if where else []
    details += [*moment_table(moment), *largest_table(moment.largest)]
    fragmented = failure.cached >= failure.requested
    left = f"{format_bytes(failure.free)} free of {format_bytes(failure.capacity)} on {device}"
    if failure.allowed is not None:
        unused = max(0, failure.allowed - moment.allocated - failure.cached)
        left = (
            f"{format_bytes(unused)} left of the {format_bytes(failure.allowed)} that "
            f"set_per_process_memory_fraction allows, {left}"
        )
    return Finding(
        "out-of-memory",
        "fail",
        f"VRAM out of memory: {format_bytes(failure.requested)} asked for, {left}: "
        f"{format_bytes(moment.allocated)} allocated, {format_bytes(failure.cached)} cached and "
        f"unused ({moment})",
        tuple(details),
        hint=(
            "enough is cached, but in pieces (fragmentation): "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            if fragmented
            else _remedy(moment)
        ),
        data={
            "requested": failure.requested,
            "free": failure.free,
            "cached": failure.cached,
            "capacity": failure.capacity,
            "allowed": failure.allowed,
            "allocated": moment.allocated,
        },
    )


# ---- baseline


def against_baseline(
    ledger: Ledger,
    before: Record,
    comparison: Comparison,
    budget: Budget,
    strict: bool,
    update: frozenset[str],
) -> list[Finding]:
    if comparison.grown:
        recording = "changed" in update
        return [_regression(ledger, before, comparison, budget, "note" if recording else "fail")]
    if comparison.shrunk:
        recording = bool(update & {"changed", "tighten"})
        severity: Severity = "note" if recording else "fail" if strict else "warn"
        return [_improvement(comparison, severity, recording)]
    return []


def _regression(
    ledger: Ledger, before: Record, comparison: Comparison, budget: Budget, severity: Severity
) -> Finding:
    first = comparison.grown[0]
    allowed = budget.baseline
    details = [f"also grown: {change.title} {_figures(change)}" for change in _others(comparison)]
    details += baseline_table(before, ledger, comparison)
    details += _arrivals(before, ledger)
    details += _circumstances(comparison)
    return Finding(
        "regression",
        severity,
        f"VRAM regression: {first.title} {format_bytes(first.now)}, "
        f"baseline {format_bytes(first.before)}, {_growth(first)}"
        + (f", allowed {allowed})" if severity == "fail" else "; recorded as the new baseline)"),
        tuple(details),
        hint="if this is meant: pytest --vram-update" if severity == "fail" else "",
        data={"changes": [_data(change) for change in comparison.changes]},
    )


def _others(comparison: Comparison) -> list[Change]:
    """Grown figures that neither the headline nor the table of bills shows."""
    first, *rest = comparison.grown
    shown = {"bills"} if comparison.same_moment else set()
    if first.name == "peak_allocated":
        # The phase of the peak has grown by the same bytes.
        rest = [change for change in rest if (change.group, change.now) != ("phases", first.now)]
    return [change for change in rest if change.group not in shown][:SHOWN]


def _improvement(comparison: Comparison, severity: Severity, recording: bool) -> Finding:
    first = comparison.shrunk[0]
    others = [f"{change.title} {_figures(change)}" for change in comparison.shrunk[1:SHOWN]]
    return Finding(
        "improvement",
        severity,
        f"VRAM improvement: {first.title} {format_bytes(first.now)}, "
        f"baseline {format_bytes(first.before)}, {_growth(first)}"
        + ("; recorded as the new baseline)" if recording else ")"),
        (*(f"also less: {line}" for line in others), *_circumstances(comparison)),
        hint="" if recording else "tighten the baseline with pytest --vram-update",
        data={"changes": [_data(change) for change in comparison.changes]},
    )


def _growth(change: Change) -> str:
    """``+0.44 GiB (+23.5 %``: the caller closes the bracket."""
    return (
        f"{format_change(change.growth, change.now)} "
        f"({format_percent(change.growth, change.before)}"
    )


def _figures(change: Change) -> str:
    return f"{format_bytes(change.now)}, was {format_bytes(change.before)}, {_growth(change)})"


def _data(change: Change) -> dict[str, object]:
    name = f"{change.group}.{change.name}" if change.group else change.name
    return {"figure": name, "before": change.before, "now": change.now}


def _arrivals(before: Record, ledger: Ledger) -> list[str]:
    if not before.get("largest"):
        return []
    found = [arrival for arrival in arrivals(before, ledger) if arrival.growth > 0][:SHOWN]
    if not found:
        return []
    return [
        "new or larger allocations alive at the peak",
        *allocations((f"+{format_bytes(arrival.growth)}", arrival.live) for arrival in found),
    ]


def _circumstances(comparison: Comparison) -> list[str]:
    lines = []
    if comparison.phases_only_before or comparison.phases_only_now:
        gone = [f"without {name}" for name in comparison.phases_only_before]
        new = [f"new {name}" for name in comparison.phases_only_now]
        lines.append(f"phases: {', '.join([*gone, *new])} (not compared)")
    if comparison.versions:
        lines.append(
            f"environment: {', '.join(comparison.versions)} "
            "(changed since the baseline was recorded)"
        )
    return lines


def no_baseline(
    environment: Environment,
    stored: Mapping[str, Record],
    now: Record,
    strict: bool,
    update: frozenset[str],
) -> list[Finding]:
    if "new" in update:
        return []
    details = []
    if (other := nearest(environment.key, list(stored))) is not None:
        figure = stored[other].get("peak_allocated")
        if figure is not None:
            change = now["peak_allocated"] - figure
            details.append(
                f"for information: {other} has a peak of {format_bytes(figure)} "
                f"({format_percent(change, figure)} here)"
            )
    return [
        Finding(
            "no-baseline",
            "fail" if strict else "note",
            f"no VRAM baseline for {environment.key}",
            tuple(details),
            hint="pytest --vram-update records it",
            data={"environment": environment.key, "stored": sorted(stored)},
        )
    ]


# ---- estimate


def unexplained(ledger: Ledger, estimate: Ledger, budget: Budget) -> list[Finding]:
    now, expected = ledger.peak_allocated, estimate.peak_allocated
    low, high = estimate.allocated_interval
    beyond = now - low if now < low else 0 if high is None else max(now - high, 0)
    if not budget.estimate.exceeded(beyond, expected):
        return []
    below = now < expected
    return [
        Finding(
            "unexplained",
            "fail",
            f"VRAM unexplained: measured peak {format_bytes(now)}, "
            f"estimate {format_bytes(expected)}"
            f"{f' ({format_interval((low, high))})' if estimate.bounds else ''}, "
            f"{format_change(now - expected, now)} "
            f"({format_percent(now - expected, expected)}, allowed {budget.estimate})",
            tuple(two_ledgers("estimate", estimate.peak, "measured", ledger.peak)),
            hint=(
                "far less than expected usually means that part of the model was not trained: "
                "are gradients missing?"
                if below
                else "the simulation does not know something this card does: see which line grew"
            ),
            data={"measured": now, "estimate": expected},
        )
    ]


# ---- leaks


def leaking_steps(ledger: Ledger, budget: Budget) -> list[Finding]:
    """Growth by more than the allowance in every one of the last two or three steps. The first
    step is not judged: optimizer states arrive with it, or later where steps were skipped."""
    lives = [step.live for step in ledger.steps]
    growths = [after - before for before, after in pairwise(lives)]
    last = growths[-3:] if len(growths) >= 4 else growths[-2:]
    if len(last) < 2 or any(growth <= budget.growth for growth in last):
        return []
    shown = ledger.steps[-len(last) - 1 :]
    return [
        Finding(
            "leak",
            "fail",
            f"VRAM leak: at least {format_bytes(min(last))} more stay alive after every step "
            f"(allowed {format_bytes(budget.growth)} a step)",
            (
                *listed(
                    "alive after step",
                    [f"{step.number}: {format_bytes(step.live)}" for step in shown],
                ),
                *largest_table(_suspects(ledger.end)),
            ),
            hint="something keeps tensors of past steps: a list of losses that are not detached, "
            "hooks, a cache",
            data={"growth": last, "allowed": budget.growth},
        )
    ]


_OWNED = ("parameters", "gradients", "optimizer_state", "master_weights", "buffers", "workspace")


def _suspects(moment: Moment) -> tuple[Live, ...]:
    return tuple(live for live in moment.largest if live.bill not in _OWNED)


def survivors(ledger: Ledger, budget: Budget, held: int) -> list[Finding]:
    """What is alive after the test body returned and garbage was collected. Workspaces stay with
    their library for good; ``held`` belongs to fixtures."""
    alive = ledger.end.allocated - ledger.end.bills.get("workspace", 0)
    kept = alive - held
    if kept <= budget.growth:
        return []
    owners = {bill: size for bill, size in ledger.end.bills.items() if bill != "workspace"}
    lines = [f"{bill.replace('_', ' ')} {format_bytes(size)}" for bill, size in owners.items()]
    if held:
        lines[-1] += f"; of these {format_bytes(held)} belong to fixtures"
    return [
        Finding(
            "leak",
            "fail",
            f"VRAM leak: {format_bytes(kept)} survive the test, after garbage collection "
            f"(allowed {format_bytes(budget.growth)})",
            (
                *listed("alive:", lines),
                *largest_table(
                    tuple(live for live in ledger.end.largest if live.bill != "workspace")
                ),
            ),
            hint="a global, a class attribute or a cache holds them",
            data={"bytes": kept, "held": held},
        )
    ]


# ---- what could not be judged


def nothing_allocated(ledger: Ledger) -> Finding:
    return Finding(
        "not-checked",
        "fail",
        f"VRAM not checked: the test allocated nothing on {ledger.device}, so there is nothing to "
        "hold against a budget",
        hint="move model and inputs with .to(vram.device) or .cuda() inside the test",
        data={"reason": "nothing allocated"},
    )


def never_trained(strict: bool, optimizers: bool) -> Finding:
    """A test without an optimizer is about a forward, or memory alone: worth a note only."""
    return Finding(
        "not-checked",
        ("fail" if strict else "warn") if optimizers else "note",
        "VRAM: the test never trained (no backward and no optimizer step were seen); only its "
        "memory was checked",
        hint="call vram.train(...), or step an optimizer",
        data={"reason": "never trained"},
    )

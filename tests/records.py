"""Records and reports written by hand, for tests that need no device and no run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from traces import A100, training

from pytest_vram.comparison import record_of
from pytest_vram.environment import Environment
from pytest_vram.ledger import Ledger
from pytest_vram.marker import Budget
from pytest_vram.record import PassRecord, ScalerStep, TestRecord
from pytest_vram.reports.model import Report
from pytest_vram.timeline import Timeline
from pytest_vram.verdict import in_order, judge_memory

#: Test ids as an attacker who may open a pull request would choose them.
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><script>alert(2)</script>",
    "<!--<script>",
    "a|b`c``d",
    "[x](https://evil.example) @everyone #1",
    "```\n::error::x\r\n%0A",
    "\u202eevil\u2066\x1b[31m",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;\\|",
    "=cmd|' /C calc'!A0",
)


def record(
    name: str = "test_it",
    *,
    budget: Budget | None = None,
    environment: Environment = A100,
    baseline: dict[str, Any] | None = None,
    scaler: Iterable[ScalerStep] = (),
    outcome: str = "",
    losses: tuple[float, ...] = (),
    measured: bool = False,
    **script: int,
) -> TestRecord:
    """One judged test of ``traces.training``. ``baseline``: the script of what is stored."""
    trace = training(**script).trace()
    ledger = Ledger.from_trace(trace)
    estimate = training().ledger() if measured else None
    budget = budget or Budget()
    stored = None
    if baseline is not None:
        stored = record_of(training(**baseline).ledger(), environment)
    findings = judge_memory(
        ledger,
        budget,
        environment,
        stored={environment.key: stored} if stored is not None else {},
        now=record_of(ledger, environment),
        estimate=estimate,
        held=0,
        complete=True,
        strict=False,
        update=frozenset(),
    )
    failed = any(found.severity == "fail" for found in findings)
    return TestRecord(
        nodeid=f"tests/test_a.py::{name}",
        file="tests/test_a.py",
        line=3,
        budget=budget,
        environment=environment,
        answered="measured" if measured else "simulated",
        ledger=ledger,
        estimate=estimate,
        stored=stored,
        numerics="cpu",
        scaler=tuple(scaler),
        losses=losses,
        findings=in_order(findings),
        passes=(PassRecord("simulation", "a100-80gb (simulated)", 0.25),),
        timeline=Timeline.from_trace(trace),
        outcome=outcome or ("failed" if failed else "passed"),
    )


def report(*records: TestRecord, **more: Any) -> Report:
    return Report(tuple(records), **{"created": "2026-01-02T03:04:05+00:00", **more})

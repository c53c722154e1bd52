from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import A100, MIB, Script, training

from pytest_vram.comparison import record_of
from pytest_vram.findings import Finding
from pytest_vram.marker import Budget, read_budget
from pytest_vram.record import PassRecord, ScalerStep, TestRecord
from pytest_vram.timeline import Timeline


def record(**more: Any) -> TestRecord:
    script = more.pop("script", training())
    ledger = script.ledger()
    return TestRecord(
        **{
            "nodeid": "tests/test_a.py::test_x",
            "file": "tests/test_a.py",
            "line": 7,
            "budget": Budget(peak=100 * MIB),
            "environment": A100,
            "answered": "simulated",
            "ledger": ledger,
            "numerics": "cpu",
            "timeline": Timeline.from_trace(script.trace()),
            "outcome": "passed",
            **more,
        }
    )


def test_round_trip_through_json() -> None:
    made = record(
        budget=read_budget([{"peak": "1 GiB", "baseline": "1%", "gpu": "t4"}]),
        estimate=training(steps=1).ledger(),
        stored=record_of(training().ledger(), A100),
        scaler=(ScalerStep(1, 65536.0, 32768.0, True),),
        losses=(0.5, 0.25),
        findings=(Finding("leak", "fail", "a", ("b",), "c", {"d": 1}),),
        notes=("n",),
        passes=(PassRecord("simulation", "t4", 0.5, "AssertionError"),),
    )
    raw = json.loads(json.dumps(made.to_dict()))
    assert TestRecord.from_dict(raw) == made


def test_another_schema_is_refused() -> None:
    raw = {**record().to_dict(), "schema": 99}
    with pytest.raises(ValueError, match="schema 99: this pytest-vram reads 1"):
        TestRecord.from_dict(raw)


def test_verdicts() -> None:
    warn, fail = Finding("improvement", "warn", ""), Finding("leak", "fail", "")
    note = Finding("no-baseline", "note", "")
    assert record(findings=(note,)).verdict == "ok"
    assert record(findings=(warn, note)).verdict == "improvement"
    assert record(findings=(fail, warn)).verdict == "leak"
    assert record(outcome="failed").verdict == "failed"


# ---- timeline


def test_a_short_timeline_has_every_event() -> None:
    timeline = Timeline.from_trace(training(steps=1).trace())
    assert timeline.at == tuple(range(timeline.events))
    assert [(mark.name, mark.step) for mark in timeline.marks] == [
        ("setup", 0),
        ("forward", 1),
        ("backward", 1),
        ("optimizer", 1),
        ("between", 1),
    ]
    largest = max(timeline.spans, key=lambda span: span.live.size)
    assert (largest.live.bill, largest.live.size) == ("activations", 30 * MIB)


@st.composite
def traces(draw: st.DrawFn) -> Script:
    script, live = Script(), []
    for _ in range(draw(st.integers(0, 60))):
        if live and draw(st.booleans()):
            script.give(live.pop(draw(st.integers(0, len(live) - 1))))
        else:
            live.append(script.take(draw(st.sampled_from(["buffers", "inputs"])), draw(SIZES)))
    return script


SIZES = st.integers(1, 1000)


@given(traces(), st.integers(1, 20))
def test_the_peak_is_always_among_the_samples(script: Script, points: int) -> None:
    trace = script.trace()
    timeline = Timeline.from_trace(trace, points=points)
    sums = [sum(sizes) for sizes in zip(*timeline.bills.values(), strict=True)]
    assert max(sums, default=0) == script.ledger().peak_allocated
    assert len(timeline.at) <= max(points, 0) or not trace.events
    walked = [allocated for _, _, allocated, _ in trace.walk()]
    assert sums == [walked[at] for at in timeline.at] or not sums


def test_a_record_of_a_long_run_stays_small() -> None:
    script = training(steps=2000)
    text = json.dumps(replace(record(script=script), ledger=None).to_dict())
    # The marks of every step remain; the samples do not grow.
    assert len(Timeline.from_trace(script.trace()).at) <= 240
    assert len(text) < 800_000

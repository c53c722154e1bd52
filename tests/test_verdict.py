from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from traces import A100, MIB, Script, training

from pytest_vram.comparison import record_of
from pytest_vram.findings import Finding
from pytest_vram.ledger import Ledger
from pytest_vram.marker import Budget
from pytest_vram.trace import Event, OutOfMemory
from pytest_vram.verdict import judge_memory, out_of_memory

NEWER = replace(A100, versions={"torch": "2.13.1", "transformers": "5.1.0"})


def judge(ledger: Ledger, budget: Budget | None = None, **more: Any) -> tuple[Finding, ...]:
    environment = more.pop("environment", A100)
    more.setdefault("stored", {})
    return judge_memory(
        ledger, budget or Budget(), environment, now=record_of(ledger, environment), **more
    )


def kinds(findings: tuple[Finding, ...]) -> list[tuple[str, str]]:
    return [(found.kind, found.severity) for found in findings]


def baseline(script: Script) -> dict[str, Any]:
    return {A100.key: record_of(script.ledger(), A100)}


def test_nothing_to_say() -> None:
    script = training()
    assert judge(script.ledger(), Budget(peak=70 * MIB), stored=baseline(script)) == ()


def test_over_budget() -> None:
    (found,) = judge(training().ledger(), Budget(peak=64 * MIB), stored=baseline(training()))
    assert found.text() == (
        "VRAM over budget: peak allocated 70.0 MiB, budget 64.0 MiB, +6.0 MiB "
        "(109 % of the budget)\n"
        "  alive then (backward, step 2): 70.0 MiB\n"
        "    parameters       10.0 MiB  14 %\n"
        "    gradients        10.0 MiB  14 %\n"
        "    optimizer state  20.0 MiB  29 %\n"
        "    activations      30.0 MiB  43 %\n"
        "  largest allocations\n"
        "    30.0 MiB  float16[3, 10]   aten::mm  lm.h  train.py:41 forward\n"
        "    20.0 MiB  optimizer state\n"
        "    10.0 MiB  float32[5, 2]    weight\n"
        "    10.0 MiB  gradients\n"
        "  hint: most of it (43 %) is activations: a smaller micro-batch with gradient "
        "accumulation, or activation checkpointing"
    )


def test_over_budget_by_less_than_is_shown() -> None:
    (found,) = judge(training().ledger(), Budget(peak=70 * MIB - 1), stored=baseline(training()))
    assert found.sentence == (
        "VRAM over budget: peak allocated 70.0 MiB, budget 70.0 MiB, +1 B "
        "(exactly 73400320 of 73400319 bytes)"
    )


def test_over_the_reserved_budget_because_of_fragments() -> None:
    script = training()
    script.reserve(100 * MIB)
    (found,) = judge(script.ledger(), Budget(reserved=100 * MIB), stored=baseline(script))
    assert found.sentence == (
        "VRAM over budget: peak reserved 180.0 MiB, budget 100.0 MiB, +80.0 MiB "
        "(180 % of the budget)"
    )
    assert "expandable_segments:True" in found.hint


def test_regression_names_the_tensor() -> None:
    findings = judge(
        training(logits=8 * MIB, line=57).ledger(), stored=baseline(training()), environment=NEWER
    )
    assert kinds(findings) == [("regression", "fail")]
    assert findings[0].text() == (
        "VRAM regression: peak allocated 78.0 MiB, baseline 70.0 MiB, "
        "+8.0 MiB (+11.4 %, allowed 2 % + 1 MiB)\n"
        "  also grown: peak reserved 88.0 MiB, was 80.0 MiB, +8.0 MiB (+10.0 %)\n"
        "  also grown: peak of forward 68.0 MiB, was 60.0 MiB, +8.0 MiB (+13.3 %)\n"
        "  at the peak (backward, step 2)  baseline       now    change\n"
        "    parameters                    10.0 MiB  10.0 MiB\n"
        "    gradients                     10.0 MiB  10.0 MiB\n"
        "    optimizer state               20.0 MiB  20.0 MiB\n"
        "    activations                   30.0 MiB  38.0 MiB  +8.0 MiB  <--\n"
        "  new or larger allocations alive at the peak\n"
        "    +8.0 MiB  float32[7]  aten::_to_copy  lm.head  loss.py:9 loss\n"
        "  environment: torch 2.13.0 -> 2.13.1 (changed since the baseline was recorded)\n"
        "  hint: if this is meant: pytest --vram-update"
    )


def test_both_parts_of_the_tolerance_must_be_exceeded() -> None:
    stored = baseline(training())
    assert judge(training(saved=31 * MIB).ledger(), stored=stored) == ()  # just 1 MiB
    grown = training(saved=31 * MIB + 512).ledger()
    assert kinds(judge(grown, stored=stored)) == [("regression", "fail")]
    generous = Budget(baseline=replace(Budget().baseline, floor=2 * MIB))
    assert judge(grown, generous, stored=stored) == ()


def test_a_regression_that_leaves_the_peak_alone() -> None:
    """Live bytes after the step grow, and the optimizer phase, but not the peak."""
    script = training(steps=1, leak=5 * MIB)
    findings = judge(script.ledger(), stored=baseline(training(steps=1)), complete=False)
    assert kinds(findings) == [("regression", "fail")]
    assert findings[0].sentence == (
        "VRAM regression: live after the step 35.0 MiB, baseline 30.0 MiB, "
        "+5.0 MiB (+16.7 %, allowed 2 % + 1 MiB)"
    )


def test_bills_of_different_moments_are_not_compared() -> None:
    """Fewer activations move the peak into the optimizer, where temporaries are alive: better."""
    script = training(saved=1 * MIB)
    (found,) = judge(script.ledger(), stored=baseline(training()))
    assert (found.kind, found.severity) == ("improvement", "warn")
    assert found.sentence == (
        "VRAM improvement: peak allocated 41.0 MiB, baseline 70.0 MiB, -29.0 MiB (-41.4 %)"
    )
    assert found.hint == "tighten the baseline with pytest --vram-update"


def test_improvements_fail_when_strict() -> None:
    findings = judge(training(saved=20 * MIB).ledger(), stored=baseline(training()), strict=True)
    assert kinds(findings) == [("improvement", "fail")]


@pytest.mark.parametrize(
    ("update", "grown", "shrunk"),
    [
        ({"new", "changed"}, "note", "note"),
        ({"tighten"}, "fail", "note"),
        ({"new"}, "fail", "warn"),
    ],
)
def test_what_an_update_records_does_not_fail(update: set[str], grown: str, shrunk: str) -> None:
    more = {"stored": baseline(training()), "update": frozenset(update)}
    assert kinds(judge(training(saved=40 * MIB).ledger(), **more)) == [("regression", grown)]
    assert kinds(judge(training(saved=20 * MIB).ledger(), **more)) == [("improvement", shrunk)]


def test_no_baseline_with_the_nearest_for_information() -> None:
    ledger = training().ledger()
    assert kinds(judge(ledger)) == [("no-baseline", "note")]
    assert kinds(judge(ledger, strict=True)) == [("no-baseline", "fail")]
    assert judge(ledger, strict=True, update=frozenset({"new"})) == ()
    other = {"sim/a100-80gb/torch-2.12": record_of(training(saved=25 * MIB).ledger(), A100)}
    (found,) = judge(ledger, stored=other)
    assert found.text() == (
        "no VRAM baseline for sim/a100-80gb/torch-2.13\n"
        "  for information: sim/a100-80gb/torch-2.12 has a peak of 65.0 MiB (+7.7 % here)\n"
        "  hint: pytest --vram-update records it"
    )


def test_unexplained_either_way() -> None:
    ledger, stored = training().ledger(), baseline(training())
    more = training(saved=60 * MIB).ledger()
    (found,) = judge(ledger, stored=stored, estimate=more)
    assert found.sentence == (
        "VRAM unexplained: measured peak 70.0 MiB, estimate 100.0 MiB, "
        "-30.0 MiB (-30.0 %, allowed 5 % + 16 MiB)"
    )
    assert "are gradients missing?" in found.hint
    assert judge(ledger, stored=stored, estimate=training(saved=45 * MIB).ledger()) == ()
    (found,) = judge(ledger, stored=stored, estimate=training(saved=9 * MIB).ledger())
    assert found.kind == "unexplained"


def test_leak_by_slope() -> None:
    script = training(steps=4, leak=65 * 1024)
    findings = judge(script.ledger(), stored=baseline(script), complete=False)
    assert kinds(findings) == [("leak", "fail")]
    assert findings[0].sentence == (
        "VRAM leak: at least 65.0 KiB more stay alive after every step (allowed 64.0 KiB a step)"
    )
    assert findings[0].details[0] == ("alive after step 2: 30.1 MiB, 3: 30.2 MiB, 4: 30.3 MiB")
    allowed = training(steps=4, leak=64 * 1024)
    assert judge(allowed.ledger(), stored=baseline(allowed), complete=False) == ()


def test_late_optimizer_states_are_no_leak() -> None:
    """Skipped fp16 steps move the allocation of optimizer states to a later step."""
    script = training(steps=2)
    script.phase("optimizer", 3)
    script.take("optimizer_state", 40 * MIB)
    script.phase("optimizer", 4)
    ledger = script.ledger()
    assert [step.live for step in ledger.steps] == [30 * MIB, 30 * MIB, 40 * MIB, 40 * MIB]
    assert judge(ledger, stored=baseline(script), complete=False) == ()


def test_survivors_without_what_fixtures_hold_and_workspaces() -> None:
    script = training()
    script.take("workspace", 8 * MIB)
    script.take("activations", 3 * MIB, shape=(3,), dtype="int8", frame="test.py:5 keep")
    ledger, stored = script.ledger(), baseline(script)
    (found,) = judge(ledger, stored=stored, held=1 * MIB)
    assert found.text() == (
        "VRAM leak: 2.0 MiB survive the test, after garbage collection (allowed 64.0 KiB)\n"
        "  alive: activations 3.0 MiB; of these 1.0 MiB belong to fixtures\n"
        "  largest allocations\n"
        "    3.0 MiB  int8[3]  test.py:5 keep\n"
        "  hint: a global, a class attribute or a cache holds them"
    )
    assert judge(ledger, stored=stored, held=3 * MIB) == ()


def test_nothing_allocated_is_never_a_silent_pass() -> None:
    (found, _) = judge(Script().ledger(device="NVIDIA T4"), Budget(peak=1 * MIB))
    assert (found.kind, found.severity) == ("not-checked", "fail")
    assert found.sentence == (
        "VRAM not checked: the test allocated nothing on NVIDIA T4, so there is nothing to hold "
        "against a budget"
    )


def test_never_trained() -> None:
    script = Script()
    script.phase("forward", 1)
    script.give(script.take("activations", 5 * MIB))
    findings = judge(script.ledger(), stored=baseline(script))
    assert kinds(findings) == [("not-checked", "warn")]
    assert "never trained" in findings[0].sentence
    assert kinds(judge(script.ledger(), stored=baseline(script), strict=True)) == [
        ("not-checked", "fail")
    ]
    forward = judge(script.ledger(), stored=baseline(script), strict=True, optimizers=False)
    assert kinds(forward) == [("not-checked", "note")]


def test_out_of_memory() -> None:
    script = training(steps=1)
    script.phase("forward", 2)
    script.take("activations", 5 * MIB)
    script.events.append(Event("oom", size=40 * MIB))
    oom = OutOfMemory(
        40 * MIB, 5 * MIB, 20 * MIB, 100 * MIB, 30 * MIB, "", "aten::mm", "lm.h", "t.py:3 f"
    )
    found = out_of_memory(script.ledger(oom=oom), "t4 (simulated)")
    assert found.text() == (
        "VRAM out of memory: 40.0 MiB asked for, 30.0 MiB free of 100.0 MiB on t4 (simulated): "
        "5.0 MiB allocated, 15.0 MiB cached and unused (forward, step 2)\n"
        "  asked for by aten::mm  lm.h  t.py:3 f\n"
        "  alive then (forward, step 2): 5.0 MiB\n"
        "    activations  5.0 MiB  100 %\n"
        "  largest allocations\n"
        "    5.0 MiB  activations\n"
        "  hint: most of it (100 %) is activations: a smaller micro-batch with gradient "
        "accumulation, or activation checkpointing"
    )
    limited = out_of_memory(script.ledger(oom=replace(oom, allowed=50 * MIB)), "t4 (simulated)")
    assert limited.sentence == (
        "VRAM out of memory: 40.0 MiB asked for, 30.0 MiB left of the 50.0 MiB that "
        "set_per_process_memory_fraction allows, 30.0 MiB free of 100.0 MiB on t4 (simulated): "
        "5.0 MiB allocated, 15.0 MiB cached and unused (forward, step 2)"
    )

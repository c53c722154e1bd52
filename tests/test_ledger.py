from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import MIB, Script, training

from pytest_vram.ledger import Ledger, Live
from pytest_vram.trace import BILLS, Bound, Bounds, Event, OutOfMemory, Trace


def test_peak_and_bills() -> None:
    ledger = Ledger.from_trace(training().trace())
    assert ledger.peak_allocated == 70 * MIB
    assert str(ledger.peak) == "backward, step 2"
    assert dict(ledger.bills) == {
        "parameters": 10 * MIB,
        "gradients": 10 * MIB,
        "optimizer_state": 20 * MIB,
        "activations": 30 * MIB,
    }
    assert ledger.activations == 30 * MIB
    assert ledger.master_weights == 0
    with pytest.raises(AttributeError, match="a Ledger has no 'weights'; its bills are parameters"):
        _ = ledger.weights


def test_reserved_less_allocated() -> None:
    ledger = Ledger.from_trace(training().trace())
    assert ledger.peak_reserved == 80 * MIB
    assert ledger.cached == 10 * MIB


def test_phases_and_steps() -> None:
    ledger = Ledger.from_trace(training().trace())
    assert ledger.phases == {
        "setup": 10 * MIB,
        "forward": 60 * MIB,
        "backward": 70 * MIB,
        "optimizer": 41 * MIB,
        "between": 30 * MIB,
    }
    first, second = ledger.steps
    assert first.phases["forward"] == 40 * MIB
    assert second.phases["forward"] == 60 * MIB
    assert (first.live, second.live) == (30 * MIB, 30 * MIB)
    assert ledger.live_after_step == 30 * MIB


def test_what_happens_after_the_last_optimizer_phase_is_not_live_after_the_step() -> None:
    script = training()
    script.take("other", 5 * MIB)
    ledger = Ledger.from_trace(script.trace())
    assert ledger.live_after_step == 30 * MIB
    assert ledger.end.allocated == 5 * MIB
    assert ledger.end.bills == {"other": 5 * MIB}


def test_largest_live_allocations() -> None:
    ledger = Ledger.from_trace(training().trace(), largest=2)
    assert [live.size for live in ledger.largest] == [30 * MIB, 20 * MIB]
    assert ledger.largest[0].origin == "aten::mm  lm.h  train.py:41 forward"
    parameter = Ledger.from_trace(training().trace()).largest[2]
    assert parameter.tensor == "float32[5, 2]"
    assert parameter.origin == "weight"


def test_nothing_was_allocated() -> None:
    ledger = Ledger.from_trace(Trace([], [], []))
    assert ledger.peak_allocated == ledger.peak_reserved == ledger.cached == 0
    assert ledger.steps == ()
    assert str(ledger.peak) == "before any phase"


def test_failed_allocation() -> None:
    script = Script()
    script.phase("forward", 1)
    script.reserve(8 * MIB)
    kept = script.take("parameters", 6 * MIB)
    script.events.append(Event("oom", size=4 * MIB))
    script.give(kept)
    oom = OutOfMemory(
        4 * MIB, 6 * MIB, 8 * MIB, 10 * MIB, 2 * MIB, "CUDA out of memory", "aten::mm"
    )
    failure = Ledger.from_trace(script.trace(oom=oom)).failure
    assert failure is not None
    assert failure.requested == 4 * MIB
    assert failure.cached == 2 * MIB
    assert failure.moment.bills == {"parameters": 6 * MIB}
    assert str(failure.moment) == "forward, step 1"


def test_unknown_bills_are_other() -> None:
    script = Script()
    script.take("", 3)
    script.take("mine", 4)
    assert Ledger.from_trace(script.trace()).bills == {"other": 7}


def test_json_round_trip() -> None:
    script = training()
    script.events.append(Event("oom", size=4))
    oom = OutOfMemory(4, 6, 8, 10, 2, "CUDA out of memory")
    part = Bound("cuDNN", "closed", (60, 65), (70, None), 3, "aten::convolution", "conv", "a.py:1")
    bounds = Bounds((part,), (60, 65), (70, None))
    trace = script.trace(oom=oom, bounds=bounds, notes=("hello",), base_allocated=7)
    ledger = Ledger.from_trace(trace)
    assert Ledger.from_dict(json.loads(json.dumps(ledger.to_dict()))) == ledger


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    script, live = Script(), []
    for _ in range(draw(st.integers(0, 40))):
        what = draw(st.sampled_from(["take", "give", "phase", "reserve"]))
        if what == "take":
            live.append(script.take(draw(st.sampled_from(BILLS)), draw(st.integers(1, 1000))))
        elif what == "give" and live:
            script.give(live.pop(draw(st.integers(0, len(live) - 1))))
        elif what == "phase":
            script.phase(draw(st.sampled_from(["forward", "optimizer"])), draw(st.integers(0, 3)))
        elif what == "reserve":
            script.reserve(draw(st.integers(1, 1000)))
    return script


@given(scripts())
def test_bills_always_add_up(script: Script) -> None:
    trace = script.trace()
    ledger = Ledger.from_trace(trace)
    walked = [(allocated, reserved) for _, _, allocated, reserved in trace.walk()]
    assert ledger.peak_allocated == max((a for a, _ in walked), default=0)
    assert ledger.peak_reserved == max((r for _, r in walked), default=0)
    assert sum(ledger.bills.values()) == ledger.peak_allocated
    assert sum(ledger.end.bills.values()) == ledger.end.allocated
    assert all(isinstance(live, Live) for live in ledger.largest)

"""Whose bytes an unlabelled allocation is, on traces written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_vram.bills import settle
from pytest_vram.trace import BILLS, Allocation, Event, OutOfMemory, Phase, Trace


class Script:
    """Writes a Trace from a line such as ``forward:1 +a backward:1 -a``."""

    def __init__(self, line: str, **made: Allocation) -> None:
        self.names: dict[str, int] = {}
        allocations: list[Allocation] = []
        events: list[Event] = []
        phases: list[Phase] = []
        oom = None
        for word in line.split():
            name = word[1:]
            if word[0] == "+":
                self.names[name] = len(allocations)
                allocations.append(made.get(name, Allocation(512, 512)))
                events.append(Event("alloc", self.names[name]))
            elif word[0] == "-":
                events.append(Event("free", self.names[name]))
            elif word == "oom":
                events.append(Event("oom", size=1024))
                oom = OutOfMemory(1024, 512, 512, 1024, 0, "out of memory")
            else:
                phase, step = word.split(":")
                phases.append(Phase(phase, int(step)))
                events.append(Event("phase", len(phases) - 1))
        self.trace = Trace(allocations, events, phases, oom=oom)

    def bills(self) -> dict[str, str]:
        allocations: Sequence[Allocation] = settle(self.trace).allocations
        return {name: allocations[index].bill for name, index in self.names.items()}


def bills(line: str, **made: Allocation) -> dict[str, str]:
    return Script(line, **made).bills()


def made(**fields: str) -> Allocation:
    return Allocation(512, 512, **fields)  # type: ignore[arg-type]


def test_what_a_forward_leaves_for_backward_is_activations() -> None:
    assert bills("forward:1 +kept +gone -gone backward:1 -kept between:1") == {
        "kept": "activations",
        "gone": "temporary",
    }


def test_each_micro_batch_is_judged_by_its_own_backward() -> None:
    line = "forward:1 +a backward:1 -a between:1 forward:1 +b +c -c backward:1 -b"
    assert bills(line) == {"a": "activations", "b": "activations", "c": "temporary"}


def test_outputs_kept_beyond_a_step_without_backward_are_other() -> None:
    line = "forward:1 +logits between:1 optimizer:1 forward:2 +x backward:2 -x -logits"
    assert bills(line) == {"logits": "temporary", "x": "activations"}
    line = "forward:1 +logits between:1 optimizer:1 forward:2 +x backward:2 -x"
    assert bills(line)["logits"] == "other"


def test_running_out_of_memory_in_a_forward_finds_its_activations() -> None:
    assert bills("forward:1 +kept +gone -gone oom -kept") == {
        "kept": "activations",
        "gone": "temporary",
    }


def test_backward_computes_again_inside_modules_only() -> None:
    again = made(module="blocks.3.fc")
    assert bills("forward:1 backward:1 +again +grad -again -grad", again=again) == {
        "again": "activations",
        "grad": "temporary",
    }


def test_the_optimizer_and_clipping_use_temporaries() -> None:
    line = "forward:1 backward:1 between:1 +norm -norm optimizer:1 +update -update"
    assert bills(line) == {"norm": "temporary", "update": "temporary"}


@pytest.mark.parametrize("phase", ["setup:0", "between:1"])
@pytest.mark.parametrize(
    ("operator", "bill"),
    [
        ("aten::_to_copy", "inputs"),
        ("aten::zeros", "inputs"),
        ("", "inputs"),
        ("aten::mul", "other"),
    ],
)
def test_batches_are_copied_or_made_before_a_forward(phase: str, operator: str, bill: str) -> None:
    x = made(operator=operator)
    assert bills(f"{phase} +x forward:1 backward:1 -x", x=x) == {"x": bill}
    assert bills(f"{phase} +x -x forward:1 backward:1", x=x) == {"x": "temporary"}


def test_a_loop_without_modules_has_no_forward_to_show() -> None:
    line = "setup:0 +x +h +t -t backward:1 -h between:1 optimizer:1 between:1 +again backward:2"
    found = bills(
        line,
        x=made(operator="aten::randn"),
        h=made(operator="aten::mm"),
        t=made(operator="aten::mm"),
        again=made(operator="aten::mm"),
    )
    assert found == {"x": "inputs", "h": "activations", "t": "temporary", "again": "activations"}


def test_a_phase_that_the_test_named_stands_for_a_forward() -> None:
    assert bills("critic:1 +kept +gone -gone backward:1 critic:1 -kept") == {
        "kept": "activations",
        "gone": "temporary",
    }


def test_labels_win_and_a_modules_output_is_no_input() -> None:
    found = bills(
        "setup:0 +w +x forward:1 +h +ws backward:1 +g -h -g",
        w=made(bill="parameters"),
        x=made(bill="inputs"),
        h=made(bill="inputs", module="encoder"),
        ws=made(bill="workspace", module="encoder"),
        g=made(bill="gradients"),
    )
    assert found == {
        "w": "parameters",
        "x": "inputs",
        "h": "activations",
        "ws": "workspace",
        "g": "gradients",
    }


def test_what_never_meets_a_forward() -> None:
    assert bills("setup:0 +a +b -b") == {"a": "other", "b": "temporary"}


def test_the_argument_is_left_as_it_is() -> None:
    script = Script("forward:1 +a -a")
    script.bills()
    assert script.trace.allocations[0].bill == ""


_WORDS = ["setup:0", "forward:1", "backward:1", "between:1", "optimizer:1", "forward:2", "mine:2"]


@given(st.lists(st.tuples(st.sampled_from([*_WORDS, "+"]), st.integers(0, 6)), max_size=60))
def test_every_allocation_gets_a_known_bill(moves: list[tuple[str, int]]) -> None:
    words: list[str] = []
    alive: list[str] = []
    for number, (word, pick) in enumerate(moves):
        if word == "+":
            words.append(f"+n{number}")
            alive.append(f"n{number}")
        else:
            words.append(word)
        if alive and pick == 0:
            words.append(f"-{alive.pop(0)}")
    assert set(bills(" ".join(words)).values()) <= set(BILLS)

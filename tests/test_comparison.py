from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from traces import A100, MIB, Script, training

from pytest_vram.comparison import Change, arrivals, compare, describe, record_of
from pytest_vram.environment import changed_versions, nearest
from pytest_vram.quantities import parse_tolerance

TOLERANCE = parse_tolerance("2% + 1 MiB")


def record(**more: Any) -> dict[str, Any]:
    return record_of(training(**more).ledger(), A100)


def test_what_is_stored() -> None:
    stored = record()
    assert {name: stored[name] for name in list(stored)[:5]} == {
        "peak_allocated": 70 * MIB,
        "peak_reserved": 80 * MIB,
        "peak_phase": "backward",
        "peak_step": 2,
        "live_after_step": 30 * MIB,
    }
    assert list(stored["phases"]) == ["forward", "backward", "optimizer", "between"]
    assert stored["largest"][0] == (
        "31457280 activations float16[3, 10] | aten::mm | lm.h | train.py:41 forward"
    )
    assert stored["versions"] == {"torch": "2.13.0", "transformers": "5.1.0"}


def test_equal_records() -> None:
    assert compare(record(), record(line=99), TOLERANCE).changes == ()


def test_changes_in_order() -> None:
    comparison = compare(record(), record(logits=8 * MIB), TOLERANCE)
    assert comparison.grown == (
        Change("", "peak_allocated", 70 * MIB, 78 * MIB),
        Change("", "peak_reserved", 80 * MIB, 88 * MIB),
        Change("phases", "backward", 70 * MIB, 78 * MIB),
        Change("phases", "forward", 60 * MIB, 68 * MIB),
        Change("bills", "activations", 30 * MIB, 38 * MIB),
    )
    assert comparison.shrunk == ()


def test_an_absent_bill_is_zero() -> None:
    before = record()
    before["bills"] = {**before["bills"], "buffers": 5 * MIB}
    del before["bills"]["gradients"]
    changes = compare(before, record(), TOLERANCE).changes
    assert changes == (
        Change("bills", "gradients", 0, 10 * MIB),
        Change("bills", "buffers", 5 * MIB, 0),
    )


def test_figures_taken_out_by_hand_are_not_compared() -> None:
    assert compare({"peak_allocated": 70 * MIB}, record(), TOLERANCE).changes == ()
    (change,) = compare({"peak_allocated": 60 * MIB}, record(), TOLERANCE).changes
    assert change == Change("", "peak_allocated", 60 * MIB, 70 * MIB)


def test_a_phase_that_only_one_has_is_named_and_not_compared() -> None:
    before = record()
    before["phases"]["encoder"] = before["phases"].pop("forward")
    comparison = compare(before, record(), TOLERANCE)
    assert comparison.changes == ()
    assert comparison.phases_only_before == ("encoder",)
    assert comparison.phases_only_now == ("forward",)


def test_a_moved_peak() -> None:
    comparison = compare(record(), record(saved=1 * MIB), TOLERANCE)
    assert not comparison.same_moment
    assert {change.group for change in comparison.changes} == {"", "phases"}


def test_arrivals_match_by_place_and_not_by_line_number() -> None:
    before = record(line=41)
    assert arrivals(before, training(line=57).ledger()) == []
    (grown,) = arrivals(before, training(saved=36 * MIB).ledger())
    assert (grown.before, grown.growth) == (30 * MIB, 6 * MIB)
    (new,) = arrivals(before, training(logits=8 * MIB).ledger())
    assert (new.before, new.growth, new.live.module) == (0, 8 * MIB, "lm.head")


def test_the_same_place_in_another_dtype_grew_and_is_not_new() -> None:
    script = training(steps=1)
    script.allocations[1].dtype, script.allocations[1].block = "float32", 60 * MIB
    (arrival,) = arrivals(record(), script.ledger())
    assert (arrival.before, arrival.live.tensor) == (30 * MIB, "float32[3, 10]")


def test_repeated_allocations_are_matched_one_by_one() -> None:
    def several(count: int) -> Script:
        script = Script()
        for _ in range(count):
            script.take("activations", 4 * MIB, shape=(1,), dtype="int8", operator="aten::mm")
        return script

    before = record_of(several(3).ledger(), A100)
    assert len(arrivals(before, several(5).ledger())) == 2


def test_what_was_too_small_to_be_stored_is_not_called_new() -> None:
    def several(sizes: range) -> Script:
        script = Script()
        for size in sizes:
            script.take("activations", size * MIB, operator=f"aten::op{size}")
        return script

    before = record_of(several(range(11, 20)).ledger(), A100)  # 12 to 19 are stored
    assert arrivals(before, several(range(12, 20)).ledger()) == []
    found = arrivals(before, several(range(10, 20)).ledger())
    assert found == []


def test_describe_without_a_shape() -> None:
    script = Script()
    script.take("workspace", 512, operator="aten::mm", name="cublas")
    assert describe(script.ledger().largest[0]) == "512 workspace ? | aten::mm | cublas | -"


def test_versions() -> None:
    before = {"torch": "2.13.0", "peft": "1", "PYTORCH_CUDA_ALLOC_CONF": "a:1"}
    now = {"torch": "2.14.1", "timm": "3", "PYTORCH_CUDA_ALLOC_CONF": "a:2", "CUDA_X": "1"}
    assert changed_versions(before, now) == [
        "CUDA_X not set -> 1",
        "PYTORCH_CUDA_ALLOC_CONF a:1 -> a:2",
        "torch 2.13.0 -> 2.14.1",
    ]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], None),
        (["cuda/T4/torch-2.13", "sim/t4/torch-2.12"], "sim/t4/torch-2.12"),
        (["sim/a100-80gb/torch-2.11", "sim/a100-80gb/torch-2.12"], "sim/a100-80gb/torch-2.12"),
    ],
)
def test_nearest_environment(others: list[str], expected: str | None) -> None:
    assert nearest(A100.key, others) == expected


def test_environment_keys() -> None:
    assert A100.key == "sim/a100-80gb/torch-2.13"
    measured = replace(A100, kind="cuda", gpu="NVIDIA A100-SXM4-80GB")
    assert measured.key == "cuda/NVIDIA A100-SXM4-80GB/torch-2.13"
    assert str(measured) == "measured on NVIDIA A100-SXM4-80GB, torch 2.13.0"

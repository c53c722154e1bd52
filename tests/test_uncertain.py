"""What is said where closed code decides, and what a budget does about it."""

from __future__ import annotations

from typing import Any

from traces import A100, MIB, training

from pytest_vram.comparison import record_of
from pytest_vram.findings import Finding
from pytest_vram.ledger import Ledger
from pytest_vram.marker import Budget
from pytest_vram.trace import Bound, Bounds, Interval
from pytest_vram.uncertain import interval_lines
from pytest_vram.verdict import judge_memory

WHY = "cuDNN chooses its engine by closed heuristics"


def ledger(allocated: Interval, reserved: Interval, part: str = "cuDNN workspace") -> Ledger:
    """The usual training (70 MiB allocated, 80 reserved) with one part that is not known."""
    one = Bound(part, WHY, allocated, reserved, 3, "aten::convolution", "conv1", "net.py:7 forward")
    return training().ledger(bounds=Bounds((one,), allocated, reserved))


def judge(found: Ledger, budget: Budget, **more: Any) -> tuple[Finding, ...]:
    stored = {A100.key: record_of(found, A100)}
    return judge_memory(found, budget, A100, stored=stored, now=record_of(found, A100), **more)


WIDE = ledger((70 * MIB, 90 * MIB), (80 * MIB, 110 * MIB))
OPEN = ledger((70 * MIB, None), (80 * MIB, None), "mylib::norm: scratch")


def test_lines() -> None:
    assert interval_lines(WIDE) == [
        "not known to the byte: peak allocated 70.0 MiB to 90.0 MiB, "
        "reserved 80.0 MiB to 110.0 MiB",
        "  cuDNN workspace: allocated 70.0 MiB to 90.0 MiB, 3 calls",
        "    cuDNN chooses its engine by closed heuristics",
        "    widest: aten::convolution  conv1  net.py:7 forward",
    ]
    assert interval_lines(training().ledger()) == []


def test_a_budget_above_the_interval_is_kept_in_any_case() -> None:
    assert judge(WIDE, Budget(peak=90 * MIB, reserved=110 * MIB)) == ()


def test_a_budget_inside_the_interval_is_a_warning() -> None:
    (found,) = judge(WIDE, Budget(peak=72 * MIB))
    assert (found.kind, found.severity) == ("uncertain", "warn")
    assert found.text() == (
        "VRAM uncertain: peak allocated 70.0 MiB is within the budget of 72.0 MiB, but may be up "
        "to 90.0 MiB, 18.0 MiB over it (cuDNN workspace)\n"
        "  not known to the byte: peak allocated 70.0 MiB to 90.0 MiB, "
        "reserved 80.0 MiB to 110.0 MiB\n"
        "    cuDNN workspace: allocated 70.0 MiB to 90.0 MiB, 3 calls\n"
        "      cuDNN chooses its engine by closed heuristics\n"
        "      widest: aten::convolution  conv1  net.py:7 forward\n"
        "  hint: a budget of 90.0 MiB holds in any case; a card measures which it is"
    )
    assert found.data == {
        "figure": "peak_allocated",
        "bytes": 70 * MIB,
        "budget": 72 * MIB,
        "low": 70 * MIB,
        "high": 90 * MIB,
    }


def test_strict_budgets_hold_whatever_closed_code_does() -> None:
    (found,) = judge(WIDE, Budget(reserved=100 * MIB), strict=True)
    assert (found.kind, found.severity) == ("uncertain", "fail")
    assert found.sentence == (
        "VRAM uncertain: peak reserved 80.0 MiB is within the budget of 100.0 MiB, but may be up "
        "to 110.0 MiB, 10.0 MiB over it (cuDNN workspace)"
    )


def test_without_an_upper_end_every_budget_is_uncertain() -> None:
    (found,) = judge(OPEN, Budget(peak=1 << 40))
    assert found.sentence == (
        "VRAM uncertain: peak allocated 70.0 MiB is within the budget of 1024.00 GiB, but no upper "
        "end is known (mylib::norm: scratch)"
    )
    assert found.hint == (
        'vram.assume_scratch("mylib::norm", "64 MiB") says what the operator takes at most'
    )
    assert found.details[0] == (
        "not known to the byte: peak allocated at least 70.0 MiB, reserved at least 80.0 MiB"
    )
    solver = ledger((70 * MIB, None), (80 * MIB, None), "aten::linalg_qr: scratch of cuSOLVER")
    (found,) = judge(solver, Budget(peak=1 << 40))
    assert found.hint == "a card measures what it is"


def test_without_a_budget_there_is_nothing_to_warn_of() -> None:
    assert judge(OPEN, Budget()) == ()


def test_over_budget_says_how_little_it_may_be() -> None:
    found = ledger((60 * MIB, 90 * MIB), (80 * MIB, 110 * MIB))
    (over,) = judge(found, Budget(peak=64 * MIB))
    assert (over.kind, over.severity) == ("over-budget", "fail")
    assert over.details[-4:] == tuple(interval_lines(found))


def test_a_measurement_inside_the_interval_is_explained() -> None:
    measured = training(saved=60 * MIB).ledger()  # 100 MiB
    budget = Budget()
    (found,) = judge(measured, budget, estimate=training().ledger())
    assert found.kind == "unexplained"
    inside = ledger((70 * MIB, 100 * MIB), (80 * MIB, 110 * MIB))
    assert judge(measured, budget, estimate=inside) == ()
    assert judge(measured, budget, estimate=OPEN) == ()
    small = training(saved=0).ledger()  # 41 MiB
    (found,) = judge(small, budget, estimate=OPEN)
    assert found.sentence.startswith(
        "VRAM unexplained: measured peak 41.0 MiB, estimate 70.0 MiB (at least 70.0 MiB), -29.0 MiB"
    )

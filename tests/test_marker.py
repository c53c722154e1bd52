from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_vram.marker import Budget, BudgetError, closest_first, keywords_of, read_budget
from pytest_vram.quantities import parse_tolerance


def mark(*args: Any, **kwargs: Any) -> Any:
    return SimpleNamespace(args=args, kwargs=kwargs)


def test_defaults() -> None:
    assert read_budget([]) == Budget(
        peak=None,
        reserved=None,
        precision="fp32",
        steps=3,
        warmup=1,
        baseline=parse_tolerance("2% + 1 MiB"),
        estimate=parse_tolerance("5% + 16 MiB"),
        skipped_steps=None,
        trainable=None,
        growth=65_536,
        gpu=None,
    )


def test_the_closest_layer_wins_each_keyword() -> None:
    budget = read_budget(
        [{"peak": None, "steps": 5}, {"peak": "1 GiB", "precision": "fp16"}, {"steps": 9}]
    )
    assert (budget.peak, budget.steps, budget.precision) == (None, 5, "fp16")


def test_a_far_layer_is_checked_although_it_loses() -> None:
    with pytest.raises(BudgetError, match="steps='x': expected a whole number, at least 1"):
        read_budget([{"steps": 2}, {"steps": "x"}])


def test_positional_peak() -> None:
    assert keywords_of(mark("3.5 GiB", steps=1)) == {"peak": "3.5 GiB", "steps": 1}
    with pytest.raises(BudgetError, match="one positional argument, the peak, but got 2: 1, 2"):
        keywords_of(mark(1, 2))
    with pytest.raises(BudgetError, match="got the peak twice"):
        keywords_of(mark(1, peak=2))


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"stpes": 3}, "unknown keyword 'stpes'; did you mean 'steps'?"),
        ({"colour": 3}, "unknown keyword 'colour'; known: peak, reserved, precision, steps"),
        ({"peak": "10 MBxyz"}, "peak='10 MBxyz': '10 MBxyz' has the unknown unit 'MBxyz'"),
        ({"peak": -1}, "peak=-1: -1 is negative: expected a whole number of bytes"),
        ({"peak": 0}, "peak=0: a budget must be more than 0 bytes"),
        ({"reserved": "0 MiB"}, "reserved='0 MiB': a budget must be more than 0 bytes"),
        ({"precision": "fp8"}, "precision='fp8': expected one of fp32, fp16, bf16, fp16-pure"),
        ({"steps": 0}, "steps=0: expected a whole number, at least 1"),
        ({"steps": True}, "steps=True: expected a whole number, at least 1"),
        ({"warmup": -1}, "warmup=-1: expected a whole number, at least 0"),
        ({"skipped_steps": 1.5}, "skipped_steps=1.5: expected a whole number, at least 0"),
        ({"baseline": "two"}, "baseline='two': 'two' is not a tolerance: expected a text such as"),
        ({"trainable": 5}, "trainable=5: expected a pattern of parameter names"),
        ({"gpu": ""}, "gpu='': expected the name of a GPU"),
    ],
)
def test_bad_keywords(keywords: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BudgetError) as error:
        read_budget([keywords])
    assert str(error.value).startswith(sentence)


def test_an_unknown_gpu_explains_itself() -> None:
    def find(name: str) -> object:
        raise ValueError(f"unknown GPU {name!r}; did you mean rtx4090?")

    with pytest.raises(BudgetError) as error:
        read_budget([{"gpu": "rtx4091"}], find)
    assert str(error.value) == "gpu='rtx4091': unknown GPU 'rtx4091'; did you mean rtx4090?"


def test_round_trip() -> None:
    budget = read_budget([{"peak": "3.5 GiB", "baseline": "0.5 %", "trainable": "*lora*"}])
    assert Budget.from_dict(json.loads(json.dumps(budget.to_dict()))) == budget


def test_parameter_marks_are_closer_than_decorators_and_derived_classes_than_bases() -> None:
    decorator, parameter, base, derived, added = (mark() for _ in range(5))
    assert closest_first([decorator, parameter], [parameter], []) == [parameter, decorator]
    assert closest_first([base, derived, added], [], [derived, base]) == [added, derived, base]

"""The loss scale: which skips are a search, which are a fault."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from watched_loops import Budget, health

from pytest_vram.numerics.scaler import ScalerHistory, ScalerStep, judge, normal_skips


def history(
    skips: Sequence[bool], start: float = 65536.0, grow: Sequence[int] = ()
) -> ScalerHistory:
    steps, scale = [], start
    for number, skipped in enumerate(skips, 1):
        after = scale / 2 if skipped else scale * (2 if number in grow else 1)
        optimizers = ("SGD",) if skipped else ()
        steps.append(ScalerStep(number, 0, scale, after, skipped, optimizers, 0, ()))
        scale = after
    return ScalerHistory(tuple(steps), True)


def verdict(skips: Sequence[bool], **more: object) -> list[tuple[str, str]]:
    arguments = {"warmup": 1, "allowed": None, "finite_at_one": None, **more}
    return [(f.severity, f.sentence) for f in judge(history(skips), **arguments)]  # type: ignore[arg-type]


def test_a_search_at_the_start_is_a_note() -> None:
    assert verdict([True, True, True, False, False]) == [
        ("note", "3 skipped warm-up steps, scale 65536 -> 8192, then stable for 2 steps")
    ]


def test_a_skip_in_the_warm_up_is_normal_even_after_a_clean_step() -> None:
    assert verdict([False, True, False, False], warmup=2)[0][0] == "note"
    assert verdict([False, True, False, False], warmup=1)[0][0] == "fail"


def test_a_later_skip_fails_and_says_which() -> None:
    assert verdict([False, False, True, False]) == [
        (
            "fail",
            "1 step skipped after the warm-up (step 3 of 4, allowed 0): inf or NaN in the "
            "gradients, scale 65536 -> 32768",
        )
    ]


def test_later_skips_can_be_allowed() -> None:
    assert verdict([False, False, True, False], allowed=1)[0][0] == "note"
    assert verdict([False, True, False, True], allowed=1)[0][0] == "fail"


def test_a_skip_after_a_growth_is_the_search_again() -> None:
    steps = history([False, False, True, False], grow=[2]).steps
    assert normal_skips(steps, 1) == {1, 3}


def test_collapse_needs_a_cause_that_no_scale_cures() -> None:
    (found,) = judge(history([True] * 6), 1, None, False, "first non-finite operator: sqrt")
    assert found.severity == "fail"
    assert found.sentence == (
        "6 of 6 steps were skipped, scale 65536 -> 1024 and falling; gradients are not finite even "
        "at scale 1, so the scale is not the cause"
    )
    assert found.details[-1] == "first non-finite operator: sqrt"
    assert found.data["scales"] == [2.0**k for k in range(16, 9, -1)]


def test_a_search_that_did_not_end_warns() -> None:
    ((severity, sentence),) = verdict([True] * 5, finite_at_one=True)
    assert severity == "warn"
    assert sentence == (
        "all 5 steps were skipped while the scaler searched for a scale (scale 65536 -> 2048): no "
        "parameter was updated; gradients are finite at scale 1"
    )


def test_a_low_scale_that_still_meets_inf_fails() -> None:
    found = judge(history([False, True, False], start=8.0), 4, None, None)
    assert [f.severity for f in found] == ["fail"]
    assert "2 of 3" not in found[0].sentence
    assert found[0].sentence.startswith("1 of 3 steps were skipped, scale 8 -> 4")


def test_falling_at_the_end_fails() -> None:
    found = judge(history([False, True, True, True]), 1, 9, None)
    assert found[0].sentence == "3 of 4 steps were skipped, scale 65536 -> 8192 and falling"


def test_endless_growth_fails() -> None:
    (found,) = judge(history([False] * 9, grow=range(1, 10)), 1, None, None)
    assert found.sentence.startswith(
        "the loss scale grows without limit: scale 65536 -> 3.35544e+07"
    )
    (found,) = judge(history([False], start=float("inf")), 1, None, None)
    assert "becomes inf" in found.sentence


def test_each_scaler_is_judged_on_its_own() -> None:
    good = history([False, False, False]).steps
    bad = [
        ScalerStep(s.step, 1, s.scale_before, s.scale_after, s.found_inf, s.skipped, 0, ())
        for s in history([False, False, True]).steps
    ]
    found = judge(ScalerHistory((*good, *bad), True), 1, None, None)
    assert [f.severity for f in found] == ["fail"]
    assert "of scaler 2" in found[0].sentence


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 3))
def test_skips_within_the_allowance_never_fail(skips: list[bool], warmup: int) -> None:
    steps = history(skips).steps
    later = [s for s in steps if s.found_inf and s.step not in normal_skips(steps, warmup)]
    found = judge(history(skips), warmup, len(later), None)
    tail = len(skips) - max([i + 1 for i, skipped in enumerate(skips) if not skipped], default=0)
    if tail < 3:
        assert all(f.severity != "fail" for f in found)


# ---- what is recorded


def train(scaler: torch.amp.GradScaler, clip: bool = False, steps: int = 2) -> None:
    model = nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(8, 4, device="cuda")).mean()).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


class Careful(torch.amp.GradScaler):
    """A subclass that calls its parents' methods."""

    def step(self, optimizer: torch.optim.Optimizer, *args: object, **kwargs: object) -> None:
        super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: object = None) -> None:
        super().update()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.amp.GradScaler("cuda"),
        lambda: torch.cuda.amp.GradScaler(),
        lambda: Careful("cuda"),
    ],
    ids=["torch.amp", "torch.cuda.amp", "subclass"],
)
def test_calls_are_recorded_in_order(make: object) -> None:
    result = health(lambda: train(make(), clip=True))  # type: ignore[operator]
    assert result.findings == ()
    first, second = result.watch.scaler.steps
    kinds = ["scale", "backward", "unscale_", "clip", "step", "update"]
    assert [call.kind for call in first.calls] == kinds
    assert [call.kind for call in second.calls] == kinds
    assert all("test_scaler.py" in call.line for call in first.calls if call.kind == "backward")
    assert (first.scale_before, first.scale_after, first.growth_tracker) == (65536.0, 65536.0, 1)
    assert second.growth_tracker == 2
    assert result.watch.scaler.skipped == 0


def test_a_disabled_scaler_leaves_no_trace() -> None:
    result = health(lambda: train(torch.amp.GradScaler("cuda", enabled=False)))
    assert result.watch.scaler == ScalerHistory()


def test_a_batch_with_inf_in_the_middle() -> None:
    def body() -> None:
        model = nn.Linear(4, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=8192.0)
        for step in range(5):
            optimizer.zero_grad()
            x = torch.ones(2, 4, device="cuda") * (1e36 if step == 3 else 1.0)
            scaler.scale(model(x).mean()).backward()
            scaler.step(optimizer)
            scaler.update()

    result = health(body, Budget(warmup=1))
    assert result.watch.scaler.skipped == 1
    assert result.watch.scaler.scales == (8192.0, 8192.0, 8192.0, 4096.0, 4096.0)
    (found,) = result.of("scaler")
    assert found.sentence.startswith("1 step skipped after the warm-up (step 4 of 5, allowed 0)")
    assert health(body, Budget(skipped_steps=1)).findings == ()

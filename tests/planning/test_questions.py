"""Does it fit, on how many, what must give."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from pytest_vram.planning.activations import Recompute
from pytest_vram.planning.configs import named
from pytest_vram.planning.plan import make_plan
from pytest_vram.planning.questions import (
    blame,
    cards_needed,
    fits,
    largest_batch,
    largest_layers,
    largest_sequence,
    rescue,
    sensitivity,
)
from pytest_vram.planning.runs import Parallel, Setup
from pytest_vram.planning.shapes import PlanError
from pytest_vram.planning.states import OPTIMIZERS, PRECISIONS


@dataclass(frozen=True)
class Card:
    """A card as papers have it: a round number of decimal gigabytes."""

    memory: int
    name: str = "card"
    context: int = 500 << 20

    @property
    def free(self) -> int:
        return self.memory - self.context


EIGHTY, TWENTY_FOUR = Card(80 * 10**9), Card(24 * 10**9)
GPT2 = Setup(named("gpt2"), precision=PRECISIONS["bf16"])


def test_a_13b_model_checkpointed_on_80_gb_cards():
    """213 GB: three by bare arithmetic, start with four, prefer five."""
    setup = Setup(
        named("llama-13b"),
        sequence=2048,
        precision=PRECISIONS["bf16-pure"],
        recompute=Recompute("full"),
    )
    assert make_plan(setup).textbook / 1e9 == pytest.approx(213, abs=3)
    made = cards_needed(setup, EIGHTY)
    assert (made.bare, made.start, made.prefer) == (3, 4, 5)


def test_a_7b_model_with_four_samples_needs_four_cards():
    """256 GB by the textbook's explicit attention."""
    setup = Setup(
        named("llama-7b"),
        batch=4,
        sequence=2048,
        precision=PRECISIONS["bf16-pure"],
        attention="explicit",
    )
    assert make_plan(setup).textbook / 1e9 == pytest.approx(256, rel=0.04)
    made = cards_needed(setup, EIGHTY)
    assert made.bare == 4
    assert made.start == 0  # activations are not sharded: one rank's alone exceed the card


def test_largest_batch_is_the_last_one_that_fits():
    best = largest_batch(GPT2, TWENTY_FOUR)
    assert best > 1
    assert make_plan(replace(GPT2, batch=best)).peak <= TWENTY_FOUR.free
    assert make_plan(replace(GPT2, batch=best + 1)).peak > TWENTY_FOUR.free


def test_largest_sequence_stops_at_the_models_positions():
    assert largest_sequence(GPT2, EIGHTY) == 1024
    llama = Setup(named("llama-3.2-1b"), precision=PRECISIONS["bf16"], step="fused")
    best = largest_sequence(llama, TWENTY_FOUR)
    assert make_plan(replace(llama, sequence=best)).peak <= TWENTY_FOUR.free
    assert make_plan(replace(llama, sequence=best + 1)).peak > TWENTY_FOUR.free
    with pytest.raises(PlanError, match="its sequence is fixed"):
        largest_sequence(Setup(named("vit-base")), TWENTY_FOUR)


def test_largest_depth():
    best = largest_layers(GPT2, TWENTY_FOUR)
    deeper = replace(GPT2, shape=GPT2.shape.with_layers(best + 1))
    assert make_plan(deeper).peak > TWENTY_FOUR.free
    assert largest_layers(Setup(named("llama-7b"), sequence=16), Card(1 << 30)) == 0


def test_verdicts():
    assert fits(GPT2, TWENTY_FOUR).verdict == "yes"
    assert fits(GPT2, Card(2 * 10**9)).verdict == "no"
    plan = make_plan(GPT2)
    close = Card(plan.peak + (500 << 20))
    made = fits(GPT2, close)
    assert made.verdict == "tight"
    assert made.spare == 0


def test_the_bill_to_blame():
    assert blame(make_plan(replace(GPT2, batch=32))) == "activations"
    assert blame(make_plan(Setup(named("llama-7b"), sequence=16))) == "optimizer_state"


def test_rescue_goes_from_cheap_to_dear_and_ends_when_it_fits():
    setup = Setup(named("llama-3-8b"), batch=2, sequence=2048, precision=PRECISIONS["bf16"])
    steps = rescue(setup, EIGHTY)
    peaks = [make_plan(setup).peak, *(step.plan.peak for step in steps)]
    assert peaks == sorted(peaks, reverse=True)
    assert all(step.verdict != "yes" for step in steps[:-1])
    assert steps[-1].verdict == "yes"


def test_rescue_on_a_small_card_ends_with_adapters():
    setup = Setup(named("llama-7b"), batch=8, sequence=2048, precision=PRECISIONS["bf16"])
    names = [step.name for step in rescue(setup, TWENTY_FOUR)]
    assert names[0] in ("micro-batch 1, accumulation 8", "fused optimizer")
    assert "LoRA, rank 8, all linear layers" in names


def test_rescue_shards_where_there_are_ranks():
    setup = Setup(
        named("llama-7b"),
        sequence=512,
        precision=PRECISIONS["bf16-pure"],
        parallel=Parallel(data=8),
        optimizer=OPTIMIZERS["sgd-momentum"],
    )
    names = [step.name for step in rescue(setup, TWENTY_FOUR)]
    assert any(name.startswith("ZeRO-") for name in names)
    assert "optimizer state in host memory" not in names


def test_what_already_fits_needs_no_rescue():
    assert rescue(GPT2, EIGHTY) == ()


def test_sensitivity_to_each_change():
    rows = {row.name: row for row in sensitivity(replace(GPT2, batch=8))}
    base = make_plan(replace(GPT2, batch=8)).peak
    assert rows["batch +50 %"].peak == make_plan(replace(GPT2, batch=12)).peak
    assert rows["batch +50 %"].change == rows["batch +50 %"].peak - base > 0
    assert rows["layers +30 %"].change > 0
    assert rows["optimizer sgd"].change < 0
    assert "sequence +50 %" not in rows  # GPT-2 has 1024 positions
    assert "precision bf16" not in rows

"""Attention: choice and scratch against what PyTorch 2.6.0 and 2.14.1 did on stand-in devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_answers import argument, card, differences, runs

from pytest_vram.sim import find_profile
from pytest_vram.sim.kernels import Card
from pytest_vram.sim.kernels.attention import Choice, Switches, choose
from pytest_vram.sim.kernels.attention_kernels import backward_block, head_rounded, split_count
from pytest_vram.sim.kernels.versions import default_cudnn

NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}


def test_every_recorded_call_is_reproduced_event_by_event() -> None:
    assert differences("attention") == []


@pytest.mark.parametrize(
    "run", runs("attention_choice"), ids=lambda r: f"{r['device']}-{r['torch']}"
)
def test_every_recorded_choice(run: dict[str, Any]) -> None:
    device = card(run)
    for call in run["calls"]:
        *shapes, mask, dropout, causal, gqa, grad, on, order, deterministic, chosen = call
        query, key, value = (argument({"t": shape}, {}) for shape in shapes)
        bias = argument(mask, {}) if mask else None
        if mask and mask.get("grad"):
            bias.requires_grad_()
        switches = Switches(*on, deterministic=deterministic)
        if order:
            names = tuple(NAMES[number] for number in order)
            switches = Switches(*on, order=names, deterministic=deterministic)  # type: ignore[arg-type]
        got = choose(
            query, key, value, bias, dropout, causal, None, gqa,
            card=device, enabled=switches, needs_grad=grad,
        )  # fmt: skip
        assert got.backend == NAMES[chosen], (call, str(got))


def half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.half, device="meta")


def on(name: str, version: tuple[int, int] = (2, 14)) -> Card:
    return Card(find_profile(name), version, cudnn_version=default_cudnn(version))


def test_the_reasons_say_why_attention_fell_back_to_math() -> None:
    query = half(2, 4, 128, 60).float()
    mask = torch.empty(128, 128, dtype=torch.bool, device="meta").t()
    got = choose(query, query, query, mask, card=on("a100-80gb"), enabled=Switches(math=True))
    assert got.backend == "math"
    assert got.rejected == {
        "flash": "an attention mask is given",
        "efficient": "the last dimension of the mask is not contiguous",
    }
    assert str(got) == (
        "math (flash: an attention mask is given; "
        "efficient: the last dimension of the mask is not contiguous)"
    )


def test_hopper_prefers_cudnn_from_the_wheels_that_bring_a_recent_one() -> None:
    query = half(2, 4, 128, 64)
    chosen = {
        version: choose(
            query, query, query, card=on("h100-80gb", version), enabled=Switches()
        ).backend
        for version in ((2, 6), (2, 8), (2, 9), (2, 10), (2, 11), (2, 14))
    }
    assert chosen == {
        (2, 6): "flash", (2, 8): "flash", (2, 9): "cudnn", (2, 10): "flash", (2, 11): "cudnn",
        (2, 14): "cudnn",
    }  # fmt: skip


def test_nothing_left_to_run_is_an_error_that_lists_the_reasons() -> None:
    query = half(2, 4, 128, 64)
    off = Switches(flash=False, efficient=False, cudnn=False, math=False)
    with pytest.raises(RuntimeError, match=r"No available kernel.*flash: turned off"):
        choose(query, query, query, card=on("t4"), enabled=off)


def test_a_choice_without_rejections_is_only_a_name() -> None:
    assert str(Choice("flash", {})) == "flash"


@pytest.mark.parametrize(
    ("blocks", "processors", "key_blocks", "splits"),
    [(173, 216, 100, 1), (128, 216, 32, 3), (1, 216, 1, 1), (2, 216, 64, 64), (1, 264, 0, 1)],
)
def test_splits_of_the_keys(blocks: int, processors: int, key_blocks: int, splits: int) -> None:
    assert split_count(blocks, processors, key_blocks) == splits


def test_flash_kernels_above_128_come_in_steps_of_64_since_its_version_2_7() -> None:
    recent, old = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.int64)
    assert [head_rounded(head, recent) for head in (40, 128, 160, 224)] == [64, 128, 192, 256]
    assert [head_rounded(head, old) for head in (40, 128, 160, 224)] == [64, 128, 160, 224]


def test_a_small_card_gets_another_backward_kernel() -> None:
    big = backward_block(torch.half, 128, False, on("a100-80gb"))
    small = backward_block(torch.half, 128, False, on("l4"))
    assert (big.rows, big.keys) == (128, 128)
    assert (small.rows, small.keys) == (64, 64)

"""The cards: figures from NVIDIA's tables, names, cards of one's own."""

from __future__ import annotations

import pytest

from pytest_vram.sim.profiles import (
    CAPABILITIES,
    PROFILES,
    ProfileError,
    find_profile,
    parse_profile,
    parse_profile_line,
)


@pytest.mark.parametrize(
    ("name", "capability", "multiprocessors", "memory"),
    [
        # cudaDeviceProp of real cards, as device queries print it.
        ("v100-16gb", (7, 0), 80, 16_945_512_448),
        ("v100-32gb", (7, 0), 80, 34_089_730_048),
        ("t4", (7, 5), 40, 15_828_320_256),
        ("a100-40gb", (8, 0), 108, 42_298_834_944),
        ("a100-80gb", (8, 0), 108, 84_987_740_160),
        ("rtx3090", (8, 6), 82, 25_438_126_080),
        ("rtx4090", (8, 9), 128, 25_393_692_672),
        ("h100-80gb", (9, 0), 132, 84_942_979_072),
        ("h200-141gb", (9, 0), 132, 150_110_011_392),
        ("rtx5090", (12, 0), 170, 33_677_180_928),
    ],
)
def test_known_cards(name, capability, multiprocessors, memory):
    card = find_profile(name)
    assert (card.capability, card.multiprocessors, card.memory) == (
        capability,
        multiprocessors,
        memory,
    )
    assert card.free == memory - (500 << 20)


@pytest.mark.parametrize("name", ["a10g", "l4", "l40s", "b200"])
def test_the_other_cards_are_there(name):
    assert find_profile(name).sm in (86, 89, 100)


@pytest.mark.parametrize("card", PROFILES.values(), ids=lambda card: card.name)
def test_limits_follow_from_the_capability(card):
    assert (
        card.threads_per_multiprocessor,
        card.blocks_per_multiprocessor,
        card.shared_memory_per_multiprocessor,
        card.shared_memory_per_block_optin,
    ) == CAPABILITIES[card.capability]
    assert 8 << 30 < card.memory < 256 << 30
    assert 1 << 20 < card.l2_cache < 128 << 20


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("RTX 4090", "rtx4090"),
        ("h200", "h200-141gb"),
        ("Tesla T4", "t4"),
        ("L4", "l4"),
    ],
)
def test_names_in_other_spellings(asked, name):
    assert find_profile(asked).name == name


def test_unknown_and_ambiguous_names():
    with pytest.raises(ProfileError, match=r"may be more than one card: a100-40gb or a100-80gb\?"):
        find_profile("a100")
    with pytest.raises(ProfileError, match="unknown GPU 'h1000'; did you mean h100"):
        find_profile("h1000")
    with pytest.raises(ProfileError, match="unknown GPU 'foo'; known cards: "):
        find_profile("foo")


def test_a_card_of_ones_own():
    card = parse_profile_line("lab-box: like=rtx4090, memory=48 GiB")
    assert (card.name, card.memory, card.multiprocessors) == ("lab-box", 48 << 30, 128)
    assert find_profile("lab-box", [card]) is card
    bare = parse_profile(
        "new", {"memory": "16 GB", "capability": "8.9", "multiprocessors": 66, "context": 0}
    )
    assert (bare.memory, bare.free, bare.sm) == (16 * 10**9, 16 * 10**9, 89)
    assert bare.threads_per_multiprocessor == 1536


def test_an_own_card_wins_over_a_built_in_one():
    mine = parse_profile("t4", {"like": "t4", "memory": 8 << 30})
    assert find_profile("t4", [mine]).memory == 8 << 30


def test_another_capability_brings_its_own_limits():
    card = parse_profile("x", {"like": "rtx4090", "capability": [9, 0]})
    assert card.threads_per_multiprocessor == 2048
    assert card.l2_cache == find_profile("rtx4090").l2_cache


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"memory": 1}, "capability and multiprocessors missing"),
        ({"like": "t4", "speed": 3}, "unknown key 'speed'"),
        ({"like": "t5"}, "unknown GPU 't5'"),
        ({"like": "t4", "memory": "lots"}, "memory: 'lots' is not a size"),
        ({"like": "t4", "memory": 0}, "memory must be positive"),
        ({"like": "t4", "memory": True}, "memory must be a whole number"),
        ({"like": "t4", "memory": 4096}, "the CUDA context takes all of its memory"),
        ({"like": "t4", "capability": "eight"}, 'capability is written "8.9"'),
        ({"like": "t4", "capability": "5.0"}, "no compute capability 5.0; known: 6.0"),
        ({"like": "t4", "multiprocessors": -4}, "multiprocessors must be a whole number"),
    ],
)
def test_impossible_cards(table, sentence):
    with pytest.raises(ProfileError, match=sentence):
        parse_profile("mine", table)


@pytest.mark.parametrize("line", ["box", "box like=t4", ": like=t4", "box: like", "box: =t4"])
def test_lines_that_define_no_card(line):
    with pytest.raises(ProfileError, match="expected 'name: like=rtx4090, memory=48 GiB'"):
        parse_profile_line(line)

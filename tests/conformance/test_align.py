"""The alignment instrument names what was broken on purpose: operator, size, likely cause."""

from __future__ import annotations

from typing import Any

import pytest
from align import align, describe

MM, NORM = ("aten::mm", "net.py:5 forward"), ("aten::native_layer_norm_backward", "net.py:9 step")
Stream = list[list[Any]]


def operator(name: tuple[str, str], *sizes: int) -> Stream:
    """What one operator does: positive sizes are allocated, negative ones given back."""
    return [["alloc" if size > 0 else "free", abs(size), *name] for size in sizes]


def filler(start: int) -> Stream:
    """Events that only agree with themselves, so that the streams meet again."""
    return operator(("aten::add", "net.py:1 forward"), *range(start, start + 12))


def program(*steps: Stream) -> Stream:
    return [event for at, step in enumerate(steps) for event in (*filler(1000 * (at + 1)), *step)]


RIGHT = program(operator(MM, 4096), operator(NORM, 512, 2048, -2048, 512), [])


@pytest.mark.parametrize(
    ("broken", "cause", "size"),
    [
        (program(operator(MM, 4096), operator(NORM, 512, 512), []),
         "hidden scratch: the rule lacks what is taken and given back here", "2,048 bytes"),
        (program(operator(MM, 4096), operator(NORM, 512, 8192, -8192, 512), []),
         "another size: 2,048 and not 8,192 (x 4)", "6,144 bytes"),
        (program(operator(MM, 4096), operator(NORM, 512, 2048, 512, -2048), []),
         "same blocks in another order: the rule's steps, or the order of gradients", "0 bytes"),
        (program(operator(MM, 4096), operator(NORM, 512, 2048, -2048, 512, 512), []),
         "too much: the rule takes what the card does not", "512 bytes"),
        (program(operator(MM, 4096), operator(NORM, 512, 2048, 512), []),
         "blocks live longer in the simulation: who still holds them?", "0 bytes"),
        (program(operator(MM, 4096), operator(NORM, 512, 2048, -2048, -512, 512), []),
         "blocks die earlier in the simulation: what keeps them on the card?", "0 bytes"),
    ],
)  # fmt: skip
def test_one_broken_rule(broken: Stream, cause: str, size: str) -> None:
    lines = describe(align(RIGHT, broken)).splitlines()
    assert lines[0] == "1 differences, 1 of them different"
    assert lines[2].partition(": ")[2] == cause
    assert lines[3] == f"    {size}, at {NORM[0]} ({NORM[1]})"
    assert "    rule: norms.py:" in "\n".join(lines)


def test_what_repeats_is_counted_once_and_the_largest_is_named() -> None:
    def step(at: int, scratch: int) -> Stream:
        return [*filler(10_000 * at), *operator(NORM, 512), *operator(MM, scratch, -scratch)]

    right = [event for at in range(1, 6) for event in step(at, 1 << 20)]
    wrong = [event for at in range(1, 6) for event in step(at, 1 << 21)]
    wrong[12][1] = 1024  # the first norm's result
    text = describe(align(right, wrong))
    assert text.splitlines()[0] == "5 differences, 2 of them different"
    assert "1,048,576 bytes, 4 times, at aten::mm (net.py:5 forward)" in text
    assert "another size: 512 and not 1,024 (x 2), 1,048,576 and not 2,097,152 (x 2)" in text
    assert text.splitlines()[-2:] == ["  event 12: see above", "  event 28: see above"]


def test_equal_streams() -> None:
    assert describe(align(RIGHT, RIGHT)) == "the streams are equal"


def test_differences_without_a_weight_are_not_the_largest() -> None:
    broken = program(operator(MM, 4096), operator(NORM, 2048, 512, -2048, 512), [])
    assert describe(align(RIGHT, broken)).splitlines()[-1] == (
        "largest: none changes how much is allocated"
    )

"""Shapes that a measured Trace borrows from the simulation of the same test."""

from __future__ import annotations

from typing import Any

from pytest_vram.shapes import borrow
from pytest_vram.trace import Allocation, Trace


def made(size: int, shape: tuple[int, ...] | None = None, **fields: Any) -> Allocation:
    fields.setdefault("operator", "aten::mm")
    return Allocation(size, size, shape=shape, dtype="float32" if shape else "", **fields)


def shapes(measured: list[Allocation], simulated: list[Allocation]) -> list[Any]:
    found = borrow(Trace(measured, [], []), Trace(simulated, [], []))
    return [allocation.shape for allocation in found.allocations]


def test_same_operator_module_and_size_is_the_same_tensor() -> None:
    simulated = [made(64, (4, 4), module="fc"), made(64, (2, 8), module="head")]
    assert shapes([made(64, module="head"), made(64, module="fc")], simulated) == [(2, 8), (4, 4)]
    assert shapes([made(64, module="fc")] * 3, simulated) == [(4, 4)] * 3


def test_several_shapes_are_told_apart_by_order_if_their_numbers_agree() -> None:
    simulated = [made(64, (4, 4)), made(64, (2, 8)), made(64)]
    assert shapes([made(64)] * 3, simulated) == [(4, 4), (2, 8), None]
    assert shapes([made(64)] * 2, simulated) == [None, None]


def test_what_is_known_or_unheard_of_stays() -> None:
    assert shapes([made(64, (16,)), made(128)], [made(64, (4, 4))]) == [(16,), None]

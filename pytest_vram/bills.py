"""Bills: whose bytes an allocation is, decided by one rule for both producers of a Trace.

Labels come first. A producer labels what it recognises while it records (``workspace``,
``autocast_cache``, scratch of a kernel: ``temporary``), the Observer what a tensor turns out to be
(parameters, buffers, gradients, optimizer state, master weights, inputs). What nobody labelled is
decided by where an allocation was made and how long it lived:

* In a forward, or in a phase that the test named: ``activations`` if it is alive when the next
  backward of its step begins (or when memory ran out before one); ``temporary`` if it died before;
  ``other`` if it is alive at the end and no backward of its step came.
* In backward: ``activations`` inside a module, which runs there only to compute again what was not
  kept; else ``temporary``.
* In the optimizer: ``temporary``.
* In setup or between phases: ``temporary`` if it is dead when the next forward begins; if alive,
  ``inputs`` for a copy or new values and ``other`` for anything computed. A training loop without
  modules shows no forward: what such a loop computed and is alive when backward begins is
  ``activations``. ``other`` if it is alive at the end and neither came.

An ``inputs`` label on what a module's own forward allocated is void: one module's output was
handed to another one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace

from pytest_vram.trace import Allocation, Phase, Trace

#: Phases in which no forward runs; every other name stands for one.
_NOT_FORWARD = frozenset({"setup", "between", "backward", "optimizer"})

#: Operators whose result holds values from elsewhere: the host, a generator, a constant.
_SOURCE_NAMES = """
    _to_copy arange bernoulli clone copy_ empty empty_like empty_strided eye full full_like
    lift_fresh linspace logspace multinomial new_empty new_empty_strided new_full new_ones
    new_zeros normal one_hot ones ones_like rand rand_like randint randint_like randn randn_like
    randperm scalar_tensor tensor to zeros zeros_like
"""
#: A producer that could not tell the operator says "".
_SOURCES = {"", *(f"aten::{name}" for name in _SOURCE_NAMES.split())}


def settle(trace: Trace) -> Trace:
    """``trace`` with the ``bill`` of every allocation filled in; the argument is left as it is.

    Linear in the number of events, but for a binary search among the phase marks.
    """
    calendar = _Calendar(trace)
    allocations = list(trace.allocations)
    for index, birth, death, phase in calendar.lives:
        allocation = allocations[index]
        void = allocation.bill == "inputs" and allocation.module != ""
        if void or not allocation.bill:
            allocations[index] = _billed(allocation, calendar.bill(allocation, birth, death, phase))
    return replace(trace, allocations=allocations)


class _Calendar:
    """When phases began, and from when to when each allocation lived, in positions of events."""

    def __init__(self, trace: Trace) -> None:
        self._end = len(trace.events)
        self._forwards: list[int] = []
        self._backwards: list[int] = []
        self._backward_steps: list[int] = []
        self._ooms: list[int] = []
        self.lives = list(self._read(trace))

    def _read(self, trace: Trace) -> Iterator[tuple[int, int, int, Phase]]:
        """``(index, birth, death, phase of birth)``; death is past the end for what survives."""
        phase = Phase("setup", 0)
        births: list[tuple[int, int, Phase]] = []
        deaths: dict[int, int] = {}
        for position, event in enumerate(trace.events):
            kind = event.kind
            if kind == "alloc":
                births.append((event.index, position, phase))
            elif kind == "free":
                deaths[event.index] = position
            elif kind == "phase":
                phase = trace.phases[event.index]
                self._mark(phase, position)
            elif kind == "oom":
                self._ooms.append(position)
        for index, position, at in births:
            yield index, position, deaths.get(index, self._end), at

    def _mark(self, phase: Phase, position: int) -> None:
        if phase.name == "backward":
            self._backwards.append(position)
            self._backward_steps.append(phase.step)
        elif phase.name not in _NOT_FORWARD:
            self._forwards.append(position)

    def bill(self, allocation: Allocation, birth: int, death: int, phase: Phase) -> str:
        if phase.name == "backward":
            return "activations" if allocation.module else "temporary"
        if phase.name == "optimizer":
            return "temporary"
        if phase.name in ("setup", "between") and not allocation.module:
            return self._bill_of_preparation(allocation, birth, death)
        return self._bill_of_forward(birth, death, phase.step)

    def _bill_of_forward(self, birth: int, death: int, step: int) -> str:
        number = bisect_right(self._backwards, birth)
        if number < len(self._backwards) and self._backward_steps[number] == step:
            return "activations" if death > self._backwards[number] else "temporary"
        failed = self._next(self._ooms, birth)
        if failed < death:
            return "activations"
        return "other" if death == self._end else "temporary"

    def _bill_of_preparation(self, allocation: Allocation, birth: int, death: int) -> str:
        forward, backward = self._next(self._forwards, birth), self._next(self._backwards, birth)
        used = min(forward, backward)
        if used == self._end:
            return "other" if death == self._end else "temporary"
        if death < used:
            return "temporary"
        if allocation.operator in _SOURCES:
            return "inputs"
        return "other" if forward < backward else "activations"

    def _next(self, positions: list[int], after: int) -> int:
        number = bisect_right(positions, after)
        return positions[number] if number < len(positions) else self._end


def _billed(allocation: Allocation, bill: str) -> Allocation:
    # dataclasses.replace takes four times as long, and a trace may hold a million of these.
    return Allocation(
        allocation.requested,
        allocation.block,
        allocation.address,
        allocation.stream,
        bill,
        allocation.name,
        allocation.shape,
        allocation.dtype,
        allocation.operator,
        allocation.module,
        allocation.frame,
    )

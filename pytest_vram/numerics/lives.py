"""Lives of allocations: births, deaths and phases of a settled Trace, looked up by position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from pytest_vram.trace import Allocation, Phase, Trace

_NOT_FORWARD = frozenset({"setup", "between", "backward", "optimizer"})


@dataclass(frozen=True, slots=True)
class Life:
    """One allocation from ``birth`` to ``death`` (positions of events; past the end: survived)."""

    allocation: Allocation
    birth: int
    death: int
    phase: Phase  #: in which it was made
    index: int = -1  #: of the allocation in the Trace

    @property
    def block(self) -> int:
        return self.allocation.block

    @property
    def requested(self) -> int:
        return self.allocation.requested

    @property
    def bill(self) -> str:
        return self.allocation.bill

    @property
    def dtype(self) -> str:
        return self.allocation.dtype

    @property
    def shape(self) -> tuple[int, ...] | None:
        return self.allocation.shape

    @property
    def operator(self) -> str:
        return self.allocation.operator

    @property
    def module(self) -> str:
        return self.allocation.module

    @property
    def frame(self) -> str:
        return self.allocation.frame or "an unknown line"

    @property
    def recomputed(self) -> bool:
        """Made by a module's forward that ran again inside backward."""
        return self.phase.name == "backward" and self.bill == "activations"


class Lives:
    """All lives of a settled ``trace``, its peaks, and who was alive when."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.all: list[Life] = []
        self.peak = self.peak_reserved = 0
        self.peak_at = 0
        self.peak_phase = Phase("setup", 0)
        self._begins: list[int] = []
        self._read()

    def _read(self) -> None:
        births: list[tuple[int, int, Phase]] = []
        deaths: dict[int, int] = {}
        phase, trained = Phase("setup", 0), True
        for position, event, allocated, reserved in self.trace.walk():
            if event.kind == "alloc":
                births.append((event.index, position, phase))
                if allocated > self.peak:
                    self.peak, self.peak_at, self.peak_phase = allocated, position, phase
            elif event.kind == "free":
                deaths[event.index] = position
            elif event.kind == "phase":
                phase = self.trace.phases[event.index]
                if phase.name == "backward":
                    trained = True
                elif phase.name not in _NOT_FORWARD and trained:
                    self._begins.append(position)
                    trained = False
            self.peak_reserved = max(self.peak_reserved, reserved)
        end = len(self.trace.events)
        for index, position, at in births:
            life = Life(self.trace.allocations[index], position, deaths.get(index, end), at, index)
            self.all.append(life)

    def repetition(self, number: int) -> int:
        """The position at which the ``number``-th forward (from 1) after a backward begins."""
        if 1 <= number <= len(self._begins):
            return self._begins[number - 1]
        return len(self.trace.events)

    def growth_of_the_old(self) -> list[int]:
        """By how much what is alive as a repetition begins grew, of what was made before the one
        that just ended: the last step's own variables, larger with longer batches, are no leak."""
        begins = self._begins[-6:]
        old = [0] * max(0, len(begins) - 1)
        for life in self.all:
            for number, (before, now) in enumerate(pairwise(begins)):
                if life.birth < before and now < life.death:
                    old[number] += life.block
        return [after - before for before, after in pairwise(old)]

    def alive_at(self, position: int) -> Iterator[Life]:
        return (life for life in self.all if life.birth <= position < life.death)

    @cached_property
    def at_peak(self) -> list[Life]:
        return list(self.alive_at(self.peak_at))

    def bill_at_peak(self, bill: str) -> int:
        return sum(life.block for life in self.at_peak if life.bill == bill)


def in_words(dtype: str, shape: tuple[int, ...] | None) -> str:
    """``float32[4, 512, 50257]``."""
    return f"{dtype}[{', '.join(map(str, shape or ()))}]"

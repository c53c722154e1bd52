"""Counting training steps, from what optimizers do."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Segment:
    """Forwards and backwards up to and with the optimizer steps that follow them."""

    first: int = -1  #: number of the optimizer that stepped first
    stepped: set[int] = field(default_factory=set)
    backward: bool = False


class StepCounter:
    """Counts training steps from what happened so far, and again when all is known."""

    def __init__(self, *, from_start: bool = False) -> None:
        self._from_start = from_start  # every optimizer that there is has been met
        self.number = 0
        self.failed = False
        self._explicit = False
        self._segments: list[Segment] = []
        self._since_begin: set[int] = set()  # optimizers that have stepped in this step
        self._optimizers: dict[int, tuple[weakref.ref[Any], int]] = {}  # id -> (ref, number)
        self._have_stepped: dict[int, None] = {}  # numbers, in order of the first step

    @property
    def segment(self) -> int:
        """Index of the segment that runs now; -1 where none counts."""
        return -1 if self._explicit else len(self._segments) - 1

    @property
    def by_hand(self) -> int:
        """Backwards so far of a program that has made no optimizer and updates its parameters
        itself: there a forward after a backward begins the next step."""
        if self._optimizers or not self._from_start:
            return 0
        return sum(segment.backward for segment in self._segments)

    def begin(self) -> None:
        self._explicit = True
        self.number += 1

    def meet(self, optimizer: Any) -> int:
        known = self._optimizers.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            number = known[1] + 1 if known is not None else 0
            number = max([number, *(n + 1 for _, n in self._optimizers.values())])
            self._optimizers[id(optimizer)] = known = (weakref.ref(optimizer), number)
        return known[1]

    def known(self) -> list[Any]:
        return [o for ref, _ in self._optimizers.values() if (o := ref()) is not None]

    def optimizers(self) -> list[Any]:
        alive = {number: ref() for ref, number in self._optimizers.values()}
        return [o for number in self._have_stepped if (o := alive.get(number)) is not None]

    def work(self, backward: bool = False) -> None:
        """A forward or a backward begins."""
        if not self._segments or (self.by_hand and self._segments[-1].backward and not backward):
            self._open(new_step=not self._explicit)
        elif self._segments[-1].stepped:
            waiting = {n for ref, n in self._optimizers.values() if ref() is not None}
            self._open(new_step=not self._explicit and waiting <= self._since_begin)
        self._segments[-1].backward |= backward

    def _open(self, new_step: bool) -> None:
        self._segments.append(Segment())
        if new_step:
            self.number += 1

    def stepped(self, optimizer: Any) -> None:
        """``optimizer`` is about to step (or its scaler decides that it doesn't)."""
        number = self.meet(optimizer)
        self._have_stepped.setdefault(number)
        # A closure optimizer runs its forwards itself: nothing comes before its step.
        if not self._segments or number in self._segments[-1].stepped:
            self._open(new_step=not self._explicit)
        segment = self._segments[-1]
        if not segment.stepped:
            segment.first = number
            if number in self._since_begin:
                self._since_begin = set()
        segment.stepped.add(number)
        self._since_begin.add(number)
        if not self._explicit:
            self.number = self.numbers()[-1]

    def numbers(self) -> list[int]:
        """The step of each segment, from 1, as far as it is known now."""
        result: list[int] = []
        step, stepped = 1, set[int]()
        for segment in self._segments:
            # Work that no optimizer step follows is a step cut short if it had a backward or
            # failed; else (an evaluation at the end) it belongs to the step before.
            cut_short = segment.first < 0 and (segment.backward or self.failed)
            if result and (segment.first in stepped or cut_short):
                step, stepped = step + 1, set()
            stepped |= segment.stepped
            result.append(step)
        return result

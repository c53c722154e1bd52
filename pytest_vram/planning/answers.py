"""What a plan answers: bills, moments, peak and range, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pytest_vram.planning.runs import Setup

#: The lines of a ledger, in the order in which reports print them. They are those of
#: ``pytest_vram.trace``, which formulas do not import; a test holds the two together.
BILLS = (
    "parameters",
    "gradients",
    "optimizer_state",
    "master_weights",
    "buffers",
    "inputs",
    "activations",
    "autocast_cache",
    "workspace",
    "temporary",
    "other",
)


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something the answer depends on that the question did not say: the peak would be ``low`` to
    ``high`` bytes away if it were otherwise."""

    name: str
    low: int
    high: int
    says: str

    @property
    def spread(self) -> int:
        return self.high - self.low


@dataclass(frozen=True, slots=True)
class Moment:
    """One point of a training step and what is alive then, by bill."""

    name: str
    bills: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.bills.values())


@dataclass(frozen=True)
class Plan:
    """The answer for one rank, the one that holds most. Bytes."""

    setup: Setup
    bills: Mapping[str, int]
    moments: tuple[Moment, ...]
    assumptions: tuple[Assumption, ...]
    parameters: int
    trainable: int
    notes: tuple[str, ...] = field(default=())

    @property
    def textbook(self) -> int:
        """All bills added up, as papers do; temporaries are nobody's bill there."""
        return sum(size for bill, size in self.bills.items() if bill != "temporary")

    @property
    def fixed(self) -> int:
        """What does not depend on the batch: weights, gradients, master copies, states."""
        names = ("parameters", "gradients", "master_weights", "optimizer_state")
        return sum(self.bills[name] for name in names)

    @cached_property
    def peak_moment(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def peak(self) -> int:
        """Peak allocated bytes, as ``torch.cuda.max_memory_allocated`` counts them."""
        return self.peak_moment.total

    @property
    def low(self) -> int:
        return max(0, self.peak + sum(item.low for item in self.assumptions))

    @property
    def high(self) -> int:
        """Reserved bytes if every assumption goes the wrong way."""
        return self.peak + sum(item.high for item in self.assumptions)

    @property
    def dominating(self) -> Assumption:
        """The assumption that moves the answer most."""
        return max(self.assumptions, key=lambda item: item.spread)

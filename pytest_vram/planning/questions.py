"""The questions that people ask: does it fit, on how many of which cards, what must give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from pytest_vram.planning.activations import Recompute
from pytest_vram.planning.answers import Plan
from pytest_vram.planning.plan import make_plan
from pytest_vram.planning.runs import Offload, Setup
from pytest_vram.planning.shapes import PlanError
from pytest_vram.planning.states import OPTIMIZERS, PRECISIONS, Lora

Verdict = Literal["yes", "tight", "no"]


class Card(Protocol):
    """What a question needs to know of a card: bytes in all, and what is left for PyTorch."""

    @property
    def name(self) -> str: ...
    @property
    def memory(self) -> int: ...
    @property
    def free(self) -> int: ...


Change = Callable[[Setup], Setup]


@dataclass(frozen=True, slots=True)
class Fit:
    """``yes``: fits even if every assumption goes the wrong way; ``no``: not even if all go the
    right way; ``tight``: it depends on the assumption that dominates."""

    card: Card
    plan: Plan
    verdict: Verdict

    @property
    def spare(self) -> int:
        """Bytes left at the expected peak; negative: bytes that are missing."""
        return self.card.free - self.plan.peak


def fits(setup: Setup, card: Card) -> Fit:
    """Whether one rank of ``setup`` fits on ``card``, the CUDA context taken off."""
    plan = make_plan(setup)
    return Fit(card, plan, _verdict(plan, card.free))


def _verdict(plan: Plan, free: int) -> Verdict:
    if plan.high <= free:
        return "yes"
    return "no" if plan.low > free else "tight"


@dataclass(frozen=True, slots=True)
class Cards:
    """How many cards. ``bare`` divides the textbook sum; ``start`` shards what can be sharded
    (ZeRO-3) and leaves 10 % for fragmentation; ``prefer`` leaves 30 %, for longer batches,
    evaluation and checkpoints. 0 where no number of cards is enough."""

    card: Card
    bare: int
    start: int
    prefer: int


def cards_needed(setup: Setup, card: Card, limit: int = 4096) -> Cards:
    """How many of ``card`` a run needs when data-parallel ranks share the fixed bills.

    Bare arithmetic: ceil((fixed + activations) / memory). In practice activations, gathered layers
    and workspaces are not shared: the smallest k with fixed/k + rest within 90 % (70 %) of the
    memory.
    """
    whole = make_plan(replace(setup, parallel=replace(setup.parallel, data=1, zero=0)))
    bare = math.ceil(whole.textbook / card.memory)
    return Cards(card, bare, _sharded(setup, card, 0.90, limit), _sharded(setup, card, 0.70, limit))


def _sharded(setup: Setup, card: Card, share: float, limit: int) -> int:
    """The fewest ZeRO-3 ranks with which the textbook sum stays within a share of the memory."""

    def enough(ranks: int) -> bool:
        parallel = replace(setup.parallel, data=ranks, zero=3 if ranks > 1 else 0)
        plan = make_plan(replace(setup, parallel=parallel))
        return plan.textbook + card.memory - card.free <= share * card.memory

    return _least(enough, limit)


def _least(works: Callable[[int], bool], limit: int) -> int:
    """The smallest number from 1 to ``limit`` for which ``works``; 0 if there is none."""
    high = 1
    while not works(high):
        if high >= limit:
            return 0
        high = min(2 * high, limit)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


def _most(works: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` for which ``works``; 0 if not even 1 does."""
    if not works(1):
        return 0
    low = 1
    while low < limit and works(min(2 * low, limit)):
        low = min(2 * low, limit)
    high = min(2 * low, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def largest_batch(setup: Setup, card: Card, limit: int = 1 << 16) -> int:
    """The largest micro-batch whose expected peak fits; 0 if not even one sample does."""
    return _most(lambda batch: _inside(replace(setup, batch=batch), card), limit)


def largest_sequence(setup: Setup, card: Card, limit: int = 1 << 22) -> int:
    """The longest sequence that fits, up to the model's own positions."""
    if setup.shape.tokens_per_sample:
        raise PlanError(f"{setup.shape.name} reads images: its sequence is fixed")
    limit = setup.shape.positions or limit
    return _most(lambda length: _inside(replace(setup, sequence=length), card), limit)


def largest_layers(setup: Setup, card: Card, limit: int = 4096) -> int:
    """The deepest model of the same width that fits."""
    towers = len(setup.shape.towers)

    def works(layers: int) -> bool:
        shape = setup.shape.with_layers(max(layers, towers))
        return _inside(replace(setup, shape=shape), card)

    return _most(works, limit)


def _inside(setup: Setup, card: Card) -> bool:
    try:
        return make_plan(setup).peak <= card.free
    except PlanError:
        return False


@dataclass(frozen=True, slots=True)
class Remedy:
    """One step of a rescue, on top of the ones before it."""

    name: str
    setup: Setup
    plan: Plan
    verdict: Verdict
    price: str


#: Which remedy acts on which bill (ledger, section 3).
FOR_BILL = {
    "optimizer_state": "ZeRO-1, 8-bit states or offload",
    "master_weights": "ZeRO-1 or offload",
    "gradients": "ZeRO-2",
    "parameters": "ZeRO-3 or tensor parallelism",
    "activations": "a smaller micro-batch with accumulation, recomputation, sequence parallelism",
    "autocast_cache": "16-bit parameters (bf16-pure), or ZeRO-3",
    "temporary": "a fused optimizer, recomputation",
}


def blame(plan: Plan) -> str:
    """The bill that is largest at the peak among those that something can be done about."""
    bills = plan.peak_moment.bills
    return max(FOR_BILL, key=lambda name: bills[name])


def rescue(setup: Setup, card: Card) -> tuple[Remedy, ...]:
    """Remedies in the order of their price, each on top of the last, until it fits.

    Micro-batch 1 with accumulation, flash attention, recomputation (selective, then full), fused
    or 8-bit optimizer, sharding or offload, LoRA, QLoRA. A remedy that does not lower the peak is
    passed over, and tried again once another has moved the peak elsewhere.
    """
    done: list[Remedy] = []
    current = make_plan(setup)
    waiting = list(_remedies(setup))
    verdict = _verdict(current, card.free)
    while verdict != "yes":
        for remedy in waiting:
            name, price, change = remedy
            plan = make_plan(change(current.setup))
            if plan.peak < current.peak:
                break
        else:
            break
        waiting.remove(remedy)
        current, verdict = plan, _verdict(plan, card.free)
        done.append(Remedy(name, plan.setup, plan, verdict, price))
    return tuple(done)


def _remedies(setup: Setup) -> Iterator[tuple[str, str, Change]]:
    effective = setup.batch * setup.accumulation
    if setup.batch > 1:
        yield (
            f"micro-batch 1, accumulation {effective}",
            "same gradients, less parallel work",
            lambda s: replace(s, batch=1, accumulation=effective),
        )
    if setup.attention == "explicit" and not setup.shape.attention:
        yield "flash attention", "none", lambda s: replace(s, attention="flash")
    if setup.recompute.kind == "none":
        yield (
            "selective recomputation",
            "a few percent more compute",
            lambda s: replace(s, recompute=Recompute("selective")),
        )
    yield (
        "full recomputation",
        "about one third more compute",
        lambda s: replace(s, recompute=Recompute("full")),
    )
    yield "fused optimizer", "none", lambda s: replace(s, step="fused")
    if setup.optimizer.name in ("adam", "adamw"):
        yield (
            "8-bit optimizer states",
            "another optimizer",
            lambda s: replace(s, optimizer=OPTIMIZERS["adamw8bit"]),
        )
    if setup.parallel.data > 1:
        for stage in range(setup.parallel.zero + 1, 4):
            yield f"ZeRO-{stage}", "communication", _zero(stage)
    yield (
        "optimizer state in host memory",
        "bus traffic every step",
        lambda s: replace(s, offload=Offload(s.offload.what | {"optimizer"})),
    )
    if setup.lora is None:
        yield (
            "LoRA, rank 8, all linear layers",
            "trains adapters only",
            lambda s: replace(
                s,
                lora=Lora(8, ("all-linear",)),
                precision=PRECISIONS["bf16-plain"],
                offload=Offload(),
            ),
        )
    yield (
        "QLoRA, NF4 with double quantisation",
        "quantised backbone",
        lambda s: replace(
            s,
            lora=s.lora or Lora(8, ("all-linear",)),
            quantisation="nf4-double",
            precision=PRECISIONS["bf16-plain"],
        ),
    )


def _zero(stage: int) -> Change:
    return lambda s: replace(s, parallel=replace(s.parallel, zero=stage))


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What one change of the question does to the answer."""

    name: str
    peak: int
    change: int


def sensitivity(setup: Setup) -> tuple[Sensitivity, ...]:
    """Batch and sequence +50 %, layers +30 %, the other precisions, 8-bit states, no momentum."""
    base = make_plan(setup).peak
    rows: list[tuple[str, Change]] = [
        ("batch +50 %", lambda s: replace(s, batch=math.ceil(s.batch * 1.5))),
        ("sequence +50 %", lambda s: replace(s, sequence=math.ceil(s.sequence * 1.5))),
        (
            "layers +30 %",
            lambda s: replace(s, shape=s.shape.with_layers(math.ceil(s.shape.layers * 1.3))),
        ),
    ]
    for name in ("fp32", "bf16", "bf16-pure"):
        if name != setup.precision.name:
            rows.append((f"precision {name}", _precision(name)))
    for name in ("adamw", "adamw8bit", "sgd"):
        if name != setup.optimizer.name:
            rows.append((f"optimizer {name}", _optimizer(name)))
    if setup.recompute.kind == "none":
        rows.append(("full recomputation", lambda s: replace(s, recompute=Recompute("full"))))
    result = []
    for name, change in rows:
        try:
            peak = make_plan(change(setup)).peak
        except PlanError:  # a sequence beyond the model's positions
            continue
        result.append(Sensitivity(name, peak, peak - base))
    return tuple(result)


def _precision(name: str) -> Change:
    return lambda s: replace(s, precision=PRECISIONS[name])


def _optimizer(name: str) -> Change:
    return lambda s: replace(s, optimizer=OPTIMIZERS[name])

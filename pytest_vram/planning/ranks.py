"""The parameter tensors of one rank, and the bills that they make.

Everything here lives through the whole step, but for what the optimizer's step holds for a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pytest_vram.planning.runs import Setup
from pytest_vram.planning.shapes import Weight
from pytest_vram.planning.states import BLOCK, quantised_size


class Rank:
    """The parameter tensors that one pipeline stage's rank holds, and their sizes."""

    def __init__(self, setup: Setup, stage: int) -> None:
        self.setup = setup
        self.stage = stage
        parallel = setup.parallel
        self.last = stage == parallel.pipeline - 1
        total = setup.shape.layers
        self.layers = total // parallel.pipeline + (stage < total % parallel.pipeline)
        self.base = [w for w in setup.shape.weights() if self._here(w)]
        self.added = list(setup.lora.weights(self.base)) if setup.lora else []

    def _here(self, weight: Weight) -> bool:
        if self.setup.parallel.pipeline == 1 or weight.name.startswith(("layers", "tower")):
            return not weight.name.endswith(("final_norm.weight", "final_norm.bias")) or self.last
        if weight.role in ("head",):
            return self.last
        if self.setup.shape.is_vocabulary(weight) and self.setup.shape.tied:
            return self.stage == 0 or self.last
        return self.stage == 0

    def share(self, weight: Weight) -> float:
        """Which part of these tensors the rank holds, before ZeRO."""
        parallel = self.setup.parallel
        part = 1.0 / parallel.tensor if weight.cut else 1.0
        if weight.role == "expert":
            part /= parallel.expert
        if weight.name.startswith(("layers", "tower")) and "final_norm" not in weight.name:
            part *= self.layers / self.setup.shape.layers
        return part

    def size(
        self, weights: Iterable[Weight], element: float | Callable[[Weight], float], over: int = 1
    ) -> int:
        """Bytes of these tensors at ``element`` bytes each, sharded over ``over`` ranks."""
        total = 0.0
        for weight in weights:
            each = element(weight) if callable(element) else element
            part = self.share(weight)
            if part == 1 and over == 1:
                total += weight.count * -(-int(weight.numel * each) // BLOCK) * BLOCK
            else:
                total += weight.total * each * part / over
        return int(total)

    @property
    def trained(self) -> list[Weight]:
        """What the optimizer updates."""
        return self.added if self.setup.lora else [w for w in self.base if not w.frozen]

    def base_element(self, weight: Weight) -> float:
        """Bytes per element of a base weight: quantisation takes the layers' matrices only."""
        setup = self.setup
        full = setup.precision.parameter
        if setup.quantisation and weight.role in ("matrix", "expert"):
            return quantised_size(setup.quantisation, full)
        return full

    def low_precision_copies(self) -> int:
        """Autocast's cast of every fp32 matrix (the head's too), or FP8's quantised weights."""
        precision, shape = self.setup.precision, self.setup.shape
        fused = any(t.fused_experts and not t.every_expert for t in shape.towers)
        inside = ("matrix",) if fused and precision.cache else ("matrix", "expert")
        # Quantised matrices are dequantised for each product, never cast.
        matrices = [w for w in self.base if w.role in inside and not self.setup.quantisation]
        matrices += [w for w in self.base if w.role == "head" and len(w.shape) > 1]
        if shape.head == "lm" and shape.tied and self.last:
            matrices += [w for w in self.base if shape.is_vocabulary(w)]
        if precision.cache:
            return self.size(matrices + self.added, precision.compute)
        if precision.weight_copies:
            inner = [w for w in matrices if w.role in ("matrix", "expert")]
            return self.size(inner, precision.weight_copies)
        return 0


def static_bills(rank: Rank) -> dict[str, int]:
    """Bills that live through the whole step: table 4 of the ledger.

    ZeRO stage 1 divides optimizer state and master weights by k, stage 2 gradients too, stage 3
    parameters too (Rajbhandari et al. 2020, arXiv 1910.02054, figure 1).
    """
    setup, parallel, precision = rank.setup, rank.setup.parallel, rank.setup.precision
    k = parallel.data
    states, grads, params = (k if parallel.zero >= level else 1 for level in (1, 2, 3))
    away = setup.offload.what
    adapter = setup.lora.size if setup.lora else 0
    updated = adapter or precision.updated
    parameters = rank.size(rank.base, rank.base_element, params)
    if setup.lora:
        parameters += rank.size(rank.added, adapter, params)
    trained = rank.trained
    optimizer = setup.optimizer.bytes_for(trained, updated, rounded=k == 1)
    shares = rank.size(trained, 1, states) / max(1, sum(w.total for w in trained))
    whole = rank.size(trained, 1) if states == 1 else 0
    plain = whole and all(rank.share(w) == 1 for w in trained)
    bills = {
        "parameters": 0 if "parameters" in away else parameters,
        "gradients": rank.size(trained, adapter or precision.gradient, grads),
        "optimizer_state": optimizer if plain else int(optimizer * shares),
        "master_weights": 0 if setup.lora else rank.size(trained, precision.master, states),
        "buffers": setup.buffers,
        "inputs": _inputs(setup),
        "workspace": 2 * setup.workspace,
        "other": _communication(rank),
    }
    if "optimizer" in away or setup.optimizer.paged:
        bills["optimizer_state"] = 0
    if "optimizer" in away and setup.offload.step_on == "cpu":
        bills["master_weights"] = 0
    return bills


def _inputs(setup: Setup) -> int:
    """Token ids and labels (int64 each), or pixels (fp32) and one label a sample."""
    shape = setup.shape
    if shape.frames_per_sample:  # audio, labels and the decoder's tokens
        return setup.batch * (shape.frames_per_sample * 4 + 2 * 8 * setup.sequence)
    if shape.audio_per_token:
        return setup.batch * setup.sequence * shape.audio_per_token * 4
    if shape.pixels_per_sample:
        text = setup.sequence if shape.vocab else 1  # token ids, or one label
        return setup.batch * (shape.pixels_per_sample * 4 + 8 * text)
    ids = setup.batch * setup.sequence * 8 // setup.parallel.context
    return ids * (2 if len(shape.towers) == 1 else 3)


def _communication(rank: Rank) -> int:
    """Buffers of data parallelism: DDP's bucket copies of all gradients; with ZeRO-3/FSDP the two
    largest layers gathered (one computing, one prefetched) and one layer's whole gradient."""
    setup, parallel = rank.setup, rank.setup.parallel
    if parallel.data == 1:
        return 0
    if parallel.zero == 3:
        layer = setup.shape.largest_layer(parallel.expert) // parallel.tensor
        grad = 0 if setup.lora else setup.precision.gradient
        return layer * (2 * setup.precision.compute + grad)
    if parallel.zero == 0 and setup.buckets:
        adapter = setup.lora.size if setup.lora else 0
        return rank.size(rank.trained, adapter or setup.precision.gradient)
    return 0


def step_temporaries(rank: Rank) -> int:
    """What ``optimizer.step()`` holds for a moment on top of the bills.

    Foreach implementations hold a few tensors as large as all updated parameters, plain loops two
    as large as the largest one, fused kernels none. With master weights the 16-bit gradients are
    cast to the masters' fp32 (and dropped): the difference counts here too.
    """
    setup, parallel = rank.setup, rank.setup.parallel
    over = parallel.data if parallel.zero >= 1 else 1
    if "optimizer" in setup.offload.what and setup.offload.step_on == "cpu":
        return 0
    updated = setup.lora.size if setup.lora else setup.precision.updated
    own = rank.size(rank.trained, updated, over)
    cast = 0
    if setup.precision.master and not setup.lora:
        cast = rank.size(rank.trained, updated - setup.precision.gradient, over)
    if setup.step == "fused" and setup.optimizer.fusible:
        return cast
    if setup.step == "loop":
        largest = max((weight.numel for weight in rank.trained), default=0)
        return cast + int(2 * largest * updated * bool(setup.optimizer.temporaries))
    return cast + int(own * setup.optimizer.temporaries)

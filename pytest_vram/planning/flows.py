"""What passes through one rank in a step: activations, casts, the logits, gradients in flight."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_vram.planning.activations import (
    Forward,
    Head,
    Sharding,
    embedding_bytes,
    head_bytes,
    tower_bytes,
    tower_ends,
)
from pytest_vram.planning.ranks import Rank
from pytest_vram.planning.runs import Setup, attention_kernel
from pytest_vram.planning.shapes import Tower


@dataclass(frozen=True, slots=True)
class Flow:
    """What a forward pass leaves, on one rank."""

    kept: int
    rerun: int
    working: int
    copies: int
    kept_copies: int
    head: Head
    logits: int  #: bytes of one copy of the logits in the compute type

    @classmethod
    def of(cls, rank: Rank) -> Flow:
        """The flow through ``rank``: its own layers, as many micro-batches as are in flight."""
        setup = rank.setup
        forward = _forward(setup)
        cut = Sharding(setup.parallel.tensor, setup.parallel.sequence, setup.parallel.context)
        flight = min(setup.parallel.pipeline - rank.stage, setup.accumulation)
        kept = rerun = working = 0
        for tower in setup.shape.towers:
            layers = -(-tower.layers * rank.layers // setup.shape.layers)
            part = tower_bytes(tower, layers, forward.at(tower), setup.recompute, cut)
            kept += part.kept
            rerun = max(rerun, part.rerun)
            working = max(working, _working(setup, tower))
        if rank.stage == 0:
            kept += embedding_bytes(setup.shape, forward, cut)
            kept += tower_ends(setup.shape, forward, cut)
        kept *= flight
        if "activations" in setup.offload.what:
            kept = min(kept, 2 * kept // max(1, rank.layers))
        head = head_bytes(setup.shape, forward, cut, held=setup.held)
        head = head if rank.last else Head()
        copies = rank.low_precision_copies()
        kept_copies = copies
        if setup.precision.cache and setup.recompute.checkpointed:
            kept_copies = min(copies, 2 * setup.shape.hidden * setup.shape.logits)
        values = 0
        if rank.last:
            rows = forward.tokens if setup.shape.head == "lm" else setup.batch
            values = rows * setup.shape.logits // setup.parallel.tensor // setup.parallel.context
        logits = values * setup.precision.compute
        return cls(kept, rerun, working, copies, kept_copies, head, logits)


def _forward(setup: Setup) -> Forward:
    return Forward(
        batch=setup.batch,
        sequence=setup.tokens,
        precision=setup.precision,
        attention=attention_kernel(setup),
        dropout=setup.dropout,
        lora=setup.lora,
        keeps_inputs=setup.quantisation == "int8",
    )


def summed_bytes(rows: int, columns: int, threads: int) -> int:
    """Scratch of a bias's gradient, the sum of ``rows`` x ``columns`` over the rows.

    The partial results of a long sum lie in global memory (ATen/native/cuda/Reduce.cuh,
    ``setReduceConfig`` and ``global_memory_size``, PyTorch 2.13). Blocks of 512 threads are 32 wide
    and load 4, 2 or 1 columns at a time, as the number of columns divides; a thread sums 16 to 256
    values, so that the card's resident ``threads`` are busy. A block keeps 4 bytes for each thread
    of its width and each column: 8 bytes per element of a short sum, half a byte of a very long
    one, and between them 512 bytes for each thread of the card.
    """
    vector = 4 if columns % 4 == 0 else 2 if columns % 2 == 0 else 1
    height = 16 // vector
    values = -(-rows // height)
    grid = -(-columns // (32 * vector))
    target = threads // (32 * height)
    if values < 256 or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // 16)), -(-values // 256))
    return 4 * columns * blocks * 32 * vector if blocks > 1 else 0


def _working(setup: Setup, tower: Tower) -> int:
    """Gradients in flight while the last layer begins its backward: the stream's, and the one that
    the down matrix hands to the activation function. A gated block makes two of them, a spelled-out
    activation too; explicit attention the score matrices."""
    sequence = tower.tokens or setup.tokens
    tokens = setup.batch * sequence // setup.parallel.context
    c, r = setup.precision.compute, setup.precision.residual
    split = tower.gated or tower.activation == "gelu_new" or tower.mixer is not None
    wide = tower.ffn if tower.dense_layers or tower.moe_layers else 0
    wide = max(wide, tower.mixer.inner if tower.mixer else 0)
    inner = (2 if split else 1) * tokens * wide * c // setup.parallel.tensor
    if attention_kernel(setup) != "flash" and tower.attention_layers:
        scores = tokens * sequence * tower.heads * (8 + c) // setup.parallel.tensor
        if tower.relative:  # what gather's derivative scatters into
            rows = tower.relative.used(sequence)
            scores += tokens * rows * tower.heads * c // setup.parallel.tensor
        inner = max(inner, scores)
    working = inner + 2 * tokens * tower.hidden * r
    if tower.mlp_bias and tower.dense_layers and setup.lora is None:
        summed = summed_bytes(tokens, tower.ffn // setup.parallel.tensor, setup.threads)
        working = max(working, summed + tokens * tower.hidden * (r + c))
    return working

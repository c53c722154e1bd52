"""Published formulas, as their authors wrote them.

The planner's own model of a layer is :mod:`pytest_vram.planning.activations`; these are the
textbook's, so that a figure from a paper or from another tool can be reproduced and compared.
Bytes throughout; the sources print GB for 10^9 (papers) or for 2^30 (DeepSpeed, Megatron's MB).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_vram.planning.shapes import ModelShape


def attention_elements(batch: int, sequence: int, hidden: int, heads: int) -> tuple[int, int]:
    """Elements a layer keeps, linear and quadratic in S: ``19 B S H`` and ``3 B A S^2``.

    Explicit attention, no dropout masks counted; times two for bytes in 16 bits.
    """
    return 19 * batch * sequence * hidden, 3 * batch * heads * sequence * sequence


def explicit_layer(batch: int, sequence: int, hidden: int, heads: int) -> int:
    """``2 (19 B S H + 3 B A S^2)`` bytes of one layer with explicit attention in 16 bits."""
    return 2 * sum(attention_elements(batch, sequence, hidden, heads))


def korthikanti_layer(
    batch: int,
    sequence: int,
    hidden: int,
    heads: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> int:
    """Korthikanti et al. 2022 (arXiv 2205.05198), equations 1 to 5 and table 2, bytes a layer.

    * ``S B H (34 + 5 A S / H)`` without parallelism (16-bit, dropout masks of one byte, F = 4H);
    * tensor parallel t: ``S B H (10 + 24/t + 5 A S / (H t))``;
    * with sequence parallelism everything over t: ``S B H / t (34 + 5 A S / H)``;
    * ``selective`` drops the term in A S / H; ``full`` keeps the layer's input, ``2 S B H``.
    """
    unit = sequence * batch * hidden
    if recompute == "full":
        return 2 * unit
    quadratic = 0 if recompute == "selective" else 5 * heads * sequence * sequence * batch
    if sequence_parallel:
        return (34 * unit + quadratic) // tensor
    return 10 * unit + (24 * unit + quadratic) // tensor


def attention_share(sequence: int, hidden: int, heads: int) -> float:
    """``5 A S / H``: 80 for GPT-3 and 64 for MT-NLG at S = 2048, as section 5 of the paper says."""
    return 5 * heads * sequence / hidden


def selective_saving(sequence: int, hidden: int, heads: int) -> float:
    """The share of a layer's activations that selective recomputation drops: 70 % for GPT-3, 65 %
    for MT-NLG (Korthikanti et al., section 5)."""
    share = attention_share(sequence, hidden, heads)
    return share / (34 + share)


def output_deallocation(batch: int, sequence: int, hidden: int, pipeline: int) -> int:
    """Bytes that freeing each micro-batch's output tensor after sending it saves on the first
    pipeline stage: ``2 S B H p``. 2.73 GiB for 530B (Korthikanti et al., appendix B)."""
    return 2 * sequence * batch * hidden * pipeline


#: Bytes per token and hidden element of one layer, by recomputation: 34 is Korthikanti's linear
#: term, 2 a 16-bit layer input; the 18 assumes that half of what is linear is recomputed as well.
PER_TOKEN = {"none": 34, "selective": 18, "full": 2}


def tokens_in_budget(budget: int, hidden: int, layers: int, recompute: str) -> int:
    """How many tokens' activations fit in ``budget`` bytes: budget / (x H L)."""
    return budget // (PER_TOKEN[recompute] * hidden * layers)


def rule_of_thumb(batch: int, sequence: int, hidden: int, layers: int) -> int:
    """``10 B S H L`` bytes of activations."""
    return 10 * batch * sequence * hidden * layers


def checkpointed(batch: int, sequence: int, hidden: int, layers: int) -> int:
    """Full recomputation as textbooks count it: ``2 B S H`` a layer, and one layer while it is run
    again (34 B S H)."""
    return 2 * batch * sequence * hidden * layers + 34 * batch * sequence * hidden


def extra_compute(recompute: str) -> float:
    """Share of a step's floating-point work that recomputation adds: forward is 2NT of 6NT."""
    return {"none": 0.0, "full": 1 / 3}[recompute]


def largest_model(memory: float, reserved: float, activations: float, per_parameter: float) -> int:
    """Parameters that can be trained on one card: (M - c - a) / bytes per parameter."""
    return max(0, int((memory - reserved - activations) / per_parameter))


def bare_cards(needed: float, memory: float) -> int:
    """Cards by bare arithmetic: everything divides, nothing is lost."""
    return math.ceil(needed / memory)


@dataclass(frozen=True, slots=True)
class DeepSpeedNeed:
    """Bytes that DeepSpeed's estimator expects on the host of one node and on each GPU."""

    cpu: int
    gpu: int


def deepspeed_zero2(
    parameters: int, *, gpus: int = 1, nodes: int = 1, offload: bool = False, buffer: float = 1.5
) -> DeepSpeedNeed:
    """``estimate_zero2_model_states_mem_needs`` of DeepSpeed
    (``deepspeed/runtime/zero/stage_1_and_2.py``; examples in its "Memory Requirements" page).

    GPU: 2 N offloaded, else 4 N + 16 N / ranks. Host: N max(4 ranks, 16) x 1.5 offloaded, else
    4 N x 1.5 per GPU of the node.
    """
    ranks = gpus * nodes
    if offload:
        return DeepSpeedNeed(int(parameters * max(4 * ranks, 16) * buffer), 2 * parameters)
    gpu = 4 * parameters + int(16 * parameters / ranks)
    return DeepSpeedNeed(int(parameters * 4 * gpus * buffer), gpu)


def deepspeed_zero3(
    parameters: int,
    largest_layer: int,
    *,
    gpus: int = 1,
    nodes: int = 1,
    offload: bool = False,
    offload_parameters: bool = False,
    zero_init: bool = True,
    buffer: float = 1.5,
) -> DeepSpeedNeed:
    """``estimate_zero3_model_states_mem_needs`` of DeepSpeed
    (``deepspeed/runtime/zero/stage3.py``).

    GPU: 4 l for the largest layer of l parameters (its fp16 weights and gradients), + 2 N / ranks
    with the optimizer offloaded, + 18 N / ranks with nothing offloaded.
    """
    ranks, factor, layer = gpus * nodes, 1 / nodes, 4 * largest_layer
    if not offload:
        made = largest_layer if zero_init else parameters
        return DeepSpeedNeed(int(4 * made * gpus * buffer), layer + int(18 * parameters / ranks))
    each = 18 if offload_parameters else 16
    host = parameters * (each * factor if zero_init else max(4 * gpus, each * factor))
    gpu = layer if offload_parameters else layer + int(2 * parameters / ranks)
    return DeepSpeedNeed(int(host * buffer), gpu)


@dataclass(frozen=True, slots=True)
class MegatronRun:
    """What Megatron-LM's theoretical report depends on besides the model."""

    sequence: int
    batch: int = 1
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    interleaved: int = 0  #: virtual stages; 0 without interleaving
    distributed_optimizer: bool = False
    micro_batches: int = 0  #: 0: at least as many as stages


def megatron_weights(shape: ModelShape, run: MegatronRun) -> int:
    """Weight and optimizer bytes on the most loaded shard, ``compute_weight_and_optimizer_memory``
    of Megatron-LM (``megatron/training/theoretical_memory_usage.py``).

    18 bytes a parameter (bf16 weight, fp32 gradient, master, m, v), or 6 + 12/data with the
    distributed optimizer. Megatron leaves biases of linear layers out.
    """
    layers = sum(
        weight.total
        for tower in shape.towers
        for weight in tower.weights()
        if weight.role in ("matrix", "expert", "norm")
    )
    norm = 2 if shape.tower.norm == "layernorm" else 1
    block = layers + norm * shape.hidden
    embedding = shape.vocab * shape.hidden
    shard = (block / run.pipeline + embedding) / run.tensor
    if not shape.tied and run.pipeline == 1:
        shard += embedding / run.tensor
    each = 6 + 12 / run.data if run.distributed_optimizer else 18
    return int(shard * each)


def megatron_activations(shape: ModelShape, run: MegatronRun, *, sequence_parallel: bool) -> int:
    """Activation bytes on the first pipeline stage, from the same file.

    With sequence parallelism and selective recomputation: ``S B H (18 + 4 F/H)`` a layer over t,
    plus embedding dropout, plus the loss on a single stage. Without: ``S B H (10 + 24/t)``, the
    16-bit logits, and 5 % for miscellaneous temporaries.
    """
    tower = shape.tower
    unit = run.sequence * run.batch * tower.hidden
    factor = 18 + 4 * tower.ffn / tower.hidden if sequence_parallel else 10 + 24 / run.tensor
    total = unit * factor * tower.layers
    total += 8 * run.sequence * run.batch * run.pipeline + unit * run.pipeline
    if run.interleaved:
        total *= 1 + (run.pipeline - 1) / (run.pipeline * run.interleaved)
    elif run.pipeline > 1 and run.micro_batches:
        total *= min(1, run.micro_batches / run.pipeline)
    if sequence_parallel:
        if run.pipeline == 1:
            total += unit * 4 * (1 + shape.vocab / tower.hidden)
        return int(total / run.tensor)
    if run.pipeline == 1:
        logits = run.sequence * run.batch * shape.vocab / run.tensor
        total += 2 * (logits + unit)
    return int(total * 1.05)

"""From a training setup to its ledger: bills, moments of a step, peak, range.

A step has a few moments at which memory can peak. The textbook adds all bills up; PyTorch frees
gradients before the forward pass and activations before the optimizer step, so the real peak is the
largest *moment*, not the sum. Both are given: :attr:`Plan.textbook` and :attr:`Plan.peak`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from pytest_vram.planning.activations import (
    Attention,
    Forward,
    Head,
    Recompute,
    Sharding,
    embedding_bytes,
    head_bytes,
    tower_bytes,
    tower_ends,
)
from pytest_vram.planning.shapes import ModelShape, PlanError, Tower, Weight
from pytest_vram.planning.states import (
    BLOCK,
    OPTIMIZERS,
    PRECISIONS,
    Lora,
    Optimizer,
    Precision,
    Quantisation,
    quantised_size,
)

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
class Parallel:
    """How the work is spread. ``data`` ranks shard by ZeRO stage ``zero`` (3 is FSDP);
    ``tensor``, ``context``, ``pipeline`` and ``expert`` are the degrees of those parallelisms,
    ``sequence`` turns on Megatron's sequence parallelism among the tensor ranks."""

    data: int = 1
    zero: int = 0
    tensor: int = 1
    sequence: bool = False
    context: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "context", "pipeline", "expert"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} parallel degree must be at least 1")
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"ZeRO has stages 0 to 3, not {self.zero}")

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.context * self.pipeline

    def check(self, shape: ModelShape) -> None:
        """Refuse what cannot be cut."""
        for tower in shape.towers:
            if tower.heads % self.tensor:
                raise PlanError(
                    f"{tower.heads} heads do not divide over {self.tensor} tensor ranks"
                )
            if tower.ffn % self.tensor:
                raise PlanError(f"ffn {tower.ffn} does not divide over {self.tensor} tensor ranks")
            if tower.experts % self.expert:
                raise PlanError(
                    f"{tower.experts} experts do not divide over {self.expert} expert ranks"
                )
        if self.pipeline > shape.layers:
            raise PlanError(f"{self.pipeline} pipeline stages for {shape.layers} layers")


@dataclass(frozen=True, slots=True)
class Offload:
    """What lives in host memory, and how fast the bus to it is (bytes a second).

    ``step_on``: "gpu" brings states over for the step and back; "cpu" steps on the host, so only
    gradients go down and parameters come up (ZeRO-Offload, arXiv 2101.06840)."""

    what: frozenset[str] = frozenset()
    bandwidth: float = 20e9
    step_on: Literal["gpu", "cpu"] = "gpu"

    def __post_init__(self) -> None:
        known = {"optimizer", "parameters", "activations"}
        if unknown := sorted(self.what - known):
            raise PlanError(f"cannot offload {unknown[0]!r}; known: {', '.join(sorted(known))}")
        if self.bandwidth <= 0:
            raise PlanError("the bus needs a positive bandwidth")


@dataclass(frozen=True, slots=True)
class Setup:
    """One training run, as asked. ``step`` is the optimizer's implementation: PyTorch takes
    foreach unless told otherwise. ``held``: the caller keeps the model's output until the step is
    over (``outputs = model(...); outputs.loss.backward()``). ``buckets``: DistributedDataParallel's
    gradient buckets are copies (its default, ``gradient_as_bucket_view=False``)."""

    shape: ModelShape
    batch: int = 1
    sequence: int = 1024
    accumulation: int = 1
    precision: Precision = PRECISIONS["fp32"]
    optimizer: Optimizer = OPTIMIZERS["adamw"]
    step: Literal["foreach", "fused", "loop"] = "foreach"
    attention: Attention = "flash"
    dropout: float = 0.0
    recompute: Recompute = field(default_factory=Recompute)
    lora: Lora | None = None
    quantisation: Quantisation = ""
    parallel: Parallel = field(default_factory=Parallel)
    offload: Offload = field(default_factory=Offload)
    held: bool = True
    buckets: bool = True
    workspace: int = 8_519_680  #: cuBLAS, per thread that launches matrix products; two do
    threads: int = 108 * 2048  #: that the card holds at a time (A100)
    buffers: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "accumulation"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise PlanError(f"dropout is a share between 0 and 1, not {self.dropout}")
        if self.quantisation and self.lora is None:
            raise PlanError("quantised weights cannot be trained: add LoRA adapters")
        limit = self.shape.positions or self.shape.longest
        if limit and self.sequence > limit:
            raise PlanError(
                f"{self.shape.name} has {limit} positions, "
                f"not {self.sequence} (a longer sequence cannot be embedded)"
            )
        self.parallel.check(self.shape)

    @property
    def tokens(self) -> int:
        """Sequence positions per sample that the towers see."""
        return self.shape.tokens_per_sample or self.sequence


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


class _Rank:
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


def make_plan(setup: Setup) -> Plan:
    """The ledger of ``setup`` on the rank that needs most."""
    stages = {0, setup.parallel.pipeline - 1}
    return max((_plan_stage(setup, stage) for stage in sorted(stages)), key=lambda plan: plan.peak)


def _plan_stage(setup: Setup, stage: int) -> Plan:
    rank = _Rank(setup, stage)
    static = _static(rank)
    flow = _Flow.of(rank)
    bills = dict.fromkeys(BILLS, 0) | static
    bills["activations"] = flow.kept + flow.rerun + flow.head.kept + flow.head.saved
    bills["autocast_cache"] = flow.copies
    bills["temporary"] = _step_temporaries(rank)
    moments = _moments(rank, static, flow)
    parameters = int(sum(weight.total for weight in setup.shape.weights()))
    own = [weight for weight in setup.shape.weights() if not weight.frozen]
    trained = setup.lora.weights(setup.shape.weights()) if setup.lora else own
    notes = list(setup.shape.notes)
    if attention_kernel(setup) == "math" and setup.shape.attention != "math":
        notes.append(
            "no fused attention kernel takes grouped key/value heads in float32: planned with "
            "PyTorch's math kernel and its S x S scores"
        )
    kernels = {t.mixer.kernel for t in setup.shape.towers if t.mixer and t.mixer.kernel}
    notes += [
        f"planned with the kernels of {name}, by what their source keeps for backward; without "
        "that package transformers runs a loop in PyTorch that keeps many times as much"
        for name in sorted(kernels)
    ]
    notes += _idle(setup)
    inner = ("matrix", "expert")
    if not setup.lora and any(w.frozen and w.role in inner for w in setup.shape.weights()):
        notes.append("frozen layers: activations are planned as if every layer were trained")
    plan = Plan(
        setup=setup,
        bills=bills,
        moments=moments,
        assumptions=(),
        parameters=parameters,
        trainable=sum(weight.total for weight in trained),
        notes=tuple(notes),
    )
    return _with_assumptions(plan)


def _idle(setup: Setup) -> Iterator[str]:
    """Options that this run has no use for, or better ones."""
    parallel = setup.parallel
    if parallel.zero and parallel.data == 1:
        yield f"ZeRO-{parallel.zero} shards over data-parallel ranks, and there is one (--data)"
    if parallel.zero == 3 and parallel.data > 1 and setup.precision.cache:
        yield (
            "autocast caches a 16-bit copy of every gathered weight (FSDP2's are leaves); FSDP's "
            "own mixed precision, planned as bf16-pure, keeps none"
        )
    if parallel.sequence and parallel.tensor == 1:
        yield "sequence parallelism works among tensor-parallel ranks, and there is one (--tensor)"
    if parallel.expert > 1 and not any(tower.experts for tower in setup.shape.towers):
        yield "expert parallelism divides experts, and this model has none"


def _static(rank: _Rank) -> dict[str, int]:
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
    if shape.pixels_per_sample:
        return setup.batch * (shape.pixels_per_sample * 4 + 8)
    ids = setup.batch * setup.sequence * 8 // setup.parallel.context
    return ids * (2 if len(shape.towers) == 1 else 3)


def _communication(rank: _Rank) -> int:
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


@dataclass(frozen=True, slots=True)
class _Flow:
    """What a forward pass leaves, on one rank."""

    kept: int
    rerun: int
    working: int
    copies: int
    kept_copies: int
    head: Head
    logits: int  #: bytes of one copy of the logits in the compute type

    @classmethod
    def of(cls, rank: _Rank) -> _Flow:
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


def attention_kernel(setup: Setup) -> Attention:
    """What runs when ``setup.attention`` is asked for.

    PyTorch's fused kernels take grouped key/value heads in 16 bits only: the memory-efficient one,
    the only one for fp32, does not (``sdp_utils.cpp``, ``check_grouped_query_attention``, PyTorch
    2.13). What is left is the math kernel, whose scores are S x S.
    """
    shape = setup.shape
    if setup.attention == "explicit" or shape.attention == "explicit":
        return "explicit"
    grouped = any(tower.kv_heads < tower.heads for tower in shape.towers)
    unfused = grouped and setup.precision.compute == 4 and not shape.repeats_kv
    return "math" if unfused or shape.attention == "math" else setup.attention


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


def _step_temporaries(rank: _Rank) -> int:
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


def _moments(rank: _Rank, static: Mapping[str, int], flow: _Flow) -> tuple[Moment, ...]:
    """The moments of a step at which memory can peak, in order.

    With one micro-batch a step, gradients do not exist before backward
    (``zero_grad(set_to_none=True)``, PyTorch's default); with accumulation, and in gradient
    buffers of ZeRO, they live through the whole step.
    """
    setup = rank.setup
    gradients = static["gradients"]
    lasting = setup.accumulation > 1 or setup.parallel.zero in (1, 2)
    rest = {name: size for name, size in static.items() if name != "gradients"}
    vocabulary = 0
    if setup.shape.head == "lm" and not setup.lora:
        table = [w for w in rank.base if setup.shape.is_vocabulary(w)]
        vocabulary = rank.size(table, setup.precision.gradient)
    layers, head = flow.kept + flow.head.kept, flow.head
    # The head's weight gradient: made in the compute type, under autocast cast to the parameter's.
    weight = vocabulary // 2 if setup.precision.cache else 0
    if setup.shape.head_bias and setup.shape.head == "lm" and not setup.lora:
        columns = setup.shape.logits // setup.parallel.tensor
        weight += summed_bytes(setup.batch * setup.tokens, columns, setup.threads)

    def moment(
        name: str, grads: int, activations: int, copies: int = 0, temporary: int = 0
    ) -> Moment:
        bills = dict.fromkeys(BILLS, 0) | rest
        bills["gradients"] = gradients if lasting else min(grads, gradients)
        bills["activations"] = activations
        bills["autocast_cache"] = copies
        bills["temporary"] = temporary
        return Moment(name, bills)

    return (
        moment("forward, at the loss", 0, layers + head.saved, flow.copies, head.forward),
        moment("backward, at the loss", 0, layers + head.saved, flow.kept_copies, head.backward),
        moment(
            "backward, in the head",
            vocabulary,
            layers + head.logits,
            flow.kept_copies,
            flow.logits + weight,
        ),
        moment(
            "backward, in the last layer",  # the final norm is through
            vocabulary,
            flow.kept + head.logits + flow.rerun,
            flow.kept_copies,
            flow.working,
        ),
        moment(
            "backward, at its end",
            gradients,
            head.logits,
            0,
            vocabulary if setup.shape.tied else 0,
        ),
        moment("optimizer step", gradients, head.logits, 0, _step_temporaries(rank)),
    )


#: Reserved over allocated at the peak, in the published recordings that the project validates
#: against (22 runs, torch 2.6 to 2.11): the lowest, the median, and what four in five stay below.
FRAGMENTATION = (0.013, 0.065, 0.13)


def _with_assumptions(plan: Plan) -> Plan:
    setup, peak = plan.setup, plan.peak
    activations = plan.peak_moment.bills["activations"]
    items = [
        Assumption(
            "fragmentation",
            0,
            int(peak * FRAGMENTATION[2]),
            "the allocator reserves 1 to 13 % more than is allocated",
        ),
        Assumption(
            "implementation",
            -activations // 10,
            activations // 10,
            "activations of one implementation differ from another's by about 10 %",
        ),
    ]
    if setup.recompute.kind == "selective" and setup.attention == "flash":
        items.append(
            Assumption(
                "selective recomputation",
                0,
                0,
                "flash attention already drops what selective recomputation would",
            )
        )
    if setup.shape.recognised:
        items.append(
            Assumption(
                "architecture",
                -activations // 20,
                activations * 9 // 20,
                "of nine families read off their modules, activations were 5 % less to 45 % more",
            )
        )
    if setup.shape.guessed:
        towers = tuple(replace(tower, gated=False) for tower in setup.shape.towers)
        plain = replace(setup.shape, towers=towers, guessed=False)
        items.append(
            Assumption(
                "architecture",
                min(0, make_plan(replace(setup, shape=plain)).peak - peak),
                0,
                "an unknown family, taken for Llama: its feed-forward blocks may have no gate",
            )
        )
    if setup.optimizer.paged:
        whole = _static(_Rank(replace(setup, optimizer=replace(setup.optimizer, paged=False)), 0))
        items.append(
            Assumption(
                "paged optimizer",
                0,
                whole["optimizer_state"],
                "paged states stay on the GPU while there is room",
            )
        )
    return replace(plan, assumptions=tuple(items))


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes over the bus per optimizer step, and the seconds that takes if nothing overlaps."""

    down: int
    up: int
    seconds: float

    @property
    def total(self) -> int:
        return self.down + self.up


def offload_traffic(plan: Plan) -> Traffic:
    """What offloading costs a step.

    Step on the GPU: states and master weights come over and go back, 2 (s + m) N. With 8-bit
    m and v (2 bytes) and a master copy (4) that is 12 bytes per parameter: 84 GB for 7B, 4.2 s at
    20 GB/s. Step on the CPU: gradients go down, parameters come up. Offloaded parameters are read
    once each way through the layers (forward and backward); offloaded activations go both ways.
    """
    setup = plan.setup
    rank = _Rank(setup, 0)
    over = setup.parallel.data if setup.parallel.zero >= 1 else 1
    trained = sum(weight.total * rank.share(weight) for weight in rank.trained) / over
    updated = setup.lora.size if setup.lora else setup.precision.updated
    states = setup.optimizer.per_parameter(updated)
    master = 0 if setup.lora else setup.precision.master
    down = up = 0.0
    if "optimizer" in setup.offload.what:
        if setup.offload.step_on == "cpu":
            down += trained * setup.precision.gradient
            up += trained * setup.precision.parameter
        else:
            down += trained * (states + master)
            up += trained * (states + master)
    if "parameters" in setup.offload.what:
        up += 2 * setup.accumulation * rank.size(rank.base, rank.base_element)
    if "activations" in setup.offload.what:
        bare = replace(setup, offload=replace(setup.offload, what=frozenset()))
        moved = setup.accumulation * _Flow.of(_Rank(bare, 0)).kept
        down, up = down + moved, up + moved
    return Traffic(int(down), int(up), (down + up) / setup.offload.bandwidth)

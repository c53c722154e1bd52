"""From a training setup to its ledger: bills, moments of a step, peak, range.

A step has a few moments at which memory can peak. The textbook adds all bills up; PyTorch frees
gradients before the forward pass and activations before the optimizer step, so the real peak is the
largest *moment*, not the sum. Both are given: :attr:`Plan.textbook` and :attr:`Plan.peak`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pytest_vram.planning.answers import BILLS, Assumption, Plan
from pytest_vram.planning.flows import Flow
from pytest_vram.planning.moments import moments_of
from pytest_vram.planning.ranks import Rank, static_bills, step_temporaries
from pytest_vram.planning.runs import Setup, attention_kernel

#: Reserved over allocated at the peak, in the published recordings that the project validates
#: against (22 runs, torch 2.6 to 2.11): the lowest, the median, and what four in five stay below.
FRAGMENTATION = (0.013, 0.065, 0.13)


def make_plan(setup: Setup) -> Plan:
    """The ledger of ``setup`` on the rank that needs most."""
    stages = {0, setup.parallel.pipeline - 1}
    return max((_plan_stage(setup, stage) for stage in sorted(stages)), key=lambda plan: plan.peak)


def _plan_stage(setup: Setup, stage: int) -> Plan:
    rank = Rank(setup, stage)
    static = static_bills(rank)
    flow = Flow.of(rank)
    bills = dict.fromkeys(BILLS, 0) | static
    bills["activations"] = flow.kept + flow.rerun + flow.head.kept + flow.head.saved
    bills["autocast_cache"] = flow.copies
    bills["temporary"] = step_temporaries(rank)
    own = [weight for weight in setup.shape.weights() if not weight.frozen]
    trained = setup.lora.weights(setup.shape.weights()) if setup.lora else own
    plan = Plan(
        setup=setup,
        bills=bills,
        moments=moments_of(rank, static, flow),
        assumptions=(),
        parameters=setup.shape.parameters,
        trainable=sum(weight.total for weight in trained),
        notes=tuple(_notes(setup)),
    )
    return _with_assumptions(plan)


def _notes(setup: Setup) -> Iterator[str]:
    """What the figures do not say by themselves."""
    yield from setup.shape.notes
    if attention_kernel(setup) == "math" and setup.shape.attention != "math":
        yield (
            "no fused attention kernel takes grouped key/value heads in float32: planned with "
            "PyTorch's math kernel and its S x S scores"
        )
    for name in sorted({t.mixer.kernel for t in setup.shape.towers if t.mixer} - {""}):
        yield (
            f"planned with the kernels of {name}, by what their source keeps for backward; without "
            "that package transformers runs a loop in PyTorch that keeps many times as much"
        )
    yield from _idle(setup)
    inner = ("matrix", "expert")
    if not setup.lora and any(w.frozen and w.role in inner for w in setup.shape.weights()):
        yield "frozen layers: activations are planned as if every layer were trained"


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
        whole = static_bills(
            Rank(replace(setup, optimizer=replace(setup.optimizer, paged=False)), 0)
        )
        items.append(
            Assumption(
                "paged optimizer",
                0,
                whole["optimizer_state"],
                "paged states stay on the GPU while there is room",
            )
        )
    return replace(plan, assumptions=tuple(items))

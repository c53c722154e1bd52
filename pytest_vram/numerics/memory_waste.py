"""Memory that a step could do without: checkpointing that does nothing, old gradients, states that
are loaded twice, fragmentation, score matrices; and hooks that pile up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_vram.findings import Finding
from pytest_vram.numerics.lives import Life, Lives, in_words
from pytest_vram.numerics.memory_finding import SMALL, cause, matters, widest
from pytest_vram.numerics.memory_watch import Observed
from pytest_vram.quantities import format_bytes
from pytest_vram.sim.allocator import Block, CachingAllocator
from pytest_vram.trace import Trace

# ---- checkpointing


def checkpointing(lives: Lives, observed: Observed) -> list[Finding]:
    if not observed.backwards:
        return []
    recomputed = [life for life in lives.all if life.recomputed]
    if observed.flags and not observed.checkpoints and not recomputed:
        held = lives.bill_at_peak("activations")
        return [
            cause(
                "fail",
                f"checkpointing was requested ({observed.flags[0]}"
                + (f" and {len(observed.flags) - 1} more" if len(observed.flags) > 1 else "")
                + "), but 0 operators were recomputed in backward: activations hold "
                f"{format_bytes(held)} as without it",
                *observed.flags[:6],
                hint="set the flag on the blocks that run (model.gradient_checkpointing_enable()), "
                "not only on the wrapper",
                flags=observed.flags,
                activations=held,
            )
        ]
    if observed.flags_in_eval and not observed.flags and not observed.checkpoints:
        where, line = next(iter(observed.flags_in_eval.items()))
        return [
            cause(
                "fail",
                f"checkpointing was requested ({where}), but the model is trained in eval mode "
                f"(forward at {line}), in which blocks leave it out: 0 operators were recomputed "
                "in backward",
                hint="call model.train() before training (from_pretrained returns a model in eval "
                "mode)",
                flags=list(observed.flags_in_eval),
                activations=lives.bill_at_peak("activations"),
            )
        ]
    return _one_segment(lives, observed, recomputed)


def _one_segment(lives: Lives, observed: Observed, recomputed: list[Life]) -> list[Finding]:
    """All activations come back at once in backward: the segment is too large to help."""
    per_backward: dict[int, int] = {}
    for _, number in observed.checkpoints:
        per_backward[number] = per_backward.get(number, 0) + 1
    if not per_backward or max(per_backward.values()) != 1:
        return []
    at_peak = [life for life in lives.alive_at(lives.peak_at) if life.recomputed]
    back = sum(life.block for life in at_peak)
    held = lives.bill_at_peak("activations")
    if not matters(back, lives) or back * 2 < held:
        return []
    line = observed.checkpoints[0][0]
    return [
        cause(
            "warn",
            f"checkpointing at {line} has one segment, too large to help: the peak moved to "
            f"backward, where {format_bytes(back)} of {format_bytes(held)} activations are "
            "recomputed at once",
            f"peak {format_bytes(lives.peak)} in {lives.peak_phase}",
            hint="checkpoint each block (checkpoint_sequential with as many segments as blocks); a "
            f"segment of one in k blocks holds about 1/k of the {format_bytes(back)}",
            bytes=back,
            activations=held,
        )
    ]


# ---- hooks


def growing_hooks(observed: Observed) -> list[Finding]:
    found = []
    for hooked in observed.hooks[:1]:
        more = f" and of {len(observed.hooks) - 1} more modules" if len(observed.hooks) > 1 else ""
        found.append(
            cause(
                "warn",
                f"hooks of module {hooked.module}{more} grow with every step "
                f"({', '.join(map(str, hooked.counts))}): {hooked.hook} is registered again and "
                "again and never removed; each runs in every forward and keeps what it refers to",
                hint="register it once, or call handle.remove() on what register_..._hook returned",
                hooks=list(hooked.counts),
            )
        )
    return found


# ---- gradients and states


def old_gradients(lives: Lives, observed: Observed) -> list[Finding]:
    """Gradients of an earlier step beside the new activations."""
    if lives.peak_phase.name in ("optimizer", "setup", "between"):
        return []
    step = lives.peak_phase.step
    old = [
        life
        for life in lives.alive_at(lives.peak_at)
        if life.bill == "gradients" and 0 < life.phase.step < step
    ]
    size = sum(life.block for life in old)
    if not matters(size, lives):
        return []
    keeps, zeroed = observed.zero_keeps, observed.zeroed
    why = "nothing clears them (no zero_grad was seen)"
    if keeps:
        why = f"zero_grad at {keeps} keeps them (set_to_none=False)"
    elif zeroed:
        why = f"zero_grad at {zeroed} comes after the forward"
    return [
        cause(
            "warn",
            f"at the {lives.peak_phase.name} peak (step {step}) gradients of step "
            f"{max(life.phase.step for life in old)} are still alive: {format_bytes(size)}, which "
            "step 1 did not have",
            f"{len(old)} gradients, the largest {in_words(*widest(old))}",
            why,
            hint="call optimizer.zero_grad(set_to_none=True) before the forward, right after the "
            f"step; saves {format_bytes(size)} at the peak",
            bytes=size,
        )
    ]


def loaded_twice(observed: Observed) -> list[Finding]:
    found = []
    for line, size in observed.loaded[:1]:
        if size >= SMALL:
            found.append(
                cause(
                    "warn",
                    f"the saved state that was loaded at {line} is still alive on the GPU beside "
                    f"what was made of it: {format_bytes(size)} twice",
                    hint="load it to the CPU (torch.load(..., map_location='cpu')) and drop it "
                    f"(del checkpoint); saves {format_bytes(size)}",
                    bytes=size,
                )
            )
    return found


# ---- the allocator


def fragmentation(lives: Lives) -> list[Finding]:
    """Much reserved, little of it used: growing sizes do not fit into the holes of smaller ones."""
    unused = lives.peak_reserved - lives.peak
    if unused < 256 << 20 or lives.peak_reserved < lives.peak * 1.5:
        return []
    better = peak_reserved_under(lives.trace, "expandable_segments:True")
    saved = f"peak reserved {format_bytes(better)} instead of {format_bytes(lives.peak_reserved)}"
    return [
        cause(
            "warn",
            f"fragmentation: reserved {format_bytes(lives.peak_reserved)} is x"
            f"{lives.peak_reserved / max(1, lives.peak):.1f} of the peak allocated "
            f"{format_bytes(lives.peak)}; {format_bytes(unused)} are cached in blocks that later "
            "requests do not fit",
            *_growing_requests(lives),
            hint=f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: {saved}"
            if better < lives.peak_reserved * 0.9
            else "pad to a few fixed lengths, the largest first, or empty_cache() between them",
            bytes=unused,
            reserved=lives.peak_reserved,
            allocated=lives.peak,
            expandable=better,
        )
    ]


def peak_reserved_under(trace: Trace, conf: str) -> int:
    """What the same requests would reserve under another ``PYTORCH_CUDA_ALLOC_CONF``."""
    allocator = CachingAllocator(1 << 46, conf)
    blocks: dict[int, Block] = {}
    for event in trace.events:
        if event.kind == "alloc":
            allocation = trace.allocations[event.index]
            blocks[event.index] = allocator.malloc(allocation.requested, allocation.stream)
        elif event.kind == "free" and event.index in blocks:
            allocator.free(blocks.pop(event.index))
    return allocator.peak_reserved


def _growing_requests(lives: Lives) -> list[str]:
    sizes = sorted({life.requested for life in lives.all if life.requested >= 16 << 20})
    if len(sizes) < 3:
        return []
    return [
        f"{len(sizes)} different sizes of large requests, from {format_bytes(sizes[0])} to "
        f"{format_bytes(sizes[-1])}"
    ]


def math_attention(lives: Lives, attention: Sequence[Any]) -> list[Finding]:
    """``attention``: pairs (module, choice); a choice has ``backend`` and ``rejected``."""
    fell = [(module, choice) for module, choice in attention if str(choice.backend) == "math"]
    if not fell:
        return []
    scores = [
        life
        for life in lives.alive_at(lives.peak_at)
        if life.shape and len(life.shape) >= 3 and life.shape[-1] == life.shape[-2] >= 64
        and life.bill in ("activations", "temporary")
    ]  # fmt: skip
    size = sum(life.block for life in scores)
    if not matters(size, lives):
        return []
    module, choice = fell[0]
    reasons = [f"{backend}: {why}" for backend, why in choice.rejected.items()]
    return [
        cause(
            "warn",
            f"attention fell back to the math kernel in {module or 'the test'} ({len(fell)} calls):"
            f" its scores hold {format_bytes(size)} at the peak, "
            f"{in_words(scores[0].dtype, scores[0].shape)}",
            *reasons,
            hint="remove the reason above, so that a fused kernel runs: it keeps no score matrix; "
            f"saves up to {format_bytes(size)}",
            bytes=size,
        )
    ]


def compiled(observed: Observed) -> list[Finding]:
    if not observed.compiled:
        return []
    return [
        cause(
            "note",
            f"torch.compile at {observed.compiled[0]}: the compiler's partitioner, not the eager "
            "graph, decides what is saved for backward; a simulated peak is the eager one",
            hint="measure compiled against eager on the card, after the compile step, and keep a "
            "baseline per torch version",
        )
    ]

"""Why memory is what it is: faults in how a step uses memory, from a settled Trace and what
:class:`~pytest_vram.numerics.memory_watch.MemoryWatch` saw. Pure functions; all sizes are bytes.

``judge`` returns what is wrong in itself (leaks, survivors, checkpointing that does nothing, old
gradients, fragmentation); ``explain`` what a failing budget or baseline consists of (logits in
fp32, copies, masks, promotion, foreach temporaries, cached casts): legitimate elsewhere, so it is
only asked for next to a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pytest_vram.findings import Finding, Severity
from pytest_vram.numerics.lives import Life, Lives, in_words
from pytest_vram.numerics.memory_explain import explain
from pytest_vram.numerics.memory_watch import GraphHolder, Holder, Observed
from pytest_vram.quantities import format_bytes
from pytest_vram.sim.allocator import Block, CachingAllocator
from pytest_vram.trace import Trace

#: Below this nothing is worth a word: it is lost in rounding and workspaces.
_SMALL = 1 << 20
_OWNED = {"parameters", "gradients", "optimizer_state", "master_weights", "buffers", "workspace"}


def judge(
    trace: Trace,
    observed: Observed,
    *,
    growth: int = 64 << 10,
    attention: Sequence[Any] = (),
) -> tuple[Finding, ...]:
    """Faults of one pass. ``growth``: the marker's allowance per step; ``attention``: the
    simulation's choices of attention kernels (``Simulation.attention``)."""
    lives = Lives(trace)
    wasted = evaluation(lives, observed)
    leaking = leaks(lives, observed, growth)
    found = [
        *leaking,
        *wasted,
        # What an evaluation keeps follows from its graphs.
        *(one for one in survivors(lives, observed) if not wasted or "variables" not in one.data),
        *kept_graphs(lives, observed),
        *checkpointing(lives, observed),
        *growing_hooks(observed),
        # What a leak keeps (models of earlier trials) has its gradients, too.
        *([] if leaking else old_gradients(lives, observed)),
        *loaded_twice(observed),
        *fragmentation(lives),
        *math_attention(lives, attention),
        *compiled(observed),
    ]
    return tuple(found)


def _cause(
    severity: Severity,
    sentence: str,
    *details: str,
    hint: str = "",
    kind: str = "memory-cause",
    **data: Any,
) -> Finding:
    return Finding(kind, severity, sentence, details, hint, data)


def _matters(size: int, lives: Lives, share: int = 20) -> bool:
    return size >= max(_SMALL, lives.peak // share)


# ---- leaks


def leaks(lives: Lives, observed: Observed, growth: int) -> list[Finding]:
    """Growth from repetition to repetition, and its kind: cycle, graph, container or other."""
    allowed = max(growth, 1)
    steps = [after - before for before, after in pairwise(observed.alive)]
    last = steps[1:][-3:]  # workspaces, gradients and optimizer states arrive with the first step
    cycle = _cycle(lives, observed, allowed)
    if cycle is not None:
        return [cycle]
    if len(last) >= 2 and min(last) > allowed and not _only_the_last_step(lives, allowed):
        return [_growth(lives, observed, last)]
    if observed.graphs:
        holder = observed.graphs[0]
        counts = ", ".join(map(str, holder.nodes))
        return [
            _cause(
                "fail",
                f"the graph behind {holder.who} grows with every step ({counts} nodes): it keeps "
                "the graphs of all steps so far",
                f"filled at {holder.filled_at}" if holder.filled_at else f"seen at {holder.line}",
                hint=_detach(holder),
                kind="leak",
                nodes=list(holder.nodes),
            )
        ]
    return []


def _only_the_last_step(lives: Lives, allowed: int) -> bool:
    """Whether the growth is that of batches: of what is older than one step, nothing is added. The
    first growth does not count, optimizer states arrive with it."""
    later = lives.growth_of_the_old()[1:]
    return bool(later) and min(later) <= allowed


def _alive_line(observed: Observed) -> str:
    shown = ", ".join(format_bytes(size) for size in observed.alive[:6])
    return f"alive as each step begins: {shown}"


def _cycle(lives: Lives, observed: Observed, allowed: int) -> Finding | None:
    """A leak that a collection ends; or memory that waits for the collector in every step."""
    asked = [c for c in observed.collections if c.growing and c.released > allowed]
    waits = [c for c in observed.collections if _matters(c.released, lives)]
    if not asked and len(waits) < 2:
        return None
    worst = max(asked or waits, key=lambda c: c.released)
    who = f" (it ended {worst.kinds})" if worst.kinds else ""
    when = "live bytes grow from step to step, but" if asked else "in every step"
    return _cause(
        "fail" if asked else "warn",
        f"{when} gc.collect() releases {format_bytes(worst.released)}: a reference cycle holds "
        f"tensors, not a leak{who}",
        _alive_line(observed),
        *_largest_old(lives, worst.repetition),
        hint="break the cycle (del, weakref) or hold the tensor outside of it: the collector runs "
        "by object counts, not by bytes",
        kind="leak",
        bytes=worst.released,
    )


def _largest_old(lives: Lives, repetition: int) -> list[str]:
    """Where the largest of what waits for the collector was made: it was alive a step before."""
    for number in (repetition, repetition - 1):
        old = [
            life
            for life in lives.alive_at(lives.repetition(number))
            if life.bill not in _OWNED and life.phase.name not in ("setup", "between", "backward")
        ]
        if old:
            break
    else:
        return []
    life = max(old, key=lambda one: one.block)
    return [f"the largest: {in_words(life.dtype, life.shape)} made at {life.frame}"]


def _detach(holder: GraphHolder) -> str:
    if holder.who.startswith("tuple"):
        name = holder.who.split("'")[1]
        return f"cut the graph between steps: {name} = tuple(t.detach() for t in {name})"
    if not holder.who.startswith("variable"):
        return "store .item() or .detach(), not tensors with a graph"
    if holder.scalar:
        return "add up numbers, not tensors with a graph: total += loss.item() or loss.detach()"
    name = holder.who.split("'")[1]
    return f"cut the graph between steps: {name} = {name}.detach()"


def _growth(lives: Lives, observed: Observed, last: list[int]) -> Finding:
    why, where, hint = _keeper(observed)
    return _cause(
        "fail",
        f"live memory grows by {format_bytes(min(last))} or more per step, {len(last)} times in a "
        f"row: {why}",
        *([where] if where else []),
        *_kept_each_time(lives, len(observed.alive)),
        _alive_line(observed),
        hint=hint,
        kind="leak",
        growth=last,
    )


def _keeper(observed: Observed) -> tuple[str, str, str]:
    """Who keeps tensors of past steps, where that is written, and what to do about it."""
    if observed.graphs:
        graph = observed.graphs[0]
        counts = ", ".join(map(str, graph.nodes))
        has = "has a grad_fn" if graph.who.startswith("variable") else "holds tensors with a graph"
        where = f"filled at {graph.filled_at}" if graph.filled_at else f"seen at {graph.line}"
        return (
            f"{graph.who} {has} and keeps every step's graph ({counts} nodes)",
            where,
            _detach(graph),
        )
    if observed.containers:
        keeper = observed.containers[0]
        why, hint = _KEEPERS[keeper.kind]
        where = f"filled at {keeper.filled_at}" if keeper.filled_at else ""
        return f"{keeper} {why}", where, hint
    if observed.creates:
        return (
            f"backward(create_graph=True) at {observed.creates} makes each leaf and its .grad "
            "refer to each other, a cycle that Python's collector does not see",
            "",
            "use torch.autograd.grad(..., create_graph=True), or set .grad = None after the step",
        )
    return (
        "something keeps tensors of past steps (a hook, a global, a cache)",
        "",
        "look for attributes and closures that store tensors",
    )


_KEEPERS = {
    "container": (
        "keeps tensors of past steps",
        "store .item() or .detach().cpu(), or clear it each step",
    ),
    "cache": (
        "keeps what it was called with and what it returned",
        "no tensor equals another as a key, so the cache only grows: key it by shape and device, "
        "or leave it out",
    ),
    "exceptions": (
        "keeps exceptions, and with them the variables of every frame that they came through",
        "store str(error), or error.with_traceback(None)",
    ),
}


def _kept_each_time(lives: Lives, repetitions: int) -> list[str]:
    """The largest tensor that the last step but one made and that nobody let go of."""
    begin, end = lives.repetition(repetitions - 2), lives.repetition(repetitions - 1)
    last = lives.repetition(repetitions)
    kept = [
        life
        for life in lives.alive_at(last)
        if begin <= life.birth < end and life.bill not in _OWNED
    ]
    if not kept:
        return []
    life = max(kept, key=lambda one: one.block)
    made = f"{in_words(life.dtype, life.shape)} ({format_bytes(life.block)}) made at {life.frame}"
    return [f"the largest each time: {made} by {life.operator}"]


# ---- survivors


def survivors(lives: Lives, observed: Observed) -> list[Finding]:
    """Tensors of a finished step that are alive when the next one begins: peak or not, they are
    in the way of everything that runs between steps."""
    found = []
    # What an attribute holds from step to step was kept on purpose: a cache.
    caches = {h.who for h in observed.holders if h.kept}
    attributes = [
        h for h in observed.holders if h.who.startswith("attribute") and h.who not in caches
    ]
    variables = [h for h in observed.holders if h.who.startswith("variable")]
    # Every loop variable survives its step: worth a word only where it is a good part of it all.
    for holders, maker, share in ((attributes, _attributes, 20), (variables, _variables, 10)):
        for number in sorted({holder.repetition for holder in holders}):
            kept = _kept([h for h in holders if h.repetition == number], lives)
            size = sum(life.block for _, life in kept)
            if kept and _matters(size, lives, share):
                found.append(maker(kept, size, number))
                break
    return found


def _kept(holders: list[Holder], lives: Lives) -> list[tuple[Holder, Life]]:
    """Each held tensor with the allocation behind it: made in a forward or backward of the step
    before, and alive when this repetition began."""
    free = [
        life
        for life in lives.alive_at(lives.repetition(holders[0].repetition))
        if life.bill not in _OWNED
        and life.bill not in ("inputs", "autocast_cache")
        and life.phase.name not in ("setup", "between")
    ]
    kept = []
    for holder in holders:
        for life in free:
            if _is_held(life, holder):
                kept.append((holder, life))
                free.remove(life)
                break
    return kept


def _is_held(life: Life, holder: Holder) -> bool:
    if holder.allocation >= 0:
        return life.index == holder.allocation
    return life.dtype == holder.dtype and life.requested == holder.size


def _attributes(kept: list[tuple[Holder, Life]], size: int, repetition: int) -> Finding:
    names = list(dict.fromkeys(holder.who for holder, _ in kept))
    first, life = kept[0]
    owner = names[0].partition(" of module ")[2]
    return _cause(
        "warn",
        f"{len(kept)} tensors stored on modules survive the step ({format_bytes(size)}): "
        f"{in_words(first.dtype, first.shape)} as {names[0]}"
        + (f", and {len(names) - 1} more attributes" if len(names) > 1 else ""),
        *(f"{who}" for who in names[:8]),
        f"neither parameters nor buffers, still alive as step {repetition} begins",
        f"allocated at {life.frame} by {life.operator}",
        *_copies_of_weights(kept),
        hint=f"reset the attribute after use, or store .detach() of what is needed (first seen at "
        f"{owner}); saves {format_bytes(size)} between steps",
        bytes=size,
        attributes=names,
    )


def _copies_of_weights(kept: list[tuple[Holder, Life]]) -> list[str]:
    """fp8 training keeps its casts beside the weight: three representations of one tensor."""
    low = [holder for holder, _ in kept if holder.dtype.startswith("float8")]
    if not low:
        return []
    size = sum(holder.size for holder in low)
    kinds = ", ".join(sorted({holder.who.split("'")[1] for holder in low}))
    return [f"copies of weights in {low[0].dtype} ({kinds}): {format_bytes(size)} beside them"]


def _variables(kept: list[tuple[Holder, Life]], size: int, repetition: int) -> Finding:
    first, life = max(kept, key=lambda pair: pair[1].block)
    more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
    return _cause(
        "warn",
        f"after step {repetition - 1} is over {in_words(first.dtype, first.shape)} is still alive "
        f"({format_bytes(size)}{' in all' if more else ''}): {first.who}{more}",
        f"allocated at {life.frame} by {life.operator}",
        f"still alive as step {repetition} begins",
        hint=f"del {first.who.split(chr(39))[1]} after backward, or keep the loop body in a "
        f"function; saves {format_bytes(size)} in the next forward",
        bytes=size,
        variables=[holder.who for holder, _ in kept],
    )


def kept_graphs(lives: Lives, observed: Observed) -> list[Finding]:
    """Activations of a step that is over: backward was told to keep them, and something still
    refers to the graph."""
    if not observed.retains:
        return []
    for number in range(2, len(observed.alive) + 1):
        kept = [
            life
            for life in lives.alive_at(lives.repetition(number))
            if life.bill == "activations" and life.phase.step
        ]
        size = sum(life.block for life in kept)
        if kept and _matters(size, lives):
            return [
                _cause(
                    "warn",
                    f"{format_bytes(size)} of activations of step {number - 1} are still alive as "
                    f"step {number} begins: backward(retain_graph=True) at {observed.retains} "
                    "keeps the graph",
                    f"{len(kept)} tensors, the largest {in_words(*_widest(kept))}",
                    hint="drop retain_graph, or let go of the loss and the outputs before the next "
                    f"forward (del loss); saves {format_bytes(size)}",
                    bytes=size,
                )
            ]
    return []


def evaluation(lives: Lives, observed: Observed) -> list[Finding]:
    if not observed.eval_with_graph:
        return []
    held = lives.bill_at_peak("activations")
    if observed.eval_growth:
        keeper = observed.eval_keeper
        who = f": {keeper.who} keeps the graph of each" if keeper is not None else ""
        filled = keeper.filled_at if keeper is not None else ""
        return [
            _cause(
                "fail",
                f"an evaluation with gradients on grows by {format_bytes(observed.eval_growth)} "
                f"with every forward, the last at {observed.eval_with_graph}{who}",
                *([f"filled at {filled}"] if filled else []),
                f"activations at the peak {format_bytes(held)}",
                hint="evaluate inside torch.no_grad() or torch.inference_mode()",
                kind="leak",
                bytes=held,
                per_forward=observed.eval_growth,
            )
        ]
    return [
        _cause(
            "warn",
            "the model ran in eval mode with gradients on, again and again without a backward, at "
            f"{observed.eval_with_graph}: each forward saves its activations for nothing",
            f"activations at the peak {format_bytes(held)}",
            hint="evaluate inside torch.no_grad() or torch.inference_mode()",
            bytes=held,
        )
    ]


# ---- checkpointing


def checkpointing(lives: Lives, observed: Observed) -> list[Finding]:
    if not observed.backwards:
        return []
    recomputed = [life for life in lives.all if life.recomputed]
    if observed.flags and not observed.checkpoints and not recomputed:
        held = lives.bill_at_peak("activations")
        return [
            _cause(
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
            _cause(
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
    if not _matters(back, lives) or back * 2 < held:
        return []
    line = observed.checkpoints[0][0]
    return [
        _cause(
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
            _cause(
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
    if not _matters(size, lives):
        return []
    keeps, zeroed = observed.zero_keeps, observed.zeroed
    why = "nothing clears them (no zero_grad was seen)"
    if keeps:
        why = f"zero_grad at {keeps} keeps them (set_to_none=False)"
    elif zeroed:
        why = f"zero_grad at {zeroed} comes after the forward"
    return [
        _cause(
            "warn",
            f"at the {lives.peak_phase.name} peak (step {step}) gradients of step "
            f"{max(life.phase.step for life in old)} are still alive: {format_bytes(size)}, which "
            "step 1 did not have",
            f"{len(old)} gradients, the largest {in_words(*_widest(old))}",
            why,
            hint="call optimizer.zero_grad(set_to_none=True) before the forward, right after the "
            f"step; saves {format_bytes(size)} at the peak",
            bytes=size,
        )
    ]


def _widest(lives: list[Life]) -> tuple[str, tuple[int, ...] | None]:
    life = max(lives, key=lambda one: one.block)
    return life.dtype, life.shape


def loaded_twice(observed: Observed) -> list[Finding]:
    found = []
    for line, size in observed.loaded[:1]:
        if size >= _SMALL:
            found.append(
                _cause(
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
        _cause(
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
    if not _matters(size, lives):
        return []
    module, choice = fell[0]
    reasons = [f"{backend}: {why}" for backend, why in choice.rejected.items()]
    return [
        _cause(
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
        _cause(
            "note",
            f"torch.compile at {observed.compiled[0]}: the compiler's partitioner, not the eager "
            "graph, decides what is saved for backward; a simulated peak is the eager one",
            hint="measure compiled against eager on the card, after the compile step, and keep a "
            "baseline per torch version",
        )
    ]


#: Kinds of findings about memory that ask for an explanation.
_ASKS_WHY = {"over-budget", "regression", "unexplained", "out-of-memory"}


def with_causes(
    findings: Sequence[Finding],
    trace: Trace | None,
    observed: Observed | None,
    *,
    growth: int,
    attention: Sequence[Any] = (),
) -> list[Finding]:
    """``findings`` of a pass and what explains them. Faults that only warn become causes of a
    failure of memory where there is one, beside what the peak consists of. A leak that was found by
    its slope gets its cause."""
    if trace is None or observed is None:
        return list(findings)
    causes = list(judge(trace, observed, growth=growth, attention=attention))
    leak = next((cause for cause in causes if cause.kind == "leak"), None)
    told = list(findings)
    slopes = [one for one in told if one.kind == "leak" and "growth" in one.data]
    if slopes and leak is None and _only_the_last_step(Lives(trace), growth):
        told = [one for one in told if one not in slopes]
    for number, finding in enumerate(told):
        if finding.kind == "leak" and "growth" in finding.data and leak is not None:
            details = (f"cause: {leak.sentence}", *leak.details, *finding.details)
            told[number] = replace(finding, details=details, hint=leak.hint)
            causes.remove(leak)
            break
    if observed.creates:
        told = [_with_double_backward(finding, observed.creates) for finding in told]
    told = [_with_hooks(finding, observed.held_by_hooks, growth) for finding in told]
    if leak is not None:  # what a leak keeps also survives each step
        causes = [cause for cause in causes if not _same_holder(cause, leak)]
    for number, finding in enumerate(told):
        if finding.severity == "fail" and finding.kind in _ASKS_WHY:
            reasons = [cause for cause in causes if cause.severity == "warn"]
            consists = explain(trace, observed, fallback=not causes)
            told[number] = _explained(finding, [*reasons, *consists])
            causes = [cause for cause in causes if cause.severity != "warn"]
            break
    return told + causes


def _same_holder(cause: Finding, leak: Finding) -> bool:
    attributes = {who.split("'")[1] for who in cause.data.get("attributes", ())}
    return "variables" in cause.data or any(f".{name}'" in leak.sentence for name in attributes)


def _with_double_backward(finding: Finding, line: str) -> Finding:
    """``create_graph=True`` makes each gradient refer to its parameter and back: a cycle in C++,
    which Python's collector does not see (torch.autograd.backward's own warning)."""
    if finding.kind != "leak" or "held" not in finding.data:
        return finding
    cause = f"cause: backward(create_graph=True) at {line}: parameter and .grad refer to each other"
    hint = "use torch.autograd.grad(..., create_graph=True), or set .grad = None after the step"
    return replace(finding, details=(cause, *finding.details), hint=hint)


def _with_hooks(finding: Finding, held: int, growth: int) -> Finding:
    """A parameter whose post-accumulate hook refers to it (the optimizer step in backward): the
    hook is kept in C++, where Python's collector does not look (torch/csrc/autograd/python_variable
    .cpp, 2.6 to 2.14). Each model is one such cycle; the loop does not grow by it."""
    if finding.kind != "leak" or "held" not in finding.data or not held:
        return finding
    cause = (
        "cause: parameters have a post-accumulate-grad hook that refers to them, a cycle that "
        f"Python's collector does not see: {format_bytes(held)}"
    )
    hint = "keep what register_post_accumulate_grad_hook returned, and call remove() on it"
    explains = finding.data["bytes"] - held <= growth
    severity: Severity = "note" if explains else finding.severity
    details = (cause, *finding.details)
    return replace(finding, severity=severity, details=details, hint=hint)


def _explained(finding: Finding, notes: Sequence[Finding]) -> Finding:
    """The failure with its causes, each with its figures and its remedy."""
    lines: list[str] = []
    for note in notes:
        lines.append(f"cause: {note.sentence}")
        # What an explanation lists, the table of the failure shows already.
        lines += (f"  {line}" for line in (note.details if note.severity == "warn" else ()))
        lines.append(f"  hint: {note.hint}")
    causes = [
        {"sentence": note.sentence, "bytes": note.data["bytes"], "hint": note.hint}
        for note in notes
    ]
    return replace(
        finding, details=(*finding.details, *lines), data={**finding.data, "causes": causes}
    )

"""What outlives its step: tensors, the graph of a step that is over, that of an evaluation."""

from __future__ import annotations

from pytest_vram.findings import Finding
from pytest_vram.numerics.lives import Life, Lives, in_words
from pytest_vram.numerics.memory_finding import OWNED, cause, matters, widest
from pytest_vram.numerics.memory_watch import Holder, Observed
from pytest_vram.quantities import format_bytes


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
            if kept and matters(size, lives, share):
                found.append(maker(kept, size, number))
                break
    return found


def _kept(holders: list[Holder], lives: Lives) -> list[tuple[Holder, Life]]:
    """Each held tensor with the allocation behind it: made in a forward or backward of the step
    before, and alive when this repetition began."""
    free = [
        life
        for life in lives.alive_at(lives.repetition(holders[0].repetition))
        if life.bill not in OWNED
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
    return cause(
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
    return cause(
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
        if kept and matters(size, lives):
            return [
                cause(
                    "warn",
                    f"{format_bytes(size)} of activations of step {number - 1} are still alive as "
                    f"step {number} begins: backward(retain_graph=True) at {observed.retains} "
                    "keeps the graph",
                    f"{len(kept)} tensors, the largest {in_words(*widest(kept))}",
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
            cause(
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
        cause(
            "warn",
            "the model ran in eval mode with gradients on, again and again without a backward, at "
            f"{observed.eval_with_graph}: each forward saves its activations for nothing",
            f"activations at the peak {format_bytes(held)}",
            hint="evaluate inside torch.no_grad() or torch.inference_mode()",
            bytes=held,
        )
    ]

"""Growth from repetition to repetition, and its kind: cycle, graph, container or other."""

from __future__ import annotations

from itertools import pairwise

from pytest_vram.findings import Finding
from pytest_vram.numerics.lives import Lives, in_words
from pytest_vram.numerics.memory_finding import OWNED, cause, matters
from pytest_vram.numerics.memory_watch import GraphHolder, Observed
from pytest_vram.quantities import format_bytes


def leaks(lives: Lives, observed: Observed, growth: int) -> list[Finding]:
    """Growth from repetition to repetition, and its kind: cycle, graph, container or other."""
    allowed = max(growth, 1)
    steps = [after - before for before, after in pairwise(observed.alive)]
    last = steps[1:][-3:]  # workspaces, gradients and optimizer states arrive with the first step
    cycle = _cycle(lives, observed, allowed)
    if cycle is not None:
        return [cycle]
    if len(last) >= 2 and min(last) > allowed and not only_the_last_step(lives, allowed):
        return [_growth(lives, observed, last)]
    if observed.graphs:
        holder = observed.graphs[0]
        counts = ", ".join(map(str, holder.nodes))
        return [
            cause(
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


def only_the_last_step(lives: Lives, allowed: int) -> bool:
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
    waits = [c for c in observed.collections if matters(c.released, lives)]
    if not asked and len(waits) < 2:
        return None
    worst = max(asked or waits, key=lambda c: c.released)
    who = f" (it ended {worst.kinds})" if worst.kinds else ""
    when = "live bytes grow from step to step, but" if asked else "in every step"
    return cause(
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
            if life.bill not in OWNED and life.phase.name not in ("setup", "between", "backward")
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
    return cause(
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
        if begin <= life.birth < end and life.bill not in OWNED
    ]
    if not kept:
        return []
    life = max(kept, key=lambda one: one.block)
    made = f"{in_words(life.dtype, life.shape)} ({format_bytes(life.block)}) made at {life.frame}"
    return [f"the largest each time: {made} by {life.operator}"]

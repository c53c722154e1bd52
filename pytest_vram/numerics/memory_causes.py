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
from typing import Any

from pytest_vram.findings import Finding, Severity
from pytest_vram.numerics.lives import Lives
from pytest_vram.numerics.memory_explain import explain
from pytest_vram.numerics.memory_leaks import leaks, only_the_last_step
from pytest_vram.numerics.memory_survivors import evaluation, kept_graphs, survivors
from pytest_vram.numerics.memory_waste import (
    checkpointing,
    compiled,
    fragmentation,
    growing_hooks,
    loaded_twice,
    math_attention,
    old_gradients,
)
from pytest_vram.numerics.memory_watch import Observed
from pytest_vram.quantities import format_bytes
from pytest_vram.trace import Trace


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
    if slopes and leak is None and only_the_last_step(Lives(trace), growth):
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

"""What is added up before a step, and when it is cleared, clipped and divided."""

from __future__ import annotations

from threading import get_ident
from typing import Any

from pytest_vram.findings import Finding
from pytest_vram.numerics.collector import Collector
from pytest_vram.numerics.events import Backward, Clip, Update
from pytest_vram.numerics.loop import Loop
from pytest_vram.numerics.loss_graph import below_scaling
from pytest_vram.numerics.names import listed, optimizer_parameters


class AccumulationWatch(Collector):
    """Gradients of earlier steps, gradients that are thrown away, losses that are not divided."""

    def __init__(self, loop: Loop, found: dict[str, Finding]) -> None:
        super().__init__(loop, found)
        self._micro: list[tuple[str, str]] = []  # (line, how the loss was reduced) since an update
        self._threads: set[int] = set()  # that ran backward

    def backward_begins(self, call: Backward) -> None:
        node = call.roots[0].grad_fn if call.roots else None
        if call.scaler is not None:
            node = below_scaling(node)
        self._micro.append((call.line, _reduction(node)))
        self._threads.add(get_ident())

    def update_begins(self, update: Update) -> None:
        self._undivided_loss(update)
        if not update.closure:  # its backward has yet to run
            self._never_zeroed(update)
        self._thrown_away(update)

    def update_ends(self, update: Update) -> None:
        self._micro.clear()
        if update.closure and update.applied:
            self._never_zeroed(update)

    def clip_begins(self, clip: Clip) -> None:
        if not clip.parameters:
            self._add(
                "clip nothing",
                f"{clip.function} at {clip.line} was given no parameters, so nothing is clipped: a "
                "generator such as model.parameters() can be used once",
                hint="call model.parameters() anew, or keep list(model.parameters())",
                kind="untrained",
                severity="warn",
            )
        states = [self._loop.state(p) for p in clip.parameters if p.grad is not None]
        if states and all(state.used_up() for state in states):
            self._add(
                "clip after step",
                f"{clip.function} at {clip.line} comes after the optimizer's step: what it clips "
                "has been applied already",
                hint="clip between backward (or unscale_) and step",
                kind="untrained",
            )

    def _never_zeroed(self, update: Update) -> None:
        """What the optimizer reads is the sum of this step's gradients and of used ones."""
        parameters = [p for p in optimizer_parameters(update.optimizer) if p.grad is not None]
        stacked = [p for p in parameters if self._loop.state(p).stacked_at]
        if not stacked:
            return
        self._add(
            "never zeroed",
            f"{self._loop.describe(update.optimizer)} steps at {update.line} with gradients of "
            f"earlier steps added in (step {self._loop.step}): backward at "
            f"{self._loop.state(stacked[0]).stacked_at} added to gradients that were already used",
            f"parameters: {listed(self._loop.names.names(stacked))}",
            hint="call optimizer.zero_grad() once per step, before backward",
            kind="untrained",
        )

    def _thrown_away(self, update: Update) -> None:
        """zero_grad between backward and step: the optimizer has nothing to apply."""
        states = [self._loop.state(p) for p in optimizer_parameters(update.optimizer)]
        thrown = [state for state in states if state.discarded_at]
        if not thrown or update.closure or any(state.contributions for state in states):
            return
        self._add(
            "thrown away",
            f"{self._loop.describe(update.optimizer)} steps at {update.line} without gradients: "
            f"zero_grad at {thrown[0].discarded_at} cleared them after backward",
            hint="the order is zero_grad, backward, step",
            kind="untrained",
        )

    def _undivided_loss(self, update: Update) -> None:
        """k micro-batches, each with a mean as its loss, give k times the gradient of the batch."""
        if len(self._threads) > 1:
            return  # loops that interleave: whose micro-batch is it?
        groups: dict[str, list[str]] = {}
        for line, reduction in self._micro:
            groups.setdefault(line, []).append(reduction)
        for line, reductions in groups.items():
            if len(reductions) < 2 or not all(reductions):
                continue
            forwards = self._loop.forwards_since_update
            if forwards and max(forwards.values()) < len(reductions):
                continue  # several losses of one forward
            count = len(reductions)
            self._add(
                "undivided",
                f"{count} micro-batches were accumulated at {line} and the loss was not divided by "
                f"{count}: each is a {reductions[0]}, so gradients are {count} times too large",
                hint=f"(loss / {count}).backward()",
                micro_batches=count,
            )


_PASS_THROUGH = (
    "ViewBackward",
    "UnsafeViewBackward",
    "ReshapeAliasBackward",
    "SqueezeBackward",
    "UnsqueezeBackward",
    "ToCopyBackward",
    "AliasBackward",
    "CloneBackward",
)


def _reduction(node: Any) -> str:
    """What a loss is if nothing scales it: ``mean`` by name of the operator; empty otherwise."""
    for _ in range(8):
        if node is None:
            return ""
        name = node.name().rstrip("0123456789")
        if name.startswith(_PASS_THROUGH):
            node = node.next_functions[0][0]
            continue
        if name == "MeanBackward":
            return "mean"
        if getattr(node, "_saved_reduction", None) == 1:  # at::Reduction::Mean
            return f"mean ({name.removesuffix('Backward')})"
        return ""
    return ""

"""What is added up before a step, and when it is cleared, clipped and divided."""

from __future__ import annotations

from threading import get_ident
from typing import Any

from torch import Tensor

from pytest_vram.findings import Finding
from pytest_vram.numerics.collector import Collector
from pytest_vram.numerics.events import Backward, Clip, Update
from pytest_vram.numerics.loop import Loop, version
from pytest_vram.numerics.loss_graph import below_scaling
from pytest_vram.numerics.names import listed, optimizer_parameters
from pytest_vram.numerics.samples import piece


class AccumulationWatch(Collector):
    """Gradients of earlier steps, gradients that are thrown away, losses that are not divided."""

    def __init__(self, loop: Loop, found: dict[str, Finding]) -> None:
        super().__init__(loop, found)
        self._micro: list[tuple[str, str]] = []  # (line, how the loss was reduced) since an update
        self._threads: set[int] = set()  # that ran backward
        self._unused: list[tuple[str, str, int]] = []  # thrown away: backward, zero_grad, version
        self._wasteful = 0  # updates in a row that had thrown part of their backward passes away
        self._vain: dict[str, int] = {}  # line -> clippings that met no gradient; -1: some did

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
        self._last_one_counts(update)
        self._applied_twice(update)

    def update_ends(self, update: Update) -> None:
        self._micro.clear()
        self._unused.clear()
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
        if clip.parameters:
            self._clips_something(clip, bool(states))
        if states and all(state.used_up() for state in states):
            self._add(
                "clip after step",
                f"{clip.function} at {clip.line} comes after the optimizer's step: what it clips "
                "has been applied already",
                hint="clip between backward (or unscale_) and step",
                kind="untrained",
            )

    def _clips_something(self, clip: Clip, any_gradient: bool) -> None:
        """A clip of another model's parameters finds nothing to clip, again and again."""
        key = f"clip in vain {clip.line}"
        if any_gradient:
            self._vain[clip.line] = -1
            self.found.pop(key, None)
        elif self._vain.get(clip.line, 0) >= 0 and self._any_gradient():
            self._vain[clip.line] = self._vain.get(clip.line, 0) + 1
        if self._vain.get(clip.line, 0) >= 2:
            names = listed(self._loop.names.names(clip.parameters))
            self._add(
                key,
                f"{clip.function} at {clip.line} clips nothing: none of the "
                f"{len(clip.parameters)} parameters it is given has a gradient ({names})",
                hint="give it the parameters of the model that is trained, after backward and "
                "before zero_grad",
                kind="untrained",
                severity="warn",
            )

    def _any_gradient(self) -> bool:
        return any(p.is_leaf and p.grad is not None for p in self._loop.parameters())

    # ---- gradients of several backward passes

    def gradients_zeroed(self, parameters: list[Tensor], line: str) -> None:
        """Of a backward since the last update, and not used by any."""
        if not self._micro:
            return
        for parameter in parameters:
            state = self._loop.gradients.get(id(parameter))
            if state is not None and state.discarded_at == line and state.made_at:
                self._unused.append((state.made_at, line, version(parameter)))
                self._micro = [one for one in self._micro if one[0] != state.made_at]
                return

    def _last_one_counts(self, update: Update) -> None:
        """Micro-batches with zero_grad between them: the step sees the last one only."""
        unused, line = self._unused, ""
        for parameter in optimizer_parameters(update.optimizer):
            state = self._loop.gradients.get(id(parameter))
            if parameter.grad is not None and state is not None and state.contributions:
                line = state.made_at if id(parameter.grad) == state.made_as else ""
                moved = any(known != version(parameter) for *_, known in unused)
                break
        if not line or moved or not unused or any(made != line for made, *_ in unused):
            self._wasteful = 0
            return
        self._wasteful += 1
        if self._wasteful >= 2:
            count = len(unused) + 1
            self._add(
                "all but the last",
                f"{len(unused)} of {count} backward passes at {line} count for nothing: zero_grad "
                f"at {unused[0][1]} throws their gradients away before the step at {update.line}",
                hint="call zero_grad once per step, not per micro-batch",
                kind="untrained",
                severity="warn",
            )

    def _applied_twice(self, update: Update) -> None:
        """Gradients that an optimizer has used, and that no backward has renewed since."""
        if update.closure or update.nested or {"second step", "scaled step"} & self.found.keys():
            return
        parameters = [p for p in optimizer_parameters(update.optimizer) if p.grad is not None]
        states = self._loop.gradients
        again = [p for p in parameters if (s := states.get(id(p))) is not None and s.applied]
        again = [p for p in again if self._loop.state(p).used_up()]
        applied = [self._loop.state(p).applied_at for p in again]
        first = next((entry for entry in applied if entry is not None), None)
        if first is None:
            return
        other, line = first[0](), first[1]
        who = self._loop.describe(update.optimizer)
        names = listed(self._loop.names.names(again))
        severity = "warn"
        if other is not None and other is not update.optimizer:
            sentence = (
                f"the gradients of {names} are applied twice: by {self._loop.describe(other)} at "
                f"{line} and again by {who} at {update.line}"
            )
            if update.scaler is not None:
                sentence += ", and divided by the loss scale twice"
                severity = "fail"
            hint = "give each parameter to one optimizer"
        elif len(again) == len(parameters):
            sentence = (
                f"{who} steps twice with the same gradients: at {line} and again at {update.line}"
            )
            hint = "call step() once per backward"
        else:
            sentence = (
                f"{who} steps at {update.line} with gradients of an earlier step for {names}: they "
                f"were used at {line}, and no backward has renewed them since"
            )
            hint = "call zero_grad(set_to_none=True) in each step: what has no gradient is skipped"
        self._add("applied twice", sentence, hint=hint, kind="untrained", severity=severity)

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
        if any(self._made_by_hand(p) for p in optimizer_parameters(update.optimizer)):
            return
        self._add(
            "thrown away",
            f"{self._loop.describe(update.optimizer)} steps at {update.line} without gradients: "
            f"zero_grad at {thrown[0].discarded_at} cleared them after backward",
            hint="the order is zero_grad, backward, step",
            kind="untrained",
        )

    def _made_by_hand(self, parameter: Tensor) -> bool:
        """A gradient that no backward made: of several, or of another model."""
        grad = parameter.grad
        if grad is None or self._loop.state(parameter).made_as != id(grad):
            return grad is not None
        some = piece(grad) if self._loop.values else None
        return some is not None and bool(some.any())

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

"""The loop as it is seen: steps, optimizers, and in which unit each gradient is at the moment."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pytest_vram.numerics.events import Backward, Listener, ScalerCall, Update
from pytest_vram.numerics.names import NameBook, listed, optimizer_parameters
from pytest_vram.numerics.samples import piece


@dataclass(frozen=True, slots=True)
class Mixed:
    """Two backward passes that added to one gradient, and the loss scale of each."""

    scales: tuple[float, float]
    lines: tuple[str, str]


@dataclass(slots=True)
class GradientState:
    """What is known about one parameter's ``.grad``."""

    parameter: weakref.ref[Tensor]
    scale: float = 1.0  #: factor that the gradient still carries
    produced: float = 1.0  #: the loss scale when backward produced it
    made_at: str = ""  #: line of the last backward that added to it
    made_as: int = 0  #: identity of the gradient that it left
    scaler: weakref.ref[Any] | None = None  #: that multiplied the loss of this backward
    mixed: Mixed | None = None  #: not yet used parts of it are in different units
    unscaled_at: str = ""  #: line of the unscale_ that divided it
    applied: bool = False  #: an optimizer has used it since the last backward
    applied_as: tuple[int, int] = (0, -1)  #: identity and version of the gradient that was used
    applied_at: tuple[weakref.ref[Any], str] | None = None  #: the optimizer and its line
    ever: bool = False  #: a backward has reached this parameter
    contributions: int = 0  #: backward passes since it was last empty or applied
    stacked_at: str = ""  #: line of a backward that added to a gradient already used
    discarded_at: str = ""  #: line of a zero_grad that threw an unused gradient away

    def used_up(self) -> bool:
        """The gradient is the very one that an optimizer has used."""
        parameter = self.parameter()
        grad = parameter.grad if parameter is not None else None
        return self.applied and grad is not None and self.applied_as == _fingerprint(grad)


@dataclass(slots=True)
class Reached:
    """A parameter whose gradient the backward that just ended has written."""

    state: GradientState
    before: GradientState


@dataclass(slots=True)
class OptimizerRecord:
    optimizer: weakref.ref[Any]
    updates: int = 0  #: attempts that went through
    attempts: int = 0
    waiting: bool = False  #: a backward happened since its last attempt
    loaded_at: str = ""  #: line of a load_state_dict with a non-empty state
    updates_at_load: int = 0
    scalers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    scalers_met: int = 0  #: gradient scalers that ever stepped it, the dead ones included
    scheduler_steps: dict[int, int] = field(default_factory=dict)


class Loop(Listener):
    """Shared by all parts of the watch; it is the first listener, so the others see fresh state.

    Steps count from 1. A new one begins at the first backward (or forward) after an optimizer that
    has stepped in this step; micro-batches and alternating optimizers are one step.
    """

    def __init__(self, values: bool = True) -> None:
        self.values = values
        self.names = NameBook()
        self.step = 1
        self.forwards = 0
        self.backwards = 0
        self.autocast_dtype: torch.dtype | None = None  # of the last forward with gradients
        self.scaled = False  #: some backward started from a scaled loss
        self.optimizers: dict[int, OptimizerRecord] = {}
        self.gradients: dict[int, GradientState] = {}
        self._stepped: set[int] = set()  # optimizers that stepped in this step
        self.forwards_since_update: dict[int, int] = {}  # per outermost module, with gradients
        self.outermost: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # ran by themselves
        self._ran: dict[int, int] = {}  # module -> number of the forward it last ran in
        self._ran_without_graph: set[int] = set()
        self._update_forward = 0  # forwards when an optimizer last stepped
        self._before: dict[int, tuple[int, int]] = {}
        self.reached: list[Reached] = []
        self._parameters: tuple[Any, list[weakref.ref[Tensor]]] | None = None
        self._owners: tuple[Any, dict[int, list[weakref.ref[nn.Module]]]] | None = None
        self._refresh = 0

    # ---- modules and parameters

    def children_added(self, parent: nn.Module) -> None:
        self.names.note(parent)

    def forward_begins(self, module: nn.Module) -> None:
        self.forwards += 1
        self.names.note(module)
        self.outermost.add(module)
        if torch.is_grad_enabled():
            self.autocast_dtype = autocast_dtype()
            count = self.forwards_since_update.get(id(module), 0)
            self.forwards_since_update[id(module)] = count + 1

    def module_ran(self, module: nn.Module, output: Any) -> None:
        if torch.is_grad_enabled():
            self._ran[id(module)] = self.forwards
        else:
            self._ran_without_graph.add(id(module))

    def ran_only_without_graph(self, module: nn.Module) -> bool:
        return id(module) in self._ran_without_graph and id(module) not in self._ran

    def ran(self, module: nn.Module) -> bool:
        """Whether the module ever ran with gradients on."""
        return id(module) in self._ran

    def used(self, parameter: Tensor) -> bool:
        """Whether the module that holds ``parameter`` ran since the last update."""
        return any(
            self._ran.get(id(owner), -1) > self._update_forward for owner in self.owners(parameter)
        )

    def owners(self, parameter: Tensor) -> list[nn.Module]:
        """Modules that hold ``parameter`` themselves (several when it is tied)."""
        known = (self.names.version, len(self.optimizers), self._refresh)
        if self._owners is None or self._owners[0] != known:
            self._owners = known, self._look_up_owners()
        found = [ref() for ref in self._owners[1].get(id(parameter), ())]
        return [
            module
            for module in found
            if module is not None and any(p is parameter for p in module._parameters.values())
        ]

    def _look_up_owners(self) -> dict[int, list[weakref.ref[nn.Module]]]:
        owners: dict[int, list[weakref.ref[nn.Module]]] = {}
        for root in self.names.roots():
            for module in root.modules():
                for own in module._parameters.values():
                    if own is not None:
                        owners.setdefault(id(own), []).append(weakref.ref(module))
        return owners

    def parameters(self) -> list[Tensor]:
        """Parameters of known modules and optimizers, each once.

        Looked up anew when a module or an optimizer appeared and, for modules whose parameters were
        replaced, at the first updates and each power of two.
        """
        known = (self.names.version, len(self.optimizers), self._refresh)
        if self._parameters is None or self._parameters[0] != known:
            references = [weakref.ref(p) for p in self._look_up_parameters()]
            self._parameters = known, references
        return [p for ref in self._parameters[1] if (p := ref()) is not None]

    def _look_up_parameters(self) -> list[Tensor]:
        seen = {id(p): p for p in self.names.parameters()}
        for optimizer in self.live_optimizers():
            for parameter in optimizer_parameters(optimizer):
                seen.setdefault(id(parameter), parameter)
        return list(seen.values())

    def live_optimizers(self) -> list[Any]:
        found = (record.optimizer() for record in self.optimizers.values())
        return [optimizer for optimizer in found if optimizer is not None]

    def state(self, parameter: Tensor) -> GradientState:
        state = self.gradients.get(id(parameter))
        if state is None or state.parameter() is not parameter:
            state = self.gradients[id(parameter)] = GradientState(weakref.ref(parameter))
        return state

    # ---- optimizers

    def record(self, optimizer: Any) -> OptimizerRecord:
        known = self.optimizers.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer:
            known = OptimizerRecord(weakref.ref(optimizer))
            self.optimizers[id(optimizer)] = known
        return known

    def optimizer_made(self, optimizer: Any) -> None:
        self.record(optimizer)

    def optimizer_loaded(self, optimizer: Any, state: Any, line: str) -> None:
        if state.get("state"):
            record = self.record(optimizer)
            record.loaded_at, record.updates_at_load = line, record.updates

    def scheduler_stepped(self, scheduler: Any) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is not None:
            steps = self.record(optimizer).scheduler_steps
            steps[id(scheduler)] = steps.get(id(scheduler), 0) + 1

    def describe(self, optimizer: Any) -> str:
        """``SGD`` while there is one; with several, over whose parameters."""
        kind = type(optimizer).__name__
        parameters = optimizer_parameters(optimizer)
        mine = {id(p) for p in parameters}
        # A wrapper around it (accelerate's) is no other optimizer: it has the same parameters.
        if not any(
            mine.isdisjoint(map(id, optimizer_parameters(other)))
            for other in self.live_optimizers()
            if other is not optimizer
        ):
            return f"optimizer {kind}"
        names = self.names.names(parameters)
        heads = {name.split(".")[0] for name in names}
        if len(heads) == 1 and len(names) > 1:
            return f"optimizer {kind} of '{heads.pop()}'"
        return f"optimizer {kind} of {listed(names, 2)}"

    # ---- backward

    def backward_begins(self, call: Backward) -> None:
        self.backwards += 1
        self.scaled |= call.scaler is not None
        if self.values:
            self._zeroed_by_hand()
        self._before = {
            id(p): (id(p.grad), version(p.grad))
            for p in self.parameters()
            if p.is_leaf and p.grad is not None
        }

    def _zeroed_by_hand(self) -> None:
        """``p.grad.data.zero_()`` leaves no trace but the values."""
        for state in self.gradients.values():
            parameter = state.parameter() if state.applied else None
            if parameter is None or parameter.grad is None or not state.used_up():
                continue
            some = piece(parameter.grad)
            if some is None or some.any():
                return  # nobody clears them
            state.scale, state.applied, state.unscaled_at = 1.0, False, ""

    def backward_step(self) -> int:
        """The step that a backward belongs to. Which optimizer steps next is not known yet: once
        every optimizer that steps at all has had its turn, the next step has begun."""
        if not any(record.attempts for record in self.optimizers.values()):
            return max(1, self.backwards) if not self.optimizers else self.step
        active = {
            key
            for key, record in self.optimizers.items()
            if record.attempts and record.optimizer() is not None
        }
        return self.step + (active <= self._stepped)

    def backward_ends(self, call: Backward) -> None:
        self.reached = []
        for parameter in self.parameters():
            grad = parameter.grad if parameter.is_leaf else None
            if grad is None or (id(grad), version(grad)) == self._before.get(id(parameter)):
                continue
            state = self.state(parameter)
            if id(parameter) not in self._before:  # it was empty, perhaps set to None by hand
                state.stacked_at, state.contributions, state.mixed = "", 0, None
            elif state.applied and state.applied_as == _fingerprint(grad, -1):
                state.stacked_at = call.line
            self.reached.append(Reached(state, replace(state)))
            if state.contributions and not state.unscaled_at and state.produced != call.scale:
                both = (state.produced, call.scale), (state.made_at, call.line)
                state.mixed = state.mixed or Mixed(*both)
            state.ever, state.applied, state.unscaled_at = True, False, ""
            state.contributions += 1
            state.discarded_at = ""
            state.scale = state.produced = call.scale
            state.made_at, state.made_as = call.line, id(grad)
            state.scaler = weakref.ref(call.scaler) if call.scaler is not None else None
        for record in self.optimizers.values():
            record.waiting = True

    # ---- scaling and stepping

    def scaler_called(self, call: ScalerCall) -> None:
        if call.kind == "unscale_" and call.error is None:
            self.unscale(call.optimizer, call.line)

    def unscale(self, optimizer: Any, line: str) -> None:
        for parameter in optimizer_parameters(optimizer):
            state = self.state(parameter)
            state.scale, state.unscaled_at = 1.0, line

    def gradients_zeroed(self, parameters: list[Tensor], line: str) -> None:
        for parameter in parameters:
            state = self.gradients.get(id(parameter))
            if state is not None:
                if state.contributions:
                    state.discarded_at = line
                state.scale, state.applied, state.unscaled_at = 1.0, False, ""
                state.contributions, state.stacked_at, state.mixed = 0, "", None

    def update_begins(self, update: Update) -> None:
        record = self.record(update.optimizer)
        record.attempts += 1
        # A closure's backward runs inside the step, so nothing can be waiting before it.
        fresh = record.waiting or update.closure
        if fresh and id(update.optimizer) in self._stepped:
            self.step += 1
            self._stepped.clear()
        self._stepped.add(id(update.optimizer))

    def update_ends(self, update: Update) -> None:
        record = self.record(update.optimizer)
        record.waiting = False
        record.updates += update.applied
        if record.attempts & (record.attempts - 1) == 0:
            self._refresh += 1
        self.forwards_since_update.clear()
        self._update_forward = self.forwards
        for parameter in optimizer_parameters(update.optimizer):
            grad = parameter.grad
            if grad is None:
                continue
            state = self.state(parameter)
            if update.scaler is not None:
                state.scale = 1.0
            state.applied, state.contributions, state.mixed = True, 0, None
            state.applied_as = _fingerprint(grad)
            used = (weakref.ref(update.optimizer), update.line) if update.applied else None
            state.applied_at = used


def autocast_dtype() -> torch.dtype | None:
    """What autocast casts to here; ``None`` outside of any region."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def version(tensor: Tensor) -> int:
    """How often a tensor was written in place; inference tensors do not count."""
    return -1 if torch.is_inference(tensor) else tensor._version


def _fingerprint(grad: Tensor, offset: int = 0) -> tuple[int, int]:
    """One accumulation in place raises the version by one."""
    return id(grad), version(grad) + offset

"""What can be seen of a training loop: the sights, and who may want to know of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(slots=True)
class Backward:
    """One entry into the autograd engine that accumulates into ``.grad``."""

    roots: tuple[Tensor, ...]
    line: str
    #: What ``Probes.capture`` made of the unscaled loss behind each root; None: it was not scaled.
    captured: tuple[Any, ...] = ()
    scaler: Any = None
    scale: float = 1.0
    inside_step: bool = False  #: started by an optimizer's closure
    retains: bool = False  #: retain_graph=True
    creates: bool = False  #: create_graph=True


@dataclass(slots=True)
class Update:
    """One attempt to step an optimizer: by the scaler (which may skip it), or directly."""

    optimizer: Any
    line: str
    scaler: Any = None
    applied: bool = False
    failed: bool = False  #: the scaler raised
    closure: bool = False
    nested: bool = False  #: inside another optimizer's step, which wraps it


@dataclass(slots=True)
class Clip:
    parameters: list[Tensor]
    function: str
    limit: float
    line: str
    norm: Tensor | None = None


@dataclass(slots=True)
class ScalerCall:
    """One call of ``scale``, ``unscale_``, ``step``, ``update`` or ``load_state_dict``."""

    kind: str
    scaler: Any
    line: str
    optimizer: Any = None
    error: BaseException | None = None
    scale_before: float = 1.0
    explicit: bool = False  #: update(new_scale)


class Listener:
    """What a part of the watch may want to know. Every method does nothing by default."""

    def forward_begins(self, module: nn.Module) -> None:
        """An outermost module starts."""

    def forward_ends(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """An outermost module is through (not called when it raised)."""

    def module_ran(self, module: nn.Module, output: Any) -> None:
        """Any module, inner ones included, is through."""

    def backward_begins(self, call: Backward) -> None: ...

    def backward_ends(self, call: Backward) -> None: ...

    def gradients_returned(self, gradients: Any, loss: Any, line: str) -> None:
        """By torch.func.grad and its kin: nested as its arguments are, perhaps wrapped by vmap."""

    def update_begins(self, update: Update) -> None: ...

    def gradients_ready(self, update: Update) -> None:
        """The optimizer is about to read the gradients (unscaled by now)."""

    def update_ends(self, update: Update) -> None: ...

    def gradients_zeroed(self, parameters: list[Tensor], line: str) -> None: ...

    def unscale_begins(self, call: ScalerCall) -> None:
        """Before ``unscale_`` divides the gradients."""

    def scaler_called(self, call: ScalerCall) -> None:
        """After the call returned or raised."""

    def clip_begins(self, clip: Clip) -> None: ...

    def clipped(self, clip: Clip) -> None: ...

    def scheduler_stepped(self, scheduler: Any) -> None: ...

    def optimizer_made(self, optimizer: Any) -> None: ...

    def optimizer_loaded(self, optimizer: Any, state: Any, line: str) -> None: ...

    def module_loaded(self, module: nn.Module, state: Any, line: str) -> None: ...

    def ties_broken(self, module: nn.Module, names: Sequence[str], how: str, line: str) -> None:
        """What ``module`` held under ``names`` was one parameter, and is several now."""

    def autocast_cache_cleared(self) -> None: ...

    def checkpointed(self, function: Any, args: Any, reentrant: bool, line: str) -> None: ...

    def children_added(self, parent: nn.Module) -> None: ...

    def parameter_added(self, parameter: Tensor) -> None:
        """A module was given a parameter."""

    def banned_called(self, name: str, line: str) -> None:
        """An operator that raises under CUDA autocast was called inside autocast."""

"""Parameters that get gradients but belong to no optimizer: they never change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pytest_vram.findings import Finding, Severity
from pytest_vram.numerics.events import Listener, Update
from pytest_vram.numerics.loop import Loop, version
from pytest_vram.numerics.names import listed, optimizer_parameters
from pytest_vram.quantities import format_bytes


@dataclass(frozen=True, slots=True)
class Unheld:
    name: str
    size: int  #: bytes of its gradient
    why: str  #: late, unfrozen, unregistered, left out


class UnheldWatch(Listener):
    """Asks after the second update and each power of two; the last answer counts, since another
    optimizer may take the parameters later."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._ran: dict[int, weakref.ref[nn.Module]] = {}  # with trainable parameters of their own
        self._late: dict[int, weakref.ref[Tensor]] = {}  # registered after an optimizer was made
        self._frozen: dict[int, weakref.ref[Tensor]] = {}  # ran without gradient before
        self._versions: dict[int, int] = {}
        self._updates = 0
        self.unheld: list[Unheld] = []

    def module_ran(self, module: nn.Module, output: Any) -> None:
        if not module._parameters or not torch.is_grad_enabled() or id(module) in self._ran:
            return
        if any(p is not None and p.requires_grad for p in module._parameters.values()):
            self._ran[id(module)] = weakref.ref(module)
        elif self._loop.optimizers:
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in self._frozen:
                    self._frozen[id(parameter)] = weakref.ref(parameter)

    def parameter_added(self, parameter: Tensor) -> None:
        if self._loop.optimizers:
            self._late[id(parameter)] = weakref.ref(parameter)

    def update_ends(self, update: Update) -> None:
        if not update.applied:
            return
        self._updates += 1
        if self._updates & (self._updates - 1) == 0:
            self._ask()

    def _ask(self) -> None:
        held = {
            id(parameter)
            for optimizer in self._loop.live_optimizers()
            for parameter in optimizer_parameters(optimizer)
        }
        found: dict[int, Unheld] = {}
        for reference in self._ran.values():
            module = reference()
            for name, parameter in module._parameters.items() if module is not None else ():
                if parameter is None or parameter.grad is None or id(parameter) in held:
                    continue
                # Who updates it by hand, or copies it from a master weight, writes into it.
                known = self._versions.setdefault(id(parameter), version(parameter))
                if self._updates > 1 and parameter.requires_grad and known == version(parameter):
                    assert module is not None
                    shown = self._loop.names.name(parameter, self._unregistered(module, name))
                    size = parameter.grad.numel() * parameter.grad.element_size()
                    why = self._why(module, parameter, held)
                    found[id(parameter)] = Unheld(shown, size, why)
        self.unheld = list(found.values())

    def _unregistered(self, module: nn.Module, name: str) -> str:
        """``layers[0].weight``: by the plain list or dict of a running model that holds it. A
        parameter that took another's place has its name."""
        for root in self._loop.outermost:
            for path, inner in root.named_modules():
                if inner is module:
                    return f"{path}.{name}" if path else name
            for path, owner in root.named_modules():
                for attribute, value in vars(owner).items():
                    key = _key_in(value, module)
                    if key is not None:
                        head = f"{path}.{attribute}" if path else attribute
                        return f"{head}[{key!r}].{name}"
        return f"{name} of {type(module).__name__}"

    def _why(self, module: nn.Module, parameter: Tensor, held: set[int]) -> str:
        roots = [root for root in self._loop.outermost if any(m is module for m in root.modules())]
        if not roots:
            return "unregistered"
        late = self._late.get(id(parameter))
        among_held = any(id(p) in held for root in roots for p in root.parameters())
        if late is not None and late() is parameter and among_held:
            return "late"
        frozen = self._frozen.get(id(parameter))
        return "unfrozen" if frozen is not None and frozen() is parameter else "left out"

    def findings(self, wanted: Callable[[str], bool], copied: bool = False) -> list[Finding]:
        """``wanted``: whether the marker's ``trainable=`` asks for a parameter of this name;
        ``copied``: another finding says that these belong to a copy of the optimizer's model."""
        result = []
        for why, (reason, hint) in _REASONS.items():
            members = [one for one in self.unheld if one.why == why]
            if members and not (copied and why == "left out"):
                # Leaving parameters out may be meant, unless the marker says that they train; to
                # compute gradients that nobody uses or clears is not.
                asked = why != "left out" or any(wanted(one.name) for one in members)
                result.append(_finding(members, "fail" if asked else "warn", reason, hint))
        return result


def _key_in(value: Any, module: nn.Module) -> Any:
    """Where a plain list, tuple or dict holds ``module``; None if it does not."""
    pairs: Iterable[tuple[Any, Any]] = ()
    if type(value) in (list, tuple):
        pairs = enumerate(value)
    elif type(value) is dict:
        pairs = value.items()
    return next((key for key, inner in pairs if inner is module), None)


def _finding(members: Sequence[Unheld], severity: Severity, reason: str, hint: str) -> Finding:
    names = [one.name for one in members]
    size = sum(one.size for one in members)
    verb = "parameter gets a gradient" if len(members) == 1 else "parameters get gradients"
    return Finding(
        "untrained",
        severity,
        f"{len(members)} {verb} but no optimizer holds them: {listed(names)}; {reason}",
        (f"their gradients take {format_bytes(size)}, and no optimizer.zero_grad() clears them",),
        hint,
        {"parameters": names, "bytes": size},
    )


_REASONS: dict[str, tuple[str, str]] = {
    "late": (
        "they were added to the model after the optimizer was made",
        "make the optimizer once the model is complete, or optimizer.add_param_group(...)",
    ),
    "unfrozen": (
        "they were frozen when it was made, and trainable only since",
        "add them when they are unfrozen: optimizer.add_param_group({'params': ...})",
    ),
    "unregistered": (
        "their modules run inside the model but are not registered in it (a plain list or dict)",
        "keep them in nn.ModuleList or nn.ModuleDict: parameters(), to() and state_dict() know "
        "only those",
    ),
    "left out": (
        "they were left out when it was made, and nobody uses these gradients",
        "give them to the optimizer or, where they are not meant to train, save the backward "
        "through them: requires_grad_(False), or run that part under torch.no_grad()",
    ),
}

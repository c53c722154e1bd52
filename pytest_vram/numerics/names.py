"""What the user calls a parameter: module paths and variable names."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pytest_vram.frames import local_variables, user_frames


class NameBook:
    """Modules that were seen, and the names that follow from them.

    ``note`` takes modules that ran outermost or were given children; names are made when asked
    for. With one root a parameter is ``layers.0.weight``; with several the root's variable name
    comes first (``generator.layers.0.weight``).
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._order: dict[int, int] = {}
        self._parameters: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._modules: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._stale = True
        self.version = 0  #: goes up whenever a module becomes known

    def note(self, module: nn.Module) -> None:
        if module not in self._known:
            self._known.add(module)
            self._order[id(module)] = len(self._order)
            self._stale = True
            self.version += 1

    def roots(self) -> list[nn.Module]:
        """Known modules that no other known module contains, in the order they were met."""
        known = sorted(self._known, key=lambda module: self._order.get(id(module), 0))
        inner = _inside(known)
        return [module for module in known if id(module) not in inner]

    def parameters(self) -> list[Tensor]:
        """All parameters of the roots, each once."""
        seen: dict[int, Tensor] = {}
        for root in self.roots():
            for parameter in root.parameters():
                seen.setdefault(id(parameter), parameter)
        return list(seen.values())

    def name(self, parameter: Tensor, fallback: str = "") -> str:
        found = self._lookup(parameter)
        if found:
            return found
        self._search_frames()
        return (
            self._lookup(parameter)
            or _variable_of(parameter)
            or fallback
            or f"a parameter of shape {list(parameter.shape)}"
        )

    def module_name(self, module: nn.Module) -> str:
        if self._stale:
            self._refresh()
        entry = self._modules.get(id(module))
        if entry is not None and entry[0]() is module:
            return entry[1] or type(module).__name__
        return type(module).__name__

    def names(self, parameters: Iterable[Tensor]) -> list[str]:
        return [self.name(parameter) for parameter in parameters]

    def _lookup(self, parameter: Tensor) -> str:
        given = getattr(parameter, "_vram_name", "")  # a master weight of vram.train
        if given:
            return str(given)
        entry = self._parameters.get(id(parameter))
        if entry is not None and entry[0]() is parameter:
            return entry[1]
        if self._stale:
            self._refresh()
            entry = self._parameters.get(id(parameter))
            if entry is not None and entry[0]() is parameter:
                return entry[1]
        return ""

    def _refresh(self) -> None:
        self._stale = False
        self._parameters.clear()
        self._modules.clear()
        roots = [root for root in self.roots() if any(True for _ in root.parameters())]
        if len(roots) > 1 and self._adopt_containers(roots):
            roots = [root for root in self.roots() if any(True for _ in root.parameters())]
        prefixes = _prefixes(roots) if len(roots) > 1 else [""]
        for root, prefix in zip(roots, prefixes, strict=False):
            for name, module in root.named_modules():
                path = (prefix + name).rstrip(".")
                self._modules.setdefault(id(module), (weakref.ref(module), path))
            for name, parameter in root.named_parameters():
                self._parameters.setdefault(id(parameter), (weakref.ref(parameter), prefix + name))

    def _adopt_containers(self, roots: list[nn.Module]) -> bool:
        """Parts of a model may be called one by one: look for the whole in the user's variables."""
        wanted = {id(root) for root in roots}
        added = False
        for _, module in _modules_in_frames():
            inner = {id(child) for child in _descendants(module)}
            if wanted & inner and module not in self._known:
                self._known.add(module)
                self._order[id(module)] = -1
                self.version += 1
                added = True
        return added

    def _search_frames(self) -> None:
        before = len(self._known)
        for _, module in _modules_in_frames():
            self.note(module)
        if len(self._known) != before:
            self._refresh()


def _inside(modules: Iterable[nn.Module]) -> set[int]:
    """Identities of all that ``modules`` contain. Each is entered once, however deep they nest."""
    inner: set[int] = set()
    waiting = list(modules)
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in inner:
                inner.add(id(child))
                waiting.append(child)
    return inner


def _descendants(module: nn.Module) -> Iterator[nn.Module]:
    children = module.modules()
    next(children)
    return children


def _modules_in_frames() -> Iterator[tuple[str, nn.Module]]:
    for frame in user_frames():
        for name, value in local_variables(frame).items():
            if isinstance(value, nn.Module):
                yield name, value
            elif name == "self" and not isinstance(value, (Tensor, type)):
                for attribute, inner in list(getattr(value, "__dict__", {}).items()):
                    if isinstance(inner, nn.Module):
                        yield attribute, inner


def _prefixes(roots: list[nn.Module]) -> list[str]:
    variables: dict[int, str] = {}
    for name, module in _modules_in_frames():
        variables.setdefault(id(module), name)
    result: list[str] = []
    for root in roots:
        prefix = variables.get(id(root)) or type(root).__name__
        twins = sum(earlier.rstrip(".").split("#")[0] == prefix for earlier in result)
        result.append(f"{prefix}#{twins + 1}." if twins else f"{prefix}.")
    return result


def _variable_of(tensor: Tensor) -> str:
    for frame in user_frames():
        for name, value in local_variables(frame).items():
            if value is tensor:
                return name
    return ""


def listed(names: Iterable[str], limit: int = 4) -> str:
    """``a, b, c and 5 more``."""
    names = list(names)
    if len(names) <= limit:
        return (
            " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
        )
    return f"{', '.join(names[:limit])} and {len(names) - limit} more"


def optimizer_parameters(optimizer: Any) -> list[Tensor]:
    """The tensors an optimizer (or something that looks like one) updates."""
    groups = getattr(optimizer, "param_groups", None) or ()
    return [p for group in groups for p in group["params"] if isinstance(p, Tensor)]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

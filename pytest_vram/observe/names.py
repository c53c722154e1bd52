"""Dotted names of the modules that a test uses, and of the tensors that they hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.parameter import is_lazy


class ModuleNames:
    """Dotted names of the modules that a test uses. Holds neither modules nor tensors alive.

    Names are relative to the outermost module (``blocks.3.fc``). Its class name stands before them
    only where two outermost modules would share a name, or where there is nothing below it.
    """

    def __init__(self) -> None:
        self._paths: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._tops: list[_Top] = []
        self._built: dict[int, weakref.ref[nn.Module]] = {}  # made in the test, without a parent
        self._called: dict[int, weakref.ref[nn.Module]] = {}

    def path(self, module: nn.Module) -> str | None:
        known = self._paths.get(id(module))
        return known[1] if known is not None and known[0]() is module else None

    def built(self, module: nn.Module) -> None:
        if id(module) not in self._built or self._built[id(module)]() is not module:
            self._built[id(module)] = weakref.ref(module)

    def adopted(self, parent: nn.Module, child: nn.Module) -> None:
        self._built.pop(id(child), None)
        self.built(parent)

    def called(self) -> list[nn.Module]:
        return [module for ref in self._called.values() if (module := ref()) is not None]

    def call(self, module: nn.Module) -> None:
        """``module`` starts a forward that no other module called."""
        top = next((t for t in self._tops if t.holds(module)), None)
        outermost = top.ref() if top is not None else None
        outermost = module if outermost is None else outermost
        self._called.setdefault(id(outermost), weakref.ref(outermost))
        if self._called[id(outermost)]() is not outermost:
            self._called[id(outermost)] = weakref.ref(outermost)

    def discover(self, module: nn.Module, stack: list[int]) -> str:
        """The path of a module that was never seen: new below a known one, hidden in one (in a
        plain list, say), or the first of its tree."""
        for top in self._tops:
            if (root := top.ref()) is not None:
                self._walk(root, top)
        path = self.path(module)
        if path is not None:
            return path
        caller = self._paths[stack[-1]][1] if stack and stack[-1] in self._paths else ""
        self._add_top(module, under=f"{caller}.{type(module).__name__}" if caller else "")
        return self._paths[id(module)][1]

    def _add_top(self, module: nn.Module, under: str = "") -> None:
        below = {id(child) for child in module.modules()}
        self._tops = [
            top for top in self._tops if (root := top.ref()) is not None and id(root) not in below
        ]
        top = _Top(weakref.ref(module))
        top.prefix = under or self._prefix(module)
        self._tops.append(top)
        self._walk(module, top)

    def _prefix(self, module: nn.Module) -> str:
        kind = type(module).__name__
        own = _relative_names(module)
        taken = {name for top in self._tops for name in top.names}
        candidates = [kind] if next(module.children(), None) is None else ["", kind]
        if not own:
            return kind
        count = 2
        while True:
            for prefix in candidates:
                if not any(joined(prefix, name) in taken for name in own):
                    return prefix
            candidates = [f"{kind}#{count}"]
            count += 1

    def _walk(self, module: nn.Module, top: _Top) -> None:
        top.modules = []
        for name, child in module.named_modules():
            path = joined(top.prefix, name) or type(module).__name__
            self._paths[id(child)] = (weakref.ref(child), path)
            top.modules.append((weakref.ref(child), joined(top.prefix, name)))
        top.names = {joined(top.prefix, name) for name in _relative_names(module)}

    def _each(self) -> Iterator[tuple[nn.Module, str]]:
        for module in [ref() for ref in self._built.values()]:
            if module is not None and self.path(module) is None:
                self._add_top(module)
        self._built.clear()
        for top in self._tops:
            for ref, path in top.modules:
                if (module := ref()) is not None:
                    yield module, path

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """``(dotted name, parameter)``; a tied one only under its first name."""
        return self._distinct("_parameters")

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self._distinct("_buffers")

    def _distinct(self, attribute: str) -> Iterator[tuple[str, Tensor]]:
        seen: set[int] = set()
        for module, path in self._each():
            for key, tensor in getattr(module, attribute).items():
                if isinstance(tensor, Tensor) and id(tensor) not in seen and not is_lazy(tensor):
                    seen.add(id(tensor))
                    yield joined(path, key), tensor


@dataclass(slots=True)
class _Top:
    """An outermost module: its prefix, its modules with their paths, and the names it takes."""

    ref: weakref.ref[nn.Module]
    prefix: str = ""
    modules: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def holds(self, module: nn.Module) -> bool:
        return any(ref() is module for ref, _ in self.modules)


def joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _relative_names(module: nn.Module) -> list[str]:
    """Names of a tree's modules, parameters and buffers, relative to it."""
    names = [name for name, _ in module.named_modules() if name]
    names += [name for name, _ in module.named_parameters()]
    return names + [name for name, _ in module.named_buffers()]

"""Who refers to tensors on the GPU: variables, containers, attributes, caches, graphs.

Looks from the running test's frames outwards (local variables, then globals of the same files), so
that what it finds has the name that the user gave it. Nothing that is looked at is kept.
"""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import _lru_cache_wrapper
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pytest_vram.frames import describe, local_variables, owner, user_frames
from pytest_vram.numerics.sources import Scope

#: Objects, nodes and elements that one look visits at most.
_MOST_OBJECTS, _MOST_NODES, _MOST_ELEMENTS = 20_000, 5_000, 1_000


def is_a(value: Any, kind: type | tuple[type, ...]) -> bool:
    """isinstance() asks a proxy for its class: lazy ones import then, weak ones may be dead."""
    return issubclass(type(value), kind)


def direct_tensors(value: Any) -> Iterator[Tensor]:
    if is_a(value, Tensor):
        yield value
    elif is_a(value, (list, tuple)) and len(value) < _MOST_ELEMENTS:
        yield from (inner for inner in value if is_a(inner, Tensor))
    elif type(value) is dict and len(value) < _MOST_ELEMENTS:
        yield from (inner for inner in value.values() if is_a(inner, Tensor))


def training_frames() -> list[FrameType]:
    """User frames of the running test, innermost first, the loop's among them."""
    return [frame for frame in user_frames() if frame.f_code.co_flags & 0x2][:6]


def variables(known: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Tensors on the GPU that local variables hold."""
    for frame in training_frames():
        code = frame.f_code
        for name, value in local_variables(frame).items():
            for tensor in direct_tensors(value):
                if id(tensor) in known or tensor.device.type != "cuda":
                    continue
                if isinstance(tensor, nn.Parameter):
                    continue
                yield f"variable '{name}' in {code.co_name}", tensor


# ---- graphs


@dataclass(frozen=True, slots=True)
class Graph:
    """What hangs on a variable: ``nodes`` of its graph (up to 5000), the sequence numbers of the
    newest and the oldest of them. Autograd counts them upwards as operators run."""

    who: str
    line: str
    nodes: int
    newest: int
    oldest: int
    scalar: bool
    scope: Scope


def graphs(before: int) -> list[Graph]:
    """Variables with a graph, and lists of such, those made first coming first. A graph that
    reaches back to a node up to number ``before`` keeps what was made until then."""
    roots = sorted(_roots(), key=lambda root: -root.newest)
    covered: set[Any] = set()
    looked: list[tuple[_Root, set[Any] | None]] = []
    for root in roots:
        seen = None if covered.issuperset(root.nodes) else _reach(root.nodes)
        covered |= seen or set()
        looked.append((root, seen))
    reaching = any(seen is not None and _oldest(seen) <= before for _, seen in looked)
    found = []
    for root, seen in reversed(looked):
        if seen is None and reaching:  # part of another's graph: which of them carries it on?
            seen = _reach(root.nodes)
        if seen is not None:
            oldest = _oldest(seen)
            found.append(
                Graph(root.who, root.line, len(seen), root.newest, oldest, root.scalar, root.scope)
            )
    return found


@dataclass(frozen=True, slots=True)
class _Root:
    who: str
    line: str
    newest: int
    nodes: list[Any]
    scalar: bool
    scope: Scope


def _roots() -> Iterator[_Root]:
    for frame in training_frames():
        code = frame.f_code
        for name, value in _named_values(frame):
            tensors = [t for t in direct_tensors(value) if t.grad_fn is not None]
            if tensors:
                kind = "variable" if is_a(value, Tensor) else type(value).__name__
                line = describe(code, frame.f_lineno)
                nodes = [tensor.grad_fn for tensor in tensors]
                newest = max(map(_number, nodes))
                who = f"{kind} '{name}' in {code.co_name}"
                scalar = tensors[0].numel() == 1
                yield _Root(who, line, newest, nodes, scalar, Scope(name, code))


def _named_values(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Local variables, and the attributes of plain objects among them: trainers, meters."""
    for name, value in local_variables(frame).items():
        yield name, value
        own = None if is_a(value, (type, *_PLAIN, Tensor)) else getattr(value, "__dict__", None)
        foreign = type(value).__module__.startswith("torch.") and not is_a(value, nn.Module)
        if type(own) is dict and len(own) < 100 and not foreign:
            for attribute, inner in list(own.items()):
                if not attribute.startswith("_"):
                    yield f"{name}.{attribute}", inner


def _reach(nodes: Iterable[Any]) -> set[Any]:
    seen: set[Any] = set()
    front = list(nodes)
    while front and len(seen) < _MOST_NODES:
        node = front.pop()
        if node in seen:
            continue
        seen.add(node)
        front += [inner for inner, _ in node.next_functions if inner is not None]
    return seen


def _number(node: Any) -> int:
    return int(node._sequence_nr())


def _oldest(nodes: set[Any]) -> int:
    """AccumulateGrad nodes belong to parameters and count from the other end."""
    numbers = (_number(node) for node in nodes if not hasattr(node, "variable"))
    return min(numbers, default=1 << 62)


# ---- hooks


def hooks_of(module: nn.Module) -> list[Any]:
    """Functions that run when ``module`` runs, or when its parameters get a gradient."""
    found: list[Any] = []
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        found += getattr(module, name).values()
    for parameter in module._parameters.values():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            found += (getattr(parameter, name, None) or {}).values()
    return found


def refers_to_itself(parameter: Tensor) -> bool:
    """Whether a hook of ``parameter`` leads back to it."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    front, seen = list((hooks or {}).values()), set[int]()
    while front and len(seen) < _MOST_OBJECTS:
        one = front.pop()
        if one is parameter:
            return True
        if id(one) in seen or is_a(one, (type, str, bytes, int, float, ModuleType, FrameType)):
            continue
        seen.add(id(one))
        if is_a(one, FunctionType):  # not its globals: all of the file
            front += [*(one.__closure__ or ()), *(one.__defaults__ or ())]
        else:
            front += gc.get_referents(one)
    return False


def describe_function(function: Any) -> str:
    """``hook (train.py:41)``."""
    target = getattr(function, "__func__", getattr(function, "func", function))
    return f"{getattr(target, '__name__', type(target).__name__)} ({_defined_at(target)})"


# ---- containers


@dataclass(frozen=True, slots=True)
class Container:
    """A list, dict, set or cache and how many tensors on the GPU are reachable through it."""

    who: str  #: ``dict 'data.cache' in test_x``
    tensors: int
    depth: int
    kind: str  #: what to do about it depends on this: ``container``, ``cache`` or ``exceptions``
    scope: Scope


def containers() -> list[Container]:
    walk = _Walk()
    frames = training_frames()
    for frame in frames:
        named = local_variables(frame).items()
        place = _Place(f"in {frame.f_code.co_name}", frame.f_code)
        # Lists and dicts first: a hook or an object that holds one too knows no better name.
        for name, value in sorted(named, key=lambda pair: not is_a(pair[1], _CONTAINERS)):
            walk.visit(value, name, place, 0)
    for frame in frames:
        place = _Place(f"(global of {frame.f_globals.get('__name__', '?')})", frame.f_code)
        for name, value in list(frame.f_globals.items()):
            if not name.startswith("__"):
                walk.visit(value, name, place, 0)
    return walk.found


def unnamed_containers() -> list[Container]:
    """Attributes of the user's objects that no variable leads to: a dataset inside a loader's
    iterator. All objects of the process are looked through."""
    found: dict[str, Container] = {}
    known: dict[type, bool] = {}
    for item in gc.get_objects():
        kind = type(item)
        if kind not in known:
            known[kind] = _by_the_user(kind)
        for name, value in list(_attributes_of(item).items()) if known[kind] else ():
            count = _tensors_in(value) if name not in _OF_MODULES else 0
            if not count:
                continue
            who = f"{type(value).__name__} '{name}' of a {kind.__name__}"
            more = found[who].tensors if who in found else 0
            scope = Scope(f"self.{name}", _methods(kind)[0].__code__)
            found[who] = Container(who, count + more, 0, "container", scope)
    return list(found.values())


_OF_MODULES = ("_parameters", "_buffers", "_modules")


def _tensors_in(value: Any) -> int:
    if type(value) not in (list, dict, set, deque) or len(value) > _MOST_OBJECTS:
        return 0
    held = value.values() if type(value) is dict else value
    return sum(t.device.type == "cuda" for inner in list(held) for t in direct_tensors(inner))


def _attributes_of(item: Any) -> dict[str, Any]:
    try:  # not the object's own __getattr__, which may be anything
        own = object.__getattribute__(item, "__dict__")
    except AttributeError:
        return {}
    return own if type(own) is dict else {}


def _methods(kind: type) -> list[FunctionType]:
    return [one for one in vars(kind).values() if is_a(one, FunctionType)]


def _by_the_user(kind: type) -> bool:
    return any(owner(method.__code__.co_filename) == "user" for method in _methods(kind))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a name means something, in words, and the code from which it was met."""

    words: str
    code: CodeType


class _Walk:
    """Counts tensors from a variable outwards, depth first, each object once."""

    def __init__(self) -> None:
        self.found: list[Container] = []
        self._seen: set[int] = set()

    def visit(self, value: Any, name: str, place: _Place, depth: int) -> int:
        kind = type(value)
        if issubclass(kind, Tensor):
            return int(value.device.type == "cuda")
        if issubclass(kind, _PLAIN) or id(value) in self._seen or depth > 6:
            return 0
        if len(self._seen) >= _MOST_OBJECTS:
            return 0
        self._seen.add(id(value))
        if issubclass(kind, (FunctionType, MethodType)):
            return self._closed_over(value, depth)
        count = sum(
            self.visit(inner, f"{name}{suffix}", place, depth + 1)
            for suffix, inner in _inside(value)
        )
        if count and issubclass(kind, _CONTAINERS):
            cached = issubclass(kind, _lru_cache_wrapper)
            where = f"({_defined_at(value.__wrapped__)})" if cached else place.words
            who = f"{'lru_cache' if cached else kind.__name__} '{name}' {where}"
            scope = Scope(name, place.code)
            self.found.append(Container(who, count, depth, _kind_of(value), scope))
        return count

    def _closed_over(self, function: Any, depth: int) -> int:
        """A hook or callback keeps the variables of the function that it was defined in, and any
        function the defaults of its arguments."""
        target = getattr(function, "__func__", function)
        place = _Place(f"of {target.__name__} ({_defined_at(target)})", target.__code__)
        code, defaults = target.__code__, target.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        count = sum(
            self.visit(value, name, place, depth + 1)
            for name, value in [
                *zip(names, defaults, strict=False),
                *(target.__kwdefaults__ or {}).items(),
            ]
        )
        for name, cell in zip(target.__code__.co_freevars, target.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # an empty cell
                count += self.visit(cell.cell_contents, name, place, depth + 1)
        return count


def _defined_at(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return describe(code, code.co_firstlineno).rsplit(" ", 1)[0] if code else "built in"


def _kind_of(container: Any) -> str:
    if is_a(container, _lru_cache_wrapper):
        return "cache"
    held = container.values() if is_a(container, dict) else container
    few = list(held)[:_MOST_ELEMENTS]
    return "exceptions" if any(is_a(one, BaseException) for one in few) else "container"


_CONTAINERS = (list, dict, set, deque, _lru_cache_wrapper)
_PLAIN = (str, bytes, int, float, complex, type(None), ModuleType, Optimizer, FrameType)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, and how that is written."""
    kind = type(value)
    if issubclass(kind, dict):
        for key, inner in list(value.items())[:_MOST_ELEMENTS]:
            yield f"[{key!r}]" if issubclass(type(key), (str, int)) else "[...]", inner
    elif issubclass(kind, (list, tuple, set, frozenset, deque)):
        for number, inner in enumerate(list(value)[:_MOST_ELEMENTS]):
            yield f"[{number}]", inner
    elif issubclass(kind, _lru_cache_wrapper):
        # An unbounded cache is a dict; a bounded one refers to its keys and results itself.
        for inner in gc.get_referents(value):
            if type(inner) is not dict:
                yield "()", inner
                continue
            for key, result in list(inner.items())[:_MOST_ELEMENTS]:
                yield "()", key
                yield "()", result
    elif issubclass(kind, BaseException):
        yield from _frames_of(value)
    elif issubclass(kind, nn.Module):
        yield from _beside_weights(value)
    elif issubclass(kind, type):
        if not value.__module__.startswith(("torch", "builtins", "transformers")):
            yield from ((f".{name}", inner) for name, inner in list(vars(value).items()))
    elif not kind.__module__.startswith("torch.") or kind.__module__.startswith("torch.utils.data"):
        own = getattr(value, "__dict__", None) if not issubclass(kind, type) else None
        for name, inner in list(own.items()) if type(own) is dict else ():
            yield f".{name}", inner


def _frames_of(error: BaseException) -> Iterator[tuple[str, Any]]:
    """An exception keeps the variables of every frame it came through."""
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_flags & 0x2:
            for name, inner in local_variables(step.tb_frame).items():
                if name != "self" and not is_a(inner, nn.Module):
                    yield f" (traceback, {name})", inner
        step = step.tb_next


def _beside_weights(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Of a module that a container keeps, its weights; of each one what else it holds."""
    for parameter in module.parameters():
        yield "", parameter
    for path, inner in module.named_modules():
        for name, value in list(vars(inner).items()):
            hooks = name.endswith("_hooks") and bool(value)
            if hooks or not (name.startswith("_") or is_a(value, nn.Module)):
                yield f".{path}.{name}" if path else f".{name}", value

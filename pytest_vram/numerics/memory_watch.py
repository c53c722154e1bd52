"""What the allocator's events cannot tell about memory: who refers to a tensor, what was asked for.

Runs beside the simulation (its figures stay its own: it allocates nothing there and keeps nothing
alive). What it saw goes to :mod:`pytest_vram.numerics.memory_causes` together with the Trace.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from pytest_vram.numerics.frames import local_variables, shown, user_frames, user_line
from pytest_vram.numerics.loop import Loop
from pytest_vram.numerics.names import dtype_name
from pytest_vram.numerics.probes import Backward, Listener, Probes, Update

#: Attribute names by which models and wrappers switch checkpointing on.
_FLAGS = ("gradient_checkpointing", "use_checkpoint", "checkpointing", "activation_checkpointing")
#: Growth per repetition that is worth a garbage collection to find its kind.
SUSPICIOUS = 64 << 10


@dataclass(frozen=True, slots=True)
class Holder:
    """A tensor that is alive when the next repetition begins, and who refers to it."""

    who: str  #: ``variable 'out' in run`` or ``attribute 'probs' of 0.router``
    shape: tuple[int, ...]
    dtype: str
    size: int
    repetition: int


@dataclass(frozen=True, slots=True)
class GraphHolder:
    """A scalar whose graph grows from repetition to repetition."""

    who: str
    nodes: tuple[int, ...]
    line: str


@dataclass(frozen=True, slots=True)
class ParameterSize:
    name: str
    size: int
    dtype: str
    trainable: bool


@dataclass(frozen=True, slots=True)
class Collection:
    """One garbage collection that gave device memory back: what only cycles held."""

    released: int
    kinds: str  #: ``2 StepResult``: objects with tensors that it ended
    repetition: int
    growing: bool  #: asked for because live bytes grew


@dataclass
class Observed:
    """Plain data, safe to keep after the pass."""

    alive: list[int] = field(default_factory=list)  #: bytes allocated as each repetition begins
    collections: list[Collection] = field(default_factory=list)
    holders: list[Holder] = field(default_factory=list)
    graphs: list[GraphHolder] = field(default_factory=list)
    containers: list[str] = field(default_factory=list)  #: lists and dicts that gained tensors
    backwards: int = 0
    flags: list[str] = field(default_factory=list)
    checkpoints: list[tuple[str, int]] = field(default_factory=list)  #: (line, backwards so far)
    no_grad_autocast: str = ""
    parameters: list[ParameterSize] = field(default_factory=list)
    foreach: list[str] = field(default_factory=list)
    zero_keeps: str = ""
    compiled: list[str] = field(default_factory=list)
    loaded: list[tuple[str, int]] = field(default_factory=list)  #: saved states still alive


class MemoryWatch(Listener):
    """Context manager around a simulated (or measured) pass; ``observed`` is what it saw.

    ``allocated()`` says how many bytes the device holds now (default: ``torch.cuda``).
    """

    def __init__(self, allocated: Callable[[], int] | None = None) -> None:
        self.observed = Observed()
        self._allocated = allocated or (lambda: int(torch.cuda.memory_allocated()))
        self._loop = Loop(values=False)
        self._probes = Probes((self._loop, self), values=False)
        self._stack = ExitStack()
        self._first_root: int | None = None
        self._after_backward = True
        self._graph_sizes: dict[str, list[int]] = {}
        self._container_sizes: dict[str, list[int]] = {}
        self._states: list[tuple[str, list[weakref.ref[Tensor]]]] = []
        self._described = False
        self._collecting: tuple[int, list[tuple[str, weakref.ref[Any]]]] | None = None
        self._searched = False  # for a cycle, because live bytes grew

    def __enter__(self) -> MemoryWatch:
        self._stack.enter_context(self._probes)
        self._patch_compile()
        gc.callbacks.append(self._collection)
        self._stack.callback(gc.callbacks.remove, self._collection)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stack.close()
        for key, sizes in self._graph_sizes.items():
            if _grows(sizes):
                who, _, line = key.partition("\n")
                self.observed.graphs.append(GraphHolder(who, tuple(sizes), line))
        for who, sizes in self._container_sizes.items():
            if _grows(sizes):
                self.observed.containers.append(f"{who} ({sizes[0]} -> {sizes[-1]} tensors)")

    def _patch_compile(self) -> None:
        compile_ = torch.compile

        @functools.wraps(compile_)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.observed.compiled.append(user_line())
            return compile_(*args, **kwargs)

        torch.compile = noted
        self._stack.callback(setattr, torch, "compile", compile_)

    # ---- repetitions

    def forward_begins(self, module: nn.Module) -> None:
        if not torch.is_grad_enabled() and torch.is_autocast_enabled("cuda"):
            self.observed.no_grad_autocast = self.observed.no_grad_autocast or user_line()
        if not self._after_backward and not self._same_root(module):
            return
        if self._first_root is None:
            self._first_root = id(module)
        self._after_backward = False
        self._repetition()

    def _same_root(self, module: nn.Module) -> bool:
        """Without any backward a repetition is another forward of the module that came first."""
        return not self.observed.backwards and id(module) == self._first_root

    def _repetition(self) -> None:
        seen = self.observed
        alive = self._allocated()
        seen.alive.append(alive)
        number = len(seen.alive)
        if number >= 4 and not self._searched and _keeps_growing(seen.alive):
            self._searched = True
            gc.collect()
        if 2 <= number <= 6:
            self._look_at_holders(number)

    def _collection(self, phase: str, info: dict[str, int]) -> None:
        """A callback of the garbage collector: bytes that only it gives back are a cycle's."""
        if info.get("generation") != 2:
            return
        if phase == "start":
            self._collecting = (self._allocated(), _objects_with_tensors())
            return
        if self._collecting is None:
            return
        before, candidates = self._collecting
        self._collecting = None
        released = before - self._allocated()
        if released < SUSPICIOUS:
            return
        ended = Counter(kind for kind, reference in candidates if reference() is None)
        kinds = ", ".join(f"{count} {kind}" for kind, count in ended.most_common(3))
        self.observed.collections.append(
            Collection(released, kinds, len(self.observed.alive), self._searched)
        )

    def backward_begins(self, call: Backward) -> None:
        self.observed.backwards += 1

    def backward_ends(self, call: Backward) -> None:
        self._after_backward = True

    # ---- who refers to what

    def _look_at_holders(self, number: int) -> None:
        known = {id(p) for p in self._loop.parameters()}
        holders = [*_variables(known), *self._attributes(known)]
        for who, tensor in holders:
            self.observed.holders.append(
                Holder(
                    who,
                    tuple(tensor.shape),
                    dtype_name(tensor.dtype),
                    tensor.numel() * tensor.element_size(),
                    number,
                )
            )
        for key, nodes in _graphs():
            self._graph_sizes.setdefault(key, []).append(nodes)
        for who, count in _containers():
            self._container_sizes.setdefault(who, []).append(count)
        self._states_alive()

    def _attributes(self, known: set[int]) -> Iterator[tuple[str, Tensor]]:
        """Tensors in a module's ``__dict__`` that are neither parameters nor buffers."""
        for root in self._loop.names.roots():
            for path, module in root.named_modules():
                for attribute, value in list(module.__dict__.items()):
                    if attribute in ("_parameters", "_buffers", "_modules"):
                        continue
                    for tensor in _direct_tensors(value):
                        if id(tensor) not in known and tensor.device.type == "cuda":
                            owner = path or type(module).__name__
                            yield f"attribute '{attribute}' of module {owner}", tensor

    # ---- what was asked for

    def update_begins(self, update: Update) -> None:
        group = (getattr(update.optimizer, "param_groups", None) or [{}])[0]
        if group.get("foreach") is not False and not group.get("fused"):
            name = type(update.optimizer).__name__
            if name not in self.observed.foreach:
                self.observed.foreach.append(name)
        if not self._described:
            self._described = True
            self._describe()

    def forward_ends(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._described and not torch.is_grad_enabled():
            self._describe()
        if len(self.observed.alive) > 2:
            return
        for path, inner in module.named_modules():
            for flag in _FLAGS:
                if inner.__dict__.get(flag) is True and inner.training:
                    where = f"{flag} of {path or type(inner).__name__}"
                    if where not in self.observed.flags:
                        self.observed.flags.append(where)

    def _describe(self) -> None:
        names = self._loop.names
        self.observed.parameters = [
            ParameterSize(
                names.name(p), p.numel() * p.element_size(), dtype_name(p.dtype), p.requires_grad
            )
            for p in self._loop.parameters()
        ]

    def checkpointed(self, function: Any, args: Any, reentrant: bool, line: str) -> None:
        if torch.is_grad_enabled():
            self.observed.checkpoints.append((line, self.observed.backwards))

    def gradients_zeroed(self, parameters: list[Tensor], line: str) -> None:
        if any(p.grad is not None for p in parameters):
            self.observed.zero_keeps = line

    def optimizer_loaded(self, optimizer: Any, state: Any, line: str) -> None:
        self._loaded(state, _deep_tensors(list(optimizer.state.values())), line)

    def module_loaded(self, module: nn.Module, state: Any, line: str) -> None:
        self._loaded(state, iter([*module.parameters(), *module.buffers()]), line)

    def _loaded(self, state: Any, own: Iterator[Tensor], line: str) -> None:
        """What a saved state holds on the GPU beside the copy that was loaded from it."""
        mine = {_storage(tensor) for tensor in own}
        tensors = [
            tensor
            for tensor in _deep_tensors(state)
            if tensor.device.type == "cuda" and _storage(tensor) not in mine
        ]
        if tensors:
            self._states.append((line, [weakref.ref(tensor) for tensor in tensors]))

    def _states_alive(self) -> None:
        self.observed.loaded = []
        for line, references in self._states:
            alive = [t for ref in references if (t := ref()) is not None]
            size = sum(t.numel() * t.element_size() for t in alive)
            if size:
                self.observed.loaded.append((line, size))


def _keeps_growing(alive: list[int]) -> bool:
    growths = [after - before for before, after in pairwise(alive[-3:])]
    return len(growths) == 2 and min(growths) > SUSPICIOUS


def _grows(sizes: list[int]) -> bool:
    return len(sizes) >= 3 and all(b > a for a, b in pairwise(sizes))


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    """isinstance() asks a proxy for its class: lazy ones import then, weak ones may be dead."""
    return issubclass(type(value), kind)


def _direct_tensors(value: Any) -> Iterator[Tensor]:
    if _is(value, Tensor):
        yield value
    elif _is(value, (list, tuple)) and len(value) < 1000:
        yield from (inner for inner in value if _is(inner, Tensor))
    elif type(value) is dict and len(value) < 1000:
        yield from (inner for inner in value.values() if _is(inner, Tensor))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _deep_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _deep_tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _deep_tensors(inner)


def _training_frames() -> list[FrameType]:
    """User frames of the running test, innermost first, the loop's among them."""
    return [frame for frame in user_frames() if frame.f_code.co_flags & 0x2][:6]


def _variables(known: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Tensors on the GPU that local variables hold."""
    for frame in _training_frames():
        code = frame.f_code
        for name, value in local_variables(frame).items():
            for tensor in _direct_tensors(value):
                if id(tensor) in known or tensor.device.type != "cuda":
                    continue
                if isinstance(tensor, nn.Parameter):
                    continue
                yield f"variable '{name}' in {code.co_name}", tensor


def _graphs() -> Iterator[tuple[str, int]]:
    """Scalars with a graph in local variables, and how many nodes that has (up to 5000)."""
    for frame in _training_frames():
        code = frame.f_code
        for name, value in local_variables(frame).items():
            if _is(value, Tensor) and value.numel() == 1 and value.grad_fn is not None:
                line = shown(code.co_filename, frame.f_lineno, code.co_name)
                yield f"variable '{name}' in {code.co_name}\n{line}", _count_nodes(value.grad_fn)


def _count_nodes(root: Any) -> int:
    seen: set[Any] = set()
    front = [root]
    while front and len(seen) < 5000:
        node = front.pop()
        if node in seen:
            continue
        seen.add(node)
        front += [inner for inner, _ in node.next_functions if inner is not None]
    return len(seen)


def _containers() -> Iterator[tuple[str, int]]:
    """Lists and dicts in local variables, and how many tensors on the GPU they hold."""
    for frame in _training_frames():
        for name, value in local_variables(frame).items():
            if _is(value, (list, dict)):
                count = sum(1 for tensor in _direct_tensors(value) if tensor.device.type == "cuda")
                if count:
                    yield f"{type(value).__name__} '{name}' in {frame.f_code.co_name}", count


def _objects_with_tensors() -> list[tuple[str, weakref.ref[Any]]]:
    """Objects with a tensor on the GPU among their attributes, without keeping them alive."""
    found = []
    for item in gc.get_objects():
        if _is(item, (Tensor, nn.Module, type)):
            continue
        try:
            own = object.__getattribute__(item, "__dict__")
            if any(_is(value, Tensor) and value.device.type == "cuda" for value in own.values()):
                found.append((type(item).__name__, weakref.ref(item)))
        except (AttributeError, TypeError):  # no attributes, or no weak references to it
            continue
    return found

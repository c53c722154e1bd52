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
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from pytest_vram.frames import user_line
from pytest_vram.numerics.events import Backward, Listener, Update
from pytest_vram.numerics.holders import (
    Container,
    Graph,
    containers,
    describe_function,
    direct_tensors,
    graphs,
    hooks_of,
    is_a,
    refers_to_itself,
    unnamed_containers,
    variables,
)
from pytest_vram.numerics.loop import Loop
from pytest_vram.numerics.names import dtype_name
from pytest_vram.numerics.probes import Probes

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
    allocation: int = -1  #: index in the Trace, where the recorder knows it
    kept: bool = False  #: the same tensor was held at an earlier look: a cache, no leftover


@dataclass(frozen=True, slots=True)
class GraphHolder:
    """A variable whose graph reaches back into the step before, and grows so."""

    who: str
    nodes: tuple[int, ...]
    line: str
    scalar: bool = True
    filled_at: str = ""  #: the statement that adds to it, where the source says


@dataclass(frozen=True, slots=True)
class Growing:
    """A list, dict, set or cache that held more tensors at every look."""

    who: str
    first: int  #: tensors at the first look
    last: int
    kind: str = "container"  #: or ``cache``, ``exceptions``
    filled_at: str = ""

    def __str__(self) -> str:
        return f"{self.who} ({self.first} -> {self.last} tensors)"


@dataclass(frozen=True, slots=True)
class Hooked:
    """A module that had more hooks at every look."""

    module: str
    counts: tuple[int, ...]
    hook: str  #: the last one, and where it is defined


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
    containers: list[Growing] = field(default_factory=list)
    backwards: int = 0
    flags: list[str] = field(default_factory=list)
    flags_in_eval: dict[str, str] = field(default_factory=dict)  #: of modules in eval mode, line
    hooks: list[Hooked] = field(default_factory=list)
    held_by_hooks: int = 0  #: bytes of parameters to which their own hooks refer
    checkpoints: list[tuple[str, int]] = field(default_factory=list)  #: (line, backwards so far)
    no_grad_autocast: str = ""
    parameters: list[ParameterSize] = field(default_factory=list)
    foreach: list[str] = field(default_factory=list)
    zero_keeps: str = ""
    zeroed: str = ""  #: line of the last zero_grad
    retains: str = ""  #: line of the first backward(retain_graph=True)
    creates: str = ""  #: line of the first backward(create_graph=True)
    eval_with_graph: str = ""  #: line of a forward in eval mode that needed torch.no_grad()
    eval_growth: int = 0  #: bytes that each of these forwards left behind
    eval_keeper: GraphHolder | None = None  #: who keeps them
    compiled: list[str] = field(default_factory=list)
    loaded: list[tuple[str, int]] = field(default_factory=list)  #: saved states still alive

    def elsewhere(self) -> Observed:
        """For the Trace of another recorder, whose allocations have other indices."""
        return replace(self, holders=[replace(one, allocation=-1) for one in self.holders])


class MemoryWatch(Listener):
    """Context manager around a simulated pass; ``observed`` is what it saw.

    ``allocation_of(tensor)`` is the index in the Trace of the allocation behind a tensor, or -1.
    """

    def __init__(self, allocation_of: Callable[[Tensor], int] = lambda tensor: -1) -> None:
        self.observed = Observed()
        self._allocation_of = allocation_of
        self._loop = Loop(values=False)
        self._probes = Probes((self._loop, self), values=False)
        self._stack = ExitStack()
        self._first_root: int | None = None
        self._after_backward = True
        self._graphs: dict[str, list[Graph]] = {}
        self._newest = 0  # number of the newest node at the last look
        self._containers: dict[str, list[Container]] = {}
        self._hooks: dict[str, list[tuple[int, str]]] = {}  # module -> hooks at each look
        self._held: dict[int, weakref.ref[Tensor]] = {}  # by modules, at the looks so far
        self._unnamed: dict[
            str, list[Container]
        ] = {}  # as the named ones, while none of those grows
        self._states: list[tuple[str, list[weakref.ref[Tensor]]]] = []
        self._described = False
        self._eval_line = ""
        self._eval_alive: list[int] = []  # bytes as each forward of an evaluation with graphs began
        self._eval_keeper: GraphHolder | None = None
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
        self._settle_eval()
        self._read_graphs()
        self._read_containers()
        self._read_hooks()
        self.observed.held_by_hooks = sum(
            p.numel() * p.element_size() * (1 + (p.grad is not None))
            for p in self._loop.parameters()
            if refers_to_itself(p)
        )

    def _read_graphs(self) -> None:
        """Those that come out of themselves first, then those made first: what was made of them
        only passes them on."""
        for who, found in sorted(self._graphs.items(), key=lambda entry: entry[1][-1].newest):
            nodes, last = [graph.nodes for graph in found], found[-1]
            if _grows(nodes, looks=3):
                filled = last.scope.filled_at()
                holder = GraphHolder(who, tuple(nodes), last.line, last.scalar, filled)
                self.observed.graphs.append(holder)
        self.observed.graphs.sort(key=lambda holder: not holder.filled_at)

    def _read_containers(self) -> None:
        """Those that gained tensors at every look, the one that gained most and, of several that
        hold each other, the innermost first."""
        growing = [
            looks
            for looks in self._containers.values()
            if _grows([look.tensors for look in looks], looks=2)
        ] or [
            # A model per trial of several steps: it need not gain at every look.
            looks
            for looks in [*self._unnamed.values(), *self._containers.values()]
            if _climbs([look.tensors for look in looks])
        ]
        growing.sort(key=lambda seen: (seen[0].tensors - seen[-1].tensors, -seen[-1].depth))
        self.observed.containers = [
            Growing(
                seen[-1].who,
                seen[0].tensors,
                seen[-1].tensors,
                seen[-1].kind,
                seen[-1].scope.filled_at(),
            )
            for seen in growing
        ]

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
        self._note_eval(module)
        if not torch.is_grad_enabled() and torch.is_autocast_enabled("cuda"):
            self.observed.no_grad_autocast = self.observed.no_grad_autocast or user_line()
        if not self._after_backward and not self._same_root(module):
            return
        if self._first_root is None:
            self._first_root = id(module)
        self._after_backward = False
        self._repetition()

    def _note_eval(self, module: nn.Module) -> None:
        """Forwards in eval mode that build graphs which no backward uses: it would need no_grad."""
        wasteful = not module.training and torch.is_grad_enabled()
        if wasteful and any(p.requires_grad for p in module.parameters()):
            self._eval_alive.append(int(torch.cuda.memory_allocated()))
            if len(self._eval_alive) == 2:
                self._eval_line = user_line()
            if len(self._eval_alive) == 4 and _keeps_growing(self._eval_alive):
                self._eval_keeper = _widest_graph()
        elif module.training:
            self._settle_eval()

    def _settle_eval(self) -> None:
        if len(self._eval_alive) >= 2 and not self.observed.eval_with_graph:
            self.observed.eval_with_graph = self._eval_line
        if len(self._eval_alive) >= 4 and _keeps_growing(self._eval_alive):
            # The first forward also brings workspaces; what counts is that it goes on.
            grown = [after - before for before, after in pairwise(self._eval_alive[1:])]
            self.observed.eval_growth = max(self.observed.eval_growth, min(grown))
            self.observed.eval_keeper = self.observed.eval_keeper or self._eval_keeper
        self._eval_alive = []

    def _same_root(self, module: nn.Module) -> bool:
        """Without any backward a repetition is another forward of the module that came first."""
        return not self.observed.backwards and id(module) == self._first_root

    def _repetition(self) -> None:
        seen = self.observed
        alive = int(torch.cuda.memory_allocated())
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
            self._collecting = (int(torch.cuda.memory_allocated()), _objects_with_tensors())
            return
        if self._collecting is None:
            return
        before, candidates = self._collecting
        self._collecting = None
        released = before - int(torch.cuda.memory_allocated())
        if released < SUSPICIOUS:
            return
        ended = Counter(kind for kind, reference in candidates if reference() is None)
        kinds = ", ".join(f"{count} {kind}" for kind, count in ended.most_common(3))
        self.observed.collections.append(
            Collection(released, kinds, len(self.observed.alive), self._searched)
        )

    def backward_begins(self, call: Backward) -> None:
        self.observed.backwards += 1
        self._eval_alive = []  # they were for this loss
        if self.observed.backwards == 1:
            self._one_repetition()
        if call.creates:
            self.observed.creates = self.observed.creates or call.line
        elif call.retains:
            self.observed.retains = self.observed.retains or call.line

    def _one_repetition(self) -> None:
        """Forwards before the first backward (an episode, micro-batches) were for its loss: what
        grew until now was meant to."""
        del self.observed.alive[1:]
        self.observed.holders.clear()
        self._graphs.clear()
        self._containers.clear()
        self._unnamed.clear()
        self._hooks.clear()
        self._held.clear()

    def backward_ends(self, call: Backward) -> None:
        self._after_backward = True

    # ---- who refers to what

    def _look_at_holders(self, number: int) -> None:
        known = {id(p) for p in self._loop.parameters()}
        holders = [*variables(known), *self._attributes(known)]
        before, self._held = self._held, {id(t): weakref.ref(t) for _, t in holders}
        for who, tensor in holders:
            self.observed.holders.append(
                Holder(
                    who,
                    tuple(tensor.shape),
                    dtype_name(tensor.dtype),
                    tensor.numel() * tensor.element_size(),
                    number,
                    self._allocation_of(tensor),
                    id(tensor) in before and before[id(tensor)]() is tensor,
                )
            )
        for graph in (found := graphs(self._newest)):
            # It grows from step to step only if it reaches back into the step before.
            if number == 2 or graph.oldest <= self._newest:
                self._graphs.setdefault(graph.who, []).append(graph)
        self._newest = max((graph.newest for graph in found), default=self._newest)
        alive = self.observed.alive
        if number >= 3 and alive[-1] - alive[-2] > SUSPICIOUS:
            for container in containers():
                self._containers.setdefault(container.who, []).append(container)
            if not any(_grows([one.tensors for one in c], 2) for c in self._containers.values()):
                for container in unnamed_containers():
                    self._unnamed.setdefault(container.who, []).append(container)
        self._count_hooks()
        self._states_alive()

    def _count_hooks(self) -> None:
        """Of modules and of their parameters."""
        for root in self._loop.names.roots():
            for path, module in root.named_modules():
                hooks = hooks_of(module)
                if hooks or path in self._hooks:
                    looks = self._hooks.setdefault(path or type(module).__name__, [])
                    looks.append((len(hooks), describe_function(hooks[-1]) if hooks else ""))

    def _read_hooks(self) -> None:
        for name, looks in self._hooks.items():
            counts = tuple(count for count, _ in looks)
            if _grows(list(counts), looks=3):
                self.observed.hooks.append(Hooked(name, counts, looks[-1][1]))

    def _attributes(self, known: set[int]) -> Iterator[tuple[str, Tensor]]:
        """Tensors in a module's ``__dict__`` that are neither parameters nor buffers."""
        for root in self._loop.names.roots():
            for path, module in root.named_modules():
                for attribute, value in list(module.__dict__.items()):
                    if attribute in ("_parameters", "_buffers", "_modules"):
                        continue
                    for tensor in direct_tensors(value):
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
                if inner.__dict__.get(flag) is not True:
                    continue
                where = f"{flag} of {path or type(inner).__name__}"
                if inner.training and where not in self.observed.flags:
                    self.observed.flags.append(where)
                elif not inner.training and _waits_for_backward(inner):
                    self.observed.flags_in_eval.setdefault(where, user_line())

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
        self.observed.zeroed = line
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


def _waits_for_backward(module: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


def _keeps_growing(alive: list[int]) -> bool:
    growths = [after - before for before, after in pairwise(alive[-3:])]
    return len(growths) == 2 and min(growths) > SUSPICIOUS


def _widest_graph() -> GraphHolder | None:
    """The variable or list behind which most of the graph hangs."""
    found = graphs(0)
    if not found:
        return None
    graph = max(found, key=lambda one: one.nodes)
    filled = graph.scope.filled_at()
    return GraphHolder(graph.who, (graph.nodes,), graph.line, graph.scalar, filled)


def _grows(sizes: list[int], looks: int) -> bool:
    return len(sizes) >= looks and all(b > a for a, b in pairwise(sizes))


def _climbs(sizes: list[int]) -> bool:
    return len(sizes) >= 3 and sizes[-1] > sizes[0] and all(b >= a for a, b in pairwise(sizes))


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


def _objects_with_tensors() -> list[tuple[str, weakref.ref[Any]]]:
    """Objects with a tensor on the GPU among their attributes, without keeping them alive."""
    found = []
    for item in gc.get_objects():
        if is_a(item, (Tensor, nn.Module, type)):
            continue
        try:
            own = object.__getattribute__(item, "__dict__")
            if any(is_a(value, Tensor) and value.device.type == "cuda" for value in own.values()):
                found.append((type(item).__name__, weakref.ref(item)))
        except (AttributeError, TypeError):  # no attributes, or no weak references to it
            continue
    return found

"""The order of backward where nodes were made by backward itself (``create_graph``).

The engine runs the ready node with the highest sequence number first (autograd/engine.cpp,
``CompareNodeTaskTime``). The counter belongs to a thread (ATen/SequenceNumber.cpp): on a card,
nodes made in backward are numbered by the device's autograd thread, whose counter is far behind
the program's own, and the two kinds interleave. In a simulation the engine runs on the program's
thread, so the numbers are set anew before a graph is run that may hold both kinds.

Counters start where the simulation starts, as in a process that does nothing else before.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

#: Numbers from here on were set by us. An AccumulateGrad has the highest number of all.
_SET = 1 << 40
_LAST = 1 << 62
_MADE_AS = "pytest_vram_number"  # in the metadata of a node


def counter() -> int:
    """The number that the next node of this thread will have."""
    return int(torch._C._autograd._get_sequence_nr())


class Sequence:
    """Which nodes backward made, and the numbers they have on a card."""

    def __init__(self, begins: Callable[[Any], None], ended: Callable[[], None]) -> None:
        #: Told of the outputs before every backward, and of the end of every outermost one.
        self._begins, self._ended = begins, ended
        self._origin = counter()
        #: Per backward that made nodes: first number, end, nodes that backward had made before.
        self._spans: list[tuple[int, int, int]] = []
        self._made = 0
        self._depth = 0
        self._start = 0
        self._mixes = False

    def run(self, original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """One call of the engine: ``_engine_run_backward(outputs, ...)``."""
        outermost = self._depth == 0
        if outermost:
            # several outputs get a node of the calling thread that joins them (GraphRoot)
            self._start = counter() + (len(outputs) > 1)
        if self._mixes:
            self._renumber(outputs)
        self._begins(outputs)
        creates = args[2] if len(args) > 2 else kwargs.get("create_graph", False)
        self._mixes = self._mixes or bool(creates)
        self._depth += 1
        try:
            return original(outputs, *args, **kwargs)
        finally:
            self._depth -= 1
            if outermost:
                end = counter()
                if end > self._start:
                    self._spans.append((self._start, end, self._made))
                    self._made += end - self._start
                self._ended()

    def on_card(self, number: int) -> int:
        """A number of this thread as the card's thread would have given it."""
        if self._depth and number >= self._start:
            return self._made + number - self._start
        place = bisect.bisect_right(self._spans, (number, _LAST, 0)) - 1
        if place < 0:
            return number - self._origin
        start, end, before = self._spans[place]
        if number < end:
            return before + number - start
        return number - self._origin - before - (end - start)

    def _renumber(self, outputs: Iterable[Any]) -> None:
        for node in nodes_of(outputs):
            number = node._sequence_nr()
            if number < _SET:
                node.metadata[_MADE_AS] = number
                node._set_sequence_nr(_SET + self.on_card(number))


def made_as(node: Any) -> int:
    """The number with which a node was made, whatever it was set to since: two threads' nodes may
    have one number on a card."""
    number = int(node._sequence_nr())
    return int(node.metadata[_MADE_AS]) if _SET <= number < _LAST else number


def nodes_of(outputs: Iterable[Any]) -> Iterator[Any]:
    """Every node of the graph behind tensors or gradient edges."""
    waiting = [getattr(out, "grad_fn", None) or getattr(out, "node", None) for out in outputs]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(following for following, _ in node.next_functions)


def installed(patches: Any, sequence: Callable[[], Sequence]) -> None:
    """Every way to the engine passes through this thread's ``sequence()`` while the patches
    last."""
    original = torch.autograd.graph._engine_run_backward

    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        return sequence().run(original, outputs, *args, **kwargs)

    for module in (torch.autograd, torch.autograd.graph):
        patches.replace(module, _engine_run_backward=run_backward)

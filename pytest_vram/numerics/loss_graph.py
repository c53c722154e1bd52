"""What the graph behind a loss says about gradients that are missing or 0: where it ends, which of
the user's own autograd functions it goes through, which operators have no slope."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pytest_vram.frames import describe
from pytest_vram.numerics.names import dtype_name

#: Nodes that one look visits at most.
_MOST_NODES = 5_000
#: Constant between their steps, so their derivative is 0 (tools/autograd/derivatives.yaml).
_FLAT = ("Round", "Floor", "Ceil", "Trunc", "Sign", "Sgn")


@dataclass(frozen=True, slots=True)
class Custom:
    """A ``torch.autograd.Function`` of the user in the graph."""

    name: str
    line: str  #: where its backward is defined
    leaves: frozenset[int]  #: identities of the leaves behind it


@dataclass(slots=True)
class LossGraph:
    """Plain data about the graph behind one loss, without references to it."""

    ends: list[str] = field(default_factory=list)  #: leaves that are no parameters, in words
    root_is_leaf: bool = False
    customs: list[Custom] = field(default_factory=list)
    flat: list[str] = field(default_factory=list)  #: ``round``, ``sign``

    def swallows(self, parameter: Tensor) -> Custom | None:
        """The innermost function of the user that ``parameter`` lies behind."""
        behind = [one for one in self.customs if id(parameter) in one.leaves]
        return min(behind, key=lambda one: len(one.leaves), default=None)


def read_graph(roots: Iterable[Tensor], known: Collection[int]) -> LossGraph:
    """``known``: identities of the parameters of modules and optimizers."""
    found = LossGraph()
    nodes = []
    for root in roots:
        if root.grad_fn is not None:
            nodes.append(root.grad_fn)
        elif root.requires_grad and id(root) not in known:
            found.root_is_leaf = True
    for node in _reach(nodes):
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            if id(variable) not in known:
                found.ends.append(f"{dtype_name(variable.dtype)}{list(variable.shape)}")
            continue
        name = node.name().rstrip("0123456789").removesuffix("Backward")
        if name in _FLAT and name.lower() not in found.flat:
            found.flat.append(name.lower())
        function = getattr(type(node), "_forward_cls", None)
        if function is not None:
            found.customs.append(Custom(function.__name__, _defined(function), _leaves(node)))
    return found


def _reach(nodes: Iterable[Any]) -> list[Any]:
    seen: dict[Any, None] = {}
    front = list(nodes)
    while front and len(seen) < _MOST_NODES:
        node = front.pop()
        if node not in seen:
            seen[node] = None
            front += [inner for inner, _ in node.next_functions if inner is not None]
    return list(seen)


def _leaves(node: Any) -> frozenset[int]:
    variables = (getattr(inner, "variable", None) for inner in _reach([node]))
    return frozenset(id(one) for one in variables if isinstance(one, Tensor))


def _defined(function: Any) -> str:
    code = getattr(function.__dict__.get("backward"), "__func__", None)
    code = getattr(code, "__code__", None)
    return describe(code, code.co_firstlineno) if code is not None else ""


def below_scaling(node: Any) -> Any:
    """The node under the scaler's multiplication: the loss itself."""
    if node is not None and node.name().startswith("MulBackward"):
        return node.next_functions[0][0]
    return None

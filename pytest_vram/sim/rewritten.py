"""Views of memory that was written in place since they were made.

Autograd gives such a view a new ``grad_fn`` when it is next used (autograd/variable.cpp,
``VariableHooks::grad_fn``): ``AsStridedBackward0``, straight from the tensor that owns the memory.
Only where tensors dispatch to Python, as simulated ones do, it keeps the view functions
(``is_python_dispatch()`` in the generated ADInplaceOrView kernels) and plays them again, one node
each. Those nodes run without books here, and what they return is made as ``as_strided_backward``
makes it (autograd/FunctionsManual.cpp; all of v2.6.0 and v2.14.1): a block for the whole memory,
into which the view's gradient is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from pytest_vram.sim.tensors import MADE_AT, SimTensor

#: Views of views of views: further than any program goes.
_LONGEST = 64
#: Views that are no ``as_strided`` of their base keep their functions on a card too
#: (VIEW_FUNCTIONS_WITH_METADATA_CHANGE of tools/autograd/gen_inplace_or_view_type.py).
_OTHERWISE = ("AsStrided", "ViewAs", "Conj", "NegView")


class Books(Protocol):
    """Who may keep none for a while."""

    def suspend(self, on: bool) -> None: ...


class _Geometry(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Geometry:
        offset = int(tensor.storage_offset())
        return cls(tuple(tensor.shape), tensor.stride(), offset)

    def long_dimensions(self) -> list[tuple[int, int]]:
        """Size and stride of the dimensions along which anything moves."""
        both = zip(self.shape, self.stride, strict=True)
        return [(size, stride) for size, stride in both if size != 1 and stride != 0]

    def overlaps(self) -> bool:
        """``_maybe_overlapping_memory``"""
        reach = 0
        for stride, size in sorted((b, a) for a, b in self.long_dimensions()):
            if stride <= reach:
                return True
            reach += stride * (size - 1)
        return False

    def end(self, offset: int) -> int:
        """``_min_storage_size``: elements up to the last one, counted from ``offset`` before."""
        return offset + 1 + sum((size - 1) * stride for size, stride in self.long_dimensions())


def look(tensors: Iterable[torch.Tensor], books: Books) -> None:
    """An operator uses ``tensors``: those whose memory was written got a new ``grad_fn``."""
    for tensor in tensors:
        if type(tensor) is not SimTensor:
            continue
        made_at = tensor.__dict__.get(MADE_AT)
        if made_at is None or made_at == (now := tensor._version):
            continue
        tensor.__dict__[MADE_AT] = now
        if tensor.requires_grad and tensor._is_view() and tensor.numel():
            _follow(tensor, books)


def _follow(view: SimTensor, books: Books) -> None:
    base = view._base
    assert base is not None
    nodes = _between(view.grad_fn, base.grad_fn)
    inner, outer = _Geometry.of(view), _Geometry.of(base)
    if not nodes or inner.overlaps() or outer.overlaps():
        return
    if any(node.name().startswith(_OTHERWISE) for node in nodes):
        return
    made: list[torch.Tensor] = []

    def begin(gradients: Sequence[torch.Tensor | None]) -> None:
        if gradients[0] is not None:
            made.append(_scattered(gradients[0], inner, outer))
            books.suspend(True)

    def end(_: Any, __: Any) -> tuple[torch.Tensor] | None:
        if not made:
            return None
        books.suspend(False)
        return (made.pop(),)

    nodes[0].register_prehook(begin)
    nodes[-1].register_hook(end)


def _between(node: Any, last: Any) -> list[Any]:
    """The nodes from ``node`` to the one before ``last``; none where they are not one chain."""
    nodes: list[Any] = []
    while node is not None and node is not last and len(nodes) < _LONGEST:
        nodes.append(node)
        following = node.next_functions
        node = following[0][0] if len(following) == 1 else None
    return nodes if node is not None and node is last else []


def _scattered(gradient: torch.Tensor, view: _Geometry, base: _Geometry) -> torch.Tensor:
    """``as_strided_backward`` for memory in which nothing overlaps; shape of ``base``."""
    for dim in reversed(range(gradient.dim())):
        if view.shape[dim] == 1:
            gradient = gradient.squeeze(dim)
        elif view.stride[dim] == 0:
            gradient = gradient.sum(dim)
    first = min(view.offset, base.offset)
    size = max(view.end(view.offset - first), base.end(base.offset - first))
    storage = gradient.new_zeros((size,))
    long = view.long_dimensions()
    part = storage.as_strided([a for a, _ in long], [b for _, b in long], view.offset - first)
    part.copy_(gradient)
    return storage.as_strided(base.shape, base.stride, base.offset - first)

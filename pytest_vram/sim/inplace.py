"""Where autograd works in place on a GPU and out of place on simulated tensors.

C++ asks ``isTensorSubclassLike`` (ATen/TensorSubclassLikeUtils.h), which is true for every tensor
while a dispatch mode is active, and then avoids in-place operators. On a GPU the result lives in
the operand's block; here the two blocks are merged again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_vram.sim.tensors import SimTensor, is_dense

aten = torch.ops.aten

#: Out-of-place in simulated backward, in place on the GPU:
#: ``add``: gradients of one tensor that arrive from several users (input_buffer.cpp,
#: ``can_accumulate_inplace``: nobody else holds the first one or its storage);
#: ``_unsafe_index_put``/``index_put``: ``index_backward`` writes into zeros that it has just made
#: (FunctionsManual.cpp / TensorAdvancedIndexing.cpp).
_CANDIDATES = {
    aten.add.Tensor,
    aten._unsafe_index_put.default,
    aten.index_put.default,
}

#: References to the first operand that the dispatch itself holds while it asks; measured once per
#: process on a tensor that nobody else holds, because it differs between versions of PyTorch.
_alone: tuple[int, int] | None = None
_watch: Callable[[tuple[int, int]], None] | None = None


def counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Reference counts of a tensor and of its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def known() -> bool:
    """Whether :func:`calibrate` has run in this process."""
    return _alone is not None


def calibrate(make_leaf: Callable[[], torch.Tensor]) -> None:
    """Let the engine add two gradients that only it holds, and remember the counts then."""
    global _alone, _watch
    seen: list[tuple[int, int]] = []
    _watch = seen.append
    try:
        shared = make_leaf() * 2
        (shared * 3 + shared * 4).sum().backward()
    finally:
        _watch = None
    assert seen, "autograd did not add the two gradients of a shared tensor"
    _alone = seen[0]


def takes_over(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this operator, called now, would have written into its first argument's block."""
    if func not in _CANDIDATES or torch._C._current_graph_task_id() == -1:
        return False
    first = args[0]
    if type(first) is not SimTensor or not first.is_cuda or torch.is_grad_enabled():
        return False
    if func is aten.add.Tensor:
        second = args[1]
        if (
            not isinstance(second, SimTensor)
            or first.shape != second.shape
            or first.dtype != second.dtype
            or not is_dense(first)
        ):
            return False
    held, stored = counts(first)
    if _watch is not None:
        _watch((held, stored))
        return False
    assert _alone is not None, "calibrated when the simulation starts"
    return held <= _alone[0] and stored <= _alone[1]

"""Where autograd works in place on a GPU and out of place on simulated tensors.

C++ asks ``isTensorSubclassLike`` (ATen/TensorSubclassLikeUtils.h), which is true for every tensor
while a dispatch mode is active, and then avoids in-place operators. On a GPU the result lives in
the operand's block; here the two blocks are merged again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

from pytest_vram.sim import sequence
from pytest_vram.sim.callers import called_by_engine
from pytest_vram.sim.tensors import SimTensor, is_dense

aten = torch.ops.aten

#: Nodes that write into a tensor which is always their own, and how their names begin; the same
#: operators called by other nodes do copy (such as ``index_put`` of its own backward). All places
#: of autograd/FunctionsManual.cpp, native/TensorAdvancedIndexing.cpp and native/ReduceOps.cpp that
#: ask ``isTensorSubclassLike`` before they choose between the two forms:
#: ``index_backward``, ``gather_backward`` and ``cummaxmin_backward``,
#: ``value_selecting_reduction_backward``, ``index_select_backward``, ``take_backward``,
#: ``masked_select_backward``, ``evenly_distribute_backward``, ``atan2_backward``,
#: ``trace_backward_symint``; of ``maximum``
#: and its kin (derivatives.yaml). ``masked_fill_backward`` is in :mod:`pytest_vram.sim.selection`.
_FRESH = {
    aten.index_put.default: ("IndexBackward",),
    aten.scatter_add.default: ("Gather", "Cummax", "Cummin"),
    aten.scatter.src: ("Max", "Min", "Median", "Nanmedian", "Mode", "Kthvalue", "Sort", "Topk"),
    aten.index_add.default: ("IndexSelect",),
    aten.put.default: ("Take",),
    aten.masked_scatter.default: ("MaskedSelect",),
    aten.logical_and.default: ("Max", "Min", "Median", "Nanmedian"),
    aten.masked_fill.Scalar: ("Maximum", "Minimum", "Fmax", "Fmin", "Clamp", "Atan2"),
    aten.index_fill.int_Tensor: ("Trace",),
}

#: Formulas that add to a sum of their own: ``aminmax_backward``.
_ADDING = ("Aminmax",)

#: Nodes that do so where nobody else holds the tensor and one of these operators made it, of
#: ``binary_cross_entropy_*`` in autograd/FunctionsManual.cpp.
_OF_NODE = {
    (aten.sub.Tensor, "BinaryCrossEntropyWithLogitsBackward0"): (
        "aten::sigmoid", "aten::add", "aten::log_sigmoid_forward",
    ),
    (aten.mul.Tensor, "BinaryCrossEntropyWithLogitsBackward0"): (
        "aten::sigmoid", "aten::add", "aten::log_sigmoid_forward", "aten::mul",
    ),
    (aten.mul.Tensor, "BinaryCrossEntropyBackward0"): ("aten::logit",),
    (aten.mul.Tensor, "BinaryCrossEntropyBackwardBackward0"): ("aten::div", "aten::rsub"),
    (aten.div.Tensor, "BinaryCrossEntropyBackwardBackward0"): ("aten::mul",),
}  # fmt: skip

#: What runs on the card instead, with arguments that the out-of-place form lacks.
TWINS: dict[Any, tuple[Any, dict[str, Any]]] = {
    aten.add.Tensor: (aten.add_.Tensor, {}),
    aten.sub.Tensor: (aten.sub_.Tensor, {}),
    aten.mul.Tensor: (aten.mul_.Tensor, {}),
    aten.div.Tensor: (aten.div_.Tensor, {}),
    aten.index_put.default: (aten._index_put_impl_.default, {"unsafe": True}),
    aten.scatter_add.default: (aten.scatter_add_.default, {}),
    aten.scatter.src: (aten.scatter_.src, {}),
    aten.index_add.default: (aten.index_add_.default, {}),
    aten.put.default: (aten.put_.default, {}),
    aten.masked_scatter.default: (aten.masked_scatter_.default, {}),
    aten.logical_and.default: (aten.logical_and_.default, {}),
    aten.masked_fill.Scalar: (aten.masked_fill_.Scalar, {}),
    aten.index_fill.int_Tensor: (aten.index_fill_.int_Tensor, {}),
}

#: See :func:`counts`.
Counts: TypeAlias = "tuple[int, int, int]"

#: References to the first operand that the dispatch itself holds while it asks; measured once per
#: process on a tensor that nobody else holds, because it differs between versions of PyTorch.
_alone: Counts | None = None
_watch: Callable[[Counts], None] | None = None


def counts(tensor: torch.Tensor) -> Counts:
    """Reference counts of a tensor's Python object, of the tensor and of its storage.

    All of Python is one reference to C++ (a hook that keeps what it was given, say), and the
    dispatch has that one already: whether anybody else does, the object's own count tells.
    """
    storage = tensor.untyped_storage()._cdata
    used: int = torch._C._storage_Use_Count(storage)
    return sys.getrefcount(tensor), tensor._use_count(), used  # type: ignore[attr-defined]


def known() -> bool:
    """Whether :func:`calibrate` has run in this process."""
    return _alone is not None


def calibrate(make_leaf: Callable[[], torch.Tensor]) -> None:
    """Let the engine add two gradients that only it holds, and remember the counts then."""
    global _alone, _watch
    seen: list[Counts] = []
    _watch = seen.append
    try:
        shared = make_leaf() * 2
        (shared * 3 + shared * 4).sum().backward()  # type: ignore[no-untyped-call]
    finally:
        _watch = None
    assert seen, "autograd did not add the two gradients of a shared tensor"
    _alone = seen[0]


#: Within a composite, every sum is one that the card writes into its first operand.
EVERY_SUM = object()


class Blocks(Protocol):
    """What the books know of the block in which a tensor lives."""

    def maker(self, tensor: torch.Tensor) -> str: ...

    def made_in(self, tensor: torch.Tensor) -> int: ...

    def of_this_backward(self, tensor: torch.Tensor) -> bool: ...


def takes_over(func: Any, args: tuple[Any, ...], added: Any, blocks: Blocks) -> bool:
    """Whether this operator, called now, would have written into its first argument's block.

    ``added`` is what the composite that is running adds in place to a result of its own: the bias
    of ``linear`` (native/Linear.cpp), or EVERY_SUM in the math attention, which adds the mask
    (native/transformers/attention.cpp).
    """
    if added is not None and func is aten.add.Tensor and type(args[0]) is SimTensor:
        return added is EVERY_SUM or args[1] is added
    if func not in TWINS or torch._C._current_graph_task_id() == -1:
        return False
    first = args[0]
    if type(first) is not SimTensor or not first.is_cuda or not called_by_engine():
        return False
    if func in _FRESH:
        return of_fresh(func)
    if torch.is_grad_enabled() and not _node().startswith(_ADDING):
        return False
    # Gradients of one tensor that arrive from several users are added into the first
    # (autograd/input_buffer.cpp, can_accumulate_inplace).
    if func is aten.add.Tensor:
        if not _accumulates(first, args[1]):
            return False
        if not _of_engine(blocks.made_in(first)):
            return _node().startswith(_ADDING)
        # What retain_grad kept is of an earlier pass, and its sum with the next one is a third
        # tensor (autograd/variable.cpp, VariableHooks::retain_grad, v2.14.1).
        if not blocks.of_this_backward(first):
            return False
    elif blocks.maker(first) not in _OF_NODE.get((func, _node()), ()):
        return False
    now = counts(first)
    if _watch is not None:
        _watch(now)
        return False
    assert _alone is not None, "calibrated when the simulation starts"
    return all(count <= alone for count, alone in zip(now, _alone, strict=True))


def of_fresh(func: Any) -> bool:
    """Whether the node that runs calls ``func`` on a tensor that is always its own."""
    if torch._C._current_graph_task_id() == -1:
        return False
    return _node().startswith(_FRESH[func])


def _accumulates(first: SimTensor, second: Any) -> bool:
    return (
        isinstance(second, SimTensor)
        and first.shape == second.shape
        and first.dtype == second.dtype
        and is_dense(first)
    )


def _of_engine(made_in: int) -> bool:
    """Whether the engine adds, and not the formula of a node (as ``var_mean_backward`` does). Both
    run under the node's name; but what the engine adds to was made by an earlier node, or this one
    has two gradients for one place."""
    node = torch._C._current_autograd_node()
    if node is None or made_in != sequence.made_as(node):
        return True
    return len(set(node.next_functions)) < len(node.next_functions)


def _node() -> str:
    node = torch._C._current_autograd_node()
    return node.name() if node is not None else ""


#: In-place operators over lists whose kernels count no write: what else there is calls
#: ``increment_version`` (native/cuda/Foreach*.cu; all of them were asked, v2.14.1).
_UNCOUNTED = (
    "aten::_foreach_zero_",
    "aten::_foreach_lerp_.Scalar",
    "aten::_foreach_lerp_.ScalarList",
)


def count_write(func: Any, args: tuple[Any, ...]) -> None:
    """Autograd counts the writes of an operator over lists in its CUDA kernel, which does not run
    here: backward through a parameter that an optimizer changed meanwhile is an error."""
    if _counts_itself(func):
        written = [one for one in args[0] if not one.is_inference()]
        torch.autograd.graph.increment_version(written)


@functools.lru_cache(maxsize=4096)
def _counts_itself(func: Any) -> bool:
    schema = func._schema
    if not schema.name.startswith("aten::_foreach_") or not schema.name.endswith("_"):
        return False
    return f"{schema.name}.{schema.overload_name}".removesuffix(".") not in _UNCOUNTED

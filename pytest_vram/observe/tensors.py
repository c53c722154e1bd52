"""Finding the tensors in what an optimizer holds, and those that own storage in a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pytest_vram.observe.names import joined


def optimized(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors that an optimizer updates, with a name for those that no module holds."""
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        given = group.get("param_names")  # torch >= 2.6, when built from named_parameters()
        for position, parameter in enumerate(group["params"]):
            if isinstance(parameter, Tensor) and not is_lazy(parameter):
                yield (given[position] if given else f"group {number}[{position}]"), parameter


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors inside dicts, lists and tuples: ``exp_avg``, ``old_dirs.3``."""
    if isinstance(value, Tensor):
        yield path or "state", value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from tensors_in(inner, joined(path, str(key)))
    elif isinstance(value, (list, tuple)):
        for position, inner in enumerate(value):
            yield from tensors_in(inner, joined(path, str(position)))


def plain_tensors(value: Any, suffix: str = "") -> Iterator[tuple[Tensor, str]]:
    """Tensors that own storage: a DTensor's shard, a quantised weight's parts, a sparse gradient's
    indices and values. Nothing is computed, so nothing is allocated."""
    if not isinstance(value, Tensor) or is_lazy(value) or is_functorch_wrapped_tensor(value):
        return
    if is_traceable_wrapper_subclass(value):
        for attribute in value.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(value, attribute), suffix)
    elif value.layout is torch.sparse_coo:
        yield value._indices(), f"{suffix} indices"
        yield value._values(), f"{suffix} values"
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield value.crow_indices(), f"{suffix} indices"
        yield value.col_indices(), f"{suffix} indices"
        yield value.values(), f"{suffix} values"
    elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield value.ccol_indices(), f"{suffix} indices"
        yield value.row_indices(), f"{suffix} indices"
        yield value.values(), f"{suffix} values"
    else:
        yield value, suffix

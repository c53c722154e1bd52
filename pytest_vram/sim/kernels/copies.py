"""Copies between host and device, and values that come from the host.

Read from ATen/native/cuda/Copy.cu (``copy_requires_temporaries``, ``copy_kernel_cuda``) and
ATen/native/TensorConversions.cpp (v2.6.0, v2.14.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pytest_vram.sim.kernels import (
    Card,
    Give,
    Out,
    Outputs,
    Step,
    Take,
    argument,
    rule,
)
from pytest_vram.sim.kernels.iterator import Layout, dense_like, dimensions, is_contiguous, layout

aten = torch.ops.aten


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _one_run(into: Layout, source: Layout) -> bool:
    """``TensorIterator::is_contiguous``: both are one dense run of memory in the same order."""
    space = dimensions((into, source))
    if space.numel == 1:
        return True
    return len(space.shape) == 1 and all(
        row[0] == operand.itemsize
        for row, operand in zip(space.strides, (into, source), strict=True)
    )


def transfer(
    into: Tensor, source: Tensor, non_blocking: bool, shape: tuple[int, ...] | None = None
) -> Iterator[Step]:
    """Device memory for a copy between host and device. Types are converted on the host, unless
    the copy does not block; either end that is no dense run is staged."""
    to, frm = layout(into), layout(source)
    same = into.dtype == source.dtype
    if not to.numel or (same and _one_run(to, frm)):
        return
    dense_into = is_contiguous(to.shape, to.stride)
    dense_source = to.shape == frm.shape and is_contiguous(frm.shape, frm.stride)
    on_device = non_blocking
    convert_source = _on_host(source) != on_device  # source is where types are converted
    if _on_host(into):
        if convert_source:
            if not same:
                frm = dense_like(frm, to.itemsize)
                dense_source = to.shape == frm.shape and is_contiguous(frm.shape, frm.stride)
                yield Take("cast", frm.nbytes, "cast on the device")
            if not dense_source:
                yield Take("source", to.nbytes, "contiguous source")
                yield Give("source")
            if not same:
                yield Give("cast")
        elif not dense_source:
            yield Take("source", to.numel * frm.itemsize, "contiguous source")
            yield Give("source")
        return
    if not dense_into or (not same and not convert_source):
        itemsize = to.itemsize if convert_source else frm.itemsize
        yield Take("staged", to.numel * itemsize, "contiguous destination")
        yield Give("staged")


@rule(aten.copy_.default)
def copy_(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step] | None:
    into, source = args[0], args[1]
    if _on_host(into) == _on_host(source):
        return None
    return transfer(into, source, bool(argument(args, kwargs, 2, "non_blocking", False)))


@rule(aten._to_copy.default)
def to_copy(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step] | None:
    source, result = args[0], outputs[0]
    assert result is not None
    if _on_host(source) == _on_host(result):
        return None
    return _moved(source, result, bool(kwargs.get("non_blocking", False)))


def _moved(source: Tensor, result: Tensor, non_blocking: bool) -> Iterator[Step]:
    if not _on_host(result):
        yield Out(0)
    yield from transfer(result, source, non_blocking)

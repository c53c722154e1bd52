"""Stacks of PyTorch's memory history: which operator allocated, for what, and on whose line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from pytest_vram.frames import describe_line, owner

Frame = Mapping[str, Any]

_OPERATOR = re.compile(r"^at::_ops::(\w+)::(?:call|redispatch)\(")

#: Functions whose allocations are library workspaces that stay (ATen/cuda/CublasHandlePool.cpp).
#: 2.6 takes the cublasLt one inside the operator; from 2.7 there is a function for it.
_WORKSPACES = {
    "at::cuda::getCurrentCUDABlasHandle": "cublas workspace",
    "at::cuda::getCUDABlasLtWorkspace": "cublaslt workspace",
    "at::cuda::getCurrentCUDASolverDnHandle": "cusolver workspace",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an allocation came from. ``cast``: autocast made it, perhaps to keep.

    ``bill`` and ``name`` are set for library workspaces; ``frame`` is empty for what backward
    allocates on its own thread.
    """

    operator: str = ""
    bill: str = ""
    name: str = ""
    frame: str = ""
    cast: bool = False


class Stacks:
    """Reads the stacks of one snapshot, whose frames are shared objects: each is read once."""

    def __init__(self) -> None:
        self._frames: dict[int, tuple[str, str]] = {}  # id(frame) -> (kind, text)
        self._origins: dict[tuple[int, ...], Origin] = {}

    def origin(self, frames: Sequence[Frame]) -> Origin:
        """``frames`` innermost first, C++ and Python mixed, as ``_snapshot()`` gives them."""
        key = tuple(map(id, frames))
        known = self._origins.get(key)
        if known is None:
            known = self._origins[key] = self._read(frames)
        return known

    def _read(self, frames: Sequence[Frame]) -> Origin:
        operator, workspace, user = "", "", ""
        cast, raw, cudnn, in_python = False, True, False, False
        for frame in frames:
            kind, text = self._kind(frame)
            if kind == "operator" and not in_python:
                # The outermost operator that has a kernel of its own: below autograd, composites
                # have been taken apart. That is also the one that a dispatch mode would see.
                operator = text
                cudnn = cudnn or "cudnn" in text or "convolution" in text
            elif kind == "workspace":
                workspace = text
            elif kind == "cast" and not in_python:
                cast = True
            elif kind == "tensor":
                raw = False
            elif kind == "user":
                user = text
                break
            in_python = in_python or kind in ("python", "user")
        if not workspace and raw and cudnn:
            # Tensors come from at::detail::empty_* or are resized; a plan's workspace comes
            # straight from the allocator (ATen/native/cudnn/Conv_v8.cpp, run_conv_plan).
            workspace = "cudnn workspace"
        bill = "workspace" if workspace else ""
        return Origin(operator, bill, workspace, user, cast)

    def _kind(self, frame: Frame) -> tuple[str, str]:
        known = self._frames.get(id(frame))
        if known is None:
            known = self._frames[id(frame)] = _kind(frame["name"], frame["filename"], frame["line"])
        return known


def _kind(name: str, filename: str, line: int) -> tuple[str, str]:
    if filename.endswith(".py") or filename.startswith("<"):
        if owner(filename) != "machinery":
            return "user", describe_line(filename, line, name)
        return "python", ""
    match = _OPERATOR.match(name)
    if match:
        operator = operators().get(match[1], "")
        if not operator or _is_composite(operator):
            return "", ""
        if operator == "aten::_cudnn_init_dropout_state":
            # Once per device, for good (DropoutState in ATen/native/cudnn/RNN.cpp).
            return "workspace", "cudnn dropout state"
        return "operator", operator.partition(".")[0]
    function = name.partition("(")[0]
    if function in _WORKSPACES:
        return "workspace", _WORKSPACES[function]
    if function == "at::autocast::cached_cast":
        return "cast", ""
    if function.startswith("at::detail::empty_") or function == "at::native::resize_bytes_cuda":
        return "tensor", ""
    return "", ""


@cache
def operators() -> Mapping[str, str]:
    """C++ names to operators, overload included: ``log_softmax_int`` -> ``aten::log_softmax.int``.

    ``at::_ops`` (torchgen/model.py, ``unambiguous_name``) joins name and overload with ``_``.
    """
    names = torch._C._dispatch_get_all_op_names()
    return {name[6:].replace(".", "_"): name for name in names if name.startswith("aten::")}


@cache
def _is_composite(operator: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CompositeImplicitAutograd")

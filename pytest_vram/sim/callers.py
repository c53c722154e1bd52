"""Who called the operator that our dispatch answers: Python code, or C++ autograd itself."""

from __future__ import annotations

import dis
import os
import sys
from types import FrameType

import torch

_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_SIM = os.path.dirname(os.path.abspath(__file__))

#: What stands between an operator and our dispatch when Python did not call it.
_PLUMBING = (
    _SIM,
    os.path.join(_TORCH, "_compile.py"),
    os.path.join(_TORCH, "_dynamo"),
    os.path.join(_TORCH, "_ops.py"),  # called from our own autocast kernels
    os.path.join(_TORCH, "utils", "_stats.py"),
    os.path.join(_TORCH, "_subclasses"),
)
_ENGINE_CALLERS = (os.path.join(_TORCH, "autograd"), _SIM)
_FUNCTORCH = os.path.join(_TORCH, "_functorch")
_STORE_SUBSCR = dis.opmap["STORE_SUBSCR"]


def called_by_engine() -> bool:
    """Whether C++ autograd itself called the operator: no Python code between it and the engine.

    Not the engine of a ``torch.func`` transform: there the tensors are wrapped on a card too, so
    C++ takes the same branches as here (ATen/TensorSubclassLikeUtils.h).
    """
    frame = _caller()
    if frame is None or frame.f_code.co_name != "_engine_run_backward":
        return False
    while frame is not None and frame.f_code.co_filename.startswith(_ENGINE_CALLERS):
        frame = frame.f_back
    return frame is None or not frame.f_code.co_filename.startswith(_FUNCTORCH)


def storing_item() -> bool:
    """Whether the Python statement that led here is ``tensor[...] = value``."""
    frame = _caller()
    return frame is not None and frame.f_code.co_code[frame.f_lasti] == _STORE_SUBSCR


def _caller() -> FrameType | None:
    """The Python frame from which C++ came to our dispatch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PLUMBING):
        frame = frame.f_back
    return frame

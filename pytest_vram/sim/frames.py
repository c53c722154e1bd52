"""Whose line is it: the innermost Python frame that belongs to the user's code or a library of
models, not to PyTorch, pytest or this package."""

from __future__ import annotations

import dis
import os
import sys
from types import CodeType, FrameType

import torch

from pytest_vram.places import shown

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_SITE = os.sep + "site-packages" + os.sep
_HARNESS = ("pytest", "_pytest", "pluggy", "xdist")

_USER: dict[CodeType, bool] = {}


def is_user_file(name: str) -> bool:
    """Whether code of this file is the user's (or of a library of models that they use)."""
    if name.startswith("<") or name.startswith(_TORCH) or name.startswith(_HERE):
        return False
    if _SITE in name:
        package = name.rsplit(_SITE, 1)[1].split(os.sep, 1)[0]
        return package not in _HARNESS
    return not name.startswith(_STDLIB)


def user_frame() -> tuple[CodeType, int] | None:
    """Code and line of the innermost user frame; formatted later by :func:`describe`."""
    frame: FrameType | None = sys._getframe(1)
    known = _USER
    while frame is not None:
        code = frame.f_code
        mine = known.get(code)
        if mine is None:
            mine = known[code] = is_user_file(code.co_filename)
        if mine:
            return code, frame.f_lineno
        frame = frame.f_back
    return None


def describe(code: CodeType, line: int) -> str:
    """``train/loss.py:41 compute_loss``, the path relative to :func:`pytest_vram.places.here`."""
    return describe_line(code.co_filename, line, code.co_name)


def _caller() -> FrameType | None:
    """The Python frame from which C++ came to our dispatch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PLUMBING):
        frame = frame.f_back
    return frame


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


_ENGINE_CALLERS = (os.path.join(_TORCH, "autograd"), os.path.join(_HERE, "sim"))
_FUNCTORCH = os.path.join(_TORCH, "_functorch")
_STORE_SUBSCR = dis.opmap["STORE_SUBSCR"]

#: What stands between an operator and our dispatch when Python did not call it.
_PLUMBING = (
    os.path.join(_HERE, "sim"),
    os.path.join(_TORCH, "_compile.py"),
    os.path.join(_TORCH, "_dynamo"),
    os.path.join(_TORCH, "_ops.py"),  # called from our own autocast kernels
    os.path.join(_TORCH, "utils", "_stats.py"),
    os.path.join(_TORCH, "_subclasses"),
)


def describe_line(path: str, line: int, function: str) -> str:
    """:func:`describe` where only names are known, as in PyTorch's memory history."""
    return f"{shown(path)}:{line} {function}"


def user_line() -> str:
    found = user_frame()
    return describe(*found) if found else "an unknown line"

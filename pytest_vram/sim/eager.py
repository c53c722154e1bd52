"""torch.compile inside a simulation or on the CPU's stand-in: the eager code runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from pytest_vram.sim.patching import Patches

NOTE = "torch.compile was simulated eagerly: a compiled step may keep other tensors"

#: What takes memory of its own: a pool of the CUDA graphs, candidates that are measured on the
#: card (``list_mode_options`` in torch/_inductor/__init__.py).
_MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_OPTIONS = ("triton.cudagraphs", "max_autotune", "max_autotune_gemm")

#: Hears ``(note, open_ended)`` for everything that a program compiles.
Told = Callable[[str, bool], None]


def run_eagerly(held: Patches, stack: ExitStack, told: Told) -> None:
    """Until ``held`` is undone and ``stack`` closed, compiling returns the function as it is, and
    what was compiled before runs uncompiled. ``told`` hears of both."""

    def compile(
        model: Any = None, *, backend: Any = "inductor", mode: str | None = None,
        options: Mapping[str, Any] | None = None, disable: bool = False, **_: Any,
    ) -> Any:  # fmt: skip
        if not disable and backend != "eager":
            told(NOTE, open_ended(backend, mode, options or {}))
        return model if model is not None else lambda function: function

    held.set(torch, "compile", compile)
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None:  # something may have been compiled already
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        of_stance = frames._callback_from_stance

        def called(callback: Any) -> Any:
            if callable(callback):
                told(NOTE, _was_open_ended(callback))
            return of_stance(callback)

        held.set(frames, "_callback_from_stance", called)


def open_ended(backend: Any, mode: str | None, options: Mapping[str, Any]) -> bool:
    """Whether code so compiled takes memory of which eager code says nothing."""
    if backend not in ("inductor", "aot_eager"):
        return True
    return mode in _MODES or any(options.get(name) for name in _OPTIONS)


def _was_open_ended(callback: Any) -> bool:
    """The same of a function that was compiled before, by the backend that its callback holds:
    its wrappers keep the one inside as ``_torchdynamo_orig_backend``
    (``_torchdynamo_orig_callable`` up to 2.7), the innermost inductor's as ``compiler_fn``."""
    inside: Any = callback
    while inside is not None:
        config = getattr(getattr(inside, "compiler_fn", inside), "config", None)
        if isinstance(config, Mapping):
            return open_ended("inductor", None, config)
        inside = getattr(inside, "_torchdynamo_orig_backend", None) or getattr(
            inside, "_torchdynamo_orig_callable", None
        )
    return True

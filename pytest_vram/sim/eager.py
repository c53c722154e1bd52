"""torch.compile inside a simulation or on the CPU's stand-in: the eager code runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from pytest_vram.sim.patching import Patches

NOTE = "torch.compile was simulated eagerly: a compiled step may keep other tensors"


def run_eagerly(held: Patches, stack: ExitStack, note: Callable[[str], None]) -> None:
    """Until ``held`` is undone and ``stack`` closed, compiling returns the function as it is, and
    what was compiled before runs uncompiled. ``note`` hears of it once."""
    said: list[str] = []

    def compile(model: Any = None, *_: Any, **options: Any) -> Any:
        if not said:
            said.append(NOTE)
            note(NOTE)
        return model if model is not None else lambda function: function

    held.set(torch, "compile", compile)
    if "torch._dynamo.eval_frame" in sys.modules:  # something may have been compiled already
        stack.enter_context(torch.compiler.set_stance("force_eager"))

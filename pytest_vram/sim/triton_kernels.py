"""Triton kernels that a program launches itself: they are not launched.

A launch allocates nothing through PyTorch (outputs exist by then), and a simulated tensor has no
memory that a kernel could write. Autotuning does allocate, once: a buffer of 256 MiB that flushes
the cache (triton/backends/nvidia/driver.py, ``get_empty_cache_for_benchmark``, 3.2 and 3.6) and
copies of the arguments that it restores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from pytest_vram.sim.kernels import Span
from pytest_vram.sim.patching import Patches
from pytest_vram.sim.tensors import SimTensor

NOTE = "Triton kernels were not launched: their scratch, if any, is not simulated"
PART = "Triton autotuning"
_FLUSHED = 256 << 20
_WHY = "not simulated; tuning measures on the card, with a buffer that flushes its cache"


def skip_launches(
    held: Patches, note: Callable[[str], None], tuned: Callable[[Span], None]
) -> None:
    """Until ``held`` is undone, launches on simulated tensors do nothing. ``tuned`` hears, once for
    each kernel, what its tuning may take. Without Triton there is nothing to skip."""
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        return
    launch = jit.JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _simulated(args, kwargs):
            return launch(self, *args, **kwargs)
        note(NOTE)
        return None

    held.set(jit.JITFunction, "run", run)
    autotuner = sys.modules.get("triton.runtime.autotuner")
    if autotuner is None:
        return
    tune = autotuner.Autotuner.run
    known: set[int] = set()

    def tune_and_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _simulated(args, kwargs):
            return tune(self, *args, **kwargs)
        note(NOTE)
        if len(self.configs) > 1 and id(self) not in known:
            known.add(id(self))
            restores = bool(getattr(self, "restore_value", None))
            tuned(Span(PART, _WHY, 0, None if restores else _FLUSHED))
        return None

    held.set(autotuner.Autotuner, "run", tune_and_run)


def _simulated(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(one, SimTensor) for one in (*args, *kwargs.values()))

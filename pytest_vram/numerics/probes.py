"""Probes: everything that is patched into PyTorch to see a training loop, in one context manager.

Loops need not cooperate: modules are seen through the global forward hooks, optimizers through the
global step hooks, loss scaling through the methods of ``torch.amp.GradScaler`` (the old
``torch.cuda.amp`` name and subclasses included), ``backward`` where Python enters the autograd
engine, clipping, schedulers, checkpointing and the autocast cache at their functions.

Each sight becomes one call on every :class:`Listener`. Leaving the context undoes all of it.
"""

from __future__ import annotations

from types import TracebackType

from pytest_vram.numerics.probes_functions import FunctionProbes
from pytest_vram.numerics.probes_gradients import GradientProbes
from pytest_vram.numerics.probes_modules import ModuleProbes
from pytest_vram.numerics.probes_steps import StepProbes
from pytest_vram.numerics.wire import Wire


class Probes(Wire):
    """Context manager around a pass; everything that is patched, in one."""

    def __enter__(self) -> Probes:
        try:
            for part in (ModuleProbes, GradientProbes, StepProbes, FunctionProbes):
                part(self).install()
        except BaseException:
            self.undo.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.undo.close()
        self.updates.clear()

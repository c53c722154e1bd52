"""Numerical health of a marked training step: is the loss scale sane, is everything finite, does the
step train what it should? See :class:`Watch`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from pytest_vram.findings import Finding
from pytest_vram.numerics.loop import Loop
from pytest_vram.numerics.nonfinite import FiniteWatch
from pytest_vram.numerics.probes import Probes
from pytest_vram.numerics.scaler import ScalerHistory, ScalerWatch, judge
from pytest_vram.numerics.training_checks import TrainingWatch
from pytest_vram.numerics.wiring import WiringWatch

__all__ = ["ScalerHistory", "Watch"]


class Watch:
    """Context manager around one pass of a test, on CUDA or the CPU.

    Works for any loop without its cooperation. ``values=False``: the pass is simulated, so that only
    the order of calls and missing gradients are judged. Enter it before recording of memory begins:
    its own scalars (1 KiB) are then part of the base, and nothing else it does uses device memory.
    """

    def __init__(self, *, values: bool = True) -> None:
        self.values = values
        self._loop = Loop(values)
        self._finite = FiniteWatch(self._loop, values)
        self._wiring = WiringWatch(self._loop, values)
        self._training = TrainingWatch(self._loop, values, self._finite.losses)
        self._probes = Probes(())
        self._scaler = ScalerWatch(self._loop, self._probes)
        self._probes.values = values
        # The loop first: the others ask it what was known until now.
        self._probes.listeners = (
            self._loop,
            self._wiring,
            self._scaler,
            self._finite,
            self._training,
        )
        self._stack = ExitStack()

    def __enter__(self) -> Watch:
        if self.values:
            self._finite.check.prepare()
        self._stack.enter_context(self._probes)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stack.close()
        self._finite.settle_losses()

    # ---- what it saw

    @property
    def scaler(self) -> ScalerHistory:
        """What the gradient scalers did; empty when none was used."""
        return self._scaler.history

    @property
    def losses(self) -> tuple[float, ...]:
        """The losses that backward started from, unscaled, in order."""
        return tuple(note.value for note in self._finite.losses)

    @property
    def steps(self) -> int:
        """Optimizer steps attempted."""
        return max((r.attempts for r in self._loop.optimizers.values()), default=0)

    @property
    def saw_training(self) -> bool:
        """Whether there was anything to check: a backward or a module's forward."""
        return bool(self._loop.backwards or self._loop.forwards)

    # ---- verdict

    def findings(self, budget: Any = None) -> tuple[Finding, ...]:
        """Everything that is wrong. ``budget`` is the marker's (``warmup``, ``skipped_steps``,
        ``trainable``)."""
        history = self.scaler
        found = [
            *self._wiring.found.values(),
            *judge(
                history,
                int(getattr(budget, "warmup", 1) or 0),
                getattr(budget, "skipped_steps", None),
                None,
            ),
            *self._finite.found.values(),
            *self._training.findings(_patterns(budget), history.skipped),
        ]
        return tuple(found)

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be checked, in sentences."""
        if not self.values:
            return ("values were not checked: this pass was simulated",)
        return ()


def _patterns(budget: Any) -> Sequence[str]:
    trainable = getattr(budget, "trainable", None)
    if not trainable:
        return ()
    return (trainable,) if isinstance(trainable, str) else tuple(trainable)

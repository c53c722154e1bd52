"""The ``vram`` object that a test holds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

from pytest_vram.ledger import Ledger
from pytest_vram.marker import Budget, BudgetError, keywords_of, marks_of, read_budget
from pytest_vram.quantities import parse_size

if TYPE_CHECKING:
    import torch

    from pytest_vram.numerics import ScalerHistory
    from pytest_vram.passes import Pass


#: Why no device answers, in the words of a Measurement.
NO_VRAM = "no device: --no-vram"
NOT_MARKED = "no device: the test has neither the marker vram_budget nor vram as an argument"


def inert_budget(item: pytest.Item) -> Budget:
    """Precision and steps of a marker that does nothing else, if it can be read."""
    try:
        return read_budget(keywords_of(mark) for mark in marks_of(item))
    except BudgetError:
        return Budget()


class Measurement:
    """What ``vram.train`` returns: figures of this pass so far, in bytes.

    In the pass that checks numbers on the CPU the memory figures are those of the simulated pass
    before it. Every bill is an attribute, as on :class:`~pytest_vram.ledger.Ledger`.
    """

    def __init__(
        self, current: Pass | None, ledger: Callable[[], Ledger | None], device: str
    ) -> None:
        self._current = current
        self._take = ledger
        self._ledger: Ledger | None = None
        #: In words: which device answers.
        self.device = device

    def __getattr__(self, name: str) -> Any:
        __tracebackhide__ = True
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.ledger, name)

    def __repr__(self) -> str:
        return f"<Measurement on {self.device}>"

    @property
    def ledger(self) -> Ledger:
        """Skips the test where nothing is measured (``--no-vram``, or no marker)."""
        __tracebackhide__ = True
        if self._ledger is None:
            self._ledger = self._take()
        if self._ledger is None:
            pytest.skip(f"nothing was measured, so there is no figure to assert on ({self.device})")
        return self._ledger

    @property
    def peak_allocated(self) -> int:
        __tracebackhide__ = True
        return self.ledger.peak_allocated

    @property
    def peak_reserved(self) -> int:
        __tracebackhide__ = True
        return self.ledger.peak_reserved

    @property
    def scaler(self) -> ScalerHistory:
        """What gradient scalers did: ``.skipped``, ``.scales``, ``.steps``."""
        from pytest_vram.numerics import ScalerHistory

        watch = self._current.watch if self._current is not None else None
        return watch.scaler if watch is not None else ScalerHistory()

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of every backward; empty in a simulated pass, which has no values."""
        current = self._current
        if current is None or current.watch is None or not current.has_values:
            return ()
        return current.watch.losses

    @property
    def has_values(self) -> bool:
        return self._current is None or self._current.has_values


class Vram:
    """One marked test's view of the pass it runs in."""

    def __init__(self, budget: Budget, describe: str = "no pass is running") -> None:
        self.budget = budget
        #: What answers while no pass does, in words.
        self._describe = describe
        self._current: Pass | None = None
        self._simulated: Ledger | None = None

    def attach(self, current: Pass | None) -> None:
        """The pass that begins; ``None`` when it is over."""
        self._current = current

    def remember(self, ledger: Ledger | None, describe: str) -> None:
        """Memory figures for a later pass that has none of its own."""
        self._simulated, self._describe = ledger, describe

    @property
    def device(self) -> torch.device:
        """Where model and inputs belong. Where numbers are checked on the CPU, ``cuda`` means the
        CPU. Outside a pass (in fixtures, or with ``--no-vram``): CUDA where there is one."""
        import torch

        if self._current is not None:
            return self._current.device
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def has_values(self) -> bool:
        """False in the simulated pass: tensors there have shapes, but nothing to assert on."""
        return self._current is None or self._current.has_values

    @property
    def precision(self) -> str:
        return self.budget.precision

    @property
    def dtype(self) -> torch.dtype:
        """What floating-point inputs should be: the parameters' dtype under this precision."""
        import torch

        from pytest_vram.training import DTYPES

        return DTYPES[self.precision] if self.precision.endswith("-pure") else torch.float32

    @property
    def steps(self) -> int:
        """Training steps in all, warm-up included: for the range of an own loop."""
        return self.budget.warmup + self.budget.steps

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """This pass's gradient scaler; it passes everything through unless precision is fp16."""
        return self._running().scaler

    def autocast(self) -> AbstractContextManager[Any]:
        """The autocast region of the marker's precision."""
        return self._running().autocast()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A stretch of an own loop with a peak of its own: ``with vram.phase("forward"):``."""
        __tracebackhide__ = True
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"a phase needs a name, not {name!r}")
        return self._running().phase(name)

    def assume_selected(self, share: float) -> AbstractContextManager[None]:
        """Within it, a simulated mask whose values nobody knows selects ``share`` (0 to 1) of its
        elements in ``nonzero``, ``masked_select`` and indexing; passes with values ignore it."""
        __tracebackhide__ = True
        from pytest_vram.sim.selection import assume_selected

        return assume_selected(share)

    def assume_scratch(self, operator: str, size: int | str) -> AbstractContextManager[None]:
        """Within it, the custom operator (``"mylib::norm"``) takes at most ``size`` (bytes, or
        ``"64 MiB"``) beside its outputs: the upper end of the peak's interval, which is open
        without. Passes with a real kernel ignore it."""
        from pytest_vram.sim.kernels.fallback import assume_scratch

        return assume_scratch(operator, parse_size(size))

    def train(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., torch.Tensor],
        *,
        accumulate: int = 1,
        clip_grad_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: Any = None,
    ) -> Measurement:
        """Run ``warmup + steps`` training steps in the one right order.

        ``loss_fn`` returns the scalar loss; it may take the step's index, or the step's and the
        micro-batch's, from 0. :raises TrainingError: what cannot be trained, and what to change.
        """
        __tracebackhide__ = True
        from pytest_vram import training

        current = self._running()
        training.train(
            current,
            model,
            optimizer,
            loss_fn,
            steps=self.steps,
            accumulate=accumulate,
            clip_grad_norm=clip_grad_norm,
            scaler=scaler,
            scheduler=scheduler,
        )
        return self.measurement()

    def measurement(self) -> Measurement:
        """The figures so far, for own loops."""
        current, simulated = self._current, self._simulated

        def ledger() -> Ledger | None:
            own = current.ledger() if current is not None else None
            return own if own is not None else simulated

        return Measurement(current, ledger, self._answering)

    @property
    def _answering(self) -> str:
        """In words: the device of the current pass, and whose memory figures it shows."""
        current = self._current
        if current is None or not current.describe:
            return self._describe
        if current.kind == "numerics":
            return f"{current.describe}, with the memory figures of {self._describe}"
        return current.describe

    def __repr__(self) -> str:
        return f"<vram on {self._answering}>"

    def _running(self) -> Pass:
        """The current pass; outside one, a plain one that records nothing."""
        if self._current is None:
            from pytest_vram.passes import Pass

            self._current = Pass("plain", self.device, self.budget, has_values=True)
        return self._current

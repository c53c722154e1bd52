"""Numerical health of a marked training step: is the loss scale sane, is everything finite, does
the step train what it should? See :class:`Watch`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

from pytest_vram.findings import Finding
from pytest_vram.numerics.accumulation import AccumulationWatch
from pytest_vram.numerics.cpu_stand_in import CpuStandIn, on_the_cpu
from pytest_vram.numerics.diagnosis import Birth, Diagnosis
from pytest_vram.numerics.functions import Functions
from pytest_vram.numerics.handwritten import HandWrittenWatch
from pytest_vram.numerics.loop import Loop
from pytest_vram.numerics.nonfinite import LOOK_AT_DATA, FiniteWatch, read_loss
from pytest_vram.numerics.probes import Probes
from pytest_vram.numerics.ranges import RangeWatch, VanishingInfinities
from pytest_vram.numerics.regions import RegionWatch
from pytest_vram.numerics.remedies import remedy
from pytest_vram.numerics.scaler import ScalerHistory, ScalerWatch, judge
from pytest_vram.numerics.scaler_calls import ScalerCalls
from pytest_vram.numerics.silent import SilentWatch
from pytest_vram.numerics.training_checks import TrainingChecks, matches
from pytest_vram.numerics.training_watch import TrainingWatch
from pytest_vram.numerics.unheld import UnheldWatch
from pytest_vram.numerics.units import UnitWatch
from pytest_vram.numerics.wiring import WiringWatch

__all__ = ["CpuStandIn", "ScalerHistory", "Watch"]


class Watch:
    """Context manager around one pass of a test, on CUDA or the CPU.

    Works for any loop without its cooperation. Enter it before the recording of memory begins: its
    own 4 MiB are then part of the base, and nothing else it does uses device memory.

    ``values=False``: the pass is simulated, so only the order of calls and missing gradients are
    judged. ``diagnose=True``: a replay after a pass whose ``needs_replay()`` was true. It watches
    every operator and scales every loss by 1, and is given to the first watch's ``findings``.
    """

    def __init__(self, *, values: bool = True, diagnose: bool = False) -> None:
        self.values = values
        self._loop = Loop(values)
        self._finite = FiniteWatch(self._loop, values)
        calls = ScalerCalls()
        #: Of the order of calls, whoever noticed: key -> finding.
        self._wiring: dict[str, Finding] = {}
        self._handwritten = HandWrittenWatch(self._loop, self._wiring, calls, values)
        self._training = TrainingWatch(self._loop, values, self._finite.losses)
        self._unheld = UnheldWatch(self._loop)
        self._ranges = RangeWatch(self._loop, values)
        self._silent = SilentWatch(self._loop)
        self._probes = Probes((), values, unit_scale=diagnose)
        self._probes.capture = read_loss if values else None
        self._scaler = ScalerWatch(self._loop, self._probes)
        self._diagnosis = Diagnosis(self._loop.names, self._probes) if diagnose else None
        if self._diagnosis is not None:
            self._finite.on_found = self._diagnosis.stop
        # The loop first: the others ask it what was known until now.
        self._probes.listeners = (
            self._loop,
            calls,
            UnitWatch(self._loop, self._wiring, calls, values),
            self._handwritten,
            WiringWatch(self._loop, self._wiring, calls),
            AccumulationWatch(self._loop, self._wiring),
            RegionWatch(self._loop, self._wiring),
            self._scaler,
            self._finite,
            self._training,
            self._unheld,
            self._ranges,
            self._silent,
        )
        self._vanishing = VanishingInfinities()
        self._stack = ExitStack()
        self._remarks: tuple[str, ...] = ()

    def __enter__(self) -> Watch:
        if self.values:
            self._finite.check.prepare()
        self._stack.enter_context(self._probes)
        if self.values and on_the_cpu():
            sights = (self._vanishing, self._handwritten)
            self._stack.enter_context(Functions(self._probes, sights))
        if self._diagnosis is not None:
            self._stack.enter_context(self._diagnosis)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stack.close()
        self._finite.settle_losses()
        self._finite.check.release()

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
    def has_optimizers(self) -> bool:
        return bool(self._loop.optimizers)

    @property
    def saw_training(self) -> bool:
        """Whether there was anything to check: a backward or a module's forward."""
        return bool(self._loop.backwards or self._loop.forwards)

    def needs_replay(self, budget: Any = None) -> bool:
        """Something was not finite, or nothing could be checked from outside: a second pass with
        ``Watch(diagnose=True)`` can name the operator. The search for a scale needs none."""
        if not self.values or self._diagnosis is not None:
            return False
        found = self.findings(budget)
        skipped = any("skipped" in finding.data for finding in found)
        never_stepped = 0 < len(self.scaler.steps) == self.scaler.skipped
        return bool(self._finite.found) or skipped or never_stepped or not self.saw_training

    @property
    def notes(self) -> tuple[str, ...]:
        """What is normal but worth knowing (the search for a loss scale), and what could not be
        checked, in sentences; complete once ``findings`` was called."""
        if not self.values:
            return ("values were not checked: this pass was simulated",)
        return self._remarks

    # ---- verdict

    def findings(self, budget: Any = None, replay: Watch | None = None) -> tuple[Finding, ...]:
        """Everything that is wrong, nothing for a healthy pass. ``budget`` is the marker's
        (``warmup``, ``skipped_steps`` and ``trainable`` are read); ``replay`` a finished
        ``Watch(diagnose=True)``."""
        birth = replay.first_bad if replay is not None else None
        warmup = int(getattr(budget, "warmup", 1) or 0)
        allowed = getattr(budget, "skipped_steps", None)
        at_one = replay.finite_gradients if replay is not None and self.scaler.used else None
        patterns = _patterns(budget)
        found = [
            *self._wiring.values(),
            *judge(self.scaler, warmup, allowed, at_one, *self._operator(birth)),
            *(_diagnosed(finding, birth) for finding in self._first_not_finite()),
            *TrainingChecks(self._training).findings(
                patterns, self.scaler.skipped, self._explained(), self._ranges.only_zeros()
            ),
            *self._unheld.findings(
                lambda name: bool(patterns) and matches(name, patterns),
                copied=self._training.of_a_copy(),
            ),
            *self._quiet(),
        ]
        if replay is not None and not self.saw_training:
            found += replay.loose_ends(birth)
        self._remarks = tuple(one.sentence for one in found if one.severity == "note")
        return tuple(one for one in found if one.severity != "note")

    def _operator(self, birth: Birth | None) -> tuple[str, str]:
        """What a finding about the scale says of the operator, and what to do: nothing more than
        to look there, where the finding about the loss says it."""
        if birth is None:
            return "", ""
        if "loss" in self._finite.found:
            return "", "skipped because the loss is not finite: see there"
        return f"first non-finite operator: {birth.text()}", remedy(birth)

    def _quiet(self) -> list[Finding]:
        """What leaves everything finite; near misses only where nothing was hit."""
        hit = bool(self._finite.found) or bool(self.scaler.skipped == len(self.scaler.steps) > 0)
        near = [] if hit else self._ranges.findings()
        gone = [] if hit else self._vanishing.found
        return [*self._silent.found.values(), *near, *gone]

    def _explained(self) -> set[str]:
        """What a parameter without gradient would be told for, that other findings say better."""
        replaced = any(one.why == "late" for one in self._unheld.unheld)
        causes = [self._wiring.get(key) for key in ("reentrant", "no gradients")]
        named = [set(one.data.get("parameters", ())) for one in causes if one is not None]
        return set().union(*named, {"unknown"} if replaced else ())

    def _first_not_finite(self) -> list[Finding]:
        """The first that was noticed, the rest followed from it; nothing where a step went around
        the scaler, which would have rejected it."""
        first = [*self._finite.found.items()][:1]
        bypassed = {"second step", "scaled step"} & self._wiring.keys()
        return [found for key, found in first if key == "loss" or not bypassed]

    # ---- as a replay

    @property
    def finite_gradients(self) -> bool | None:
        """At scale 1: True when no gradient was inf or NaN, False when some were at every step."""
        if not self.scaler.skipped and "gradients" not in self._finite.found:
            return True
        return False if self.scaler.skipped >= len(self.scaler.steps) else None

    @property
    def first_bad(self) -> Birth | None:
        """The operator that explains what was not finite in this replay."""
        if self._diagnosis is None:
            return None
        first = next(iter(self._finite.found), "gradients" if self.scaler.skipped else "")
        if not first:
            return None if self.saw_training else self._diagnosis.first(None)
        return self._diagnosis.first(first != "gradients")

    def loose_ends(self, birth: Birth | None) -> list[Finding]:
        """Findings of a pass without modules and losses: only its operators tell."""
        assert self._diagnosis is not None
        result = []
        if birth is not None and birth.what == "NaN":
            sentence = f"NaN appeared: {birth.text()}"
            data = {"what": "operator"}
            result.append(Finding("non-finite", "fail", sentence, (), remedy(birth), data))
        for refusal in self._diagnosis.refused[:1]:
            result.append(
                Finding(
                    "non-finite",
                    "fail",
                    f"a constant does not fit its dtype: {refusal}",
                    (),
                    "float16 ends at 65504: use torch.finfo(dtype).min, or a value such as -1e4",
                    {"what": "constant"},
                )
            )
        return result


def _diagnosed(finding: Finding, birth: Birth | None) -> Finding:
    """With the operator that explains it, and what to do about that one."""
    if birth is None:
        return finding
    if birth.data and finding.data.get("parameters"):
        return finding  # the data in question are the parameters themselves
    # An operator made it, so the data are not at fault.
    known = [line.removesuffix(LOOK_AT_DATA) for line in finding.details if not birth.data]
    details = (*(known or finding.details), f"first non-finite operator: {birth.text()}")
    return replace(finding, details=details, hint=remedy(birth) or finding.hint)


def _patterns(budget: Any) -> Sequence[str]:
    trainable = getattr(budget, "trainable", None)
    if not trainable:
        return ()
    return (trainable,) if isinstance(trainable, str) else tuple(trainable)

"""TestRecord: everything that a report needs to know about one marked test, serialisable.

Records travel from xdist workers to the controller with the test's report, and reports are made
of nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pytest_vram.baseline_text import Record
from pytest_vram.environment import Environment
from pytest_vram.findings import Finding
from pytest_vram.ledger import Ledger
from pytest_vram.marker import Budget
from pytest_vram.timeline import Timeline

#: Raised when the meaning of a field changes; readers refuse newer ones.
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One run of the test body. ``kind``: ``simulation``, ``measurement`` or ``numerics``;
    ``device`` in words; ``ended`` says why the body ended early, empty where it did not."""

    kind: str
    device: str
    seconds: float
    ended: str = ""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> PassRecord:
        return cls(**raw)


@dataclass(frozen=True, slots=True)
class ScalerStep:
    """One ``GradScaler.update()``: the scale before and after, whether inf or NaN was found."""

    step: int
    scale_before: float
    scale_after: float
    found_inf: bool


@dataclass(frozen=True, slots=True)
class TestRecord:
    """``answered`` is ``measured`` or ``simulated``: who answered how much memory. ``numerics`` is
    where values were checked (``cuda``, ``cpu``) or empty. ``stored`` is the baseline of this
    environment when the test ran, ``estimate`` the simulated ledger beside a measured one.
    ``outcome`` is pytest's for the call phase; ``attempt`` counts reruns from 1."""

    __test__ = False  # not a test class, whatever its name

    nodeid: str
    file: str
    line: int
    budget: Budget
    environment: Environment
    answered: str
    ledger: Ledger | None = None
    estimate: Ledger | None = None
    stored: Record | None = None
    numerics: str = ""
    scaler: tuple[ScalerStep, ...] = ()
    losses: tuple[float, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    passes: tuple[PassRecord, ...] = ()
    timeline: Timeline | None = None
    outcome: str = ""
    attempt: int = 1
    worker: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(found for found in self.findings if found.severity == "fail")

    @property
    def failed(self) -> bool:
        """Whether something is wrong that was not expected: what is marked ``xfail`` may fail."""
        return self.outcome != "xfailed" and bool(self.failures or self.outcome == "failed")

    @property
    def skipped_steps(self) -> int:
        return sum(step.found_inf for step in self.scaler)

    @property
    def verdict(self) -> str:
        """The kind of the gravest finding, ``failed`` where the test itself failed, else ``ok``."""
        if self.failures:
            return self.failures[0].kind
        if self.outcome == "failed":
            return "failed"
        warned = [found.kind for found in self.findings if found.severity == "warn"]
        return warned[0] if warned else "ok"

    def with_outcome(self, outcome: str) -> TestRecord:
        return replace(self, outcome=outcome)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable; :meth:`from_dict` reads it back equal."""
        raw = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in ("budget", "environment", "ledger", "estimate", "timeline"):
            raw[name] = raw[name] and raw[name].to_dict()
        raw["findings"] = [found.to_dict() for found in self.findings]
        raw["passes"] = [_plain(one) for one in self.passes]
        raw["scaler"] = [_plain(one) for one in self.scaler]
        raw["losses"], raw["notes"] = list(self.losses), list(self.notes)
        raw["extra"] = dict(self.extra)
        return {"schema": SCHEMA, **raw}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> TestRecord:
        values = dict(raw)
        schema = values.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(f"a test record of schema {schema!r}: this pytest-vram reads {SCHEMA}")
        values["budget"] = Budget.from_dict(raw["budget"])
        values["environment"] = Environment.from_dict(raw["environment"])
        for name in ("ledger", "estimate"):
            values[name] = raw[name] and Ledger.from_dict(raw[name])
        values["timeline"] = raw["timeline"] and Timeline.from_dict(raw["timeline"])
        values["findings"] = tuple(map(Finding.from_dict, raw["findings"]))
        values["passes"] = tuple(map(PassRecord.from_dict, raw["passes"]))
        values["scaler"] = tuple(ScalerStep(**step) for step in raw["scaler"])
        values["losses"], values["notes"] = tuple(raw["losses"]), tuple(raw["notes"])
        return cls(**values)


def _plain(value: Any) -> dict[str, Any]:
    return {item.name: getattr(value, item.name) for item in fields(value)}

"""Report: everything about one pytest run, as the files of ``--vram-report`` are made of it.

The JSON file is the report itself: it is read back for comparisons (``pytest-vram diff``) and to
join the reports of shards (``pytest-vram report``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

from pytest_vram import __version__
from pytest_vram.record import ScalerStep, TestRecord
from pytest_vram.session import LOST

#: What a report calls itself, so that another JSON file is not taken for one.
FORMAT = "pytest-vram-report"
#: Raised when the meaning of a field changes; readers refuse newer ones.
VERSION = 1

#: Fields of a test that are computed from the others, for readers of the JSON file.
_DERIVED = ("verdict", "skipped_steps")
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class ReportError(ValueError):
    """A file that is no report, or one that this version cannot read; the message says which."""


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """A marked test without figures, and why: ``skipped in setup``, ``not run``."""

    nodeid: str
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    """``records`` are the attempts that count, one per marked test; ``attempts`` those before them
    (reruns). ``stopped`` says why the run ended early, ``filters`` why it was not complete;
    ``update``, ``refusals``, ``problems`` and ``stale`` are what was said about baselines.
    ``extra`` holds what plugins added (:mod:`pytest_vram.hooks`)."""

    records: tuple[TestRecord, ...]
    attempts: tuple[TestRecord, ...] = ()
    unmeasured: tuple[Unmeasured, ...] = ()
    created: str = ""
    version: str = __version__
    exit_status: int = 0
    stopped: str = ""
    filters: tuple[str, ...] = ()
    update: str = ""
    refusals: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[TestRecord, ...]:
        return tuple(one for one in self.records if one.failed)

    @property
    def lost(self) -> tuple[Unmeasured, ...]:
        """Tests that ended with the worker that ran them: nobody knows what they would need."""
        return tuple(one for one in self.unmeasured if one.why == LOST)

    @property
    def warned(self) -> tuple[TestRecord, ...]:
        """Tests that did not fail but have something to say: their verdict is not ``ok``."""
        return tuple(one for one in self.records if one.verdict != "ok" and not one.failed)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable, as ``schema.json`` describes it; :meth:`from_dict` reads it back."""
        raw = {
            "format": FORMAT,
            "version": VERSION,
            "pytest_vram": self.version,
            "created": self.created,
            "exit_status": self.exit_status,
            "totals": self.totals(),
            "tests": [_test(record) for record in self.records],
            "attempts": [_test(record) for record in self.attempts],
            "unmeasured": [asdict(one) for one in self.unmeasured],
            "stopped": self.stopped,
            "filters": list(self.filters),
            "baselines": {
                "update": self.update,
                "refusals": list(self.refusals),
                "problems": list(self.problems),
                "stale": list(self.stale),
            },
            "extra": dict(self.extra),
        }
        plain: dict[str, Any] = _finite(raw)
        return plain

    def totals(self) -> dict[str, int]:
        failed, warned = len(self.failed), len(self.warned)
        return {
            "tests": len(self.records),
            "ok": len(self.records) - failed - warned,
            "warned": warned,
            "failed": failed,
            "unmeasured": len(self.unmeasured),
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Report:
        """:raises ReportError: for anything but a report of this version."""
        if not isinstance(raw, Mapping) or raw.get("format") != FORMAT:
            raise ReportError("not a pytest-vram report (--vram-report FILE.json writes one)")
        if raw.get("version") != VERSION:
            raise ReportError(
                f"a report of version {raw.get('version')!r} (pytest-vram "
                f"{raw.get('pytest_vram', '?')}): this pytest-vram {__version__} reads {VERSION}"
            )
        try:
            return cls._read(raw)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ReportError(f"a damaged report: {type(error).__name__}: {error}") from error

    @classmethod
    def _read(cls, raw: Mapping[str, Any]) -> Report:
        said = raw["baselines"]
        return cls(
            records=tuple(map(_record, raw["tests"])),
            attempts=tuple(map(_record, raw["attempts"])),
            unmeasured=tuple(Unmeasured(**one) for one in raw["unmeasured"]),
            created=raw["created"],
            version=raw["pytest_vram"],
            exit_status=raw["exit_status"],
            stopped=raw["stopped"],
            filters=tuple(raw["filters"]),
            update=said["update"],
            refusals=tuple(said["refusals"]),
            problems=tuple(said["problems"]),
            stale=tuple(said["stale"]),
            extra=dict(raw["extra"]),
        )

    def to_json(self) -> str:
        """The JSON file: one field a line, and one test a line within its list."""
        lines = []
        for name, value in self.to_dict().items():
            text = _dump(value)
            if isinstance(value, list) and value:
                text = "[\n" + ",\n".join(map(_dump, value)) + "\n]"
            lines.append(f"{_dump(name)}: {text}")
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, default=str)


def now() -> str:
    """The time for ``Report.created``, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the JSON report."""
    text = resources.files(__package__).joinpath("schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def read_report(path: Path) -> Report:
    """:raises ReportError: naming the file, if it cannot be read as a report."""
    try:
        return Report.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(f"{path}: {error}") from error
    except json.JSONDecodeError as error:
        raise ReportError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except ReportError as error:
        raise ReportError(f"{path}: {error}") from error


def merge(reports: Sequence[Report]) -> Report:
    """The reports of shards of one run as one. A test that is in several counts as it was in the
    last of them; the others are kept as attempts. What one shard measured, no other one misses."""
    if len(reports) == 1:
        return reports[0]
    records: dict[tuple[str, str], TestRecord] = {}
    attempts: list[TestRecord] = []
    for report in reports:
        attempts += report.attempts
        for record in report.records:
            key = (record.nodeid, record.environment.key)
            if key in records:
                attempts.append(records[key])
            records[key] = record
    measured = {nodeid for nodeid, _ in records}
    unmeasured = {
        one.nodeid: one
        for report in reports
        for one in report.unmeasured
        if one.nodeid not in measured
    }
    return Report(
        records=tuple(sorted(records.values(), key=lambda one: (one.file, one.line, one.nodeid))),
        attempts=tuple(attempts),
        unmeasured=tuple(unmeasured.values()),
        created=max((report.created for report in reports), default=""),
        exit_status=max((report.exit_status for report in reports), default=0),
        stopped="; ".join(_each(report.stopped for report in reports)),
        filters=_each(reason for report in reports for reason in report.filters),
        update="; ".join(_each(report.update for report in reports)),
        refusals=_each(line for report in reports for line in report.refusals),
        problems=_each(line for report in reports for line in report.problems),
        stale=_each(line for report in reports for line in report.stale),
        extra={key: value for report in reports for key, value in report.extra.items()},
    )


def _each(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value for value in values if value))


# ---- JSON has no NaN and no infinity


def _test(record: TestRecord) -> dict[str, Any]:
    derived = {"verdict": record.verdict, "skipped_steps": record.skipped_steps}
    return {**derived, **record.to_dict()}


def _record(raw: Mapping[str, Any]) -> TestRecord:
    values = {name: value for name, value in raw.items() if name not in _DERIVED}
    values["losses"] = [_number(loss) for loss in raw["losses"]]
    names = ScalerStep.__dataclass_fields__
    values["scaler"] = [{name: _number(step[name]) for name in names} for step in raw["scaler"]]
    return TestRecord.from_dict(values)


def _finite(value: Any) -> Any:
    """``value`` with every number that JSON cannot say as a word: ``nan``, ``inf``, ``-inf``."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return value


def _number(value: Any) -> Any:
    return _WORDS.get(value, value) if isinstance(value, str) else value

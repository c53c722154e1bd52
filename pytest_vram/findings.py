"""Finding: one thing that is wrong, or worth saying, about a marked test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["fail", "warn", "note"]

#: Every kind of finding, in the order in which a report lists them.
KINDS: tuple[str, ...] = (
    "out-of-memory",
    "over-budget",
    "regression",
    "leak",
    "unexplained",
    "uncertain",
    "non-finite",
    "scaler",
    "untrained",
    "memory-cause",
    "not-checked",
    "improvement",
    "no-baseline",
    "stale-baseline",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """``sentence`` says in one line what happened, with figures; ``details`` are the lines below it
    (already aligned, no trailing newline); ``hint`` is the shortest remedy. ``data`` holds the same
    figures for machines (bytes, steps), JSON-serialisable."""

    kind: str
    severity: Severity
    sentence: str
    details: tuple[str, ...] = ()
    hint: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Finding:
        return cls(**{**raw, "details": tuple(raw.get("details", ()))})

    def text(self) -> str:
        """The finding as a person reads it: sentence, indented details, hint."""
        lines = [self.sentence, *(f"  {line}" for line in self.details)]
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)

"""The end of a run: one Report is made of what the session knows, and goes where it is wanted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pytest_vram.reports import github
from pytest_vram.reports.files import write_reports
from pytest_vram.reports.model import Report, Unmeasured, now
from pytest_vram.session import Session
from pytest_vram.settings import Settings


def report_of(session: Session, exit_status: int, stopped: str) -> Report:
    """The run as its controlling process saw it."""
    summary = session.summary
    return Report(
        records=tuple(session.records),
        attempts=tuple(session.earlier),
        unmeasured=tuple(Unmeasured(*pair) for pair in session.unmeasured.items()),
        created=now(),
        exit_status=int(exit_status),
        stopped=stopped or session.lost_workers,
        filters=tuple(session.collected.filters),
        update=summary.update,
        refusals=tuple(summary.refusals),
        problems=tuple(summary.problems),
        stale=tuple(summary.stale),
    )


def with_extra(report: Report, answers: Iterable[Mapping[str, Any] | None]) -> Report:
    """What plugins returned from ``pytest_vram_report``; the first of two with one name wins."""
    extra: dict[str, Any] = {}
    for answer in answers:
        extra = {**(answer or {}), **extra}
    return replace(report, extra=extra)


def publish(report: Report, settings: Settings) -> tuple[list[str], list[str]]:
    """Write every file that was asked for; returns those written, and what went wrong."""
    written, problems = write_reports(report, settings.reports)
    if github.running() and (problem := github.write_summary(report)):
        problems.append(problem)
    return written, problems

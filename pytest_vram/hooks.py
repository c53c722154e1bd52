"""Hooks for other plugins and for ``conftest.py``; documented in docs/hooks.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_vram.environment import Environment
    from pytest_vram.findings import Finding
    from pytest_vram.record import TestRecord
    from pytest_vram.reports.model import Report


@pytest.hookspec
def pytest_vram_environment(
    config: pytest.Config, environment: Environment
) -> Mapping[str, str] | None:
    """More facts that may explain a difference: versions, a driver, a container's name.

    Called for every marked test before its passes, in the process that runs it. They are kept with
    the baseline, and a comparison names the ones that changed. The environment's key is not
    affected.
    """


@pytest.hookspec
def pytest_vram_measured(
    item: pytest.Item, record: TestRecord, extra: dict[str, Any]
) -> Iterable[Finding] | None:
    """A marked test has been judged, in the process that ran it.

    Findings that are returned count like the plugin's own: one with severity ``fail`` fails the
    test. Figures of one's own go into ``extra`` (JSON-serialisable); every report has them.
    """


@pytest.hookspec
def pytest_vram_report(config: pytest.Config, report: Report) -> Mapping[str, Any] | None:
    """The run is over, in the controlling process, also when it failed or was interrupted. Called
    once, before the files of ``--vram-report`` are written.

    What is returned (JSON-serialisable) is put into ``report.extra``.
    """

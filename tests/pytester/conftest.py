"""The ``project`` fixture of whole-plugin tests."""

from __future__ import annotations

import pytest
from projects import Project


@pytest.fixture
def project(pytester: pytest.Pytester) -> Project:
    return Project(pytester)

"""Shared by all tests. This directory is on ``sys.path``: helpers such as ``traces`` live here."""

from __future__ import annotations

import os

pytest_plugins = ["pytester"]

# Runs inside tests are not the CI job's own: they must not annotate it, and what they print must
# not depend on where the suite runs. In CI pytest prints whole lines in its summary and more of a
# diff (`running_on_ci` in _pytest/compat.py); width and colours come from the environment too.
for _name in (
    "GITHUB_ACTIONS",
    "GITHUB_STEP_SUMMARY",
    "GITHUB_OUTPUT",
    "CI",
    "BUILD_NUMBER",
    "COLUMNS",
    "LINES",
    "NO_COLOR",
    "FORCE_COLOR",
    "PY_COLORS",
    "PYTEST_THEME",
    "PYTEST_ADDOPTS",
):
    os.environ.pop(_name, None)

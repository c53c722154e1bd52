"""Shared by all tests. This directory is on ``sys.path``: helpers such as ``traces`` live here."""

from __future__ import annotations

import os

pytest_plugins = ["pytester"]

# Runs inside tests are not the CI job's own: they must not annotate it.
for _name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"):
    os.environ.pop(_name, None)

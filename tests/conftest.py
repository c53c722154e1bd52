"""Shared by all tests. This directory is on ``sys.path``: helpers such as ``traces`` live here."""

from __future__ import annotations

pytest_plugins = ["pytester"]

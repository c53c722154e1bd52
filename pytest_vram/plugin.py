"""pytest hooks."""

from __future__ import annotations

"""The report as GitLab's code-quality JSON: findings appear in the merge request, at their lines.

Format: docs.gitlab.com, "Code Quality", section "Code Quality report format".
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pytest_vram.findings import Finding
from pytest_vram.nodeids import split_id
from pytest_vram.record import TestRecord
from pytest_vram.reports.model import Report

_SEVERITIES = {"fail": "critical", "warn": "minor", "note": "info"}


def code_quality(report: Report) -> str:
    """Every finding of every test. What a missing baseline says is of no use at a line."""
    issues = [
        _issue(record, found)
        for record in report.records
        for found in record.findings
        if found.kind != "no-baseline" or found.severity == "fail"
    ]
    issues += [_lost(one.nodeid, one.why) for one in report.lost]
    return json.dumps(issues, indent=1) + "\n"


def _lost(nodeid: str, why: str) -> dict[str, Any]:
    """A test without a record: its file is all that is known of its place."""
    return {
        "description": f"{nodeid}: VRAM not checked: {why}",
        "check_name": "vram/not-checked",
        "fingerprint": _fingerprint(nodeid, why),
        "severity": _SEVERITIES["fail"],
        "location": {"path": split_id(nodeid)[0], "lines": {"begin": 1}},
    }


def _fingerprint(*identity: str) -> str:
    return hashlib.sha256("\0".join(identity).encode("utf-8", "backslashreplace")).hexdigest()


def _issue(record: TestRecord, found: Finding) -> dict[str, Any]:
    """The fingerprint stays the same while test, environment and kind do: GitLab compares it with
    the target branch's, and figures in it would make an old finding look new."""
    identity = (record.nodeid, record.environment.key, found.kind, _first_name(found))
    expected = found.severity == "fail" and not record.failed  # marked xfail
    hint = f"\n\nhint: {found.hint}" if found.hint else ""
    return {
        "description": f"{record.nodeid}: {found.sentence}",
        "check_name": f"vram/{found.kind}",
        "fingerprint": _fingerprint(*identity),
        "severity": _SEVERITIES["warn" if expected else found.severity],
        "location": {"path": record.file, "lines": {"begin": record.line}},
        "content": {"body": "\n".join(found.details) + hint},
    }


def _first_name(found: Finding) -> str:
    """What tells two findings of one kind apart, figures aside."""
    names = [str(value) for value in found.data.values() if isinstance(value, str)]
    return names[0] if names else ""

"""Tests that may fail, and tests that nobody heard of again: the same in every report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from records import record, report
from traces import MIB

from pytest_vram.marker import Budget
from pytest_vram.reports.csv import rows
from pytest_vram.reports.diffing import compare_reports, headline, markdown, to_dict
from pytest_vram.reports.diffing import text as diff_text
from pytest_vram.reports.figures import verdict_text
from pytest_vram.reports.github import annotate
from pytest_vram.reports.gitlab import code_quality
from pytest_vram.reports.markdown import document
from pytest_vram.reports.model import Unmeasured
from pytest_vram.reports.terminal import table


def test_what_is_expected_to_fail_is_no_failure():
    failing = record(budget=Budget(peak=MIB), outcome="xfailed")
    made = report(failing, record())
    assert made.totals() == {"tests": 2, "ok": 1, "warned": 1, "failed": 0, "unmeasured": 0}
    assert verdict_text(failing) == "over-budget (xfail)"
    text = document(made)
    assert text.startswith("## ⚠️ GPU memory: 2 tests passed, 1 with a remark\n")
    assert "| over-budget (xfail) |" in text
    assert [line.partition(" ")[0] for line in annotate(made, Path("/"))] == ["::warning"]
    assert [one["severity"] for one in json.loads(code_quality(made))] == ["minor"]
    assert [line.mood for line in table([failing], 80)][-1] == "warn"


def test_a_lost_test_is_a_failure_of_the_report_and_of_a_comparison():
    lost = (Unmeasured("tests/test_a.py::test_it", "lost with its worker"),)
    head = report(record("test_other"), unmeasured=lost)
    text = document(head)
    assert text.startswith("## ❌ GPU memory: 1 test passed, 1 lost with a worker\n")
    assert "1 marked test has no figures, lost with its worker: `tests/test_a.py::test_it`." in text
    (line,) = annotate(head, Path("/"))
    assert line == (
        "::error title=not-checked::"
        "tests/test_a.py::test_it: VRAM not checked: lost with its worker"
    )
    (issue,) = json.loads(code_quality(head))
    assert issue["location"] == {"path": "tests/test_a.py", "lines": {"begin": 1}}
    assert (
        rows(head).splitlines()[2].startswith("tests/test_a.py::test_it,tests/test_a.py,,,,,lost")
    )
    diff = compare_reports(report(record(), record("test_other")), head)
    assert diff.exit_code == 1
    assert headline(diff) == (
        "1 test compared: 1 as before; 1 without figures on one side; 1 newly fails"
    )
    assert "head: no figures, lost with its worker" in diff_text(diff)
    assert "head: no figures, lost with its worker" in markdown(diff)
    (test,) = [one for one in to_dict(diff)["tests"] if one["status"] == "unmeasured"]
    assert (test["missing"], test["newly_fails"]) == ("lost with its worker", True)
    skipped = replace(head, unmeasured=(Unmeasured(lost[0].nodeid, "skipped in setup"),))
    assert compare_reports(report(record(), record("test_other")), skipped).exit_code == 0
    new = compare_reports(report(record("test_other")), head)
    assert new.exit_code == 1
    assert "lost with its worker, newly fails: tests/test_a.py::test_it\n" in diff_text(new)
    assert compare_reports(head, head).exit_code == 0

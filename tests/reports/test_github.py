"""Annotations and the step summary of GitHub Actions."""

from __future__ import annotations

from pathlib import Path

import pytest
from records import HOSTILE, record, report
from traces import MIB

from pytest_vram.reports.github import SUMMARY_LIMIT, annotate, running, write_summary

ROOT = Path("/github/workspace/trainer/packages/train")
WORKSPACE = "/github/workspace/trainer"


def test_failures_are_errors_at_the_tests_line():
    (line,) = annotate(report(record(baseline={}, saved=50 * MIB)), ROOT, WORKSPACE)
    head, _, text = line.partition("::VRAM")
    assert head == (
        "::error file=packages/train/tests/test_a.py,line=3,title=regression%3A test_it"
    )
    assert text.startswith(" regression: peak allocated 90.0 MiB, baseline 70.0 MiB, +20.0 MiB")
    assert "%0A  at the peak (forward, step 2)" in text or "%0A  at the peak" in text
    assert "(+28.6 %25, allowed 2 %25 + 1 MiB)" in text
    assert "\n" not in line


def test_warnings_are_warnings_and_notes_are_not_shown():
    (line,) = annotate(report(record(baseline={}, saved=10 * MIB), record("test_new")), ROOT)
    assert line.startswith("::warning file=tests/test_a.py,line=3,title=improvement%3A test_it::")


def test_a_file_outside_the_repository_has_no_place():
    (line,) = annotate(report(record(baseline={}, saved=50 * MIB)), Path("/elsewhere"), WORKSPACE)
    assert line.startswith("::error title=regression%3A test_it::")


def test_no_more_than_github_shows_and_the_rest_is_counted():
    records = [record(f"test_{n}", baseline={}, saved=50 * MIB) for n in range(14)]
    lines = annotate(report(*records), ROOT)
    assert len(lines) == 10
    assert lines[-1] == "::error title=pytest-vram::5 more: see the step summary"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_test_id_cannot_end_the_command_or_begin_another(name):
    (line,) = annotate(report(record(f"{name},file=x::y", baseline={}, saved=50 * MIB)), ROOT)
    assert len(line.splitlines()) == 1
    properties = line[2:].partition("::")[0].removeprefix("error ").split(",")
    assert [one.partition("=")[0] for one in properties] == ["file", "line", "title"]
    assert "\x1b" not in line


def test_the_summary_is_appended_and_never_cut(tmp_path):
    path = tmp_path / "summary.md"
    path.write_text("# mine\n")
    environ = {"GITHUB_STEP_SUMMARY": str(path)}
    assert write_summary(report(record()), environ) == ""
    assert path.read_text().startswith("# mine\n## ✅ GPU memory: 1 test passed\n")
    path.write_text("x" * (SUMMARY_LIMIT - 50))
    write_summary(report(record()), environ)
    assert path.stat().st_size == SUMMARY_LIMIT - 50


def test_nothing_to_say_and_nowhere_to_say_it(tmp_path):
    path = tmp_path / "summary.md"
    assert write_summary(report(), {"GITHUB_STEP_SUMMARY": str(path)}) == ""
    assert not path.exists()
    assert write_summary(report(record()), {}) == ""
    problem = write_summary(report(record()), {"GITHUB_STEP_SUMMARY": str(tmp_path)})
    assert problem == "the step summary was not written: Is a directory"


def test_only_github_is_github():
    assert running({"GITHUB_ACTIONS": "true"})
    assert not running({})

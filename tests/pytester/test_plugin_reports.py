"""--vram-report and --vram-snapshots, GitHub, hooks: what a person types and finds on disk."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

# Imported before an inner run does: pytester forgets modules that were not there.
import pytest_vram.reports.html
import pytest_vram.reports.publish  # noqa: F401
from pytest_vram.commands.snapshots import explain, read_snapshot
from pytest_vram.ledger import Ledger
from pytest_vram.reports.model import read_report, schema

PASSING = """
@pytest.mark.vram_budget("1 GiB")
def test_fits(vram):
    vram.train(*build(vram.device))
"""
FAILING = """
@pytest.mark.vram_budget("1 MiB")
def test_too_large(vram):
    vram.train(*build(vram.device))
"""
SKIPPED = """
@pytest.mark.vram_budget("1 GiB")
@pytest.mark.skip(reason="not today")
def test_skipped(vram): ...
"""


def test_every_format_also_when_tests_fail(project, monkeypatch):
    summary = project.path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(project.path.parent))
    project.write(PASSING + FAILING + SKIPPED)
    names = ("r.json", "r.html", "r.md", "r.csv", "r.codequality.json")
    result = project.run(*(f"--vram-report=out/{name}" for name in names), "--vram-snapshots=snaps")
    assert result.ret == 1
    out = project.path / "out"
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    result.stdout.fnmatch_lines([f"vram report: out/{name}" for name in names])

    raw = json.loads((out / "r.json").read_text())
    jsonschema.validate(raw, schema())
    assert raw["totals"] == {"tests": 2, "ok": 1, "warned": 0, "failed": 1, "unmeasured": 1}
    assert raw["exit_status"] == 1
    assert raw["unmeasured"] == [{"nodeid": "test_a.py::test_skipped", "why": "skipped in setup"}]
    report = read_report(out / "r.json")
    assert [record.verdict for record in report.records] == ["ok", "over-budget"]
    assert "test_a.py::test_<wbr>" not in (out / "r.html").read_text()
    assert "test_too_large" in (out / "r.html").read_text()
    rows = list(csv.DictReader(io.StringIO((out / "r.csv").read_text())))
    assert [int(row["peak_allocated"]) for row in rows[:2]] == [
        record.ledger.peak_allocated for record in report.records
    ]
    assert (rows[2]["nodeid"], rows[2]["verdict"]) == (
        "test_a.py::test_skipped",
        "skipped in setup",
    )
    assert [one["check_name"] for one in json.loads((out / "r.codequality.json").read_text())] == [
        "vram/over-budget"
    ]

    line = next(line for line in result.outlines if line.startswith("::error"))
    assert line.startswith(
        f"::error file={project.path.name}/test_a.py,line={report.records[1].line},"
        "title=over-budget%3A test_too_large::VRAM over budget: peak allocated 16.6 MiB"
    )
    assert summary.read_text().startswith("## ❌ GPU memory: 1 of 2 tests failed\n")
    assert (out / "r.md").read_text() in summary.read_text()

    snapshots = sorted((project.path / "snaps").iterdir())
    assert len(snapshots) == 2
    for path, record in zip(snapshots, report.records, strict=True):
        explained = explain(read_snapshot(path), 0)  # its requests, replayed by the allocator
        found = Ledger.from_trace(explained.trace)
        assert found.peak_allocated == record.ledger.peak_allocated


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--vram-report=a.txt", "--vram-report: 'a.txt': the suffix decides the format: .codeq*"),
        ("--vram-report=tests.json/a.md", "--vram-report: *tests.json is a file"),
        ("--vram-report=folder.md", "--vram-report: *folder.md is a directory"),
        ("--vram-snapshots=tests.json", "--vram-snapshots: *tests.json is a file"),
    ],
)
def test_what_cannot_be_written_is_said_before_tests_run(project, option, sentence):
    (project.path / "tests.json").touch()
    (project.path / "folder.md").mkdir()
    project.write("def test_never(): raise SystemExit(9)")
    result = project.run(option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {sentence}"])


def test_nothing_is_written_unless_tests_run(project):
    project.write(PASSING)
    project.run("--collect-only", "--vram-report=a.md", "--vram-snapshots=s")
    project.run("--no-vram", "-p", "no:cacheprovider", "--vram-report=a.md")
    assert not (project.path / "a.md").exists()
    assert not (project.path / "s").exists()


def test_an_interrupted_run_has_its_report(project):
    project.write(PASSING + "\ndef test_stop(): raise KeyboardInterrupt\n" + FAILING)
    result = project.subprocess("--vram-report=r.json")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    report = read_report(project.path / "r.json")
    assert [record.nodeid for record in report.records] == ["test_a.py::test_fits"]
    assert report.stopped == "interrupted"
    assert [(one.nodeid, one.why) for one in report.unmeasured] == [
        ("test_a.py::test_too_large", "not run")
    ]


def test_a_report_that_cannot_be_written_at_the_end_fails_the_run(project):
    project.write(
        PASSING
        + """
def test_in_the_way():
    import pathlib
    pathlib.Path("out").write_text("a file now")
"""
    )
    result = project.run("--vram-report=out/r.md", "--vram-report=r.csv")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["vram report: *out/r.md was not written: *"])
    assert (project.path / "r.csv").exists()


def test_reruns_are_in_the_report_and_the_last_counts(project):
    project.write(
        """
import pathlib

@pytest.mark.flaky(reruns=2)
@pytest.mark.vram_budget("1 GiB")
def test_flaky(vram):
    vram.train(*build(vram.device))
    tries = pathlib.Path("tries")
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    assert len(tries.read_text()) > 1
"""
    )
    result = project.run("--vram-report=r.json")
    assert result.ret == 0
    report = read_report(project.path / "r.json")
    assert [(one.attempt, one.outcome) for one in report.records] == [(2, "passed")]
    assert [(one.attempt, one.outcome) for one in report.attempts] == [(1, "rerun")]


def test_workers_ship_results_and_the_controller_writes(project):
    project.write(PASSING + FAILING + SKIPPED)
    result = project.subprocess("-n2", "--vram-report=r.json", "--vram-report=r.html")
    assert result.ret == 1
    report = read_report(project.path / "r.json")
    assert [record.nodeid for record in report.records] == [
        "test_a.py::test_fits",
        "test_a.py::test_too_large",
    ]
    assert {record.worker for record in report.records} <= {"gw0", "gw1"}
    assert [one.why for one in report.unmeasured] == ["skipped in setup"]
    assert [path.name for path in project.path.glob(".vram*")] == []


# ---- hooks


def test_the_example_of_the_documentation(project, monkeypatch):
    text = (Path(__file__).parents[2] / "docs/hooks.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (project.path / "conftest.py").write_text(source)
    monkeypatch.setenv("CONTAINER_IMAGE", "train:7")
    project.write(
        PASSING
        + """
@pytest.mark.vram_budget("1 GiB")
def test_holds_activations(vram):
    y = x = torch.randn(1 << 20, device=vram.device, requires_grad=True)
    for _ in range(8):
        y = y.sin()
    y.sum().backward()
"""
    )
    result = project.run("--vram-report=r.json")
    assert result.ret == 1
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*activations are * % of the peak (allowed 50 %)"])
    report = read_report(project.path / "r.json")
    fits, holds = report.records
    assert fits.environment.versions["container"] == "train:7"
    assert fits.extra["activation_share"] < 0.5 < holds.extra["activation_share"]
    assert holds.verdict == "activations"
    assert report.extra == {"history": "vram_history.jsonl"}
    lines = (project.path / "vram_history.jsonl").read_text().splitlines()
    assert [json.loads(line)["peak"] for line in lines] == [
        record.ledger.peak_allocated for record in report.records
    ]


def test_a_hook_that_raises_costs_no_report(project):
    (project.path / "conftest.py").write_text(
        "def pytest_vram_report(report): raise ConnectionError('the dashboard is down')"
    )
    project.write(PASSING)
    result = project.run("--vram-report=r.md")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["vram report: pytest_vram_report: ConnectionError: the dashboard is down"]
    )
    assert (project.path / "r.md").exists()


def test_what_a_hook_adds_is_made_json(project):
    (project.path / "conftest.py").write_text(
        "def pytest_vram_measured(record, extra): extra['where'] = __import__('pathlib').Path('x')"
    )
    project.write(PASSING)
    project.run("--vram-report=r.json")
    assert read_report(project.path / "r.json").records[0].extra == {"where": "x"}


def test_pytest_without_some_of_its_own_plugins(project):
    project.write(PASSING)
    result = project.subprocess("-p", "no:logging", "-p", "no:capture", "--vram-report=r.md")
    assert result.ret == 0
    assert (project.path / "r.md").exists()


def test_a_test_that_is_lost_with_its_worker_is_listed(project):
    project.write(
        PASSING
        + """
@pytest.mark.vram_budget("1 GiB")
def test_crash(vram):
    import os
    os._exit(1)
"""
    )
    result = project.subprocess("-n2", "--vram-report=r.json")
    assert result.ret == 1
    report = read_report(project.path / "r.json")
    assert [record.nodeid for record in report.records] == ["test_a.py::test_fits"]
    assert [(one.nodeid, one.why) for one in report.unmeasured] == [
        ("test_a.py::test_crash", "lost with its worker")
    ]


def test_the_gate_runs_and_compares_with_the_base_branch(project):
    """As the workflows do: a base branch, then a pull request with a wider model."""
    environ = {**os.environ, "GITHUB_ACTIONS": "true", "VRAM_DEVICE": "sim:rtx4090"}
    environ |= {
        "VRAM_ARGS": "-p no:cacheprovider --vram-numerics=off -k 'trains and not plain'",
        "VRAM_DIRECTORY": "base",
        "GITHUB_OUTPUT": "output",
        "GITHUB_STEP_SUMMARY": "summary.md",
    }
    source = """
@pytest.mark.vram_budget("1 GiB")
def test_trains(vram):
    vram.train(*build(vram.device, width={width}))

def test_plain(): assert False
"""
    for width, directory in ((64, "base"), (65536, "head")):
        project.write(source.format(width=width))
        base = "base/report.json" if directory == "head" else ""
        environ |= {"VRAM_DIRECTORY": directory, "VRAM_BASE": base}
        subprocess.run(
            [sys.executable, "-m", "pytest_vram.reports.gate"],
            cwd=project.path,
            env=environ,
            check=True,
        )
    assert (project.path / "output").read_text() == "exit-code=0\nexit-code=0\n"
    report = read_report(project.path / "head/report.json")
    assert report.records[0].environment.gpu == "rtx4090"
    diff = (project.path / "head/diff.md").read_text()
    assert diff.startswith("## ❌ GPU memory: 1 test compared: 1 grew\n")
    assert "| grew | `test_a.py::test_trains` | 16.6 MiB |" in diff
    assert "float32[256, 65536]" in diff
    summary = (project.path / "summary.md").read_text()
    assert [line for line in summary.splitlines() if line.startswith("## ")] == [
        "## ✅ GPU memory: 1 test passed",
        "## ✅ GPU memory: 1 test passed",
        "## ❌ GPU memory: 1 test compared: 1 grew",
    ]

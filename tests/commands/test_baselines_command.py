"""``pytest-vram diff`` and ``pytest-vram baselines``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from traces import A100, MIB, training

from pytest_vram.baselines import Edit, Store
from pytest_vram.cli import main
from pytest_vram.comparison import record_of
from pytest_vram.marker import Budget
from pytest_vram.record import TestRecord
from pytest_vram.reports.model import Report


def run(*words):
    return CliRunner().invoke(main, list(map(str, words)))


def record(name="test_it", environment=A100, **script):
    ledger = training(**script).ledger()
    return TestRecord(
        nodeid=f"tests/test_a.py::{name}",
        file="tests/test_a.py",
        line=3,
        budget=Budget(),
        environment=environment,
        answered="simulated",
        ledger=ledger,
        outcome="passed",
    )


@pytest.fixture
def report(tmp_path):
    def write(name, *records):
        path = tmp_path / name
        path.write_text(Report(tuple(records)).to_json())
        return path

    return write


def test_nothing_moved(report):
    result = run("diff", report("a.json", record()), report("b.json", record(saved=30 * MIB + 9)))
    assert result.exit_code == 0
    assert result.output == "1 test compared, nothing moved beyond the tolerance.\n"


def test_what_grew_is_named_and_is_the_answer_no(report):
    base, now = report("a.json", record()), report("b.json", record(saved=50 * MIB))
    result = run("diff", base, now)
    assert result.exit_code == 1
    assert "1 test compared: 1 grew, 0 shrank." in result.output
    assert "tests/test_a.py::test_it: peak 70.0 MiB -> 90.0 MiB (+28.6 %)" in result.output
    assert "activations at the peak" in result.output
    assert "+20.0 MiB" in result.output
    data = json.loads(run("diff", base, now, "--json").output)
    assert data["grown"] == ["tests/test_a.py::test_it"]
    assert data["tests"][0]["now"] - data["tests"][0]["before"] == 20 * MIB


def test_what_shrank_is_no_failure(report):
    base, now = report("a.json", record()), report("b.json", record(saved=20 * MIB))
    result = run("diff", base, now)
    assert result.exit_code == 0
    assert "0 grew, 1 shrank" in result.output


def test_the_tolerance_is_a_choice(report):
    base, now = report("a.json", record()), report("b.json", record(saved=50 * MIB))
    assert run("diff", base, now, "--tolerance", "80%").exit_code == 0
    wrong = run("diff", base, now, "--tolerance", "much")
    assert wrong.exit_code == 2
    assert "--tolerance: 'much' is not a tolerance" in " ".join(wrong.output.split())


def test_markdown(report):
    base = report("a.json", record("test_it[a|b]"))
    now = report("b.json", record("test_it[a|b]", saved=50 * MIB))
    lines = run("diff", base, now, "--markdown").output.splitlines()
    assert lines[0] == "**GPU memory: 1 test compared: 1 grew, 0 shrank.**"
    assert lines[2] == "| test | figure | before | now | change |"
    assert all(line.count("|") - line.count("\\|") == 6 for line in lines[4:])


def test_other_tests_and_other_devices_are_said(report):
    rtx = replace(A100, gpu="rtx4090")
    base = report("a.json", record(), record("test_old"))
    now = report("b.json", record(environment=rtx, saved=50 * MIB), record("test_new"))
    result = run("diff", base, now)
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert "not compared, other device: tests/test_a.py::test_it" in text
    assert "sim/a100-80gb -> sim/rtx4090" in text
    assert "only in the first report: tests/test_a.py::test_old" in text
    assert "only in the second report: tests/test_a.py::test_new" in text


def test_files_that_are_no_reports(report, tmp_path):
    good = report("a.json", record())
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    for path, sentence in (
        (bad, "not a pytest-vram report"),
        (tmp_path / "missing.json", "No such file"),
    ):
        result = run("diff", good, path)
        assert result.exit_code == 2
        assert sentence in " ".join(result.output.split())


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Two modules, one of which is gone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").touch()
    made = Store(tmp_path / "vram_baselines", tmp_path)
    stored = record_of(training().ledger(), A100)
    made.write(
        Edit(f"tests/{module}.py", "test_it", A100.key, stored, "recorded")
        for module in ("test_a", "test_gone")
    )
    return made


def test_listing(store):
    result = run("baselines", "list")
    assert result.exit_code == 0
    assert "sim/a100-80gb/torch-2.13" in result.output
    text = " ".join(result.output.split())
    assert "tests/test_a.py::test_it 70.0 MiB 80.0 MiB" in text
    assert "2 entries of 2 tests." in text
    assert "tests/test_gone.py::test_it (file gone)" in text
    data = json.loads(run("baselines", "list", "--json").output)
    assert [entry["gone"] for entry in data] == [False, True]


def test_explaining(store):
    result = run("baselines", "explain", "test_a.py::test_it")
    assert result.exit_code == 0
    assert "73,400,320" in result.output
    assert "recorded with torch 2.13.0, transformers 5.1.0" in " ".join(result.output.split())
    missing = run("baselines", "explain", "test_b")
    assert missing.exit_code == 1
    assert "no stored test is called 'test_b'" in missing.output


def test_pruning_asks_first(store, tmp_path):
    gone = tmp_path / "vram_baselines" / "tests" / "test_gone.yaml"
    result = run("baselines", "prune")
    assert "1 test would be removed; say --yes." in result.output
    assert gone.exists()
    assert "1 test removed." in run("baselines", "prune", "--yes").output
    assert not gone.exists()
    assert (tmp_path / "vram_baselines" / "tests" / "test_a.yaml").exists()
    assert "Nothing to prune" in run("baselines", "prune").output


def test_no_directory_and_a_broken_file(store, tmp_path):
    missing = run("baselines", "--directory", tmp_path / "none", "list")
    assert missing.exit_code == 2
    assert "no baselines there" in " ".join(missing.output.split())
    Path("vram_baselines/tests/test_a.yaml").write_text("{")
    broken = run("baselines", "list")
    assert broken.exit_code == 2
    assert "test_a.yaml:" in " ".join(broken.output.split())

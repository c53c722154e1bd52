"""``pytest-vram baselines``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from traces import A100, training

from pytest_vram.baselines import Edit, Store
from pytest_vram.cli import main
from pytest_vram.comparison import record_of


def run(*words):
    return CliRunner().invoke(main, list(map(str, words)))


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

"""The files of --vram-report: suffixes, obstacles, and files that are whole or not there."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import HOSTILE, record, report
from traces import MIB

from pytest_vram.marker import Budget
from pytest_vram.reports.csv import COLUMNS, rows
from pytest_vram.reports.files import obstacle, parse_report, write_reports, write_text
from pytest_vram.reports.gitlab import code_quality
from pytest_vram.reports.markdown import plain
from pytest_vram.reports.snapshots import snapshot_name


@pytest.mark.parametrize("name", ["a.json", "a.HTML", "x/y.md", "a.csv", "gl.codequality.json"])
def test_the_suffix_decides(name):
    assert parse_report(name) == Path(name)


@pytest.mark.parametrize("name", ["a.txt", "a", ".json"])
def test_other_suffixes_name_those_that_are_known(name):
    with pytest.raises(ValueError, match=r"the suffix decides the format: \.codequality\.json, "):
        parse_report(name)


def test_obstacles_are_found_without_touching_anything(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dir.json").mkdir()
    assert obstacle(tmp_path / "new" / "deep" / "a.json") == ""
    assert obstacle(tmp_path / "dir.json") == f"{tmp_path / 'dir.json'} is a directory"
    assert obstacle(tmp_path / "file" / "a.json") == f"{tmp_path / 'file'} is a file"
    assert obstacle(tmp_path / "file", directory=True) == f"{tmp_path / 'file'} is a file"
    assert obstacle(tmp_path, directory=True) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dir.json", "file"]


def test_a_directory_that_cannot_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert obstacle(tmp_path / "a.json") == f"{tmp_path} cannot be written to"


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "a.md"
    write_text(path, "before")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "after")
    assert path.read_text() == "before"
    assert [one.name for one in path.parent.iterdir()] == ["a.md"]


def test_one_failure_spares_the_other_files(tmp_path):
    (tmp_path / "file").touch()
    bad, good = tmp_path / "file" / "a.md", tmp_path / "b.md"
    written, problems = write_reports(report(record()), [bad, good])
    assert written == [str(good)]
    assert len(problems) == 1
    assert problems[0].startswith(f"{bad} was not written: ")


def test_a_format_that_stumbles_spares_the_others(tmp_path):
    odd = replace(record(), stored={"bills": ["no mapping"]})
    written, problems = write_reports(report(odd), [tmp_path / "a.html", tmp_path / "a.json"])
    assert written == [str(tmp_path / "a.json")]
    assert problems == [f"{tmp_path / 'a.html'} was not written: AttributeError: 'list' object has "
                        "no attribute 'get'"]  # fmt: skip


def test_a_file_name_that_is_no_text_is_escaped(tmp_path):
    write_text(tmp_path / "a.md", "caf\udce9")
    assert (tmp_path / "a.md").read_text() == "caf\\udce9"


# ---- CSV


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_has_bytes_and_bills_that_add_up():
    made = record(budget=Budget(peak=80 * MIB, precision="fp16"), baseline={}, measured=True)
    (row,) = read(rows(report(made)))
    assert tuple(row) == COLUMNS
    assert (row["peak_allocated"], row["budget_peak"]) == (str(70 * MIB), str(80 * MIB))
    assert row["baseline_peak_allocated"] == row["estimate_peak_allocated"] == str(70 * MIB)
    bills = ("parameters", "gradients", "optimizer_state", "activations")
    assert sum(int(row[bill]) for bill in bills) == 70 * MIB
    assert row["verdict"] == "ok"


def test_csv_without_a_ledger_has_empty_cells():
    (row,) = read(rows(report(replace(record(), ledger=None, timeline=None))))
    assert row["peak_allocated"] == row["activations"] == ""


@given(name=st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories=["Cs"]))))
def test_csv_cells_hold_any_id_and_are_no_formulas(name):
    made = replace(record(), nodeid=name)
    text = rows(report(made))
    (row,) = list(csv.DictReader(io.StringIO(text, newline="")))
    assert row["nodeid"].removeprefix("'") == plain(name).removeprefix("'")
    assert not row["nodeid"].startswith(("=", "+", "-", "@"))


# ---- GitLab


def test_gitlab_gets_findings_at_their_lines():
    made = record(baseline={}, saved=50 * MIB)
    (issue,) = json.loads(code_quality(report(made)))
    assert issue["check_name"] == "vram/regression"
    assert issue["severity"] == "critical"
    assert issue["location"] == {"path": "tests/test_a.py", "lines": {"begin": 3}}
    assert issue["description"].startswith(
        "tests/test_a.py::test_it: VRAM regression: peak allocated 90.0 MiB, baseline 70.0 MiB"
    )


def test_gitlab_fingerprints_stay_while_only_figures_move():
    def prints(**script):
        return [
            issue["fingerprint"]
            for issue in json.loads(code_quality(report(record(baseline={}, **script))))
        ]

    assert prints(saved=50 * MIB) == prints(saved=60 * MIB)
    other = json.loads(code_quality(report(record("test_b", baseline={}, saved=50 * MIB))))
    assert other[0]["fingerprint"] not in prints(saved=50 * MIB)


def test_gitlab_does_not_hear_of_missing_baselines():
    assert json.loads(code_quality(report(record()))) == []


# ---- snapshots


def test_snapshot_names_are_short_plain_and_different():
    names = [snapshot_name(f"tests/test_a.py::{name}", "simulation") for name in HOSTILE]
    names += [snapshot_name("tests/a/b.py::t", "simulation"), snapshot_name("tests/a_b.py::t", "x")]
    names.append(snapshot_name("x" * 5000, "simulation", attempt=2))
    assert len(set(names)) == len(names)
    for name in names:
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
        assert len(name) < 140
        assert not name.startswith((".", "-"))
    assert snapshot_name("tests/test_a.py::test_b[x]", "measurement").startswith(
        "tests-test_a.py-test_b-x-"
    )
    assert ".attempt2.simulation.pickle" in names[-1]

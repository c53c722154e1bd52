"""``pytest-vram diff`` and ``pytest-vram report``: what a person types and sees."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner, Result
from records import record, report
from traces import A100, MIB

from pytest_vram.cli import main
from pytest_vram.reports.model import read_report


def run(*words: object) -> Result:
    return CliRunner().invoke(main, list(map(str, words)))


@pytest.fixture
def write(tmp_path):
    def write(name, *records):
        path = tmp_path / name
        path.write_text(report(*records).to_json())
        return path

    return write


def test_as_before_is_the_answer_yes(write):
    result = run("diff", write("a.json", record()), write("b.json", record(saved=30 * MIB + 9)))
    assert result.exit_code == 0
    assert result.output == "1 test compared: 1 as before\n"


def test_what_grew_is_named_with_its_tensor(write):
    base, head = write("a.json", record()), write("b.json", record(saved=50 * MIB))
    result = run("diff", base, head)
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "1 test compared: 1 grew",
        "",
        "grew: tests/test_a.py::test_it  (sim/a100-80gb/torch-2.13)",
        "  peak allocated           70.0 MiB -> 90.0 MiB  +20.0 MiB (+28.6 %)",
        "  peak of backward         70.0 MiB -> 90.0 MiB  +20.0 MiB (+28.6 %)",
        "  peak of forward          60.0 MiB -> 80.0 MiB  +20.0 MiB (+33.3 %)",
        "  activations at the peak  30.0 MiB -> 50.0 MiB  +20.0 MiB (+66.7 %)",
        "  new or larger allocations alive at the peak",
        "    +20.0 MiB  float16[3, 10]  aten::mm  lm.h  train.py:41 forward",
    ]


def test_json_names_figures_and_sides(write):
    base, head = write("a.json", record()), write("b.json", record(saved=50 * MIB))
    data = json.loads(run("diff", base, head, "--json").output)
    assert (data["format"], data["version"], data["exit_code"]) == ("pytest-vram-diff", 1, 1)
    (test,) = data["tests"]
    assert test["status"] == "grew"
    assert test["changes"][0] == {
        "figure": "peak_allocated",
        "base": 70 * MIB,
        "head": 90 * MIB,
    }
    assert test["head"]["peak_allocated"] - test["base"]["peak_allocated"] == 20 * MIB


def test_what_shrank_is_no_failure(write):
    result = run("diff", write("a.json", record()), write("b.json", record(saved=20 * MIB)))
    assert result.exit_code == 0
    assert result.output.startswith("1 test compared: 1 shrank\n")


def test_the_tolerance_is_a_choice(write):
    base, head = write("a.json", record()), write("b.json", record(saved=30 * MIB + 512))
    assert run("diff", base, head, "--tolerance", "0").exit_code == 1
    assert run("diff", base, head, "--tolerance", "80%").exit_code == 0
    wrong = run("diff", base, head, "--tolerance", "much")
    assert wrong.exit_code == 2
    assert "--tolerance: 'much' is not a tolerance" in wrong.output


def test_a_test_that_newly_fails_counts_though_nothing_grew(write):
    base, head = write("a.json", record()), write("b.json", record(outcome="failed"))
    result = run("diff", base, head)
    assert result.exit_code == 1
    assert result.output.startswith("1 test compared: 1 as before; 1 newly fails\n")
    assert run("diff", head, head).exit_code == 0


def test_markdown_keeps_hostile_ids_in_their_cell(write):
    name = "test_it[a|b`c](x)<b>@all"
    base, head = write("a.json", record(name)), write("b.json", record(name, saved=50 * MIB))
    lines = run("diff", base, head, "--markdown").output.splitlines()
    assert lines[0] == "## ❌ GPU memory: 1 test compared: 1 grew"
    row = lines[4]
    assert row == (
        "| grew | ``tests/test_a.py::test_it[a\\|b`c](x)<b>@all`` | 70.0 MiB | 90.0 MiB | "
        "+20.0 MiB (+28.6 %) |"
    )
    assert "<b>" not in "\n".join(lines[5:])
    both = run("diff", base, head, "--markdown", "--json")
    assert both.exit_code == 2


def test_other_tests_and_other_devices_are_said_not_compared(write):
    rtx = replace(A100, gpu="rtx4090")
    base = write("a.json", record(), record("test_old"))
    head = write("b.json", record(environment=rtx, saved=50 * MIB), record("test_new"))
    result = run("diff", base, head)
    assert result.exit_code == 3
    assert result.output.splitlines()[0] == (
        "0 tests compared; 1 only in head; 1 only in base; 1 on another device"
    )
    assert "  base: peak allocated 70.0 MiB (simulated on a100-80gb, torch 2.13.0)" in result.output
    assert "  head: peak allocated 90.0 MiB (simulated on rtx4090, torch 2.13.0)" in result.output


def test_another_torch_is_compared_and_named(write):
    newer = replace(A100, versions={**A100.versions, "torch": "2.14.1"})
    base, head = write("a.json", record()), write("b.json", record(environment=newer, saved=1))
    result = run("diff", base, head)
    assert result.exit_code == 0
    assert "  environment: torch 2.13.0 -> 2.14.1" in result.output


def test_files_that_are_no_reports(write, tmp_path):
    good = write("a.json", record())
    for content, sentence in (
        ("{}", "not a pytest-vram report (--vram-report FILE.json writes one)"),
        ("[1]", "not a pytest-vram report"),
        ("{]", "bad.json:1: not JSON"),
        (good.read_text().replace('"version": 1', '"version": 9', 1), "a report of version 9"),
        (good.read_text().replace('"ledger"', '"lodger"'), "a damaged report: KeyError: 'ledger'"),
    ):
        bad = tmp_path / "bad.json"
        bad.write_text(content)
        result = run("diff", good, bad)
        assert result.exit_code == 2
        assert sentence in result.output
    missing = run("diff", good, tmp_path / "missing.json")
    assert missing.exit_code == 2
    assert "missing.json" in missing.output


def test_shards_are_joined_and_written_in_other_formats(write, tmp_path):
    first, second = write("1.json", record("test_b")), write("2.json", record("test_a"))
    out = tmp_path / "out"
    result = run("report", first, second, "-o", out / "all.json", "-o", out / "all.csv")
    assert result.exit_code == 0
    assert result.output.startswith("GPU memory: 2 tests passed: ")
    joined = read_report(out / "all.json")
    assert [one.nodeid for one in joined.records] == [
        "tests/test_a.py::test_a",
        "tests/test_a.py::test_b",
    ]
    assert len((out / "all.csv").read_text().splitlines()) == 3
    assert run("report", first).output.startswith("## ✅ GPU memory: 1 test passed\n")


def test_an_output_of_no_known_format_is_bad_usage(write, tmp_path):
    result = run("report", write("1.json", record()), "-o", tmp_path / "all.txt")
    assert result.exit_code == 2
    assert "the suffix decides the format: .codequality.json, .json, .html" in result.output

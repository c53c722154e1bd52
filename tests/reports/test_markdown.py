"""The Markdown report: what it says, within the limit of a comment, whatever tests are called."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from records import HOSTILE, record, report
from traces import MIB

from pytest_vram.marker import Budget
from pytest_vram.record import ScalerStep
from pytest_vram.reports.markdown import LIMIT, code, document, fenced, plain
from pytest_vram.reports.model import Unmeasured


def test_all_is_well():
    text = document(report(record(budget=Budget(peak=140 * MIB), baseline={})))
    assert text.splitlines() == [
        "## ✅ GPU memory: 1 test passed",
        "",
        "|  | test | peak | budget | against baseline | verdict |",
        "| --- | --- | --: | --: | --: | --- |",
        "| ✅ | `tests/test_a.py::test_it` | 70.0 MiB | 50 % of 140.0 MiB | unchanged | ok |",
        "",
        "- `simulated on a100-80gb, torch 2.13.0`",
        "- numbers checked in 1 of 1 tests",
        "- pytest-vram 0.1.0, 2026-01-02T03:04:05+00:00",
    ]


def test_failures_come_first_and_are_unfolded():
    scaler = (ScalerStep(1, 65536.0, 32768.0, True),)
    text = document(
        report(
            record("test_fine"),
            record("test_less", baseline={}, saved=10 * MIB),
            record("test_more", baseline={}, saved=50 * MIB, scaler=scaler),
        )
    )
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[2:] == [
        "| ❌ | `tests/test_a.py::test_more` | 90.0 MiB | +20.0 MiB (+28.6 %) | "
        "1 skipped, scale 32768 | regression |",
        "| ⚠️ | `tests/test_a.py::test_less` | 50.0 MiB | -20.0 MiB (-28.6 %) |  | improvement |",
        "| ✅ | `tests/test_a.py::test_fine` | 70.0 MiB |  |  | ok |",
    ]
    assert text.startswith("## ❌ GPU memory: 1 of 3 tests failed\n")
    assert (
        "<details open><summary>❌ <code>tests/test_a.py::test_more</code> regression</summary>"
    ) in text
    assert "<details><summary>⚠️ <code>tests/test_a.py::test_less</code> improvement" in text
    assert "VRAM regression: peak allocated 90.0 MiB, baseline 70.0 MiB" in text
    assert "test_fine</code>" not in text


def test_an_estimate_has_its_column():
    text = document(report(record(measured=True, saved=31 * MIB)))
    assert "| against estimate |" in text
    assert "| 71.0 MiB | +1.0 MiB (+1.4 %) |" in text


def test_what_else_a_run_has_to_say():
    text = document(
        report(
            record(),
            stopped="interrupted",
            unmeasured=tuple(Unmeasured(f"t::{n}", "not run") for n in range(5)),
            update="1 recorded",
            refusals=("nothing was pruned: filtered by -k",),
            stale=("tests/test_a.py::test_old",),
        )
    )
    assert "The run was not complete: `interrupted`." in text
    names = "`t::0`, `t::1`, `t::2`, `t::3`, `t::4`"
    assert f"5 marked tests have no figures, not run: {names}." in text
    assert text.startswith("## ⚠️ GPU memory: 1 test passed\n")
    assert "Baselines: 1 recorded." in text
    assert "Baselines: `nothing was pruned: filtered by -k`" in text
    assert "1 baseline belongs to tests that are gone" in text


def test_nothing_was_measured():
    text = document(report(unmeasured=(Unmeasured("t::x", "skipped in setup"),)))
    assert text.startswith("## ⚠️ GPU memory: no test was measured\n")


def test_a_test_that_failed_by_itself():
    text = document(report(record(outcome="failed")))
    assert "the test itself failed; its memory was within bounds" in text


def test_hundreds_of_tests_stay_within_a_comment():
    records = [
        record(f"test_it[{number}-{'x' * 80}]", baseline={}, saved=50 * MIB)
        for number in range(400)
    ]
    text = document(report(*records, record("test_fine")))
    assert 0.8 * LIMIT < len(text) <= LIMIT
    table = sum(line.startswith("| ❌") for line in text.splitlines())
    assert f"{401 - table} more tests are in the full report." in text
    details = text.count("<details")
    assert details == text.count("</details>") > 10
    assert f"The details of {400 - details} more tests are in the full report." in text
    assert len(re.findall("^```", text, re.M)) == 2 * details


# ---- hostile input


@pytest.mark.parametrize("name", HOSTILE)
def test_ids_mean_nothing(name):
    """Read as CommonMark with GFM's tables: one row with the id as code, and no markup but ours."""
    made = record(name, baseline={}, saved=50 * MIB)
    text = document(report(replace(made, findings=(replace(made.findings[0], sentence=name),))))
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    inline = [token for token in tokens if token.type == "inline"]
    kinds = {child.type for token in inline for child in token.children}
    assert kinds == {"text", "code_inline"}
    rows = [at for at, token in enumerate(tokens) if token.type == "tr_open"]
    assert len(rows) == 2
    cells = [token for token in tokens[rows[1] :] if token.type == "inline"][:5]
    assert cells[1].children[0].content == plain(f"tests/test_a.py::{name}").strip()
    assert cells[4].content == "regression"
    blocks = [token.content for token in tokens if token.type == "html_block"]
    assert [re.sub(r"<code>[^<>]*</code>", "", block).strip() for block in blocks] == [
        "<details open><summary>❌  regression</summary>",
        "</details>",
    ]
    (fence,) = [token for token in tokens if token.type == "fence"]
    assert fence.content.startswith(plain(name.splitlines()[0]))


@given(text=st.one_of(st.sampled_from(HOSTILE), st.text(alphabet="`|\\ a\n<")))
def test_a_code_span_ends_where_it_should(text):
    """CommonMark 6.1: a span ends at the first run of as many backticks as it began with."""
    span = code(text)
    fence = re.match("`+", span)[0]
    body = span[len(fence) : -len(fence)]
    assert fence not in re.findall("`+", body)
    assert not body.startswith("`")
    assert not body.endswith("`")
    assert "\n" not in span


@given(text=st.text(alphabet="`~ a\n|<"))
def test_a_fence_is_longer_than_what_it_holds(text):
    first, *body, last = fenced(text)
    assert first == f"{last}text"
    assert all(len(run) < len(last) for line in body for run in re.findall("`+", line))

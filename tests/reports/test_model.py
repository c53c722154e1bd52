"""The JSON report: it reads back equal, its schema says everything, shards join."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import HOSTILE, record, report
from traces import MIB

from pytest_vram.marker import Budget
from pytest_vram.record import ScalerStep
from pytest_vram.reports.model import Report, ReportError, Unmeasured, merge, read_report, schema

SCALER = (ScalerStep(1, 65536.0, 32768.0, True), ScalerStep(2, 32768.0, math.inf, False))


def full() -> Report:
    """Every field in use, non-finite numbers among them."""
    return report(
        record("test_a", budget=Budget(peak=50 * MIB), scaler=SCALER, losses=(1.5, math.inf)),
        record("test_b", baseline={}, saved=50 * MIB, measured=True),
        attempts=(record("test_b", outcome="rerun"),),
        unmeasured=(Unmeasured("tests/test_a.py::test_c", "skipped in setup"),),
        stopped="interrupted",
        filters=("filtered by -k",),
        update="1 recorded",
        refusals=("no",),
        problems=("disk full",),
        stale=("tests/test_a.py::test_old",),
        extra={"host": {"name": "x", "load": math.nan}},
        exit_status=2,
    )


def test_it_reads_back_equal():
    before = replace(full(), extra={})
    assert Report.from_dict(json.loads(before.to_json())) == before


def test_json_has_no_nan_and_says_what_is_not_finite():
    text = full().to_json()
    raw = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert raw["tests"][0]["losses"] == [1.5, "inf"]
    assert raw["tests"][0]["scaler"][1]["scale_after"] == "inf"
    assert raw["extra"] == {"host": {"name": "x", "load": "nan"}}


def test_one_test_is_one_line():
    lines = full().to_json().splitlines()
    assert [json.loads(line.rstrip(","))["nodeid"] for line in lines if '"nodeid"' in line[:200]]
    assert len(lines) < 30


def test_what_is_derived_is_there_for_readers():
    raw = json.loads(full().to_json())
    assert [test["verdict"] for test in raw["tests"]] == ["over-budget", "regression"]
    assert raw["tests"][0]["skipped_steps"] == 1
    assert raw["totals"] == {"tests": 2, "ok": 0, "warned": 0, "failed": 2, "unmeasured": 1}


def test_the_schema_is_one_and_describes_every_field():
    """Objects of ours allow no others: a field that the schema does not know is an error here."""
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(json.loads(full().to_json()), schema())


@pytest.mark.parametrize("where", ["", "tests/0", "tests/0/ledger", "tests/0/timeline"])
def test_the_schema_refuses_fields_it_does_not_know(where):
    raw = json.loads(full().to_json())
    place = raw
    for key in where.split("/") if where else ():
        place = place[int(key) if key.isdigit() else key]
    place["unheard_of"] = 1
    with pytest.raises(jsonschema.ValidationError, match="unheard_of"):
        jsonschema.validate(raw, schema())


@given(name=st.one_of(st.sampled_from(HOSTILE), st.text()))
def test_any_test_id_survives(name):
    before = report(replace(record(), nodeid=name))
    assert Report.from_dict(json.loads(before.to_json())).records[0].nodeid == name


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "other"}, "not a pytest-vram report"),
        ({"version": 2}, "a report of version 2 (pytest-vram 0.1.0): this pytest-vram"),
        ({"tests": [{}]}, "a damaged report: KeyError"),
        ({"tests": 3}, "a damaged report: TypeError"),
        ({"baselines": []}, "a damaged report: TypeError"),
    ],
)
def test_what_is_no_report_is_refused_with_the_reason(change, sentence):
    with pytest.raises(ReportError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        Report.from_dict({**full().to_dict(), **change})


def test_a_file_of_deep_brackets_is_refused(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ReportError, match=r"deep\.json"):
        read_report(path)


# ---- shards


def test_shards_join_and_the_last_report_of_a_test_counts():
    first = report(
        record("test_a"),
        record("test_b", outcome="failed"),
        unmeasured=(Unmeasured("tests/test_a.py::test_c", "not run"),),
        filters=("filtered by -k",),
        exit_status=1,
    )
    second = report(
        record("test_b"),
        record("test_c"),
        filters=("filtered by -k",),
        created="2026-01-02T04:00:00+00:00",
    )
    joined = merge([first, second])
    assert [(one.nodeid[-6:], one.outcome) for one in joined.records] == [
        ("test_a", "passed"),
        ("test_b", "passed"),
        ("test_c", "passed"),
    ]
    assert [one.outcome for one in joined.attempts] == ["failed"]
    assert joined.unmeasured == ()
    assert joined.filters == ("filtered by -k",)
    assert joined.exit_status == 1
    assert joined.created == "2026-01-02T04:00:00+00:00"


def test_the_same_test_on_two_devices_is_two_tests():
    here, there = record(), record(environment=replace(record().environment, gpu="rtx4090"))
    assert len(merge([report(here), report(there)]).records) == 2


def test_one_report_joins_to_itself():
    only = full()
    assert merge([only]) is only

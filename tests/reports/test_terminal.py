from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_record import record
from traces import A100, MIB, training

from pytest_vram.comparison import record_of
from pytest_vram.findings import Finding
from pytest_vram.marker import Budget
from pytest_vram.record import PassRecord, ScalerStep
from pytest_vram.reports.terminal import Line, fitted, report
from pytest_vram.session import Summary

H100 = replace(A100, kind="cuda", gpu="NVIDIA H100 80GB HBM3")


def lines(*records: Any, summary: Summary | None = None, **more: Any) -> list[str]:
    return [line.text for line in report(records, summary or Summary(), **more)]


def test_nothing_was_marked() -> None:
    assert lines() == []
    assert lines(verbosity=2) == []


def test_one_simulated_test() -> None:
    assert lines(record()) == [
        "test      device         peak  of budget  verdict",
        "tests/test_a.py",
        "  test_x  a100-80gb  70.0 MiB       70 %  ok",
        "simulated on a100-80gb, torch 2.13.0, to the byte and without values",
        "numbers: 1 by a real run on the CPU",
    ]


def test_prose_goes_on_further_in_on_a_screen() -> None:
    path = "tests/models/a_directory_with_a_long_name/test_transformers_of_every_kind.py:41"
    lines = [
        Line("test_x: peak allocated is now 70.1 MiB, 70 % of the budget", "ok"),
        Line("test_x: the loss scale 65536 is too high for 3 of 20 optimizer steps here", "warn"),
        Line(f"  cause: kept 1.20 GiB and then 350 MiB by {path} after each step"),
    ]
    assert fitted(lines, 40) == [
        Line("test_x: peak allocated is now 70.1 MiB,", "ok"),
        Line("    70 % of the budget", "ok"),
        Line("test_x: the loss scale 65536 is too high", "warn"),
        Line("    for 3 of 20 optimizer steps here", "warn"),
        Line("  cause: kept 1.20 GiB and then 350 MiB"),
        Line("      by"),
        Line(f"      {path}"),
        Line("      after each step"),
    ]
    assert fitted(lines, 160) == lines
    figure = Line("peak allocated is now 70.1 MiB")
    assert fitted([figure], 28) == [Line("peak allocated is now"), Line("    70.1 MiB")]


def test_all_columns() -> None:
    stored = record_of(training(saved=20 * MIB).ledger(), A100)
    scaler = (ScalerStep(1, 65536.0, 32768.0, True), ScalerStep(2, 32768.0, 32768.0, False))
    measured = record(
        environment=H100,
        answered="measured",
        numerics="cuda",
        stored=stored,
        estimate=training(saved=29 * MIB).ledger(),
        scaler=scaler,
        findings=(Finding("regression", "fail", "VRAM regression: ..."),),
        nodeid="tests/test_a.py::TestGpt2::test_trains_within_its_budget[fp16-flash-attention]",
    )
    plain = record(budget=Budget(), numerics="", nodeid="tests/test_a.py::test_y")
    text = lines(measured, plain)
    assert text[:7] == [
        "test    device           peak  of budget  baseline  estimate  scaler  verdict",
        "tests/test_a.py",
        "  TestGpt2::test_trains_within_its_budget[fp16-flash-attention]",
        "        H100 80GB    70.0 MiB       70 %   +16.7 %    +1.4 %  1 skip  regression",
        "  test_y",
        "        a100-80gb    70.0 MiB                                         ok",
        "measured on NVIDIA H100 80GB HBM3, torch 2.13.0",
    ]
    assert text[7:] == [
        "simulated on a100-80gb, torch 2.13.0, to the byte and without values",
        "numbers: 1 on the GPU, in the same run, 1 not checked",
    ]
    assert all(len(line) <= 80 for line in text)


@pytest.mark.parametrize("length", [1, 10, 40, 200])
def test_eighty_columns(length: int) -> None:
    records = [
        record(
            nodeid="tests/test_a.py::test_" + "x" * length,
            scaler=(ScalerStep(1, 65536.0, 65536.0, False),),
            stored=record_of(training().ledger(), A100),
            findings=(Finding("out-of-memory", "fail", ""),),
        )
    ]
    for text in lines(*records):
        assert len(text) <= 80 or "xxx" in text
        assert text == text.rstrip()


def test_verbose_adds_the_ledger() -> None:
    passes = (PassRecord("simulation", "a100", 0.25), PassRecord("numerics", "cpu", 1.5))
    text = lines(record(passes=passes, notes=("something",)), verbosity=1)
    at = text.index("tests/test_a.py::test_x  (simulated on a100-80gb, torch 2.13.0)")
    assert text[at + 1 :] == [
        "  peak allocated 70.0 MiB (73400320 bytes),",
        "      reserved 80.0 MiB (10.0 MiB of it cached)",
        "  alive then (backward, step 2): 70.0 MiB",
        "    parameters       10.0 MiB  14 %",
        "    gradients        10.0 MiB  14 %",
        "    optimizer state  20.0 MiB  29 %",
        "    activations      30.0 MiB  43 %",
        "  peaks by phase: setup 10.0 MiB, forward 60.0 MiB, backward 70.0 MiB,",
        "      optimizer 41.0 MiB, between 30.0 MiB",
        "  alive after each step: 30.0 MiB, 30.0 MiB",
        "  largest allocations",
        "    30.0 MiB  float16[3, 10]   aten::mm  lm.h  train.py:41 forward",
        "    20.0 MiB  optimizer state",
        "    10.0 MiB  float32[5, 2]    weight",
        "    10.0 MiB  gradients",
        "  note: something",
        "  passes: simulation 0.2 s, numerics 1.5 s",
    ]


def test_quiet_says_only_what_matters() -> None:
    warned = record(findings=(Finding("improvement", "warn", "VRAM improvement: ..."),))
    new = record(findings=(Finding("no-baseline", "note", "no VRAM baseline"),), notes=("n",))
    assert lines(warned, new, verbosity=-1) == ["test_x: VRAM improvement: ..."]
    assert lines(new, verbosity=-1) == []
    assert lines(record(), summary=Summary(update="1 recorded"), verbosity=-1) == [
        "vram baselines: 1 recorded"
    ]


def test_notes_are_told_once() -> None:
    note = "numbers were not checked: --vram-numerics off"
    one = record(notes=(note,))
    two = record(nodeid="tests/test_a.py::test_y", notes=(note, "else"))
    assert lines(one, two)[-2:] == [f"2 tests: {note}", "test_y: else"]


def test_updates_refusals_problems_and_stale_entries() -> None:
    summary = Summary(
        update="2 recorded",
        refusals=["nothing was pruned: filtered by -k"],
        problems=["vram_baselines/a.yaml: not written"],
        stale=["a.py::t"],
        failed=True,
    )
    found = report([], summary)
    assert [(line.mood, line.text) for line in found] == [
        ("fail", "1 baseline is of tests that are gone: pytest --vram-update=prune removes them"),
        ("fail", "  a.py::t"),
        ("ok", "vram baselines: 2 recorded"),
        ("warn", "vram baselines: nothing was pruned: filtered by -k"),
        ("fail", "vram baselines: vram_baselines/a.yaml: not written"),
    ]


def test_the_verbose_ledger_fits_into_80_columns() -> None:
    script = training()
    frames = (
        "src/package/with/a/long/path/to/the/modules/of/a/model/modeling_something.py:1041 loss",
        "train.py:41 forward",
        "tests/training/test_language_models.py:113 attention_scores",
    )
    for at, frame in enumerate(frames):
        module = f"model.transformer.layers.{at}.attention.output.projection.lora_A.default"
        script.take(
            "activations",
            (50 + at) * MIB,
            shape=(4, 1024, 50257, at),
            dtype="float32",
            operator="aten::_scaled_dot_product_efficient_attention",
            module=module,
            frame=frame,
        )
    made = script.ledger()
    many = replace(made, phases={f"phase {at}": at * MIB for at in range(20)}, steps=made.steps * 9)
    text = lines(record(ledger=many, notes=("a word " * 30,)), verbosity=1)
    assert max(map(len, text)) <= 80
    found = text.index("  largest allocations")
    assert text[found + 1 : found + 8] == [
        "    52.0 MiB  float32[4, 1024, 50257, 2]",
        "              aten::_scaled_dot_product_efficient_attention",
        "              …l.transformer.layers.2.attention.output.projection.lora_A.default",
        "              tests/training/test_language_models.py:113 attention_scores",
        "    51.0 MiB  float32[4, 1024, 50257, 1]",
        "              aten::_scaled_dot_product_efficient_attention",
        "              …l.transformer.layers.1.attention.output.projection.lora_A.default",
    ]
    assert text[found + 12] == (
        "              …ng/path/to/the/modules/of/a/model/modeling_something.py:1041 loss"
    )


def test_marked_tests_without_figures_are_listed() -> None:
    summary = Summary(
        missing={"lost with its worker": ["a.py::x"], "not run": [f"a.py::y{n}" for n in range(12)]}
    )
    assert lines(summary=summary) == [
        "VRAM not checked: 1 marked test was lost with its worker",
        "  a.py::x",
        "VRAM not checked: 12 marked tests were not run",
        *(f"  a.py::y{n}" for n in range(10)),
        "  and 2 more (-v lists them)",
    ]
    assert len(lines(summary=summary, verbosity=1)) == 15

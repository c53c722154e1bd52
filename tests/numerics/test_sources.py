"""Which statement adds to a name, read from the source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from pytest_vram.numerics.sources import Scope
from pytest_vram.places import shown_from

SOURCE = """
class Fit:
    def __init__(self):
        self.history = []

    def step(self, out):
        self.history.append(out)

    @staticmethod
    def loop(model, data):
        total, hidden, logs, best = 0.0, None, {"loss": []}, []
        for x in data:
            out, hidden = model(x, hidden)
            total += out
            logs["loss"].append(out)
            best = [*best, out]
        mean = total / 2
        return mean, best


def other(total):
    total.append(1)
"""


@pytest.fixture
def code(tmp_path: Path) -> Iterator[dict[str, CodeType]]:
    path = tmp_path / "fit.py"
    path.write_text(SOURCE)
    namespace: dict[str, Any] = {}
    exec(compile(SOURCE, str(path), "exec"), namespace)
    functions = dict(vars(namespace["Fit"]))
    functions["loop"] = functions["loop"].__func__
    with shown_from(tmp_path):
        yield {n: f.__code__ for n, f in functions.items() if isinstance(f, FunctionType)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("total", "fit.py:14 loop: total += out"),
        ("hidden", "fit.py:13 loop: out, hidden = model(x, hidden)"),
        ("logs['loss']", 'fit.py:15 loop: logs["loss"].append(out)'),
        ("logs['loss'][0]", 'fit.py:15 loop: logs["loss"].append(out)'),
        ("best", "fit.py:16 loop: best = [*best, out]"),
        ("self.history", "fit.py:7 step: self.history.append(out)"),
        ("mean", ""),
        ("out", ""),
        ("unknown", ""),
    ],
)
def test_the_statement_that_adds_to_a_name(
    code: dict[str, CodeType], name: str, expected: str
) -> None:
    assert Scope(name, code["loop"]).filled_at() == expected


def test_a_variable_belongs_to_its_function(code: dict[str, CodeType]) -> None:
    assert Scope("total", code["step"]).filled_at() == ""


@pytest.mark.parametrize("where", [None, compile("1", "<string>", "eval")])
def test_code_without_a_source(where: CodeType | None) -> None:
    assert Scope("total", where).filled_at() == ""

"""Progress on a terminal: seen while it lasts, without a trace afterwards."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_vram.reports.progress import Progress, to_terminal

SOURCE = """
import pytest, torch
from torch import nn

@pytest.mark.vram_budget("1 GiB", steps=1, warmup=0)
def test_trains(vram):
    model = nn.Linear(8, 8).to(vram.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    vram.train(model, optimizer, lambda: model(torch.ones(2, 8, device=vram.device)).sum())

def test_plain(): pass
"""


class Screen:
    """The few things a terminal does with what pytest and Progress write (ECMA-48, DEC)."""

    def __init__(self, width: int = 80) -> None:
        self.lines = [""]
        self.column = 0
        self.width = width
        self.wrap = True
        self.saved = (0, 0)
        self.seen: list[str] = []

    def feed(self, text: str) -> Screen:
        for control, character in re.findall(r"(\x1b\[[?0-9;]*[A-Za-z]|\x1b[78])|(.|\n)", text):
            if control == "\x1b7":
                self.saved = (len(self.lines) - 1, self.column)
            elif control == "\x1b8":
                self.seen.append(self.lines[-1])
                assert self.saved[0] == len(self.lines) - 1, "progress moved to another line"
                self.column = self.saved[1]
            elif control == "\x1b[K":
                self.lines[-1] = self.lines[-1][: self.column]
            elif control in ("\x1b[?7l", "\x1b[?7h"):
                self.wrap = control.endswith("h")
            elif character == "\n":
                self.lines.append("")
                self.column = 0
            elif character == "\r":
                self.column = 0
            elif character:
                self._put(character)
        return self

    def _put(self, character: str) -> None:
        if self.column == self.width:
            if self.wrap:
                self.lines.append("")
                self.column = 0
            else:
                self.column -= 1
        line = self.lines[-1].ljust(self.column)
        self.lines[-1] = line[: self.column] + character + line[self.column + 1 :]
        self.column += 1


@pytest.fixture
def shown():
    written: list[str] = []
    progress = Progress(written.append)
    return progress, lambda: Screen().feed("tests/test_a.py ." + "".join(written))


def test_a_text_stands_right_of_the_line_and_goes(shown):
    progress, screen = shown
    progress.show("test_a: simulating on a100-80gb")
    assert screen().lines == ["tests/test_a.py .  test_a: simulating on a100-80gb"]
    assert screen().column == len("tests/test_a.py .")
    progress.show("test_a: short")
    assert screen().lines == ["tests/test_a.py .  test_a: short"]
    progress.show("")
    assert screen().lines == ["tests/test_a.py ."]


def test_a_long_text_is_cut_by_the_terminal_and_does_not_wrap(shown):
    progress, screen = shown
    progress.show("x" * 200)
    assert len(screen().lines) == 1
    assert len(screen().lines[0]) == 80
    progress.show("")
    assert screen().lines == ["tests/test_a.py ."]


def test_hostile_names_cannot_move_the_cursor(shown):
    progress, screen = shown
    progress.show("a\nb\x1b[2Jc\rd\u202e")
    assert screen().lines == ["tests/test_a.py .  a?b?[2Jc?d?"]


def test_workers_tests_are_named_while_they_run(shown):
    progress, screen = shown
    for change, text in (
        (lambda: progress.started("tests/test_a.py::test_x"), "  running test_a.py::test_x"),
        (
            lambda: progress.started("tests/test_b.py::test_y"),
            "  running test_a.py::test_x, test_b.py::test_y",
        ),
        (lambda: progress.finished("tests/test_a.py::test_x"), "  running test_b.py::test_y"),
        (lambda: progress.finished("tests/test_b.py::test_y"), ""),
    ):
        with progress.aside():
            change()
            assert screen().lines == ["tests/test_a.py ."]
        progress.show_running()
        assert screen().lines == ["tests/test_a.py ." + text]


def test_removing_nothing_writes_nothing():
    written: list[str] = []
    Progress(written.append).show("")
    Progress(None).show("never")
    assert written == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "options", "term"),
    [
        (io.StringIO(), {}, "xterm"),
        (Terminal(), {"quiet": True}, "xterm"),
        (Terminal(), {"captured": False}, "xterm"),
        (Terminal(), {}, "dumb"),
        (Terminal(), {}, "xterm"),  # no descriptor behind it
    ],
)
def test_where_nothing_may_be_shown(monkeypatch, out, options, term):
    monkeypatch.setenv("TERM", term)
    progress = to_terminal(out, **{"quiet": False, "captured": True, **options})
    progress.show("something")
    assert out.getvalue() == ""


def on_terminal(path: Path, *args: str, source: str = SOURCE) -> str:
    """What pytest writes to a terminal of 80 columns."""
    pty = pytest.importorskip("pty", reason="needs pseudo-terminals")
    (path / "test_a.py").write_text(source)
    (path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    parent, child = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "PYTEST_ADDOPTS": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args],
        cwd=path,
        env=environ,
        stdout=child,
        stderr=child,
        stdin=subprocess.DEVNULL,
    )
    os.close(child)
    chunks = []
    while True:
        try:
            chunk = os.read(parent, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(parent)
    assert process.wait() == 0
    return b"".join(chunks).decode()


def test_on_a_real_terminal_the_passes_are_seen_and_leave_no_trace(tmp_path):
    screen = Screen().feed(on_terminal(tmp_path, "--color=no"))
    assert "test_a.py   test_trains: simulating on a100-80gb" in screen.seen
    assert "test_a.py   test_trains: checking numbers on the CPU" in screen.seen
    (line,) = [line for line in screen.lines if line.startswith("test_a.py ..")]
    assert re.fullmatch(r"test_a\.py \.\. +\[100%\]", line)
    assert not any("simulating" in line for line in screen.lines)


@pytest.mark.parametrize("option", ["-q", "-s"])
def test_quiet_and_uncaptured_runs_are_left_alone(tmp_path, option):
    text = on_terminal(tmp_path, option, "--vram-numerics=off")
    assert "\x1b7" not in text
    assert "simulating" not in text


@pytest.mark.parametrize("verbose", [(), ("-v",)])
def test_tests_of_workers_are_seen_and_leave_no_trace(tmp_path, verbose):
    pytest.importorskip("xdist")
    text = on_terminal(tmp_path, "--color=no", "-n1", "--vram-numerics=off", *verbose)
    screen = Screen().feed(text)
    assert any("running test_a.py::test_trains" in line for line in screen.seen)
    assert not any("running" in line for line in screen.lines)


def test_sentences_of_the_report_are_broken_between_words(tmp_path):
    source = SOURCE.replace("\ndef test_plain(): pass", "    torch.cuda.CUDAGraph()")
    lines = on_terminal(tmp_path, "--color=no", source=source).replace("\r", "").splitlines()
    at = lines.index("test_trains: numbers were not checked: torch.cuda.CUDAGraph at test_a.py:10")
    assert lines[at + 1] == "    test_trains: a CPU replays no graphs"

"""Updates that are killed, interrupted, or have no room: real processes, real files."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
from cheap import CheapProject, without_privileges

from pytest_vram.reports.model import read_report

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")


@pytest.fixture
def cheap(tmp_path: Path) -> CheapProject:
    return CheapProject(tmp_path / "project")


# ---- SIGKILL


def test_killed_runs_lose_and_break_nothing(cheap: CheapProject) -> None:
    """Two runs at once with four workers each; the slow stage kills two hundred times."""
    assert Killer(cheap, seed=1).kill(6) >= 6


@pytest.mark.slow
def test_two_hundred_kills(tmp_path: Path) -> None:
    assert Killer(CheapProject(tmp_path / "project", modules=8), seed=2).kill(200) >= 200


class Killer:
    """Starts two runs at once, each with four workers; kills workers while tests run and both
    controlling processes while they update; checks the store after every such round."""

    def __init__(self, project: CheapProject, seed: int) -> None:
        self.project = project
        self.seed = seed
        self.window = 0.2  # seconds that an update takes
        self.killed: list[int] = []
        self.said: dict[str, str] = {}

    def kill(self, least: int) -> int:
        """How many processes were killed: ``least`` or, to end a round, more."""
        project, generation = self.project, 0
        while len(self.killed) < least:
            generation += 1
            before = project.peaks()
            self._round(generation)
            self._check(before, generation)
        for who in "ab":
            code, output = project.run("-n4", who=who, generation=generation + 1)
            assert code == 0, output
        final = project.expected("a", generation + 1) | project.expected("b", generation + 1)
        assert project.peaks() == final
        assert project.left_behind() == []
        return len(self.killed)

    def _round(self, generation: int) -> None:
        for note in self.project.notes.iterdir():
            note.unlink()
        hunts = [threading.Thread(target=self._hunt, args=(who, generation)) for who in "ab"]
        for hunt in hunts:
            hunt.start()
        for hunt in hunts:
            hunt.join()

    def _hunt(self, who: str, generation: int) -> None:
        """One run, from its start to its end or ours."""
        dice = random.Random(f"{self.seed} {who} {generation}")
        output = self.project.path / f"output-{who}"
        with output.open("w") as file:
            process = self.project.start("-n4", who=who, generation=generation, stdout=file)
        try:
            for pid in islice(self._workers(who, process), 3):
                time.sleep(dice.uniform(0, 0.02))
                self._kill(pid)
            self._kill_in_update(who, process, dice.random())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and workers that outlived it
            process.wait()
        self.said[who] = output.read_text()

    def _workers(self, who: str, process: subprocess.Popen[str]) -> Iterator[int]:
        """Process ids of workers that have collected, as they come up."""
        seen: set[int] = set()
        while not self._when(f"{who}-updates") and process.poll() is None:
            for note in self.project.notes.glob(f"{who}-worker-*"):
                pid = int(note.name.rpartition("-")[2])
                if pid not in seen:
                    seen.add(pid)
                    yield pid
            time.sleep(0.001)

    def _kill_in_update(self, who: str, process: subprocess.Popen[str], share: float) -> None:
        """At ``share`` of the time that an update takes."""
        while not (begun := self._when(f"{who}-updates")):
            over = process.poll() is not None
            assert not over or self._when(f"{who}-updates"), f"{who} ended without an update"
            time.sleep(0.001)
        while time.time() < begun + share * self.window:
            time.sleep(0.001)
        if ended := self._when(f"{who}-updated"):
            self.window = ended - begun  # too late: that one is no kill
            process.wait()
        else:
            self._kill(process.pid)
            process.wait()

    def _kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.killed.append(pid)

    def _when(self, name: str) -> float:
        """When a process noted that; 0 if it has not."""
        try:
            return (self.project.notes / name).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _check(self, before: dict[tuple[str, str], int], generation: int) -> None:
        now, peak = self.project.peaks(), self.project.peak(generation)  # every file can be read
        assert before.keys() <= now.keys()
        for name, size in now.items():
            assert size in (before.get(name), peak), (
                f"{name} has neither its old nor its new figure"
            )
        for who, said in self.said.items():
            if self._when(f"{who}-updated"):
                ours = {name for name in now if name[1].startswith(f"test_x[{who}")}
                new = [name for name in ours if now[name] != before.get(name)]
                line = said.partition("vram baselines:")[2].partition("\n")[0]
                counts = re.findall(r"(\d+) (?:recorded|changed|tightened)", line)
                assert len(new) == sum(map(int, counts)), said


def test_a_run_with_workers_leaves_nothing_else(cheap: CheapProject) -> None:
    assert cheap.run("-n2")[0] == 0
    assert list(cheap.temporary.glob("pytest-vram*")) == []
    assert sorted(path.name for path in cheap.store.directory.iterdir()) == [
        ".gitignore", ".lock", "test_m0.yaml", "test_m1.yaml", "test_m2.yaml",
    ]  # fmt: skip


# ---- Ctrl-C

INTERRUPTS = """
import os, signal
replace = os.replace
# A suite that runs in a shell's background ignores SIGINT, and so would what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupted(source, target):
    replace(source, target)
    if os.path.basename(target) == os.environ.get("INTERRUPTED_AFTER"):
        os.kill(os.getpid(), signal.SIGINT)

os.replace = interrupted
"""


def test_ctrl_c_in_the_middle_of_an_update(
    cheap: CheapProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cheap.run()[0] == 0
    with (cheap.path / "conftest.py").open("a") as file:
        file.write(INTERRUPTS)
    monkeypatch.setenv("INTERRUPTED_AFTER", "test_m1.yaml")
    code, output = cheap.run("--vram-report=r.json", generation=1)
    assert code == pytest.ExitCode.INTERRUPTED
    sentence = "vram baselines: interrupted: 1 of 3 files were updated, the others are as they were"
    assert sentence in output
    assert "Traceback" not in output
    assert "KeyboardInterrupt" not in output
    updated = sorted(module for (module, _), peak in cheap.peaks().items() if peak == cheap.peak(1))
    assert updated == [name for name in ("test_m0.py", "test_m1.py") for _ in range(4)]
    assert cheap.left_behind() == []
    assert sentence.endswith(read_report(cheap.path / "r.json").problems[0])
    monkeypatch.setenv("INTERRUPTED_AFTER", "r.json")
    code, output = cheap.run("--vram-report=r.json", "--vram-report=r.md", generation=1)
    assert code == pytest.ExitCode.INTERRUPTED
    assert "vram baselines: 4 changed, 8 unchanged" in output
    assert "vram report: interrupted: not every report was written" in output
    assert not (cheap.path / "r.md").exists()


# ---- no room, no permission


def limit_files(size: int) -> Callable[[], None]:
    """For ``preexec_fn``: no file may grow beyond ``size`` bytes, as on a disk that is full."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_disk_that_is_full(cheap: CheapProject) -> None:
    assert cheap.run()[0] == 0
    before = {path.name: path.read_bytes() for path in cheap.store.directory.glob("*.yaml")}
    assert min(map(len, before.values())) > 2000
    report = cheap.path / "r.json"
    report.write_text("old")
    code, output = cheap.run(
        "--vram-report=r.json", generation=1, preexec_fn=limit_files(2000)
    )  # fmt: skip
    assert code == pytest.ExitCode.TESTS_FAILED
    for name in before:
        assert (
            f"vram baselines: vram_baselines/{name}: not written, it is as it was before: "
            "[Errno 27] File too large"
        ) in output
    assert f"vram report: {report} was not written: File too large" in output
    assert {path.name: path.read_bytes() for path in cheap.store.directory.glob("*.yaml")} == before
    assert report.read_text() == "old"
    assert cheap.left_behind() == []
    assert list(cheap.path.glob(".*.tmp")) == []


def test_a_read_only_checkout(cheap: CheapProject) -> None:
    """Reading works; updating says that it cannot, and changes nothing."""
    assert cheap.run()[0] == 0
    for path in (cheap.path, cheap.store.directory):
        path.chmod(0o555)
    try:
        code, output = cheap.run(generation=1, preexec_fn=without_privileges())
        assert code == pytest.ExitCode.TESTS_FAILED
        assert (
            "vram baselines: vram_baselines is not writable, no baseline was stored: [Errno 13]"
            in output
        )
        assert cheap.peaks() == cheap.expected("a", 0)
    finally:
        for path in (cheap.path, cheap.store.directory):
            path.chmod(0o755)

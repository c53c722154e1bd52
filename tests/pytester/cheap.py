"""A project whose tests report figures that were written beforehand: no torch, no simulation. What
happens to the reports afterwards is real: workers send them, the controlling process updates."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from records import record
from traces import A100, MIB

from pytest_vram.baselines import Store

#: Environment variables of a run: WHO is part of its tests' names, GENERATION chooses the figures,
#: NOTES is a directory where processes tell what they are about to do.
CONFTEST = """
import json, os, pathlib, pytest

HERE = pathlib.Path(__file__).parent
NOTES = pathlib.Path(os.environ["NOTES"])
WHO = os.environ["WHO"]
RECORD = json.loads((HERE / f"record-{os.environ['GENERATION']}.json").read_text())

def note(name):
    (NOTES / f"{WHO}-{name}").touch()

def pytest_generate_tests(metafunc):
    metafunc.parametrize("at", [f"{WHO}{number}" for number in range(4)])

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        report.vram_record = {**RECORD, "nodeid": item.nodeid}
    return report

def pytest_collection_finish(session):
    if hasattr(session.config, "workerinput"):
        note(f"worker-{os.getpid()}")

@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        note("updates")

def pytest_terminal_summary(config):
    if not hasattr(config, "workerinput"):
        note("updated")
"""


class CheapProject:
    """``modules`` files with four tests each, per WHO."""

    def __init__(self, path: Path, modules: int = 3) -> None:
        self.path = path
        self.notes = path / "notes"
        self.notes.mkdir(parents=True)
        self.temporary = path / "temporary"
        self.temporary.mkdir()
        self.modules = [f"test_m{number}.py" for number in range(modules)]
        for name in self.modules:
            (path / name).write_text("def test_x(at): pass\n")
        (path / "conftest.py").write_text(CONFTEST)
        (path / "pytest.ini").write_text("[pytest]\n")
        self.store = Store(path / "vram_baselines", path)

    def start(
        self, *arguments: str, who: str = "a", generation: int = 0, **more: Any
    ) -> subprocess.Popen[str]:
        """A pytest run of its own, in a process group of its own."""
        made = replace(record(saved=self.saved(generation)), file="", worker="")
        figures = self.path / f"record-{generation}.json"
        if not figures.exists():
            figures.write_text(json.dumps(made.to_dict()))
        plugins = ("-p", "xdist", "-p", "pytest_vram.plugin", "-p", "no:cacheprovider")
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *plugins, "--vram-update", *arguments],
            cwd=self.path,
            env={
                **os.environ,
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "TMPDIR": str(self.temporary),  # killed runs leave something there
                "NOTES": str(self.notes),
                "WHO": who,
                "GENERATION": str(generation),
            },
            text=True,
            start_new_session=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **more},
        )

    def run(self, *arguments: str, **more: Any) -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(*arguments, **more)
        output, _ = process.communicate()
        return process.returncode, output

    @staticmethod
    def saved(generation: int) -> int:
        """Far enough apart that an update replaces the figures."""
        return (30 + 20 * (generation % 50)) * MIB

    def peak(self, generation: int) -> int:
        return self.saved(generation) + 40 * MIB

    def peaks(self) -> dict[tuple[str, str], int]:
        """What is stored: peak by module and test. :raises BaselineError: for a broken file."""
        return {
            (module, test): stored[A100.key]["peak_allocated"]
            for module, _ in self.store.modules()
            for test, stored in self.store.tests(module).items()
        }

    def expected(self, who: str, generation: int) -> dict[tuple[str, str], int]:
        return {
            (module, f"test_x[{who}{number}]"): self.peak(generation)
            for module in self.modules
            for number in range(4)
        }

    def left_behind(self) -> list[str]:
        return sorted(path.name for path in self.store.directory.rglob("*.tmp"))


def without_privileges() -> Callable[[], None] | None:
    """For ``preexec_fn``: what is read-only is so for root, too (capabilities(7): root's new
    program gets no capability that is not in the bounding set)."""
    if os.geteuid() != 0:
        return None
    library = ctypes.CDLL(None)

    def drop() -> None:
        drop_from_bounding_set, dac_override = 24, 1
        library.prctl(drop_from_bounding_set, dac_override, 0, 0, 0)

    return drop

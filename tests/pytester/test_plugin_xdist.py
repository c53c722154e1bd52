"""Workers of pytest-xdist ship results; only the controller writes."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
from projects import Project, outcomes

from pytest_vram.reports.model import read_report

DIES = """
import os

@pytest.mark.vram_budget("1 GiB")
def test_dies(vram):
    vram.train(*build(vram.device))
    os._exit(1)
"""

SIX = """
@pytest.mark.vram_budget("1 GiB")
@pytest.mark.parametrize("width", [16, 32, 48])
def test_x(vram, width):
    vram.train(*build(vram.device, width))
"""


@pytest.fixture
def six(project: Project) -> Project:
    project.write(SIX)
    project.write(SIX, "sub/test_b.py")
    return project


def test_the_same_files_with_and_without_workers(six: Project) -> None:
    """Also with groups, which pytest-xdist writes into the ids of tests."""
    six.write("@pytest.mark.xdist_group('gpu')" + SIX)
    result = six.subprocess("-n2", "--dist=loadgroup", "--vram-update=all")
    assert outcomes(result) == {"passed": 6}
    result.stdout.fnmatch_lines(
        [
            "sub/test_b.py",
            "  test_x[[]16] *ok",
            "  test_x[[]32] *ok",
            "  test_x[[]48] *ok",
            "test_a.py",
            "  test_x[[]16] *ok",
            "numbers: 6 not checked",
            "vram baselines: 6 recorded",
        ]
    )
    files = [six.path / "vram_baselines" / name for name in ("test_a.yaml", "sub/test_b.yaml")]
    texts = [path.read_text() for path in files]
    six.run("--vram-update=all").stdout.fnmatch_lines(["vram baselines: 6 unchanged"])
    for path in files:
        path.unlink()
    six.run("--vram-update=all").stdout.fnmatch_lines(["vram baselines: 6 recorded"])
    assert [path.read_text() for path in files] == texts


def test_pruning_with_workers_and_a_lost_one(six: Project) -> None:
    six.run("--vram-update")
    six.write(SIX.replace("48", "50"))
    result = six.subprocess("-n2", "--vram-update=prune")
    result.stdout.fnmatch_lines(["vram baselines: 1 pruned"])
    six.write(DIES, "test_dies.py")
    six.write(SIX.replace("48", "51"))
    result = six.subprocess(
        "-n2", "--vram-update=all", "--vram-report=r.json", "--vram-report=r.md"
    )
    result.stdout.fnmatch_lines(
        [
            "VRAM not checked: 1 marked test was lost with its worker",
            "  test_dies.py::test_dies",
            "vram baselines: 1 recorded, 5 unchanged",
            "vram baselines: nothing was pruned: 1 failed; lost worker gw?",
        ]
    )
    report = read_report(six.path / "r.json")
    assert [(one.nodeid, one.why) for one in report.unmeasured] == [
        ("test_dies.py::test_dies", "lost with its worker")
    ]
    assert len(report.records) == 6
    assert re.fullmatch("lost worker gw.", report.stopped)
    text = (six.path / "r.md").read_text()
    assert text.startswith("## ❌ GPU memory: 6 tests passed, 1 lost with a worker\n")
    assert "1 marked test has no figures, lost with its worker: `test_dies.py::test_dies`." in text


WITHOUT_TORCH = """
import os, pytest

@pytest.fixture
def breaks():
    os._exit(1)

@pytest.mark.vram_budget("1 GiB")
@pytest.mark.parametrize("at", range(6))
@pytest.mark.xdist_group("gpu")
def test_x(breaks, at): pass

def test_unmarked(): pass
"""


def test_all_workers_crash(project: Project) -> None:
    """Nobody is left to say what was collected: the controlling process knows all the same."""
    (project.path / "test_a.py").write_text(WITHOUT_TORCH)
    result = project.subprocess(
        "-n2", "--dist=loadgroup", "--max-worker-restart=0", "--vram-update=all",
        "--vram-report=r.json", "--junitxml=r.xml",
    )  # fmt: skip
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "VRAM not checked: 2 marked tests were lost with its worker",
            *(f"  test_a.py::test_x[[]{at}]" for at in range(2)),
            "VRAM not checked: 4 marked tests were not run",
            *(f"  test_a.py::test_x[[]{at}]" for at in range(2, 6)),
            "vram baselines: nothing was pruned: * failed; lost worker gw*",
        ]
    )
    report = read_report(project.path / "r.json")
    lost, not_run = "lost with its worker", "not run"
    assert [(one.nodeid, one.why) for one in report.unmeasured] == [
        (f"test_a.py::test_x[{at}]", lost if at < 2 else not_run) for at in range(6)
    ]
    assert not (project.path / "vram_baselines").exists()


def test_filters_and_failures_of_workers_reach_the_controller(six: Project) -> None:
    six.write(SIX.replace("1 GiB", "1 KiB"))
    result = six.subprocess("-n2", "--vram-update=prune", "-k", "16", "-rf")
    assert outcomes(result) == {"failed": 1, "passed": 1}
    result.stdout.fnmatch_lines(
        [
            "VRAM over budget: peak allocated *",
            "vram baselines: nothing was pruned: filtered by -k; 1 failed",
        ]
    )


def test_figures_in_junit_files(six: Project) -> None:
    six.run("--junitxml=out.xml", "test_a.py")
    cases = ElementTree.parse(six.path / "out.xml").getroot().iter("testcase")
    for case in cases:
        found = {node.get("name"): node.get("value") for node in case.iter("property")}
        assert found["vram_verdict"] == "ok"
        assert found["vram_budget"] == str(1 << 30)
        assert found["vram_environment"].startswith("sim/a100-80gb/torch-")
        assert 0 < int(found["vram_peak_allocated"]) <= int(found["vram_peak_reserved"])

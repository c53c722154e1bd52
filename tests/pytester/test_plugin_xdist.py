"""Workers of pytest-xdist ship results; only the controller writes."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from projects import Project, outcomes

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
    six.write("import os\ndef test_dies(): os._exit(1)\n", "test_dies.py")
    six.write(SIX.replace("48", "51"))
    result = six.subprocess("-n2", "--vram-update=prune", "--max-worker-restart=0")
    result.stdout.fnmatch_lines(["vram baselines: nothing was pruned: *lost worker gw*"])


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

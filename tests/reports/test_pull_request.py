"""The comment on a pull request, with recorded events and an API that answers as GitHub's does."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
from records import record, report
from traces import MIB

from pytest_vram.reports.markdown import document
from pytest_vram.reports.pull_request import LIMIT, body, main, marker

EVENTS = Path(__file__).parents[2] / "fixtures" / "github"
MARK = "<!-- pytest-vram: gate -->"
BOT = {"user": {"login": "github-actions[bot]", "type": "Bot"}, "author_association": "NONE"}
STRANGER = {"user": {"login": "mallory", "type": "User"}, "author_association": "NONE"}


class GitHub:
    """Comments of one repository; ``refuse`` is the status of every request that writes."""

    def __init__(self) -> None:
        self.comments: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.refuse = 0
        github = self

        class Handler(BaseHTTPRequestHandler):
            def do(self) -> None:
                status, answer = github.answer(self)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = do  # noqa: N815

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, text: str, **author: Any) -> int:
        number = 1000 + len(self.comments)
        self.comments.append({"id": number, "body": text, **author})
        return number

    def answer(self, request: BaseHTTPRequestHandler) -> tuple[int, Any]:
        url = urlparse(request.path)
        self.requests.append((request.command, url.path))
        self.tokens.add(request.headers.get("Authorization"))
        if request.command == "GET":
            page = int(parse_qs(url.query)["page"][0])
            return 200, self.comments[100 * (page - 1) : 100 * page]
        if self.refuse:
            return self.refuse, {"message": "Resource not accessible by integration"}
        length = int(request.headers.get("Content-Length") or 0)
        content = json.loads(request.rfile.read(length)) if length else None
        if request.command == "POST":
            self.add(content["body"], **BOT)
            return 201, self.comments[-1]
        number = int(url.path.rpartition("/")[2])
        (found,) = [one for one in self.comments if one["id"] == number]
        if request.command == "DELETE":
            self.comments.remove(found)
            return 200, None
        found["body"] = content["body"]
        return 200, found


@pytest.fixture
def github() -> Iterator[GitHub]:
    made = GitHub()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def environ(github: GitHub, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "report.md").write_text(document(report(record())))
    return {
        "GITHUB_EVENT_PATH": str(EVENTS / "pull_request.json"),
        "GITHUB_API_URL": github.url,
        "GITHUB_REPOSITORY": "acme/trainer",
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_RUN_ID": "42",
        "GITHUB_SHA": "0d1a26e67d8f5eaf1f6ba5c57fc3c7d91ac0fd1c",
        "GITHUB_TOKEN": "secret",
        "VRAM_DIRECTORY": str(tmp_path),
        "VRAM_NAME": "gate",
    }


def test_the_first_run_comments_and_the_next_ones_keep_it_up_to_date(github, environ, tmp_path):
    assert main(environ) == 0
    (comment,) = github.comments
    lines = comment["body"].splitlines()
    assert lines[0] == MARK
    assert lines[2] == "## ✅ GPU memory: 1 test passed"
    assert lines[-1].endswith("(https://github.com/acme/trainer/actions/runs/42) of 0d1a26e67d8f")
    (tmp_path / "report.md").write_text(document(report(record(baseline={}, saved=50 * MIB))))
    assert main(environ) == 0
    (comment,) = github.comments
    assert "## ❌ GPU memory: 1 of 1 test failed" in comment["body"]
    assert github.requests == [
        ("GET", "/repos/acme/trainer/issues/7/comments"),
        ("POST", "/repos/acme/trainer/issues/7/comments"),
        ("GET", "/repos/acme/trainer/issues/7/comments"),
        ("PATCH", "/repos/acme/trainer/issues/comments/1000"),
    ]
    assert github.tokens == {"Bearer secret"}


def test_the_comparison_with_the_base_branch_comes_first(github, environ, tmp_path):
    (tmp_path / "diff.md").write_text("## ❌ GPU memory: 1 test compared: 1 grew\n")
    main(environ)
    text = github.comments[0]["body"]
    assert text.index("1 test compared") < text.index("GPU memory: 1 test passed")


def test_it_is_found_behind_a_hundred_others_and_doubles_go(github, environ):
    for number in range(150):
        github.add(f"comment {number}", **STRANGER)
    first, double = github.add(f"{MARK}\nold", **BOT), github.add(f"{MARK}\nold", **BOT)
    main(environ)
    assert len(github.comments) == 151
    assert double not in [one["id"] for one in github.comments]
    assert github.comments[-1]["id"] == first
    assert "1 test passed" in github.comments[-1]["body"]


def test_a_strangers_comment_with_our_marker_stays_theirs(github, environ):
    github.add(f"{MARK}\nI am the gate", **STRANGER)
    github.add(f"> {MARK}", **BOT)
    main(environ)
    assert [one["body"].splitlines()[-1][:13] for one in github.comments[:2]] == [
        "I am the gate",
        "> <!-- pytest",
    ]
    assert len(github.comments) == 3


def test_two_gates_have_a_comment_each(github, environ):
    main(environ)
    main({**environ, "VRAM_NAME": "cuda"})
    assert [one["body"].splitlines()[0] for one in github.comments] == [
        MARK,
        "<!-- pytest-vram: cuda -->",
    ]


def test_a_name_cannot_close_the_marker():
    assert marker({"VRAM_NAME": "x --> <b>"}) == "<!-- pytest-vram: x-b -->"
    assert marker({}) == "<!-- pytest-vram: vram -->"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_fork_may_not_write_and_that_is_no_failure(github, environ, capsys, status):
    environ["GITHUB_EVENT_PATH"] = str(EVENTS / "pull_request_from_fork.json")
    github.refuse = status
    assert main(environ) == 0
    assert github.comments == []
    assert capsys.readouterr().out.startswith(
        "::notice title=pytest-vram::this token may not comment on the pull request (from a fork"
    )


def test_an_error_of_githubs_own_is_one(github, environ, capsys):
    github.refuse = 500
    assert main(environ) == 1
    assert "::error title=pytest-vram::no comment on the pull request: POST" in (
        capsys.readouterr().out
    )
    github.server.server_close()


def test_a_push_has_nothing_to_comment_on(github, environ):
    environ["GITHUB_EVENT_PATH"] = str(EVENTS / "push.json")
    assert main(environ) == 0
    assert main({**environ, "GITHUB_EVENT_PATH": "/nowhere"}) == 0
    assert github.requests == []


def test_no_report_is_said(github, environ, tmp_path, capsys):
    (tmp_path / "report.md").unlink()
    assert main(environ) == 0
    assert "::warning title=pytest-vram::no report in" in capsys.readouterr().out
    assert github.requests == []


def test_what_does_not_fit_is_left_out_whole(environ, tmp_path):
    (tmp_path / "diff.md").write_text("## diff\n" + "x" * 10_000)
    (tmp_path / "report.md").write_text("## report\n" + "y" * 60_000)
    text = body(tmp_path, environ)
    assert text is not None
    assert len(text) < LIMIT
    assert "x" * 10_000 in text
    assert re.search(r"^## report\n\nToo long for a comment: see the run\.$", text, re.M)
    assert "y" not in text.partition("## report")[2].partition("Too long")[0]

"""The comment on a pull request, with recorded events and an API that answers as GitHub's does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from forge import BOT, STRANGER, GitHub
from records import record, report
from traces import MIB

from pytest_vram.reports import pull_request
from pytest_vram.reports.markdown import document
from pytest_vram.reports.pull_request import LIMIT, body, main, marker

EVENTS = Path(__file__).parents[2] / "fixtures" / "github"
MARK = "<!-- pytest-vram: gate -->"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_request, "PAUSES", (0.0, 0.0))


@pytest.fixture
def github() -> Iterator[GitHub]:
    made = GitHub()
    yield made
    made.close()


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
        ("GET", "/repos/acme/trainer/issues/7/comments"),
        ("GET", "/repos/acme/trainer/pulls/7"),
        ("PATCH", "/repos/acme/trainer/issues/comments/1001"),
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


def test_an_error_of_githubs_own_is_said_and_decides_nothing(github, environ, capsys):
    github.refuse = 500
    assert main(environ) == 0
    assert capsys.readouterr().out.startswith(
        "::warning title=pytest-vram::no comment on the pull request, see the step summary: POST"
    )
    methods = [method for method, _ in github.requests]
    assert methods.count("POST") == 1  # an answer may have got lost: not twice


def test_a_moment_of_silence_is_waited_for(github, environ):
    github.add(f"{MARK}\nold", **BOT)
    github.refuse = 503

    def recovers(method, path):
        if [one for one, _ in github.requests].count("PATCH") == 2:
            github.refuse = 0

    github.before = recovers
    assert main(environ) == 0
    assert "1 test passed" in github.comments[0]["body"]
    assert [method for method, _ in github.requests].count("PATCH") == 3


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

"""``python -m pytest_vram.reports.pull_request``: one comment on the pull request, kept up to date.

Reads the event and the token from GitHub's environment variables; ``VRAM_DIRECTORY`` is where the
reports are, ``VRAM_NAME`` tells several gates of one pull request apart. A token that may not write
(pull requests from forks) is no failure: the step's summary has the same text.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_vram.reports.markdown import plain

#: GitHub's limit for a comment (REST documentation, "Issue comments").
LIMIT = 65_536
#: Who may have written a comment that is ours, beside bots: people whose token was used.
_TRUSTED = frozenset({"OWNER", "MEMBER", "COLLABORATOR"})


class GitHubError(Exception):
    """The API refused or could not be reached; ``status`` is 0 where there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Api:
    """As much of GitHub's REST API as one comment needs."""

    url: str
    repository: str
    token: str

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """:raises GitHubError:"""
        request = urllib.request.Request(
            f"{self.url}/repos/{self.repository}/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Accept": "application/vnd.github+json",
                "Authorization": f"Bearer {self.token}",
                "Content-Type": "application/json",
                "X-GitHub-Api-Version": "2022-11-28",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise GitHubError(
                f"{method} {path}: {error.code} {error.reason}", error.code
            ) from error
        except OSError as error:
            raise GitHubError(f"{method} {path}: {error}") from error
        return json.loads(text) if text else None

    def comments(self, number: int) -> list[dict[str, Any]]:
        """All comments of a pull request, oldest first."""
        found: list[dict[str, Any]] = []
        page = 1
        while True:
            some = self.call("GET", f"issues/{number}/comments?per_page=100&page={page}")
            found += some
            if len(some) < 100:
                return found
            page += 1


def main(environ: Mapping[str, str] = os.environ) -> int:
    """:returns: 0; 1 if GitHub could not be reached or answered with an error of its own."""
    number = pull_request(environ)
    if number is None:
        print("no pull request: nothing to comment on")
        return 0
    directory = Path(environ.get("VRAM_DIRECTORY") or "vram-report")
    text = body(directory, environ)
    if text is None:
        print(f"::warning title=pytest-vram::no report in {directory}: pytest wrote none")
        return 0
    api = Api(
        environ.get("GITHUB_API_URL", "https://api.github.com"),
        environ.get("GITHUB_REPOSITORY", ""),
        environ.get("GITHUB_TOKEN", ""),
    )
    try:
        print(publish(api, number, marker(environ), text))
    except GitHubError as error:
        if error.status in (401, 403, 404):
            print(
                "::notice title=pytest-vram::this token may not comment on the pull request "
                f"(from a fork, or without pull-requests: write): see the step summary ({error})"
            )
            return 0
        print(f"::error title=pytest-vram::no comment on the pull request: {error}")
        return 1
    return 0


def pull_request(environ: Mapping[str, str]) -> int | None:
    """The number of the pull request that the event is about."""
    try:
        event = json.loads(Path(environ["GITHUB_EVENT_PATH"]).read_text(encoding="utf-8"))
        number = event["pull_request"]["number"]
    except (KeyError, TypeError, OSError, json.JSONDecodeError):
        return None
    return number if isinstance(number, int) else None


def marker(environ: Mapping[str, str]) -> str:
    """The invisible first line by which a comment is found again."""
    name = re.sub(r"[^A-Za-z0-9._]+", "-", environ.get("VRAM_NAME", "")).strip("-")
    return f"<!-- pytest-vram: {name or 'vram'} -->"


def body(directory: Path, environ: Mapping[str, str]) -> str | None:
    """The comment: comparison, report and a link to the run, as much of them as fits; each is
    whole or left out. ``None`` where there is no report."""
    report = _read(directory / "report.md")
    if report is None:
        return None
    diff = _read(directory / "diff.md")
    foot = _link(environ)
    room = LIMIT - len(marker(environ)) - len(foot) - 200
    parts = []
    for part in (diff, report):
        if part is not None and len(part) <= room:
            parts.append(part.strip())
            room -= len(part)
        elif part is not None:
            parts.append(f"{part.splitlines()[0][:500]}\n\nToo long for a comment: see the run.")
    return "\n\n".join([marker(environ), *parts, foot]) + "\n"


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def _link(environ: Mapping[str, str]) -> str:
    server, repository = environ.get("GITHUB_SERVER_URL"), environ.get("GITHUB_REPOSITORY")
    run = environ.get("GITHUB_RUN_ID")
    if not (server and repository and run):
        return ""
    sha = plain(environ.get("GITHUB_SHA", ""))[:12]
    return (
        f"[Summary, and the report with timelines as an artifact]"
        f"({server}/{repository}/actions/runs/{run}) of {sha}"
    )


def publish(api: Api, number: int, mark: str, text: str) -> str:
    """Update our comment, or make it; returns what was done. Doubles, which two runs at once may
    have made, are deleted."""
    ours = [one for one in api.comments(number) if _is_ours(one, mark)]
    if not ours:
        api.call("POST", f"issues/{number}/comments", {"body": text})
        return f"commented on pull request {number}"
    for double in ours[1:]:
        api.call("DELETE", f"issues/comments/{int(double['id'])}")
    api.call("PATCH", f"issues/comments/{int(ours[0]['id'])}", {"body": text})
    return f"updated the comment on pull request {number}"


def _is_ours(comment: Mapping[str, Any], mark: str) -> bool:
    """Anybody can write our marker; only a bot's or a trusted person's comment is overwritten."""
    if not str(comment.get("body") or "").startswith(mark):
        return False
    bot = (comment.get("user") or {}).get("type") == "Bot"
    return bot or comment.get("author_association") in _TRUSTED


if __name__ == "__main__":
    raise SystemExit(main())

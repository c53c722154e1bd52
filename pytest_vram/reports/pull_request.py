"""``python -m pytest_vram.reports.pull_request``: one comment on the pull request, kept up to date.

Reads the event and the token from GitHub's environment variables; ``VRAM_DIRECTORY`` is where the
reports are, ``VRAM_NAME`` tells several gates of one pull request apart. A token that may not write
(pull requests from forks) is no failure: the step's summary has the same text.
"""

from __future__ import annotations

import json
import os
import re
import time
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


#: Waits between attempts at a request that GitHub did not answer, or with an error of its own.
PAUSES = (1.0, 5.0)


class GitHubError(Exception):
    """The API refused or could not be reached; ``status`` is 0 where there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed a moment later."""
        return self.status in (0, 429) or self.status >= 500


@dataclass(frozen=True)
class Api:
    """As much of GitHub's REST API as one comment needs."""

    url: str
    repository: str
    token: str

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer's JSON. What cannot double anything is tried again for a while.

        :raises GitHubError:
        """
        for pause in PAUSES if method != "POST" else ():
            try:
                return self._call(method, path, body)
            except GitHubError as error:
                if not error.passing:
                    raise
            time.sleep(pause)
        return self._call(method, path, body)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
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

    def head(self, number: int) -> str:
        """The newest commit of a pull request; empty if that cannot be found out."""
        try:
            return str(self.call("GET", f"pulls/{number}")["head"]["sha"])
        except (GitHubError, KeyError, TypeError):
            return ""


def main(environ: Mapping[str, str] = os.environ) -> int:
    """:returns: 0. Whatever becomes of the comment, the step's summary has the same text and the
    gate's verdict is pytest's."""
    event = pull_request(environ)
    number = event.get("number")
    if not isinstance(number, int):
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
        print(publish(api, number, marker(environ), text, _sha(event)))
    except GitHubError as error:
        if error.status in (401, 403, 404):
            print(
                "::notice title=pytest-vram::this token may not comment on the pull request "
                f"(from a fork, or without pull-requests: write): see the step summary ({error})"
            )
            return 0
        print(
            "::warning title=pytest-vram::no comment on the pull request, see the step summary: "
            f"{error}"
        )
    return 0


def pull_request(environ: Mapping[str, str]) -> Mapping[str, Any]:
    """The pull request that the event is about; empty if it is about none."""
    try:
        event = json.loads(Path(environ["GITHUB_EVENT_PATH"]).read_text(encoding="utf-8"))
        found = event["pull_request"]
    except (KeyError, TypeError, OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _sha(event: Mapping[str, Any]) -> str:
    """The commit that was pushed. ``GITHUB_SHA`` is the merge with the base branch, which nobody
    has seen."""
    head = event.get("head")
    return str(head.get("sha") or "") if isinstance(head, dict) else ""


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
    sha = plain(_sha(pull_request(environ)) or environ.get("GITHUB_SHA", ""))[:12]
    return (
        f"[Summary, and the report with timelines as an artifact]"
        f"({server}/{repository}/actions/runs/{run}) of {sha}"
    )


def publish(api: Api, number: int, mark: str, text: str, sha: str = "") -> str:
    """Update our comment, or make it; returns what was done. Of doubles, which two runs at once
    make, the oldest stays. A run of another commit than the newest, ``sha``, finds its report out
    of date: it does not overwrite what is there."""
    ours = _ours(api, number, mark)
    if not ours:
        api.call("POST", f"issues/{number}/comments", {"body": text})
        ours = _ours(api, number, mark)
        if len(ours) < 2:
            return f"commented on pull request {number}"
    for double in ours[1:]:
        _delete(api, int(double["id"]))
    newest = api.head(number)
    if sha and newest and newest != sha:
        return f"pull request {number} has a newer commit, {newest[:12]}: its comment is not ours"
    api.call("PATCH", f"issues/comments/{int(ours[0]['id'])}", {"body": text})
    return f"updated the comment on pull request {number}"


def _ours(api: Api, number: int, mark: str) -> list[dict[str, Any]]:
    """Our comments, oldest first: both of two runs at once agree on which one stays."""
    found = [one for one in api.comments(number) if _is_ours(one, mark)]
    return sorted(found, key=lambda one: int(one["id"]))


def _delete(api: Api, comment: int) -> None:
    try:
        api.call("DELETE", f"issues/comments/{comment}")
    except GitHubError as error:
        if error.status != 404:  # another run of ours has just done it
            raise


def _is_ours(comment: Mapping[str, Any], mark: str) -> bool:
    """Anybody can write our marker; only a bot's or a trusted person's comment is overwritten."""
    if not str(comment.get("body") or "").startswith(mark):
        return False
    bot = (comment.get("user") or {}).get("type") == "Bot"
    return bot or comment.get("author_association") in _TRUSTED


if __name__ == "__main__":
    raise SystemExit(main())

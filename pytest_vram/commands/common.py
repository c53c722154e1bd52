"""What all commands share: exit codes, errors, tables at 80 columns, JSON, the choice of a card."""

from __future__ import annotations

import configparser
import json
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pytest_vram.sim.profiles import (
    PROFILES,
    Profile,
    ProfileError,
    find_profile,
    parse_profile_line,
)

if TYPE_CHECKING:
    from rich.console import Console

F = TypeVar("F", bound=Callable[..., Any])


class Exit(IntEnum):
    """Exit codes; documented in docs/cli.md and stable."""

    YES = 0
    NO = 1
    USAGE = 2
    UNKNOWN = 3
    SCRIPT = 4


class Problem(click.ClickException):
    """One sentence for the user, and the exit code that goes with it."""

    def __init__(self, message: str, code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.code = code

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return int(self.code)


def console() -> Console:
    """Where people read: 80 columns unless the terminal says otherwise, no colours in a pipe."""
    from rich.console import Console

    plain = Console(highlight=False, soft_wrap=False)
    return plain if plain.is_terminal else Console(highlight=False, width=80)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", left: int = 1
) -> None:
    """Print a table; the first ``left`` columns are text, the others figures."""
    from rich.table import Table

    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for index, name in enumerate(columns):
        text = index < left
        made.add_column(
            name, justify="left" if text else "right", overflow="fold", no_wrap=not text
        )
    for row in rows:
        made.add_row(*row)
    console().print(made)


def say(text: str = "") -> None:
    """One paragraph, wrapped at the console's width."""
    console().print(text, markup=False)


def emit(data: Any) -> None:
    """Machine-readable output: one JSON document on standard output."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")(
        function
    )


def assumption(function: F) -> F:
    """Of commands that run scripts: what ``vram.assume_selected`` says in a test."""
    return click.option(
        "--assume-selected",
        "selected",
        type=click.FloatRange(0, 1),
        metavar="SHARE",
        help="The share of elements that masks select (and unique finds) whose values are not "
        "there; without it the script stops where one decides.",
    )(function)


class CardType(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A card's name; completes in the shell, and suggests the nearest on a typo."""

    name = "gpu"

    def convert(self, value: Any, param: Any, ctx: Any) -> Profile:
        if isinstance(value, Profile):
            return value
        try:
            return find_profile(value, own_profiles())
        except ProfileError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        names = [*PROFILES, *(card.name for card in own_profiles())]
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


CARD = CardType()


def own_profiles(start: Path | None = None) -> tuple[Profile, ...]:
    """Cards that the project's pytest configuration defines in ``vram_gpus``, one a line.

    The files that pytest itself would take, nearest first: pytest.ini, pyproject.toml, tox.ini.
    """
    folder = (start or Path.cwd()).resolve()
    for place in (folder, *folder.parents):
        for name in ("pytest.ini", "pyproject.toml", "tox.ini"):
            file = place / name
            if file.is_file() and (lines := _gpu_lines(file)):
                return tuple(_own(file, line) for line in lines)
    return ()


def _own(file: Path, line: str) -> Profile:
    try:
        return parse_profile_line(line)
    except ProfileError as error:
        raise Problem(f"{file}: vram_gpus: {error}") from None


def _gpu_lines(file: Path) -> list[str]:
    """The lines of ``vram_gpus``; a file that cannot be read is pytest's to complain about."""
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".toml":
        raw = _toml(text).get("tool", {}).get("pytest", {})
        value = raw.get("ini_options", raw).get("vram_gpus", "")
    else:
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read_string(text)
        except configparser.Error:
            return []
        value = parser.get("pytest", "vram_gpus", fallback="")
    lines = value if isinstance(value, list) else str(value).splitlines()
    return [line.strip() for line in lines if line.strip()]


def _toml(text: str) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10, where pytest brings tomli
        import tomli as tomllib  # type: ignore[import-not-found,no-redef,unused-ignore]
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}


def bill_name(name: str) -> str:
    """``optimizer_state`` as people read it."""
    return name.replace("_", " ")

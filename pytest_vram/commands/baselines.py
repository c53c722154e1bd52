"""``pytest-vram baselines``: what is stored, what it says, what may go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_vram.commands.common import Exit, Problem, bill_name, emit, json_option, say, table
from pytest_vram.quantities import format_bytes

if TYPE_CHECKING:
    from pytest_vram.baseline_text import Record
    from pytest_vram.baselines import Store


@dataclass(frozen=True)
class Entry:
    """One stored test in one environment. ``gone`` says that its file no longer exists."""

    module: str
    test: str
    environment: str
    record: Record
    gone: bool

    @property
    def nodeid(self) -> str:
        return f"{self.module}::{self.test}"


@click.group("baselines", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=Path("vram_baselines"),
    show_default=True,
    help="Where they are, as --vram-baselines says.",
)
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    default=Path("."),
    help="pytest's rootdir (default: here).",
)
@click.pass_context
def command(ctx: click.Context, directory: Path, root: Path) -> None:
    """List, explain and prune the stored baselines."""
    from pytest_vram.baselines import Store

    root = root.resolve()
    place = directory if directory.is_absolute() else root / directory
    if not place.is_dir():
        raise Problem(f"{place}: no baselines there; pytest --vram-update records some")
    ctx.obj = (Store(place, root), root)


def entries(store: Store, root: Path) -> Iterator[Entry]:
    """Everything stored, module by module; a broken file is a :class:`Problem`."""
    from pytest_vram.baselines import BaselineError

    for module, _ in store.modules():
        try:
            tests = store.tests(module)
        except BaselineError as error:
            raise Problem(str(error)) from None
        gone = not (root / module).is_file()
        for test, records in sorted(tests.items()):
            for environment, record in sorted(records.items()):
                yield Entry(module, test, environment, record, gone)


@command.command("list")
@json_option
@click.pass_obj
def list_command(obj: tuple[Store, Path], as_json: bool) -> None:
    """Every stored test with its peak, by environment."""
    found = list(entries(*obj))
    if as_json:
        emit([_as_dict(entry) for entry in found])
        return
    by_environment: dict[str, list[Entry]] = {}
    for entry in found:
        by_environment.setdefault(entry.environment, []).append(entry)
    for environment, some in sorted(by_environment.items()):
        rows = [(_name(entry), *_peaks(entry)) for entry in some]
        table((environment, "allocated", "reserved"), rows)
        say()
    say(f"{len(found)} entries of {len({entry.nodeid for entry in found})} tests.")
    if gone := sorted({entry.module for entry in found if entry.gone}):
        say(f"Their test files are gone: {', '.join(gone)} (pytest-vram baselines prune).")


def _name(entry: Entry) -> str:
    return f"{entry.nodeid} (file gone)" if entry.gone else entry.nodeid


def _peaks(entry: Entry) -> tuple[str, str]:
    figures = (entry.record.get("peak_allocated"), entry.record.get("peak_reserved"))
    first, second = (format_bytes(f) if isinstance(f, int) else "-" for f in figures)
    return first, second


def _as_dict(entry: Entry) -> dict[str, Any]:
    return {
        "nodeid": entry.nodeid,
        "environment": entry.environment,
        "gone": entry.gone,
        "record": dict(entry.record),
    }


@command.command("explain")
@click.argument("test")
@json_option
@click.pass_obj
def explain_command(obj: tuple[Store, Path], test: str, as_json: bool) -> None:
    """Everything stored about TEST (its id, or a part of it)."""
    found = [entry for entry in entries(*obj) if test in entry.nodeid]
    if not found:
        raise Problem(f"no stored test is called {test!r}", Exit.NO)
    if as_json:
        emit([_as_dict(entry) for entry in found])
        return
    for index, entry in enumerate(found):
        if index:
            say()
        _explain(entry)


def _explain(entry: Entry) -> None:
    record = entry.record
    say(f"{entry.nodeid}")
    when = record.get("peak_phase", "")
    step = record.get("peak_step", 0)
    say(f"{entry.environment}{f', peak in {when}, step {step}' if when else ''}")
    rows = [
        (bill_name(name), format_bytes(record[name]), f"{record[name]:,}")
        for name in ("peak_allocated", "peak_reserved", "live_after_step")
        if isinstance(record.get(name), int)
    ]
    rows += [
        (f"  {bill_name(name)}", format_bytes(size), f"{size:,}")
        for name, size in record.get("bills", {}).items()
    ]
    rows += [
        (f"  peak of {name}", format_bytes(size), f"{size:,}")
        for name, size in record.get("phases", {}).items()
    ]
    table(("figure", "size", "bytes"), rows)
    for line in record.get("largest", ()):
        say(f"  {line}")
    versions = ", ".join(f"{name} {value}" for name, value in record.get("versions", {}).items())
    if versions:
        say(f"recorded with {versions}")


@command.command("prune")
@click.option("--yes", is_flag=True, help="Remove them; without it they are only listed.")
@json_option
@click.pass_obj
def prune_command(obj: tuple[Store, Path], yes: bool, as_json: bool) -> None:
    """Remove entries whose test file no longer exists.

    Tests that are gone from a file that is still there are known to pytest alone:
    pytest --vram-update=prune, on a complete run.
    """
    from pytest_vram.baselines import BaselineError, Edit

    store, root = obj
    gone = [entry for entry in entries(store, root) if entry.gone]
    tests = sorted({(entry.module, entry.test) for entry in gone})
    if yes:
        try:
            store.write(Edit(module, test, "", None, "pruned") for module, test in tests)
        except BaselineError as error:
            raise Problem(str(error)) from None
    if as_json:
        emit({"removed" if yes else "would_remove": [f"{m}::{t}" for m, t in tests]})
        return
    for module, test in tests:
        say(f"{module}::{test}")
    count = "1 test" if len(tests) == 1 else f"{len(tests)} tests"
    if not tests:
        say("Nothing to prune: every stored test's file is there.")
    elif yes:
        say(f"{count} removed.")
    else:
        say(f"{count} would be removed; say --yes.")

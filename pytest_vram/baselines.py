"""The store of baselines: one YAML file per test module below one directory, written atomically.

Only the controlling process writes, under a lock between processes, and merges with what is on
disk at that moment: two runs that update at once both keep their entries.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_vram.baseline_text import (
    FIGURES,
    Record,
    Tests,
    TextError,
    dump,
    header_of,
    load,
    new_header,
)
from pytest_vram.files import remove_left_behind, write_whole
from pytest_vram.nodeids import split_id
from pytest_vram.quantities import Tolerance

SUFFIX = ".yaml"


class BaselineError(Exception):
    """A baseline file that cannot be used or written; the message names file, line and remedy."""


class UpdateInterruptedError(BaselineError):
    """Ctrl-C in the middle of an update: some files are new, others as before, all are whole."""


class Store:
    """Reads and writes the baselines below ``directory``; nothing is created by reading."""

    def __init__(self, directory: Path, root: Path) -> None:
        self.directory = directory
        self._root = root
        self._loaded: dict[str, Tests | BaselineError] = {}

    def path(self, module: str) -> Path:
        """The file for the tests of ``module`` (a path relative to the rootdir, with slashes)."""
        path = self.directory / (module.removesuffix(".py") + SUFFIX)
        if not path.resolve().is_relative_to(self.directory.resolve()):
            raise BaselineError(
                f"the baselines of {module} would lie outside {self.shown(self.directory)}: "
                "run pytest with a rootdir that contains its tests (--rootdir)"
            )
        return path

    def shown(self, path: Path) -> str:
        """``path`` as people know it: relative to the rootdir where that is possible."""
        with contextlib.suppress(ValueError):
            return path.relative_to(self._root).as_posix()
        return str(path)

    def environments(self, nodeid: str) -> dict[str, Record]:
        """Everything stored for one test, by environment key. :raises BaselineError:"""
        module, test = split_id(nodeid)
        if module not in self._loaded:
            try:
                self._loaded[module] = self._read(self.path(module))[0]
            except BaselineError as error:
                self._loaded[module] = error
        tests = self._loaded[module]
        if isinstance(tests, BaselineError):
            raise BaselineError(*tests.args)
        return tests.get(test, {})

    def _read(self, path: Path) -> tuple[Tests, str | None]:
        """The tests of one file and its text, ``None`` where there is no file."""
        try:
            text = path.read_bytes().decode("utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return {}, None
        except (OSError, UnicodeDecodeError) as error:
            raise BaselineError(f"{self.shown(path)}: cannot be read: {error}") from None
        try:
            return load(text.replace("\r\n", "\n")), text
        except TextError as error:
            raise BaselineError(
                f"{self.shown(path)}:{error.line}: {error.problem} "
                "(nothing was compared and nothing is overwritten: mend or delete the file)"
            ) from None

    def modules(self) -> Iterator[tuple[str, Path]]:
        """Every module that has a file, with it; sorted."""
        for path in sorted(self.directory.rglob(f"*{SUFFIX}")):
            stem = path.relative_to(self.directory).as_posix().removesuffix(SUFFIX)
            # `docs/guide.txt` keeps its suffix in the name, `test_a.py` does not.
            yield (stem if (self._root / stem).is_file() else f"{stem}.py"), path

    def tests(self, module: str) -> Tests:
        """Everything in the file of one module, read afresh. :raises BaselineError:"""
        return self._read(self.path(module))[0]

    def write(self, edits: Iterable[Edit]) -> None:
        """Merge ``edits`` into the files on disk. A file that cannot be read is left alone, the
        others are written all the same.

        :raises BaselineError: what could not be written and why; no file is half-written.
        """
        by_module: dict[str, list[Edit]] = {}
        for edit in edits:
            by_module.setdefault(edit.module, []).append(edit)
        if not by_module:
            return
        problems: list[str] = []
        done = 0
        try:
            with self._lock():
                for module, some in sorted(by_module.items()):
                    try:
                        self._merge(module, some)
                    except BaselineError as error:
                        problems.append(str(error))
                    done += 1
        except KeyboardInterrupt:
            raise UpdateInterruptedError(
                f"interrupted: {done} of {len(by_module)} files were updated, "
                "the others are as they were"
            ) from None
        finally:
            self._loaded.clear()
        if problems:
            raise BaselineError("\n".join(problems))

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        from filelock import FileLock

        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not os.access(self.directory, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            lock = FileLock(self.directory / ".lock")
            lock.acquire()
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            raise BaselineError(
                f"{self.shown(self.directory)} is not writable, no baseline was stored: {error}"
            ) from None
        try:
            self._ignore()
            yield
        finally:
            lock.release()

    def _ignore(self) -> None:
        """Git sees no lock and nothing half-written. That is a courtesy: without it all is well."""
        path = self.directory / ".gitignore"
        if not path.exists():
            with contextlib.suppress(OSError):
                _write(path, "# pytest-vram\n.lock\n*.tmp\n")

    def _merge(self, module: str, edits: list[Edit]) -> None:
        path = self.path(module)
        tests, text = self._read(path)
        before = {name: dict(records) for name, records in tests.items()}
        for edit in edits:
            edit.apply(tests)
        if tests == before:
            return
        try:
            if not tests:
                path.unlink()
                _remove_empty(path.parent, self.directory)
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            header = header_of(text) if text is not None else new_header(module)
            new = dump(tests, header.replace("\r\n", "\n"))
            _write(path, new.replace("\n", "\r\n") if text and "\r\n" in text else new)
        except OSError as error:
            raise BaselineError(
                f"{self.shown(path)}: not written, it is as it was before: {error}"
            ) from None


def _write(path: Path, text: str) -> None:
    """Under the lock: what a killed writer left is nobody's any more."""
    remove_left_behind(path)
    write_whole(path, text.encode("utf-8"))


def _remove_empty(directory: Path, top: Path) -> None:
    with contextlib.suppress(OSError):
        while directory != top:
            directory.rmdir()
            directory = directory.parent


# ---- what an update does to one entry


@dataclass(frozen=True, slots=True)
class Edit:
    """One change to the store. ``record`` is the new record; ``None`` removes the test with all
    its environments. ``category``: recorded, changed, tightened or pruned."""

    module: str
    test: str
    environment: str
    record: Record | None
    category: str

    def apply(self, tests: dict[str, dict[str, Record]]) -> None:
        if self.record is None:
            tests.pop(self.test, None)
        else:
            tests.setdefault(self.test, {})[self.environment] = self.record


@dataclass(frozen=True, slots=True)
class Counts:
    """How many entries of a run fell into each category."""

    counts: Mapping[str, int] = field(default_factory=dict)

    ORDER = ("recorded", "changed", "tightened", "pruned", "unchanged")

    @classmethod
    def of(cls, categories: Iterable[str]) -> Counts:
        found: dict[str, int] = {}
        for category in categories:
            found[category] = found.get(category, 0) + 1
        return cls(found)

    def __str__(self) -> str:
        """``12 recorded, 3 tightened, 1 pruned``."""
        parts = [f"{self.counts[name]} {name}" for name in self.ORDER if self.counts.get(name)]
        return ", ".join(parts) or "nothing to do"


def edit_for(
    nodeid: str,
    environment: str,
    stored: Record | None,
    now: Record,
    tolerance: Tolerance,
    update: frozenset[str],
) -> Edit | None:
    """What ``--vram-update`` with the categories ``update`` does about one test, if anything."""
    module, test = split_id(nodeid)
    if stored is None:
        return Edit(module, test, environment, now, "recorded") if "new" in update else None
    changed, tighten = "changed" in update, "tighten" in update
    record, grown, shrunk = _settle(stored, now, tolerance.third(), changed, changed or tighten)
    if not grown and not shrunk:
        return None
    return Edit(module, test, environment, record, "changed" if grown else "tightened")


def _settle(
    stored: Record, now: Record, band: Tolerance, may_grow: bool, may_shrink: bool
) -> tuple[Record, bool, bool]:
    """``stored`` with the figures that left ``band`` replaced, and whether any grew or shrank."""
    flags = {"grown": False, "shrunk": False}

    def pick(old: int, new: int) -> int:
        if old == new or not band.exceeded(new - old, old):
            return old
        if new > old and may_grow:
            flags["grown"] = True
            return new
        if new < old and may_shrink:
            flags["shrunk"] = True
            return new
        return old

    record: dict[str, Any] = dict(stored)
    for name in FIGURES:
        if name in stored:
            record[name] = pick(stored[name], now[name])
    for group in ("bills", "phases"):
        if group in stored:
            record[group] = _settle_group(stored[group], now[group], pick, group == "phases")
    if flags["grown"] or flags["shrunk"]:
        for name in ("peak_phase", "peak_step", "largest", "versions"):
            record[name] = now[name]
    return record, flags["grown"], flags["shrunk"]


def _settle_group(
    stored: Mapping[str, int], now: Mapping[str, int], pick: Any, phases: bool
) -> dict[str, int]:
    """Lines of one group. A bill that is absent is 0; a phase that is absent did not run."""
    names = list(dict.fromkeys([*now, *stored]))
    if phases:
        return {
            name: pick(stored[name], now[name]) if name in stored else now[name]
            for name in names
            if name in now
        }
    picked = {name: pick(stored.get(name, 0), now.get(name, 0)) for name in names}
    return {name: size for name, size in picked.items() if size}

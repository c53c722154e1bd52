"""One pytest run in its controlling process: records come in, baselines are written, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_vram.settings import Settings

# The store and its YAML are imported by the methods that need them: a run without marked tests
# does not pay for them.
if TYPE_CHECKING:
    from pytest_vram.baselines import Edit, Store
    from pytest_vram.record import TestRecord


#: What became of a marked test that should have run and has no figures.
LOST, NOT_RUN = "lost with its worker", "not run"


@dataclass
class Collected:
    """What one process collected: ids of marked tests, modules, and why that was not everything."""

    marked: list[str] = field(default_factory=list)  #: in the order of collection
    modules: set[str] = field(default_factory=set)
    filters: list[str] = field(default_factory=list)
    #: Ids as reports have them -> ids as they are stored, where pytest-xdist added a group.
    plain: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "marked": self.marked,
            "modules": sorted(self.modules),
            "filters": self.filters,
            "plain": self.plain,
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Collected:
        return cls(
            list(raw["marked"]), set(raw["modules"]), list(raw["filters"]), dict(raw["plain"])
        )

    def add(self, other: Collected) -> None:
        known = set(self.marked)
        self.marked += [nodeid for nodeid in other.marked if nodeid not in known]
        self.modules |= other.modules
        self.filters += [reason for reason in other.filters if reason not in self.filters]
        self.plain |= other.plain


@dataclass
class Summary:
    """What there is to say at the end of a run. ``failed``: the run must not end green."""

    update: str = ""
    refusals: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    #: Stale tests whose figures a test without a baseline has: old id -> new id.
    renamed: dict[str, str] = field(default_factory=dict)
    #: Marked tests that should have run and have no figures: ids by what became of them.
    missing: dict[str, list[str]] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)  #: files of reports
    unwritten: list[str] = field(default_factory=list)  #: reports that could not be made
    failed: bool = False
    interrupted: bool = False  #: by Ctrl-C, while files were written

    @property
    def silent(self) -> bool:
        """Nothing to say: no update, refusal, problem, stale or missing entry, or report."""
        return self == Summary()


class Session:
    """Collects records and outcomes, then updates the store and says what was done."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.collected = Collected()
        self.summary = Summary()
        #: Every attempt of every marked test, in the order of their reports. Keys are the reports'
        #: ids, to which pytest-xdist may add a group; the records have pytest's own.
        self.attempts: dict[str, list[TestRecord]] = {}
        #: Why a test has no record: ``skipped in setup``; keys as in ``attempts``.
        self._unrecorded: dict[str, str] = {}
        self._bad: set[str] = set()  # items with any phase that did not simply pass
        self._failed = 0  # failures of any test of the run
        self._lost_workers: list[str] = []

    @cached_property
    def store(self) -> Store:
        from pytest_vram.baselines import Store

        return Store(self.settings.baselines, self.settings.rootdir)

    @property
    def records(self) -> list[TestRecord]:
        """The last attempt of every marked test, the one that counts, in the order of collection:
        workers report in any."""
        place = {nodeid: at for at, nodeid in enumerate(self.collected.marked)}
        last = [tries[-1] for nodeid, tries in self.attempts.items() if not self._is_lost(nodeid)]
        return sorted(last, key=lambda record: place.get(record.nodeid, len(place)))

    @property
    def earlier(self) -> list[TestRecord]:
        """The attempts that do not count."""
        return [
            record
            for nodeid, tries in self.attempts.items()
            for record in (tries if self._is_lost(nodeid) else tries[:-1])
        ]

    @property
    def unmeasured(self) -> dict[str, str]:
        """Marked tests without figures, in the order of collection, and why they have none."""
        measured = {record.nodeid for record in self.records}
        plain = self.collected.plain
        why = {plain.get(nodeid, nodeid): text for nodeid, text in self._unrecorded.items()}
        return {
            nodeid: why.get(nodeid, NOT_RUN)
            for nodeid in self.collected.marked
            if nodeid not in measured
        }

    def _is_lost(self, nodeid: str) -> bool:
        return self._unrecorded.get(nodeid) == LOST

    # ---- while the run goes on

    def report(
        self, nodeid: str, when: str, outcome: str, record: Mapping[str, Any] | None
    ) -> None:
        """One phase of one test. ``outcome``: passed, failed, skipped, rerun, xfailed, xpassed."""
        if outcome == "rerun":
            self._bad.discard(nodeid)
        elif outcome != "passed":
            self._bad.add(nodeid)
            self._failed += outcome in ("failed", "xpassed")
        if outcome not in ("passed", "rerun"):
            # pytest-xdist reports the test of a worker that crashed in no phase, as "???".
            lost = when not in ("setup", "call", "teardown")
            self._unrecorded[nodeid] = LOST if lost else f"{outcome} in {when}"
        if when == "call" and record is not None:
            from pytest_vram.record import TestRecord

            self._unrecorded.pop(nodeid, None)  # lost with one worker, run again by another
            made = TestRecord.from_dict(record).with_outcome(outcome)
            self.attempts.setdefault(nodeid, []).append(made)

    def lost_worker(self, name: str) -> None:
        self._lost_workers.append(name)

    # ---- at its end

    def finish(self, stopped: str) -> Summary:
        """Write what ``--vram-update`` asks for and judge stale entries. ``stopped`` says why the
        run ended early, if it did. Called once, in the controlling process."""
        settings, summary = self.settings, self.summary
        for nodeid, why in self.unmeasured.items():
            if why in (LOST, NOT_RUN):
                summary.missing.setdefault(why, []).append(nodeid)
        edits, categories = self._updates()
        prune = "prune" in settings.update
        if prune or (self.attempts and not self.why_incomplete(stopped)):
            reasons = self.why_incomplete(stopped)
            if reasons:
                summary.refusals.append(f"nothing was pruned: {'; '.join(reasons)}")
            else:
                stale = self._stale()
                if prune:
                    edits += stale
                    categories += ["pruned"] * len(stale)
                else:
                    summary.stale = [f"{edit.module}::{edit.test}" for edit in stale]
                    summary.renamed = self._renamed(stale)
                    summary.failed = summary.failed or (settings.strict and bool(stale))
        if settings.update:
            self._write(edits, categories)
        return summary

    def _updates(self) -> tuple[list[Edit], list[str]]:
        """Edits for tests that passed everything else, and the category of each test."""
        if not self.settings.update - {"prune"}:
            return [], []
        from pytest_vram.baselines import BaselineError, edit_for
        from pytest_vram.comparison import record_of

        edits, categories, left_out = [], [], 0
        bad = {self.attempts[nodeid][-1].nodeid for nodeid in self._bad & set(self.attempts)}
        for record in self.records:
            if record.ledger is None or record.nodeid in bad or record.failures:
                left_out += 1
                continue
            key, now = record.environment.key, record_of(record.ledger, record.environment)
            try:
                stored = self.store.environments(record.nodeid).get(key)
            except BaselineError:
                left_out += 1  # its test failed for it already
                continue
            edit = edit_for(
                record.nodeid, key, stored, now, record.budget.baseline, self.settings.update
            )
            if edit is not None:
                edits.append(edit)
            categories.append(edit.category if edit is not None else "unchanged")
        if left_out:
            self.summary.refusals.append(
                f"{left_out} not recorded: only tests that pass everything else are"
            )
        return edits, categories

    def _write(self, edits: list[Edit], categories: list[str]) -> None:
        from pytest_vram.baselines import BaselineError, Counts, UpdateInterruptedError

        counts = Counts.of(categories)
        if self.settings.dry_run:
            self.summary.update = f"dry run, nothing was written; it would be: {counts}"
            return
        try:
            self.store.write(edits)
        except UpdateInterruptedError as error:
            self.summary.problems.append(str(error))
            self.summary.failed = self.summary.interrupted = True
            return
        except BaselineError as error:
            self.summary.problems += str(error).splitlines()
            self.summary.failed = True
            return
        self.summary.update = str(counts)

    def why_incomplete(self, stopped: str) -> list[str]:
        """Why this run cannot tell which stored entries are stale; empty if it can."""
        reasons = list(self.collected.filters)
        if stopped:
            reasons.append(stopped)
        if self._failed:
            reasons.append(f"{self._failed} failed")
        if self._lost_workers:
            reasons.append(self.lost_workers)
        return reasons

    @property
    def lost_workers(self) -> str:
        """``lost worker gw0, gw1``; empty where none was."""
        names = ", ".join(self._lost_workers)
        return f"lost worker {names}" if names else ""

    def _stale(self) -> list[Edit]:
        """Removals of tests that no longer exist. A module that was not collected here but still
        exists is not judged: it may be ignored, or skipped as a whole on this machine."""
        from pytest_vram.baselines import BaselineError, Edit

        marked = set(self.collected.marked)
        edits = []
        for module, _ in self.store.modules():
            if module not in self.collected.modules and self._exists(module):
                continue
            try:
                tests = self.store.tests(module)
            except BaselineError as error:
                self.summary.problems.append(str(error))
                self.summary.failed = True
                continue
            edits += [
                Edit(module, test, "", None, "pruned")
                for test in tests
                if f"{module}::{test}" not in marked and module not in marked
            ]
        return edits

    def _renamed(self, stale: list[Edit]) -> dict[str, str]:
        """Where exactly one new test has exactly the figures of one that is gone."""
        from pytest_vram.comparison import record_of

        names = ("peak_allocated", "peak_reserved", "live_after_step", "bills")
        new = [
            (one.nodeid, one.environment.key, record_of(one.ledger, one.environment))
            for one in self.records
            if one.stored is None and one.ledger is not None
        ]
        found = {}
        for edit in stale:
            stored = self.store.tests(edit.module)[edit.test]
            same = [
                nodeid
                for nodeid, key, now in new
                if key in stored and all(stored[key].get(name) == now[name] for name in names)
            ]
            if len(same) == 1:
                found[f"{edit.module}::{edit.test}"] = same[0]
        return found

    def _exists(self, module: str) -> bool:
        return (self.settings.rootdir / module).is_file()

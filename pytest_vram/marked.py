"""The hooks of a pytest run with marked tests, or with options for them.

:mod:`pytest_vram.plugin` makes this once it knows that there is something to do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_vram.marker import Budget, BudgetError, keywords_of, marks_of, read_budget
from pytest_vram.nodeids import modules_of
from pytest_vram.options import MARKER
from pytest_vram.pass_fixtures import wanted_cuda
from pytest_vram.places import shown_from
from pytest_vram.plugin import PLAIN_ID
from pytest_vram.reports.progress import Progress, to_terminal
from pytest_vram.session import Collected, Session
from pytest_vram.settings import Settings, find_gpu

if TYPE_CHECKING:
    from pytest_vram.fixture import Vram
    from pytest_vram.plugin import Controller
    from pytest_vram.reports.model import Report
    from pytest_vram.run import ItemRun


class MarkedRun:
    """Everything that marked tests need, from their budgets to the reports of the run."""

    run_key: pytest.StashKey[ItemRun] = pytest.StashKey()
    budget_key: pytest.StashKey[Budget] = pytest.StashKey()

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config = config
        self.settings = settings
        self.session = Session(settings)
        self.collected = Collected()
        self.report: Report | None = None
        worker_input = getattr(config, "workerinput", None)
        self.worker: str = worker_input["workerid"] if worker_input else ""
        self.progress = to_terminal(
            sys.stdout,
            quiet=bool(self.worker) or config.get_verbosity() < 0 or _live_logs(config),
            captured=config.getoption("capture", "no") != "no",
        )
        config.add_cleanup(self.progress.close)
        self._current: ItemRun | None = None  # of the marked test that is being run
        self._deferred: list[pytest.FixtureDef[Any]] = []  # between the two hooks of their setup
        self.running: RunningTests | None = None
        if not self.worker and config.getoption("dist", "no") != "no":
            self.running = RunningTests(self.progress)
            config.pluginmanager.register(self.running, "vram-running")

    # ---- budgets

    def budget_of(self, item: pytest.Item) -> Budget:
        """The budget of a marked item, or of one that asks for ``vram``. :raises BudgetError:"""
        if self.budget_key not in item.stash:
            layers = [keywords_of(mark) for mark in marks_of(item)]
            layers.append(dict(self.settings.defaults))
            item.stash[self.budget_key] = read_budget(layers, self._find_gpu)
        return item.stash[self.budget_key]

    def _find_gpu(self, name: str) -> object:
        return find_gpu(self.settings, name)

    def problem_of(self, item: pytest.Item) -> str:
        """Why the item's budget cannot be read, with its place; empty if it can."""
        try:
            self.budget_of(item)
        except BudgetError as error:
            path, line, name = item.location
            return f"{path}:{(line or 0) + 1}: {name}: {MARKER}: {error}"
        return ""

    # ---- what was collected, for the question which baselines are stale

    def finish_collection(
        self, before: list[pytest.Item], after: list[pytest.Item], marked: list[pytest.Item]
    ) -> None:
        """``before`` and ``after`` filters; ``marked`` are of the latter."""
        all_ids = {plain_id(item) for item in before}
        ids = {plain_id(item) for item in after}
        self.collected.modules = modules_of(all_ids | ids)
        self.collected.marked = [plain_id(item) for item in marked]
        self.collected.filters = _filters(self.config, len(all_ids - ids))
        renamed = {item.nodeid: plain_id(item) for item in marked}
        self.collected.plain = {name: plain for name, plain in renamed.items() if name != plain}
        self.session.collected.add(self.collected)

    # ---- running

    def knows(self, item: pytest.Item) -> bool:
        """Whether the item is run by this object."""
        return self.run_key in item.stash

    def vram_of(self, item: pytest.Item) -> Vram:
        """The object that the ``vram`` fixture hands to a test that :meth:`knows`."""
        return item.stash[self.run_key].vram

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A fresh run for every attempt; reruns come through here again."""
        budget = item.stash.get(self.budget_key, None)
        if budget is None:
            return
        from pytest_vram.run import ItemRun

        before = item.stash.get(self.run_key, None)
        run = ItemRun(item, plain_id(item), budget, self.settings, self.session.store, self.worker)
        run.say = lambda text: self.progress.show(text and f"{item.name}: {text}")
        run.attempt = before.attempt + 1 if before is not None else 1
        item.stash[self.run_key] = self._current = run

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """Outside of all other plugins: whose fixture is it, and did it ask for CUDA in vain?"""
        run = self._current
        if run is None:
            return (yield)
        if run.fixtures.defers(fixturedef, request):
            self._deferred.append(fixturedef)
            return (yield)
        try:
            return (yield)
        except Exception as error:
            with shown_from(self.config.rootpath):
                sentence = wanted_cuda(fixturedef, error)
            if not sentence:
                raise
        pytest.fail(sentence, pytrace=False)

    @pytest.hookimpl(wrapper=True, trylast=True, specname="pytest_fixture_setup")
    def pytest_fixture_setup_innermost(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """Inside of all other plugins, which give async fixtures functions that can be called."""
        run = self._current
        if run is None:
            return (yield)
        mine = fixturedef in self._deferred
        if mine:
            self._deferred.remove(fixturedef)
        if not mine and not run.fixtures.needs_deferred(fixturedef, request):
            return (yield)
        with run.fixtures.in_place_of(fixturedef, request):
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        run = item.stash.get(self.run_key, None)
        if run is None:
            return (yield)
        try:
            with run.in_place_of_runtest():
                result = yield
        except (Exception, pytest.fail.Exception):
            if run.ran:
                run.finish(passed=False)
            raise
        if run.ran:
            run.finish(passed=True)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            self._current = None
            run = item.stash.get(self.run_key, None)
            if run is not None:
                run.heal()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        run = item.stash.get(self.run_key, None)
        if run is None:
            return report
        # An attribute of the report travels from xdist's workers to the controller.
        report.vram_record = run.record.to_dict() if run.record is not None else {}  # type: ignore[attr-defined]
        # Subtests make reports of the call while it runs.
        if run.record is not None or call.when == "teardown":
            run.release()
        return report

    # ---- the controlling process

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.worker:
            return
        outcome = str(report.outcome)
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        record = getattr(report, "vram_record", None)
        if record is not None and self.running is not None:
            self.running.seen(report)
        self.session.report(report.nodeid, str(report.when), outcome, record or None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker of pytest-xdist is done; one that says nothing has crashed."""
        output = getattr(node, "workeroutput", None)
        if output and "pytest_vram" in output:
            if output["pytest_vram"]:
                self.session.collected.add(Collected.from_dict(output["pytest_vram"]))
        else:
            self.session.lost_worker(node.gateway.id)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if not self.worker and not self.config.option.collectonly:
            self._hear_the_dead()
            summary = self.session.finish(_stopped(session, exitstatus))
            self._publish(exitstatus, _stopped(session, exitstatus))
            if summary.interrupted:
                session.exitstatus = pytest.ExitCode.INTERRUPTED
            elif summary.failed and session.exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _hear_the_dead(self) -> None:
        """What workers collected that ended, or were stopped, before they said so."""
        controller: Controller | None = self.config.pluginmanager.get_plugin("vram-controller")
        for raw in controller.noted() if controller is not None else ():
            self.session.collected.add(Collected.from_dict(raw))

    def _publish(self, exit_status: int, stopped: str) -> None:
        """Reports, once everything is known; a plugin's hook that raises does not cost them."""
        if not self.session.collected.marked and not self.settings.reports:
            return
        from pytest_vram.reports.publish import publish, report_of, with_extra

        summary = self.session.summary
        failed = exit_status or pytest.ExitCode.TESTS_FAILED if summary.failed else exit_status
        self.report = report_of(self.session, failed, stopped)
        try:
            answers = self.config.hook.pytest_vram_report(config=self.config, report=self.report)
            self.report = with_extra(self.report, answers)
        except Exception as error:
            summary.unwritten.append(f"pytest_vram_report: {type(error).__name__}: {error}")
        try:
            summary.written, problems = publish(self.report, self.settings)
        except KeyboardInterrupt:
            problems = ["interrupted: not every report was written"]
            summary.interrupted = True
        summary.unwritten += problems
        summary.failed = summary.failed or bool(summary.unwritten)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.worker or (not self.session.attempts and self.session.summary.silent):
            return
        from pytest_vram.reports.terminal import fitted, report

        writer = terminalreporter
        width = self.config.get_terminal_writer().fullwidth
        lines = report(
            self.session.records,
            self.session.summary,
            width=width,
            verbosity=self.config.get_verbosity(),
        )
        if writer.isatty:
            lines = fitted(lines, width)
        if lines:
            writer.section("vram")
        moods = {"ok": {"green": True}, "warn": {"yellow": True}, "fail": {"red": True}}
        for line in lines:
            writer.line(line.text, **moods.get(line.mood, {}))
        if self.report is not None and os.environ.get("GITHUB_ACTIONS") == "true":
            from pytest_vram.reports.github import annotate

            workspace = os.environ.get("GITHUB_WORKSPACE", "")
            for text in annotate(self.report, self.config.rootpath, workspace):
                writer.line(text)


def plain_id(item: pytest.Item) -> str:
    """The id under which an item is stored and reported, with or without workers."""
    return item.stash.get(PLAIN_ID, item.nodeid)


class RunningTests:
    """Names the marked tests that workers of pytest-xdist are running, between any two lines or
    dots that pytest writes."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def seen(self, report: pytest.TestReport) -> None:
        """A phase of a marked test is over: after its setup the passes begin."""
        if report.when == "setup" and report.passed:
            self.progress.started(report.nodeid)
            self.progress.show_running()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logstart(self) -> Generator[None, object, object]:
        with self.progress.aside():
            result = yield
        self.progress.show_running()
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self) -> Generator[None, object, object]:
        with self.progress.aside():
            result = yield
        self.progress.show_running()
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> Generator[None, object, object]:
        with self.progress.aside():
            result = yield
        self.progress.finished(nodeid)
        self.progress.show_running()
        return result


def _live_logs(config: pytest.Config) -> bool:
    """Whether log records appear while a test runs; not without pytest's logging plugin."""
    try:
        return bool(config.getini("log_cli"))
    except (KeyError, ValueError):
        return False


def _filters(config: pytest.Config, deselected: int) -> list[str]:
    """Why this run did not look at every test, in the words of the options that did it."""
    option = config.option
    named = (
        ("keyword", "-k"),
        ("markexpr", "-m"),
        ("lf", "--lf"),
        ("stepwise", "--stepwise"),
        ("ignore", "--ignore"),
        ("ignore_glob", "--ignore-glob"),
        ("deselect", "--deselect"),
    )
    reasons = [f"filtered by {flag}" for name, flag in named if getattr(option, name, None)]
    if any("::" in str(argument) for argument in config.args):
        reasons.append("filtered by node ids")
    elif config.args_source is pytest.Config.ArgsSource.ARGS and not _is_root(config):
        reasons.append("only some paths were given")
    if deselected and not reasons:
        reasons.append(f"{deselected} tests were left out (sharded, or deselected by a plugin)")
    return reasons


def _is_root(config: pytest.Config) -> bool:
    paths = [config.invocation_params.dir / argument for argument in config.args]
    return any(path.resolve() == config.rootpath.resolve() for path in paths)


def _stopped(session: pytest.Session, exitstatus: int) -> str:
    if exitstatus == pytest.ExitCode.INTERRUPTED:
        return "interrupted"
    reason = session.shouldfail or session.shouldstop
    return f"stopped early ({reason})" if reason else ""

"""pytest hooks. Each is a few lines that call into the rooms; torch is imported by none of them."""

from __future__ import annotations

import argparse
import os
import sys
import types
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_vram.marker import (
    HELP,
    MARKER,
    Budget,
    BudgetError,
    closest_first,
    keywords_of,
    read_budget,
)
from pytest_vram.nodeids import modules_of
from pytest_vram.reports.progress import Progress, to_terminal
from pytest_vram.session import Collected, Session
from pytest_vram.settings import (
    CATEGORIES,
    OPTIONS,
    Settings,
    SettingsError,
    find_gpu,
    read_settings,
)

if TYPE_CHECKING:
    from pytest_vram.fixture import Vram
    from pytest_vram.reports.model import Report
    from pytest_vram.run import ItemRun

_UPDATE = "--vram-update"


class _Update(argparse.Action):
    """``--vram-update`` or ``--vram-update=CATEGORY``. Every form is an option string of its own:
    with ``nargs="?"`` argparse would take the path in ``--vram-update tests/`` for a category."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        given = list(getattr(namespace, self.dest) or [])
        given.append((option_string or "").partition("=")[2])
        setattr(namespace, self.dest, given)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vram", "GPU-memory budgets for training tests (pytest-vram)")
    for option in OPTIONS:
        if option.flag:
            group.addoption(
                option.flag,
                dest=option.name,
                metavar=option.metavar,
                default=None,
                help=f"{option.help} (ini: {option.name})",
            )
        parser.addini(option.name, option.help, type=option.ini, default=None)  # type: ignore[arg-type]
    parser.addini("vram_strict", "like --vram-strict", type="bool", default=False)
    group.addoption(
        "--no-vram",
        dest="vram_enabled",
        action="store_false",
        default=True,
        help=f"marked tests run as plain tests: {MARKER} markers do nothing",
    )
    group.addoption(
        "--vram-strict",
        action="store_true",
        default=None,
        help="missing and stale baselines, and improvements, fail (ini: vram_strict)",
    )
    group.addoption(
        _UPDATE,
        *(f"{_UPDATE}={category}" for category in (*CATEGORIES, "all")),
        dest="vram_update",
        action=_Update,
        help="write baselines of tests that pass everything else: new and changed ones, or only "
        "the given category (repeatable)",
    )
    group.addoption(
        "--vram-dry-run",
        action="store_true",
        default=None,
        help=f"with {_UPDATE}: say what would be written, write nothing",
    )
    group.addoption(
        "--vram-report",
        dest="vram_report",
        action="append",
        metavar="FILE",
        help="write a report of the marked tests: FILE.html, .json, .md, .csv or "
        ".codequality.json (GitLab); repeatable",
    )
    group.addoption(
        "--vram-snapshots",
        dest="vram_snapshots",
        metavar="DIR",
        help="write a snapshot of every measured and simulated run for PyTorch's memory visualiser",
    )


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    from pytest_vram import hooks

    pluginmanager.add_hookspecs(hooks)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", HELP)
    try:
        settings = read_settings(
            lambda name: config.getoption(name, None), config.getini, config.rootpath
        )
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from None
    plugin = Plugin(config, settings)
    config.pluginmanager.register(plugin, "vram-run")
    if not plugin.worker and config.getoption("dist", "no") != "no":
        config.pluginmanager.register(RunningTests(plugin.progress), "vram-running")


@pytest.fixture
def vram(request: pytest.FixtureRequest) -> Vram:
    """The device, precision and training step of a test with a GPU-memory budget (pytest-vram)."""
    from pytest_vram.fixture import Vram

    plugin: Plugin = request.config.pluginmanager.get_plugin("vram-run")  # type: ignore[assignment]
    run = request.node.stash.get(plugin.run_key, None)
    return run.vram if run is not None else Vram(plugin.inert_budget(request.node))


class Plugin:
    """The hooks of one run, with its state."""

    run_key: pytest.StashKey[ItemRun] = pytest.StashKey()
    budget_key: pytest.StashKey[Budget | None] = pytest.StashKey()

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config = config
        self.settings = settings
        self.session = Session(settings)
        self.collected = Collected()
        self.report: Report | None = None
        worker_input = getattr(config, "workerinput", None)
        self.worker: str = worker_input["workerid"] if worker_input else ""
        self._before_filters: set[str] = set()
        self.progress = to_terminal(
            sys.stdout,
            quiet=bool(self.worker) or config.get_verbosity() < 0 or _live_logs(config),
            captured=config.getoption("capture", "no") != "no",
        )
        config.add_cleanup(self.progress.close)

    # ---- which items are marked

    def budget_of(self, item: pytest.Item) -> Budget | None:
        """The item's budget; ``None`` if it is neither marked nor asks for ``vram``."""
        if self.budget_key not in item.stash:
            layers = [keywords_of(mark) for mark in _marks(item)]
            marked = bool(layers) or "vram" in getattr(item, "fixturenames", ())
            layers.append(dict(self.settings.defaults))
            item.stash[self.budget_key] = read_budget(layers, self._find_gpu) if marked else None
        return item.stash[self.budget_key]

    def inert_budget(self, item: pytest.Item) -> Budget:
        """Under ``--no-vram``: precision and steps of the marker, if it can be read."""
        try:
            return self.budget_of(item) or Budget()
        except BudgetError:
            return Budget()

    def _find_gpu(self, name: str) -> object:
        return find_gpu(self.settings, name)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """A marker that cannot be read is a collection error at the test's line."""
        report = yield
        if not self.settings.enabled or not report.passed:
            return report
        problems = self._unused_marks(collector, report.result)
        for item in report.result or ():
            if isinstance(item, pytest.Item):
                try:
                    self.budget_of(item)
                except BudgetError as error:
                    problems.append(f"{_location(item)}: {MARKER}: {error}")
        if problems:
            report.outcome = "failed"
            report.longrepr = "\n".join(problems)
            report.result = []
        return report

    def _unused_marks(self, collector: pytest.Collector, found: Any) -> list[str]:
        """Marked functions that pytest does not collect: their budget would never be held."""
        if not isinstance(collector, (pytest.Module, pytest.Class)):
            return []
        collected = {getattr(node, "originalname", None) or node.name for node in found or ()}
        problems = []
        for name, value in vars(collector.obj).items():
            function = _function_of(value)
            if function is None or name in collected:
                continue
            marks = getattr(function, "pytestmark", ())
            if any(getattr(mark, "name", "") == MARKER for mark in marks):
                line = function.__code__.co_firstlineno
                kind = "a fixture" if function is not value else "no test that pytest collects"
                problems.append(
                    f"{collector.nodeid.partition('::')[0]}:{line}: {name}: {MARKER} marks "
                    f"{kind}: its budget would never be checked"
                )
        return problems

    # ---- what was collected, for the question which baselines are stale

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, items: list[pytest.Item]
    ) -> Generator[None, object, object]:
        for item in items:
            item.stash[_PLAIN_ID] = item.nodeid
        self._before_filters = {plain_id(item) for item in items}
        return (yield)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        ids = {plain_id(item) for item in session.items}
        self.collected.modules = modules_of(self._before_filters | ids)
        self.collected.marked = [
            plain_id(item)
            for item in session.items
            if self.settings.enabled and self.budget_of(item)
        ]
        self.collected.filters = _filters(self.config, len(self._before_filters - ids))
        self.session.collected.add(self.collected)

    # ---- running

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A fresh run for every attempt; reruns come through here again."""
        budget = self.budget_of(item) if self.settings.enabled else None
        if budget is None:
            return
        from pytest_vram.run import ItemRun

        before = item.stash.get(self.run_key, None)
        run = ItemRun(item, plain_id(item), budget, self.settings, self.session.store, self.worker)
        run.say = lambda text: self.progress.show(text and f"{item.name}: {text}")
        run.attempt = before.attempt + 1 if before is not None else 1
        item.stash[self.run_key] = run

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
            run = item.stash.get(self.run_key, None)
            if run is not None:
                run.heal()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        run = item.stash.get(self.run_key, None)
        if run is not None and call.when == "call":
            if run.record is not None:
                # An attribute of the report travels from xdist's workers to the controller.
                report.vram_record = run.record.to_dict()  # type: ignore[attr-defined]
            run.release()
        return report

    # ---- the controlling process

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.worker or not self.settings.enabled:
            return
        outcome = str(report.outcome)
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        record = getattr(report, "vram_record", None)
        self.session.report(report.nodeid, str(report.when), outcome, record)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker of pytest-xdist is done; one that says nothing has crashed."""
        output = getattr(node, "workeroutput", None)
        if output and "pytest_vram" in output:
            self.session.collected.add(Collected.from_dict(output["pytest_vram"]))
        else:
            self.session.lost_worker(node.gateway.id)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.worker:
            self.config.workeroutput["pytest_vram"] = self.collected.to_dict()  # type: ignore[attr-defined]
        elif self.settings.enabled and not self.config.option.collectonly:
            summary = self.session.finish(_stopped(session, exitstatus))
            self._publish(exitstatus, _stopped(session, exitstatus))
            if summary.failed and session.exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

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
        summary.written, problems = publish(self.report, self.settings)
        summary.unwritten += problems
        summary.failed = summary.failed or bool(summary.unwritten)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.worker or (not self.session.attempts and self.session.summary.silent):
            return
        from pytest_vram.reports.terminal import report

        writer = terminalreporter
        lines = report(
            self.session.records,
            self.session.summary,
            width=self.config.get_terminal_writer().fullwidth,
            verbosity=self.config.get_verbosity(),
        )
        if lines:
            writer.section("vram")
        moods = {"ok": {"green": True}, "warn": {"yellow": True}, "fail": {"red": True}}
        for line in lines:
            writer.write_line(line.text, **moods.get(line.mood, {}))
        if self.report is not None and os.environ.get("GITHUB_ACTIONS") == "true":
            from pytest_vram.reports.github import annotate

            workspace = os.environ.get("GITHUB_WORKSPACE", "")
            for text in annotate(self.report, self.config.rootpath, workspace):
                writer.write_line(text)


#: An item's id before pytest-xdist adds its group to it (``--dist loadgroup``: ``test_x@gpu``).
_PLAIN_ID: pytest.StashKey[str] = pytest.StashKey()


def plain_id(item: pytest.Item) -> str:
    """The id under which an item is stored and reported, with or without workers."""
    return item.stash.get(_PLAIN_ID, item.nodeid)


class RunningTests:
    """Names the tests that workers of pytest-xdist are running, between any two lines or dots that
    pytest writes."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> Generator[None, object, object]:
        with self.progress.aside():
            result = yield
        self.progress.started(nodeid)
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


def _marks(item: pytest.Item) -> list[Any]:
    """All ``vram_budget`` marks of an item, the closest first."""
    found: list[Any] = []
    for node in reversed(item.listchain()):
        marks = [mark for mark in node.own_markers if mark.name == MARKER]
        parameters = getattr(getattr(node, "callspec", None), "marks", ())
        bases = getattr(getattr(node, "obj", None), "__mro__", ())
        inherited = [_own_marks(base) for base in bases]
        found += closest_first(marks, parameters, [mark for marks in inherited for mark in marks])
    return found


def _function_of(value: object) -> types.FunctionType | None:
    """A plain function, or the one under a fixture. Other objects of a module are not asked for
    anything: lazy modules import, and ``torch.ops`` has every attribute."""
    if type(value) is types.FunctionType:
        return value
    if type(value).__name__ == "FixtureFunctionDefinition":  # since pytest 8.4
        return value._get_wrapped_function()  # type: ignore[attr-defined, no-any-return]
    return None


def _own_marks(base: type) -> list[Any]:
    marks = vars(base).get("pytestmark", [])
    return [getattr(mark, "mark", mark) for mark in (marks if isinstance(marks, list) else [marks])]


def _location(item: pytest.Item) -> str:
    path, line, name = item.location
    return f"{path}:{(line or 0) + 1}: {name}"


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

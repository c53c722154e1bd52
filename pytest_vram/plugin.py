"""What every pytest run imports: options, the marker, the fixture, and the question whether there
is a marked test. Everything else begins with the first one, in :mod:`pytest_vram.marked`."""

from __future__ import annotations

import types
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_vram.options import HELP, MARKER, add_options, any_given, check_update

if TYPE_CHECKING:
    from pytest_vram.fixture import Vram
    from pytest_vram.marked import MarkedRun
    from pytest_vram.notes import Notes


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    config: pytest.Config | None = pluginmanager.get_plugin("pytestconfig")
    check_update(config.invocation_params.args if config is not None else ())
    add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    from pytest_vram import hooks

    pluginmanager.add_hookspecs(hooks)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", HELP)
    plugin = Plugin(config)
    config.pluginmanager.register(plugin, "vram-run")
    if plugin.enabled and any_given(config.getoption, plugin.ini):
        plugin.run()
    if plugin.enabled and not plugin.worker and config.getoption("dist", "no") != "no":
        config.pluginmanager.register(Controller(plugin), "vram-controller")


@pytest.fixture
def vram(request: pytest.FixtureRequest) -> Vram:
    """The device, precision and training step of a test with a GPU-memory budget (pytest-vram)."""
    plugin: Plugin = request.config.pluginmanager.get_plugin("vram-run")  # type: ignore[assignment]
    return plugin.vram_of(request.node)


class Plugin:
    """Finds the first marked test."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.enabled: bool = config.getoption("vram_enabled")
        self.worker = hasattr(config, "workerinput")
        self._run: MarkedRun | None = None
        self._unmade: list[str] = []  # marked functions of the module at hand that are no tests
        self._before_filters: list[pytest.Item] = []

    def run(self) -> MarkedRun:
        """The hooks of marked tests, at work from the first call on.

        :raises pytest.UsageError: an option or ini setting that cannot be used.
        """
        if self._run is None:
            from pytest_vram.marked import MarkedRun
            from pytest_vram.settings import SettingsError, read_settings

            config = self.config
            try:
                settings = read_settings(
                    lambda name: config.getoption(name, None), self.ini, config.rootpath
                )
            except SettingsError as error:
                raise pytest.UsageError(str(error)) from None
            self._run = MarkedRun(config, settings)
            config.pluginmanager.register(self._run, "vram-marked")
        return self._run

    def ini(self, name: str) -> Any:
        """An ini setting. :raises pytest.UsageError: pytest cannot read it as what it is to be."""
        try:
            return self.config.getini(name)
        except (ValueError, pytest.UsageError) as error:
            raise pytest.UsageError(f"{name}: {error}") from None

    @property
    def begun(self) -> MarkedRun | None:
        """The hooks of marked tests, once there are any."""
        return self._run

    def vram_of(self, item: pytest.Item) -> Vram:
        """The object behind the ``vram`` fixture of an item."""
        from pytest_vram.fixture import NO_VRAM, NOT_MARKED, Vram, inert_budget

        if self._run is not None and self._run.knows(item):
            return self._run.vram_of(item)
        return Vram(inert_budget(item), NOT_MARKED if self.enabled else NO_VRAM)

    # ---- collection

    @pytest.hookimpl(wrapper=True)
    def pytest_pycollect_makeitem(
        self, collector: pytest.Collector, name: str, obj: object
    ) -> Generator[None, object, object]:
        """Asked here what becomes of a marked function, because plugins such as ``--lf`` filter
        what a module has collected."""
        made = yield
        if self.enabled and not made:
            self._unmade += filter(None, [_unused_mark(collector, name, obj)])
        return made

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """A marker that cannot be read is a collection error at the test's line."""
        report = yield
        problems, self._unmade = self._unmade, []
        if not self.enabled or not report.passed:
            return report
        found = report.result or ()
        if isinstance(collector, pytest.Class) and not problems:
            problems = _unused_marks(collector, found)
        for item in found:
            if isinstance(item, pytest.Item) and is_marked(item):
                problems.append(self.run().problem_of(item))
        problems = [problem for problem in problems if problem]
        if problems:
            report.outcome = "failed"
            report.longrepr = "\n".join(problems)
            report.result = []
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, items: list[pytest.Item]
    ) -> Generator[None, object, object]:
        self._before_filters = list(items)
        for item in items:
            item.stash[PLAIN_ID] = item.nodeid
        return (yield)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        before, self._before_filters = self._before_filters, []
        if not self.enabled:
            return
        # Again: other plugins and conftest.py may have added markers, or items.
        marked = [item for item in session.items if is_marked(item)]
        if not marked and self._run is None:
            return
        problems = [problem for item in marked if (problem := self.run().problem_of(item))]
        if problems:
            raise pytest.UsageError("\n".join(problems))
        self.run().finish_collection(before, session.items, marked)
        if self.worker:
            from pytest_vram.notes import write_note

            write_note(self.config.workerinput, self.run().collected.to_dict())  # type: ignore[attr-defined]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """A marker that comes while fixtures are set up is too late, and must not pass unseen."""
        if not self.enabled or item.get_closest_marker(MARKER) is None:
            return
        if self._run is None or not self._run.knows(item):
            pytest.fail(
                f"VRAM not checked: {MARKER} was added to {item.name} while it was set up; "
                "decorate the test, or add the marker in pytest_collection_modifyitems",
                pytrace=False,
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        if self.worker:
            found = self._run.collected.to_dict() if self._run is not None else {}
            self.config.workeroutput["pytest_vram"] = found  # type: ignore[attr-defined]


class Controller:
    """Hears from workers of pytest-xdist, which alone collect, whether there are marked tests."""

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin
        self._notes: Notes | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """A worker is about to start, and may die before it says what it collected."""
        from pytest_vram.notes import KEY, Notes

        if self._notes is None:
            self._notes = Notes()
            self.plugin.config.add_cleanup(self._notes.remove)
        node.workerinput[KEY] = self._notes.place(node.gateway.id)

    def noted(self) -> list[dict[str, Any]]:
        """What workers with marked tests have collected, as far as is known."""
        return list(self._notes.read()) if self._notes is not None else []

    def pytest_keyboard_interrupt(self) -> None:
        if self.plugin.begun is None and self.noted():
            self.plugin.run()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # What passed without a record leaves no trace in a MarkedRun either.
        if self.plugin.begun is None and (
            report.outcome != "passed" or hasattr(report, "vram_record")
        ):
            self.plugin.run().pytest_runtest_logreport(report)

    @pytest.hookimpl(optionalhook=True, trylast=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        output = getattr(node, "workeroutput", None) or {}
        if self.plugin.begun is None and output.get("pytest_vram") != {}:
            self.plugin.run().pytest_testnodedown(node, error)


#: An item's id before pytest-xdist adds its group to it (``--dist loadgroup``: ``test_x@gpu``).
PLAIN_ID: pytest.StashKey[str] = pytest.StashKey()


def is_marked(item: pytest.Item) -> bool:
    """Whether the item has a budget: by a marker, or because it asks for ``vram``."""
    return item.get_closest_marker(MARKER) is not None or "vram" in getattr(
        item, "fixturenames", ()
    )


def _unused_marks(collector: pytest.Class, found: Any) -> list[str]:
    """Of a class whose methods pytest makes no items of one by one (``unittest.TestCase``)."""
    collected = {getattr(node, "originalname", None) or node.name for node in found}
    return [
        problem
        for name, value in vars(collector.obj).items()
        if name not in collected and (problem := _unused_mark(collector, name, value))
    ]


def _unused_mark(collector: pytest.Collector, name: str, value: object) -> str:
    """For a marked function that pytest does not collect: its budget would never be held."""
    function = _function_of(value)
    if function is None:
        return ""
    having = value if type(value) is types.FunctionType else function
    marks = having.__dict__.get("pytestmark") or ()
    if not any(getattr(mark, "name", "") == MARKER for mark in marks):
        return ""
    line = function.__code__.co_firstlineno
    kind = "a fixture" if function is not value else "no test that pytest collects"
    return (
        f"{collector.nodeid.partition('::')[0]}:{line}: {name}: {MARKER} marks {kind}: its budget "
        "would never be checked"
    )


def _function_of(value: object) -> types.FunctionType | None:
    """A plain function, or the one under a fixture. Other objects of a module are not asked for
    anything: lazy modules import, and ``torch.ops`` has every attribute."""
    if type(value) is types.FunctionType:
        wrapped = value.__dict__.get("__pytest_wrapped__")  # a fixture before pytest 8.4
        return value if wrapped is None else wrapped.obj
    if type(value).__name__ == "FixtureFunctionDefinition":  # since pytest 8.4
        return value._get_wrapped_function()  # type: ignore[attr-defined, no-any-return]
    return None

"""One marked test from start to verdict: which passes it needs, and what they say together."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_vram.baselines import BaselineError, Store
from pytest_vram.comparison import record_of
from pytest_vram.environment import Environment, environment
from pytest_vram.findings import Finding
from pytest_vram.fixture import Vram
from pytest_vram.marker import Budget
from pytest_vram.pass_fixtures import PassFixtures
from pytest_vram.places import shown_from
from pytest_vram.quantities import format_bytes
from pytest_vram.record import PassRecord, TestRecord
from pytest_vram.settings import Settings, find_gpu
from pytest_vram.subtests import HeldSubtests
from pytest_vram.verdict import in_order, judge_memory, out_of_memory

if TYPE_CHECKING:
    from pytest_vram.passes import Body, Outcome, Seeds

#: What a test raises when it fails. Skips, exits and Ctrl-C end the item instead.
FAILURES: tuple[type[BaseException], ...] = (Exception, pytest.fail.Exception)


class NoDeviceError(Exception):
    """The device that was asked for is not here."""


@dataclass
class ItemRun:
    """One attempt at one marked item. ``runtest`` stands in for the item's own while pytest calls
    it, so that every other plugin sees one ordinary call."""

    item: pytest.Item
    nodeid: str  #: as it is stored and reported
    budget: Budget
    settings: Settings
    store: Store
    worker: str = ""
    attempt: int = 1
    say: Callable[[str], None] = lambda text: None  # what is being done, for the terminal
    vram: Vram = field(init=False)
    fixtures: PassFixtures = field(init=False)
    subtests: HeldSubtests = field(init=False)
    record: TestRecord | None = None
    _outcomes: list[Outcome] = field(default_factory=list)
    _environment: Environment | None = None
    _extra_findings: list[Finding] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.vram = Vram(self.budget)
        self.fixtures = PassFixtures(self.item)
        self.subtests = HeldSubtests(self.item, _ends_the_pass)

    # ---- running

    @contextmanager
    def in_place_of_runtest(self) -> Iterator[None]:
        """While this is open ``item.runtest()`` runs all passes of the item."""
        original = self.item.runtest
        replaced = "runtest" in vars(self.item)  # by another plugin, before us
        self.item.runtest = lambda: self._run(original)  # type: ignore[method-assign]
        try:
            yield
        finally:
            if replaced:
                self.item.runtest = original  # type: ignore[method-assign]
            else:
                del self.item.runtest

    def _run(self, original: Callable[[], None]) -> None:
        __tracebackhide__ = True
        try:
            with shown_from(self.item.config.rootpath):
                self._device_passes(original)
        except NoDeviceError as problem:
            self.vram.attach(None)
            missing = str(problem)
        else:
            missing = ""
        finally:
            self.say("")
        if missing:
            pytest.fail(f"VRAM not checked: {missing}", pytrace=False)
        error = self._decide_error()
        if error is not None:
            raise error

    def _body(self, original: Callable[[], None], seeds: Seeds) -> Body:
        from pytest_vram.passes import Body

        def run() -> None:
            __tracebackhide__ = True
            seeds.restore()
            with self.fixtures.pass_(), self._subtests_of_pass():
                original()
                _raise_unittest_error(self.item)

        keep = None if self.settings.snapshots is None else self._keep_snapshot
        return Body(run, self.vram.attach, self._owners, FAILURES, self.budget, keep)

    def _subtests_of_pass(self) -> AbstractContextManager[None]:
        """Subtests of the simulated pass wait for another one's."""
        return nullcontext() if self.vram.has_values else self.subtests.holding()

    def _keep_snapshot(self, kind: str, snapshot: dict[str, Any]) -> None:
        from pytest_vram.reports.snapshots import write_snapshot

        assert self.settings.snapshots is not None
        directory, nodeid = self.settings.snapshots, self.nodeid
        if problem := write_snapshot(directory, nodeid, kind, snapshot, self.attempt):
            self._notes.append(problem)

    def _owners(self) -> list[Any]:
        """What may keep tensors after the test: fixture values and the test's instance."""
        return list(self._owned().values())

    def _owned(self) -> dict[str, Any]:
        """Names and values of fixtures and of attributes of the test's instance and class."""
        values = dict(getattr(self.item, "funcargs", None) or {})
        values.pop("vram", None)
        values.pop("request", None)
        named = {f"fixture {name!r}": value for name, value in values.items()}
        instance = getattr(self.item, "instance", None)
        for cls in type(instance).__mro__[-2::-1]:
            named |= {f"{cls.__name__}.{name}": value for name, value in vars(cls).items()}
        attributes = getattr(instance, "__dict__", {})
        return named | {f"self.{name}": value for name, value in attributes.items()}

    def _device_passes(self, original: Callable[[], None]) -> None:
        """All passes. Random states are afterwards what an ordinary run leaves; where none ran for
        real, PyTorch's are what they were: a simulation draws no numbers for large tensors."""
        import torch

        from pytest_vram.passes import Seeds

        index = choose_cuda(self.settings, self.worker)
        if index is not None:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # the card's random state exists from then on
        seeds = Seeds()
        try:
            self._passes_on(index, self._body(original, seeds))
        finally:
            if self._real is None:
                seeds.restore_torch()
                self.subtests.report()
            self.subtests.forget()

    def _passes_on(self, index: int | None, body: Body) -> None:
        from pytest_vram import passes

        if index is None:
            profile = find_gpu(self.settings, self.settings.profile_name(self.budget.gpu))
            self._environment = self._explained(environment("sim", profile.name))
            self.say(f"simulating on {profile.name}")
            outcome = self._keep(passes.simulate(body, profile))
            self.vram.remember(outcome.ledger, outcome.device)
            if self._wants_numbers(outcome):
                self.say("checking numbers on the CPU")
                numbers = passes.check_numbers(body, outcome.answers)
                if numbers.error is not None and _simulator_gave_up(numbers.error):
                    self._notes.append(f"numbers were not checked: {numbers.error}")
                else:
                    self._keep(numbers)
            return
        from pytest_vram.cuda import environment as card_facts
        from pytest_vram.cuda import profile_of

        facts = card_facts(index)
        self._environment = self._explained(environment("cuda", facts.pop("gpu"), facts))
        estimate = None
        if self.settings.estimate and not self._on_the_card():
            self.say(f"estimating: simulating {self._environment.gpu}")
            estimate = self._keep(passes.simulate(body, profile_of(index))).trace
        self.say(f"measuring on cuda:{index}")
        measured = self._keep(passes.measure(body, index, estimate))
        self.vram.remember(measured.ledger, measured.device)

    def _on_the_card(self) -> bool:
        """Whether a fixture of the test holds tensors on the real card, where no simulation can
        follow; the record says so then."""
        from pytest_vram.passes import held_by

        found = [name for name, value in self._owned().items() if held_by([value])]
        if found:
            self._notes.append(
                f"there is no estimate: {' and '.join(found)} was made on the card before the "
                "passes, and a simulation cannot hold it; give it function scope, or build on the "
                "CPU there and move to vram.device in the test"
            )
        return bool(found)

    def _explained(self, where: Environment) -> Environment:
        """With the facts that other plugins add; the environment's own win."""
        facts: dict[str, str] = {}
        answers = self.item.ihook.pytest_vram_environment(
            config=self.item.config, environment=where
        )
        for answer in answers:
            facts |= {str(name): str(value) for name, value in (answer or {}).items()}
        return replace(where, versions=dict(sorted({**facts, **where.versions}.items())))

    def _keep(self, outcome: Outcome) -> Outcome:
        self._outcomes.append(outcome)
        return outcome

    def _wants_numbers(self, simulated: Outcome) -> bool:
        """Whether the test also runs for real on the CPU; the record says why it does not."""
        mode = self.settings.numerics
        if mode == "off":
            self._notes.append("numbers were not checked: --vram-numerics off")
            return False
        if _is_oom(simulated):
            self._notes.append("numbers were not checked: the simulated pass ran out of memory")
            return False
        peak = simulated.ledger.peak_allocated if simulated.ledger is not None else 0
        limit = self.settings.numerics_limit
        if mode == "auto" and peak > limit:
            self._notes.append(
                f"numbers were not checked: a peak of {format_bytes(peak)} is above the limit of "
                f"{format_bytes(limit)} for a run on the CPU (vram_numerics_limit; --vram-numerics "
                "cpu runs it all the same)"
            )
            return False
        return True

    # ---- what the passes mean together

    @property
    def _memory(self) -> Outcome:
        """The pass that answers how much memory."""
        measured = [one for one in self._outcomes if one.kind == "measurement"]
        return measured[0] if measured else self._outcomes[0]

    @property
    def _real(self) -> Outcome | None:
        """The pass that had values, if any."""
        real = [one for one in self._outcomes if one.kind in ("measurement", "numerics")]
        return real[0] if real else None

    def _decide_error(self) -> BaseException | None:
        """The test's own error, after everything else was made a finding or a note."""
        simulated = next((one for one in self._outcomes if one.kind == "simulation"), None)
        memory, real = self._memory, self._real
        if _is_oom(memory):
            assert memory.ledger is not None
            self._extra_findings.append(out_of_memory(memory.ledger, memory.device))
            return None
        if simulated is not None and simulated.error is not None:
            error = self._explain_simulated(simulated, real)
            if error is not None:
                return error
        return real.error if real is not None else None

    def _explain_simulated(self, simulated: Outcome, real: Outcome | None) -> BaseException | None:
        """What an error of the simulated pass means; the error itself where nothing else ran."""
        error = simulated.error
        assert error is not None
        where = self._where(error)
        what = f"{where}: {_first_line(error)}"
        simulated.findings = ()  # it did not come to the end: real passes judge
        answers = simulated is self._memory
        if _simulator_gave_up(error):
            what = f": {error}" if where in str(error) else f" at {where}: {error}"
            if answers:
                self._extra_findings.append(_not_simulated(what))
                return None
            self._notes.append(f"there is no estimate, the simulation could not go on{what}")
            return None
        if _about_devices(error):
            return error
        values = _looked_at_a_value(simulated)
        if real is None:
            if values:
                self._add_section(
                    "The test failed in the simulated pass, which has no values, and no other pass "
                    f"ran to decide:\n{what}\n"
                    "If it looked at a value, guard that with `if vram.has_values:`; "
                    "or let the numbers be checked with --vram-numerics cpu."
                )
            return error
        if real.error is not None:
            return None  # it fails with values, too: that is the test's own failure
        if not values and answers:
            self._extra_findings.append(_not_simulated(f" at {what}"))
            return None
        decided = "the measured pass" if real.kind == "measurement" else "the pass on the CPU"
        self._extra_findings.append(
            Finding(
                "not-checked",
                "note",
                f"the simulated pass ended at {what}; simulated tensors have no values: {decided} "
                "decided, and memory was judged up to that line",
                hint="guard what looks at values with `if vram.has_values:`",
                data={"reason": "values", "where": where},
            )
        )
        return None

    def _where(self, error: BaseException) -> str:
        """The line of the test file that ``error`` came through last, else its own last line."""
        frames = traceback.extract_tb(error.__traceback__)
        if not frames:
            return self.nodeid
        own = [frame for frame in frames if Path(frame.filename) == self.item.path]
        frame = (own or list(frames))[-1]
        return f"{self.item.location[0] if own else frame.filename}:{frame.lineno}"

    # ---- the verdict

    def judge(self, passed: bool) -> TestRecord:
        """Findings and record, after the call. ``passed``: the test body raised nothing."""
        memory, real = self._memory, self._real
        ledger, where = memory.ledger, self._environment
        assert ledger is not None
        assert where is not None
        findings = list(self._extra_findings)
        estimate = None
        if memory.kind == "measurement" and self._outcomes[0].kind == "simulation":
            estimate = self._outcomes[0].ledger if self._outcomes[0].error is None else None
        stored = self._stored(findings)
        gave_up = any(found.data.get("reason") == "not simulated" for found in findings)
        if not _is_oom(memory) and stored is not None and not gave_up:
            findings += judge_memory(
                ledger,
                self.budget,
                where,
                stored=stored,
                now=record_of(ledger, where),
                estimate=estimate,
                held=memory.held,
                complete=memory.error is None,
                optimizers=memory.optimizers,
                strict=self.settings.strict,
                update=self.settings.update,
            )
        judges = real if real is not None else memory
        if not _is_oom(judges):
            findings += judges.findings
        findings += self._textbook(memory)
        if not gave_up:
            findings = self._with_causes(findings)
        if not passed:
            # It failed before it could do what these miss.
            findings = [found for found in findings if found.kind != "not-checked"]
        notes = [*self._notes, *memory.notes]
        if real is not None and real is not memory:
            notes += real.notes
        self.record = TestRecord(
            nodeid=self.nodeid,
            file=self.item.location[0],
            line=(self.item.location[1] or 0) + 1,
            budget=self.budget,
            environment=where,
            answered="measured" if memory.kind == "measurement" else "simulated",
            ledger=ledger,
            estimate=estimate,
            stored=(stored or {}).get(where.key),
            numerics=_numerics_device(real),
            scaler=judges.scaler,
            losses=judges.losses,
            findings=in_order(findings),
            notes=tuple(dict.fromkeys(notes)),
            passes=tuple(map(self._pass_record, self._outcomes)),
            timeline=memory.timeline,
            outcome="" if passed else "failed",
            attempt=self.attempt,
            worker=self.worker,
        )
        self.record = self._with_others(self.record)
        return self.record

    def _with_others(self, record: TestRecord) -> TestRecord:
        """What other plugins find and add; their figures become what JSON can hold."""
        extra: dict[str, Any] = {}
        answers = self.item.ihook.pytest_vram_measured(item=self.item, record=record, extra=extra)
        more = [found for answer in answers for found in answer or ()]
        if not more and not extra:
            return record
        plain = json.loads(json.dumps(extra, default=str))
        return replace(record, findings=in_order([*record.findings, *more]), extra=plain)

    def _textbook(self, memory: Outcome) -> tuple[Finding, ...]:
        """What the closed form would have said, beside the figure that counts."""
        plan = self._outcomes[0].plan
        if plan is None or memory.ledger is None or memory.error is not None or _is_oom(memory):
            return ()
        from pytest_vram.planning.beside import sentence

        peak = memory.ledger.peak
        text = sentence(plan, peak.allocated, peak.bills)
        return (Finding("memory-cause", "note", text, data={"closed_form": plan.peak}),)

    def _with_causes(self, findings: list[Finding]) -> list[Finding]:
        """Why memory is what it is. Who referred to what, the simulated pass saw."""
        from pytest_vram.numerics.memory_causes import with_causes

        simulated = self._outcomes[0]
        observed = simulated.observed
        if observed is not None and self._memory is not simulated:
            observed = observed.elsewhere()
        return with_causes(
            findings,
            self._memory.trace,
            observed,
            growth=self.budget.growth,
            attention=simulated.attention,
        )

    def _stored(self, findings: list[Finding]) -> dict[str, Any] | None:
        """This test's baselines; ``None`` (and a finding) where its file cannot be read."""
        try:
            return self.store.environments(self.nodeid)
        except BaselineError as error:
            sentence = f"VRAM baseline cannot be used: {error}"
            findings.append(Finding("not-checked", "fail", sentence))
            return None

    def _pass_record(self, outcome: Outcome) -> PassRecord:
        ended = "" if outcome.error is None else _first_line(outcome.error)
        return PassRecord(outcome.kind, outcome.device, outcome.seconds, ended)

    def release(self) -> None:
        """Let go of traces and of the errors whose frames hold tensors: they would stay on the card
        until the session ends."""
        self._outcomes.clear()
        self._extra_findings.clear()
        self.record = None

    def heal(self) -> None:
        """After the teardown of fixtures, which may have put back what a pass had replaced."""
        from pytest_vram.sim.patching import heal

        heal()

    @property
    def ran(self) -> bool:
        """Whether any pass came to an end: else there is nothing to judge."""
        return bool(self._outcomes)

    def finish(self, passed: bool) -> None:
        """Judge, leave figures with the report, and fail the call for what is wrong.

        :raises pytest.fail.Exception: with every failing finding, unless the test itself failed.
        """
        record = self.judge(passed)
        self.item.user_properties[:] = [
            pair for pair in self.item.user_properties if not pair[0].startswith("vram_")
        ]
        self.item.user_properties.extend(properties(record))
        failures = record.failures
        if not failures:
            return
        text = "\n\n".join(found.text() for found in failures)
        if passed:
            pytest.fail(text, pytrace=False)
        self._add_section(text)

    def _add_section(self, text: str) -> None:
        self.item.add_report_section("call", "vram", text)


def properties(record: TestRecord) -> list[tuple[str, object]]:
    """The figures that JUnit files carry."""
    found: list[tuple[str, object]] = [
        ("vram_environment", record.environment.key),
        ("vram_verdict", record.verdict),
    ]
    if record.ledger is not None:
        found += [
            ("vram_peak_allocated", record.ledger.peak_allocated),
            ("vram_peak_reserved", record.ledger.peak_reserved),
        ]
    if record.budget.peak is not None:
        found.append(("vram_budget", record.budget.peak))
    return found


def choose_cuda(settings: Settings, worker: str) -> int | None:
    """The index of the real GPU that answers, or ``None`` for a simulated one. Workers of
    pytest-xdist take turns on the GPUs. :raises NoDeviceError: when a GPU was asked for in vain."""
    import torch

    wanted = settings.device
    if wanted.kind == "sim":
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        if wanted.kind == "auto":
            return None
        raise NoDeviceError(
            f"--vram-device {_device_text(settings)}, but this machine offers PyTorch "
            f"{torch.__version__} no CUDA device; --vram-device sim simulates one"
        )
    if wanted.index is not None:
        if wanted.index >= count:
            raise NoDeviceError(
                f"--vram-device {_device_text(settings)}, but there are only {count} CUDA devices "
                f"(cuda:0 to cuda:{count - 1})"
            )
        return wanted.index
    number = int(worker.removeprefix("gw")) if worker.removeprefix("gw").isdigit() else 0
    return number % count


def _device_text(settings: Settings) -> str:
    index = settings.device.index
    return "cuda" if index is None else f"cuda:{index}"


def _numerics_device(real: Outcome | None) -> str:
    if real is None:
        return ""
    return "cuda" if real.kind == "measurement" else "cpu"


def _raise_unittest_error(item: pytest.Item) -> None:
    """A ``unittest.TestCase`` method does not raise: pytest's item collects what its TestResult
    protocol reports (``_pytest/unittest.py``, TestCaseFunction._addexcinfo; 8.0 to 9.2) and its
    makereport takes the first. A pass needs to know now, and a later one to start clean."""
    errors = item.__dict__.pop("_excinfo", None)
    if errors:
        raise errors[0].value


def _is_oom(outcome: Outcome) -> bool:
    import torch

    return (
        isinstance(outcome.error, torch.OutOfMemoryError)
        and outcome.ledger is not None
        and outcome.ledger.failure is not None
    )


def _simulator_gave_up(error: BaseException) -> bool:
    """The simulation itself cannot go on: a value decides, or an operator is unknown."""
    from pytest_vram.sim.values import DataDependent, NoSimulatedKernel

    return isinstance(error, (DataDependent, NoSimulatedKernel))


def _ends_the_pass(error: BaseException) -> bool:
    """Whether an error inside a subtest is one of the simulation, not of the subtest."""
    import torch

    return (
        isinstance(error, torch.OutOfMemoryError)
        or _simulator_gave_up(error)
        or _about_devices(error)
    )


def _about_devices(error: BaseException) -> bool:
    """Tensors on different devices, or on one that is not there: a CPU would not mind."""
    from pytest_vram.sim.errors import DEVICES_DIFFER, NO_SUCH_DEVICE

    said = str(error).startswith((DEVICES_DIFFER, NO_SUCH_DEVICE))
    return isinstance(error, RuntimeError) and said


def _looked_at_a_value(simulated: Outcome) -> bool:
    """An assertion, an index (which may have been read from a tensor), or an error that the test's
    own code (or a library, not PyTorch) raised."""
    if isinstance(simulated.error, (AssertionError, IndexError, pytest.fail.Exception)):
        return True
    import torch

    return not any(
        Path(simulated.raised_in).is_relative_to(Path(file).parent)
        for file in (torch.__file__, __file__)
    )


def _not_simulated(what: str) -> Finding:
    return Finding(
        "not-checked",
        "fail",
        f"VRAM not checked: the simulation could not go on{what}",
        hint="memory can be judged on a CUDA machine (--vram-device cuda)",
        data={"reason": "not simulated"},
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    return f"{name}: {lines[0]}" if lines else name

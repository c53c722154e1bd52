"""The passes of one marked test: simulated, measured, and on the CPU for its numbers.

Every pass runs the whole test body once, from the same seeds, with automatic garbage collection
off; what it saw comes back as one :class:`Outcome`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from pytest_vram import training
from pytest_vram.bills import settle
from pytest_vram.findings import Finding
from pytest_vram.ledger import Ledger
from pytest_vram.marker import Budget
from pytest_vram.record import ScalerStep
from pytest_vram.timeline import Timeline
from pytest_vram.trace import Trace
from pytest_vram.tracebacks import file_of, without_plugin

if TYPE_CHECKING:
    from pytest_vram.numerics import Watch
    from pytest_vram.numerics.memory_watch import Observed
    from pytest_vram.observe import Observer
    from pytest_vram.planning.answers import Plan
    from pytest_vram.sim.answers import Answers
    from pytest_vram.sim.profiles import Profile


@dataclass
class Outcome:
    """What one pass saw. ``kind``: ``simulation``, ``measurement`` or ``numerics``. ``error`` is
    what the test body raised, in the file ``raised_in``. ``held``: bytes on the device that
    fixtures own at the end. ``optimizers``: whether the test made any. ``observed``: who referred
    to what, ``attention``: the kernels chosen, ``plan``: what the closed form predicts (simulation
    only)."""

    kind: str
    device: str
    seconds: float = 0.0
    error: BaseException | None = None
    raised_in: str = ""
    trace: Trace | None = None
    ledger: Ledger | None = None
    findings: tuple[Finding, ...] = ()
    scaler: tuple[ScalerStep, ...] = ()
    losses: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    held: int = 0
    optimizers: bool = False
    observed: Observed | None = None
    attention: tuple[Any, ...] = ()
    plan: Plan | None = None
    answers: Answers | None = None  #: of ``torch.cuda`` (simulation only)

    @functools.cached_property
    def timeline(self) -> Timeline | None:
        return None if self.trace is None else Timeline.from_trace(self.trace)


@dataclass
class Pass:
    """The running pass, as the ``vram`` object of the test sees it."""

    kind: str
    device: torch.device
    budget: Budget
    has_values: bool
    describe: str = ""  #: the device that answers, in words
    observer: Observer | None = None
    watch: Watch | None = None
    label_tensor: Callable[[Tensor, str, str], None] | None = None
    snapshot: Callable[[], Trace] | None = None
    undo: ExitStack = field(default_factory=ExitStack)

    @property
    def precision(self) -> str:
        return self.budget.precision

    @functools.cached_property
    def scaler(self) -> torch.amp.GradScaler:
        return training.gradient_scaler(self.precision, self.device.type)

    def autocast(self) -> AbstractContextManager[Any]:
        return training.autocast(self.precision, self.device.type)

    def phase(self, name: str) -> AbstractContextManager[None]:
        if self.observer is None:
            return contextlib.nullcontext()
        return self.observer.phase(name)

    def begin_step(self) -> None:
        if self.observer is not None:
            self.observer.begin_step()

    def label(self, tensor: Tensor, bill: str, name: str) -> None:
        if self.label_tensor is not None:
            self.label_tensor(tensor, bill, name)

    def on_leave(self, undo: Callable[[], None]) -> None:
        self.undo.callback(undo)

    def ledger(self) -> Ledger | None:
        """The ledger so far; ``None`` where this pass keeps none (numbers on the CPU)."""
        if self.snapshot is None or self.observer is None:
            return None
        return Ledger.from_trace(settle(self.observer.renumber(self.snapshot())))


@dataclass(frozen=True)
class Body:
    """The test body and its surroundings: ``run`` calls it once, ``attach`` tells the test's
    ``vram`` object which pass it is in, ``owners`` are fixture values and the test's instance.
    ``failures`` are the exceptions that mean that the test failed; others (skip, exit, Ctrl-C)
    end the item."""

    run: Callable[[], None]
    attach: Callable[[Pass | None], None]
    owners: Callable[[], list[Any]]
    failures: tuple[type[BaseException], ...]
    budget: Budget
    #: Takes the kind of a pass and its snapshot, as ``torch.cuda.memory._snapshot()`` gives it.
    keep_snapshot: Callable[[str, dict[str, Any]], None] | None = None


def simulate(body: Body, profile: Profile) -> Outcome:
    """The body on a simulated ``profile``: memory to the byte, no values."""
    from pytest_vram.numerics import Watch
    from pytest_vram.numerics.memory_watch import MemoryWatch
    from pytest_vram.observe import Observer
    from pytest_vram.sim.simulation import Simulation

    outcome = Outcome("simulation", f"{profile.name} (simulated)")
    with _fixed_conditions(outcome), Simulation(profile) as simulation:
        with (
            Watch(values=False) as watch,
            MemoryWatch(simulation.allocation_of) as memory,
            Observer(simulation) as observer,
            ExitStack() as stack,
        ):
            textbook = _Textbook(observer, simulation.trace, body.budget.precision)
            stack.callback(register_optimizer_step_post_hook(textbook.look).remove)
            current = Pass("simulation", torch.device("cuda", 0), body.budget, has_values=False)
            current.observer, current.watch = observer, watch
            current.label_tensor, current.snapshot = simulation.label, simulation.trace
            _run(body, current, outcome)
        simulation.threads.settle()
        simulation.answers.moment()
        _end(body, outcome)
        trace = settle(observer.renumber(simulation.trace()))
        if body.keep_snapshot is not None:
            body.keep_snapshot("simulation", simulation.snapshot())
    outcome.answers = simulation.answers
    outcome.observed, outcome.attention = memory.observed, tuple(simulation.attention)
    _read_watch(watch, body.budget, outcome)
    _keep(trace, outcome)
    outcome.plan = textbook.plan
    return outcome


class _Textbook:
    """What the closed form predicts, where the model's shape is recognised. The model is looked at
    while it lives: after the first optimizer step."""

    def __init__(self, observer: Observer, trace: Callable[[], Trace], precision: str) -> None:
        self._observer, self._trace, self._precision = observer, trace, precision
        self._looked = False
        self.plan: Plan | None = None

    def look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        modules = self._observer.modules
        if self._looked or len(modules) != 1:
            return
        self._looked = True
        from pytest_vram.planning.beside import closed_form

        trace = self._trace()
        inputs = [
            (one.dtype, one.shape)
            for one in trace.allocations
            if one.bill == "inputs" and one.shape is not None
        ]
        self.plan = closed_form(
            modules[0],
            inputs,
            precision=self._precision,
            optimizer=optimizer,
            alive=[one.shape for one in trace.alive() if one.shape is not None],
        )


def measure(body: Body, index: int, estimate: Trace | None = None) -> Outcome:
    """The body on the real device ``index``: memory and numbers in one run. ``estimate`` is the
    simulation's Trace, which knows the tensors' shapes."""
    from pytest_vram.cuda import Recording, device_lock
    from pytest_vram.numerics import Watch
    from pytest_vram.observe import Observer
    from pytest_vram.shapes import borrow

    name = torch.cuda.get_device_name(index)
    outcome = Outcome("measurement", f"cuda:{index} ({name})")
    recording = Recording(index)
    # The watch allocates its few scalars before the recording, so that they belong to the base.
    with (
        device_lock(index),
        torch.cuda.device(index),
        _fixed_conditions(outcome),
        Watch() as watch,
        recording,
    ):
        with Observer(recording) as observer:
            current = Pass("measurement", torch.device("cuda", index), body.budget, True)
            current.observer, current.watch = observer, watch
            current.label_tensor, current.snapshot = recording.label, recording.trace
            _run(body, current, outcome)
        _end(body, outcome)
        if body.keep_snapshot is not None:
            body.keep_snapshot("measurement", recording.snapshot())
    replay = None
    if watch.needs_replay(body.budget):
        with device_lock(index), torch.cuda.device(index), _fixed_conditions(outcome):
            replay = _diagnose(body, outcome, torch.device("cuda", index))
    _read_watch(watch, body.budget, outcome, replay)
    trace = settle(observer.renumber(recording.trace()))
    _keep(trace if estimate is None else borrow(trace, estimate), outcome)
    for other, seen in sorted(recording.traces().items()):
        peak = Ledger.from_trace(seen).peak_allocated if other != index else 0
        if peak:
            outcome.notes += (f"{peak} bytes at the peak of cuda:{other}, which is not judged",)
    return outcome


def check_numbers(body: Body, answers: Answers | None) -> Outcome:
    """The body for real on the CPU, which stands in for the GPU: numbers, no memory. ``answers``:
    what ``torch.cuda`` said in the simulated pass, to be said again."""
    from pytest_vram.numerics import CpuStandIn, Watch

    outcome = Outcome("numerics", "cpu")
    with _fixed_conditions(outcome), CpuStandIn(answers), Watch() as watch:
        current = Pass("numerics", torch.device("cuda", 0), body.budget, has_values=True)
        current.watch = watch
        _run(body, current, outcome)
    replay = None
    if watch.needs_replay(body.budget):
        with _fixed_conditions(outcome), CpuStandIn(answers):
            replay = _diagnose(body, outcome, torch.device("cuda", 0))
    _read_watch(watch, body.budget, outcome, replay)
    return outcome


def _diagnose(body: Body, judged: Outcome, device: torch.device) -> Watch:
    """The body once more, with every operator watched, because something was not finite: to name
    the first operator that made it so. What the body raises was judged before."""
    from pytest_vram.numerics import Watch

    with Watch(diagnose=True) as replay:
        current = Pass(judged.kind, device, body.budget, has_values=True)
        current.watch = replay
        _run(body, current, Outcome(judged.kind, judged.device))
    return replay


# ---- what all passes share


def _run(body: Body, current: Pass, outcome: Outcome) -> None:
    current.describe = outcome.device
    body.attach(current)
    started = time.perf_counter()
    try:
        with current.undo:
            body.run()
    except body.failures as error:
        outcome.raised_in = file_of(error)
        outcome.error = without_plugin(error)
    finally:
        outcome.seconds = time.perf_counter() - started
        body.attach(None)


def _end(body: Body, outcome: Outcome) -> None:
    """After the body: what is garbage goes, what fixtures own is counted."""
    if outcome.error is None:
        gc.collect()
        outcome.held = held_by(body.owners())


def _read_watch(
    watch: Watch, budget: Budget, outcome: Outcome, replay: Watch | None = None
) -> None:
    outcome.findings = tuple(watch.findings(budget, replay))
    outcome.optimizers = watch.has_optimizers
    outcome.losses = tuple(watch.losses) if watch.values else ()
    outcome.notes += tuple(watch.notes) if watch.values else ()
    outcome.scaler = tuple(
        ScalerStep(step.step, step.scale_before, step.scale_after, step.found_inf)
        for step in watch.scaler.steps
    )


def _keep(trace: Trace, outcome: Outcome) -> None:
    outcome.trace = trace
    outcome.ledger = Ledger.from_trace(trace)
    outcome.notes += tuple(trace.notes)


@contextlib.contextmanager
def _fixed_conditions(outcome: Outcome) -> Iterator[None]:
    """Garbage is collected at fixed points only: after every optimizer step and after the pass.

    Objects from before the pass are frozen meanwhile: a collection then looks at the test's own
    objects (milliseconds) and not at all of PyTorch's (a third of a second).
    """
    if outcome.kind == "measurement":
        gc.collect()  # what earlier tests left on the card
    enabled, freezes = gc.isenabled(), gc.get_freeze_count() == 0
    gc.disable()
    if freezes:
        gc.freeze()
    after_step = register_optimizer_step_post_hook(_collect_after_step)
    try:
        yield
    finally:
        after_step.remove()
        if freezes:
            gc.unfreeze()
        if enabled:
            gc.enable()


def _collect_after_step(*_: Any) -> None:
    gc.collect()


class Seeds:
    """The states of Python's, NumPy's and PyTorch's random generators, to start every pass from."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if _cuda_is_initialized() else None

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        self.restore_torch()

    def restore_torch(self) -> None:
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


def _cuda_is_initialized() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def held_by(owners: Iterable[Any]) -> int:
    """Device bytes of tensors reachable from ``owners`` (fixture values, the test's instance),
    rounded as the allocator rounds. Modules, classes and functions are not entered: what a global
    keeps is what a leak is."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    waiting = list(owners)
    while waiting:
        value = waiting.pop()
        kind = type(value)  # isinstance() asks a weak proxy for the class of what may be dead
        if id(value) in seen or issubclass(kind, _OPAQUE):
            continue
        seen.add(id(value))
        if issubclass(kind, Tensor):
            if value.is_cuda:
                storage = value.untyped_storage()
                storages[storage._cdata] = -(-storage.nbytes() // 512) * 512
            waiting.append(value.grad if value.is_leaf else None)
        waiting.extend(gc.get_referents(value))
    return sum(storages.values())


_OPAQUE = (type, type(sys), type(held_by), type(len), str, bytes, int, float, type(None))

"""Run a script on a simulated card until enough of its training has been seen."""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from pytest_vram.bills import settle
from pytest_vram.commands.checkpoints import Checkpoints
from pytest_vram.ledger import Ledger
from pytest_vram.observe import Observer
from pytest_vram.sim.profiles import Profile
from pytest_vram.sim.selection import assume_selected
from pytest_vram.sim.simulation import Simulation
from pytest_vram.sim.values import DataDependent, NoSimulatedKernel
from pytest_vram.timeline import Timeline

#: Live allocations that are shown by name.
LARGEST = 6


_FOR_A_SCRIPT = (
    "For a script as it is, --assume-selected 0.5 says so of every mask that has no values."
)


class _Enough(BaseException):
    """Not an Exception: a script's own ``except Exception`` must not swallow it."""


@dataclass(frozen=True)
class Script:
    """What to run: a file, or with ``module`` a module as ``python -m`` would."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False


@dataclass(frozen=True)
class DryRun:
    """What one run showed. ``ended`` says why it ended, in words; ``error`` is the script's own
    failure (its traceback), ``unknown`` why the memory could not be told."""

    ledger: Ledger
    timeline: Timeline
    steps: int
    seconds: float
    ended: str
    error: str = ""
    unknown: str = ""
    notes: tuple[str, ...] = ()

    @property
    def unused(self) -> bool:
        """Nothing was ever allocated on the card."""
        return not self.ledger.peak_allocated and not self.out_of_memory

    @property
    def out_of_memory(self) -> bool:
        return self.ledger.failure is not None


def dry_run(
    script: Script,
    profile: Profile,
    *,
    steps: int,
    limit: float = 0,
    snapshot: Path | None = None,
    selected: float | None = None,
) -> DryRun:
    """Run ``script`` on a simulated ``profile``.

    It is stopped when the forward after its ``steps``-th training step begins (0: never), or after
    ``limit`` seconds (0: never). ``selected`` is the share that masks without values select.
    """
    started = time.perf_counter()
    simulation = Simulation(profile)
    checkpoints = Checkpoints()
    share = contextlib.nullcontext() if selected is None else assume_selected(selected)
    with _steady(), simulation, checkpoints, share:
        observer = Observer(simulation, from_start=True)
        with observer, _as_main(script), _stopping(observer, steps, limit) as stepped:
            ended, error, unknown = _run(script)
        if not error:
            gc.collect()
        trace = settle(observer.renumber(simulation.trace()))
        if snapshot:
            simulation.dump(str(snapshot))
    return DryRun(
        ledger=Ledger.from_trace(trace, largest=LARGEST),
        timeline=Timeline.from_trace(trace),
        steps=len(stepped),
        seconds=time.perf_counter() - started,
        ended=ended,
        error=error,
        unknown=unknown,
        notes=checkpoints.notes,
    )


def _run(script: Script) -> tuple[str, str, str]:
    """Why it ended, the script's own failure, why nothing can be told."""
    try:
        if script.module:
            runpy.run_module(script.target, run_name="__main__", alter_sys=True)
        else:
            # ``python train.py`` gives the main module an absolute ``__file__``.
            runpy.run_path(os.path.abspath(script.target), run_name="__main__")
    except _Enough as enough:
        return str(enough), "", ""
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            return "the script ended", "", ""
        return f"the script left with exit code {leaving.code}", f"SystemExit: {leaving.code}", ""
    except torch.OutOfMemoryError:
        return "out of memory", "", ""
    except DataDependent as error:
        hint = f" {_FOR_A_SCRIPT}" if "assume_selected" in str(error) else ""
        return "stopped by the simulation", "", f"{error}{hint}"
    except NoSimulatedKernel as error:
        return "stopped by the simulation", "", str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"{type(error).__name__}: {error}", _own_traceback(error) + _launcher(error), ""
    return "the script ended", "", ""


def _launcher(error: BaseException) -> str:
    """What to do where a script misses the variables that ``torchrun`` would have set."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not isinstance(error, KeyError) or error.args[:1] not in [(name,) for name in names]:
        return ""
    return (
        "\n\nIt expects a launcher. One rank is simulated with the variables that torchrun sets:\n"
        "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29500 pytest-vram "
        "simulate ..."
    )


def _own_traceback(error: BaseException) -> str:
    """The traceback without the frames of this tool and of runpy above the script's."""
    entries = traceback.extract_tb(error.__traceback__)
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    first = next((i for i, entry in enumerate(entries) if entry.filename not in ours), 0)
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(entries[first:])]
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()


@contextlib.contextmanager
def _as_main(script: Script) -> Iterator[None]:
    """``sys.argv``, ``sys.path`` and ``__main__`` as the script would find them on its own."""
    argv, path, main = sys.argv, list(sys.path), sys.modules.get("__main__")
    sys.argv = [script.target, *script.arguments]
    sys.path[:0] = [str(Path.cwd()) if script.module else str(Path(script.target).resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        if main is not None:
            sys.modules["__main__"] = main


@contextlib.contextmanager
def _stopping(observer: Observer, steps: int, limit: float) -> Iterator[set[int]]:
    """Stop before the forward that follows ``steps`` steps, or when time is up. Yields the numbers
    of the steps in which an optimizer stepped, as they come; of the steps with a backward where
    there is no optimizer, and the script updates its parameters by hand."""
    until = time.monotonic() + limit if limit else float("inf")
    stepped: set[int] = set()
    here = os.getpid()

    def after(*_: Any) -> None:
        stepped.add(observer.step)

    def before(*_: Any) -> None:
        if os.getpid() != here:
            return  # a transform, which may be a module, in a worker that loads data
        if time.monotonic() > until:
            raise _Enough(f"the time limit of {limit:g} s was reached")
        stepped.update(range(1, observer.by_hand + 1))
        if steps and len(stepped) >= steps:
            raise _Enough(f"{steps} training steps were seen")

    hooks = [register_optimizer_step_post_hook(after), register_module_forward_pre_hook(before)]
    with _alarm(limit):
        try:
            yield stepped
        finally:
            for hook in hooks:
                hook.remove()


@contextlib.contextmanager
def _alarm(limit: float) -> Iterator[None]:
    """Where there are signals, time is up even outside of forward passes."""
    main = threading.current_thread() is threading.main_thread()
    if not limit or not hasattr(signal, "setitimer") or not main:
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise _Enough(f"the time limit of {limit:g} s was reached")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _collect(*_: Any) -> None:
    gc.collect()


@contextlib.contextmanager
def _steady() -> Iterator[None]:
    """Garbage goes after each optimizer step and never in between: same figures every time."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    hook = register_optimizer_step_post_hook(_collect)
    try:
        yield
    finally:
        hook.remove()
        if enabled:
            gc.enable()

"""Recording: what the allocators of real GPUs do while a test runs, as Traces.

PyTorch's memory history gives every request with its stack; the rest is written down beside it.
Marks (phases, modules, labels) carry the number of requests and frees so far, which the allocator
counts anyway, and meet the history by that number when the recording ends. Nothing else is done
while the test runs: no dispatch mode, no hook on tensors, no synchronisation, no allocation.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch

from pytest_vram.cuda.history import DeviceHistory, Mark
from pytest_vram.cuda.holes import Plugs
from pytest_vram.cuda.stacks import Stacks
from pytest_vram.frames import describe, nearest_frame
from pytest_vram.trace import Trace


class Recording:
    """Context manager and Recorder of one pass of a test on real devices.

    ``trace()`` is the main device's (``device``, the current one by default), ``traces()`` those of
    every device that the test allocated on; so far, or whole after leaving. Figures exclude what
    the devices held before. Raises RuntimeError when entered twice.
    """

    def __init__(self, device: int | None = None) -> None:
        self._main = device
        self._devices: dict[int, DeviceHistory] = {}
        self._active: list[DeviceHistory] = []
        self._phases: list[Mark] = []
        self._modules: list[str] = []
        self._traces: dict[int, Trace] = {}
        self._ended = False
        self._plugs: list[Plugs] = []
        self._undo = ExitStack()

    # ---- results

    def trace(self) -> Trace:
        """The main device's Trace; without events if the test allocated nothing there."""
        return self.traces()[self._main_device]

    def traces(self) -> dict[int, Trace]:
        """Traces by device index, the main device's always among them."""
        return self._traces if self._ended else self._read(None)

    def snapshot(self) -> dict[str, Any]:
        """What ``torch.cuda.memory._snapshot()`` returns now, for PyTorch's memory visualiser; only
        while the recording runs, which keeps the history."""
        snapshot = _snapshot()
        for plugs in self._plugs:
            plugs.hide(snapshot["segments"])
        return snapshot

    @property
    def _main_device(self) -> int:
        if self._main is None:
            self._main = torch.cuda.current_device()
        return self._main

    # ---- Recorder

    def phase(self, name: str, step: int) -> None:
        frame = nearest_frame()
        mark: Mark = ("phase", name, step, describe(*frame) if frame else "")
        self._phases.append(mark)
        for history in self._devices.values():
            if not history.awake and history.has_begun():
                self._wake(history)
        self._mark(mark)

    def enter_module(self, path: str) -> None:
        self._modules.append(path)
        self._mark(("enter", path))

    def leave_module(self) -> None:
        if self._modules:
            self._modules.pop()
        self._mark(("leave",))

    def label(self, tensor: Any, bill: str, name: str = "") -> None:
        if not tensor.is_cuda:
            return
        history = self._devices.get(tensor.device.index)
        if history is not None:
            storage = tensor.untyped_storage()
            history.label(storage.data_ptr(), tensor, bill, name)

    def _mark(self, mark: Mark) -> None:
        for history in self._active:
            history.mark(mark)

    def _wake(self, history: DeviceHistory) -> None:
        """A device is used from now on: tell it what went before. What one other than the main
        device allocated since the last phase mark counts as made in that phase."""
        for mark in self._phases[:-1]:
            history.mark(mark, at=0)
        for path in self._modules:
            history.mark(("enter", path), at=0)
        history.awake = True
        self._active.append(history)

    # ---- life

    def __enter__(self) -> Recording:
        if self._devices:
            raise RuntimeError("a Recording can be entered once; make another one")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        if torch.cuda.get_allocator_backend() != "native":
            raise RuntimeError(
                "memory can be measured with PyTorch's own CUDA allocator only, not with "
                f"{torch.cuda.get_allocator_backend()}: it keeps no history"
            )
        main = self._main_device
        _settle_down()
        with ExitStack() as undo:
            for index in range(torch.cuda.device_count()):
                history = DeviceHistory(index)
                base = torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index)
                plugs = Plugs(index)
                undo.callback(plugs.release)
                plugs.close()
                self._plugs.append(plugs)
                history.begin(base, plugs.open)
                self._devices[index] = history
            self._wake(self._devices[main])
            undo.enter_context(_memory_history())
            undo.enter_context(self._watched_counters())
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        with self._undo:
            gc.collect()
            torch.cuda.synchronize(self._main_device)
            self._traces = self._read(error)
            self._ended = True

    def _read(self, error: BaseException | None) -> dict[int, Trace]:
        snapshot, stacks = _snapshot(), Stacks()
        conf = snapshot.get("allocator_settings", {}).get("PYTORCH_CUDA_ALLOC_CONF", "")
        traces: dict[int, Trace] = {}
        for index, history in self._devices.items():
            if index == self._main_device or history.has_begun():
                entries = snapshot["device_traces"][index]
                traces[index] = history.trace(entries, stacks, conf, error)
        return traces

    @contextmanager
    def _watched_counters(self) -> Iterator[None]:
        """A test may reset the allocator's counters; read them before it does."""
        with ExitStack() as undo:
            for name, before in (
                ("_cuda_resetPeakMemoryStats", DeviceHistory.keep_peaks),
                ("_accelerator_resetPeakStats", DeviceHistory.keep_peaks),
                ("_cuda_resetAccumulatedMemoryStats", DeviceHistory.keep_counts),
                ("_accelerator_resetAccumulatedStats", DeviceHistory.keep_counts),
            ):
                original = getattr(torch._C, name, None)
                if original is None:
                    continue

                def reset(device: int, original: Any = original, before: Any = before) -> Any:
                    if device in self._devices:
                        before(self._devices[device])
                    return original(device)

                setattr(torch._C, name, reset)
                undo.callback(setattr, torch._C, name, original)
            clear = torch.clear_autocast_cache

            def clear_autocast_cache() -> None:
                clear()
                self._mark(("uncached",))

            torch.clear_autocast_cache = clear_autocast_cache
            undo.callback(setattr, torch, "clear_autocast_cache", clear)
            yield


def _settle_down() -> None:
    """Give back what earlier tests left: garbage, library workspaces, free segments."""
    gc.collect()
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@contextmanager
def _memory_history() -> Iterator[None]:
    """PyTorch's memory history, from empty; off afterwards unless it was on before."""
    was_on = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)()
    record = torch.cuda.memory._record_memory_history
    record(None)  # forgets entries
    record("all", context="alloc", stacks=_stacks())
    try:
        yield
    finally:
        record(None)
        if was_on:
            record("all")


def _stacks() -> str:
    """PyTorch's unwinder of C++ stacks (torch/csrc/profiler/unwind/unwind.cpp) is for Linux on
    x86-64; elsewhere it raises in the middle of an allocation."""
    return "all" if sys.platform == "linux" and platform.machine() == "x86_64" else "python"


def _snapshot() -> dict[str, Any]:
    """``dladdr`` reads C++ names from the libraries' symbol tables: enough for operators, and
    about a hundred times as fast as the debug information that is read otherwise."""
    given = os.environ.get("TORCH_SYMBOLIZE_MODE")
    os.environ.setdefault("TORCH_SYMBOLIZE_MODE", "dladdr")
    try:
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
        return snapshot
    finally:
        if given is None:
            del os.environ["TORCH_SYMBOLIZE_MODE"]

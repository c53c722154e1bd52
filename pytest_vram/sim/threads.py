"""Threads of the program while a pass lasts: they see the device of the pass.

PyTorch's modes belong to a thread. A thread that is started during a pass, and work that is given
to a ``ThreadPoolExecutor`` (``asyncio.to_thread`` uses one), run with the pass's mode.
"""

from __future__ import annotations

import concurrent.futures.thread as executor
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from pytest_vram.sim.patching import Patches


class FollowedThreads:
    """Until ``held`` is undone, threads that start and work of executors run in ``inside()``.
    ``ended`` is called in a thread that was started here, at its end."""

    def __init__(
        self,
        held: Patches,
        inside: Callable[[], AbstractContextManager[None]],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._working = 0
        self._changed = threading.Condition()
        start, work = threading.Thread.start, executor._WorkItem.run

        def start_inside(thread: threading.Thread) -> None:
            # A thread of an executor outlives the pass: its work items enter and leave instead.
            if getattr(thread, "_target", None) is not executor._worker:
                run = thread.run

                def run_inside() -> None:
                    del thread.__dict__["run"]
                    with inside():
                        run()
                    ended()

                thread.run = run_inside  # type: ignore[method-assign]
            start(thread)

        def work_inside(item: Any, *args: Any) -> None:
            with self._at_work():
                with inside():
                    work(item, *args)
                vars(item).clear()  # its thread holds it for a moment longer, and so the result

        held.set(threading.Thread, "start", start_inside)
        held.set(executor._WorkItem, "run", work_inside)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        with self._changed:
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def settle(self, seconds: float = 2.0) -> None:
        """Wait for work whose result is known: its thread still holds it for a moment. Work that
        takes longer than ``seconds`` goes on."""
        with self._changed:
            self._changed.wait_for(lambda: not self._working, timeout=seconds)

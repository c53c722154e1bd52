"""Subtests of a marked test: every one is reported once, not once per pass.

pytest reports a subtest when it ends (``_pytest/subtests.py`` and ``_pytest/unittest.py``, 9.0 to
9.2; before that the plugin pytest-subtests). Those of a simulated pass wait: the pass that has
values reports its own, and only where none follows are they reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest


class HeldSubtests:
    """Of one item. ``ends_the_pass``: errors that are not for a subtest to swallow."""

    def __init__(self, item: pytest.Item, ends_the_pass: Callable[[BaseException], bool]) -> None:
        self._item = item
        self._ends_the_pass = ends_the_pass
        self._waiting: list[Callable[[], None]] = []

    @contextmanager
    def holding(self) -> Iterator[None]:
        """While this is open, subtests that end wait for :meth:`report`."""
        funcargs: dict[str, Any] = getattr(self._item, "funcargs", {})
        if "subtests" in funcargs:
            funcargs["subtests"] = _Fixture(self, funcargs["subtests"])
        add = getattr(self._item, "addSubTest", None)  # of unittest's result protocol
        if add is None:
            yield
            return

        def later(case: Any, subtest: Any, error: Any) -> None:
            if error and self.ends(error[1]):
                raise error[1]
            self.wait(lambda: add(case, subtest, error))

        self._item.addSubTest = later  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del self._item.addSubTest  # type: ignore[attr-defined]

    def ends(self, error: BaseException) -> bool:
        return not isinstance(error, Exception | pytest.fail.Exception) or self._ends_the_pass(
            error
        )

    def wait(self, report: Callable[[], None]) -> None:
        self._waiting.append(report)

    def report(self) -> None:
        """No other pass followed: what waits is what there is to say."""
        while self._waiting:
            self._waiting.pop(0)()

    def forget(self) -> None:
        self._waiting.clear()


class _Fixture:
    """What the test holds of the fixture ``subtests`` in a simulated pass."""

    def __init__(self, held: HeldSubtests, own: Any) -> None:
        self._held, self._own = held, own

    def test(self, msg: str | None = None, **kwargs: Any) -> AbstractContextManager[None]:
        return self._test(msg, kwargs)

    @contextmanager
    def _test(self, msg: str | None, kwargs: dict[str, Any]) -> Iterator[None]:
        __tracebackhide__ = True
        try:
            yield
        except BaseException as error:
            if self._held.ends(error):
                raise
            failed: BaseException = error
            self._held.wait(lambda: self._again(msg, kwargs, failed))
        else:
            self._held.wait(lambda: self._again(msg, kwargs, None))

    def _again(self, msg: str | None, kwargs: dict[str, Any], error: BaseException | None) -> None:
        __tracebackhide__ = True
        with self._own.test(msg, **kwargs):
            if error is not None:
                raise error

"""Fixtures of a marked test: those of the test's own scope are set up inside every pass.

A body that runs several times must find what an ordinary test finds: a new model, on the device of
the pass, and no traces of the pass before. So pytest is given a placeholder when it sets up a
function-scoped fixture that the user wrote (or one that needs such a fixture); the fixture's
function runs when a pass begins, and what it does after ``yield`` when the pass ends. Fixtures of
wider scopes, and those of other plugins, are set up once, as ever.
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.places import is_library, shown

#: pytest's own fixtures that must begin anew: what a pass patched is not there in the next one.
_ANEW = ("monkeypatch",)
#: What pytest calls the fixtures that it makes of xunit-style methods.
_XUNIT = re.compile(
    r"_?_(?:xunit|unittest)_(?P<method>setup_method|setup_function|setup_class|setup_module|"
    r"setUpClass|setUpModule)_fixture_(?P<owner>.*)"
)
#: Words of PyTorch's errors where a program asks for CUDA in vain.
_NO_CUDA = re.compile(r"not compiled with CUDA|NVIDIA driver|CUDA GPUs|CUDA device")


class Placeholder:
    """What pytest holds of a fixture between the passes of a marked test."""

    def __init__(self, fixture: _Fixture) -> None:
        self._fixture = fixture

    def __repr__(self) -> str:
        return f"<fixture {self._fixture.name!r}, set up inside every pass>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"fixture {self._fixture.name!r} is set up inside every pass of a marked test and does "
            "not exist yet; use it in the test, or in another fixture of function scope"
        )


@dataclass
class _Fixture:
    """One fixture of the test: what pytest would have called, with what."""

    definition: pytest.FixtureDef[Any]
    request: pytest.FixtureRequest
    function: Callable[..., Any]
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return self.definition.argname

    def keep(self, value: Any) -> None:
        """``value`` is what the fixture gives from now on, to whoever asks pytest for it."""
        key = self.definition.cache_key(self.request)  # type: ignore[arg-type]
        self.definition.cached_result = (value, key, None)


class PassFixtures:
    """The fixtures of one attempt at one marked test, in the order of their setup."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._fixtures: list[tuple[_Fixture, Placeholder]] = []
        self._stack: ExitStack | None = None  # while a pass runs
        self._values: dict[int, Any] = {}  # id of a placeholder -> its value in this pass
        self._untouched: set[Path] | None = None  # entries of tmp_path before the first pass

    # ---- while pytest sets up

    def defers(self, definition: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> bool:
        """Whether this fixture waits for the passes. Called when pytest sets it up, before other
        plugins put functions of their own in its place."""
        if definition.scope != "function":
            return False
        name = definition.argname
        xunit = _XUNIT.fullmatch(name)
        if name in _ANEW or (xunit and xunit["method"] in ("setup_method", "setup_function")):
            return True
        return name != "vram" and not _belongs_to_library(definition.func)

    def needs_deferred(
        self, definition: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> bool:
        """Whether a fixture that need not wait depends on one that does."""
        return definition.scope == "function" and any(
            isinstance(request.getfixturevalue(name), Placeholder) for name in definition.argnames
        )

    @contextmanager
    def in_place_of(
        self, definition: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Iterator[None]:
        """While this is open pytest sets up a placeholder; inside a pass, the fixture itself."""
        original = definition.func

        def deferred(*instance: Any, **arguments: Any) -> Any:
            # pytest 8.0 binds the functions of unittest classes itself
            function = original.__get__(*instance) if instance else _bound(original, request)
            fixture = _Fixture(definition, request, function, arguments)
            placeholder = Placeholder(fixture)
            self._fixtures.append((fixture, placeholder))
            return placeholder if self._stack is None else self._set_up(fixture, placeholder)

        definition.func = deferred  # type: ignore[misc]
        try:
            yield
        finally:
            definition.func = original  # type: ignore[misc]

    # ---- in a pass

    @contextmanager
    def pass_(self) -> Iterator[None]:
        """Everything that waited is set up while this is open."""
        __tracebackhide__ = True
        self._clear_directory()
        funcargs: dict[str, Any] = getattr(self._item, "funcargs", {})
        given = dict(funcargs)
        with ExitStack() as stack:
            stack.callback(self._forget, funcargs, given)
            self._stack = stack
            for fixture, placeholder in list(self._fixtures):
                value = self._set_up(fixture, placeholder)
                fixture.keep(value)
            for name, value in given.items():
                if isinstance(value, Placeholder):
                    funcargs[name] = self._values[id(value)]
            yield

    def _set_up(self, fixture: _Fixture, placeholder: Placeholder) -> Any:
        __tracebackhide__ = True
        assert self._stack is not None
        finish: Callable[[Any], None] = fixture.definition.finish  # what it registered
        self._stack.callback(finish, fixture.request)
        arguments = {name: self._now(value) for name, value in fixture.arguments.items()}
        result = fixture.function(**arguments)
        if inspect.isgenerator(result):
            generator, result = result, next(result)
            self._stack.callback(_finish, generator, fixture.name)
        self._values[id(placeholder)] = result
        return result

    def _now(self, value: Any) -> Any:
        return self._values[id(value)] if isinstance(value, Placeholder) else value

    def _forget(self, funcargs: dict[str, Any], given: dict[str, Any]) -> None:
        """The pass is over: nothing may keep its tensors."""
        self._stack = None
        self._values.clear()
        funcargs.clear()
        funcargs.update(given)
        for fixture, placeholder in self._fixtures:
            fixture.keep(placeholder)

    def _clear_directory(self) -> None:
        """What an earlier pass left in ``tmp_path`` goes, so that it can be made again."""
        directory = getattr(self._item, "funcargs", {}).get("tmp_path")
        if not isinstance(directory, Path) or not directory.is_dir():
            return
        if self._untouched is None:
            self._untouched = set(directory.iterdir())
        for entry in set(directory.iterdir()) - self._untouched:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def _finish(generator: Any, name: str) -> None:
    """The part of a fixture after its ``yield``."""
    __tracebackhide__ = True
    try:
        next(generator)
    except StopIteration:
        return
    pytest.fail(f"fixture {name!r} has more than one 'yield'", pytrace=False)


def _bound(function: Callable[..., Any], request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A fixture that is a method, for the test's own instance (pytest collected another one)."""
    owner = getattr(function, "__self__", None)
    plain = getattr(function, "__func__", None)
    if request.instance is None or plain is None or not isinstance(request.instance, type(owner)):
        return function
    return plain.__get__(request.instance)  # type: ignore[no-any-return]


def _belongs_to_library(function: Callable[..., Any]) -> bool:
    try:
        return is_library(inspect.getfile(inspect.unwrap(function)))
    except TypeError:  # a callable object
        return is_library(inspect.getfile(type(function)))


def wanted_cuda(definition: pytest.FixtureDef[Any], error: BaseException) -> str:
    """The sentence for a fixture that was set up before the passes and asked for CUDA on a machine
    without; empty for every other error."""
    torch = sys.modules.get("torch")
    if torch is None or torch.cuda.is_available() or not _NO_CUDA.search(str(error)):
        return ""
    xunit = _XUNIT.fullmatch(definition.argname)
    if xunit:
        what = f"{xunit['method']} of {xunit['owner']}"  # pytest's own function: no place
        remedy = "do that in setUp or setup_method, which run inside every pass"
    else:
        code = getattr(inspect.unwrap(definition.func), "__code__", None)
        place = f"{shown(code.co_filename)}:{code.co_firstlineno}, " if code is not None else ""
        what = f"fixture {definition.argname!r} ({place}{definition.scope} scope)"
        remedy = "give it function scope (such fixtures are set up inside every pass)"
    first = str(error).strip().splitlines()[0]
    return (
        f"VRAM not checked: {what} used CUDA before the passes of the test, and this machine has "
        f"none ({type(error).__name__}: {first}); {remedy}, or build on the CPU there and move to "
        "vram.device in the test"
    )

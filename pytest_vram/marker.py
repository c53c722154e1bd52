"""``@pytest.mark.vram_budget(...)`` read into one frozen :class:`Budget`, with all validation."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any, Protocol

from pytest_vram.options import MARKER
from pytest_vram.quantities import QuantityError, Tolerance, parse_size, parse_tolerance

PRECISIONS = ("fp32", "fp16", "bf16", "fp16-pure", "bf16-pure")

_TWO_PERCENT = Tolerance(Fraction(2, 100), 1 << 20)
_FIVE_PERCENT = Tolerance(Fraction(5, 100), 16 << 20)


class BudgetError(ValueError):
    """A marker that cannot be read; the message names the keyword and what was expected."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a marked test is allowed to cost and how it is run. Sizes are bytes.

    ``skipped_steps`` is how many GradScaler overflows may happen after warm-up (``None``: none);
    ``trainable`` is a glob of the only parameter names that may get gradients; ``gpu`` names the
    profile to simulate.
    """

    peak: int | None = None
    reserved: int | None = None
    precision: str = "fp32"
    steps: int = 3
    warmup: int = 1
    baseline: Tolerance = _TWO_PERCENT
    estimate: Tolerance = _FIVE_PERCENT
    skipped_steps: int | None = None
    trainable: str | None = None
    growth: int = 64 << 10
    gpu: str | None = None

    def to_dict(self) -> dict[str, Any]:
        raw = asdict(self)
        raw["baseline"], raw["estimate"] = str(self.baseline), str(self.estimate)
        return raw

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Budget:
        """The inverse of :meth:`to_dict`; also reads marker keywords. :raises BudgetError:"""
        return read_budget([raw])


class Mark(Protocol):
    """The part of ``pytest.Mark`` that is read here."""

    @property
    def args(self) -> tuple[Any, ...]: ...

    @property
    def kwargs(self) -> Mapping[str, Any]: ...


def keywords_of(mark: Mark) -> dict[str, Any]:
    """The keywords that one marker gives, its positional ``peak`` included."""
    given = dict(mark.kwargs)
    if len(mark.args) > 1:
        raise BudgetError(
            f"takes one positional argument, the peak, but got {len(mark.args)}: "
            f"{', '.join(map(repr, mark.args))}"
        )
    if mark.args:
        if "peak" in given:
            raise BudgetError("got the peak twice: as positional argument and as keyword")
        given["peak"] = mark.args[0]
    return given


def read_budget(
    layers: Iterable[Mapping[str, Any]], find_gpu: Callable[[str], object] | None = None
) -> Budget:
    """One budget out of markers, the closest first: the first that gives a keyword wins it.

    ``find_gpu`` raises a ``ValueError`` that explains itself for a GPU nobody knows.

    :raises BudgetError: an unknown keyword or a value that cannot be read, in any layer.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        values = {keyword: _read(keyword, value) for keyword, value in layer.items()}
        merged = {**values, **merged}
    budget = Budget(**merged)
    if budget.gpu is not None and find_gpu is not None:
        try:
            find_gpu(budget.gpu)
        except ValueError as error:
            raise BudgetError(f"gpu={budget.gpu!r}: {error}") from None
    return budget


def _read(keyword: str, value: Any) -> Any:
    reader = _READERS.get(keyword)
    if reader is None:
        near = difflib.get_close_matches(keyword, _READERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_READERS)}"
        raise BudgetError(f"unknown keyword {keyword!r}; {hint}")
    try:
        return reader(value)
    except ValueError as error:
        raise BudgetError(f"{keyword}={value!r}: {error}") from None


def _ceiling(value: Any) -> int | None:
    if value is None:
        return None
    size = parse_size(value)
    if size <= 0:
        raise QuantityError("a budget must be more than 0 bytes")
    return size


def _precision(value: Any) -> str:
    if not isinstance(value, str) or value not in PRECISIONS:
        raise ValueError(f"expected one of {', '.join(PRECISIONS)}")
    return str(value)


def _count(least: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"expected a whole number, at least {least}")
        return value

    return read


def _optional(reader: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else reader(value)


def _text(what: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise ValueError(f"expected {what}")
        return value

    return read


_READERS: dict[str, Callable[[Any], Any]] = {
    "peak": _ceiling,
    "reserved": _ceiling,
    "precision": _precision,
    "steps": _count(1),
    "warmup": _count(0),
    "baseline": parse_tolerance,
    "estimate": parse_tolerance,
    "skipped_steps": _optional(_count(0)),
    "trainable": _optional(_text("a pattern of parameter names such as '*lora_*'")),
    "growth": parse_size,
    "gpu": _optional(_text("the name of a GPU such as 'a100-80gb'")),
}
assert set(_READERS) == {field.name for field in fields(Budget)}


def closest_first(marks: Sequence[Mark], near: Iterable[Mark], far: Iterable[Mark]) -> list[Mark]:
    """``marks`` of one node: those in ``near`` first, then unlisted ones, then ``far`` in order.

    pytest lists a function's decorators before the marks of its parameter set, and the marks of
    base classes before those of the class itself (``_pytest/mark/structures.py``,
    ``get_unpacked_marks``): the opposite of what is closest.
    """
    first, last = {id(mark): 0 for mark in near}, [id(mark) for mark in far]
    rank = {**{mark: place + 2 for place, mark in enumerate(last)}, **first}
    return sorted(marks, key=lambda mark: rank.get(id(mark), 1))


def marks_of(item: Any) -> list[Mark]:
    """All ``vram_budget`` marks of a ``pytest.Item``, the closest first."""
    found: list[Mark] = []
    for node in reversed(item.listchain()):
        marks = [mark for mark in node.own_markers if mark.name == MARKER]
        parameters = getattr(getattr(node, "callspec", None), "marks", ())
        bases = getattr(getattr(node, "obj", None), "__mro__", ())
        inherited = [_own_marks(base) for base in bases]
        found += closest_first(marks, parameters, [mark for marks in inherited for mark in marks])
    return found


def _own_marks(base: type) -> list[Any]:
    marks = vars(base).get("pytestmark", [])
    return [getattr(mark, "mark", mark) for mark in (marks if isinstance(marks, list) else [marks])]

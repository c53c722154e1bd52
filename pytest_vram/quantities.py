"""Quantities people write and read: ``1.5 GiB``, ``2% + 1 MiB``. All sizes are whole bytes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

#: Bytes per unit. GiB is 2**30, GB is 10**9; both are accepted, output is binary.
UNITS: dict[str, int] = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_BY_NAME = {name.lower(): factor for name, factor in UNITS.items()}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_SIZE = re.compile(rf"\s*({_NUMBER})\s*([A-Za-z]*)\s*")
_PERCENT = re.compile(rf"\s*({_NUMBER})\s*%\s*")

EXPECTED_SIZE = "a whole number of bytes, or a text such as '512 MiB', '1.5 GiB' or '1500 MB'"
EXPECTED_TOLERANCE = "a text such as '2%', '1 MiB' or '2% + 1 MiB' (then both must be exceeded)"


class QuantityError(ValueError):
    """A quantity that cannot be read; the message says what was expected."""


def parse_size(value: object) -> int:
    """Bytes of ``512``, ``"1.5 GiB"``, ``"1500 MB"``; part of a byte is cut off.

    Raises :class:`QuantityError` unless the whole text is one non-negative size.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise QuantityError(f"{value} is negative: expected {EXPECTED_SIZE}")
        return value
    if not isinstance(value, str):
        raise QuantityError(f"{value!r} is not a size: expected {EXPECTED_SIZE}")
    match = _SIZE.fullmatch(value)
    if match is None:
        raise QuantityError(f"{value!r} is not a size: expected {EXPECTED_SIZE}")
    number, unit = match.groups()
    factor = _BY_NAME.get(unit.lower() or "b")
    if factor is None:
        raise QuantityError(f"{value!r} has the unknown unit {unit!r}: {_unit_hint(unit)}")
    return math.floor(Fraction(number) * factor)


def _unit_hint(unit: str) -> str:
    letter = unit[:1].upper()
    if len(unit) == 1 and letter in "KMGT":
        binary, decimal = f"{letter}iB", "kB" if letter == "K" else f"{letter}B"
        return f"write {binary} ({_power(binary)}) or {decimal} ({_power(decimal)})"
    return f"expected one of {', '.join(UNITS)}"


def _power(unit: str) -> str:
    exponent = "kmgt".index(unit[0].lower()) + 1
    return f"2^{10 * exponent}" if unit.endswith("iB") else f"10^{3 * exponent}"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a figure may move: it is outside only when ``share`` of the reference *and*
    ``floor`` bytes are both exceeded. ``share`` is exact: 2 % is ``Fraction(1, 50)``."""

    share: Fraction = Fraction(0)
    floor: int = 0

    def allowed(self, reference: int) -> int:
        """The largest change of ``reference`` that is still inside, bytes."""
        share = self.share
        return max(share.numerator * reference // share.denominator, self.floor)

    def exceeded(self, change: int, reference: int) -> bool:
        return abs(change) > self.allowed(reference)

    def third(self) -> Tolerance:
        """The band within which a stored figure is left alone by an update."""
        return Tolerance(self.share / 3, self.floor // 3)

    def __str__(self) -> str:
        parts = [f"{_decimal(self.share * 100)} %"] if self.share else []
        if self.floor or not parts:
            parts.append(format_exact(self.floor))
        return " + ".join(parts)


def parse_tolerance(value: object) -> Tolerance:
    """``"2%"``, ``"1 MiB"``, ``"2% + 1 MiB"``, or a whole number of bytes.

    Raises :class:`QuantityError` unless the whole text is one percentage and/or one size.
    """
    if not isinstance(value, str):
        try:
            return Tolerance(floor=parse_size(value))
        except QuantityError as error:
            raise QuantityError(
                f"{value!r} is not a tolerance: expected {EXPECTED_TOLERANCE}"
            ) from error
    shares: list[Fraction] = []
    floors: list[int] = []
    for part in value.split("+"):
        percent = _PERCENT.fullmatch(part)
        if percent is not None:
            shares.append(Fraction(percent.group(1)) / 100)
            continue
        try:
            floors.append(parse_size(part))
        except QuantityError as error:
            raise QuantityError(
                f"{value!r} is not a tolerance: expected {EXPECTED_TOLERANCE}"
            ) from error
    if len(shares) > 1 or len(floors) > 1:
        raise QuantityError(
            f"{value!r} names two percentages or two sizes: expected {EXPECTED_TOLERANCE}"
        )
    return Tolerance(sum(shares, Fraction(0)), sum(floors))


def _decimal(value: Fraction) -> str:
    """``value`` without trailing zeros; every share a person can write is a finite decimal."""
    text = f"{Decimal(value.numerator) / Decimal(value.denominator):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


_SCALE = (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1), ("KiB", 1 << 10, 1))


def format_bytes(size: int) -> str:
    """``1.89 GiB``, ``474.7 MiB``, ``512 B``, ``0``: short, rounded, for people."""
    if size == 0:
        return "0"
    sign, size = ("-", -size) if size < 0 else ("", size)
    for unit, factor, digits in _SCALE:
        # Rounds up into the next unit instead of printing "1024.0 MiB".
        if size >= 1024 and round(size / factor, digits) >= 1:
            return f"{sign}{size / factor:.{digits}f} {unit}"
    return f"{sign}{size} B"


def format_exact(size: int) -> str:
    """The shortest text that :func:`parse_size` reads back as exactly ``size``: ``1 MiB``."""
    for unit in ("TiB", "GiB", "MiB", "KiB", "GB", "MB", "kB"):
        if size and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]} {unit}"
    return f"{size} B"


def format_change(change: int, now: int) -> str:
    """``+0.44 GiB``: signed, in the unit of ``now`` unless the change is too small for it."""
    if change == 0:
        return "0"
    sign = "+" if change > 0 else "-"
    for unit, factor, digits in _SCALE:
        if round(abs(now) / factor, digits) >= 1:
            if abs(change) * 10 >= factor:
                return f"{sign}{abs(change) / factor:.{digits}f} {unit}"
            break
    return f"{sign}{format_bytes(abs(change))}"


def format_percent(change: int, reference: int) -> str:
    """``+23.5 %`` of ``reference``; ``new`` where there was nothing, and ``45x`` where nobody
    thinks in percent any more."""
    if reference == 0:
        return "new" if change else "0 %"
    percent = 100 * change / reference
    if percent == 0:
        return "0 %"
    if abs(percent) < 0.05:
        return "+0.0 %" if percent > 0 else "-0.0 %"
    if percent < 1000:
        return f"{percent:+.1f} %"
    return _times(reference + change, reference)


def format_share(size: int, whole: int) -> str:
    """``70 %`` of ``whole``, and ``45x`` where nobody thinks in percent any more."""
    if size < 10 * whole:
        return f"{100 * size / whole:.0f} %"
    return _times(size, whole)


def _times(size: int, whole: int) -> str:
    return f"{size / whole:.0f}x" if size < 1000 * whole else ">1000x"

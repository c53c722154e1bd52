from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_vram.quantities import (
    UNITS,
    QuantityError,
    Tolerance,
    format_bytes,
    format_change,
    format_exact,
    format_percent,
    format_share,
    parse_size,
    parse_tolerance,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (512, 512),
        (3.5e9, 3_500_000_000),
        ("512", 512),
        ("1.5 GiB", 1_610_612_736),
        ("1500 MB", 1_500_000_000),
        ("24GB", 24_000_000_000),
        (" 64 kib ", 65_536),
        ("0.1 GiB", 107_374_182),  # a ceiling: the part of a byte is cut off
        ("2 TiB", 2_199_023_255_552),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "10 MBxyz", "1e3 MB", "-1 MiB", "1,5 GiB", "1.5.2 GiB", "5 %", "١ MiB"]
)
def test_the_whole_text_must_be_a_size(text: str) -> None:
    with pytest.raises(QuantityError, match=r"expected|unknown unit"):
        parse_size(text)


@pytest.mark.parametrize("value", [True, None, 1.5, float("nan"), float("inf"), b"1 MiB", -1])
def test_other_things_are_not_sizes(value: object) -> None:
    with pytest.raises(QuantityError, match="expected a whole number of bytes"):
        parse_size(value)


def test_an_ambiguous_unit_is_asked_back() -> None:
    with pytest.raises(QuantityError) as error:
        parse_size("24 G")
    assert str(error.value) == ("'24 G' has the unknown unit 'G': write GiB (2^30) or GB (10^9)")


@given(st.integers(min_value=0, max_value=1 << 60))
def test_exact_texts_read_back(size: int) -> None:
    assert parse_size(format_exact(size)) == size


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNITS)))
def test_every_unit_scales(count: int, unit: str) -> None:
    assert parse_size(f"{count} {unit}") == count * UNITS[unit]


@pytest.mark.parametrize(
    ("text", "tolerance"),
    [
        ("2%", Tolerance(Fraction(1, 50), 0)),
        ("2% + 1 MiB", Tolerance(Fraction(1, 50), 1 << 20)),
        ("1 MiB+0.5 %", Tolerance(Fraction(1, 200), 1 << 20)),
        ("64 KiB", Tolerance(Fraction(0), 65_536)),
        (0, Tolerance()),
    ],
)
def test_tolerances(text: object, tolerance: Tolerance) -> None:
    assert parse_tolerance(text) == tolerance


@pytest.mark.parametrize(
    "text", ["", "2", "2 % + 3 %", "1 MiB + 2 MiB", "2% 1 MiB", "%", "2% +", "two", None, -3]
)
def test_tolerances_are_read_whole(text: object) -> None:
    if text == "2":  # a bare number is bytes, as everywhere
        assert parse_tolerance(text) == Tolerance(floor=2)
        return
    with pytest.raises(QuantityError, match="expected a text such as '2%', '1 MiB'"):
        parse_tolerance(text)


def test_both_parts_must_be_exceeded() -> None:
    tolerance = parse_tolerance("2% + 1 MiB")
    assert not tolerance.exceeded(1 << 20, 1 << 20)  # 100 %, but only just 1 MiB
    assert tolerance.exceeded((1 << 20) + 1, 1 << 20)
    assert not tolerance.exceeded(20 << 20, 1000 << 20)  # 20 MiB, but only just 2 %
    assert tolerance.exceeded((20 << 20) + 1, 1000 << 20)
    assert tolerance.exceeded(-(20 << 20) - 1, 1000 << 20)


@given(st.integers(0, 10**5), st.integers(0, 1 << 40))
def test_tolerances_read_back(permille: int, floor: int) -> None:
    tolerance = Tolerance(Fraction(permille, 1000), floor)
    assert parse_tolerance(str(tolerance)) == tolerance


def test_a_third_of_a_tolerance() -> None:
    assert parse_tolerance("3% + 3 MiB").third() == parse_tolerance("1% + 1 MiB")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"),
        (512, "512 B"),
        (1023, "1023 B"),
        (65_536, "64.0 KiB"),
        (497_759_232, "474.7 MiB"),
        (1_073_741_823, "1.00 GiB"),
        (1_073_000_000, "1.00 GiB"),
        (2_029_313_024, "1.89 GiB"),
        (-1_048_576, "-1.0 MiB"),
    ],
)
def test_short_texts(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_changes_keep_the_unit_of_the_figure() -> None:
    assert format_change(472_446_402, 2_501_759_426) == "+0.44 GiB"
    assert format_change(-2 << 20, 2_501_759_426) == "-2.0 MiB"
    assert format_change(512, 2_501_759_426) == "+512 B"
    assert format_change(0, 5) == "0"


def test_percentages() -> None:
    assert format_percent(235, 1000) == "+23.5 %"
    assert format_percent(-5, 1000) == "-0.5 %"
    assert format_percent(1, 10**9) == "+0.0 %"
    assert format_percent(0, 10**9) == "0 %"
    assert format_percent(5, 0) == "new"
    assert format_percent(9_990, 1000) == "+999.0 %"
    assert format_percent(10_000, 1000) == "11x"
    assert format_percent(998_000, 1000) == "999x"
    assert format_percent(22_292_479, 1) == ">1000x"
    assert format_percent(-999, 1000) == "-99.9 %"


def test_shares() -> None:
    assert format_share(700, 1000) == "70 %"
    assert format_share(9_999, 1000) == "1000 %"
    assert format_share(10_000, 1000) == "10x"
    assert format_share(1 << 40, 1) == ">1000x"

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_vram import baseline_text
from pytest_vram.baseline_text import TextError, dump, header_of, load, new_header
from pytest_vram.trace import BILLS

RECORD: dict[str, Any] = {
    "peak_allocated": 2501234688,
    "peak_reserved": 2600000000,
    "peak_phase": "backward",
    "peak_step": 2,
    "live_after_step": 512,
    "bills": {"activations": 676331520, "parameters": 497759232},
    "phases": {"forward": 2000000000, "backward": 2501234688},
    "largest": ["411746304 activations float32[4, 512, 50257] | aten::mm | lm.head | loss.py:41 f"],
    "versions": {"torch": "2.13.0+cpu", "cuda": "12.8", "PYTORCH_CUDA_ALLOC_CONF": "a:True"},
}
TEXT = """\
# GPU-memory baselines of tests/test_gpt2.py. All figures are bytes.
# Written by pytest --vram-update. Comments above 'format' are kept, others are not.
format: 1
tests:
  test_gpt2[fp16]:
    sim/a100-80gb/torch-2.13:
      peak_allocated: 2501234688  # 2.33 GiB
      peak_reserved: 2600000000  # 2.42 GiB
      peak_phase: backward
      peak_step: 2
      live_after_step: 512
      bills:
        parameters: 497759232  # 474.7 MiB
        activations: 676331520  # 645.0 MiB
      phases:
        forward: 2000000000  # 1.86 GiB
        backward: 2501234688  # 2.33 GiB
      largest:
      - 411746304 activations float32[4, 512, 50257] | aten::mm | lm.head | loss.py:41 f  # 392.7 MiB
      versions:
        torch: 2.13.0+cpu
        cuda: '12.8'
        PYTORCH_CUDA_ALLOC_CONF: a:True
"""  # noqa: E501


def test_the_written_form() -> None:
    tests = {"test_gpt2[fp16]": {"sim/a100-80gb/torch-2.13": RECORD}}
    assert dump(tests, new_header("tests/test_gpt2.py")) == TEXT
    assert load(TEXT) == tests
    assert baseline_text._load_canonical(TEXT) == tests
    assert baseline_text._load_any(TEXT) == tests


def test_comments_at_the_top_are_a_header() -> None:
    text = "# mine: ask Ada before raising these\n\n" + TEXT
    assert header_of(text).startswith("# mine: ask Ada before raising these\n\n# GPU-memory")
    assert dump(load(text), header_of(text)) == text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2501234688  # 2.33 GiB\n      peak_r", '"2501234688"\n      peak_r'),
        ("peak_step: 2", "peak_step: 2   # a comment of mine"),
        ("      bills:\n", "      bills:   \n\n"),
        ("torch: 2.13.0+cpu", "torch: '2.13.0+cpu'"),
        ("      - 411746304", "        - 411746304"),
        ("test_gpt2[fp16]:", "? test_gpt2[fp16]\n  :"),
    ],
)
def test_other_ways_to_write_the_same_yaml(old: str, new: str) -> None:
    text = TEXT.replace(old, new, 1)
    assert text != TEXT
    assert load(text) == load(TEXT)


def test_figures_by_hand() -> None:
    text = TEXT.replace("2501234688  # 2.33 GiB\n      peak_r", "2.5 GiB\n      peak_r", 1)
    record = load(text)["test_gpt2[fp16]"]["sim/a100-80gb/torch-2.13"]
    assert record["peak_allocated"] == 2_684_354_560
    short = "format: 1\ntests:\n  test_a:\n    env:\n      peak_allocated: 1 GiB\n"
    assert load(short) == {"test_a": {"env": {"peak_allocated": 1 << 30}}}
    assert load("format: 1\ntests:\n") == {}


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("", 1, "is empty: expected 'format: 1' and 'tests:'"),
        ("tests: {}\n", 1, "has no 'format: 1' line"),
        ("format: 2\n", 1, "format 2 is newer than this pytest-vram reads (1): update pytest-vram"),
        ("format: x\n", 1, "unknown format 'x': expected 1"),
        ("format: 1\nentries: {}\n", 2, "unknown entry 'entries': expected 'format' and 'tests'"),
        ("- 1\n", 1, "the file must be a mapping of 'name: value' lines"),
        ("format: 1\ntests: 5\n", 2, "'tests' must be a mapping of 'name: value' lines"),
        ("format: 1\ntests:\n  a: [1]\n", 3, "test 'a' must be a mapping of 'name: value' lines"),
        ("format: 1\ntests:\n  a: {e: {peak_alocated: 5}}\n", 3, "unknown line 'peak_alocated'"),
        ("format: 1\ntests:\n  a: {e: {peak_allocated: -5}}\n", 3, "'-5' is not a size"),
        ("format: 1\ntests:\n  a: {e: {bills: {x: 5}}}\n", 3, "unknown line 'x': expected one of"),
        ("format: 1\ntests:\n  a: {e: {peak_allocated: [1]}}\n", 3, "expected one value"),
        ("format: 1\ntests:\n  a: {e: {largest: x}}\n", 3, "expected a list of allocations"),
        ("format: 1\ntests:\n  a: {}\n  a: {}\n", 4, "'a' is here twice (an unfinished merge?)"),
        ("format: 1\ntests:\n  a: &x {}\n  b: *x\n", 3, "anchors and aliases are not used"),
        ("format: 1\n<<<<<<< HEAD\ntests: {}\n", 2, "an unfinished merge: '<<<<<<< HEAD'"),
        ("format: 1\ntests: {\n", 3, ""),
        ("format: 1\ntests: \x00\n", 1, ""),
        (TEXT.replace("parameters: 497759232", "parameters: lots"), 13, "'lots' is not a size"),
        (
            TEXT.replace("  activations:", "  activation:"),
            14,
            "unknown line 'activation': expected",
        ),
        (
            TEXT.replace("        activations", "        parameters"),
            14,
            "'parameters' is here twice",
        ),
    ],
)
def test_broken_files_name_the_line(text: str, line: int, problem: str) -> None:
    with pytest.raises(TextError) as error:
        load(text)
    assert error.value.line == line
    assert error.value.problem.startswith(problem)


def test_tags_build_nothing() -> None:
    hostile = "format: 1\ntests:\n  !!python/object/apply:os.system ['true']: {}\n"
    with pytest.raises(TextError):
        load(hostile)


NAMES = st.one_of(
    st.text(min_size=1, max_size=30),
    st.sampled_from(
        ["test_a[x: y]", "test # b", "null", "yes", "1.5", "0x1f", "-", "?", "a:", "[b]", "{c}",
         "é", "test_x[a/b]", "test_x[a_b]",
         "'", '"', "x" * 300, "two\nlines: 5", " a", "a ", "1_000",
         "test_x[!tag]", "&a", "*a", "<<", "=", "\ufeff", "\x85", "\U0001f600", "a\tb", "12:30:45"]
    ),
)  # fmt: skip
SIZES = st.integers(0, 1 << 50)
RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "peak_allocated": SIZES,
        "peak_reserved": SIZES,
        "peak_phase": NAMES,
        "peak_step": st.integers(0, 10**5),
        "live_after_step": SIZES,
        "bills": st.dictionaries(st.sampled_from(BILLS), SIZES, min_size=1),
        "phases": st.dictionaries(NAMES, SIZES, min_size=1),
        "largest": st.lists(
            st.builds(lambda size, rest: f"{size} {rest}", SIZES, NAMES), min_size=1, max_size=3
        ),
        "versions": st.dictionaries(NAMES, NAMES, min_size=1),
    },
)


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, RECORDS, max_size=2), max_size=3))
def test_whatever_is_written_is_read_back(tests: dict[str, dict[str, Any]]) -> None:
    text = dump(tests, new_header("m"))
    assert baseline_text._load_any(text) == tests
    assert load(text) == tests
    assert dump(load(text), header_of(text)) == text


SAFE = st.from_regex(r"test_[a-z]{1,5}(\[[a-z0-9.:/,+= -]{0,8}[a-z]\])?", fullmatch=True)


@given(st.dictionaries(SAFE, st.dictionaries(SAFE, RECORDS, max_size=2), max_size=3))
def test_the_fast_reader_is_right_or_silent(tests: dict[str, dict[str, Any]]) -> None:
    fast = baseline_text._load_canonical(dump(tests, new_header("m")))
    assert fast is None or fast == tests


@given(st.text(max_size=40), st.integers(0, len(TEXT)), st.integers(0, 40))
def test_the_fast_reader_agrees_with_yaml_on_damaged_files(new: str, at: int, cut: int) -> None:
    text = TEXT[:at] + new + TEXT[at + cut :]
    fast = baseline_text._load_canonical(text)
    if fast is not None:
        assert baseline_text._load_any(text) == fast


def test_the_fast_reader_leaves_a_blank_before_the_colon_to_yaml() -> None:
    text = TEXT.replace("        cuda:", "        cuda :")
    assert baseline_text._load_canonical(text) is None
    assert load(text) == load(TEXT)


@pytest.mark.parametrize("length", [100, 129, 300, 900, 1200])
def test_long_names_are_plain_keys_as_far_as_yaml_takes_them(length: int) -> None:
    for name in (f"test[{'y' * length}]", f"test[{'y' * length}: 'é'\n]"):
        text = dump({name: {"sim/x/torch-2.13": RECORD}}, "")
        assert load(text)[name]["sim/x/torch-2.13"]["largest"] == RECORD["largest"]
        assert ("\n  ? " in text) == (length > 1000)
        if length < 1000 and "\n" not in name:
            assert baseline_text._load_canonical(text) is not None

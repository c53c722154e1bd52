"""The text of one baseline file: YAML that people review, read strictly, written one way.

::

    format: 1
    tests:
      test_gpt2[fp16]:                    raw test name
        sim/a100-80gb/torch-2.13:         environment
          peak_allocated: 2501234688  # 2.33 GiB
          bills:
            parameters: 497759232  # 474.7 MiB

A file in exactly the form that :func:`dump` writes is read by a line pattern, about ten times as
fast as PyYAML's C parser. Anything else, hand-edited YAML included, is read by PyYAML, and every
complaint names the line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from pytest_vram.quantities import format_bytes, parse_size
from pytest_vram.trace import BILLS

FORMAT = 1
#: One stored record: figures by name, ``bills``, ``phases``, ``largest``, ``versions``.
Record = dict[str, Any]
#: test name -> environment key -> record
Tests = dict[str, dict[str, Record]]

FIGURES = ("peak_allocated", "peak_reserved", "live_after_step")
_KEEPS = "# Written by pytest --vram-update. Comments above 'format' are kept, others are not."


class TextError(ValueError):
    """``line`` (from 1) of the file and what is wrong there."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line
        self.problem = problem


def load(text: str) -> Tests:
    """All records of a file. :raises TextError: where it is not a baseline file of this format."""
    tests = _load_canonical(text)
    return _load_any(text) if tests is None else tests


# ---- the fast way: only what dump() writes

_TAIL = r'(?:[!-9;-~]|:(?=[!-~])| (?=[!"$-9;-~]))*'
_WORD = rf"[A-Za-z_]{_TAIL}"
_VERSION = rf"[0-9]+\.[0-9]+\.{_TAIL}"
_INTEGER = r"0|[1-9][0-9]*"
_LINE = re.compile(
    rf"( *)(?:({_WORD}):(?: (?:({_INTEGER})(?:  \#[ -~]*)?|({_WORD}|{_VERSION}|'[!-&(-~]*')))?"
    rf"|- ((?:{_INTEGER}) {_WORD})(?:  \#[ -~]*)?)\n"
)
#: Plain scalars that YAML 1.1 does not read as text.
_RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def _load_canonical(text: str) -> Tests | None:
    """The records, or ``None`` where any line is not exactly as :func:`dump` writes it."""
    header = _header_length(text)
    if not all(line.isprintable() for line in text[:header].split("\n")):
        return None
    if not text.startswith(f"format: {FORMAT}\ntests:\n", header):
        return None
    end = header + len(f"format: {FORMAT}\ntests:\n")
    tests: Tests = {}
    # What the current line hangs below, by its indent; a line without its parent is not ours.
    test: Any = None
    record: Any = None
    group: Any = None
    bills = strings = False
    for match in _LINE.finditer(text, end):
        if match.start() != end:
            return None
        end = match.end()
        indent, key, number, word, item = match.groups()
        depth = len(indent)
        if key is None:
            if depth != 6 or type(group) is not list:
                return None
            group.append(item)
            continue
        if key.lower() in _RESERVED:
            return None
        if number is None and word is None:
            if depth == 2 and key not in tests:
                test, record, group = {}, None, None
                tests[key] = test
            elif depth == 4 and test is not None and key not in test:
                record, group = {}, None
                test[key] = record
            elif depth == 6 and record is not None and key in _GROUPS and key not in record:
                group = record[key] = [] if key == "largest" else {}
                bills, strings = key == "bills", key == "versions"
            else:
                return None
            continue
        if word is not None:
            if word[0] == "'":
                word = word[1:-1]
            elif word.lower() in _RESERVED:
                return None
        if depth == 8 and type(group) is dict and key not in group:
            if (word is not None) != strings or (bills and key not in BILLS):
                return None
            group[key] = int(number) if word is None else word
        elif depth == 6 and record is not None and key not in record:
            if (word is not None) != (key == "peak_phase") or key not in _SCALARS:
                return None
            record[key] = int(number) if word is None else word
        else:
            return None
    return tests if end == len(text) else None


# ---- the patient way: any YAML, with line numbers

_GROUPS = ("bills", "phases", "largest", "versions")
_SCALARS = (*FIGURES, "peak_phase", "peak_step")


def _load_any(text: str) -> Tests:
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith(("<<<<<<< ", ">>>>>>> ")):
            raise TextError(number, f"an unfinished merge: {line[:30]!r}")
    try:
        root = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "is not YAML"
        raise TextError(mark.line + 1 if mark else 1, problem) from None
    except (yaml.YAMLError, RecursionError) as error:
        raise TextError(1, str(error).splitlines()[0]) from None
    if root is None:
        raise TextError(1, f"is empty: expected 'format: {FORMAT}' and 'tests:'")
    top = _mapping(root, "the file", set())
    if "format" not in top:
        raise TextError(1, f"has no 'format: {FORMAT}' line")
    _check_format(top.pop("format"))
    seen: set[int] = set()
    tests = top.pop("tests", None)
    if top:
        name, node = next(iter(top.items()))
        raise TextError(_line(node), f"unknown entry {name!r}: expected 'format' and 'tests'")
    if tests is None or _is_null(tests):
        return {}
    return {
        name: {
            key: _record(below, seen)
            for key, below in _mapping(node, f"test {name!r}", seen).items()
        }
        for name, node in _mapping(tests, "'tests'", seen).items()
    }


def _check_format(node: yaml.Node) -> None:
    text = str(node.value)
    if text.isdigit() and int(text) > FORMAT:
        raise TextError(
            _line(node),
            f"format {text} is newer than this pytest-vram reads ({FORMAT}): update pytest-vram",
        )
    if text != str(FORMAT):
        raise TextError(_line(node), f"unknown format {text!r}: expected {FORMAT}")


def _record(node: yaml.Node, seen: set[int]) -> Record:
    readers: dict[str, Callable[[yaml.Node], Any]] = {
        **dict.fromkeys((*FIGURES, "peak_step"), _figure),
        "peak_phase": _text,
        "bills": lambda below: _group(below, _figure, seen, BILLS),
        "phases": lambda below: _group(below, _figure, seen),
        "versions": lambda below: _group(below, _text, seen),
        "largest": lambda below: _items(below),
    }
    record: Record = {}
    for name, below in _mapping(node, "an environment", seen).items():
        if name not in readers:
            raise TextError(
                _line(below), f"unknown line {name!r}: expected one of {', '.join(readers)}"
            )
        if not _is_null(below):
            record[name] = readers[name](below)
    return record


def _group(
    node: yaml.Node,
    read: Callable[[yaml.Node], Any],
    seen: set[int],
    known: tuple[str, ...] | None = None,
) -> dict[str, Any]:
    found = _mapping(node, "this", seen)
    for name, below in found.items():
        if known is not None and name not in known:
            raise TextError(
                _line(below), f"unknown line {name!r}: expected one of {', '.join(known)}"
            )
    return {name: read(below) for name, below in found.items()}


def _items(node: yaml.Node) -> list[str]:
    if not isinstance(node, yaml.SequenceNode):
        raise TextError(_line(node), "expected a list of allocations, one a line after '- '")
    return [_text(below) for below in node.value]


def _figure(node: yaml.Node) -> int:
    """A whole number of bytes; by hand also ``1.9 GiB``."""
    try:
        return parse_size(_text(node))
    except ValueError as error:
        raise TextError(_line(node), str(error)) from None


def _text(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise TextError(_line(node), "expected one value, not a list or mapping")
    return str(node.value)


def _mapping(node: yaml.Node, what: str, seen: set[int]) -> dict[str, yaml.Node]:
    """Keys as written. Duplicates are what a merge leaves behind; aliases have no place here."""
    if not isinstance(node, yaml.MappingNode):
        raise TextError(_line(node), f"{what} must be a mapping of 'name: value' lines")
    if id(node) in seen:
        raise TextError(_line(node), "anchors and aliases are not used in baseline files")
    seen.add(id(node))
    found: dict[str, yaml.Node] = {}
    for key, value in node.value:
        name = _text(key)
        if name in found:
            raise TextError(_line(key), f"{name!r} is here twice (an unfinished merge?)")
        found[name] = value
    return found


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


# ---- writing


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """One line for every text, whatever is in it."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: Any, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'
    node: yaml.ScalarNode = dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)
    return node


_Dumper.add_representer(str, _represent_text)

_FIGURE_LINE = re.compile(r"^( {6,8}(?!peak_step:)\S.*: ([0-9]{4,}))$", re.MULTILINE)
_ITEM_LINE = re.compile(r"^( {6}- ([0-9]{4,}) .*)$", re.MULTILINE)
#: PyYAML writes keys of more than 128 characters as ``? key`` and ``: value``. YAML takes up to
#: 1024 as they are (1.2.2, section 7.4.2), and a diff reads better.
_LONG_KEY = re.compile(r"^  \? (.{1,1000})\n  : ", re.MULTILINE)


def dump(tests: Mapping[str, Mapping[str, Record]], header: str) -> str:
    """The file's text: tests and environments sorted, one figure a line, sizes in comments."""
    ordered = {
        name: {key: _ordered(records[key]) for key in sorted(records)}
        for name, records in sorted(tests.items())
    }
    body = yaml.dump(
        {"format": FORMAT, "tests": ordered},
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=1 << 30,
    )
    body = _LONG_KEY.sub(r"  \1:\n    ", body)
    for pattern in (_FIGURE_LINE, _ITEM_LINE):
        body = pattern.sub(lambda found: f"{found[1]}  # {format_bytes(int(found[2]))}", body)
    return header + body


def _ordered(record: Record) -> Record:
    """Figures first, then the groups; bills in the ledger's order; nothing that is empty."""
    order = ("peak_allocated", "peak_reserved", "peak_phase", "peak_step", "live_after_step")
    result: Record = {key: record[key] for key in order if key in record}
    for key in _GROUPS:
        if record.get(key):
            result[key] = record[key]
    if "bills" in result:
        result["bills"] = {bill: result["bills"][bill] for bill in BILLS if bill in result["bills"]}
    return result


def new_header(module: str) -> str:
    return f"# GPU-memory baselines of {module}. All figures are bytes.\n{_KEEPS}\n"


def header_of(text: str) -> str:
    """The comment lines at the top of a file, which an update keeps."""
    return text[: _header_length(text)]


def _header_length(text: str) -> int:
    length = 0
    for line in text.split("\n"):
        if line.strip() and not line.startswith("#"):
            break
        length += len(line) + 1
    return min(length, len(text))

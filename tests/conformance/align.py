"""Align two allocator event streams and say where they part: the instrument behind exactness.

    python align.py REFERENCE.json SIMULATED.json    streams written by measure.py --events
    python align.py --program NAME [--card a100]     one of programs.py, run on the stub driver
                                                     and simulated with the same PyTorch

A stream is a list of ``[kind, bytes requested, operator, user line]``, kind ``alloc`` or ``free``.
Prints the first and the largest differences: the operator they stand at, the user's line, the
likely cause, and the rule to look at. What repeats (in every step, every layer) is one difference,
counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STUB = HERE.parent / "stub_driver" / "run.sh"
CACHE = Path(os.environ.get("VRAM_STUB_CACHE", Path.home() / ".cache" / "pytest-vram-stub"))
#: What the stub driver calls a card, and the profile that simulates it.
CARDS = {
    "a100": "a100-80gb", "h100": "h100-80gb", "t4": "t4", "l4": "l4", "rtx4090": "rtx4090",
    "v100": "v100-32gb",
}  # fmt: skip

Item = Sequence[Any]


@dataclass(frozen=True)
class Difference:
    """Reference events that the simulation lacks, and simulated ones that the reference lacks."""

    position: int
    missing: tuple[Item, ...]
    extra: tuple[Item, ...]
    operator: str
    line: str

    @property
    def weight(self) -> int:
        """Bytes that are allocated on one side only."""
        missing = sum(item[1] for item in self.missing if item[0] == "alloc")
        extra = sum(item[1] for item in self.extra if item[0] == "alloc")
        return abs(missing - extra)

    @property
    def pattern(self) -> tuple[Any, ...]:
        """What makes two differences one: the same blocks at the same operator and line."""
        sides = (tuple((k, n) for k, n, *_ in side) for side in (self.missing, self.extra))
        return (self.operator, self.line, *sides)

    @property
    def cause(self) -> str:
        wanted, got = _sizes(self.missing, "alloc"), _sizes(self.extra, "alloc")
        ends, mine = _sizes(self.missing, "free"), _sizes(self.extra, "free")
        if (sorted(wanted), sorted(ends)) == (sorted(got), sorted(mine)):
            return "same blocks in another order: the rule's steps, or the order of gradients"
        if not self.extra:
            if not wanted:
                return "blocks live longer in the simulation: who still holds them?"
            if sorted(wanted) == sorted(ends):
                return "hidden scratch: the rule lacks what is taken and given back here"
            return "hidden allocation: an output, copy or workspace that the rule lacks"
        if not self.missing:
            if not got:
                return "blocks die earlier in the simulation: what keeps them on the card?"
            return "too much: the rule takes what the card does not"
        if len(wanted) == len(got) and wanted:
            return f"another size: {_sizes_side_by_side(wanted, got)}"
        lacks, spare = Counter(wanted) - Counter(got), Counter(got) - Counter(wanted)
        if not spare and lacks:
            return f"hidden scratch or copy: the rule lacks {_listed(lacks)}"
        if not lacks and spare:
            return f"too much: the rule takes {_listed(spare)} that the card does not"
        return "another kernel, or a kernel and its scratch chosen otherwise"


def _sizes(items: Iterable[Item], kind: str) -> list[int]:
    return [item[1] for item in items if item[0] == kind]


def _listed(sizes: Counter[int]) -> str:
    return ", ".join(f"{size:,}" for size in sizes.elements())


def _sizes_side_by_side(wanted: Sequence[int], got: Sequence[int]) -> str:
    """``1,024 and not 2,048 (x 2)`` for each pair that differs."""
    pairs = dict.fromkeys((w, g) for w, g in zip(wanted, got, strict=True) if w != g)
    return ", ".join(f"{w:,} and not {g:,}" + (f" (x {g / w:.3g})" if w else "") for w, g in pairs)


def align(
    reference: Sequence[Item], simulated: Sequence[Item], look: int = 400, sure: int = 6
) -> list[Difference]:
    """Walk both streams; where they part, resume at the nearest place where ``sure`` events agree.

    Stops with one last difference when no such place lies within ``look`` events.
    """
    mine = [(item[0], item[1]) for item in simulated]
    theirs = [(item[0], item[1]) for item in reference]
    found: list[Difference] = []
    i = j = 0
    while i < len(theirs) and j < len(mine):
        if theirs[i] == mine[j]:
            i, j = i + 1, j + 1
            continue
        jump = _resume(theirs, mine, i, j, look, sure)
        x, y = jump if jump is not None else (len(theirs) - i, len(mine) - j)
        found.append(_difference(reference, simulated, i, x, j, y))
        i, j = i + x, j + y
    if i < len(theirs) or j < len(mine):
        found.append(_difference(reference, simulated, i, len(theirs) - i, j, len(mine) - j))
    return found


def _resume(
    theirs: list[Any], mine: list[Any], i: int, j: int, look: int, sure: int
) -> tuple[int, int] | None:
    places: dict[tuple[Any, ...], int] = {}
    for y in range(min(look, len(mine) - j)):
        places.setdefault(tuple(mine[j + y : j + y + sure]), y)
    best = None
    for x in range(min(look, len(theirs) - i)):
        y = places.get(tuple(theirs[i + x : i + x + sure]))
        if y is not None and (best is None or x + y < sum(best)):
            best = (x, y)
    return best


def _difference(
    reference: Sequence[Item], simulated: Sequence[Item], i: int, x: int, j: int, y: int
) -> Difference:
    at = min(j, len(simulated) - 1) if y else max(j - 1, 0)
    here = simulated[at] if simulated else ("", 0, "", "")
    return Difference(i, tuple(reference[i : i + x]), tuple(simulated[j : j + y]), here[2], here[3])


def describe(found: Sequence[Difference], most: int = 5) -> str:
    """The first and the largest differences as text."""
    if not found:
        return "the streams are equal"
    groups: dict[tuple[Any, ...], list[Difference]] = {}
    for difference in found:
        groups.setdefault(difference.pattern, []).append(difference)
    each = list(groups.values())
    heavy = sorted((one for one in each if one[0].weight), key=lambda one: -one[0].weight)
    lines = [f"{len(found)} differences, {len(each)} of them different", "first:"]
    for group in each[:most]:
        lines += _lines(group)
    if not heavy:
        return "\n".join([*lines, "largest: none changes how much is allocated"])
    lines.append("largest:")
    for group in heavy[:most]:
        place = each.index(group)
        lines += _lines(group) if place >= most else [f"  event {group[0].position}: see above"]
    return "\n".join(lines)


def _lines(group: Sequence[Difference]) -> list[str]:
    one = group[0]
    times = f", {len(group)} times" if len(group) > 1 else ""
    lines = [
        f"  event {one.position}: {one.cause}",
        f"    {one.weight:,} bytes{times}, at {one.operator or '?'} ({one.line or '?'})",
    ]
    for name, items in (("reference", one.missing), ("simulated", one.extra)):
        shown = ", ".join(f"{'+' if k == 'alloc' else '-'}{n}" for k, n, *_ in items[:10])
        more = f" ... {len(items) - 10} more" if len(items) > 10 else ""
        lines.append(f"    {name}: {shown or 'nothing'}{more}")
    if (rule := rule_of(one.operator)) is not None:
        lines.append(f"    rule: {rule}")
    return lines


def rule_of(operator: str) -> str | None:
    """File and function of the rule for ``aten::name``; None where torch or a rule is missing."""
    try:
        from pytest_vram.sim.kernels import RULES
    except ImportError:
        return None
    for func, rule in RULES.items():
        if func._schema.name == operator:
            code = rule.__code__
            return f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}"
    return "none: outputs in order (sim/kernels/fallback.py)" if operator else None


def run(program: str, card: str) -> tuple[list[Any], list[Any]]:
    """Both streams of a program of programs.py, with the stub driver's PyTorch."""
    interpreter = (CACHE / "interpreter").read_text().strip()
    environment = {**os.environ, "STUB_DEVICE": card, "PYTHONPATH": str(HERE.parents[1])}
    streams = []
    for command in (["bash", str(STUB)], [interpreter]):
        measure = [*command, str(HERE / "measure.py")]
        options = ["--simulate", CARDS[card]] if len(command) == 1 else []
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [*measure, *options, "--events", folder, program],
                env=environment, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if not (file := Path(folder, f"{program}.json")).exists():
                raise SystemExit(f"{program} did not run:\n{(done.stdout + done.stderr)[-3000:]}")
            streams.append(json.loads(file.read_text()))
    return streams[0], streams[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("streams", nargs="*", type=Path, metavar="STREAM.json")
    parser.add_argument("--program", metavar="NAME")
    parser.add_argument("--card", choices=CARDS, default="a100")
    arguments = parser.parse_args()
    if arguments.program:
        if not (CACHE / "interpreter").exists():
            raise SystemExit("build the stub driver first: make stub")
        reference, simulated = run(arguments.program, arguments.card)
    elif len(arguments.streams) == 2:
        reference, simulated = (json.loads(file.read_text()) for file in arguments.streams)
    else:
        parser.error("two streams, or --program NAME")
    print(describe(align(reference, simulated)))


if __name__ == "__main__":
    main()

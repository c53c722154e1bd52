"""The conformance page: what the simulated GPU says beside what PyTorch on CUDA says.

    python page.py simulate [SUITE ...]   this torch's figures, in fixtures/conformance/figures-*
    python page.py                        docs/conformance.md from all recorded figures
    python page.py check                  exit status 1 if the page is not what the figures say
    python fuzz.py sweep 0:100            both sides of the generated programs, in generated-*

A suite is a set of rows (case, card) with reference figures from outside this package:

* ``recordings``: a real GPU's own memory history (lm4x512.py), torch 2.6;
* ``published``: figures that others published for an A100 (published.py), torch 2.6;
* ``programs``: programs.py on PyTorch's CUDA build and the stub driver (record.py);
* ``training``: further training programs measured likewise, from ``cases/train`` of the folder that
  ``VRAM_SHARED`` names; skipped where there is none;
* ``generated``: random programs (fuzz.py, which records them itself) on PyTorch's CUDA build and
  the stub driver.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FIGURES = ROOT / "fixtures" / "conformance"
PAGE = ROOT / "docs" / "conformance.md"
SHARED = Path(os.environ.get("VRAM_SHARED", ROOT.parent / "shared"))
CASES = SHARED / "cases" / "train"
SUITES = ("recordings", "published", "programs", "training", "generated")
#: What is simulated by default: references are of these versions, all others of 2.14.
_OF_VERSION = {"2.6": SUITES[:2], "2.11": SUITES[:1]}

sys.path.insert(0, str(HERE))
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Row:
    """Peaks in bytes. A reference may lack the allocated peak, or failed itself (a generated
    program); a simulation may have failed."""

    suite: str
    case: str
    card: str
    torch: str  #: simulated with
    reference_torch: str
    reference_allocated: int | None
    reference_reserved: int | None
    allocated: int | None
    reserved: int | None
    note: str = ""

    def error(self, what: str) -> float | None:
        mine, theirs = getattr(self, what), getattr(self, f"reference_{what}")
        return None if mine is None or theirs is None else mine / theirs - 1


# -- simulating ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    suite: str
    name: str
    card: str
    profile: str
    reference_torch: str
    reference: tuple[int | None, int]
    run: Callable[[], Any]  #: what it returns is kept alive until the figures were read
    alloc_conf: str = ""
    cudnn: bool = False
    note: str = ""
    excuse: str = ""  #: why both cannot agree, shown where they do not


def simulate(case: Case) -> Row:
    import torch

    from pytest_vram.sim import Simulation, find_profile

    torch.manual_seed(0)
    gc.collect()
    allocated = reserved = None
    note, excuse = case.note, case.excuse
    enabled, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, case.cudnn
    try:
        with Simulation(find_profile(case.profile), alloc_conf=case.alloc_conf) as gpu:
            alive = case.run()
            allocated, reserved = gpu.allocator.peak_allocated, gpu.allocator.peak_reserved
            del alive
    except Exception as error:
        note = f"failed: {type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        torch.backends.cudnn.enabled = enabled
    if case.reference[0] is None:
        allocated = None
    if (allocated, reserved) != case.reference:
        note = note or excuse
    version = torch.__version__.split("+")[0]
    return Row(
        case.suite, case.name, case.card, version, case.reference_torch, *case.reference,
        allocated, reserved, note,
    )  # fmt: skip


def _reset_peak() -> None:
    import torch

    torch.cuda.reset_peak_memory_stats()


def recordings() -> Iterator[Case]:
    """The recordings of this torch's version."""
    import lm4x512
    import lm24x1024
    import torch

    version = torch.__version__.split("+")[0]
    steps: Any
    if version.startswith("2.6."):
        for name, run in lm4x512.RUNS.items():
            steps = lm4x512.train if run.train else lm4x512.forward
            yield Case(
                "recordings", name, "not named", "a100-80gb", "2.6.0",
                (run.allocated, run.reserved), lambda steps=steps, run=run: steps(run),
            )  # fmt: skip
    elif version.startswith("2.11."):
        for name, last in lm24x1024.RUNS.items():
            steps = lm24x1024.train if last.train else lm24x1024.forward
            yield Case(
                "recordings", name, "not named", "a100-80gb", "2.11.0",
                (last.allocated, last.reserved),
                lambda steps=steps, run=last: steps(run, _reset_peak),
                excuse=lm24x1024.DIFFERS.get(name, ""),
            )  # fmt: skip


def published() -> Iterator[Case]:
    from published import VARIANTS, train

    segment = 2 << 20  # reserved memory is a multiple of it, which four decimals of GiB name
    for name, variant in VARIANTS.items():
        reserved = round(variant.reserved * (1 << 30) / segment) * segment
        yield Case(
            "published", f"GPT-2 124M, {name}", "A100", "a100-80gb", "2.6.0",
            (None, reserved), lambda variant=variant: train(variant),
        )  # fmt: skip


def programs() -> Iterator[Case]:
    from programs import PROGRAMS
    from record import CARDS
    from test_programs import DIFFERS

    for file in sorted(FIGURES.glob("stub-*.json")):
        for row in json.loads(file.read_text()):
            name = row["program"]
            yield Case(
                "programs", name, row["card"], CARDS[row["card"]], row["torch"].split("+")[0],
                (row["peak_allocated"], row["peak_reserved"]),
                lambda name=name: _as_on_the_stub(PROGRAMS[name]), excuse=DIFFERS.get(name, ""),
            )  # fmt: skip


def _as_on_the_stub(make: Callable[[str], Callable[[], Any]]) -> Any:
    """The stub driver reads zeros: there, nothing is selected, and no row of a sparse gradient is
    left (as in measure.py)."""
    from pytest_vram.sim.selection import assume_selected

    with assume_selected(0.0):
        return _steps(make("cuda"))


def training() -> Iterator[Case]:
    from record import CARDS

    expected = CASES / "expected.json"
    if not expected.exists():
        return
    sys.path.insert(0, str(CASES))
    for card, rows in json.loads(expected.read_text()).items():
        if card == "about":
            continue
        name, _, setting = card.partition("_")
        for case, row in rows.items():
            yield Case(
                "training", case, card.replace("_", ", "), CARDS[name], "2.14.1",
                (row["peak_allocated"], row["peak_reserved"]),
                lambda case=case: _made(importlib.import_module(case).make("cuda")),
                alloc_conf="expandable_segments:True" if setting == "expandable" else "",
                cudnn=setting == "cudnn0",
                note="cuDNN without workspace" if setting == "cudnn0" else "",
            )  # fmt: skip


def _steps(step: Callable[[], Any]) -> Any:
    for _ in range(3):
        step()
    return step


def _made(made: tuple[Any, Any, Callable[[], Any]]) -> Any:
    _steps(made[2])
    return made


def record(suites: list[str]) -> None:
    """Simulate ``suites`` with this torch and replace their rows in this torch's file."""
    import torch

    version = ".".join(torch.__version__.split(".")[:2])
    file = FIGURES / f"figures-{version}.json"
    rows = [row for row in _read(file) if row.suite not in suites] if file.exists() else []
    for case in (case for suite in suites for case in globals()[suite]()):
        row = simulate(case)
        print(
            row.suite, row.case, row.card, row.error("allocated"), row.error("reserved"), row.note
        )
        rows.append(row)
    rows.sort(key=lambda row: SUITES.index(row.suite))
    write(file, rows)


def write(file: Path, rows: list[Row]) -> None:
    """One row a line."""
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    file.write_text(f"[\n{lines}\n]\n")


def _read(file: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(file.read_text())]


# -- the page ------------------------------------------------------------------------------------

TITLES = {
    "recordings": (
        "Recordings of a real GPU",
        "The card's own memory history. `lm4x512`: a 4-layer language model in plain operators (d "
        "512, vocabulary 10000, batch 10), from before the model was built: three forward passes, "
        "or three training steps with a textbook Adam (NiuHuangxiaozi/assignment2-systems, commit "
        "9d868b9b, MIT). `lm24x1024`: 24 layers (d 1024, batch 4), one forward pass in inference "
        "mode or one training step with AdamW after five of them (Wedsonlin/assignment2-systems, "
        "commit 87b08641, MIT). `tests/conformance/lm4x512.py` and `lm24x1024.py` are programs "
        "with the same operators; not only the peaks but every request and every free agree "
        "(`test_recordings.py`).",
    ),
    "published": (
        "Published figures",
        "Memory reserved on an A100, as rasbt/LLMs-from-scratch prints it (ch05/10, units of 2**30 "
        "bytes with four decimals), against own programs of the six variants "
        "(`tests/conformance/published.py`). The programs of the bfloat16 variants were not "
        "published, only what was changed in words.",
    ),
    "programs": (
        "Programs of many kinds",
        "`tests/conformance/programs.py`, three steps each, cuDNN off. Reference: PyTorch's CUDA "
        "build on a driver that does nothing (`tests/stub_driver`): the allocator and the host "
        "code of every operator are PyTorch's own.",
    ),
    "training": (
        "Training programs",
        "MLPs, GPTs (mixed precision, checkpointing, LoRA, accumulation, three attention kernels), "
        "ResNets, a vision transformer, an LSTM, three steps each. Reference: as above.",
    ),
    "generated": (
        "Generated programs",
        "Random training programs (`tests/conformance/fuzz.py`): modules, shapes, dtypes, losses, "
        "optimizers, autocast, checkpointing, offloading, accumulation, side streams and double "
        "backward, 100 consecutive seeds a card; three steps each, cuDNN off. "
        "Reference: as above. `$(cat ~/.cache/pytest-vram-stub/interpreter) "
        "tests/conformance/fuzz.py sweep 0:100` (after `make stub`) runs both sides of all of them "
        "again; `fuzz.py show SEED` prints a program, `fuzz.py shrink SEED --card CARD` the "
        "smallest one that still differs.",
    ),
}


def page(rows: list[Row]) -> str:
    """The page's text; the same rows give the same text."""
    parts = [_HEAD, _summary(rows)]
    for suite, (title, about) in TITLES.items():
        chosen = [row for row in rows if row.suite == suite]
        if chosen:
            parts.append(f"## {title}\n\n{about}")
            for version in sorted({row.torch for row in chosen}, key=_order):
                of_version = [row for row in chosen if row.torch == version]
                table = _by_card if suite == "generated" else _table
                parts.append(table(of_version, version))
    return "\n\n".join(parts) + "\n"


_HEAD = """\
# How exact the simulated GPU is

<!-- Generated by tests/conformance/page.py from fixtures/conformance: figures-*.json and \
generated-*.json. -->

Every row is one program on one card: the peak bytes that the simulation says and those of the \
reference, which is a real GPU, a published figure, or PyTorch's own CUDA build on a driver that \
does nothing. An empty error means equal to the byte. PyTorch itself changed between versions, so \
a row names the version simulated with and that of the reference.

What closed libraries add (cuDNN's workspaces) is left out on both sides: it is an interval, see \
[bounds.md](bounds.md).

To make the figures again: `python tests/conformance/page.py simulate` with each PyTorch, then \
`python tests/conformance/page.py`. Where a row differs, \
`python tests/conformance/align.py --program NAME --card a100` (after `make stub`) runs the \
program both ways, aligns what the two allocators were asked for, and prints the first and the \
largest differences with operator, size, likely cause and the rule to look at."""


def _summary(rows: list[Row]) -> str:
    lines = [
        "| suite | simulated with | reference | rows | allocated equal | largest error "
        "| reserved equal | largest error |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.suite, row.torch, row.reference_torch), []).append(row)
    for key in sorted(groups, key=lambda key: (SUITES.index(key[0]), _order(key[1]), key[2])):
        suite, version, reference = key
        cells = [TITLES[suite][0], f"torch {version}", f"torch {reference}", str(len(groups[key]))]
        for what in ("allocated", "reserved"):
            cells += _judged(groups[key], what)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _judged(rows: list[Row], what: str) -> list[str]:
    """How many are equal, and the largest error."""
    rows = [row for row in rows if getattr(row, f"reference_{what}") is not None]
    if not rows:
        return ["", ""]
    errors = [error for row in rows if (error := row.error(what)) is not None]
    largest = max(errors, key=abs, default=None)
    return [f"{errors.count(0)} of {len(rows)}", _percent(largest) or "0"]


def _table(rows: list[Row], version: str) -> str:
    notes = sorted({row.note for row in rows if row.note})
    references = ", ".join(sorted({row.reference_torch for row in rows}, key=_order))
    lines = [
        f"### Simulated with torch {version}, reference torch {references}",
        "",
        "| case | card | allocated | reference | error | reserved | reference | error |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        mark = f" [{notes.index(row.note) + 1}]" if row.note else ""
        cells = [f"{row.case}{mark}", row.card]
        for what in ("allocated", "reserved"):
            cells += [_bytes(getattr(row, what)), _bytes(getattr(row, f"reference_{what}"))]
            failed = row.note.startswith("failed") and getattr(row, f"reference_{what}") is not None
            cells.append("failed" if failed else _percent(row.error(what)))
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"\n[{number}] {note}" for number, note in enumerate(notes, 1)]
    return "\n".join(lines)


def _by_card(rows: list[Row], version: str) -> str:
    """How many of each card are equal, and then the others."""
    references = ", ".join(sorted({row.reference_torch for row in rows}, key=_order))
    lines = [
        f"### Simulated with torch {version}, reference torch {references}",
        "",
        "| card | programs | without reference | allocated equal | largest error | reserved equal "
        "| largest error |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for card in dict.fromkeys(row.card for row in rows):
        chosen = [row for row in rows if row.card == card]
        missing = sum(row.reference_reserved is None for row in chosen)
        cells = [card, str(len(chosen)), str(missing)]
        for what in ("allocated", "reserved"):
            cells += _judged(chosen, what)
        lines.append(f"| {' | '.join(cells)} |")
    for row in rows:
        errors = [row.error(what) for what in ("allocated", "reserved")]
        if any(errors) or row.note:
            shown = " and ".join(
                f"{what} {_percent(error) or 'equal'}"
                for what, error in zip(("allocated", "reserved"), errors, strict=True)
                if error is not None
            )
            told = "; ".join(text for text in (shown, row.note) if text)
            lines += ["", f"Seed {row.case.split()[0]}: {told}."]
    return "\n".join(lines)


def _bytes(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _percent(error: float | None) -> str:
    if not error:
        return ""
    return f"{error:+.2%}" if abs(error) >= 0.0001 else f"{error:+.4%}"


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def recorded() -> list[Row]:
    files = [*FIGURES.glob("figures-*.json"), *FIGURES.glob("generated-*.json")]
    files.sort(key=lambda file: (file.stem.split("-")[0], _order(file.stem.split("-")[1])))
    return [row for file in files for row in _read(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", default="write", choices=("write", "check", "simulate"))
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES[:-1]))
    arguments = parser.parse_args()
    if arguments.what == "simulate":
        import torch

        version = ".".join(torch.__version__.split(".")[:2])
        record(arguments.suites or list(_OF_VERSION.get(version, ("programs", "training"))))
    elif arguments.what == "write":
        PAGE.write_text(page(recorded()))
    elif PAGE.read_text() != page(recorded()):
        raise SystemExit(f"{PAGE} is not what the figures say: run tests/conformance/page.py")


if __name__ == "__main__":
    main()

"""Eight recordings of a real GPU against the simulation of the same operators: every figure equal.

The card ran torch 2.6.0, so the simulation must too: these tests run lm4x512.py in a process of
``VRAM_TORCH26_PYTHON`` (any interpreter with torch 2.6; no GPU, no CUDA needed), or in one of this
interpreter if it has that torch. Other versions of PyTorch give other figures, and rightly so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import recordings
from lm4x512 import RUNS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def _interpreter() -> str | None:
    if torch.__version__.startswith("2.6."):
        return sys.executable
    return os.environ.get("VRAM_TORCH26_PYTHON")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Peaks and event stream of each recording's program, by name."""
    python = _interpreter()
    if python is None:
        pytest.skip(
            f"the recordings are of torch 2.6, this is {torch.__version__}: set "
            "VRAM_TORCH26_PYTHON to an interpreter that has torch 2.6 and this package's "
            "requirements"
        )
    folder = tmp_path_factory.mktemp("events")
    done = subprocess.run(
        [python, str(Path(__file__).parent / "lm4x512.py"), "--events", str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(row["torch"].startswith("2.6.") for row in rows), rows
    for row in rows:
        row["events"] = json.loads((folder / f"{row['recording']}.json").read_text())
    return {row["recording"]: row for row in rows}


@pytest.mark.parametrize("name", RUNS)
def test_peaks_are_those_of_the_card(name: str, simulated: dict[str, Any]) -> None:
    run, row = RUNS[name], simulated[name]
    assert (row["peak_allocated"], row["peak_reserved"]) == (run.allocated, run.reserved)


@pytest.mark.parametrize("name", RUNS)
def test_every_request_and_every_free_is_where_the_card_had_it(
    name: str, simulated: dict[str, Any]
) -> None:
    recorded = _recorded(name)
    found = [(kind, size) for kind, size, *_ in simulated[name]["events"]]
    if RUNS[name].bf16:
        # Leaving autocast clears its cache of weight copies in the order of a hash table whose
        # keys are addresses: which copy is freed first differs from run to run.
        found, recorded = _any_order_of_frees(found), _any_order_of_frees(recorded)
    assert found == recorded


def _recorded(name: str) -> list[tuple[str, int]]:
    for folder in (recordings.SNAPSHOTS, recordings.FIXTURES):
        path = folder / f"{name}.json.gz"
        if path.exists():
            kinds = {"alloc": "alloc", "free_requested": "free"}
            trace = recordings.load(path).trace
            return [(kinds[entry[0]], entry[2]) for entry in trace if entry[0] in kinds]
    pytest.skip(f"{name}.json.gz is not in {recordings.SNAPSHOTS} (see VRAM_SHARED)")


def _any_order_of_frees(events: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Each run of frees in a row sorted by size."""
    made: list[tuple[str, int]] = []
    for kind, run in groupby(events, key=lambda event: event[0]):
        together = list(run)
        made += sorted(together) if kind == "free" else together
    return made

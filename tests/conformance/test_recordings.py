"""Recordings of real GPUs against the simulation of the same operators: every figure equal.

The cards ran torch 2.6.0 (lm4x512.py) and 2.11.0 (lm24x1024.py), so the simulation must too: these
tests run those programs in a process of ``VRAM_TORCH26_PYTHON`` and ``VRAM_TORCH211_PYTHON`` (any
interpreter with that torch; no GPU, no CUDA needed), or of this interpreter if it has that torch.
Other versions of PyTorch give other figures, and rightly so.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import lm4x512
import lm24x1024
import pytest
import recordings

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"2.6": lm4x512, "2.11": lm24x1024}
NAMES = {name: version for version, program in PROGRAMS.items() for name in program.RUNS}


def _interpreter(version: str) -> str | None:
    if torch.__version__.startswith(f"{version}."):
        return sys.executable
    return os.environ.get(f"VRAM_TORCH{version.replace('.', '')}_PYTHON")


@functools.lru_cache(maxsize=2)
def _simulated(version: str) -> dict[str, Any]:
    """Peaks and event stream of each recording's program, by name."""
    python = _interpreter(version)
    if python is None:
        pytest.skip(
            f"the recordings are of torch {version}, this is {torch.__version__}: set "
            f"VRAM_TORCH{version.replace('.', '')}_PYTHON to an interpreter that has torch "
            f"{version} and this package's requirements"
        )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [python, str(PROGRAMS[version].__file__), "--events", folder],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        rows = {row["recording"]: row for row in map(json.loads, done.stdout.splitlines())}
        for name, row in rows.items():
            assert row["torch"].startswith(f"{version}."), row["torch"]
            row["events"] = json.loads((Path(folder) / f"{name}.json").read_text())
    return rows


@pytest.fixture
def simulated(name: str) -> Any:
    return _simulated(NAMES[name])[name]


@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_those_of_the_card(name: str, simulated: Any) -> None:
    run = PROGRAMS[NAMES[name]].RUNS[name]
    assert simulated["peak_reserved"] == run.reserved
    if name in lm24x1024.DIFFERS:
        assert simulated["peak_allocated"] == run.allocated - 491_520
    else:
        assert simulated["peak_allocated"] == run.allocated


@pytest.mark.parametrize("name", NAMES)
def test_every_request_and_every_free_is_where_the_card_had_it(name: str, simulated: Any) -> None:
    recorded = _recorded(name)
    found = [(kind, size) for kind, size, *_ in simulated["events"]]
    if PROGRAMS[NAMES[name]].RUNS[name].bf16:
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

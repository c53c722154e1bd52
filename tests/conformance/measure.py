"""Run training programs and print what their memory did, one JSON object a line.

    python measure.py --simulate a100-80gb [PROGRAM ...]    on the simulated GPU
    python measure.py [PROGRAM ...]                         on CUDA (a card, or the stub driver)

Three steps of each program. ``--events DIR`` also writes the allocator's event streams.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))


def _steps(make: Callable[[str], Any], steps: int) -> None:
    step = make("cuda")
    for _ in range(steps):
        step()


def simulated(make: Callable[[str], Any], profile: str, steps: int) -> dict[str, Any]:
    from pytest_vram.sim import Simulation, find_profile
    from pytest_vram.sim.selection import assume_selected

    gc.collect()
    # The stub driver reads zeros: there, nothing is selected, and no row of a gradient is left.
    zeros = assume_selected(0.0)
    with Simulation(find_profile(profile)) as gpu, _without_cudnn(), zeros:
        _steps(make, steps)
        gc.collect()
        trace = gpu.trace()
        events = [
            [event.kind, trace.allocations[event.index].requested,
             trace.allocations[event.index].operator, trace.allocations[event.index].frame]
            for event in trace.events if event.kind in ("alloc", "free")
        ]  # fmt: skip
        stats = gpu.allocator
        return dict(
            peak_allocated=stats.peak_allocated, peak_reserved=stats.peak_reserved, events=events
        )


def measured(make: Callable[[str], Any], steps: int) -> dict[str, Any]:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    if any(base):
        raise SystemExit(f"the device already holds {base} bytes")
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=10_000_000)
    try:
        with _without_cudnn():
            _steps(make, steps)
            gc.collect()
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(None)
    events, live = [], {}
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["size"]
            events.append(["alloc", entry["size"], "", ""])
        elif entry["action"] == "free_requested":
            events.append(["free", live.pop(entry["addr"], entry["size"]), "", ""])
    return dict(
        peak_allocated=torch.cuda.max_memory_allocated(),
        peak_reserved=torch.cuda.max_memory_reserved(),
        events=events,
    )


@contextlib.contextmanager
def _without_cudnn() -> Any:
    """cuDNN's workspaces are closed heuristics; without it every byte is PyTorch's own."""
    enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = enabled


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulate", metavar="PROFILE")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--events", metavar="DIR", type=Path)
    parser.add_argument("--fuzz", metavar="FIRST:COUNT", help="generated programs instead")
    parser.add_argument("programs", nargs="*")
    arguments = parser.parse_args()
    if arguments.fuzz:
        from fuzz import generated

        first, count = map(int, arguments.fuzz.split(":"))
        chosen = {f"seed {seed}": generated(seed) for seed in range(first, first + count)}
    else:
        from programs import PROGRAMS

        chosen = {name: PROGRAMS[name] for name in arguments.programs or PROGRAMS}
    for name, make in chosen.items():
        torch.manual_seed(0)
        try:
            if arguments.simulate:
                result = simulated(make, arguments.simulate, arguments.steps)
            else:
                result = measured(make, arguments.steps)
        except Exception as error:
            result = dict(error=f"{type(error).__name__}: {error}"[:500])
        events = result.pop("events", None)
        if arguments.events and events is not None:
            arguments.events.mkdir(parents=True, exist_ok=True)
            (arguments.events / f"{name}.json").write_text(json.dumps(events))
        print(json.dumps(dict(program=name, torch=torch.__version__, **result)), flush=True)


if __name__ == "__main__":
    main()

"""What the plugin's bookkeeping costs per marked test, the passes themselves aside.

    python benchmarks/bookkeeping.py [--tests 200] [--events 2500] [--rounds 3]

The same tests run plain and marked, in processes of their own. For the marked ones the simulated
pass is replaced by a trace of a training loop that was made beforehand, so that what is left is the
plugin: attributing, ledger, timeline, comparison with the baseline, verdict, record, the terminal's
table and the written reports. The figure to stay below is 30 ms a test. Processor time, best round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pytest_vram.trace import Allocation, Event, Phase, Trace

SOURCE = """
import pytest

@pytest.mark.parametrize("number", range({tests}))
def test_plain(number): pass

@pytest.mark.vram_budget("40 GiB")
@pytest.mark.parametrize("number", range({tests}))
def test_marked(number): pass
"""
REPORTS = [f"--vram-report=report.{suffix}" for suffix in ("json", "html", "md", "csv")]
MODES: dict[str, list[str]] = {
    "plain": ["-k", "plain"],
    "marked": ["-k", "marked"],
    "marked, with baselines and four reports": ["-k", "marked", *REPORTS],
}


def training_trace(events: int) -> Trace:
    """About ``events`` allocations and frees of three training steps."""
    allocations: list[Allocation] = []
    log: list[Event] = []
    phases: list[Phase] = []

    def phase(name: str, step: int) -> None:
        phases.append(Phase(name, step))
        log.append(Event("phase", len(phases) - 1))

    def take(size: int, bill: str = "") -> int:
        place = {"module": f"h.{len(allocations) % 24}.attn", "frame": "model.py:41 forward"}
        made = Allocation(size, size, shape=(size // 4,), dtype="float32", **place)  # type: ignore[arg-type]
        made.bill, made.operator = bill, "aten::mm"
        allocations.append(made)
        log.append(Event("segment_alloc", size=size))
        log.append(Event("alloc", len(allocations) - 1))
        return len(allocations) - 1

    layers = events // 24
    phase("setup", 0)
    parameters = [take(512 * (layer + 9), "parameters") for layer in range(layers)]
    for step in (1, 2, 3):
        phase("forward", step)
        saved = [take(1024 * (layer + 9)) for layer in range(layers)]
        phase("backward", step)
        gradients = []
        for index in reversed(saved):
            gradients.append(take(512 * 9, "gradients"))
            log.append(Event("free", index))
        phase("optimizer", step)
        for index in gradients:
            log.append(Event("free", index))
        phase("between", step)
    log.extend(Event("free", index) for index in parameters)
    return Trace(allocations, log, phases)


class Canned:
    """A pytest plugin: the simulated pass of every test is this trace."""

    def __init__(self, events: int) -> None:
        self.trace = training_trace(events)

    def pytest_configure(self) -> None:
        from pytest_vram import passes
        from pytest_vram.bills import settle

        def simulate(body: Any, profile: Any) -> passes.Outcome:
            outcome = passes.Outcome("simulation", profile.name)
            body.run()
            passes._keep(settle(self.trace), outcome)
            return outcome

        passes.simulate = simulate  # type: ignore[assignment]


def child(events: int, arguments: list[str]) -> None:
    """One pytest run in this process; prints its seconds as JSON."""
    import deepdiff  # noqa: F401
    import jinja2  # noqa: F401
    import pytest

    import pytest_vram.passes
    import pytest_vram.reports.html
    import pytest_vram.reports.publish
    import pytest_vram.run  # noqa: F401

    plugin = Canned(events)
    started = time.process_time()
    code = pytest.main(
        ["-q", "-p", "no:cacheprovider", "--vram-numerics=off", *arguments], plugins=[plugin]
    )
    print(json.dumps({"seconds": time.process_time() - started, "code": int(code)}))


def run(folder: Path, events: int, arguments: list[str]) -> float:
    result = subprocess.run(
        [sys.executable, __file__, "--child", str(events), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    answer = json.loads(result.stdout.splitlines()[-1])
    if answer["code"]:
        raise SystemExit((result.stdout + result.stderr)[-2000:])
    return float(answer["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tests", type=int, default=200)
    parser.add_argument("--events", type=int, default=2500)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_a.py").write_text(SOURCE.format(tests=options.tests))
        (folder / "pytest.ini").write_text(
            "[pytest]\nasyncio_default_fixture_loop_scope = function\n"
        )
        best: dict[str, float] = {}
        for mode, arguments in MODES.items():
            if "baselines" in mode:
                run(folder, options.events, ["-k", "marked", "--vram-update"])
            best[mode] = min(run(folder, options.events, arguments) for _ in range(options.rounds))
        for mode, seconds in best.items():
            extra = 1000 * (seconds - best["plain"]) / options.tests
            print(f"{mode}: {seconds:.2f} s for {options.tests} tests, {extra:.1f} ms more a test")
        sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("report.*"))}
        print("  ".join(f"{name} {size / 1e6:.2f} MB" for name, size in sizes.items()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(int(sys.argv[2]), sys.argv[3:])
    else:
        main()

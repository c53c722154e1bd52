"""What the plugin costs a pytest run that has no marked test.

    python benchmarks/startup.py [PAIRS]

Runs pytest with the plugin and with ``-p no:vram`` in turns, each in a new process, so that a busy
machine slows both. Figures are processor time (user and system, children included), which a busy
machine changes less than the clock. The least of each kind is the best estimate of the true cost;
the median says how far the noise reaches.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

#: Name of the case -> number of unmarked tests, options.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "one test": (1, ()),
    "2,000 tests": (2000, ()),
    "one test, two workers": (1, ("-n2",)),
    "2,000 tests, two workers": (2000, ("-n2",)),
}


def processor_time(directory: Path, options: tuple[str, ...]) -> float:
    """Milliseconds of one pytest run in ``directory``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=directory,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def project(directory: Path, tests: int) -> None:
    (directory / "pytest.ini").write_text("[pytest]\n")
    lines = [f"def test_{number}(): pass\n" for number in range(tests)]
    (directory / "test_plain.py").write_text("".join(lines))


def compare(name: str, pairs: int) -> str:
    """One line of the table: medians, minima, difference of the minima, ratio."""
    tests, options = CASES[name]
    having: list[float] = []
    without: list[float] = []
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        project(directory, tests)
        processor_time(directory, options)  # fills the file cache and __pycache__
        runs = [(having, options), (without, (*options, "-p", "no:vram"))]
        for _ in range(pairs):
            for times, given in runs:
                times.append(processor_time(directory, given))
            runs.reverse()
    both = [(statistics.median(times), min(times)) for times in (having, without)]
    (median, least), (median_without, least_without) = both
    return (
        f"{name:26} {median:9.0f} {median_without:9.0f} {least:9.0f} {least_without:9.0f} "
        f"{median - median_without:+8.1f} {least - least_without:+8.1f} "
        f"{least / least_without:7.3f}"
    )


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    print(f"processor time of pytest in ms, {pairs} pairs in turns")
    print(
        f"{'':26} {'median':>9} {'without':>9} {'least':>9} {'without':>9} {'+median':>8} "
        f"{'+least':>8} {'ratio':>7}"
    )
    for name in CASES:
        print(compare(name, pairs), flush=True)


if __name__ == "__main__":
    main()

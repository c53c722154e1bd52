"""Record what the stub driver says about every program, for machines that lack it.

    python record.py [CARD ...]     writes fixtures/conformance/stub-<torch>.json

Runs measure.py on each card (STUB_DEVICE) through tests/stub_driver/run.sh.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from programs import PROGRAMS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: The stub driver's cards, and the profiles that simulate them.
CARDS = {"a100": "a100-80gb", "h100": "h100-80gb", "t4": "t4", "rtx4090": "rtx4090"}

#: Programs that differentiate through backward: their order depends on how many nodes the threads
#: of a process made before, so each gets a process of its own.
ALONE = ("gradient_penalty", "maml", "pinn", "stylegan_r1", "wgan_gp")


def record(card: str, arguments: tuple[str, ...] = ()) -> list[dict[str, object]]:
    """One JSON object per program, as measure.py prints them."""
    done = subprocess.run(
        ["bash", str(ROOT / "tests/stub_driver/run.sh"), str(HERE / "measure.py"), *arguments],
        env={**os.environ, "STUB_DEVICE": card, "TRANSFORMERS_VERBOSITY": "error"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"program"')]
    if not rows:
        raise SystemExit(f"nothing was recorded on {card}:\n{done.stderr[-2000:]}")
    return [{"card": card, **row} for row in rows]


def main() -> None:
    together = tuple(name for name in PROGRAMS if name not in ALONE)
    rows = [
        row
        for card in sys.argv[1:] or CARDS
        for names in (together, *((name,) for name in ALONE))
        for row in record(card, names)
    ]
    version = ".".join(str(rows[0]["torch"]).split(".")[:2])
    target = ROOT / "fixtures" / "conformance" / f"stub-{version}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row, sort_keys=True) for row in rows if "error" not in row)
    target.write_text(f"[\n{lines}\n]\n")
    print(f"{len(rows)} rows in {target}")


if __name__ == "__main__":
    main()

"""Runs scripts with the CUDA build of PyTorch on the stub driver (tests/stub_driver)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent
_DRIVER = _HERE.parent / "stub_driver"
_PRELUDE = """
import json, sys, torch
sys.path.insert(0, {here!r})
from workloads import *

def answer(value):
    print("ANSWER", json.dumps(value))
"""

# PyTorch's own threads may outlive the interpreter on the stub driver and abort the process after
# everything was answered: leave without C++'s teardown.
_END = """
import os
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


def _built() -> bool:
    cache = Path(os.environ.get("VRAM_STUB_CACHE") or Path.home() / ".cache/pytest-vram-stub")
    return sys.platform == "linux" and (cache / "interpreter").is_file()


@pytest.fixture
def on_stub(tmp_path: Path) -> Callable[..., Any]:
    """``on_stub(source, STUB_DEVICE="t4")`` runs ``source`` and returns what it answered."""
    if not _built():
        pytest.skip(f"the stub driver is not built: run {_DRIVER / 'build.sh'}")

    def run(source: str, **env: str) -> Any:
        script = tmp_path / "script.py"
        script.write_text(_PRELUDE.format(here=str(_HERE)) + textwrap.dedent(source) + _END)
        done = subprocess.run(
            [str(_DRIVER / "run.sh"), str(script)],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        return json.loads(answers[-1].removeprefix("ANSWER "))

    return run

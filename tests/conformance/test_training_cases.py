"""The handed training cases, against figures of PyTorch's CUDA build 2.14.1 on the stub driver.

Needs ``../shared/cases/train`` beside the project (VRAM_SHARED names another place). With torch
2.14 every peak must agree to the byte, overall and per phase; other versions run other code.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pytest_vram.sim import Simulation, find_profile

SHARED = Path(os.environ.get("VRAM_SHARED", Path(__file__).parents[3] / "shared"))
CASES = SHARED / "cases" / "train"
PROFILES = {
    "a100": "a100-80gb",
    "a100_cudnn0": "a100-80gb",  # cuDNN on, its workspaces zero
    "a100_expandable": "a100-80gb",
    "h100": "h100-80gb",
    "t4": "t4",
    "rtx4090": "rtx4090",
}
SAME_TORCH = torch.__version__.startswith("2.14.")

pytestmark = pytest.mark.skipif(
    not CASES.is_dir(), reason=f"{CASES} is not there: the handed training cases are not installed"
)


def _rows() -> list[Any]:
    if not CASES.is_dir():
        return []
    expected = json.loads((CASES / "expected.json").read_text())
    fast = {"c02_mlp_adamw_foreach", "c05_gpt_fp16_scaler_clip", "c12_lstm"}
    rows = []
    for key in PROFILES:
        for name, row in expected[key].items():
            marks = [] if key == "a100" and name in fast else [pytest.mark.slow]
            rows.append(pytest.param(key, name, row, id=f"{key}-{name}", marks=marks))
    return rows


def _load(name: str) -> ModuleType:
    if str(CASES) not in sys.path:
        sys.path.insert(0, str(CASES))
    spec = importlib.util.spec_from_file_location(f"case_{name}", CASES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Phases:
    """Peaks between marks, as the reference recorded them: by resetting PyTorch's own counters."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._name: str | None = None

    def mark(self, name: str) -> None:
        if self._name is not None:
            self.rows.append(
                [
                    self._name,
                    torch.cuda.max_memory_allocated(),
                    torch.cuda.max_memory_reserved(),
                    torch.cuda.memory_allocated(),
                    torch.cuda.memory_reserved(),
                ]
            )
        torch.cuda.reset_peak_memory_stats()
        self._name = name


def _phases(name: str) -> list[list[Any]]:
    """Three steps of the case, with marks around backward and the optimizer's step."""
    marks, number = _Phases(), [0]
    marks.mark("make")
    backward = torch.autograd.backward

    def marked(*args: Any, **kwargs: Any) -> None:
        marks.mark(f"step{number[0]}.backward")
        try:
            backward(*args, **kwargs)
        finally:
            marks.mark(f"step{number[0]}.after_backward")

    _, optimizer, step = _load(name).make("cuda")
    torch.autograd.backward = marked
    hooks = [
        optimizer.register_step_pre_hook(lambda *_: marks.mark(f"step{number[0]}.optimizer")),
        optimizer.register_step_post_hook(
            lambda *_: marks.mark(f"step{number[0]}.after_optimizer")
        ),
    ]
    try:
        for number[0] in (1, 2, 3):
            marks.mark(f"step{number[0]}.forward")
            step()
        marks.mark("end")
    finally:
        torch.autograd.backward = backward
        for hook in hooks:
            hook.remove()
    return marks.rows


@pytest.mark.parametrize(("key", "name", "row"), _rows())
def test_peaks_are_those_of_the_real_allocator(key: str, name: str, row: dict[str, Any]) -> None:
    if name in {"c10_resnet18", "c11_vit", "c13_resnet50", "c17_resnet50_amp_cl"}:
        pytest.importorskip("torchvision")
    gc.collect()
    conf = "expandable_segments:True" if key == "a100_expandable" else ""
    with Simulation(find_profile(PROFILES[key]), alloc_conf=conf) as gpu:
        enabled = torch.backends.cudnn.enabled
        torch.backends.cudnn.enabled = key == "a100_cudnn0"
        try:
            found = _phases(name)
        finally:
            torch.backends.cudnn.enabled = enabled
    allocated, reserved = max(r[1] for r in found), max(r[2] for r in found)
    assert gpu.trace().events
    if SAME_TORCH:
        assert (allocated, reserved) == (row["peak_allocated"], row["peak_reserved"])
        assert found == row["phases"]
    else:
        assert allocated == pytest.approx(row["peak_allocated"], rel=0.005)
        assert reserved == pytest.approx(row["peak_reserved"], rel=0.02)

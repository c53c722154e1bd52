"""Measured and simulated runs of one training give one ledger, on the stub driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

OnStub = Callable[..., Any]


def test_the_same_ledger_from_both(on_stub: OnStub) -> None:
    pairs = on_stub("""
        bodies = [language_model, lambda: language_model(recompute=True), perceptron]
        answer([[summary(recorded(body)[1]), summary(simulated(body))] for body in bodies])
    """)
    for measured, estimate in pairs:
        for figure in ("peak", "reserved", "phase", "bills"):
            assert measured[figure] == estimate[figure]


def test_a_marked_test_is_measured_and_compared_with_its_simulation(
    on_stub: OnStub, tmp_path: Path
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_train.py").write_text(
        """
import pytest
import torch
from workloads import LanguageModel, language_model

@pytest.mark.vram_budget("200 MiB", precision="fp16", steps=2)
def test_fits(vram):
    model = LanguageModel().to(vram.device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randint(0, 4096, (8, 128), device=vram.device)
    measurement = vram.train(model, optimizer, lambda: model(x, x), clip_grad_norm=1.0)
    assert 130 << 20 < measurement.peak_allocated < 140 << 20

@pytest.mark.vram_budget("20 MiB")
def test_does_not():
    language_model()
"""
    )
    code, lines = on_stub(
        f"""
        import contextlib, importlib.metadata, io, pytest
        arguments = [{str(tmp_path)!r}, "-p", "no:cacheprovider"]
        if not importlib.metadata.entry_points(group="pytest11", name="vram"):
            arguments += ["-p", "pytest_vram.plugin"]  # the package is on the path, not installed
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = pytest.main(arguments)
        answer([int(code), out.getvalue().splitlines()])
    """
    )
    text = "\n".join(lines)
    assert code == 1, text
    row = next(line for line in lines if "test_fits" in line)
    assert row.split()[-6:] == ["66", "%", "0", "%", "0", "ok"], text
    assert "measured on NVIDIA A100-SXM4-80GB, torch 2." in text
    assert "VRAM over budget: peak allocated 131.2 MiB, budget 20.0 MiB" in text
    assert "float32[1024, 4096]  aten::nll_loss_backward" in text

"""What differs between versions of PyTorch stands in two places: kernels' and the allocator's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pytest_vram
from pytest_vram.sim.kernels import versions

PACKAGE = Path(pytest_vram.__file__).parent
COMPARISON = re.compile(r"(<|>|==|!=)=? *\(2, \d+\)|__version__\.startswith")
#: The allocator's dialects are its own: settings, statistics and errors, version by version. Its
#: face in ``torch.cuda`` and its snapshots follow it. Every kernel's rule asks ``versions.py``.
HOMES = ("sim/allocator/", "sim/kernels/versions.py", "sim/torch_cuda.py", "sim/books.py")


def test_versions_are_compared_at_home_only() -> None:
    found = [
        f"{path.relative_to(PACKAGE).as_posix()}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if COMPARISON.search(line)
    ]
    assert [line for line in found if not line.startswith(HOMES)] == []
    assert any(line.startswith("sim/kernels/versions.py") for line in found)  # the search finds


@pytest.mark.parametrize(
    ("capability", "cudnn", "version", "environment", "first"),
    [
        ((9, 0), 92400, (2, 6), {}, False),
        ((9, 0), 90501, (2, 8), {}, False),
        ((9, 0), 90501, (2, 8), {"TORCH_CUDNN_SDPA_PREFERRED": "1"}, True),
        ((9, 0), 91002, (2, 9), {}, True),
        ((9, 0), 91002, (2, 9), {"TORCH_CUDNN_SDPA_PREFERRED": "0"}, False),
        ((9, 0), 91002, (2, 10), {}, False),
        ((10, 3), 91900, (2, 11), {}, True),
        ((9, 0), 91900, (2, 11), {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}, False),
        ((8, 0), 92400, (2, 14), {}, False),
    ],
)
def test_where_cudnn_attention_comes_first(
    capability: tuple[int, int], cudnn: int, version: tuple[int, int],
    environment: dict[str, str], first: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in ("TORCH_CUDNN_SDPA_PREFERRED", "TORCH_CUDNN_SDPA_DEPRIORITIZED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert versions.prefers_cudnn_attention(capability, cudnn, version) is first

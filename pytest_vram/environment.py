"""Environment: on what a figure was taken. Baselines are kept apart by it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from typing import Any

#: Libraries that decide what a training step allocates; their versions are kept with a baseline.
LIBRARIES = (
    "torch",
    "torchvision",
    "transformers",
    "diffusers",
    "peft",
    "accelerate",
    "lightning",
    "pytorch-lightning",
    "deepspeed",
    "bitsandbytes",
    "flash-attn",
    "xformers",
    "timm",
    "triton",
    "transformer-engine",
    "pytest-vram",
)
#: Settings of PyTorch's allocator and libraries that change figures.
VARIABLES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
)


@dataclass(frozen=True, slots=True)
class Environment:
    """``kind`` is ``cuda`` (measured) or ``sim`` (simulated); ``gpu`` the card's own name or the
    profile's. ``versions`` says what else may explain a difference."""

    kind: str
    gpu: str
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """``sim/a100-80gb/torch-2.13``: figures under one key are comparable."""
        return f"{self.kind}/{self.gpu}/torch-{_minor(self.versions.get('torch', '?'))}"

    def __str__(self) -> str:
        verb = "measured" if self.kind == "cuda" else "simulated"
        return f"{verb} on {self.gpu}, torch {self.versions.get('torch', '?')}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Environment:
        return cls(**raw)


def _minor(version: str) -> str:
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else version


@cache
def _libraries() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def environment(kind: str, gpu: str, facts: Mapping[str, str] | None = None) -> Environment:
    """The environment of this process; ``facts`` are the card's own (CUDA, cuDNN, driver)."""
    import torch

    versions = {**_libraries(), **(facts or {}), "torch": str(torch.__version__)}
    for name in VARIABLES:
        if value := os.environ.get(name):
            versions[name] = value
    return Environment(kind, gpu, dict(sorted(versions.items())))


def changed_versions(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """``torch 2.13.0 -> 2.14.1`` for everything that is not as it was; a setting that is new or
    gone counts, a library that is merely installed now does not."""
    lines = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name, ""), now.get(name, "")
        if old != new and (name.isupper() or (old and new)):
            lines.append(f"{name} {old or 'not set'} -> {new or 'not set'}")
    return lines


def nearest(key: str, others: list[str]) -> str | None:
    """The stored environment most like ``key``: same kind and card first, then same card, kind."""
    kind, _, rest = key.partition("/")
    gpu = rest.rpartition("/")[0]

    def likeness(other: str) -> tuple[bool, bool, str]:
        other_kind, _, other_rest = other.partition("/")
        return (other_rest.rpartition("/")[0] == gpu, other_kind == kind, other)

    return max(others, key=likeness, default=None)

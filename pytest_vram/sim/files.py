"""``torch.save`` and ``torch.load`` where the device that a file names is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from pytest_vram.sim.patching import Patches


def load_elsewhere(held: Patches, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """``torch.load`` reads onto the host; what ``map_location`` sends to CUDA goes through
    ``move`` afterwards."""
    load = torch.load

    def loading(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if callable(map_location) or isinstance(map_location, dict):
            return load(f, "cpu", *args, **kwargs)
        onto_cuda = map_location is not None and torch.device(map_location).type == "cuda"
        found = load(
            f, "cpu" if onto_cuda or map_location is None else map_location, *args, **kwargs
        )
        return tree_map_only(torch.Tensor, move, found) if onto_cuda else found

    held.set(torch, "load", loading)

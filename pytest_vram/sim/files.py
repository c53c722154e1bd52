"""Saving and loading where the device that a file names is not there: ``torch`` and safetensors."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from pytest_vram.sim.patching import Patches

#: Larger files are read as shapes alone: nobody has the host memory of a card.
READ_FOR_REAL = 1 << 30

Move = Callable[[torch.Tensor], torch.Tensor]


def mark_as_on_card(value: torch.Tensor) -> torch.Tensor:
    """``value`` stands in a file for a tensor of the card: its storage is tagged ``cuda:0``."""
    value.untyped_storage()._on_card = True  # type: ignore[attr-defined]
    return value


def load_elsewhere(held: Patches, move: Move) -> None:
    """``torch.load`` reads onto the host; what ``map_location`` sends to CUDA goes through
    ``move`` afterwards."""
    load = torch.load

    def loading(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return _host_first(load, move, f, map_location, *args, **kwargs)

    held.set(torch, "load", loading)


def save_and_load(held: Patches, move: Move) -> None:
    """Files name the card as where their tensors were, and ``torch.load`` puts them back there
    (``move``), or where ``map_location`` says."""
    tag, load, rebuild = torch.serialization.location_tag, torch.load, torch._utils._rebuild_tensor

    def location_tag(storage: Any) -> Any:
        return "cuda:0" if getattr(storage, "_on_card", False) else tag(storage)

    def loading(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _size(f) > READ_FOR_REAL:
            # In the simulation's own mode torch.load makes tensors without reading their values.
            return _host_first(load, move, f, map_location, *args, **kwargs)

        def place(storage: Any, location: str) -> Any:
            storage._on_card = _goes_to_card(map_location, location)
            return storage

        with _disable_current_modes():
            return load(f, place, *args, **kwargs)

    def rebuilding(storage: Any, *view: Any) -> torch.Tensor:
        tensor: torch.Tensor = rebuild(storage, *view)  # type: ignore[no-untyped-call]
        untyped = storage._untyped_storage
        if not getattr(untyped, "_on_card", False):
            return tensor
        # Tensors that share a storage in the file share one on the card.
        if not hasattr(untyped, "_card_copy"):
            whole = torch.empty(0, dtype=tensor.dtype).set_(untyped)
            untyped._card_copy = move(whole)
        copy: torch.Tensor = untyped._card_copy
        return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()

    held.set(torch.serialization, "location_tag", location_tag)
    held.set(torch._utils, "_rebuild_tensor", rebuilding)
    held.set(torch, "load", loading)
    _safetensors(held)


def _safetensors(held: Patches) -> None:
    """Its writer takes tensors by their address: simulated ones are given one on the host."""
    if importlib.util.find_spec("safetensors") is None:
        return
    module = importlib.import_module("safetensors.torch")

    def on_host(flatten: Callable[..., Any]) -> Callable[..., Any]:
        def flattening(tensors: Any, *args: Any) -> Any:
            if isinstance(tensors, dict):
                tensors = {name: _host_copy(tensor) for name, tensor in tensors.items()}
            return flatten(tensors, *args)

        return flattening

    for name in ("_flatten", "_flatten_as_ptr"):  # before and since safetensors 0.8
        if hasattr(module, name):
            held.set(module, name, on_host(getattr(module, name)))


def _host_copy(tensor: Any) -> Any:
    mode = getattr(tensor, "fake_mode", None)
    return tensor if mode is None else mode.host_values(tensor).contiguous()


def _goes_to_card(map_location: Any, location: str) -> bool:
    """Whether a storage that the file says was at ``location`` is loaded to the card."""
    if map_location is None:
        return location.startswith("cuda")
    if isinstance(map_location, dict):
        return str(map_location.get(location, location)).startswith("cuda")
    if not callable(map_location):
        return torch.device(map_location).type == "cuda"
    found = map_location(probe := _Probe(), location)
    return location.startswith("cuda") if found is None else probe.on_card


class _Probe:
    """Stands for a storage, to hear where a ``map_location`` function would put it."""

    on_card = False

    def cuda(self, *_: Any, **__: Any) -> _Probe:
        self.on_card = True
        return self

    def cpu(self, *_: Any) -> _Probe:
        self.on_card = False
        return self


def _host_first(load: Any, move: Move, f: Any, where: Any, *args: Any, **kwargs: Any) -> Any:
    if callable(where) or isinstance(where, dict):
        return load(f, "cpu", *args, **kwargs)
    onto_card = where is not None and torch.device(where).type == "cuda"
    found = load(f, "cpu" if onto_card or where is None else where, *args, **kwargs)
    return tree_map_only(torch.Tensor, move, found) if onto_card else found


def _size(f: Any) -> int:
    """Bytes of a path or of an open file; 0 where nobody knows."""
    if isinstance(f, (str, os.PathLike)):
        return os.path.getsize(f) if os.path.exists(f) else 0
    try:
        here = f.tell()
        end: int = f.seek(0, os.SEEK_END)
        f.seek(here)
    except (AttributeError, OSError):
        return 0
    return end

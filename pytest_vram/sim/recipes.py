"""What is remembered about operators: their keys, and recipes for their results.

Shapes, strides and dtypes decide what an operator returns and what its kernel allocates, so both
are worked out once: the first for each :class:`CallKey`, the second for each :class:`ProgramKey` of
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pytest_vram.sim.kernels import Program
from pytest_vram.sim.tensors import META, SimTensor

_SCALARS = (int, float, bool, str, type(None), complex)
_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class CallKey(NamedTuple):
    """Everything that decides what an operator returns for simulated tensors.

    ``arguments`` are flat: lengths of sequences, types and values of scalars, and for each tensor
    shape, stride, dtype, offset, device and lazy bits. ``dtype`` is the default one, for which
    factories ask, and integers that become floating point (x / 2). ``layout`` is set where results
    are laid out by card and switches, ``(card, cuDNN enabled)``, or by whether autograd works in
    place.
    """

    func: Any
    arguments: tuple[Any, ...]
    dtype: torch.dtype
    inference: bool
    layout: tuple[Any, bool] | bool | None = None


class ProgramKey(NamedTuple):
    """Everything beside the call that decides what its kernel allocates: a card (and the variables
    that PyTorch reads about workspaces), switches, what the test declared."""

    card: int
    switches: tuple[bool, ...]
    declared: tuple[tuple[str, int], ...] = ()


class Argument(NamedTuple):
    """A result that is an argument as it came; positions count the flat tensor arguments."""

    position: int


class Fresh(NamedTuple):
    """A result with a storage of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class ViewOf(NamedTuple):
    """A result that looks at an argument's storage."""

    position: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


Result = Argument | Fresh | ViewOf | None


class Recipe:
    """What an operator returns for arguments of given shapes, and the kernel programs that go with
    it, filled in by the ledger. ``packing``: None for a single tensor, else tuple or list.
    ``views``: places of the results that are views, and positions of the arguments they view."""

    __slots__ = ("outputs", "packing", "programs", "views")

    def __init__(self, outputs: list[Result], packing: type | None) -> None:
        self.outputs = outputs
        self.packing = packing
        self.programs: dict[ProgramKey, Program | None] = {}
        self.views = [
            (place, out.position) for place, out in enumerate(outputs) if isinstance(out, ViewOf)
        ]


class Recipes:
    """Recipes by call. They are a property of PyTorch, not of a card or a run, so all simulations
    share :data:`RECIPES`."""

    _LIMIT = 200_000

    def __init__(self) -> None:
        self._found: dict[CallKey, Recipe] = {}
        self.get = self._found.get

    def remember(self, key: CallKey, recipe: Recipe) -> None:
        if len(self._found) > self._LIMIT:
            self._found.clear()
        self._found[key] = recipe


RECIPES = Recipes()


class Uncacheable(Exception):  # noqa: N818
    """An argument of which a key cannot tell enough: sparse, quantised, nested, unknown."""


def add_to_key(items: Sequence[Any], key: list[Any], tensors: list[torch.Tensor]) -> None:
    """Flatten ``items`` into ``key``, and their tensors into ``tensors``.

    :raises Uncacheable: for an argument of which a key cannot tell enough.
    """
    for item in items:
        kind = type(item)
        if kind is SimTensor:
            if item.layout is not torch.strided:
                raise Uncacheable
            tensors.append(item)
            key.append(
                (
                    item.shape,
                    item.stride(),
                    item.dtype,
                    item.storage_offset(),
                    item.__dict__["_fake_device"],
                )
            )
            if item.is_conj() or item.is_neg():  # of a view that is conjugated when it is read
                key.append((item.is_conj(), item.is_neg()))
        elif kind in _SCALARS:
            key.append(kind)
            key.append(item)
        elif kind in (list, tuple, torch.Size):
            key.append(len(item))
            add_to_key(item, key, tensors)
        elif kind in _PLAIN:
            key.append(item)
        elif isinstance(item, torch.Tensor):
            if is_lazy(item) or item.layout is not torch.strided:
                raise Uncacheable
            if item.is_quantized or item.is_nested or is_traceable_wrapper_subclass(item):
                raise Uncacheable
            tensors.append(item)
            key.append((item.shape, item.stride(), item.dtype, item.storage_offset(), "host"))
        elif isinstance(item, torch.Generator):
            key.append("generator")
        else:
            raise Uncacheable


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def make_recipe(result: Any, flat: list[Any], tensors: list[torch.Tensor]) -> Recipe | None:
    """A recipe for outputs that are plainly new tensors, arguments or views of arguments."""
    if isinstance(result, torch.Tensor):
        packing = None
    elif type(result) in (tuple, list):
        packing = type(result)
        if len(result) != len(flat):
            return None
    elif result is None:
        return None
    else:
        return None
    places = {id(t): n for n, t in enumerate(tensors)}
    if any(isinstance(t, torch.Tensor) and t.layout is not torch.strided for t in flat):
        return None
    storages = {_storage_of(t): n for n, t in enumerate(tensors) if isinstance(t, FakeTensor)}
    outputs: list[Result] = []
    new: set[int] = set()
    for out in flat:
        if out is None:
            outputs.append(None)
            continue
        if not isinstance(out, SimTensor) and id(out) not in places:
            return None
        if id(out) in places:
            outputs.append(Argument(places[id(out)]))
            continue
        if out.is_conj() or out.is_neg() or out.layout is not torch.strided:
            return None
        storage = out.untyped_storage()
        shape, stride, device = tuple(out.shape), out.stride(), out.__dict__["_fake_device"]
        if storage._cdata in storages:
            position = storages[storage._cdata]
            offset = out.storage_offset()
            outputs.append(ViewOf(position, shape, stride, offset, out.dtype, device))
            continue
        if storage._cdata in new or out.storage_offset() != 0:
            return None
        new.add(storage._cdata)
        again = torch.empty_strided(shape, stride, dtype=out.dtype, device=META)
        if again.untyped_storage().nbytes() != storage.nbytes():
            return None
        outputs.append(Fresh(shape, stride, out.dtype, device))
    return Recipe(outputs, packing)

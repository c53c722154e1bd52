"""Jagged nested tensors, and which attention kernel PyTorch's Python code chooses for them.

They are wrappers around values and offsets, whose own dispatch runs in Python: what they keep and
compute is done with these parts, which are simulated tensors like any other. Only the wrapper is
C++'s, and says to C++ that it is on ``meta``, for the reason that
:class:`pytest_vram.sim.tensors.SimTensor` has.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from pytest_vram.sim.kernels import Card, attention
from pytest_vram.sim.patching import Patches
from pytest_vram.sim.tensors import META

#: Where ``device`` and the further dispatch keys stand in ``NestedTensor.__new__``'s call of
#: ``_make_wrapper_subclass``, the class not counted (v2.6.0 to v2.14.1).
_DEVICE, _KEYS = 6, 12

#: What ``torch.backends.cuda`` and ``torch.nested`` ask.
_ASKED: dict[str, attention.Backend] = {
    "_can_use_flash_attention": "flash",
    "_can_use_mem_efficient_attention": "efficient",
    "_can_use_cudnn_attention": "cudnn",
}


def understood(held: Patches, card: Card) -> None:
    """While ``held`` lasts, jagged tensors of simulated parts tell Python alone where they are."""
    from torch.nested._internal import nested_tensor
    from torch.nested._internal.nested_tensor import NestedTensor

    nested_tensor._nt_view_dummy()  # made once for all, of what is on meta for Python too
    make = torch.Tensor._make_wrapper_subclass

    def make_wrapper(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls, NestedTensor) and args[_DEVICE].type == "cuda":
            keys = args[_KEYS].add(torch._C.DispatchKey.AutocastCUDA)
            args = (*args[:_DEVICE], META, *args[_DEVICE + 1 : _KEYS], keys, *args[_KEYS + 1 :])
        return make(cls, *args, **kwargs)

    held.set(torch.Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper))
    for name in ("device", "is_cuda", "is_cpu", "is_meta"):
        held.set(NestedTensor, name, property(_of_values(name)))
    held.set(NestedTensor, "get_device", lambda self: self._values.get_device())
    for name, backend in _ASKED.items():
        held.replace(torch._C, **{name: functools.partial(_allowed, backend, card)})


def _allowed(backend: attention.Backend, card: Card, params: Any, debug: bool = False) -> bool:
    return attention.allows(backend, params, card)


def _of_values(name: str) -> Any:
    return lambda self: getattr(self._values, name)

"""``torch.cuda.FloatTensor`` and its kin: the types that older programs make and cast tensors with.

``Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor`` is how programs of PyTorch 0.3
begin, and many that are still run: ``images.type(Tensor)`` and ``Tensor(rows, columns)`` follow.
C++ looks the name up among the types of devices that it can start (``options_from_string``,
torch/csrc/utils/tensor_types.cpp, 2.6 to 2.14), and a build without CUDA refuses to make tensors of
them. Until the patches are undone, they mean the simulated card. As the default type they decide
for ``torch.zeros(3)``; ``torch.Tensor(3)`` stays on the host.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from pytest_vram.sim.patching import Patches


class _CardType(type):
    """The type of ``torch.cuda.FloatTensor``: calling it makes a tensor, of no class of its own."""

    dtype: torch.dtype
    original: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # Tensor.new is the same constructor, of the type of a tensor that is there.
        return torch.empty(0, dtype=cls.dtype, device="cuda").new(*args, **kwargs)

    def __instancecheck__(cls, value: object) -> bool:
        return (
            isinstance(value, Tensor)
            and value.is_cuda
            and value.dtype is cls.dtype
            and value.layout is torch.strided
        )

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.original

    def __hash__(cls) -> int:
        return hash(cls.original)


def speak_of_card_types(held: Patches) -> None:
    """Let the types of ``torch.cuda`` make tensors of the simulated card, and be a default."""
    for name, original in list(vars(torch.cuda).items()):
        if name.endswith("Tensor") and type(original) is type(torch.FloatTensor):
            members = {
                "__module__": "torch.cuda",
                "dtype": original.dtype,
                "original": original,
                "layout": torch.strided,
                "is_cuda": True,
                "is_sparse": False,
            }
            held.set(torch.cuda, name, _CardType(name, (), members))
    put = torch.set_default_tensor_type

    def set_default_tensor_type(t: Any) -> None:
        dtype = card_dtype(t)
        if dtype is None:
            put(t)
            dtype = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        torch.set_default_device("cuda" if card_dtype(t) else None)

    held.set(torch, "set_default_tensor_type", set_default_tensor_type)


def keep_defaults(stack: ExitStack) -> None:
    """The default device and dtype of now come back when ``stack`` closes: a pass that made the
    card the default leaves a device behind that nobody has."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    device, dtype = getattr(context, "device", None), torch.get_default_dtype()

    def restore() -> None:
        torch.set_default_dtype(dtype)
        if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not context:
            torch.set_default_device(device)

    stack.callback(restore)


def card_dtype(wanted: Any) -> torch.dtype | None:
    """The dtype of a type of ``torch.cuda`` (itself, or its name); None for everything else."""
    if isinstance(wanted, type):
        wanted = f"{wanted.__module__}.{wanted.__qualname__}"
    if not isinstance(wanted, str) or not wanted.startswith("torch.cuda."):
        return None
    found = getattr(torch.cuda, wanted.removeprefix("torch.cuda."), None)
    dtype = getattr(found, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def name_on_card(name: str) -> str:
    """``torch.cuda.FloatTensor`` for the name that C++ gives what stands for the card's."""
    return "torch.cuda." + name.rpartition(".")[2]


def cast_by_card_types(held: Patches) -> None:
    """Let ``Tensor.type`` take and give the types of ``torch.cuda``."""
    cast = Tensor.type

    def type_(self: Tensor, dtype: Any = None, non_blocking: bool = False, **options: Any) -> Any:
        if dtype is None:
            name = cast(self)
            return name_on_card(name) if self.is_cuda else name.replace("torch.meta.", "torch.")
        target = card_dtype(dtype)
        if target is None:
            return cast(self, dtype, non_blocking, **options)
        return self.to("cuda", target, non_blocking, **options)

    held.set(Tensor, "type", type_)

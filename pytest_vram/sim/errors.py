"""Errors of operators on simulated tensors, in the words that the card would use."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pytest_vram.sim.tensors import CPU

#: As TensorIterator says it (aten/src/ATen/TensorIterator.cpp); some operators name the argument
#: as well.
DEVICES_DIFFER = "Expected all tensors to be on the same device, but found at least two devices"

#: As the CUDA runtime says it (c10/cuda/CUDAException.cpp).
NO_SUCH_DEVICE = "CUDA error: invalid device ordinal"

#: Arguments up to this many elements are given to the host's kernel to hear what it says.
_SMALL = 1 << 20


def no_such_device() -> Exception:
    """For a tensor on ``cuda:1``: there is one card."""
    kind = getattr(torch, "AcceleratorError", RuntimeError)  # since 2.8
    return kind(NO_SUCH_DEVICE)


def as_the_card_says(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> Exception:
    """What to raise instead of ``error``, which PyTorch's fake execution of ``func`` raised.

    Shape rules written in Python have words of their own; the checks of the host's and the card's
    kernels are mostly shared, so the host's kernel is asked.
    """
    mismatch = _device_mismatch(args, kwargs, error)
    if mismatch is not None:
        return mismatch
    if not isinstance(error, (RuntimeError, IndexError, ValueError, TypeError)):
        return error
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(t.numel() > _SMALL or t.layout is not torch.strided for t in tensors):
        return error

    def on_host(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.zeros(leaf.shape, dtype=leaf.dtype)
        return CPU if isinstance(leaf, torch.device) else leaf

    try:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            host_args, host_kwargs = tree_map(on_host, (args, kwargs))
            func(*host_args, **host_kwargs)
    except type(error) as said:
        return said.with_traceback(None)
    except Exception:
        return error
    return error


def _device_mismatch(
    args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> Exception | None:
    text = str(error)
    # Until 2.12 fake execution says it its own way (torch/_subclasses/fake_tensor.py).
    if DEVICES_DIFFER not in text and "found two different devices" not in text:
        return None
    found = {
        str(leaf.device): None
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor)
    }
    return RuntimeError(f"{DEVICES_DIFFER}, {' and '.join(sorted(found, reverse=True))}!")

"""What differs between PyTorch 2.6 and 2.14, in one place: every rule asks here, none by itself."""

from __future__ import annotations

import torch
from torch._ops import OpOverload


def overload(name: str) -> OpOverload | None:
    """The overload called ``aten::name`` or ``aten::name.overload``, if this torch has it."""
    namespace, _, rest = name.partition("::")
    packet, _, which = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), packet), which or "default")
    except AttributeError:
        return None
    return found if isinstance(found, OpOverload) else None


def cublas_workspace(capability: tuple[int, int], version: tuple[int, int]) -> int:
    return 0


def cublaslt_workspace(capability: tuple[int, int], version: tuple[int, int]) -> int:
    return 0

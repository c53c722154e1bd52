"""Products of 16-bit tensors on a host that multiplies them one number at a time.

A CPU without 16-bit instructions takes dozens of times longer for a float16 product than for the
same one in float32. A GPU's tensor cores add up in float32 and round the result once (PTX ISA,
``mma.sync`` with ``.f32`` accumulators; cuBLAS and cuDNN compute 16-bit products in float32), so
going through float32 is both faster and nearer to the values that a GPU gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten

_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.addbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)


def _changes_a_list(func: Any) -> bool:
    name = func._schema.name
    return bool(name.startswith("aten::_foreach_") and name.endswith("_"))


def slow_types() -> frozenset[torch.dtype]:
    """The 16-bit types for which this host has no instructions, as oneDNN sees it."""
    asked = {
        torch.float16: getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None),
        torch.bfloat16: getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None),
    }
    return frozenset(dtype for dtype, has in asked.items() if has is None or not has())


class ThroughFloat32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this is open, products of the ``slow`` types are computed in float32 and rounded."""

    def __init__(self, slow: frozenset[torch.dtype]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slow = slow

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or args[0].dtype not in self._slow:
            result = func(*args, **kwargs)
            if _changes_a_list(func):
                # The host's foreach operators leave this to the parts they are made of, which
                # do not count below a mode.
                for tensor in args[0]:
                    increment_version(tensor)
            return result
        narrow = args[0].dtype

        def widened(tensor: Tensor) -> Tensor:
            return tensor.float() if tensor.dtype is narrow else tensor

        wide = func(*tree_map_only(Tensor, widened, args), **kwargs)
        if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            return wide[0].to(narrow), wide[1]  # the second are sums, float32 as ever
        return tree_map_only(Tensor, lambda tensor: tensor.to(narrow), wide)

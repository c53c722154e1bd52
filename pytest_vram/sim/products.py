"""Backward formulas that look at the input's zeros, as a card runs them.

``prod`` and ``cumprod`` divide by the input where it has no zero; for tensor subclasses C++ skips
the question and takes a formula that needs no division (autograd/FunctionsManual.cpp,
``prod_backward``; native/ReduceOps.cpp, ``cumprod_backward``). Simulated tensors get the formulas
for inputs without zeros. ``renorm_backward`` accumulates in double for every device but the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pytest_vram.sim.device import SimMode
from pytest_vram.sim.handlers import HANDLERS
from pytest_vram.sim.selection import assume_selected

aten = torch.ops.aten


class _Prod(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Callable[..., Tensor], input: Tensor, *args: Any) -> Tensor:
        ctx.dim, ctx.keepdim = (*args, None, False)[:2] if len(args) < 2 else args
        with torch._C._AutoDispatchBelowAutograd():
            result = call(input, *args)
        ctx.save_for_backward(input, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, result = ctx.saved_tensors
        return None, _prod_backward(grad, input.to(grad.dtype), result, ctx), None, None


def _prod_backward(grad: Tensor, input: Tensor, result: Tensor, ctx: Any) -> Tensor:
    if input.dim() == 0:
        return grad
    if ctx.dim is None:
        with assume_selected(0):
            zeros = (input == 0).nonzero()
        out = grad * (result / input).conj()
        del zeros
        return out
    if not ctx.keepdim:
        grad, result = grad.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
    mask = input == 0
    counts = mask.sum(ctx.dim, True)
    counts.sum()
    out = grad * (result / input).conj()
    del counts, mask
    return out


class _Cumprod(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Callable[..., Tensor], input: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        with torch._C._AutoDispatchBelowAutograd():
            result = call(input, dim)
        ctx.save_for_backward(input, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, result = ctx.saved_tensors
        same = grad.to(input.dtype)
        if input.numel() <= 1 or input.shape[ctx.dim] == 1:
            return None, same, None
        weighted = result.conj() * same
        zeros = input == 0
        zeros.any()
        out = _reversed_cumsum(weighted, ctx.dim).div(input.conj())
        del zeros, weighted
        return None, out, None


def _reversed_cumsum(values: Tensor, dim: int) -> Tensor:
    """In C++ temporaries live to the end of their expression and die last to first."""
    flipped = values.flip(dim)
    summed = flipped.cumsum(dim)
    result = summed.flip(dim)
    del summed, flipped
    return result


def _kernel(operator: Any, function: Any) -> Callable[..., Any]:
    """``operator`` with ``function``'s gradient where a plain tensor needs one."""

    def kernel(keys: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not input.requires_grad or not torch.is_grad_enabled() or _otherwise(input):
            return operator.redispatch(_of_cpu(keys), input, *args, **kwargs)
        return function.apply(functools.partial(operator, **kwargs), input, *args)

    return kernel


def _otherwise(input: Tensor) -> bool:
    """Under ``torch.func`` tensors are wrapped on a card too; forward mode has its own formulas."""
    if torch._C._functorch.is_functorch_wrapped_tensor(input):
        return True
    return forward_ad._current_level >= 0


def _of_cpu(keys: Any) -> Any:
    """The same keys with the CPU for a backend: PyTorch's own autograd kernel stays there."""
    return (keys & _without_backends()) | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)


@functools.cache
def _without_backends() -> Any:
    found = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    for key in torch._C.DispatchKey.__members__.values():
        keys = torch._C.DispatchKeySet(key)
        if keys.raw_repr() & _BACKENDS == 0 or "CPU" in key.name:
            found = found | keys
    return found - torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


#: The bits of a key set's raw form that name backends (c10/core/DispatchKeySet.h).
_BACKENDS = (1 << 15) - 1


def kernels() -> dict[str, Callable[..., Any]]:
    """Operator name -> its autograd kernel, which takes the key set first."""
    return {
        "prod": _kernel(aten.prod.default, _Prod),
        "prod.dim_int": _kernel(aten.prod.dim_int, _Prod),
        "cumprod": _kernel(aten.cumprod.default, _Cumprod),
    }


def _single(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``renorm_backward`` asks for the accumulation type of the tensor's device; on CUDA that is
    float for everything narrower than double (FunctionsManual.cpp, ATen/AccumulateType.h)."""
    narrower = _NARROWER.get(kwargs.get("dtype"))
    if narrower is None or args[0].dtype in _NARROWER:
        return NotImplemented
    node = torch._C._current_autograd_node()
    if node is None or not node.name().startswith("RenormBackward"):
        return NotImplemented
    with mode:
        return func(*args, **{**kwargs, "dtype": narrower})


_NARROWER = {torch.float64: torch.float32, torch.complex128: torch.complex64}


HANDLERS[aten.linalg_vector_norm.default] = _single
HANDLERS[aten.sum.dim_IntList] = _single

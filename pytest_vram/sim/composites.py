"""Composite operators that choose by device: the choice that CUDA makes.

C++ composites ask ``is_cuda()`` and would take the CPU's path for simulated tensors. Their CUDA
behaviour is registered for the simulated tensors' autograd key while a simulation lasts, and used
by the dispatch itself where autograd is off (inference mode).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from pytest_vram.sim import (  # noqa: F401  (fastpath, sampling, sparse: their handlers)
    comparisons,
    errors,
    fastpath,
    inplace,
    meta,
    products,
    sampling,
    selection,
    shapes,
    sparse,
)
from pytest_vram.sim.autocast import operators, register_kernel
from pytest_vram.sim.handlers import HANDLERS
from pytest_vram.sim.kernels import attention, batchnorm, rnn, rnn_cudnn
from pytest_vram.sim.tensors import CUDA

aten = torch.ops.aten


#: Where ``torch.func`` takes these apart before autograd sees them (ATen/functorch/
#: PyTorchOperatorHacks.cpp, BatchRulesDecompositions.cpp, v2.6.0, v2.14.1).
_TRANSFORMED = {
    "dropout": "FuncTorchDynamicLayerFrontMode",
    "scaled_dot_product_attention": "FuncTorchVmapMode",
}


@contextlib.contextmanager
def installed(simulation: Any) -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    mine: list[Any] = []
    try:
        for name, function in {**rnn.META, **shapes.META}.items():
            if operators([name]):
                register_kernel(library, name, function, "Meta")
        for name in shapes.CUDA_KERNELS:
            if operators([name]) and not has_cuda_kernel(name):
                register_kernel(library, name, shapes.kernel_of_cuda, "CUDA")
        for name, function in products.kernels().items():
            register_kernel(library, name, function, "AutogradCUDA", with_keyset=True)
        for name, function in replacements(simulation).items():
            for _, operator in operators([name]):
                register_kernel(library, name, function, "AutogradCUDA")
                if name.startswith("to."):
                    # to_impl asks the device guard for the current index: no guard, no answer
                    register_kernel(library, name, function, "AutogradCPU")
                if operator not in HANDLERS:
                    HANDLERS[operator] = _as_handler(function)
                    mine.append(operator)
        for name, key in _TRANSFORMED.items():
            if operators([name]):
                register_kernel(library, name, replacements(simulation)[name], key)
        yield
    finally:
        for operator in mine:
            del HANDLERS[operator]
        library._destroy()  # type: ignore[no-untyped-call]


def has_cuda_kernel(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"))


def _as_handler(function: Callable[..., Any]) -> Callable[..., Any]:
    def handler(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        with mode.as_called(func):
            return function(*args, **kwargs)

    return handler


def replacements(simulation: Any) -> dict[str, Callable[..., Any]]:
    """Operator name -> what it does on a CUDA device."""
    return {
        "to.device": _to_device,
        "to.dtype": _to_dtype,
        "to.dtype_layout": _to_layout,
        "to.other": _to_other,
        "dropout": dropout,
        "softmax.int": functools.partial(_softmax, aten._softmax.default),
        "log_softmax.int": functools.partial(_softmax, aten._log_softmax.default),
        "linear": functools.partial(_linear, simulation.mode),
        "batch_norm": batchnorm.batch_norm,
        "_cudnn_rnn_flatten_weight": rnn_cudnn.flatten_weight,
        **rnn.composites(simulation.card),
        **shapes.COMPOSITES,
        **comparisons.COMPOSITES,
        "where.ScalarOther": functools.partial(selection.where, simulation.mode),
        "_scaled_dot_product_attention_math": functools.partial(_math_attention, simulation.mode),
        "scaled_dot_product_attention": functools.partial(
            attention.sdpa, card=simulation.card, chosen=simulation.attention_chosen
        ),
    }


def _linear(
    mode: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """PyTorch's own ``linear``; a bias that it adds to a matmul's result is added in place."""
    with _adding(mode, bias):
        return _LINEAR(input, weight, bias)  # type: ignore[no-any-return]


def _math_attention(mode: Any, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's own math attention; it adds the mask to the scores in place."""
    with _adding(mode, inplace.EVERY_SUM):
        return _MATH(*args, **kwargs)


@contextlib.contextmanager
def _adding(mode: Any, what: Any) -> Iterator[None]:
    with mode.lock:
        outer, mode.added_in_place = mode.added_in_place, what
        try:
            yield
        finally:
            mode.added_in_place = outer


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_LINEAR = functools.partial(aten.linear.default._op_dk, _COMPOSITE)
_MATH = functools.partial(aten._scaled_dot_product_attention_math.default._op_dk, _COMPOSITE)


def _to(
    self: torch.Tensor,
    dtype: torch.dtype | None,
    device: torch.device | None,
    non_blocking: bool,
    copy: bool,
    memory_format: torch.memory_format | None,
) -> torch.Tensor:
    """``to_impl`` and ``to_will_alias`` of TensorConversions.cpp (v2.6.0, v2.14.1), with devices
    compared as Python sees them."""
    target = self.device
    if device is not None:
        if device.type == "cuda" and device.index not in (None, 0):
            raise errors.no_such_device()
        on_card = device.type == "cuda" or (device.type == "meta" and not meta.is_meant())
        target = CUDA if on_card else device
    same = target == self.device and dtype in (None, self.dtype)
    formatted = (
        memory_format is None
        or memory_format is torch.preserve_format
        or memory_format is suggest_memory_format(self)  # a 1x1 kernel that could be either copies
    )
    if same and formatted and not copy:
        return self
    return aten._to_copy.default(  # type: ignore[no-any-return]
        self,
        dtype=dtype,
        device=None if target == self.device else target,
        non_blocking=non_blocking,
        memory_format=memory_format,
    )


def _to_device(
    self: Any, device: Any, dtype: Any, non_blocking: bool = False, copy: bool = False,
    memory_format: Any = None,
) -> Any:  # fmt: skip
    return _to(self, dtype, device, non_blocking, copy, memory_format)


def _to_dtype(
    self: Any, dtype: Any, non_blocking: bool = False, copy: bool = False,
    memory_format: Any = None,
) -> Any:  # fmt: skip
    return _to(self, dtype, None, non_blocking, copy, memory_format)


def _to_layout(
    self: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: Any = None, non_blocking: bool = False, copy: bool = False,
    memory_format: Any = None,
) -> Any:  # fmt: skip
    return _to(self, dtype, device, non_blocking, copy, memory_format)


def _to_other(
    self: Any, other: Any, non_blocking: bool = False, copy: bool = False,
    memory_format: Any = None,
) -> Any:  # fmt: skip
    return _to(self, other.dtype, other.device, non_blocking, copy, memory_format)


def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout.cpp, ``is_fused_kernel_acceptable``: the fused kernel for 0 < p < 1 on CUDA."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if train and 0 < p < 1 and input.numel() > 0:
        return aten.native_dropout.default(input, p, train)[0]  # type: ignore[no-any-return]
    if p == 0 or not train or input.numel() == 0:
        return input
    return input * torch.zeros((), dtype=input.dtype, device=input.device)


def _softmax(kernel: Any, input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """SoftMax.cpp, ``softmax`` and ``log_softmax``: from half to float without a copy on CUDA."""
    widens = input.is_cuda and input.dtype is torch.float16 and dtype is torch.float32
    return kernel(input if widens or dtype is None else input.to(dtype), dim, widens)


__all__ = ["installed", "replacements"]

"""Batch normalisation: native or cuDNN, and what each takes besides its results.

Read from ATen/native/Normalization.cpp, ATen/native/cuda/Normalization.cu and Normalization.cuh,
ATen/native/cudnn/BatchNorm.cpp (v2.6.0, v2.14.1: the two act alike). The pieces that synchronised
batch norm is made of (``batch_norm_stats`` and so on) are here as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from pytest_vram.sim.kernels import (
    Card,
    Give,
    Out,
    Outputs,
    Span,
    Step,
    Take,
    moment,
    rule,
    size_of,
)
from pytest_vram.sim.kernels.iterator import Layout, contiguous, dense_like, is_flat, layout
from pytest_vram.sim.kernels.memory_format import channels_last, formatted
from pytest_vram.sim.kernels.reduce import Kind, reduction

aten = torch.ops.aten

_INT_MAX = 2**31 - 1
_HALF = (torch.float16, torch.bfloat16)


# ------------------------------------------------------------------------------------ the choice


def uses_cudnn(
    source: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None,
    variance: Tensor | None, training: bool, eps: float, enabled: bool,
) -> bool:  # fmt: skip
    """``_batch_norm_impl_index``: half inputs need fp32 parameters, bfloat16 is never cuDNN's."""
    if not enabled or weight is None or bias is None or source.dim() < 3 or eps < 0:
        return False
    if torch.bfloat16 in (source.dtype, weight.dtype):
        return False
    if source.dtype == torch.float16 and weight.dtype != torch.float32:
        return False
    both, neither = None not in (mean, variance), mean is None and variance is None
    if not both and not (neither and training):
        return False
    return source.shape[0] <= (880801 if training else 65535)


def batch_norm(
    source: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    """``aten::batch_norm`` as it runs on a CUDA card: to register on AutogradCUDA."""
    out: Tensor
    if source.numel() and uses_cudnn(
        source, weight, bias, running_mean, running_var, training, eps, cudnn_enabled
    ):
        form = _suggested(source)
        tensors = [None if t is None else t.contiguous() for t in (weight, bias)]
        running = [None if t is None else t.contiguous() for t in (running_mean, running_var)]
        out = aten.cudnn_batch_norm(
            source.contiguous(memory_format=form), *tensors, *running, training, momentum, eps
        )[0]
    else:
        out = aten.native_batch_norm(
            source, weight, bias, running_mean, running_var, training, momentum, eps
        )[0]
    return out


def _suggested(tensor: Tensor) -> torch.memory_format:
    if not channels_last(layout(tensor)):
        return torch.contiguous_format
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d


# ------------------------------------------------------------------------------- channels-last


def _last_power(number: int) -> int:
    """``lastPow2``: the largest power of two not above it, at least 1."""
    return 1 << max(number.bit_length() - 1, 0)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _grid(rows: int, channels: int) -> tuple[int, int]:
    """``flexible_launch_configs`` (Normalization.cuh): blocks along channels and along rows."""
    block_x = min(_last_power(channels), 32)
    block_y = min(_last_power(_ceil(rows, 16)), 512 // block_x)
    if block_x * block_y != 512:
        block_x = min(_last_power(channels), 512 // block_y)
    grid_y = min(_ceil(rows, block_y * 16), 128)
    return _ceil(channels, block_x), grid_y if grid_y >= 8 else 1


def _staging(plain: Layout, values: int, itemsize: int) -> Iterator[Step]:
    """Where several blocks share a channel: ``values`` numbers per channel and block, and one
    semaphore per block of channels."""
    channels = plain.shape[1]
    grid_x, grid_y = _grid(plain.numel // channels, channels)
    if grid_y > 1:
        yield Take("staging", values * channels * grid_y * itemsize, "statistics of every block")
        yield Take("semaphores", grid_x * 4, "semaphores of the blocks")
        yield Give("semaphores")
        yield Give("staging")


def _is_contiguous_as(plain: Layout, dims: int) -> bool:
    """``is_contiguous(ChannelsLast)`` for ``dims`` 4, ``ChannelsLast3d`` for 5."""
    if len(plain.shape) != dims:
        return False
    step = 1
    for dim in (1, *range(dims - 1, 1, -1), 0):
        if plain.shape[dim] != 1:
            if plain.stride[dim] != step:
                return False
            step *= plain.shape[dim]
    return True


def _is_contiguous(plain: Layout) -> bool:
    return contiguous(plain.shape, 1).stride == plain.stride or all(
        size == 1 or have == want
        for size, have, want in zip(
            plain.shape, plain.stride, contiguous(plain.shape, 1).stride, strict=True
        )
    )


def _last_kernels(plain: Layout) -> bool:
    """``batch_norm_use_channels_last_kernels``."""
    return (
        _is_contiguous_as(plain, 4)
        or _is_contiguous_as(plain, 5)
        or (_is_contiguous(plain) and plain.stride[1] == 1)
    )


def _kernels(*tensors: Layout) -> Literal["contiguous", "last", "general"]:
    """``batch_norm_choose_impl``; two tensors that disagree get the general one."""
    chosen = set()
    for plain in tensors:
        if plain.numel > _INT_MAX:
            chosen.add("general")
        elif _is_contiguous(plain):
            chosen.add("last" if plain.stride[1] == 1 else "contiguous")
        else:
            chosen.add("last" if _is_contiguous_as(plain, 4) else "general")
    return chosen.pop() if len(chosen) == 1 else "general"  # type: ignore[return-value]


def _wide(dtype: torch.dtype) -> int:
    return 4 if dtype in _HALF else dtype.itemsize


def _merged(**tensors: Layout) -> list[Take]:
    """``reshape({batch, channels, -1})``, with which the kernels for any layout begin: a copy where
    the other dimensions do not lie in one row."""
    return [
        Take(f"{name} merged", plain.nbytes, f"{name} with its features in one row")
        for name, plain in tensors.items()
        if not is_flat(plain.shape[2:], plain.stride[2:])
    ]


# --------------------------------------------------------------------------------------- forward


def _statistics(source: Tensor, card: Card) -> Iterator[Step]:
    """``batch_norm_mean_var``: mean and variance of every channel."""
    plain, wide = layout(source), _wide(source.dtype)
    kernels = _kernels(plain)
    if kernels == "last":
        yield from _staging(plain, 4, wide)
    if kernels != "general":
        return
    # var_mean_out over everything but channels; only half is read as it is
    copied = source.dtype == torch.bfloat16
    if copied:
        plain = dense_like(plain, wide)
        yield Take("cast", plain.nbytes, "input as float32")
    result = contiguous((plain.shape[1],), wide)
    kind = Kind(32 if source.dtype == torch.float64 else 16, vt0=2, vector=2, in_output=False)
    dims = (0, *range(2, len(plain.shape)))
    yield from reduction(plain, dims, (result, result), kind, card)
    if copied:
        yield Give("cast")


@rule(aten.native_batch_norm.default)
def native_batch_norm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    source, weight, bias, _, _, training = args[:6]
    yield from (Out(0), Out(1), Out(2))
    if not source.numel():
        return
    if training:
        yield from _statistics(source, card)
    if _kernels(layout(source)) == "general":  # one kernel that always multiplies and adds
        scalars = [name for name, t in (("one", weight), ("zero", bias)) if t is None]
        for name in scalars:
            yield Take(name, _wide(source.dtype), f"{name} in place of a parameter")
        yield from (Give(name) for name in reversed(scalars))


@rule(aten.batch_norm_update_stats.default)
def batch_norm_update_stats(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    yield from (Out(0), Out(1))
    yield from _statistics(args[0], card)


@rule(aten.batch_norm_stats.default)
def batch_norm_stats(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    yield from (Out(0), Out(1))
    plain = layout(args[0])
    if _last_kernels(plain):
        yield from _staging(plain, 4, _wide(args[0].dtype))
    else:
        yield from _merged(input=plain)


@rule(aten.cudnn_batch_norm.default)
def cudnn_batch_norm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Workspace and reserve space are closed: see :func:`reserve_bounds`."""
    yield Out(0)
    if args[5]:
        yield from (Out(1), Out(2))
    yield from _closed_workspace(args[0])


# -------------------------------------------------------------------------------------- backward


@rule(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    grad, source, weight, _, _, saved, _, training, _, wanted = args
    plain, incoming = layout(source), layout(grad)
    if not plain.numel:
        yield from (Out(index) for index in range(3) if wanted[index])
        return
    sums = bool(training or wanted[1] or wanted[2])
    small = max(plain.numel, incoming.numel) <= _INT_MAX
    if sums and wanted[0] and not _last_kernels(plain) and small:  # one kernel for everything
        copies = _merged(input=plain, gradient=incoming)
        yield from copies
        yield from (Out(index) for index in range(3) if wanted[index])
        yield from (Give(copy.key) for copy in reversed(copies))
        return
    wide = _wide(source.dtype)
    given = saved is not None and saved.numel() > 0
    if not training and not given:
        yield Take("invstd", plain.shape[1] * wide, "inverse standard deviation")
    scratch: list[str] = []
    if sums:
        for step in _reduce(plain, incoming, wide, weight, wanted, outputs):
            if isinstance(step, Take):
                scratch.append(step.key)
            elif isinstance(step, Give):
                scratch.remove(step.key)
            yield step
    if wanted[0]:
        scalar = weight is None and training and _kernels(plain, incoming) == "general"
        if scalar:
            yield Take("one", wide, "the weight 1")
        yield Out(0)
        if scalar:
            yield Give("one")
    yield from (Give(key) for key in reversed(scratch))
    if not training and not given:
        yield Give("invstd")


def of_gradient(source: Layout, training: bool) -> tuple[int, ...]:
    """Strides of the input's gradient: as the input suggests where the channels-last kernels sum,
    contiguous from all others."""
    last = training and _last_kernels(source) and channels_last(source)
    return formatted(source, last).stride


def _reduce(
    plain: Layout, grad: Layout, wide: int, weight: Tensor | None, wanted: Any, outputs: Outputs
) -> Iterator[Step]:
    """``batch_norm_backward_reduce_cuda``. The channels-last kernel sums everything, and gives the
    parameters' gradients even if nobody wants them (then they die with the call)."""
    last = _last_kernels(plain) and _last_kernels(grad) and grad.numel <= _INT_MAX
    copies = [] if last else _merged(input=plain, gradient=grad)
    yield from copies
    if last or wanted[0]:
        size = plain.shape[1] * wide
        yield Take("sum_dy", size, "sum of the gradient over every channel")
        yield Take("sum_dy_xmu", size, "sum of gradient times centred input")
    for index, name in ((1, "weight"), (2, "bias")):
        if outputs[index] is not None:
            yield Out(index)
        elif last and weight is not None:
            yield Take(name, size_of(weight), f"gradient of the {name}, unwanted")
    if last:
        yield from _staging(plain, 2, wide)
    yield from (Give(copy.key) for copy in reversed(copies))


@rule(aten.batch_norm_backward_reduce.default)
def batch_norm_backward_reduce(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    grad, source = args[:2]
    plain, incoming = layout(source), layout(grad)
    last = _last_kernels(plain) and _last_kernels(incoming) and incoming.numel <= _INT_MAX
    copies = [] if last else _merged(input=plain, gradient=incoming)
    yield from copies
    yield from (Out(index) for index, out in enumerate(outputs) if out is not None)
    if last:
        yield from _staging(plain, 2, _wide(source.dtype))
    yield from (Give(copy.key) for copy in reversed(copies))


@rule(aten.batch_norm_backward_elemt.default)
def batch_norm_backward_elemt(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    grad, source = args[:2]
    incoming = layout(grad)
    last = _last_kernels(incoming) and incoming.numel <= _INT_MAX
    copies = [] if last else _merged(input=layout(source), gradient=incoming)
    yield from copies
    yield Out(0)
    yield from (Give(copy.key) for copy in reversed(copies))


@rule(aten.cudnn_batch_norm_backward.default)
def cudnn_batch_norm_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    source, grad = args[:2]
    last = channels_last(layout(source))
    plain = layout(grad)
    same = _is_contiguous_as(plain, grad.dim()) if last else _is_contiguous(plain)
    if not same:
        yield Take("grad", size_of(grad), "output's gradient in the layout of the input")
    yield from (Out(0), Out(1), Out(2))
    yield from _closed_workspace(source)
    if not same:
        yield Give("grad")


def reserve_bounds(source: Tensor) -> tuple[int, int]:
    """Bytes that cuDNN's batch norm may keep for backward plus those it works in: ``(low, high)``.

    Plain batch norm (``CUDNN_BATCHNORM_OPS_BN``, the only operation PyTorch asks for) keeps
    nothing: the reserve holds the mask of a fused activation, which there is none of. The
    workspace is 0 for contiguous data; for channels last in half it holds fp32 statistics of every
    block: bounded here by two numbers per channel for each of 2,048 blocks.
    """
    plain = layout(source)
    if not channels_last(plain) or source.dtype != torch.float16:
        return (0, 0)
    rows = prod(plain.shape) // max(plain.shape[1], 1)
    return (0, 2 * 4 * plain.shape[1] * min(2048, rows))


def _closed_workspace(source: Tensor) -> Iterator[Step]:
    why = "cuDNN says what it works in only at run time"
    yield from moment(Span("cuDNN batch norm workspace", why, *reserve_bounds(source)))

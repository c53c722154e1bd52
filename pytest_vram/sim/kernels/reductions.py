"""Reductions: sum, mean, norms, extrema, logic, variance and what is composed from them.

Read from ATen/native/ReduceOps.cpp, ReduceAllOps.cpp, TensorCompare.cpp and
ATen/native/cuda/Reduce*Kernel.cu (v2.6.0, v2.14.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_vram.sim.kernels import (
    Card,
    Give,
    Out,
    Outputs,
    Step,
    Take,
    argument,
    outs,
    rule,
    scratch,
    size_of,
    versions,
)
from pytest_vram.sim.kernels.iterator import Layout, contiguous, dense_like, is_flat, layout
from pytest_vram.sim.kernels.reduce import Kind, reduced_shape, reduction

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_WIDER = {
    torch.float16: 4,
    torch.bfloat16: 4,
    torch.complex32: 8,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 4,
}


def wide(dtype: torch.dtype) -> int:
    """Bytes of ``opmath_type``: half types compute in float."""
    return _WIDER.get(dtype, dtype.itemsize)


def chosen_dims(dim: Any) -> tuple[int, ...]:
    if dim is None:
        return ()
    return (dim,) if isinstance(dim, int) else tuple(dim)


def summing(source: torch.dtype, result: torch.dtype, version: tuple[int, int]) -> Kind:
    """``sum`` and ``mean``: accumulate in float for half types, in the type itself otherwise."""
    vector = versions.half_vector(version) if source.itemsize == 2 else 4
    return Kind(wide(source), 4, vector, source not in _HALF or result not in _HALF)


def cast_input(
    source: Tensor, wanted: torch.dtype, key: str = "cast"
) -> tuple[Layout, Take | None]:
    """``self.to(wanted)``: the layout that is reduced, and the copy if one is made.

    A copy of a dense tensor keeps its strides, any other becomes contiguous.
    """
    plain = layout(source)
    if source.dtype == wanted:
        return plain, None
    copy = dense_like(plain, wanted.itemsize)
    return copy, Take(key, copy.nbytes, f"copy of the input as {str(wanted)[6:]}")


def _sum_rule(
    args: tuple[Any, ...], dims: Sequence[int], outputs: Outputs, card: Card, *, vector: bool
) -> Iterator[Step]:
    source, result = args[0], outputs[0]
    assert result is not None
    yield Out(0)
    if source.numel() == 0:
        return
    lowered = source.dtype in _HALF and result.dtype == torch.float32
    wanted = source.dtype if lowered else result.dtype
    plain, copy = cast_input(source, wanted)
    kind = summing(wanted, result.dtype, card.torch)
    if not vector:
        kind = kind._replace(vector=4)
    if copy:
        yield copy
    yield from reduction(plain, dims, (layout(result),), kind, card)
    if copy:
        yield Give(copy.key)


@rule(aten.sum.dim_IntList, aten.mean.dim, aten.sum.IntList_out, aten.mean.out)
def sum_dim(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    dims = chosen_dims(argument(args, kwargs, 1, "dim"))
    yield from _sum_rule(args, dims, outputs, card, vector=True)


@rule(aten.sum.default, aten.mean.default)
def sum_all(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    yield from _sum_rule(args, (), outputs, card, vector=True)


@rule(aten.trace.default)
def trace(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """``self.diagonal().sum()`` (native/cuda/TriangularOps.cu)."""
    return _sum_rule((args[0].diagonal(),), (), outputs, card, vector=True)


@rule(aten.nansum.default, aten.prod.default, aten.prod.dim_int)
def sum_without_vectors(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    dims = chosen_dims(argument(args, kwargs, 1, "dim"))
    yield from _sum_rule(args, dims, outputs, card, vector=False)


@rule(aten.linalg_vector_norm.default, aten.linalg_vector_norm.out)
def vector_norm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    source, result = args[0], outputs[0]
    assert result is not None
    yield Out(0)
    if source.numel() == 0:
        return
    dims = chosen_dims(argument(args, kwargs, 2, "dim"))
    asked = argument(args, kwargs, 4, "dtype") or source.dtype
    order = argument(args, kwargs, 1, "ord", 2)
    yield from norm_steps(source, order, dims, asked, layout(result), card)


def norm_steps(
    source: Tensor, order: float, dims: Sequence[int], asked: torch.dtype, into: Layout, card: Card
) -> Iterator[Step]:
    """``linalg_vector_norm`` of a tensor that is not empty, computed as ``asked``, ``into`` a
    result that exists."""
    if not source.dim() and dims:  # the dimension that a single number is said to have
        return
    if all(source.shape[d] == 1 for d in dims or range(source.dim())):
        yield from _absolute(source, asked, order)
        return
    if source.is_complex() and into.numel == source.numel() and order != 0:
        # nothing is reduced: the absolute values, by way of a complex result (see ``abs``)
        yield from scratch(size_of(source), "complex result")
        return
    lowered = source.dtype in _HALF and asked == torch.float32
    wanted = source.dtype if lowered else asked
    plain, copy = cast_input(source, wanted)
    accumulator = wide(wanted) // (2 if wanted.is_complex else 1)
    if copy:
        yield copy
    yield from reduction(plain, dims, (into,), Kind(accumulator), card)
    if copy:
        yield Give(copy.key)


def _absolute(source: Tensor, asked: torch.dtype, order: float) -> Iterator[Step]:
    """The norm of single elements is ``abs`` of a cast (``is_reduce_over_1D_vector`` in
    LinearAlgebra.cpp); that of complex numbers is complex before it is real
    (``unary_op_impl_with_complex_to_float_out``, UnaryOps.cpp)."""
    plain, copy = cast_input(source, asked)
    if copy:
        yield copy
    if asked.is_complex and order != 0:
        yield Take("absolute", plain.nbytes, "absolute values as complex numbers")
        yield Give("absolute")
    if copy:
        yield Give(copy.key)


def _plain(
    source: Layout, dims: Sequence[int], outputs: Outputs, kind: Kind, card: Card
) -> Iterator[Step]:
    """One reduction of the input as it is."""
    if 0 in source.shape:
        return
    results = [layout(o) for o in outputs if o is not None]
    yield from reduction(source, dims, results, kind, card)


@rule(aten.max.default, aten.min.default)
def extremum_of_all(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Reduces ``self.contiguous()``."""
    source = args[0]
    yield Out(0)
    if source.is_contiguous():
        yield from _plain(layout(source), (), outputs, Kind(source.element_size()), card)
        return
    copy = contiguous(tuple(source.shape), source.element_size())
    yield Take("contiguous", copy.nbytes, "contiguous copy of the input")
    yield from _plain(copy, (), outputs, Kind(source.element_size()), card)
    yield Give("contiguous")


@rule(aten.amax.default, aten.amin.default)
def extremum(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    yield from outs(outputs)
    dims = chosen_dims(argument(args, kwargs, 1, "dim"))
    yield from _plain(layout(args[0]), dims, outputs, Kind(args[0].element_size()), card)


def _index_pair(itemsize: int) -> int:
    """``pair<scalar_t, int64_t>``."""
    return 16 if itemsize <= 8 else itemsize + 8


@rule(aten.max.dim, aten.min.dim)
def extremum_with_index(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    yield from outs(outputs)
    if args[0].dim() == 0:
        return
    dims = chosen_dims(argument(args, kwargs, 1, "dim"))
    kind = Kind(_index_pair(args[0].element_size()), in_output=False)
    yield from _plain(layout(args[0]), dims, outputs, kind, card)


@rule(aten.argmax.default, aten.argmin.default)
def extremum_index(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Over all elements the input is flattened first, which copies it unless it is contiguous."""
    source, dim = args[0], argument(args, kwargs, 1, "dim")
    kind = Kind(_index_pair(wide(source.dtype)), in_output=False)
    yield Out(0)
    if source.numel() == 0:
        return
    plain = layout(source)
    copy = dim is None and not is_flat(plain.shape, plain.stride)
    if dim is None:
        step = 1 if copy else min((s for n, s in zip(*plain[:2], strict=True) if n > 1), default=1)
        offset = 0 if copy else plain.offset
        plain = Layout((source.numel(),), (step,), source.element_size(), offset)
    if copy:
        yield Take("flat", plain.nbytes, "contiguous copy of the input")
    result = outputs[0]
    assert result is not None
    into = contiguous((), 8) if dim is None else layout(result)
    yield from reduction(plain, chosen_dims(dim), (into,), kind, card)
    if copy:
        yield Give("flat")


@rule(aten.aminmax.default)
def extrema(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Of all elements: those of a contiguous copy (``aminmax_out``, ReduceOps.cpp, v2.14.1)."""
    yield from outs(outputs)
    source, dim = args[0], argument(args, kwargs, 1, "dim")
    copied = dim is None and not source.is_contiguous()
    plain = layout(source)
    if copied:
        yield Take("dense", size_of(source), "contiguous input")
        plain = contiguous(tuple(source.shape), source.element_size())
    kind = Kind(2 * source.element_size(), in_output=False)
    yield from _plain(plain, chosen_dims(dim), outputs, kind, card)
    if copied:
        yield Give("dense")


@rule(
    aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims,
    aten._is_all_true.default, aten._is_any_true.default,
)  # fmt: skip
def logic(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Accumulates in ``bool`` whatever the input; one element is only cast and copied.
    ``_is_all_true`` and ``_is_any_true`` are ``all`` and ``any`` (ReduceOps.cpp, v2.6.0, v2.14.1).
    """
    source = args[0]
    yield Out(0)
    if source.numel() == 1:
        if source.dtype != torch.bool:
            yield from scratch(1, "the single element as bool")
        return
    dims = chosen_dims(argument(args, kwargs, 1, "dim"))
    yield from _plain(layout(source), dims, outputs, Kind(1), card)


@rule(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def variance(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """``WelfordData``: two values, a 32-bit count and a value, in the wider type."""
    if args[0].is_complex():
        yield from _complex_variance(args, kwargs, outputs, card)
        return
    yield from outs(outputs)
    accumulator = 32 if args[0].dtype == torch.float64 else 16
    dims = chosen_dims(argument(args, kwargs, 1, "dim"))
    yield from _plain(
        layout(args[0]), dims, outputs, Kind(accumulator, vt0=2, vector=2, in_output=False), card
    )


def _complex_variance(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Real and imaginary part each give a variance, and a mean where that is asked for too; the
    results are their sum and the means as one number (``std_var_mean_out``)."""
    source = args[0]
    size = source.element_size() // 2
    kind = Kind(32 if size == 8 else 16, vt0=2, vector=2, in_output=False)
    dims = chosen_dims(argument(args, kwargs, 1, "dim"))
    results = [layout(o)._replace(itemsize=size) for o in outputs if o is not None]
    held = []
    for name, part in zip(("real", "imag"), _parts(layout(source)), strict=True):
        for what, result in zip(("variance", "mean"), results, strict=False):
            held.append(Take(f"{name} {what}", result.nbytes, f"{what} of the {name} part"))
            yield held[-1]
        if 0 not in part.shape:
            yield from reduction(part, dims, results, kind, card)
    yield from outs(outputs)
    for step in reversed(held):
        yield Give(step.key)


def _parts(plain: Layout) -> tuple[Layout, Layout]:
    """The real and the imaginary part of complex numbers, as views of them."""
    strides, size = tuple(2 * s for s in plain.stride), plain.itemsize // 2
    real = Layout(plain.shape, strides, size, 2 * plain.offset)
    return real, real._replace(offset=real.offset + 1)


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """``(self != 0).sum(dims)``: the comparison, its copy as int64, the sum."""
    dims = chosen_dims(argument(args, kwargs, 1, "dim"))
    result = outputs[0]
    assert result is not None
    flags = dense_like(layout(args[0]), 1)
    if args[0].dtype != torch.bool:
        yield Take("nonzero", flags.nbytes, "comparison with zero")
    yield Out(0)
    if flags.numel:
        wide_flags = flags._replace(itemsize=8)
        yield Take("cast", wide_flags.nbytes, "copy of the input as int64")
        yield from reduction(wide_flags, dims, (layout(result),), Kind(8), card)
        yield Give("cast")
    if args[0].dtype != torch.bool:
        yield Give("nonzero")


@rule(aten.logsumexp.default)
def logsumexp(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """``logsumexp_out_impl``: maxima, of complex numbers those of the real parts, a comparison with
    infinity, the shifted exponentials."""
    source = args[0]
    dims = chosen_dims(argument(args, kwargs, 1, "dim"))
    plain, size = layout(source), source.element_size()
    if source.numel() == 0:
        yield Out(0)
        return
    result = outputs[0]
    assert result is not None
    real = _parts(plain)[0] if source.is_complex() else plain
    kept = contiguous(reduced_shape(plain.shape, dims, True), real.itemsize)
    yield Take("maxes", kept.nbytes, "maxima of logsumexp")
    yield from reduction(real, dims, (kept,), Kind(real.itemsize), card, "maxes")
    yield Take("abs", kept.nbytes, "maxima compared with infinity")
    yield Take("mask", kept.numel, "maxima compared with infinity")
    yield Give("mask")
    yield Give("abs")
    shifted = dense_like(plain, size)
    yield Take("exp", shifted.nbytes, "exponentials of logsumexp")
    yield Out(0)
    kind = summing(source.dtype, source.dtype, card.torch)
    yield from reduction(shifted, dims, (layout(result),), kind, card)
    yield Give("exp")
    yield Give("maxes")

"""Elementwise operators, dropout and shape operators that take more than their results.

Elementwise kernels cast while they load (ATen/native/cuda/Loops.cuh), so mixed dtypes cost
nothing; the few operators below copy first. Read from ATen/native/Pow.cpp, TensorCompare.cpp,
Dropout.cu, TensorTransformations.cu, RreluWithNoise.cu, UnfoldBackward.cpp, Im2Col.cu and
Distributions.cu (v2.6.0, v2.14.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

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
)
from pytest_vram.sim.kernels.iterator import contiguous, dense_like, layout
from pytest_vram.sim.kernels.reduce import Kind, reduction
from pytest_vram.sim.kernels.reductions import summing

aten = torch.ops.aten


@rule(aten.native_dropout.default)
def native_dropout(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """The mask before the result, where a kernel runs at all."""
    p, train = args[1], argument(args, kwargs, 2, "train")
    if train is False or p == 1 or args[0].numel() == 0:
        return outs(outputs)
    return iter((Out(1), Out(0)))


@rule(aten._fused_dropout.default)
def fused_dropout(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    return iter((Out(1), Out(0)))


@rule(aten.pow.Scalar)
def pow_scalar(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """The base becomes a tensor on the device, unless it is 1."""
    yield Out(0)
    if args[0] != 1:
        size = 16 if isinstance(args[0], complex) else 1 if isinstance(args[0], bool) else 8
        yield from scratch(size, "base as a tensor")


@rule(aten.angle.default)
def angle(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Of complex numbers a complex result, then its real parts (UnaryOps.cpp)."""
    if args[0].is_complex():
        yield Take("complex", size_of(args[0]), "complex result")
    yield Out(0)
    if args[0].is_complex():
        yield Give("complex")


@rule(aten.isinf.default)
def isinf(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """``self.abs() == inf``, of both parts of complex numbers (TensorCompare.cpp)."""
    source, result = args[0], outputs[0]
    assert result is not None
    if source.is_complex():
        part = size_of(source) // 2
        yield Take("abs", part, "absolute values of the real part")
        yield Out(0)  # into which the other part's are or-ed
        yield Give("abs")
        yield Take("abs of imag", part, "absolute values of the imaginary part")
        yield Take("imag", size_of(result), "infinities of the imaginary part")
        yield from (Give("abs of imag"), Give("imag"))
        return
    floating = source.is_floating_point() and result.numel()
    if floating:
        yield Take("abs", size_of(source), "absolute values")
    yield Out(0)
    if floating:
        yield Give("abs")


@rule(aten.mvlgamma.default)
def mvlgamma(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """One value per dimension of the gamma function, summed (UnaryOps.cpp)."""
    source, p, result = args[0], args[1], outputs[0]
    assert result is not None
    item = result.element_size()
    yield Take("halves", p * item, "half steps")
    terms = contiguous((*source.shape, p), item)
    yield Take("terms", terms.nbytes, "a value per dimension")
    yield Give("halves")
    yield Out(0)
    if terms.numel:
        kind = summing(result.dtype, result.dtype, card.torch)
        yield from reduction(terms, (-1,), (layout(result),), kind, card)
    yield Give("terms")


@rule(aten.abs.default)
def magnitude(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Of complex numbers a complex result is made first, whose real parts are copied
    (UnaryOps.cpp, ``unary_op_impl_with_complex_to_float_out``)."""
    yield Out(0)
    if args[0].is_complex():
        yield from scratch(size_of(args[0]), "complex result")


@rule(aten.where.self)
def where(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Branches of another dtype than the result are cast first."""
    result = outputs[0]
    assert result is not None
    cast = [
        Take(name, size_of(t) // t.element_size() * result.element_size(), "branch, cast")
        for name, t in (("self", args[1]), ("other", args[2]))
        if t.dtype != result.dtype and t.device.type != "cpu"
    ]
    yield from cast
    yield Out(0)
    for step in reversed(cast):
        yield Give(step.key)


@rule(aten.equal.default)
def equal(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """``(self == other).all()``, for tensors of one shape that are not the same."""
    first, second = args
    if first.shape != second.shape or not first.numel():
        return
    flags = dense_like(layout(first), 1)
    yield Take("flags", flags.nbytes, "comparison")
    yield Take("all", 1, "whether all are equal")
    if flags.numel > 1:
        yield from reduction(flags, (), (contiguous((), 1),), Kind(1), card)
    yield Give("all")
    yield Give("flags")


@rule(aten.rrelu_with_noise.default)
def rrelu(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    yield Out(0)
    if argument(args, kwargs, 4, "training", False) and not args[0].is_contiguous():
        yield from scratch(size_of(args[0]), "contiguous result")


@rule(aten.roll.default)
def roll(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """One rolled copy per dimension; the first reads a contiguous input."""
    source, shifts = args[0], args[1]
    dims = argument(args, kwargs, 2, "dims", [])
    size = size_of(source)
    between = max(len(shifts), 1) - 1 if dims else 0
    for i in range(between):
        yield Take(f"rolled{i}", size, "rolled along one dimension")
        if i == 0 and not source.is_contiguous():
            # given back before the second roll begins
            yield Take("contiguous", size, "contiguous input")
            yield Give("contiguous")
    direct = not between and bool(dims) and not source.is_contiguous() and source.numel()
    if direct:
        yield Take("contiguous", size, "contiguous input")
    yield Out(0)
    if direct:
        yield Give("contiguous")
    for i in reversed(range(between)):
        yield Give(f"rolled{i}")


@rule(aten.unfold_backward.default)
def unfold_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """``arange`` to the end of the last window, where windows overlap; others are copied back
    (``_make_unfold_backward_iter_over_grad_in``, UnfoldBackward.h)."""
    grad, shape, dim, size, step = args[:5]
    yield Out(0)
    if step < size and shape:
        reached = (grad.shape[dim] - 1) * step + size
        yield from scratch(min(shape[dim], reached) * 8, "positions of the windows")


@rule(aten.bernoulli.default)
def bernoulli(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Probabilities in half are cast to float."""
    yield Out(0)
    if args[0].dtype in (torch.float16, torch.bfloat16):
        yield from scratch(int(args[0].numel()) * 4, "probabilities in float")


@rule(
    aten.hann_window.default,
    aten.hann_window.periodic,
    aten.hamming_window.default,
    aten.hamming_window.periodic,
    aten.bartlett_window.default,
    aten.bartlett_window.periodic,
)
def window(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """A periodic window is a symmetric one of one more element, cut."""
    result = outputs[0]
    assert result is not None
    periodic = args[1] if len(args) > 1 and isinstance(args[1], bool) else True
    extra = result.element_size() if periodic and args[0] > 1 else 0
    yield Out(0, size_of(result) + extra)


@rule(aten.im2col.default, aten.col2im.default)
def columns(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """The result is first made like the input and then resized: a larger one is made anew, a
    smaller one keeps the storage."""
    source, result = args[0], outputs[0]
    assert result is not None
    first = size_of(source)
    grows = size_of(result) > first
    if grows:
        yield Take("like", first, "result in the input's shape")
    else:
        yield Out(0, first)
    copied = not source.is_contiguous()
    if copied:
        yield Take("input", first, "contiguous input")
    if grows:
        yield Out(0)
        yield Give("like")
    if copied:
        yield Give("input")

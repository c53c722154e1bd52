"""Matrix products: workspaces of cuBLAS and cuBLASLt, copies of operands that BLAS cannot read.

Read from ATen/native/cuda/Blas.cpp, ATen/native/cuda/cuBlasCommonArgs.h, ATen/cuda/CUDABlas.cpp,
ATen/cuda/CublasHandlePool.cpp and ATen/native/LinearAlgebra.cpp (v2.6.0, v2.14.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_vram.sim.kernels import (
    Card,
    Give,
    Out,
    Outputs,
    Step,
    Take,
    Workspace,
    argument,
    rule,
    size_of,
    versions,
)
from pytest_vram.sim.kernels.iterator import is_contiguous, is_dense

aten = torch.ops.aten

_LT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Matrix(NamedTuple):
    """One operand as BLAS sees it: the batch dimension, if any, is left out of ``shape``."""

    shape: tuple[int, int]
    stride: tuple[int, int]
    size: int
    conj: bool


def matrix(tensor: Tensor, size: int | None = None) -> Matrix:
    rows, cols = tensor.shape[-2:]
    stride = tensor.stride()
    return Matrix(
        (rows, cols),
        (stride[-2], stride[-1]),
        rows * cols * tensor.element_size() if size is None else size,
        tensor.is_conj(),
    )


def _needs_copy(m: Matrix, transpose_result: bool) -> bool:
    """``prepare_matrix_for_cublas``: neither rows nor columns are readable, or a conjugation that
    the call cannot express."""
    if is_dense(m.shape, m.stride):
        transposed = is_contiguous(m.shape, m.stride)
        return m.conj and (transposed if transpose_result else not transposed)
    if m.stride[0] == 1 and m.stride[1] >= max(1, m.shape[0]):
        return m.conj and not transpose_result
    if m.stride[1] == 1 and m.stride[0] >= max(1, m.shape[1]):
        return m.conj and transpose_result
    return True


def handle_workspace(card: Card) -> Iterator[Step]:
    """The cuBLAS handle's workspace; since 2.15 it lives for one call unless caching is asked for
    (``TORCH_CUBLAS_WORKSPACE_CACHE``)."""
    if versions.keeps_cublas_workspace(card.torch):
        yield Workspace("cublas", card.cublas_workspace)
    else:
        yield Take("cublas", card.cublas_workspace, "cuBLAS workspace")
        yield Give("cublas")


def lt_workspace(card: Card) -> Iterator[Step]:
    """The workspace of a cuBLASLt call, and that of the cuBLAS handle it borrows until 2.11."""
    mode = versions.cublaslt_mode(card.torch)
    if mode == "call":
        yield Take("cublaslt", card.cublaslt_workspace, "cuBLASLt workspace")
    elif mode == "own":
        yield Workspace("cublaslt", card.cublaslt_workspace)
    if mode == "unified":
        yield Workspace("cublas", max(card.cublas_workspace, card.cublaslt_workspace))
    elif versions.lt_sets_up_cublas(card.torch):
        yield Workspace("cublas", card.cublas_workspace)
    if mode == "call":
        yield Give("cublaslt")


def _product(
    first: Matrix,
    second: Matrix,
    result: Matrix,
    card: Card,
    *,
    lt: bool = False,
    key: str = "gemm",
) -> Iterator[Step]:
    """``cublasCommonArgs`` and the call: the result is prepared first, then the left operand of
    the (swapped, if the result is row-major) product."""
    copies = []
    transpose = is_contiguous(result.shape, result.stride) or (
        not is_dense(result.shape, result.stride)
        and not (result.stride[0] == 1 and result.stride[1] >= max(1, result.shape[0]))
    )
    if _needs_copy(result._replace(conj=False), transpose):
        copies.append((f"{key}.result", result.size, "dense copy of the result"))
        transpose = True
    pair = (second, first) if transpose else (first, second)
    for name, operand in zip("ab", pair, strict=True):
        if _needs_copy(operand, transpose):
            copies.append((f"{key}.{name}", operand.size, "copy of a strided operand"))
    for copy in copies:
        yield Take(*copy)
    yield from lt_workspace(card) if lt else handle_workspace(card)
    for name, _, _ in reversed(copies):
        yield Give(name)


@rule(aten.mm.default, aten.mm.out, "aten::mm.dtype")
def mm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    first, second, result = args[0], args[1], outputs[0]
    assert result is not None
    yield Out(0)
    if result.numel() and first.shape[1]:
        yield from _product(matrix(first), matrix(second), matrix(result), card)


@rule(
    aten.addmm.default,
    aten.addmm.out,
    aten.addmm_.default,
    aten._addmm_activation.default,
)
def addmm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    bias, first, second = args[:3]
    result = outputs[0]
    assert result is not None
    yield Out(0)
    if not result.numel() or not first.shape[1]:
        return
    beta = argument(args, kwargs, 3, "beta", 1)
    yield from _product(
        matrix(first),
        matrix(second),
        matrix(result),
        card,
        lt=beta == 1 and _fuses_bias(bias, first, second, result, card),
    )


def _fuses_bias(bias: Tensor, first: Tensor, second: Tensor, result: Tensor, card: Card) -> bool:
    """``useLtInterface``, later ``isInputCompliesAddmmCudaLt``."""
    if first.dtype not in _LT_TYPES or min(second.shape) <= 1 or not result.is_contiguous():
        return False
    if not bias.is_contiguous() or not bias.dim() or bias.shape[-1] != second.shape[1]:
        return False
    if versions.fuses_row_bias(card.torch):
        return min(first.shape) > 1 and bias.numel() == bias.shape[-1]
    return bias.dim() == 1


def _batch_needs_copy(t: Tensor, transpose_result: bool, m: int, n: int) -> bool:
    """``prepare_batch_matrix_for_cublas``."""
    stride = t.stride()
    fast, lead = (stride[2], stride[1]) if transpose_result else (stride[1], stride[2])
    if fast == 1 and lead >= max(1, m):
        return t.is_conj()
    if lead == 1 and fast >= max(1, n):
        return False
    if t.is_contiguous() and stride[1] != 0 and stride[2] != 0:
        return transpose_result and t.is_conj()
    return True


@rule(
    aten.bmm.default,
    aten.bmm.out,
    aten.baddbmm.default,
    aten.baddbmm.out,
    aten.baddbmm_.default,
    "aten::bmm.dtype",
    "aten::baddbmm.dtype",
)
def bmm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    first, second = [a for a in args if isinstance(a, Tensor)][-2:]
    result = outputs[0]
    assert result is not None
    yield Out(0)
    if not result.numel() or not first.shape[2]:
        return
    if len(args) == 2 and versions.outer_product_without_blas(card.torch) and _is_outer(first):
        return  # a Triton kernel, without a workspace
    yield from _batched(first, second, result, card)


def _is_outer(first: Tensor) -> bool:
    return first.shape[2] == 1 and not first.is_complex()


def _batched(first: Tensor, second: Tensor, result: Tensor, card: Card) -> Iterator[Step]:
    _, rows, cols = result.shape
    stride = result.stride()
    transpose, copies = False, []
    if stride[1] == 1 and (cols == 1 or stride[2] >= max(1, rows)):
        pass
    elif stride[2] == 1 and (rows == 1 or stride[1] >= max(1, cols)):
        transpose = True
    else:
        copies.append(("bmm.result", size_of(result), "dense copy of the result"))
    m, n = (cols, rows) if transpose else (rows, cols)
    pair = (second, first) if transpose else (first, second)
    k = pair[0].shape[1 if transpose else 2]
    for name, operand, a, b in (("bmm.a", pair[0], m, k), ("bmm.b", pair[1], k, n)):
        if _batch_needs_copy(operand, transpose, a, b):
            copies.append((name, size_of(operand), "copy of a strided operand"))
    for copy in copies:
        yield Take(*copy)
    yield from handle_workspace(card)
    for name, _, _ in reversed(copies):
        yield Give(name)


@rule(aten.addbmm.default, aten.addbmm.out, aten.addbmm_.default)
def addbmm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """One ``addmm_`` per batch entry."""
    first, second, result = args[1], args[2], outputs[0]
    assert result is not None
    yield Out(0)
    if not result.numel() or not first.numel():
        return
    for _ in range(first.shape[0]):
        yield from _product(matrix(first), matrix(second), matrix(result), card)


@rule(aten.mv.default, aten.mv.out)
def mv(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    return _matrix_vector(args[0], args[1], outputs, card)


@rule(aten.addmv.default, aten.addmv_.default, aten.addmv.out)
def addmv(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    return _matrix_vector(args[1], args[2], outputs, card)


def _matrix_vector(mat: Tensor, vec: Tensor, outputs: Outputs, card: Card) -> Iterator[Step]:
    yield Out(0)
    if not mat.numel():
        return
    copies = []
    if vec.stride(0) == 0 and vec.shape[0] > 1:
        copies.append(("mv.vec", size_of(vec), "contiguous copy of the vector"))
    rows, cols = mat.shape
    by_column, by_row = mat.stride()
    readable = (by_column == 1 and by_row >= max(1, rows)) or (
        by_row == 1 and by_column >= max(1, cols)
    )
    if not readable and not mat.is_contiguous():
        copies.append(("mv.mat", size_of(mat), "contiguous copy of the matrix"))
    for copy in copies:
        yield Take(*copy)
    yield from handle_workspace(card)
    for name, _, _ in reversed(copies):
        yield Give(name)


@rule(aten.dot.default, aten.vdot.default)
def dot(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """The handle's workspace is set up, if it is kept at all."""
    yield Out(0)
    if versions.keeps_cublas_workspace(card.torch):
        yield Workspace("cublas", card.cublas_workspace)


@rule("aten::_scaled_mm", "aten::_scaled_mm.out")
def scaled_mm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    result = outputs[0]
    assert result is not None
    yield Out(0)
    if result.numel() and args[0].shape[1]:
        yield from _product(matrix(args[0]), matrix(args[1]), matrix(result), card, lt=True)


@rule(aten._int_mm.default, aten._int_mm.out)
def int_mm(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """``int8_gemm`` gives cuBLASLt no workspace; only the borrowed handle may have one."""
    yield Out(0)
    if versions.lt_sets_up_cublas(card.torch):
        yield Workspace("cublas", card.cublas_workspace)

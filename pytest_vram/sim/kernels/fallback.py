"""Operators without a rule: those known to take no scratch, and those of which nobody can know.

What is in :data:`PLAIN`, elementwise, a view or a factory allocates its outputs and nothing else.
For everything else the outputs are simulated, and a :class:`Span` says that there may be more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch._ops import OpOverload

from pytest_vram.sim.kernels import Outputs, Program, Span, moment, outs


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Operators whose host code allocates outputs only: recorded so with PyTorch's CUDA builds
#: (fixtures/kernels), on all the shapes and dtypes there.
PLAIN = _names(
    """
    _jagged_to_padded_dense_forward
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
    _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_ _cdist_forward _dirichlet_grad
    _embedding_bag_per_sample_weights_backward _fused_adam_ _fused_adamw_ _fused_sgd_
    _pdist_forward _prelu_kernel _prelu_kernel_backward _standard_gamma _standard_gamma_grad
    _unsafe_view binomial
    _upsample_nearest_exact2d_backward _weight_norm_interface _weight_norm_interface_backward
    adaptive_max_pool3d adaptive_max_pool3d_backward addr avg_pool3d_backward
    batch_norm_backward_elemt batch_norm_elemt batch_norm_gather_stats_with_counts
    binary_cross_entropy_backward block_diag cat channel_shuffle constant_pad_nd cummax cummin
    diag_embed diagonal_backward elu_backward flip floor_divide fractional_max_pool2d
    fractional_max_pool2d_backward gather glu glu_backward grid_sampler_2d
    grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward hardshrink_backward
    hardsigmoid_backward hardswish hardswish_backward hardtanh_backward huber_loss_backward
    index_fill_ leaky_relu_backward linalg_cross log_sigmoid_backward
    log_sigmoid_forward masked_fill_ max_pool3d_with_indices max_pool3d_with_indices_backward
    max_unpool2d mse_loss_backward
    multilabel_margin_loss_backward nll_loss2d_backward nll_loss_backward norm
    pixel_shuffle pixel_unshuffle poisson put put_ reflection_pad1d reflection_pad1d_backward
    reflection_pad2d reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward repeat
    replication_pad1d replication_pad1d_backward replication_pad2d replication_pad2d_backward
    replication_pad3d replication_pad3d_backward rot90 rrelu_with_noise_backward scatter scatter_
    scatter_reduce_ select_backward slice_backward smooth_l1_loss_backward softplus_backward
    softshrink_backward stack take tril tril_ triu upsample_bicubic2d
    upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward upsample_nearest1d
    upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    upsample_trilinear3d upsample_trilinear3d_backward
    """
)

#: Tensors made from nothing, filled in place or given another storage: there is no operand to
#: take scratch for (TensorFactories.cpp, Fill.cpp, DistributionTemplates.h).
FACTORIES = _names(
    """
    arange bernoulli bernoulli_ cauchy_ clone copy_ empty empty_like empty_permuted empty_strided
    exponential_ eye fill fill_ full full_like geometric_ lift lift_fresh linspace log_normal_
    logspace new_empty new_empty_strided new_full new_ones new_zeros normal normal_ ones ones_like
    rand rand_like randint randint_like randn randn_like random_ range resize_ resize_as_
    scalar_tensor set_ tril_indices triu_indices triu_ uniform uniform_ zero zero_ zeros
    zeros_like
    """
)

#: Dense linear algebra, whose CUDA kernels are cuSOLVER's, MAGMA's or cuBLAS's batched ones
#: (ATen/native/cuda/linalg/BatchLinearAlgebra.cpp): they say at run time what they work in.
_SOLVERS = _names(
    """
    _cholesky_solve_helper _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet
    _linalg_solve_ex _linalg_svd cholesky cholesky_inverse cholesky_solve geqrf linalg_cholesky_ex
    linalg_eig linalg_eigh linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex
    linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_qr
    linalg_solve_triangular lu_unpack ormqr triangular_solve
    """
)

#: What describes a sparse tensor, hands out its parts or joins them, and computes nothing.
_PARTS = _names(
    """
    _coalesced_ _dimI _dimV _indices _nnz _sparse_compressed_tensor_unsafe
    _sparse_coo_tensor_unsafe _sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors
    _values ccol_indices col_indices crow_indices dense_dim detach detach_ indices is_coalesced
    row_indices sparse_coo_tensor sparse_dim values
    """
)

_OWN = ("aten", "prim", "prims")
#: Collectives: NCCL's buffers lie outside PyTorch's allocator, so its figures do not hold them.
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")

_declared: ContextVar[tuple[tuple[str, int], ...]] = ContextVar("declared", default=())


@contextlib.contextmanager
def assume_scratch(operator: str, size: int) -> Iterator[None]:
    """Within it ``operator`` (``"mylib::norm"``) takes at most ``size`` bytes beside its outputs.

    :raises ValueError: for a name without a namespace, and for less than 0 bytes.
    """
    if "::" not in operator:
        raise ValueError(f"an operator is called like 'mylib::norm', not {operator!r}")
    if size < 0:
        raise ValueError(f"scratch takes 0 bytes or more, not {size}")
    name = operator.removesuffix(".default")
    token = _declared.set((*(one for one in _declared.get() if one[0] != name), (name, size)))
    try:
        yield
    finally:
        _declared.reset(token)


def declarations() -> tuple[tuple[str, int], ...]:
    """What :func:`assume_scratch` said, for those that remember programs."""
    return _declared.get()


def fallback(func: Any, args: Sequence[Any], outputs: Outputs) -> Program | None:
    """The program of an operator without a rule: outputs, and what may come on top of them;
    ``None``: its outputs in order, and certainly no more."""
    span = span_of(func, args, outputs)
    return None if span is None else (*outs(outputs), *moment(span))


def span_of(func: Any, args: Sequence[Any], outputs: Outputs) -> Span | None:
    """What is not known about an operator without a rule."""
    if not isinstance(func, OpOverload):
        return None
    name = func._schema.name
    if func.namespace not in _OWN:
        return None if func.namespace in COLLECTIVES else _custom(name)
    packet = func._opname
    if any(_is_sparse(one) for one in (*args, *outputs)):
        return None if packet in _PARTS or func.is_view else _sparse(name)
    if packet in _SOLVERS:
        why = "cuSOLVER and MAGMA say what they work in only at run time"
        return Span(f"{name}: scratch of cuSOLVER or MAGMA", why, 0, None)
    if is_plain(func) or not any(isinstance(one, torch.Tensor) for one in outputs):
        return None
    return Span(f"{name}: scratch", "no rule: its outputs are simulated, and nothing else", 0, None)


def _custom(name: str) -> Span:
    size = dict(_declared.get()).get(name)
    why = (
        "a custom operator: only its outputs are known"
        if size is None
        else "a custom operator: the test says what it takes at most"
    )
    return Span(f"{name}: scratch", why, 0, size)


def _sparse(name: str) -> Span:
    why = "how much depends on the indices' values, and cuSPARSE says only at run time"
    return Span(f"{name}: scratch of sparse kernels", why, 0, None)


def _is_sparse(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is not torch.strided


def is_plain(func: OpOverload) -> bool:
    """Whether ``func`` is known to allocate its outputs and nothing else."""
    packet = func._opname
    tags = func.tags
    return (
        packet in PLAIN
        or packet in FACTORIES
        or packet.startswith(("_foreach_", "_fused_"))
        or packet.endswith("_copy")
        or func.is_view
        or torch.Tag.pointwise in tags
        or torch.Tag.inplace_view in tags
        or _is_elementwise(packet.removesuffix("_"))
    )


def _is_elementwise(packet: str) -> bool:
    """Whether an in-place operator's twin, which carries the tag, is elementwise."""
    twin = getattr(torch.ops.aten, packet, None)
    if twin is None:
        return False
    return any(torch.Tag.pointwise in getattr(twin, name).tags for name in twin.overloads())

"""What differs between PyTorch 2.6 and 2.14, in one place: every rule asks here, none by itself.

Versions are where a released wheel's headers, or the date of the change against the branch of the
release, put them.
"""

from __future__ import annotations

import os
import re
from typing import Literal

import torch
from torch._ops import OpOverload

Version = tuple[int, int]


def overload(name: str) -> OpOverload | None:
    """The overload called ``aten::name`` or ``aten::name.overload``, if this torch has it."""
    namespace, _, rest = name.partition("::")
    packet, _, which = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), packet), which or "default")
    except AttributeError:
        return None
    return found if isinstance(found, OpOverload) else None


#: What a user may set about cuBLAS's workspaces, read by the functions below.
WORKSPACE_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
)


def cublas_workspace(capability: tuple[int, int], version: Version) -> int:
    """Bytes of a cuBLAS handle's workspace (ATen/cuda/CublasHandlePool.cpp).

    ``CUBLAS_WORKSPACE_CONFIG`` wins. 32 MiB on 9.0; since 2.12 on every 9, 10 and 12; since 2.14
    on 11 as well. Elsewhere ``:4096:2:16:8``, in KiB.
    """
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    if pools := re.findall(r":([0-9]+):([0-9]+)", config):
        return sum(int(size) * 1024 * int(count) for size, count in pools)
    major = capability[0]
    if version >= (2, 14):
        large = 9 <= major <= 12
    elif version >= (2, 12):
        large = major in (9, 10, 12)
    else:
        large = capability == (9, 0)
    return 4096 * 8 * 1024 if large else 4096 * 1024 * 2 + 16 * 1024 * 8


def cublaslt_workspace(capability: tuple[int, int], version: Version) -> int:
    """Bytes of a cuBLASLt workspace: 1 MiB unless ``CUBLASLT_WORKSPACE_SIZE`` (KiB) says else."""
    config = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "").strip()
    return (int(config) if config.isdigit() else 1024) * 1024


def cublaslt_mode(version: Version) -> Literal["call", "own", "unified"]:
    """Whose memory a cuBLASLt call works in.

    Until 2.8 an allocation of the call (ATen/cuda/CUDABlas.cpp); then one per handle and stream
    (``getCUDABlasLtWorkspace``, 2.9); since 2.11 cuBLAS's own, unless
    ``TORCH_CUBLASLT_UNIFIED_WORKSPACE`` is 0, which since 2.8 may also ask for it earlier.
    """
    asked = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "")
    wanted = asked == "1" if version < (2, 11) else asked != "0"
    if wanted and version >= (2, 8) and keeps_cublas_workspace(version):
        return "unified"
    return "own" if version >= (2, 9) else "call"


def lt_sets_up_cublas(version: Version) -> bool:
    """Until 2.11 ``getCurrentCUDABlasLtHandle`` sets up the cuBLAS handle, workspace included."""
    return version < (2, 12)


def keeps_cublas_workspace(version: Version) -> bool:
    """After 2.14 a workspace lives for one call unless ``TORCH_CUBLAS_WORKSPACE_CACHE`` is 1."""
    return version <= (2, 14) or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def fuses_row_bias(version: Version) -> bool:
    """Since 2.10 ``addmm`` hands biases of shape (1, n) to cuBLASLt too, but no single rows."""
    return version >= (2, 10)


def outer_product_without_blas(version: Version) -> bool:
    """Since 2.12 a Triton kernel takes batched products with k = 1 (torch/_native, bmm)."""
    return version >= (2, 12)


def vectorises_input(values: int, vt0: int, version: Version) -> bool:
    """Whether a reduction along the fastest dimension loads vectors.

    ATen/native/cuda/Reduce.cuh: until 2.9 from 129 values on and with an unrolling of at least 4;
    since 2.10 from 128 on.
    """
    return values >= 128 if version >= (2, 10) else values > 128 and vt0 >= 4


def half_vector(version: Version) -> int:
    """Elements that ``sum`` and ``mean`` of 16-bit types load at once.

    ATen/native/cuda/ReduceSumProdKernel.cu, ReduceMomentKernel.cu: 8 since 2.10.
    """
    return 8 if version >= (2, 10) else 4


def sums_norm_gradients_in_parts(version: Version) -> bool:
    """Since 2.8 layer norm's weight gradients of many short rows are summed in two steps."""
    return version >= (2, 8)


def wide_group_statistics(version: Version) -> bool:
    """Group norm of 16-bit types computes its statistics in float tensors first.

    Seen with 2.14.1, not in the sources of 2.6; the release between is not known.
    """
    return version >= (2, 12)


def nests_tile_states(version: Version) -> bool:
    """Whether the wheels' CUB aligns a scan's tile states once more (CCCL 3, CUDA 13)."""
    return version >= (2, 12)


def sorts_by_vocabulary(version: Version) -> bool:
    """Embedding gradients sort only the bits that an index can have, instead of all.

    Seen with 2.14.1, not in the sources of 2.6; the release between is not known. Up to 16 KiB.
    """
    return version >= (2, 10)


def fuses_embedding_segments(version: Version) -> bool:
    """Since 2.11 embedding gradients with few, long segments are added atomically."""
    return version >= (2, 11)


def checks_index_range_at_once(version: Version) -> bool:
    """Accumulating ``index_put`` finds the largest and smallest index in one reduction.

    Seen with 2.14.1, not in the sources of 2.6; the release between is not known.
    """
    return version >= (2, 9)


def counts_digits_in_topk(version: Version) -> bool:
    """``topk`` by several blocks cumulates digit counts in a pass of its own, not by the last
    block to arrive. Seen with 2.14.1, not in the sources of 2.7; the release between is not known.
    """
    return version >= (2, 9)


def doubles_topk_state(version: Version) -> bool:
    """Since 2.7 ``topk`` by several blocks keeps its state of two passes (pull request 145536)."""
    return version >= (2, 7)

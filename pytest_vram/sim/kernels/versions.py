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

#: The PyTorch of this process.
INSTALLED: Version = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]


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


# ---- attention: ATen/native/transformers/cuda/sdp_utils.cpp unless another file is named


def prefers_cudnn_attention(
    capability: tuple[int, int], cudnn_version: int, version: Version
) -> bool:
    """``check_prefer_cudnn_attention``: never in 2.6; opt-in by TORCH_CUDNN_SDPA_PREFERRED in 2.7
    and 2.8; in 2.9 by default if compiled with cuDNN 9.9; since 2.10 if cuDNN is newer than
    9.15.0 at run time, which the default wheels reach with 2.11."""
    major, minor = capability
    if major not in (9, 10) or version < (2, 7):
        return False
    if version < (2, 9):
        return os.environ.get("TORCH_CUDNN_SDPA_PREFERRED") == "1" and minor == 0
    if version < (2, 10):
        wanted = os.environ.get("TORCH_CUDNN_SDPA_PREFERRED") != "0"
        return wanted and cudnn_version >= 90900 and minor == 0
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        return False
    return cudnn_version > 91500 and minor in (0, 3)


def newest_attention_card(version: Version) -> int:
    """The largest ``sm`` that flash and efficient attention take: 9.0 in 2.6; 12.1 once Blackwell
    was supported, from 2.7 on."""
    return 90 if version < (2, 7) else 121


def groups_queries_everywhere(version: Version) -> bool:
    """Since 2.14 efficient attention takes grouped queries, and all kernels one head for all."""
    return version >= (2, 14)


def checks_attention_offsets(version: Version) -> bool:
    """Since 2.14: efficient attention's kernels for sm80 read whole vectors from the start of the
    data."""
    return version >= (2, 14)


def batches_attention(version: Version) -> bool:
    """Since 2.14 three-dimensional inputs get a batch dimension before anything is chosen."""
    return version >= (2, 14)


def checks_cudnn_attention(version: Version) -> bool:
    """2.6 checks neither the heads for cuDNN nor lengths but 1."""
    return version >= (2, 7)


def cudnn_attention_lacks_dropout(cudnn_version: int, version: Version) -> bool:
    """cuDNN 9.11 to 9.13, which PyTorch knows of since 2.9."""
    return 91100 < cudnn_version < 91400 and version >= (2, 9)


def masks_count_for_gradients(version: Version) -> bool:
    """2.6 forgets efficient attention's mask when it asks whether anything needs a gradient, and
    fails in backward."""
    return version >= (2, 7)


def rounds_cudnn_dropout(version: Version) -> bool:
    """Since 2.14 cuDNN's attention takes dropout probabilities in sixteenths only."""
    return version >= (2, 14)


def wide_cudnn_heads(cudnn_version: int, version: Version) -> bool:
    """Head dimensions up to 256: cuDNN after 9.22 with the frontend of 2.14."""
    return version >= (2, 14) and cudnn_version > 92200


def uneven_cudnn_heads(cudnn_version: int, version: Version) -> bool:
    """Head dimensions 192 and 128, as in latent attention: cuDNN 9.11 since 2.9."""
    return version >= (2, 9) and cudnn_version >= 91100


def limits_cudnn_batches(version: Version) -> bool:
    """Since 2.14: at most 65,535 batches or heads for cuDNN's attention."""
    return version >= (2, 14)


# ---- convolutions


def depthwise_bfloat16_by_cudnn(version: Version) -> bool:
    """Since 2.14 channels-last bfloat16 goes to cuDNN's depthwise kernels on cards before sm80 as
    well (``use_cudnn_depthwise``, ATen/native/Convolution.cpp)."""
    return version >= (2, 14)


# ---- random draws


def multinomial_asks_once(version: Version) -> bool:
    """``aminmax`` checks the chances of ``multinomial`` (ATen/native/Distributions.cpp) in 2.13 and
    2.14; ``min`` and ``max`` do in 2.6 and 2.11. 2.12 was not at hand and is taken for 2.13."""
    return version >= (2, 12)


# ---- autograd


def casts_serve_gradients(version: Version) -> bool:
    """Since 2.11 (pytorch/pytorch#165068, autocast_mode.cpp ``cached_cast``) autocast's weight
    cache serves gradients whatever mode filled it: casts are made with gradients recorded, and
    inference mode, where that cannot be, makes its casts anew each time."""
    return version >= (2, 11)


# ---- what the wheels bring


def default_cudnn(version: Version) -> int:
    """cuDNN that the default wheel of a torch release depends on, as its metadata says: 2.6 on
    CUDA 12.4, 2.7 12.6, 2.8 to 2.10 12.8, from 2.11 on 13.0."""
    known = {6: 90100, 7: 90501, 8: 91002, 9: 91002, 10: 91002, 11: 91900, 12: 92000, 13: 92000}
    return known.get(version[1], 92400) if version[0] == 2 else 92400

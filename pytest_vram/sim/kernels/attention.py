"""Which kernel ``scaled_dot_product_attention`` runs on a CUDA card, why, and what it calls.

The choice is ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h (v2.6.0, v2.13.0,
v2.14.1), the composite around it ATen/native/transformers/attention.cpp; the kernels' own memory
is in :mod:`pytest_vram.sim.kernels.attention_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pytest_vram.sim.kernels import Card, attention_kernels, versions

__all__ = ["FIXES", "Choice", "Switches", "allows", "attention_kernels", "choose", "sdpa"]

aten = torch.ops.aten
Backend = Literal["flash", "efficient", "cudnn", "math"]

#: ``at::SDPBackend`` numbers, as ``torch._C._get_sdp_priority_order`` gives them.
_NUMBERS: dict[int, Backend] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
_DEFAULT_ORDER: tuple[Backend, ...] = ("flash", "efficient", "math", "cudnn")
_CUDNN_ORDER: tuple[Backend, ...] = ("cudnn", "flash", "efficient", "math")

#: What FakeTensor's meta kernels say about outputs, where CUDA differs. ``(operator, outputs,
#: from version, below version, truth)``; ``host`` outputs take no device memory, ``device`` ones do
#: although the meta kernel puts them on ``meta``. Shapes, strides and dtypes of everything else
#: are what CUDA gives (checked on 2.6.0, 2.13.0 and 2.14.1), the log-sum-exp included: fp32
#: [B, H, Sq] (flash), [B, H, Sq up to 32] or [B, H, 0] (efficient).
FIXES: tuple[tuple[str, tuple[int, ...], tuple[int, int], tuple[int, int], str], ...] = (
    ("aten::_scaled_dot_product_flash_attention", (6, 7), (2, 6), (2, 7), "host int64 scalars"),
    ("aten::_scaled_dot_product_flash_attention", (6, 7), (2, 7), (9, 9), "device"),
    ("aten::_scaled_dot_product_efficient_attention", (2, 3), (2, 6), (2, 7), "host"),
    (
        "aten::_scaled_dot_product_efficient_attention",
        (2, 3),
        (2, 7),
        (9, 9),
        "device without dropout, host with",
    ),
    ("aten::_efficient_attention_forward", (2, 3), (2, 6), (2, 7), "host"),
    (
        "aten::_efficient_attention_forward",
        (2, 3),
        (2, 7),
        (9, 9),
        "device without dropout, host with",
    ),
    ("aten::_efficient_attention_backward", (3,), (2, 6), (9, 9), "device if wanted, else nothing"),
    ("aten::_scaled_dot_product_cudnn_attention", (6, 7), (2, 6), (9, 9), "device"),
)

#: Where the dropout probability is among an operator's arguments.
_DROPOUT = {"aten::_efficient_attention_forward": 8}


_FIXED = {row[0] for row in FIXES}


def on_host(
    func: Any, position: int, args: tuple[Any, ...], kwargs: dict[str, Any],
    version: tuple[int, int],
) -> bool:  # fmt: skip
    """Whether output ``position`` of an attention kernel lies on the host, by ``FIXES``."""
    name = func._schema.name
    if name not in _FIXED:
        return False
    for operator, outputs, since, until, truth in FIXES:
        if operator == name and position in outputs and since <= version < until:
            if truth.startswith("device without dropout"):
                at = _DROPOUT.get(name, 5)
                return bool(args[at] if len(args) > at else kwargs.get("dropout_p", 0.0))
            if truth.startswith("device if wanted"):  # ``bias_requires_grad``
                return not args[15]
            return truth.startswith("host")
    return False


@dataclass(frozen=True, slots=True)
class Switches:
    """What the user turned off or reordered (``torch.backends.cuda``, ``torch.nn.attention``)."""

    flash: bool = True
    efficient: bool = True
    cudnn: bool = True
    math: bool = True
    order: tuple[Backend, ...] = _DEFAULT_ORDER
    deterministic: bool = False

    @classmethod
    def current(cls) -> Switches:
        """The process's own state: it is the same in builds without CUDA."""
        numbers = torch._C._get_sdp_priority_order()
        order = tuple(dict.fromkeys(_NUMBERS[n] for n in numbers if n in _NUMBERS))
        return cls(
            torch._C._get_flash_sdp_enabled(),
            torch._C._get_mem_efficient_sdp_enabled(),
            torch._C._get_cudnn_sdp_enabled(),
            torch._C._get_math_sdp_enabled(),
            order,
            attention_kernels._deterministic(),
        )

    def priority(self, card: Card) -> tuple[Backend, ...]:
        """The order in which backends are tried. An order that the user set stays; the default
        one puts cuDNN first on Hopper and Blackwell data-centre cards where PyTorch does."""
        if self.order == _DEFAULT_ORDER and _prefers_cudnn(card):
            return _CUDNN_ORDER
        return self.order


def _prefers_cudnn(card: Card) -> bool:
    return versions.prefers_cudnn_attention(card.profile.capability, card.cudnn_version, card.torch)


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel that runs, and for every backend tried before it the reason it did not."""

    backend: Backend
    rejected: dict[Backend, str]

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {why}" for name, why in self.rejected.items())
        return f"{self.backend} ({reasons})" if reasons else self.backend


@dataclass(frozen=True, slots=True)
class _Call:
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    gqa: bool
    needs_grad: bool
    card: Card
    switches: Switches

    @property
    def sm(self) -> int:
        return self.card.profile.sm

    @property
    def head(self) -> int:
        return int(self.query.shape[-1])

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


Check = Callable[[_Call], "str | None"]


# ------------------------------------------------------------------------- constraints in common


def _four_dimensions(call: _Call) -> str | None:
    dims = tuple(tensor.dim() for tensor in call.qkv)
    return None if dims == (4, 4, 4) else f"query, key and value have {dims} dimensions, not 4"


def _not_nested(call: _Call) -> str | None:
    return "nested tensors" if any(tensor.is_nested for tensor in call.qkv) else None


def _sequence_not_empty(call: _Call) -> str | None:
    if 0 in (call.query.shape[-2], call.key.shape[-2]):
        return "a sequence of length 0"
    return None


def _last_stride_is_one(call: _Call, ignore_single: bool) -> str | None:
    single = ignore_single and call.head == 1
    if not single and any(tensor.stride(-1) != 1 for tensor in call.qkv):
        return "the last dimension of query, key or value is not contiguous"
    if call.mask is not None and call.mask.stride(-1) != 1:
        return "the last dimension of the mask is not contiguous"
    return None


def _last_stride(call: _Call) -> str | None:
    return _last_stride_is_one(call, ignore_single=True)


def _last_stride_strict(call: _Call) -> str | None:
    return _last_stride_is_one(call, ignore_single=False)


def _batch_and_heads(call: _Call, grouped: bool, equal_kv: bool = True) -> str | None:
    """``check_batch_size_and_num_heads_dense``."""
    batches = {int(tensor.shape[0]) for tensor in call.qkv}
    if len(batches) > 1:
        return "query, key and value have different batch sizes"
    heads, heads_k, heads_v = (int(tensor.shape[-3]) for tensor in call.qkv)
    if call.gqa and grouped:
        if equal_kv and heads_k != heads_v:
            return "key and value have different numbers of heads"
        if heads_k == 0 or heads % heads_k or (not equal_kv and heads % heads_v):
            return "the heads of key and value don't divide those of the query"
        return None
    if heads == heads_k == heads_v:
        return None
    if (
        versions.groups_queries_everywhere(call.card.torch)
        and heads > 0
        and heads_k == heads_v == 1
    ):
        return None  # one head for all: broadcast
    return f"different numbers of heads ({heads}, {heads_k}, {heads_v}) without grouped queries"


def _dtype_among(call: _Call, allowed: tuple[torch.dtype, ...]) -> str | None:
    dtypes = {tensor.dtype for tensor in call.qkv}
    if len(dtypes) == 1 and dtypes <= set(allowed):
        return None
    names = ", ".join(str(dtype)[6:] for dtype in allowed)
    got = ", ".join(sorted(str(dtype)[6:] for dtype in dtypes))
    return f"dtype {got}; it takes {names}"


def _half_dtype(call: _Call) -> str | None:
    half = (torch.float16, torch.bfloat16) if call.sm >= 80 else (torch.float16,)
    return _dtype_among(call, half)


def _capability(call: _Call, low: int) -> str | None:
    high = versions.newest_attention_card(call.card.torch)
    if low <= call.sm <= high:
        return None
    return f"compute capability {call.sm / 10}; it needs {low / 10} to {high / 10}"


# ----------------------------------------------------------------------------------------- flash


def _flash_enabled(call: _Call) -> str | None:
    return None if call.switches.flash else "turned off"


def _no_mask(call: _Call) -> str | None:
    return None if call.mask is None else "an attention mask is given"


def _flash_head(call: _Call) -> str | None:
    heads = {int(tensor.shape[-1]) for tensor in call.qkv}
    if len(heads) == 1 and call.head <= 256:
        return None
    return f"head dimensions {sorted(heads)}; they must be equal and at most 256"


def _ampere(call: _Call) -> str | None:
    return _capability(call, 80)


def _flash_training(call: _Call) -> str | None:
    """No backward for large heads on cards with little shared memory."""
    small = 86 <= call.sm <= 89 or 120 <= call.sm <= versions.newest_attention_card(call.card.torch)
    unsupported = 192 < call.head <= 224 or (call.head > 224 and call.dropout > 0)
    if call.needs_grad and small and unsupported:
        return f"no backward for head dimension {call.head} on this card"
    return None


def _flash_square(call: _Call) -> str | None:
    if call.causal and call.query.shape[-2] != call.key.shape[-2]:
        return "is_causal with different query and key lengths"
    return None


def _grouped(call: _Call) -> str | None:
    return _batch_and_heads(call, grouped=True)


_FLASH: tuple[Check, ...] = (
    _not_nested, _flash_enabled, _four_dimensions, _no_mask, _flash_head, _ampere,
    _flash_training, _flash_square, _half_dtype, _grouped, _sequence_not_empty, _last_stride,
)  # fmt: skip


# ------------------------------------------------------------------------------ memory efficient


def _efficient_enabled(call: _Call) -> str | None:
    return None if call.switches.efficient else "turned off"


def _maxwell(call: _Call) -> str | None:
    return _capability(call, 50)


def _alignment(call: _Call) -> int:
    """``minimum_gemm_alignment``: elements that one tensor-core load needs."""
    half = call.query.dtype in (torch.float16, torch.bfloat16)
    tensor_cores = call.sm >= 80 or (call.sm >= 70 and half)
    return max(4 if call.sm >= 80 else 1, (8 if half else 4) if tensor_cores else 1)


def _efficient_head(call: _Call) -> str | None:
    head, head_k, head_v = (int(tensor.shape[-1]) for tensor in call.qkv)
    need = _alignment(call)
    if head == head_k and head > 0 < head_v and head % need == 0 == head_v % need:
        return None
    return f"head dimensions ({head}, {head_k}, {head_v}); they must be multiples of {need}"


def _efficient_offset(call: _Call) -> str | None:
    if not versions.checks_attention_offsets(call.card.torch) or call.sm < 80:
        return None
    need = _alignment(call) * call.query.element_size()
    offsets = (t.storage_offset() * t.element_size() for t in call.qkv if t.numel())
    if any(offset % need for offset in offsets):
        return f"query, key or value start at an address that is no multiple of {need} bytes"
    return None


def _efficient_heads(call: _Call) -> str | None:
    return _batch_and_heads(call, grouped=versions.groups_queries_everywhere(call.card.torch))


def _efficient_dtype(call: _Call) -> str | None:
    if call.sm >= 80:
        return _dtype_among(call, (torch.float16, torch.float32, torch.bfloat16))
    return _dtype_among(call, (torch.float16, torch.float32))


_EFFICIENT: tuple[Check, ...] = (
    _not_nested, _efficient_enabled, _maxwell, _four_dimensions, _efficient_head,
    _efficient_offset, _sequence_not_empty, _last_stride_strict, _efficient_heads,
    _efficient_dtype,
)  # fmt: skip


# ----------------------------------------------------------------------------------------- cuDNN


def _cudnn_enabled(call: _Call) -> str | None:
    return None if call.switches.cudnn else "turned off"


def _cudnn_reproducible(call: _Call) -> str | None:
    return "it is not deterministic" if call.switches.deterministic else None


def _cudnn_mask(call: _Call) -> str | None:
    """``check_attn_mask_shape``."""
    if call.mask is None:
        return None
    if call.mask.requires_grad:
        return "the mask needs a gradient"
    batch, heads, queries = call.query.shape[:3]
    wanted = (batch, heads, queries, call.key.shape[2])
    shape = tuple(call.mask.shape)
    fits = len(shape) in (2, 4) and all(
        size in (1, want) for size, want in zip(reversed(shape), reversed(wanted), strict=False)
    )
    return None if fits else f"a mask of shape {shape}"


def _cudnn_dropout(call: _Call) -> str | None:
    cudnn, torch_version = call.card.cudnn_version, call.card.torch
    if call.dropout > 0 and versions.cudnn_attention_lacks_dropout(cudnn, torch_version):
        return "cuDNN 9.11 to 9.13 has no dropout in attention"
    if versions.rounds_cudnn_dropout(torch_version) and call.dropout * 16 % 1:
        return "a dropout probability that is no multiple of 1/16"
    return None


def _cudnn_heads(call: _Call) -> str | None:
    if not versions.checks_cudnn_attention(call.card.torch):
        return None
    return _batch_and_heads(call, grouped=True, equal_kv=False)


def _wide_heads(call: _Call) -> bool:
    """Head dimension up to 256, on Hopper and Blackwell."""
    return versions.wide_cudnn_heads(call.card.cudnn_version, call.card.torch) and _datacentre(call)


def _datacentre(call: _Call) -> bool:
    return call.sm == 90 or 100 <= call.sm < 110


def _cudnn_head(call: _Call) -> str | None:
    head, head_v = call.head, int(call.value.shape[-1])
    limit = 128
    if _wide_heads(call):
        limit = 256
    elif (
        _datacentre(call)
        and (head, head_v) == (192, 128)
        and versions.uneven_cudnn_heads(call.card.cudnn_version, call.card.torch)
    ):
        limit = 192
    if max(head, head_v) > limit:
        return f"head dimensions ({head}, {head_v}); at most {limit}"
    if head % 8 or head_v % 8:
        return f"head dimensions ({head}, {head_v}); they must be multiples of 8"
    return None


def _cudnn_lengths(call: _Call) -> str | None:
    queries, keys = call.query.shape[2], call.key.shape[2]
    if not versions.checks_cudnn_attention(call.card.torch):
        return "a sequence of length 1" if 1 in (queries, keys) else None
    if max(call.query.shape[:2]) > 65535 and versions.limits_cudnn_batches(call.card.torch):
        return "more than 65535 batches or heads"
    if keys == 1:
        return "key and value of length 1"
    if queries == 1 and call.dropout > 0:
        return "a query of length 1 with dropout"
    broken = 91900 <= call.card.cudnn_version <= 92500 and call.card.cudnn_version != 92401
    if queries == 1 and broken and call.card.profile.capability[0] in (10, 11):
        return "a query of length 1 with this cuDNN on this card"
    return None


def _cudnn_training(call: _Call) -> str | None:
    if not call.needs_grad or not _wide_heads(call):
        return None
    head, head_v = call.head, int(call.value.shape[-1])
    if max(head, head_v) <= 128 or (head, head_v) in ((192, 128), (256, 256)):
        return None
    return f"no backward for head dimensions ({head}, {head_v})"


_CUDNN: tuple[Check, ...] = (
    _not_nested, _cudnn_enabled, _four_dimensions, _cudnn_reproducible, _half_dtype, _cudnn_mask,
    _ampere, _cudnn_dropout, _sequence_not_empty, _last_stride, _cudnn_heads, _cudnn_head,
    _cudnn_lengths, _cudnn_training,
)  # fmt: skip


def _math_enabled(call: _Call) -> str | None:
    return None if call.switches.math else "turned off"


_CHECKS: dict[Backend, tuple[Check, ...]] = {
    "flash": _FLASH,
    "efficient": _EFFICIENT,
    "cudnn": _CUDNN,
    "math": (_math_enabled,),
}


#: What C++ checks of dense inputs only (``has_only_dense_inputs``).
_OF_DENSE = frozenset(
    (
        _not_nested, _flash_square, _sequence_not_empty, _last_stride, _last_stride_strict,
        _grouped, _efficient_heads, _efficient_offset, _cudnn_heads, _cudnn_lengths,
    )
)  # fmt: skip


def allows(backend: Backend, params: Any, card: Card) -> bool:
    """``torch.backends.cuda.can_use_flash_attention`` and its kin: whether ``backend`` may run for
    these ``SDPAParams`` on ``card``. Jagged nested tensors are checked further in Python
    (torch/nested/_internal/sdpa.py)."""
    qkv = params.query, params.key, params.value
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in qkv)
    call = _Call(
        *qkv, params.attn_mask, params.dropout, params.is_causal, params.enable_gqa, needs_grad,
        card, Switches.current(),
    )  # fmt: skip
    nested = any(tensor.is_nested for tensor in qkv)
    checks = [check for check in _CHECKS[backend] if not (nested and check in _OF_DENSE)]
    return not any(check(call) for check in checks)


def _unbatched(call: _Call) -> bool:
    dims = {tensor.dim() for tensor in call.qkv}
    batched = versions.batches_attention(call.card.torch)
    return batched and dims == {3} and _not_nested(call) is None


def choose(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, card: Card, enabled: Switches | None = None,
    needs_grad: bool = False,
) -> Choice:  # fmt: skip
    """The backend of ``select_sdp_backend``; ``RuntimeError`` if none may run, as PyTorch raises.

    ``needs_grad``: gradients are enabled and one of query, key, value requires them.
    """
    switches = enabled or Switches.current()
    call = _Call(
        query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, needs_grad, card, switches
    )
    if _unbatched(call):
        query, key, value = (tensor.unsqueeze(0) for tensor in call.qkv)
        call = _Call(
            query, key, value, _four_dimensional(attn_mask), dropout_p, is_causal, enable_gqa,
            needs_grad, card, switches,
        )  # fmt: skip
    rejected: dict[Backend, str] = {}
    for backend in switches.priority(card):
        reason = next((why for check in _CHECKS[backend] if (why := check(call))), None)
        if reason is None:
            return Choice(backend, rejected)
        rejected[backend] = reason
    reasons = "; ".join(f"{name}: {why}" for name, why in rejected.items())
    raise RuntimeError(f"No available kernel. Aborting execution. ({reasons})")


def _four_dimensional(mask: Tensor | None) -> Tensor | None:
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return mask


# ------------------------------------------------------------------------------- the composite


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False, card: Card,
    chosen: Callable[[Choice], None] | None = None,
) -> Tensor:  # fmt: skip
    """``aten::scaled_dot_product_attention`` as it runs on a CUDA card: the CUDA implementation
    to register on AutogradCUDA. ``chosen`` hears which kernel runs and why.
    """
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if query.dim() == key.dim() == value.dim() == 3 and versions.batches_attention(card.torch):
        out = sdpa(
            query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0),
            _four_dimensional(attn_mask), dropout_p, is_causal,
            scale=scale, enable_gqa=enable_gqa, card=card, chosen=chosen,
        )  # fmt: skip
        return out.squeeze(0)
    if card.torch >= _EMPTY_IS_ZERO and 0 in (query.numel(), key.numel(), value.numel()):
        return _zeros(query, key, value)
    choice = choose(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
        card=card, needs_grad=needs_grad,
    )  # fmt: skip
    if chosen is not None:
        chosen(choice)
    mask = _additive(attn_mask, query.dtype)
    run = {"flash": _run_flash, "efficient": _run_efficient, "cudnn": _run_cudnn, "math": _run_math}
    return run[choice.backend](
        query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, needs_grad
    )


#: Version from which empty inputs give zeros without running a kernel (2.6 runs the math path).
_EMPTY_IS_ZERO = (2, 13)


def _zeros(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Zeros that still hang on all three inputs, so that each gets a gradient."""
    shape = (*query.shape[:-1], value.shape[-1])
    result = torch.zeros(shape, dtype=query.dtype, device=query.device)
    values, keys, queries = value.sum(), key.sum(), query.sum()  # C++ evaluates from the right
    linked: Tensor = result + aten.mul.Scalar(queries + keys + values, 0)
    return linked


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``convert_attn_mask``: a bool mask becomes 0 where True and -inf elsewhere."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    blocked = torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device)
    return torch.where(mask, 0.0, blocked)


def _padded(tensor: Tensor, alignment: int = 8) -> Tensor:
    """``pad_last_dim``: flash kernels need head dimensions that are multiples of 8."""
    rest = tensor.shape[-1] % alignment
    return torch.constant_pad_nd(tensor, (0, alignment - rest)) if rest else tensor


def _run_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool,
    scale: float | None, gqa: bool, needs_grad: bool,
) -> Tensor:  # fmt: skip
    head = int(query.shape[-1])
    softmax_scale = head**-0.5 if scale is None else scale
    out: Tensor = aten._scaled_dot_product_flash_attention(
        _padded(query), _padded(key), _padded(value), dropout, causal, False, scale=softmax_scale
    )[0]
    return out[..., :head] if out.shape[-1] != head else out


def _aligned_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """``preprocess_mask``: rows must start at multiples of 8 elements; if they don't, the mask is
    copied with padding (a full 8 if only its strides are unaligned) and the padding hidden."""
    unaligned = any(mask.stride(dim) % 8 for dim in range(mask.dim() - 1)) or mask.stride(-1) != 1
    if unaligned:
        length = int(mask.shape[-1])
        padded = torch.constant_pad_nd(mask, (0, 8 - length % 8))
        mask = aten.slice.Tensor(padded, -1, 0, length)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _run_efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool,
    scale: float | None, gqa: bool, needs_grad: bool,
) -> Tensor:  # fmt: skip
    bias = None if mask is None else _aligned_mask(mask, query, key)
    if versions.masks_count_for_gradients(versions.INSTALLED) and bias is not None:
        needs_grad |= torch.is_grad_enabled() and bias.requires_grad
    out: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_grad, dropout, causal, scale=scale
    )[0]
    return out


def _run_cudnn(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool,
    scale: float | None, gqa: bool, needs_grad: bool,
) -> Tensor:  # fmt: skip
    out: Tensor = aten._scaled_dot_product_cudnn_attention(
        query, key, value, mask, needs_grad, dropout, causal, False, scale=scale
    )[0]
    return out


def _run_math(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool,
    scale: float | None, gqa: bool, needs_grad: bool,
) -> Tensor:  # fmt: skip
    """The installed torch's own C++ composite: upcasts half inputs to fp32 (unless
    ``allow_fp16_bf16_reduction_math_sdp``), scales query and key by the square root each."""
    out: Tensor = aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=gqa
    )[0]
    return out

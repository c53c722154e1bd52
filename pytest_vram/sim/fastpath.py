"""The transformer layers that PyTorch runs as one operator in inference.

``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` in ``eval()`` without gradients call
``_transformer_encoder_layer_fwd`` and ``_native_multi_head_attention``: C++ that composes other
operators, which are run here in the same order. Read from ATen/native/transformers/transformer.cpp,
attention.cpp and cuda/attention.cu (v2.6.0, v2.14.1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_vram.sim import values
from pytest_vram.sim.handlers import HANDLERS
from pytest_vram.sim.kernels import attention

aten = torch.ops.aten


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return aten.linear.default(x, weight, bias)  # type: ignore[no-any-return]


def _attention(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """``native_multi_head_attention_cuda``."""
    with mode, torch._C._AutoDispatchBelowAutograd():
        return _multi_head(mode, *args, **kwargs)


def _multi_head(
    mode: Any, query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int,
    qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor,
    mask: Tensor | None = None, need_weights: bool = True, average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if not (query is key and key is value):
        raise values.NoSimulatedKernel(
            "torch._native_multi_head_attention is only simulated for self-attention, the one use "
            "that torch.nn makes of it; call torch.nn.functional.scaled_dot_product_attention"
        )
    batch, width = query.shape[0], embed_dim // num_head
    if width % 8 == 0 and not need_weights and mask is None:
        heads = query.view(batch, -1, num_head, width).transpose(1, 2)
        backend = attention.choose(heads, heads, heads, card=mode.ledger.card).backend
        del heads
        if backend in ("flash", "efficient"):
            joint = _linear(query, qkv_weight, qkv_bias)
            q, k, v = (
                part.view(batch, -1, num_head, width).transpose(1, 2) for part in joint.chunk(3, -1)
            )
            y = aten.scaled_dot_product_attention.default(q, k, v)
            past = y.transpose(1, 2).reshape(batch, -1, embed_dim)
            return _linear(past, proj_weight, proj_bias), None
    return _by_matrices(
        query, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, need_weights,
        average_attn_weights, mask_type,
    )  # fmt: skip


def _by_matrices(
    query: Tensor, num_head: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor,
    proj_bias: Tensor, mask: Tensor | None, need_weights: bool, average: bool,
    mask_type: int | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The context is written over the query, which shares one block with key and value."""
    batch, length, embed_dim = query.shape
    width = embed_dim // num_head
    joint: Any = torch.matmul(query, qkv_weight.t())
    q, k, v = aten._transform_bias_rescale_qkv.default(joint, qkv_bias, num_head)
    joint = None
    flat = (batch * num_head, length, width)
    scores = torch.bmm(q.view(flat), k.view(flat).transpose(1, 2))
    scores = scores.view(batch, num_head, length, length)
    if mask is None:
        aten._softmax.out(scores, 3, False, out=scores)
    else:
        mask = mask if mask.dtype is torch.bool else mask.to(torch.bool)
        scores = aten._masked_softmax.default(scores, mask, 3, mask_type)
    torch.bmm(scores.view(batch * num_head, length, length), v.view(flat), out=q.view(flat))
    weights: Tensor | None = scores if need_weights else None
    del scores
    context = q.permute(0, 2, 1, 3).contiguous().view(batch * length, embed_dim)
    proj = _linear(context, proj_weight, proj_bias).view(batch, length, embed_dim)
    if weights is not None and average:
        weights = weights.sum(1)
        weights /= num_head
    return proj, weights


def _encoder_layer(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """``transformer_encoder_layer_forward``."""
    with mode, torch._C._AutoDispatchBelowAutograd():
        return _layer(mode, *args, **kwargs)


def _layer(
    mode: Any, src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, use_gelu: bool, norm_first: bool, eps: float,
    norm_weight_1: Tensor, norm_bias_1: Tensor, norm_weight_2: Tensor, norm_bias_2: Tensor,
    ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor, ffn_bias_2: Tensor,
    mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return aten.layer_norm.default(x, [embed_dim], weight, bias, eps)  # type: ignore[no-any-return]

    if not src.numel():
        return src.clone()
    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    x = _multi_head(
        mode, x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask,
        False, True, mask_type,
    )[0]  # fmt: skip
    x.add_(src)
    if not norm_first:
        x = norm(x, norm_weight_1, norm_bias_1)
    before = x
    if norm_first:
        x = norm(x, norm_weight_2, norm_bias_2)
    batch, length, _ = x.shape
    flat = x.view(batch * length, embed_dim)
    inner = aten._addmm_activation.default(ffn_bias_1, flat, ffn_weight_1.t(), use_gelu=use_gelu)
    x = torch.addmm(ffn_bias_2, inner, ffn_weight_2.t()).view(batch, length, embed_dim)
    del inner, flat
    x.add_(before)
    if not norm_first:
        x = norm(x, norm_weight_2, norm_bias_2)
    return x


HANDLERS[aten._native_multi_head_attention.default] = _attention
HANDLERS[aten._transformer_encoder_layer_fwd.default] = _encoder_layer

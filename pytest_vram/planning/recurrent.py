"""Decoders with layers that carry a state, by their configuration: Mamba and the hybrids."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pytest_vram.planning.fields import Fields, assemble, changed
from pytest_vram.planning.mixers import DeltaNet, Mixer, Scan, ShortConv, StateSpace
from pytest_vram.planning.shapes import ModelShape, PlanError, Tower

_UNBIASED: dict[str, Any] = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}


def _layer_types(f: Fields) -> list[str]:
    """What each layer is, where the file says it layer by layer; Nemotron-H's newest files have
    words, its published ones a letter each."""
    words = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    if pattern := f.get("hybrid_override_pattern"):
        return [words.get(letter, letter) for letter in str(pattern)]
    types = f.get("layer_types", "layers_block_type")
    if isinstance(types, list):
        return [str(kind) for kind in types]
    raise PlanError(f"{f.where}: field 'layer_types' is missing")


def _attends(kind: str) -> bool:
    return "attention" in kind and "linear" not in kind


def _stack(f: Fields, mixer: Mixer, *, layers: int) -> Tower:
    """Layers of a mixer alone, a norm before each."""
    return Tower(
        layers=layers,
        hidden=f.need("hidden_size"),
        heads=1,
        ffn=mixer.inner,
        norm="rmsnorm",
        norms=1,
        mixer=mixer,
        mixer_layers=layers,
        alternating=True,
        **_UNBIASED,
    )


def _rank(f: Fields, name: str) -> int:
    value = f.get(name, default="auto")
    return math.ceil(f.need("hidden_size") / 16) if value == "auto" else int(value)


def mamba(f: Fields) -> ModelShape:
    inner = f.get("intermediate_size") or int(f.get("expand", default=2) * f.need("hidden_size"))
    mixer = Scan(
        inner,
        f.get("state_size", default=16),
        _rank(f, "time_step_rank"),
        f.get("conv_kernel", default=4),
        f.flag("use_conv_bias", True),
        f.flag("use_bias", False),
    )
    tower = _stack(f, mixer, layers=f.need("num_hidden_layers", "n_layer"))
    return assemble(f, tower, tied=True)


def mamba2(f: Fields) -> ModelShape:
    heads, head = f.need("num_heads"), f.need("head_dim")
    mixer = StateSpace(
        heads,
        head,
        f.get("n_groups", default=8),
        f.get("state_size", default=128),
        f.get("conv_kernel", default=4),
        f.flag("use_conv_bias", True),
        f.flag("use_bias", False),
    )
    tower = _stack(f, mixer, layers=f.need("num_hidden_layers"))
    return assemble(f, tower, tied=False)


def _hybrid(f: Fields, mixer: Mixer, mixers: int, **more: Any) -> Tower:
    """Llama's layers, ``mixers`` of them with a mixer in place of attention."""
    options: dict[str, Any] = {
        "heads": f.heads,
        "kv_heads": f.get("num_key_value_heads", default=f.heads),
        "head_dim": f.get("head_dim", default=0),
        "gated": True,
        "activation": f.activation,
        "norm": "rmsnorm",
        "rotary": True,
        **_UNBIASED,
        **more,
    }
    return Tower(
        layers=f.need("num_hidden_layers"),
        hidden=f.need("hidden_size"),
        mixer=mixer,
        mixer_layers=mixers,
        **options,
    )


def _every(f: Fields, what: str) -> int:
    """How many layers Jamba's period and offset pick."""
    period, offset = f.need(f"{what}_layer_period"), f.get(f"{what}_layer_offset", default=0)
    return sum(layer % period == offset for layer in range(f.need("num_hidden_layers")))


def jamba(f: Fields) -> ModelShape:
    hidden, layers = f.need("hidden_size"), f.need("num_hidden_layers")
    mixer = Scan(
        int(f.get("mamba_expand", default=2) * hidden),
        f.get("mamba_d_state", default=16),
        _rank(f, "mamba_dt_rank"),
        f.get("mamba_d_conv", default=4),
        f.flag("mamba_conv_bias", True),
        f.flag("mamba_proj_bias", False),
        normed=True,
    )
    routed: dict[str, Any] = {}
    experts = f.get("num_experts", default=1)
    if experts > 1:
        routed = {
            "experts": experts,
            "top_k": f.get("num_experts_per_tok", default=2),
            "moe_layers": _every(f, "expert"),
            "fused_experts": True,
        }
    mixers = layers - _every(f, "attn")
    tower = _hybrid(f, mixer, mixers, ffn=f.need("intermediate_size"), **routed)
    return assemble(f, tower, tied=False)


def _mamba2_of_hybrids(f: Fields) -> StateSpace:
    inner = int(f.get("mamba_expand", default=2) * f.need("hidden_size"))
    heads, head = f.need("mamba_n_heads"), f.get("mamba_d_head", default="auto")
    return StateSpace(
        heads,
        inner // heads if head == "auto" else head,
        f.get("mamba_n_groups", default=1),
        f.get("mamba_d_state", default=256),
        f.get("mamba_d_conv", default=4),
        f.flag("mamba_conv_bias", True),
        f.flag("mamba_proj_bias", False),
    )


def bamba(f: Fields) -> ModelShape:
    attending = len(f.get("attn_layer_indices", default=()))
    mixers = f.need("num_hidden_layers") - attending
    ffn, bias = f.need("intermediate_size"), f.flag("attention_bias", False)
    tower = _hybrid(
        f,
        _mamba2_of_hybrids(f),
        mixers,
        ffn=ffn,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=f.flag("mlp_bias", False),
    )
    return assemble(f, tower, tied=False)


def granite_hybrid(f: Fields) -> ModelShape:
    """Granite 4: Mamba-2 or attention, then a mixture and a block that all tokens see; the dense
    ones have that block alone."""
    mixers = sum(not _attends(kind) for kind in _layer_types(f))
    bias = f.flag("attention_bias", False)
    shared = f.get("shared_intermediate_size", default=1024)
    options: dict[str, Any] = {"ffn": shared, "fused_up": True, "qkv_bias": bias, "out_bias": bias}
    if experts := f.get("num_local_experts", default=0):
        options |= {
            "experts": experts,
            "top_k": f.get("num_experts_per_tok", default=2),
            "moe_ffn": f.need("intermediate_size"),
            "shared_ffn": shared,
            "fused_experts": True,
        }
    tower = _hybrid(f, _mamba2_of_hybrids(f), mixers, **options)
    return changed(assemble(f, tower, tied=False), scaled_logits=True)


def nemotron_h(f: Fields) -> ModelShape:
    """One block a layer: Mamba-2, attention, a squared relu's feed-forward block or a mixture."""
    types = _layer_types(f)
    count = {name: sum(kind == name for kind in types) for name in ("mlp", "moe")}
    mixers = sum(kind in ("mamba", "linear_attention") for kind in types)
    mixer = StateSpace(
        f.need("mamba_num_heads"),
        f.need("mamba_head_dim"),
        f.get("n_groups", default=8),
        f.get("ssm_state_size", default=128),
        f.get("conv_kernel", default=4),
        f.flag("use_conv_bias", True),
        f.flag("mamba_proj_bias", False),
    )
    routed: dict[str, Any] = {}
    if count["moe"]:
        routed = {
            "experts": f.need("n_routed_experts"),
            "top_k": f.need("num_experts_per_tok"),
            "moe_ffn": f.need("moe_intermediate_size"),
            "moe_layers": count["moe"],
            "shared_ffn": f.get("moe_shared_expert_intermediate_size", default=0)
            * f.get("n_shared_experts", default=1),
            "fused_experts": True,
        }
    bias, mlp_bias = f.flag("attention_bias", False), f.flag("mlp_bias", False)
    tower = Tower(
        layers=len(types),
        hidden=f.need("hidden_size"),
        heads=f.heads,
        kv_heads=f.get("num_key_value_heads", default=f.heads),
        head_dim=f.get("head_dim", "attention_head_dim", default=128),
        ffn=f.need("intermediate_size"),
        activation="relu2",
        norm="rmsnorm",
        norms=1,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=mlp_bias,
        alternating=True,
        mlp_layers=count["mlp"],
        mixer=mixer,
        mixer_layers=mixers,
        **routed,
    )
    return assemble(f, tower, tied=False)


def lfm2(f: Fields) -> ModelShape:
    """LFM2: short convolutions between layers of attention. Its feed-forward size is two thirds of
    what the file says, rounded up; its mixtures take theirs as it is."""
    layers, hidden = f.need("num_hidden_layers"), f.need("hidden_size")
    ffn = f.need("block_ff_dim", "intermediate_size")
    routed: dict[str, Any] = {}
    if f.get("model_type") == "lfm2_moe":
        routed = {
            "experts": f.need("num_experts"),
            "top_k": f.need("num_experts_per_tok"),
            "moe_ffn": f.need("moe_intermediate_size"),
            "moe_layers": layers - f.get("num_dense_layers", default=2),
            "fused_experts": True,
        }
    elif f.flag("block_auto_adjust_ff_dim", True):
        ffn = int(2 * ffn / 3)
        ffn = int(f.get("block_ffn_dim_multiplier", default=1.0) * ffn)
        step = f.get("block_multiple_of", default=256)
        ffn = -(-ffn // step) * step
    if f.get("layer_types"):
        attending = sum(_attends(kind) for kind in _layer_types(f))
    else:
        attending = len(f.get("full_attn_idxs", default=range(layers)))
    mixer = ShortConv(hidden, f.get("conv_L_cache", default=3), f.flag("conv_bias", False))
    options: dict[str, Any] = {"qk_norm": "head", "activation": "silu", **routed}
    tower = _hybrid(f, mixer, layers - attending, ffn=ffn, **options)
    return assemble(f, tower, tied=True)


def qwen3_next(f: Fields) -> ModelShape:
    """Qwen3-Next and Qwen3.5: three layers of a gated delta rule to one of gated attention."""
    layers, kind = f.need("num_hidden_layers"), str(f.get("model_type"))
    if f.get("layer_types"):
        attending = sum(_attends(name) for name in _layer_types(f))
    else:
        attending = layers // f.get("full_attention_interval", default=4)
    mixer = DeltaNet(
        f.get("linear_num_key_heads", default=16),
        f.get("linear_num_value_heads", default=32),
        f.get("linear_key_head_dim", default=128),
        f.get("linear_value_head_dim", default=128),
        f.get("linear_conv_kernel_dim", default=4),
        split=kind != "qwen3_next",
    )
    bias = f.flag("attention_bias", False)
    options: dict[str, Any] = {
        "head_dim": f.get("head_dim", default=256),
        "qk_norm": "head",
        "norm_fp32": True,
        "query_gate": True,
        "qkv_bias": bias,
        "out_bias": bias,
    }
    experts = f.get("num_experts", "num_local_experts", default=0)
    if experts and kind != "qwen3_5_text":
        step, dense = f.get("decoder_sparse_step", default=1), f.get("mlp_only_layers", default=())
        options |= {
            "ffn": f.get("intermediate_size") or f.need("moe_intermediate_size"),
            "experts": experts,
            "top_k": f.need("num_experts_per_tok"),
            "moe_ffn": f.need("moe_intermediate_size"),
            "moe_layers": sum((at + 1) % step == 0 and at not in dense for at in range(layers)),
            "shared_ffn": f.need("shared_expert_intermediate_size"),
            "shared_gate": True,
            "fused_experts": True,
        }
    else:
        options["ffn"] = f.need("intermediate_size")
    tower = _hybrid(f, mixer, layers - attending, **options)
    return assemble(f, tower, tied=False)


RECURRENT: dict[str, Callable[[Fields], ModelShape]] = {
    "mamba": mamba,
    "falcon_mamba": mamba,
    "mamba2": mamba2,
    "jamba": jamba,
    "bamba": bamba,
    "granitemoehybrid": granite_hybrid,
    "nemotron_h": nemotron_h,
    "lfm2": lfm2,
    "lfm2_moe": lfm2,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), qwen3_next),
}

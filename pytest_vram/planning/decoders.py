"""Decoders by their configuration: GPT-2 and its relatives, Llama and the many that are like it.

Most families of the last years are Llama with a few other choices. Those are rows of
:data:`LLAMA_LIKE`: what a family does otherwise, and which field of its configuration decides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pytest_vram.planning.fields import Fields, assemble, changed, usual_tower
from pytest_vram.planning.shapes import Latent, ModelShape, Tower, Weight

#: A choice that the configuration makes.
Choice = Callable[[Fields], Any]


def _read(*names: str, usual: Any = False) -> Choice:
    """The first of these fields that is there; ``usual`` is what a file without them means."""
    return lambda f: f.get(*names, default=usual)


def _need(*names: str) -> Choice:
    """The first of these fields, a positive number that must be there."""
    return lambda f: f.need(*names)


@dataclass(frozen=True, slots=True)
class Like:
    """What a family does otherwise than Llama: options of its :class:`Tower` and of its
    :class:`ModelShape`, each a constant or a :data:`Choice`; whether head and embedding are tied
    where the configuration does not say; parameter tensors that no option speaks of."""

    tower: Mapping[str, Any] = field(default_factory=dict)
    whole: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    extra: Callable[[Fields], Iterable[Weight]] = lambda f: ()


#: Every choice as Llama makes it.
_LLAMA: Mapping[str, Any] = {
    "layers": _need("num_hidden_layers"),
    "hidden": _need("hidden_size"),
    "heads": lambda f: f.heads,
    "kv_heads": lambda f: f.get("num_key_value_heads", default=f.heads),
    "head_dim": _read("head_dim", usual=0),
    "ffn": _need("intermediate_size"),
    "gated": True,
    "activation": lambda f: f.activation,
    "norm": "rmsnorm",
    "qkv_bias": _read("attention_bias"),
    "out_bias": _read("attention_bias"),
    "mlp_bias": _read("mlp_bias"),
    "rotary": True,
}


def _sparse(f: Fields) -> int:
    """How many layers are mixtures, in Qwen's words: every ``decoder_sparse_step``-th, without
    those that ``mlp_only_layers`` names."""
    step, dense = f.get("decoder_sparse_step", default=1), f.get("mlp_only_layers", default=())
    layers = range(f.need("num_hidden_layers"))
    return sum((layer + 1) % step == 0 and layer not in dense for layer in layers)


def _phimoe_bias(f: Fields) -> bool:
    return f.flag("lm_head_bias", False) and f.head()["head"] == "lm"


_UNBIASED: dict[str, Any] = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
_BIAS = _read("use_bias", usual=True)
_LAYER_NORM = {"norm": "layernorm"}
#: Both norms behind the blocks instead of before them; norms of whole queries and keys.
_OLMO2 = {"mlp_bias": False, "post_norms": 2, "qk_norm": "width", "norm_fp32": True}
#: One LayerNorm without bias, spelled out in fp32, before two blocks side by side.
_COHERE = {
    **_LAYER_NORM,
    "norm_tensors": 1,
    "norms": 1,
    "spelled_norm": True,
    "norm_fp32": True,
    "mlp_bias": False,
}
_GLM = {
    "qkv_bias": _read("attention_bias", usual=True),
    "out_bias": False,
    "mlp_bias": False,
    "fused_up": True,
}
_GEMMA3 = {"norms": 4, "post_norms": 2, "norm_fp32": True, "qk_norm": "head"}
_SQUARED = {"gated": False, "activation": "relu2"}
_SCALED = {"scaled_logits": True}
_MIXTRAL = {
    "experts": _need("num_local_experts"),
    "top_k": _read("num_experts_per_tok", usual=2),
    "fused_experts": True,
}
_QWEN_MOE = {
    "experts": _need("num_experts", "num_local_experts"),
    "top_k": _need("num_experts_per_tok"),
    "moe_ffn": _need("moe_intermediate_size"),
    "moe_layers": _sparse,
    "fused_experts": True,
}
_GPT_OSS = {
    **_MIXTRAL,
    "top_k": _read("num_experts_per_tok", "experts_per_token", usual=4),
    "qkv_bias": _read("attention_bias", usual=True),
    "out_bias": _read("attention_bias", usual=True),
    "activation": "clamped",
    "expert_bias": True,
    "sinks": True,
    "softmax_fp32": False,
}
_LLAMA4 = {
    **_MIXTRAL,
    "top_k": _read("num_experts_per_tok", usual=1),
    "ffn": _need("intermediate_size_mlp"),
    "moe_ffn": _need("intermediate_size"),
    "shared_ffn": _need("intermediate_size"),
    "moe_layers": lambda f: (
        f.need("num_hidden_layers") // f.get("interleave_moe_layer_step", default=1)
    ),
    "every_expert": True,
    "mlp_bias": False,
    "qk_norm": lambda f: "bare" if f.get("use_qk_norm", default=True) else "",
}

#: DeepSeek's words for a mixture: some dense layers first, experts that all tokens see.
_ROUTED = {
    "experts": _need("n_routed_experts"),
    "top_k": _need("num_experts_per_tok"),
    "moe_ffn": _need("moe_intermediate_size"),
    "moe_layers": lambda f: f.need("num_hidden_layers") - f.get("first_k_dense_replace", default=1),
    "shared_ffn": lambda f: f.need("moe_intermediate_size") * f.get("n_shared_experts", default=1),
    "fused_experts": True,
}


def _per_layer(field: str) -> Choice:
    """A number that some files write once for every layer."""

    def first(f: Fields) -> Any:
        value = f.get(field)
        return value[0] if isinstance(value, list) and value else value

    return first


def _ernie_layers(f: Fields) -> int:
    first, last = f.get("moe_layer_start_index", default=1), f.get("moe_layer_end_index")
    last = last if isinstance(last, int) and last >= 0 else f.need("num_hidden_layers") - 1
    step = f.get("moe_layer_interval", default=1)
    return sum(first <= layer <= last for layer in range(0, f.need("num_hidden_layers"), step))


def _ernie_corrections(f: Fields) -> Iterator[Weight]:
    """What balances the experts: counted by transformers, never trained."""
    wide = (1, f.need("moe_num_experts"))
    yield Weight("layers.correction", wide, "other", _ernie_layers(f), frozen=True)


def _mllama_gates(f: Fields) -> Iterator[Weight]:
    """Every layer that reads the image has norms of its queries and keys and two gates; the
    embedding has eight rows that the head has not."""
    layers = len(f.get("cross_attention_layers", default=(3, 8, 13, 18, 23, 28, 33, 38)))
    hidden = f.need("hidden_size")
    yield Weight("layers.cross.qk_norm", (hidden // f.heads,), "norm", 2 * layers)
    yield Weight("layers.cross.gates", (1,), "other", 2 * layers)
    yield Weight("image_tokens", (8, hidden), "other")


def _persimmon_biases(f: Fields) -> Iterator[Weight]:
    if f.flag("qk_layernorm", True):
        width = (f.need("hidden_size") // f.heads,)
        yield Weight(
            "layers.attention.qk_norm.bias", width, "norm", 2 * f.need("num_hidden_layers")
        )


LLAMA_LIKE: dict[str, Like] = {
    **dict.fromkeys(("llama", "cwm", "exaone", "internlm3", "iquestcoder"), Like()),
    "mistral": Like(),
    "mllama_text_model": Like(_UNBIASED, extra=_mllama_gates),
    "hunyuan_v1_dense": Like({"qk_norm": "head", "mlp_bias": False}),
    "hunyuan_v1_moe": Like(
        {
            "qk_norm": "head",
            "mlp_bias": False,
            "experts": _need("num_experts"),
            "top_k": _per_layer("moe_topk"),
            "shared_ffn": _need("intermediate_size"),
            "fused_experts": True,
        }
    ),
    "minimax_m2": Like({**_MIXTRAL, **_UNBIASED, "qk_norm": "width"}),
    "jais2": Like({**_LAYER_NORM, **_SQUARED}),
    "persimmon": Like(
        {
            **_LAYER_NORM,
            **_SQUARED,
            **dict.fromkeys(_UNBIASED, True),
            "kv_heads": 0,
            "fused_qkv": True,
            "qk_norm": lambda f: "head" if f.flag("qk_layernorm", True) else "",
        },
        extra=_persimmon_biases,
    ),
    "nanochat": Like(
        {**_SQUARED, "norm_tensors": 0, "qk_norm": "bare", "mlp_bias": False},
        whole={"capped_logits": lambda f: f.get("final_logit_softcapping") is not None},
    ),
    "dots1": Like({**_ROUTED, "mlp_bias": False, "qk_norm": "head"}),
    "flex_olmo": Like(
        {
            **_OLMO2,
            "experts": _need("num_experts"),
            "top_k": _need("num_experts_per_tok"),
            "fused_experts": True,
        }
    ),
    "ernie4_5_moe": Like(
        {
            **{name: _read("use_bias") for name in _UNBIASED},
            "experts": _need("moe_num_experts"),
            "top_k": _need("moe_k"),
            "moe_ffn": _need("moe_intermediate_size"),
            "moe_layers": _ernie_layers,
            "shared_ffn": lambda f: (
                f.need("moe_intermediate_size") * f.get("moe_num_shared_experts", default=0)
            ),
            "fused_experts": True,
        },
        whole={"head_bias": lambda f: f.flag("use_bias", False) and f.head()["head"] == "lm"},
        tied=True,
        extra=_ernie_corrections,
    ),
    "granitemoeshared": Like(
        {**_MIXTRAL, "shared_ffn": _read("shared_intermediate_size", usual=0)}, whole=_SCALED
    ),
    "ministral": Like(_UNBIASED),
    "ministral3": Like(_UNBIASED),
    "smollm3": Like(tied=True),
    "ernie4_5": Like({name: _read("use_bias") for name in _UNBIASED}, tied=True),
    "helium": Like({"out_bias": False, "norm_fp32": True}),
    "seed_oss": Like(
        {
            "qkv_bias": _read("attention_bias", usual=True),
            "out_bias": _read("attention_out_bias"),
        }
    ),
    **dict.fromkeys(
        ("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        Like({"qkv_bias": True}),
    ),
    **dict.fromkeys(("qwen3", "qwen3_vl_text"), Like({"qk_norm": "head"})),
    "phi3": Like({**_UNBIASED, "fused_qkv": True, "fused_up": True}),
    "gemma": Like({"norm_fp32": True}, tied=True),
    "gemma3_text": Like(_GEMMA3, tied=True),
    "olmo": Like({**_LAYER_NORM, "norm_tensors": 0, "norm_fp32": True, "mlp_bias": False}),
    "olmo2": Like(_OLMO2),
    "olmo3": Like(_OLMO2),
    "exaone4": Like({**_UNBIASED, "post_norms": 2, "qk_norm": "head"}),
    "granite": Like(whole=_SCALED),
    "cohere": Like(
        {**_COHERE, "qk_norm": lambda f: "width" if f.flag("use_qk_norm", False) else ""},
        whole=_SCALED,
        tied=True,
    ),
    "cohere2": Like(_COHERE, whole=_SCALED, tied=True),
    "glm": Like(_GLM),
    "glm4": Like({**_GLM, "norms": 4, "post_norms": 2}),
    "stablelm": Like(
        {
            **_LAYER_NORM,
            **_UNBIASED,
            "qkv_bias": _read("use_qkv_bias"),
            "qk_norm": lambda f: "width" if f.flag("qk_layernorm", False) else "",
            "norms": lambda f: 1 if f.flag("use_parallel_residual", False) else 2,
        }
    ),
    "starcoder2": Like(
        {**_LAYER_NORM, **dict.fromkeys(_UNBIASED, _BIAS), "gated": False}, tied=True
    ),
    "nemotron": Like({**_LAYER_NORM, **_SQUARED, "norm_casts": True}),
    "arcee": Like(_SQUARED),
    "mixtral": Like(_MIXTRAL),
    "granitemoe": Like(_MIXTRAL, whole=_SCALED),
    "phimoe": Like({**_LAYER_NORM, **_MIXTRAL}, whole={"head_bias": _phimoe_bias}),
    "olmoe": Like({**_QWEN_MOE, "moe_ffn": _need("intermediate_size"), "qk_norm": "width"}),
    "qwen2_moe": Like(
        {
            **_QWEN_MOE,
            "qkv_bias": _read("qkv_bias", usual=True),
            "out_bias": False,
            "shared_ffn": _need("shared_expert_intermediate_size"),
            "shared_gate": True,
        }
    ),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe_text"), Like({**_QWEN_MOE, "qk_norm": "head"})),
    "gpt_oss": Like(_GPT_OSS, whole={"attention": "explicit"}),
    "llama4_text": Like(_LLAMA4),
    "glm4_moe": Like(
        {
            "head_dim": lambda f: f.get("head_dim") or f.need("hidden_size") // f.heads,
            "qkv_bias": _read("attention_bias"),
            "out_bias": False,
            "mlp_bias": False,
            "qk_norm": lambda f: "head" if f.flag("use_qk_norm", False) else "",
            **_ROUTED,
        }
    ),
}


def llama_like(like: Like, f: Fields) -> ModelShape:
    """A model of the kind that ``like`` describes."""

    def chosen(options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value(f) if callable(value) else value for name, value in options.items()}

    tower = Tower(**chosen({**_LLAMA, **like.tower}))
    shape = assemble(f, tower, tied=like.tied)
    return changed(shape, others=tuple(like.extra(f)), **chosen(like.whole))


def _gpt2(f: Fields) -> ModelShape:
    hidden = f.need("n_embd", "hidden_size")
    tower = Tower(
        layers=f.need("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=f.heads,
        ffn=f.get("n_inner", default=None) or 4 * hidden,
        activation=f.activation if f.get("activation_function") else "gelu_new",
        fused_qkv=True,
        softmax_fp32=False,
    )
    positions = f.get("n_positions", "max_position_embeddings", "n_ctx", default=1024)
    return assemble(f, tower, tied=True, positions=positions)


def _gpt_neo(f: Fields) -> ModelShape:
    hidden = f.need("hidden_size")
    tower = Tower(
        layers=f.need("num_layers", "num_hidden_layers"),
        hidden=hidden,
        heads=f.heads,
        ffn=f.get("intermediate_size", default=None) or 4 * hidden,
        activation="gelu_new",
        qkv_bias=False,
    )
    positions = f.need("max_position_embeddings")
    shape = assemble(f, tower, tied=True, positions=positions)
    return changed(shape, attention="explicit")


def _gptj(f: Fields) -> ModelShape:
    hidden = f.need("n_embd", "hidden_size")
    tower = Tower(
        layers=f.need("n_layer"),
        hidden=hidden,
        heads=f.heads,
        ffn=f.get("n_inner", default=None) or 4 * hidden,
        activation="gelu_new",
        norms=1,
        qkv_bias=False,
        out_bias=False,
        rotary=True,
    )
    shape = assemble(f, tower, tied=False)
    return changed(shape, head_bias=shape.head == "lm")


def _gpt_bigcode(f: Fields) -> ModelShape:
    """StarCoder: GPT-2 whose queries share one key/value head."""
    shape = _gpt2(f)
    tower = replace(shape.tower, kv_heads=1 if f.flag("multi_query", True) else f.heads)
    return replace(shape, towers=(replace(tower, activation=f.activation),))


def _codegen(f: Fields) -> ModelShape:
    shape = _gptj(f)
    tower = replace(shape.tower, fused_qkv=True, parted_qkv=True)
    return replace(shape, towers=(tower,))


def _mpt(f: Fields) -> ModelShape:
    hidden = f.need("d_model")
    tower = Tower(
        layers=f.need("n_layers"),
        hidden=hidden,
        heads=f.need("n_heads"),
        ffn=int(f.get("expansion_ratio", default=4)) * hidden,
        norm_tensors=1,
        fused_qkv=True,
        **_UNBIASED,
    )
    return changed(assemble(f, tower, tied=True), attention="explicit")


def _biogpt(f: Fields) -> ModelShape:
    rows = f.need("max_position_embeddings") + 2
    return assemble(f, usual_tower(f), tied=True, positions=rows)


def _dbrx(f: Fields) -> ModelShape:
    inner, attention = (
        Fields(f.get(part, default={}), f"{f.where}: {part}")
        for part in ("ffn_config", "attn_config")
    )
    tower = Tower(
        layers=f.need("n_layers"),
        hidden=f.need("d_model"),
        heads=f.need("n_heads"),
        kv_heads=attention.need("kv_n_heads"),
        ffn=inner.need("ffn_hidden_size"),
        gated=True,
        activation="silu",
        norm_tensors=1,
        fused_qkv=True,
        rotary=True,
        experts=inner.need("moe_num_experts"),
        top_k=inner.need("moe_top_k"),
        fused_experts=True,
        **_UNBIASED,
    )
    return assemble(f, tower, tied=False)


def _phi(f: Fields) -> ModelShape:
    tower = Tower(
        layers=f.need("num_hidden_layers"),
        hidden=f.need("hidden_size"),
        heads=f.heads,
        kv_heads=f.get("num_key_value_heads", default=f.heads),
        ffn=f.need("intermediate_size"),
        activation=f.activation,
        norms=1,
        rotary=True,
    )
    shape = assemble(f, tower, tied=False)
    return changed(shape, head_bias=shape.head == "lm")


def _falcon(f: Fields) -> ModelShape:
    new = f.flag("new_decoder_architecture", False)
    if new:
        kv_heads = f.get("num_kv_heads", default=f.heads)
    else:
        kv_heads = 1 if f.flag("multi_query", True) else f.heads
    bias = f.flag("bias", False)
    hidden = f.need("hidden_size")
    tower = Tower(
        layers=f.need("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=f.heads,
        kv_heads=kv_heads,
        ffn=f.get("ffn_hidden_size", default=None) or 4 * hidden,
        norms=f.get("num_ln_in_parallel_attn", default=2) if new else _falcon_norms(f),
        fused_qkv=True,
        softmax_fp32=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        rotary=not f.flag("alibi", False),
    )
    shape = assemble(f, tower, tied=True)
    # One key/value head for all queries is more than the fused kernels take.
    return changed(shape, attention="math") if kv_heads == 1 else shape


def _falcon_norms(f: Fields) -> int:
    return 1 if f.flag("parallel_attn", True) else 2


def _gpt_neox(f: Fields) -> ModelShape:
    bias = f.flag("attention_bias", True)
    tower = usual_tower(
        f,
        fused_qkv=True,
        qkv_bias=bias,
        out_bias=bias,
        rotary=True,
    )
    return assemble(f, tower, tied=False)


def _opt(f: Fields) -> ModelShape:
    hidden = f.need("hidden_size")
    tower = Tower(
        layers=f.need("num_hidden_layers"),
        hidden=hidden,
        heads=f.heads,
        ffn=f.need("ffn_dim"),
        activation="relu",
    )
    shape = assemble(f, tower, tied=True, positions=f.need("max_position_embeddings") + 2)
    width = f.get("word_embed_proj_dim", default=hidden)
    return changed(
        shape,
        embedding_width=0 if width == hidden else width,
        projects_back=width != hidden,
        final_norm=f.flag("do_layer_norm_before", True),
    )


def _bloom(f: Fields) -> ModelShape:
    hidden = f.need("hidden_size", "n_embed")
    tower = Tower(
        layers=f.need("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=f.heads,
        ffn=4 * hidden,
        fused_qkv=True,  # its gelu is an autograd function that keeps its input alone
    )
    shape = assemble(f, tower, tied=True)
    return changed(shape, embedding_norm=True, attention="explicit")


def _xglm(f: Fields) -> ModelShape:
    """Positions are computed, and a constant."""
    tower = Tower(
        layers=f.need("num_layers", "num_hidden_layers"),
        hidden=f.need("d_model", "hidden_size"),
        heads=f.need("attention_heads", "num_attention_heads"),
        ffn=f.need("ffn_dim"),
        activation=f.activation,
        softmax_fp32=False,
        clamped_scores=True,
    )
    return changed(assemble(f, tower, tied=True), attention="explicit")


def _openai_gpt(f: Fields) -> ModelShape:
    """GPT: norms behind the blocks and none at the end."""
    shape = _gpt2(f)
    tower = replace(shape.tower, activation="gelu_new")
    return changed(shape, final_norm=False, towers=(tower,), attention="explicit")


def _vaultgemma(f: Fields) -> ModelShape:
    """Gemma 2 without the norms behind the blocks."""
    shape = _gemma2(f)
    return changed(shape, towers=(replace(shape.tower, norms=2, post_norms=0),))


def _gemma2(f: Fields) -> ModelShape:
    scores, logits = (
        f.config.get(f"{what}_softcapping", 1) for what in ("attn_logit", "final_logit")
    )
    tower = {**_GEMMA3, "qk_norm": "", "softcap": scores is not None}
    shape = llama_like(Like(tower, tied=True), f)
    return changed(shape, attention="explicit", capped_logits=logits is not None)


def _deepseek(f: Fields) -> ModelShape:
    """DeepSeek-V2 and -V3 as transformers builds them (the heads that predict further tokens, which
    published checkpoints of V3 carry beside the model, are not)."""
    at = Latent(
        kv_rank=f.need("kv_lora_rank"),
        q_rank=f.get("q_lora_rank", default=0),
        nope=f.need("qk_nope_head_dim"),
        rope=f.need("qk_rope_head_dim"),
        value=f.need("v_head_dim"),
    )
    layers, dense = f.need("num_hidden_layers"), f.get("first_k_dense_replace", default=0)
    routed: dict[str, Any] = {}
    if layers > dense:
        inner = f.need("moe_intermediate_size")
        routed = {
            "experts": f.need("n_routed_experts", "num_experts", "num_local_experts"),
            "top_k": f.need("num_experts_per_tok"),
            "moe_ffn": inner,
            "moe_layers": layers - dense,
            "shared_ffn": inner * f.get("n_shared_experts", default=0),
            "fused_experts": True,
        }
    bias = f.flag("attention_bias", False)
    tower = Tower(
        layers=layers,
        hidden=f.need("hidden_size"),
        heads=f.heads,
        head_dim=at.nope + at.rope,
        ffn=f.need("intermediate_size"),
        gated=True,
        activation=f.activation,
        norm="rmsnorm",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=f.flag("mlp_bias", False),
        rotary=True,
        latent=at,
        **routed,
    )
    return assemble(f, tower, tied=False)


DECODERS: dict[str, Callable[[Fields], ModelShape]] = {
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "gpt_bigcode": _gpt_bigcode,
    "gptj": _gptj,
    "codegen": _codegen,
    "mpt": _mpt,
    "dbrx": _dbrx,
    "biogpt": _biogpt,
    "gpt_neox": _gpt_neox,
    "phi": _phi,
    "falcon": _falcon,
    "opt": _opt,
    "bloom": _bloom,
    "gemma2": _gemma2,
    "vaultgemma": _vaultgemma,
    "xglm": _xglm,
    "openai-gpt": _openai_gpt,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _deepseek),
    **{name: partial(llama_like, like) for name, like in LLAMA_LIKE.items()},
}

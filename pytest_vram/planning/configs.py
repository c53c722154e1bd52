"""From a Hugging Face ``config.json`` to a :class:`ModelShape`, without importing anything.

Each family is one function that says which parameter tensors its layers have; the counts are
checked in the tests against the models that transformers builds from the same files.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytest_vram.planning import encoders, seq2seq
from pytest_vram.planning.fields import Config, Fields, assemble, changed, usual_tower
from pytest_vram.planning.published import MODELS
from pytest_vram.planning.shapes import Latent, ModelShape, PlanError, Tower


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


def _llama_like(
    f: Fields, *, qkv_bias: bool = False, qk_norm: bool = False, norms: int = 2, **more: Any
) -> ModelShape:
    bias = f.flag("attention_bias", False)
    tower = Tower(
        layers=f.need("num_hidden_layers"),
        hidden=f.need("hidden_size"),
        heads=f.heads,
        kv_heads=f.get("num_key_value_heads", default=f.heads),
        head_dim=f.get("head_dim", default=0),
        ffn=f.need("intermediate_size"),
        gated=True,
        activation=f.activation,
        norm="rmsnorm",
        norms=norms,
        qkv_bias=qkv_bias or bias,
        out_bias=bias,
        mlp_bias=f.flag("mlp_bias", False),
        qk_norm=qk_norm,
        rotary=True,
        **more,
    )
    return assemble(f, tower, tied=False)


def _llama(f: Fields) -> ModelShape:
    return _llama_like(f)


def _qwen2(f: Fields) -> ModelShape:
    return _llama_like(f, qkv_bias=True)


def _qwen3(f: Fields) -> ModelShape:
    return _llama_like(f, qk_norm=True)


def _gemma(f: Fields) -> ModelShape:
    return changed(_llama_like(f, norm_fp32=True), tied=f.flag("tie_word_embeddings", True))


def _gemma2(f: Fields) -> ModelShape:
    scores, logits = (
        f.config.get(f"{what}_softcapping", 1) for what in ("attn_logit", "final_logit")
    )
    shape = _llama_like(f, norms=4, norm_fp32=True, softcap=scores is not None)
    return changed(
        shape,
        tied=f.flag("tie_word_embeddings", True),
        attention="explicit",
        capped_logits=logits is not None,
    )


def _mixtral(f: Fields) -> ModelShape:
    return _llama_like(
        f,
        experts=f.need("num_local_experts"),
        top_k=f.get("num_experts_per_tok", default=2),
        fused_experts=True,
    )


def _qwen3_moe(f: Fields) -> ModelShape:
    return _llama_like(
        f,
        qk_norm=True,
        experts=f.need("num_experts", "num_local_experts"),
        top_k=f.need("num_experts_per_tok"),
        moe_ffn=f.need("moe_intermediate_size"),
        fused_experts=True,
    )


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


def _phi3(f: Fields) -> ModelShape:
    return _llama_like(f, fused_qkv=True)


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


def _gemma3(f: Fields) -> ModelShape:
    shape = _llama_like(f, norms=4, norm_fp32=True, qk_norm=True)
    return changed(shape, tied=f.flag("tie_word_embeddings", True))


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


FAMILIES: dict[str, Callable[[Fields], ModelShape]] = {
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "gptj": _gptj,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "phi": _phi,
    "phi3": _phi3,
    "falcon": _falcon,
    "opt": _opt,
    "bloom": _bloom,
    "bert": encoders.bert,
    "roberta": encoders.bert,
    "xlm-roberta": encoders.bert,
    "distilbert": encoders.distilbert,
    "electra": encoders.electra,
    "albert": encoders.albert,
    "deberta": encoders.deberta,
    "deberta-v2": encoders.deberta,
    "vit": encoders.vit,
    "t5": seq2seq.t5,
    "bart": seq2seq.bart,
    "mbart": seq2seq.bart,
    "whisper": seq2seq.whisper,
}


def from_config(config: Config, where: str = "config") -> ModelShape:
    """The shape that a Hugging Face configuration describes.

    :raises PlanError: no ``model_type``, a family that is not known, or a needed field missing.
    """
    seen: list[str] = []
    if isinstance(config.get("text_config"), Mapping):
        seen = [name for name in ("vision_config", "audio_config") if config.get(name)]
        config = {**config["text_config"], "architectures": None}
    kind = config.get("model_type")
    if not kind:
        raise PlanError(f"{where}: field 'model_type' is missing; is this a transformers config?")
    if kind not in FAMILIES:
        near = difflib.get_close_matches(str(kind), FAMILIES, n=2)
        ask = (
            f"the nearest known are {', '.join(near)}" if near else "known: " + ", ".join(FAMILIES)
        )
        raise PlanError(
            f"{where}: model_type {kind!r} is not known to the planner ({ask}); "
            "give its sizes with --layers, --hidden, --heads and --vocab"
        )
    shape = FAMILIES[str(kind)](Fields(config, where))
    name = config.get("_name_or_path") or kind
    notes = [f"planned without its {other.partition('_')[0]} tower" for other in seen]
    return changed(shape, name=str(name), notes=(*shape.notes, *notes))


def read_config(path: Path) -> ModelShape:
    """The shape in a ``config.json``, or in the one inside a model's folder."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"{file}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{file}: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise PlanError(f"{file}: a configuration is a JSON object, this is a {type(raw).__name__}")
    shape = from_config(raw, str(file))
    return changed(shape, name=file.parent.name or shape.name) if path.is_dir() else shape


def named(name: str) -> ModelShape:
    """A published model by its short name; the error suggests the nearest ones."""
    key = name.lower()
    if key not in MODELS:
        near = difflib.get_close_matches(key, MODELS, n=3, cutoff=0.5)
        ask = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(MODELS)}"
        raise PlanError(
            f"{name!r} is neither a config.json, a module:attribute nor a known model; {ask}"
        )
    return changed(from_config(MODELS[key], key), name=key)

"""From a Hugging Face ``config.json`` to a :class:`ModelShape`, without importing anything.

Each family is one function that says which parameter tensors its layers have; the counts are
checked in the tests against the models that transformers builds from the same files.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_vram.planning.shapes import Activation, ModelShape, PlanError, Tower, Weight

Config = Mapping[str, Any]


class _Fields:
    """Reads one config: every needed field that is missing is named in the error."""

    def __init__(self, config: Config, where: str) -> None:
        self.config = config
        self.where = where

    def need(self, *names: str) -> int:
        """The first of ``names`` that is there, as a positive whole number."""
        value = self.get(*names)
        if value is None:
            raise PlanError(f"{self.where}: field {names[0]!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise PlanError(f"{self.where}: {names[0]} must be a positive number, not {value!r}")
        return value

    def get(self, *names: str, default: Any = None) -> Any:
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        return default

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.get(name, default=default))

    @property
    def heads(self) -> int:
        return self.need("num_attention_heads", "n_head", "num_heads")

    @property
    def activation(self) -> Activation:
        name = str(self.get("hidden_act", "activation_function", "hidden_activation", "activation"))
        if "silu" in name or "swish" in name:
            return "silu"
        if name in ("gelu_new", "gelu_fast", "gelu_python_tanh"):
            return "gelu_new"
        return "relu" if "relu" in name else "gelu"

    def head(self) -> dict[str, Any]:
        """Head of the class named in ``architectures``; a language model where none is named."""
        names = self.get("architectures") or []
        first = str(names[0]) if names else ""
        if "Classification" in first or "ForImage" in first:
            labels = self.get("num_labels", default=len(self.get("id2label") or (0, 1)))
            return {"head": "classes", "head_rows": int(labels), "tied": False}
        if first.endswith("Model") and "LMHead" not in first:
            return {"head": "none", "tied": False}
        return {"head": "lm"}


def _gpt2(f: _Fields) -> ModelShape:
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
    return _assemble(f, tower, tied=True, positions=positions)


def _gpt_neo(f: _Fields) -> ModelShape:
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
    shape = _assemble(f, tower, tied=True, positions=positions)
    return _with(shape, attention="explicit")


def _gptj(f: _Fields) -> ModelShape:
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
    shape = _assemble(f, tower, tied=False)
    return _with(shape, head_bias=shape.head == "lm")


def _llama_like(
    f: _Fields, *, qkv_bias: bool = False, qk_norm: bool = False, norms: int = 2, **more: Any
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
    return _assemble(f, tower, tied=False)


def _llama(f: _Fields) -> ModelShape:
    return _llama_like(f)


def _qwen2(f: _Fields) -> ModelShape:
    return _llama_like(f, qkv_bias=True)


def _qwen3(f: _Fields) -> ModelShape:
    return _llama_like(f, qk_norm=True)


def _gemma(f: _Fields) -> ModelShape:
    return _with(_llama_like(f, norm_fp32=True), tied=f.flag("tie_word_embeddings", True))


def _gemma2(f: _Fields) -> ModelShape:
    shape = _llama_like(f, norms=4, norm_fp32=True, softcap=True)
    return _with(shape, tied=f.flag("tie_word_embeddings", True), attention="explicit")


def _mixtral(f: _Fields) -> ModelShape:
    return _llama_like(
        f,
        experts=f.need("num_local_experts"),
        top_k=f.get("num_experts_per_tok", default=2),
        fused_experts=True,
    )


def _qwen3_moe(f: _Fields) -> ModelShape:
    return _llama_like(
        f,
        qk_norm=True,
        experts=f.need("num_experts", "num_local_experts"),
        top_k=f.need("num_experts_per_tok"),
        moe_ffn=f.need("moe_intermediate_size"),
        fused_experts=True,
    )


def _phi(f: _Fields) -> ModelShape:
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
    shape = _assemble(f, tower, tied=False)
    return _with(shape, head_bias=shape.head == "lm")


def _phi3(f: _Fields) -> ModelShape:
    return _llama_like(f, fused_qkv=True)


def _falcon(f: _Fields) -> ModelShape:
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
    shape = _assemble(f, tower, tied=True)
    # One key/value head for all queries is more than the fused kernels take.
    return _with(shape, attention="math") if kv_heads == 1 else shape


def _falcon_norms(f: _Fields) -> int:
    return 1 if f.flag("parallel_attn", True) else 2


def _gpt_neox(f: _Fields) -> ModelShape:
    bias = f.flag("attention_bias", True)
    tower = Tower(
        layers=f.need("num_hidden_layers"),
        hidden=f.need("hidden_size"),
        heads=f.heads,
        ffn=f.need("intermediate_size"),
        activation=f.activation,
        fused_qkv=True,
        qkv_bias=bias,
        out_bias=bias,
        rotary=True,
    )
    return _assemble(f, tower, tied=False)


def _opt(f: _Fields) -> ModelShape:
    hidden = f.need("hidden_size")
    tower = Tower(
        layers=f.need("num_hidden_layers"),
        hidden=hidden,
        heads=f.heads,
        ffn=f.need("ffn_dim"),
        activation="relu",
    )
    shape = _assemble(f, tower, tied=True, positions=f.need("max_position_embeddings") + 2)
    width = f.get("word_embed_proj_dim", default=hidden)
    return _with(
        shape,
        embedding_width=0 if width == hidden else width,
        final_norm=f.flag("do_layer_norm_before", True),
    )


def _bloom(f: _Fields) -> ModelShape:
    hidden = f.need("hidden_size", "n_embed")
    tower = Tower(
        layers=f.need("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=f.heads,
        ffn=4 * hidden,
        fused_qkv=True,  # its gelu is an autograd function that keeps its input alone
    )
    shape = _assemble(f, tower, tied=True)
    return _with(shape, embedding_norm=True, attention="explicit")


def _bert(f: _Fields) -> ModelShape:
    tower = Tower(
        layers=f.need("num_hidden_layers"),
        hidden=f.need("hidden_size"),
        heads=f.heads,
        ffn=f.need("intermediate_size"),
        activation=f.activation,
        causal=False,
        softmax_fp32=False,
    )
    types = f.get("type_vocab_size", default=2)
    others = [Weight("token_types", (types, tower.hidden), "embedding")] if types else []
    head = f.head()
    if head["head"] != "lm":  # the masked-language-model head has no pooler
        others += _dense("pooler", tower.hidden)
    shape = _assemble(f, tower, tied=True, positions=f.need("max_position_embeddings"))
    masked = head["head"] == "lm"
    return _with(
        shape,
        final_norm=False,
        embedding_norm=True,
        head_transform=masked,
        upcast="LMHead" in str(f.get("architectures", default="")),  # used as a decoder
        head_bias=masked or head["head"] == "classes",
        others=tuple(others),
    )


def _distilbert(f: _Fields) -> ModelShape:
    tower = Tower(
        layers=f.need("n_layers", "num_hidden_layers"),
        hidden=f.need("dim", "hidden_size"),
        heads=f.need("n_heads", "num_attention_heads"),
        ffn=f.need("hidden_dim", "intermediate_size"),
        causal=False,
        softmax_fp32=False,
    )
    shape = _assemble(f, tower, tied=True, positions=f.need("max_position_embeddings"))
    others = _dense("pre_classifier", tower.hidden) if shape.head == "classes" else []
    return _with(
        shape,
        final_norm=False,
        embedding_norm=True,
        head_transform=shape.head == "lm",
        upcast=False,
        head_bias=shape.head != "none",
        others=tuple(others),
    )


def _t5(f: _Fields) -> ModelShape:
    hidden, heads = f.need("d_model"), f.need("num_heads")
    projection = str(f.get("feed_forward_proj", default="relu"))
    common: dict[str, Any] = {
        "hidden": hidden,
        "heads": heads,
        "head_dim": f.need("d_kv"),
        "ffn": f.need("d_ff"),
        "gated": projection.startswith("gated"),
        "activation": "gelu_new" if "gelu" in projection else "relu",
        "norm": "rmsnorm",
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
        "norm_keeps_stream": True,
        "position_bias": True,
        "recast_down": True,
        "softmax_fp32": False,
        "inner_dropout": True,
    }
    layers = f.need("num_layers")
    encoder = Tower(layers=layers, causal=False, **common)
    later = f.get("num_decoder_layers", default=layers)
    decoding = Tower(layers=later, norms=3, cross_attention=True, **common)
    table = (f.get("relative_attention_num_buckets", default=32), heads)
    others = [Weight("relative_positions", table, "position", 2)]
    head = {"tied": f.flag("tie_word_embeddings", True), **f.head()}
    if head["head"] == "classes":
        others += _dense("classifier.dense", hidden)
    return ModelShape(
        "t5",
        (encoder, decoding),
        vocab=f.need("vocab_size"),
        head_bias=head["head"] == "classes",
        others=tuple(others),
        upcast=False,
        notes=("planned without a padding mask: with one, position biases are B times as large",),
        **head,
    )


def _dense(name: str, hidden: int) -> list[Weight]:
    """A square layer with bias, such as a pooler."""
    matrix = Weight(name, (hidden, hidden), "other")
    return [matrix, Weight(f"{name}.bias", (hidden,), "other")]


def _vit(f: _Fields) -> ModelShape:
    hidden = f.need("hidden_size")
    tower = Tower(
        layers=f.need("num_hidden_layers"),
        hidden=hidden,
        heads=f.heads,
        ffn=f.need("intermediate_size"),
        activation=f.activation,
        qkv_bias=f.flag("qkv_bias", True),
        causal=False,
    )
    size, patch = f.need("image_size"), f.need("patch_size")
    channels = f.get("num_channels", default=3)
    if size % patch:
        raise PlanError(f"{f.where}: patches of {patch} do not divide an image of {size}")
    tokens = (size // patch) ** 2 + 1
    head = f.head()
    others = [
        Weight("patches", (hidden, channels, patch, patch), "other"),
        Weight("patches.bias", (hidden,), "other"),
        Weight("class_token", (1, 1, hidden), "other"),
        Weight("positions", (1, tokens, hidden), "position"),
    ]
    if head["head"] != "classes":
        head = {"head": "none", "tied": False}
        others += _dense("pooler", hidden)
    return ModelShape(
        "vit",
        (tower,),
        others=tuple(others),
        head_bias=head["head"] == "classes",
        upcast=False,
        tokens_per_sample=tokens,
        pixels_per_sample=channels * size * size,
        **head,
    )


def _assemble(f: _Fields, tower: Tower, *, tied: bool, positions: int = 0) -> ModelShape:
    """What most families share: token embedding, head, whether they are one tensor."""
    options = {"tied": f.flag("tie_word_embeddings", tied), **f.head()}
    kind = str(f.get("model_type", default="transformer"))
    vocab = f.need("vocab_size")
    return ModelShape(kind, (tower,), vocab=vocab, positions=positions, **options)


def _with(shape: ModelShape, **changes: Any) -> ModelShape:
    """``dataclasses.replace`` that leaves a tie alone where there is no language-model head."""
    if shape.head != "lm":
        changes.pop("tied", None)
        if shape.head == "none":
            changes.pop("head_bias", None)
    return replace(shape, **changes)


FAMILIES: dict[str, Callable[[_Fields], ModelShape]] = {
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
    "phi": _phi,
    "phi3": _phi3,
    "falcon": _falcon,
    "opt": _opt,
    "bloom": _bloom,
    "bert": _bert,
    "roberta": _bert,
    "distilbert": _distilbert,
    "t5": _t5,
    "vit": _vit,
}


def from_config(config: Config, where: str = "config") -> ModelShape:
    """The shape that a Hugging Face configuration describes.

    :raises PlanError: no ``model_type``, a family that is not known, or a needed field missing.
    """
    if isinstance(config.get("text_config"), Mapping):
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
    shape = FAMILIES[str(kind)](_Fields(config, where))
    name = config.get("_name_or_path") or kind
    return _with(shape, name=str(name))


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
    return _with(shape, name=file.parent.name or shape.name) if path.is_dir() else shape


def _llama_config(
    hidden: int, layers: int, heads: int, ffn: int, vocab: int, kv: int = 0, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv or heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "hidden_act": "silu",
        **more,
    }


def _gpt2_config(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": 50257,
        "n_positions": 1024,
        "activation_function": "gelu_new",
    }


def _bert_config(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
    }


#: Published models by name, as the configuration files that their authors publish.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2_config(768, 12, 12),
    "gpt2-medium": _gpt2_config(1024, 24, 16),
    "gpt2-large": _gpt2_config(1280, 36, 20),
    "gpt2-xl": _gpt2_config(1600, 48, 25),
    "bert-base": _bert_config(768, 12, 12),
    "bert-large": _bert_config(1024, 24, 16),
    "llama-7b": _llama_config(4096, 32, 32, 11008, 32000),
    "llama-13b": _llama_config(5120, 40, 40, 13824, 32000),
    "llama-3-8b": _llama_config(4096, 32, 32, 14336, 128256, 8),
    "llama-3-70b": _llama_config(8192, 80, 64, 28672, 128256, 8),
    "llama-3.2-1b": _llama_config(
        2048, 16, 32, 8192, 128256, 8, head_dim=64, tie_word_embeddings=True
    ),
    "llama-3.2-3b": _llama_config(
        3072, 28, 24, 8192, 128256, 8, head_dim=128, tie_word_embeddings=True
    ),
    "tinyllama-1.1b": _llama_config(2048, 22, 32, 5632, 32000, 4),
    "mistral-7b": _llama_config(4096, 32, 32, 14336, 32000, 8, model_type="mistral"),
    "mixtral-8x7b": _llama_config(
        4096,
        32,
        32,
        14336,
        32000,
        8,
        model_type="mixtral",
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen2.5-7b": _llama_config(3584, 28, 28, 18944, 152064, 4, model_type="qwen2"),
    "vit-base": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "num_labels": 1000,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu",
    },
}


def named(name: str) -> ModelShape:
    """A published model by its short name; the error suggests the nearest ones."""
    key = name.lower()
    if key not in MODELS:
        near = difflib.get_close_matches(key, MODELS, n=3, cutoff=0.5)
        ask = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(MODELS)}"
        raise PlanError(
            f"{name!r} is neither a config.json, a module:attribute nor a known model; {ask}"
        )
    return _with(from_config(MODELS[key], key), name=key)

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

from pytest_vram.planning import encoders, seq2seq
from pytest_vram.planning.decoders import DECODERS
from pytest_vram.planning.fields import Config, Fields, changed
from pytest_vram.planning.published import MODELS
from pytest_vram.planning.shapes import ModelShape, PlanError
from pytest_vram.planning.text_defaults import TEXT_DEFAULTS

FAMILIES: dict[str, Callable[[Fields], ModelShape]] = {
    **DECODERS,
    "bert": encoders.bert,
    "roberta": encoders.bert,
    "xlm-roberta": encoders.bert,
    "camembert": encoders.bert,
    "mpnet": encoders.mpnet,
    "modernbert": encoders.modernbert,
    "nomic_bert": encoders.nomic_bert,
    "distilbert": encoders.distilbert,
    "electra": encoders.electra,
    "albert": encoders.albert,
    "deberta": encoders.deberta,
    "deberta-v2": encoders.deberta,
    "vit": encoders.vit,
    "deit": encoders.deit,
    "dinov2": encoders.dinov2,
    "t5": seq2seq.t5,
    "bart": seq2seq.bart,
    "mbart": seq2seq.bart,
    "whisper": seq2seq.whisper,
}


#: Layers that carry a state along the sequence: what their kernels keep has no closed form here.
RECURRENT = frozenset(
    (
        *("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma"),
        *("jamba", "bamba", "zamba", "zamba2", "falcon_h1", "nemotron_h", "granitemoehybrid"),
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid"),
        *("minimax", "lfm2", "lfm2_moe"),
    )
)
#: Where a configuration has these, its layers are not Llama's.
_UNLIKE_LLAMA = ("encoder", "expert", "latent", "lora_rank", "ssm", "state_size", "conv", "hybrid")


def from_config(config: Config, where: str = "config") -> ModelShape:
    """The shape that a Hugging Face configuration describes.

    Of a model that sees or hears, the language model's. A family that is not known is planned as
    Llama if its configuration has Llama's sizes and no other; the shape says that it is a guess.

    :raises PlanError: no ``model_type``, a family that cannot be planned, a needed field missing.
    """
    heads = str(config.get("architectures"))
    config, notes = _language_model(config)
    kind = config.get("model_type")
    if not kind:
        raise PlanError(f"{where}: field 'model_type' is missing; is this a transformers config?")
    fields = Fields(config, where)
    if kind in FAMILIES:
        shape = FAMILIES[str(kind)](fields)
    elif ("CausalLM" in heads or "ConditionalGeneration" in heads) and _llama_sizes(config):
        shape = replace(FAMILIES["llama"](fields), guessed=True)
        notes.append(
            f"model_type {kind!r} is not known to the planner: planned as if its layers were "
            f"Llama's; compare {shape.parameters:,} parameters with what its authors say"
        )
    else:
        raise PlanError(_unknown(str(kind), where))
    name = config.get("_name_or_path") or kind
    return changed(shape, name=str(name), notes=(*shape.notes, *notes))


def _language_model(config: Config) -> tuple[Config, list[str]]:
    """The part of a multimodal configuration that is planned, and what is said about the rest."""
    seen = [kind for kind in ("vision", "audio") if config.get(f"{kind}_config")]
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        usual = TEXT_DEFAULTS.get(str(inner.get("model_type")), {})
        tie = {"tie_word_embeddings": config.get("tie_word_embeddings")}
        tied = tie if inner.get("tie_word_embeddings") is None else {}
        config = {**usual, **inner, **tied, "architectures": None}
    return config, [f"planned without its {kind} tower" for kind in seen]


def _llama_sizes(config: Config) -> bool:
    """Whether a configuration has the sizes of a Llama and no field that speaks of other layers."""
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    if not all(isinstance(config.get(name), int) for name in (*sizes, "vocab_size")):
        return False
    layers = str(config.get("layer_types", ""))
    if config.get("model_type") in RECURRENT or "linear" in layers or "recurrent" in layers:
        return False
    return not any(
        value and any(word in name for word in _UNLIKE_LLAMA) for name, value in config.items()
    )


def _unknown(kind: str, where: str) -> str:
    """Why a family cannot be planned, and what can be done instead."""
    instead = (
        "`pytest-vram simulate train.py` runs a step of it on a simulated card and counts every "
        "bill"
    )
    if kind in RECURRENT:
        return (
            f"{where}: {kind} has recurrent layers (state-space or linear attention); what their "
            f"kernels keep for backward has no closed form here. {instead}"
        )
    near = difflib.get_close_matches(kind, FAMILIES, n=2)
    ask = f" (the nearest known are {', '.join(near)})" if near else ""
    return (
        f"{where}: model_type {kind!r} is not known to the planner{ask}. Plan it from its code "
        "(module:attribute of the nn.Module) or from its sizes (--layers, --hidden, --heads, "
        f"--vocab); {instead}"
    )


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
        some = ("gpt2", "bert-base", "llama-3-8b", "qwen3-8b", "mixtral-8x7b")
        ask = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"{len(MODELS)} are known, such as {', '.join(some)}"
        )
        raise PlanError(
            f"{name!r} is neither a config.json, a module:attribute nor a known model; {ask}"
        )
    return changed(from_config(MODELS[key], key), name=key)

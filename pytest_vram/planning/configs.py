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
from pytest_vram.planning.hearing import wav2vec2
from pytest_vram.planning.pairs import pair
from pytest_vram.planning.published import MODELS
from pytest_vram.planning.recurrent import RECURRENT
from pytest_vram.planning.senses import JOINTS, senses
from pytest_vram.planning.shapes import ModelShape, PlanError, UnknownFamilyError
from pytest_vram.planning.text_defaults import TEXT_DEFAULTS

FAMILIES: dict[str, Callable[[Fields], ModelShape]] = {
    **DECODERS,
    **RECURRENT,
    "bert": encoders.bert,
    "roberta": encoders.bert,
    "xlm-roberta": encoders.bert,
    "camembert": encoders.bert,
    "data2vec-text": encoders.bert,
    "ernie": encoders.ernie,
    **dict.fromkeys(
        ("megatron-bert", "xlm-roberta-xl", "roberta-prelayernorm"), encoders.early_bert
    ),
    "bert-generation": encoders.bert_generation,
    "layoutlm": encoders.layoutlm,
    "mpnet": encoders.mpnet,
    "modernbert": encoders.modernbert,
    "nomic_bert": encoders.nomic_bert,
    "distilbert": encoders.distilbert,
    "electra": encoders.electra,
    "albert": encoders.albert,
    "deberta": encoders.deberta,
    "deberta-v2": encoders.deberta,
    **dict.fromkeys(("vit", "vit_msn", "vit_mae", "ijepa"), encoders.vit),
    "beit": encoders.beit,
    "dinov3_vit": encoders.dinov3,
    "dinov2_with_registers": encoders.dinov2,
    "deit": encoders.deit,
    "dinov2": encoders.dinov2,
    "t5": seq2seq.t5,
    "mt5": seq2seq.t5,
    "umt5": seq2seq.t5,
    **dict.fromkeys(seq2seq.BART_LIKE, seq2seq.bart),
    "whisper": seq2seq.whisper,
    **dict.fromkeys(("wav2vec2", "hubert"), wav2vec2),
}


#: Families of two towers that meet in a loss.
PAIRS = ("clip", "siglip")
#: Families with recurrent layers whose kernels' source has not been read.
UNREAD = frozenset(
    (
        *("rwkv", "xlstm", "recurrent_gemma", "zamba", "zamba2", "falcon_h1", "kimi_linear"),
        *("olmo_hybrid", "minimax"),
    )
)
_INSTEAD = (
    "`pytest-vram simulate train.py` runs a step of it on a simulated card and counts every bill"
)
#: Families with Llama's sizes and other layers: what transformers builds of them counts otherwise.
UNLIKE = frozenset(
    (
        *("apertus", "apertus1p5_text", "big_bird", "bitnet", "clvp_encoder", "cosmos3_edge_text"),
        *("csm", "diffllama", "dory", "gemma4_text", "gemma4_unified_text", "git", "glm4v_text"),
        *("glm_ocr_text", "granite_docling_text", "granite_swa", "higgs_audio_v2", "hrm_text"),
        *("hyperclovax", "modernbert-decoder", "molmo2_text", "muse_glimmer_text", "rembert"),
        *("paddleocr_vl_text", "phi4_multimodal", "roc_bert", "roformer", "xmod"),
        "voxtral_realtime_text",
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
    if config.get("model_type") in PAIRS:
        return changed(
            pair(config, where), name=str(config.get("_name_or_path") or config["model_type"])
        )
    heads = str(config.get("architectures"))
    whole, config = config, _language_model(config, where)
    kind = config.get("model_type")
    if not kind:
        raise PlanError(f"{where}: field 'model_type' is missing; is this a transformers config?")
    fields = Fields(config, where)
    notes: tuple[str, ...] = ()
    if kind in FAMILIES:
        shape = FAMILIES[str(kind)](fields)
    elif ("CausalLM" in heads or "ConditionalGeneration" in heads) and _llama_sizes(config):
        shape = replace(FAMILIES["llama"](fields), guessed=True)
        notes = (
            f"model_type {kind!r} is not known to the planner: planned as if its layers were "
            f"Llama's; compare {shape.parameters:,} parameters with what its authors say",
        )
    else:
        raise UnknownFamilyError(_unknown(str(kind), where), readable=kind not in UNREAD)
    shape = changed(shape, notes=(*shape.notes, *notes))
    shape = _with_senses(shape, whole, where)
    if kind in UNLIKE:
        raise UnknownFamilyError(_unknown(str(kind), where), guess=shape)
    return changed(shape, name=str(whole.get("_name_or_path") or kind))


def _language_model(config: Config, where: str) -> Config:
    """The language model of a configuration that has others beside it."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    if any(config.get(name) for name in ("encoder_layers", "decoder_layers")):
        raise PlanError(
            f"{where}: {config.get('model_type')} has layers of its own around the language model "
            f"in text_config, which the planner does not know. {_INSTEAD}"
        )
    usual = TEXT_DEFAULTS.get(str(inner.get("model_type")), {})
    own, outer = (part.get("tie_word_embeddings") for part in (inner, config))
    tied = own if outer is None or str(config.get("model_type")) in _TIED_WITHIN else outer
    heads = config.get("architectures")
    return {**usual, **inner, "tie_word_embeddings": tied, "architectures": heads}


def _with_senses(shape: ModelShape, whole: Config, where: str) -> ModelShape:
    """``shape`` with the towers that see or hear beside it counted, or a word on what is not."""
    kind, inside = whole.get("model_type"), isinstance(whole.get("text_config"), Mapping)
    parts = [name for name, value in whole.items() if name != "text_config" and _is_part(value)]
    alone = kind in JOINTS and "ForCausalLM" in str(whole.get("architectures"))
    if alone or not (parts or inside):
        return shape
    named = " and ".join(_PARTS.get(name, name) for name in sorted(parts))
    weights = senses(whole, where, shape.hidden)
    if weights is None:
        note = f"planned without its {named or f'parts beside text_config, if {kind} has any'}"
        return changed(shape, notes=(*shape.notes, note), partial=note)
    counted = sum(weight.total for weight in weights)
    note = (
        f"its {named} and projector are counted ({counted:,} parameters); what they keep for "
        "backward is not: freeze the tower, or simulate"
    )
    return changed(shape, others=(*shape.others, *weights), notes=(*shape.notes, note))


#: Where ``text_config`` decides whether head and embedding are tied, and not the whole.
_TIED_WITHIN = ("llava_onevision",)
#: Nested configurations by what they describe.
_PARTS = {"vision_config": "vision tower", "audio_config": "audio tower"}


def _is_part(value: object) -> bool:
    """Whether a field is the configuration of another model."""
    sizes = ("model_type", "hidden_size", "num_hidden_layers", "depth", "embed_dim")
    return isinstance(value, Mapping) and any(name in value for name in sizes)


def _llama_sizes(config: Config) -> bool:
    """Whether a configuration has the sizes of a Llama and no field that speaks of other layers."""
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    if not all(isinstance(config.get(name), int) for name in (*sizes, "vocab_size")):
        return False
    layers = str(config.get("layer_types", ""))
    if config.get("model_type") in UNREAD or "linear" in layers or "recurrent" in layers:
        return False
    return not any(
        value and any(word in name for word in _UNLIKE_LLAMA) for name, value in config.items()
    )


def _unknown(kind: str, where: str) -> str:
    """Why a family cannot be planned, and what can be done instead."""
    if kind in UNREAD:
        return (
            f"{where}: {kind} has recurrent layers (state-space or linear attention); what their "
            f"kernels keep for backward has no closed form here. {_INSTEAD}"
        )
    near = difflib.get_close_matches(kind, FAMILIES, n=2)
    ask = f" (the nearest known are {', '.join(near)})" if near else ""
    return (
        f"{where}: model_type {kind!r} is not known to the planner{ask}. Plan it from its code "
        "(module:attribute of the nn.Module) or from its sizes (--layers, --hidden, --heads, "
        f"--vocab); {_INSTEAD}"
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


#: Models that were published under another name with the same sizes.
ALIASES = {
    "llama-2-7b": "llama-7b",
    "llama-2-13b": "llama-13b",
    "llama-3.1-8b": "llama-3-8b",
    "llama-3.1-70b": "llama-3-70b",
    "llama-3.3-70b": "llama-3-70b",
    "mistral-nemo": "mistral-nemo-12b",
    "gpt2-small": "gpt2",
}
#: Words of a published name that say nothing of sizes.
_SILENT = frozenset(
    (
        *("meta", "hf", "instruct", "chat", "it", "pt", "uncased", "cased", "discriminator"),
        *("4k", "8k", "32k", "128k", "1t", "patch16", "224", "v0.1", "v0.2", "v1.0"),
    )
)


def named(name: str) -> ModelShape:
    """A published model by its short name, or by the one that it has on the Hugging Face Hub; the
    error suggests the nearest ones."""
    last = name.lower().rsplit("/", 1)[-1].replace("_", "-")
    spare = "-".join(word for word in last.split("-") if word not in _SILENT)
    tried = [ALIASES.get(form, form) for form in (last, spare)]
    key = next((form for form in tried if form in MODELS), None)
    if key is None:
        near = difflib.get_close_matches(spare, (*MODELS, *ALIASES), n=3, cutoff=0.5)
        some = ("gpt2", "bert-base", "llama-3-8b", "qwen3-8b", "mixtral-8x7b")
        ask = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"{len(MODELS)} are known, such as {', '.join(some)}"
        )
        hub = ". Nothing is downloaded: of others, give their config.json" if "/" in name else ""
        raise PlanError(
            f"{name!r} is neither a config.json, a module:attribute nor a known model; {ask}{hub}"
        )
    return changed(from_config(MODELS[key], key), name=key)

"""Models of two towers that meet in a contrastive loss: CLIP and SigLIP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_vram.planning.fields import Config, Fields
from pytest_vram.planning.senses import SENSE_DEFAULTS, TOWERS
from pytest_vram.planning.shapes import ModelShape, Tower, UnknownFamilyError, Weight

#: What ``text_config`` has where the file does not say (the classes' defaults in transformers 5).
_TEXT = {
    "clip": {
        "vocab_size": 49408,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
        "hidden_act": "quick_gelu",
    },
    "siglip": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 64,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
_VISION = {
    "clip": {"num_attention_heads": 12, "hidden_act": "quick_gelu"},
    "siglip": {"num_attention_heads": 12, "hidden_act": "gelu_pytorch_tanh"},
}


def pair(config: Config, where: str) -> ModelShape:
    """The whole of a CLIP or a SigLIP, as ``CLIPModel`` and ``SiglipModel`` are.

    :raises UnknownFamilyError: another class of the family, which has one of the towers alone.
    """
    kind, names = str(config.get("model_type")), config.get("architectures") or []
    if names and str(names[0]) not in ("CLIPModel", "SiglipModel"):
        raise UnknownFamilyError(f"{where}: of {kind} the two towers together are planned")
    vision = {**SENSE_DEFAULTS[f"{kind}_vision_model"], **_VISION[kind], **_part(config, "vision")}
    seen = Fields(vision, f"{where}: vision_config")
    read = Fields({**_TEXT[kind], **_part(config, "text")}, f"{where}: text_config")
    towers = (_tower(seen, tokens=_tokens(seen, kind)), _tower(read, causal=kind == "clip"))
    image = seen.need("image_size")
    return ModelShape(
        kind,
        towers,
        vocab=read.need("vocab_size"),
        positions=read.need("max_position_embeddings"),
        head="none",
        others=(*_beside(seen, kind), *_ends(config, seen, read, kind)),
        upcast=False,
        pixels_per_sample=seen.get("num_channels", default=3) * image * image,
    )


def _part(config: Config, name: str) -> Mapping[str, Any]:
    inner = config.get(f"{name}_config")
    return inner if isinstance(inner, Mapping) else {}


def _tower(f: Fields, *, tokens: int = 0, causal: bool = False) -> Tower:
    return Tower(
        layers=f.need("num_hidden_layers"),
        hidden=f.need("hidden_size"),
        heads=f.heads,
        ffn=f.need("intermediate_size"),
        activation=f.activation,
        causal=causal,
        tokens=tokens,
    )


def _tokens(f: Fields, kind: str) -> int:
    return (f.need("image_size") // f.need("patch_size")) ** 2 + (kind == "clip")


def _beside(f: Fields, kind: str) -> list[Weight]:
    """The tensors of the tower that sees beside its layers and its last norm."""
    rest = [w for w in TOWERS[f"{kind}_vision_model"](f) if w.role in ("other", "position")]
    rest += [w for w in TOWERS[f"{kind}_vision_model"](f) if w.name.startswith("vision.pool")]
    if kind == "clip":
        rest += [Weight("vision.first_norm", (f.need("hidden_size"),), "norm", 2)]
    return rest


def _ends(config: Config, seen: Fields, read: Fields, kind: str) -> list[Weight]:
    """What makes both towers' outputs comparable."""
    wide, narrow = seen.need("hidden_size"), read.need("hidden_size")
    if kind == "clip":
        out = Fields(config, seen.where).get("projection_dim", default=512)
        return [
            Weight("projection.seen", (out, wide), "other"),
            Weight("projection.read", (out, narrow), "other"),
            Weight("scale", (1,), "other"),
        ]
    out = read.get("projection_size", default=narrow)
    return [
        Weight("projection.read", (out, narrow), "other"),
        Weight("projection.read.bias", (out,), "other"),
        Weight("scale", (1,), "other", 2),
    ]

"""The towers that see or hear beside a language model, and what joins them to it: counted.

What they keep for backward depends on how many images or seconds of sound a sample has, and is not
planned; their parameters are, tensor by tensor, as transformers builds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pytest_vram.planning.fields import Config, Fields
from pytest_vram.planning.shapes import PlanError, Weight

Weights = Iterator[Weight]


def _matrix(name: str, out: int, inner: int, count: int = 1, *, bias: bool = True) -> Weights:
    """A linear layer."""
    yield Weight(name, (out, inner), "matrix", count)
    if bias:
        yield Weight(f"{name}.bias", (out,), "bias", count)


def _norm(name: str, width: int, count: int = 1, *, bias: bool = True) -> Weights:
    """A LayerNorm, or an RMSNorm (without ``bias``)."""
    yield Weight(f"{name}.weight", (width,), "norm", count)
    if bias:
        yield Weight(f"{name}.bias", (width,), "norm", count)


def _blocks(
    name: str,
    layers: int,
    hidden: int,
    ffn: int,
    *,
    biases: tuple[str, ...] = ("q", "k", "v", "o", "up", "down"),
    gated: bool = False,
    rmsnorm: bool = False,
    fused: bool = False,
) -> Weights:
    """``layers`` transformer layers of the usual kind, with biases where ``biases`` says. A
    ``fused`` matrix is no target of adapters on q or v, whose modules have other names."""
    for part in ("o",) if fused else ("q", "k", "v", "o"):
        yield from _matrix(f"{name}.{part}", hidden, hidden, layers, bias=part in biases)
    if fused:
        yield from _matrix(f"{name}.in", 3 * hidden, hidden, layers)
    if gated:
        yield from _matrix(f"{name}.gate", ffn, hidden, layers, bias="up" in biases)
    yield from _matrix(f"{name}.up", ffn, hidden, layers, bias="up" in biases)
    yield from _matrix(f"{name}.down", hidden, ffn, layers, bias="down" in biases)
    yield from _norm(f"{name}.norm", hidden, 2 * layers, bias=not rmsnorm)


def _side(f: Fields, name: str) -> int:
    """An image's or a patch's side; some files name height and width."""
    value = f.get(name)
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        value = value[0]
    if not isinstance(value, int) or value <= 0:
        raise PlanError(f"{f.where}: {name} must be one positive number, not {value!r}")
    return value


def _patches(f: Fields, name: str, *, bias: bool) -> tuple[list[Weight], int]:
    """The convolution that embeds patches, and how many there are in an image."""
    size, patch = _side(f, "image_size"), _side(f, "patch_size")
    hidden, channels = f.need("hidden_size"), f.get("num_channels", default=3)
    made = [Weight(f"{name}.patches", (hidden, channels, patch, patch), "other")]
    if bias:
        made.append(Weight(f"{name}.patches.bias", (hidden,), "other"))
    return made, (size // patch) ** 2


def _clip(f: Fields) -> Weights:
    hidden = f.need("hidden_size")
    embedding, patches = _patches(f, "vision", bias=False)
    yield from embedding
    yield Weight("vision.class_token", (hidden,), "other")
    yield Weight("vision.positions", (patches + 1, hidden), "position")
    yield from _norm("vision.norms", hidden, 2)
    yield from _blocks("vision", f.need("num_hidden_layers"), hidden, f.need("intermediate_size"))


def _siglip(f: Fields) -> Weights:
    """SigLIP; the towers of Idefics3 and SmolVLM are the same without the pooling head."""
    hidden, ffn = f.need("hidden_size"), f.need("intermediate_size")
    embedding, patches = _patches(f, "vision", bias=True)
    yield from embedding
    yield Weight("vision.positions", (patches, hidden), "position")
    yield from _norm("vision.norm", hidden)
    yield from _blocks("vision", f.need("num_hidden_layers"), hidden, ffn)
    if f.flag("vision_use_head", False):
        yield Weight("vision.probe", (1, 1, hidden), "other")
        yield from _matrix("vision.pool.qkv", 3 * hidden, hidden)
        yield from _matrix("vision.pool.o", hidden, hidden)
        yield from _matrix("vision.pool.up", ffn, hidden)
        yield from _matrix("vision.pool.down", hidden, ffn)
        yield from _norm("vision.pool.norm", hidden)


def _pixtral(f: Fields) -> Weights:
    embedding, _ = _patches(f, "vision", bias=False)
    hidden = f.need("hidden_size")
    yield from embedding
    yield from _norm("vision.norm", hidden, bias=False)
    layers, ffn = f.need("num_hidden_layers"), f.need("intermediate_size")
    yield from _blocks("vision", layers, hidden, ffn, biases=(), gated=True, rmsnorm=True)


def _llama4(f: Fields) -> Weights:
    hidden, ffn = f.need("hidden_size"), f.need("intermediate_size")
    embedding, patches = _patches(f, "vision", bias=False)
    yield from embedding
    yield Weight("vision.class_token", (hidden,), "other")
    yield Weight("vision.positions", (patches + 1, hidden), "position")
    yield from _norm("vision.norms", hidden, 2)
    yield from _blocks("vision", f.need("num_hidden_layers"), hidden, ffn)
    inner, out = f.need("projector_input_dim"), f.need("projector_output_dim")
    yield from _matrix("vision.adapter.up", inner, ffn, bias=False)
    yield from _matrix("vision.adapter.down", out, out, bias=False)


def _mllama(f: Fields) -> Weights:
    hidden, ffn = f.need("hidden_size"), f.need("intermediate_size")
    embedding, patches = _patches(f, "vision", bias=False)
    ratios = len(f.get("supported_aspect_ratios")) + 1
    tiles, globals_ = f.need("max_num_tiles"), f.need("num_global_layers")
    yield from embedding
    yield Weight("vision.class_token", (hidden,), "other")
    yield Weight("vision.positions", (patches + 1, hidden), "position")
    yield Weight("vision.tiles", (ratios, tiles * (patches + 1) * hidden), "position")
    yield Weight("vision.tiles.ends", (ratios, tiles * hidden), "position", 2)
    yield Weight("vision.gates", (1,), "other", 3 + 2 * globals_)
    yield from _norm("vision.norms", hidden, 2)
    layers = f.need("num_hidden_layers") + globals_
    yield from _blocks("vision", layers, hidden, ffn, biases=("up", "down"))


def _internvl(f: Fields) -> Weights:
    hidden, layers = f.need("hidden_size"), f.need("num_hidden_layers")
    embedding, patches = _patches(f, "vision", bias=True)
    rms = f.get("norm_type") == "rms_norm"
    qkv = ("q", "k", "v") if f.flag("attention_bias", False) else ()
    yield from embedding
    yield Weight("vision.class_token", (1, 1, hidden), "other", 1 + f.flag("use_mask_token", False))
    if f.flag("use_absolute_position_embeddings", True):
        yield Weight("vision.positions", (1, patches + 1, hidden), "position")
    ffn, biases = f.need("intermediate_size"), (*qkv, "o", "up", "down")
    yield from _blocks("vision", layers, hidden, ffn, biases=biases, rmsnorm=rms)
    yield Weight("vision.scale", (hidden,), "norm", 2 * layers)
    if f.flag("use_qk_norm", False):
        yield Weight("vision.qk_norm", (hidden,), "norm", 2 * layers)
    if not f.flag("use_mean_pooling", True):
        yield from _norm("vision.norm", hidden)


def _qwen_patches(f: Fields, hidden: int, *, bias: bool = False) -> Weights:
    patch, frames = f.need("patch_size"), f.need("temporal_patch_size")
    channels = f.get("in_channels", "in_chans", default=3)
    yield Weight("vision.patches", (hidden, channels, frames, patch, patch), "other")
    if bias:
        yield Weight("vision.patches.bias", (hidden,), "other")


def _merger(name: str, wide: int, out: int, count: int = 1) -> Weights:
    """Four neighbours in one: two linear layers."""
    yield from _matrix(f"{name}.up", wide, wide, count)
    yield from _matrix(f"{name}.down", out, wide, count)


def _qwen2_vl(f: Fields) -> Weights:
    hidden, layers = f.need("embed_dim"), f.need("depth")
    yield from _qwen_patches(f, hidden)
    yield from _blocks("vision", layers, hidden, int(hidden * f.get("mlp_ratio")), fused=True)
    yield from _norm("vision.merger.norm", hidden)
    wide = hidden * f.need("spatial_merge_size") ** 2
    yield from _merger("vision.merger", wide, f.need("hidden_size"))


def _qwen2_5_vl(f: Fields) -> Weights:
    hidden, layers, ffn = f.need("hidden_size"), f.need("depth"), f.need("intermediate_size")
    yield from _qwen_patches(f, hidden)
    yield from _blocks("vision", layers, hidden, ffn, gated=True, rmsnorm=True, fused=True)
    yield from _norm("vision.merger.norm", hidden, bias=False)
    wide = hidden * f.need("spatial_merge_size") ** 2
    yield from _merger("vision.merger", wide, f.need("out_hidden_size"))


def _qwen3_vl(f: Fields) -> Weights:
    hidden, layers, ffn = f.need("hidden_size"), f.need("depth"), f.need("intermediate_size")
    wide, out = hidden * f.need("spatial_merge_size") ** 2, f.need("out_hidden_size")
    deep = len(f.get("deepstack_visual_indexes", default=()))
    yield from _qwen_patches(f, hidden, bias=True)
    yield Weight("vision.positions", (f.need("num_position_embeddings"), hidden), "position")
    yield from _blocks("vision", layers, hidden, ffn, fused=True)
    yield from _norm("vision.merger.norm", hidden)
    yield from _merger("vision.merger", wide, out)
    if deep:
        yield from _norm("vision.deep.norm", wide, deep)
        yield from _merger("vision.deep", wide, out, deep)


def _whisper_encoder(f: Fields) -> Weights:
    """Whisper's encoder, as Qwen2-Audio and Voxtral have it."""
    hidden, mels = f.need("d_model", "hidden_size"), f.need("num_mel_bins")
    yield Weight("audio.conv1", (hidden, mels, 3), "other")
    yield Weight("audio.conv2", (hidden, hidden, 3), "other")
    yield Weight("audio.conv.bias", (hidden,), "other", 2)
    rows = (f.need("max_source_positions"), hidden)
    yield Weight("audio.positions", rows, "position", frozen=True)
    layers = f.need("encoder_layers", "num_hidden_layers")
    ffn, biases = f.need("encoder_ffn_dim", "intermediate_size"), ("q", "v", "o", "up", "down")
    yield from _blocks("audio", layers, hidden, ffn, biases=biases)
    yield from _norm("audio.norm", hidden)


def _vit(hidden: int, layers: int, ffn: int, image: Any, patch: Any, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": ffn,
        "image_size": image,
        "patch_size": patch,
        **more,
    }


_QWEN = {"depth": 32, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}
_IDEFICS3 = _vit(1152, 12, 3072, 224, 32)
_QWEN3 = {
    **_QWEN,
    "depth": 27,
    "patch_size": 16,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_RATIOS = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]

#: What a nested configuration has where the file does not say (it leaves out what equals the
#: defaults of its class in transformers 5; a test holds them together).
SENSE_DEFAULTS: dict[str, dict[str, Any]] = {
    "clip_vision_model": _vit(768, 12, 3072, 224, 32),
    "siglip_vision_model": _vit(768, 12, 3072, 224, 16, vision_use_head=True),
    "idefics3_vision": _IDEFICS3,
    "smolvlm_vision": _IDEFICS3,
    "pixtral": _vit(1024, 24, 4096, 1024, 16),
    "internvl_vision": _vit(1024, 24, 4096, [448, 448], [14, 14], norm_type="layer_norm"),
    "llama4_vision_model": _vit(
        768,
        34,
        5632,
        448,
        14,
        projector_input_dim=4096,
        projector_output_dim=4096,
        vision_output_dim=7680,
    ),
    "mllama_vision_model": _vit(
        1280,
        32,
        5120,
        448,
        14,
        num_global_layers=8,
        max_num_tiles=4,
        vision_output_dim=7680,
        supported_aspect_ratios=_RATIOS,
    ),
    "qwen2_vl_vision": {**_QWEN, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4},
    "qwen2_5_vl_vision": {
        **_QWEN,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
    },
    "qwen3_vl_vision": _QWEN3,
    "qwen3_vl_moe_vision": _QWEN3,
    "qwen3_5_vision": {**_QWEN3, "deepstack_visual_indexes": []},
    "qwen2_audio_encoder": {
        "d_model": 1280,
        "num_mel_bins": 128,
        "encoder_layers": 32,
        "encoder_ffn_dim": 5120,
        "max_source_positions": 1500,
    },
    "voxtral_encoder": {
        "hidden_size": 1280,
        "num_mel_bins": 128,
        "num_hidden_layers": 32,
        "intermediate_size": 5120,
        "max_source_positions": 1500,
    },
}

TOWERS: dict[str, Callable[[Fields], Weights]] = {
    "clip_vision_model": _clip,
    "siglip_vision_model": _siglip,
    "idefics3_vision": _siglip,
    "smolvlm_vision": _siglip,
    "pixtral": _pixtral,
    "internvl_vision": _internvl,
    "llama4_vision_model": _llama4,
    "mllama_vision_model": _mllama,
    "qwen2_vl_vision": _qwen2_vl,
    "qwen2_5_vl_vision": _qwen2_5_vl,
    "qwen3_vl_vision": _qwen3_vl,
    "qwen3_vl_moe_vision": _qwen3_vl,
    "qwen3_5_vision": _qwen3_vl,
    "qwen2_audio_encoder": _whisper_encoder,
    "voxtral_encoder": _whisper_encoder,
}


def _levels(f: Fields) -> int:
    """From how many layers of the tower features are taken."""
    layers = f.get("vision_feature_layer", default=-1)
    return len(layers) if isinstance(layers, list) else 1


def _llava(f: Fields, seen: Fields, hidden: int) -> Weights:
    bias, wide = f.flag("multimodal_projector_bias", True), seen.need("hidden_size") * _levels(f)
    yield from _matrix("projector.up", hidden, wide, bias=bias)
    yield from _matrix("projector.down", hidden, hidden, bias=bias)
    if f.get("model_type") in ("llava_next", "llava_next_video", "llava_onevision"):
        yield Weight("projector.newline", (hidden,), "other")


def _vipllava(f: Fields, seen: Fields, hidden: int) -> Weights:
    layers = f.get("vision_feature_layer", default=[-2, -5, -8, -11, 6])
    wide = seen.need("hidden_size") * (len(layers) if isinstance(layers, list) else 1)
    yield from _norm("projector.norm", wide)
    yield from _matrix("projector.up", hidden, wide)
    yield from _matrix("projector.down", hidden, hidden)


def _paligemma(f: Fields, seen: Fields, hidden: int) -> Weights:
    out = seen.get("projection_dim", default=f.get("projection_dim", default=hidden))
    yield from _matrix("projector", out, seen.need("hidden_size"))


def _gemma3(f: Fields, seen: Fields, hidden: int) -> Weights:
    wide = seen.need("hidden_size")
    yield Weight("projector", (wide, hidden), "other")
    yield from _norm("projector.norm", wide, bias=False)


def _mistral3(f: Fields, seen: Fields, hidden: int) -> Weights:
    bias, wide = f.flag("multimodal_projector_bias", False), seen.need("hidden_size")
    merged = wide * f.get("spatial_merge_size", default=2) ** 2
    yield from _norm("projector.norm", wide, bias=False)
    yield from _matrix("projector.merge", wide, merged, bias=False)
    yield from _matrix("projector.up", hidden, wide * _levels(f), bias=bias)
    yield from _matrix("projector.down", hidden, hidden, bias=bias)


def _llama4_projector(f: Fields, seen: Fields, hidden: int) -> Weights:
    yield from _matrix("projector", hidden, seen.need("vision_output_dim"), bias=False)


def _mllama_projector(f: Fields, seen: Fields, hidden: int) -> Weights:
    yield from _matrix("projector", hidden, seen.need("vision_output_dim"))


def _idefics3(f: Fields, seen: Fields, hidden: int) -> Weights:
    wide = seen.need("hidden_size") * f.get("scale_factor", default=2) ** 2
    yield from _matrix("projector", hidden, wide, bias=False)


def _internvl_projector(f: Fields, seen: Fields, hidden: int) -> Weights:
    wide = seen.need("hidden_size") * int(1 / f.get("downsample_ratio", default=0.5)) ** 2
    yield from _norm("projector.norm", wide)
    yield from _matrix("projector.up", hidden, wide)
    yield from _matrix("projector.down", hidden, hidden)


def _shuffled(f: Fields, seen: Fields, hidden: int) -> Weights:
    """Command-A and Aya: a pixel shuffle and a gated block."""
    wide = seen.need("hidden_size") * f.get("downsample_factor", default=2) ** 2
    inner = f.get("alignment_intermediate_size", default=hidden)
    if f.get("model_type") == "aya_vision":
        yield from _norm("projector.norm", wide)
    else:
        inner = f.get("alignment_intermediate_size", default=36864)
    yield from _matrix("projector.up", inner, wide)
    yield from _matrix("projector.down", hidden, inner // 2)


def _qwen2_audio(f: Fields, seen: Fields, hidden: int) -> Weights:
    yield from _matrix("projector", hidden, seen.need("d_model"))


def _voxtral(f: Fields, seen: Fields, hidden: int) -> Weights:
    yield from _matrix("projector.up", hidden, seen.need("intermediate_size"), bias=False)
    yield from _matrix("projector.down", hidden, hidden, bias=False)


def _nothing(f: Fields, seen: Fields, hidden: int) -> Weights:
    """The tower itself ends in the language model's width."""
    return iter(())


#: What joins tower and language model, by the ``model_type`` of the whole.
JOINTS: Mapping[str, Callable[[Fields, Fields, int], Weights]] = {
    **dict.fromkeys(("llava", "llava_next", "llava_next_video", "llava_onevision"), _llava),
    "vipllava": _vipllava,
    "paligemma": _paligemma,
    "gemma3": _gemma3,
    "mistral3": _mistral3,
    "llama4": _llama4_projector,
    "mllama": _mllama_projector,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "internvl": _internvl_projector,
    "aya_vision": _shuffled,
    "cohere2_vision": _shuffled,
    "qwen2_audio": _qwen2_audio,
    "voxtral": _voxtral,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _nothing),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _nothing),
}

#: The towers of those that name none.
_USUAL = {
    "qwen2_vl": "qwen2_vl_vision",
    "qwen2_5_vl": "qwen2_5_vl_vision",
    "qwen3_vl": "qwen3_vl_vision",
    "qwen3_vl_moe": "qwen3_vl_moe_vision",
    "qwen3_5": "qwen3_5_vision",
    "qwen3_5_moe": "qwen3_5_vision",
}


def senses(config: Config, where: str, hidden: int) -> tuple[Weight, ...] | None:
    """The parameter tensors of the tower that sees or hears and of its projector; ``None`` where
    they are not known. ``hidden`` is the language model's width.

    :raises PlanError: a size that is needed is missing or impossible.
    """
    whole = str(config.get("model_type"))
    part = "audio" if whole in ("qwen2_audio", "voxtral") else "vision"
    inner = config.get(f"{part}_config")
    if whole not in JOINTS or not isinstance(inner, Mapping):
        return None
    kind = str(inner.get("model_type"))
    kind = _USUAL.get(whole, kind)
    if kind not in TOWERS:
        return None
    seen = Fields({**SENSE_DEFAULTS[kind], **inner}, f"{where}: {part}_config")
    joint = JOINTS[whole](Fields(config, where), seen, hidden)
    return (*TOWERS[kind](seen), *joint)

"""Encoders by their configuration: BERT and its relatives, ViT and its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_vram.planning.fields import Fields, assemble, changed, dense, usual_tower
from pytest_vram.planning.shapes import ModelShape, PlanError, Relative, Tower, Weight


def bert(f: Fields) -> ModelShape:
    tower = usual_tower(
        f,
        causal=False,
        softmax_fp32=False,
    )
    types = f.get("type_vocab_size", default=2)
    others = [Weight("token_types", (types, tower.hidden), "embedding")] if types else []
    head = f.head()
    if head["head"] != "lm":  # the masked-language-model head has no pooler
        others += dense("pooler", tower.hidden)
    shape = assemble(f, tower, tied=True, positions=f.need("max_position_embeddings"))
    masked = head["head"] == "lm"
    return changed(
        shape,
        final_norm=False,
        embedding_norm=True,
        head_transform=masked,
        upcast="LMHead" in str(f.get("architectures", default="")),  # used as a decoder
        head_bias=masked or head["head"] == "classes",
        others=tuple(others),
    )


def ernie(f: Fields) -> ModelShape:
    shape = bert(f)
    if not f.flag("use_task_id", False):
        return shape
    tasks = Weight(
        "task_types", (f.get("task_type_vocab_size", default=3), shape.hidden), "embedding"
    )
    return replace(shape, others=(*shape.others, tasks))


def early_bert(f: Fields) -> ModelShape:
    """BERT with its norms before the blocks and one behind the last layer; of these alone the
    roberta-prelayernorm has a norm of the embeddings too."""
    kind = str(f.get("model_type"))
    shape = changed(bert(f), final_norm=True, embedding_norm=kind == "roberta-prelayernorm")
    return replace(shape, attention="explicit" if kind == "megatron-bert" else "")


def bert_generation(f: Fields) -> ModelShape:
    """BERT as a decoder: no token types, no pooler, no layer before the head."""
    shape = bert(f)
    others = tuple(w for w in shape.others if w.name != "token_types" and "pooler" not in w.name)
    decodes = "Decoder" in str(f.get("architectures"))
    return changed(
        shape,
        head_transform=False,
        upcast=decodes,
        others=others,
        head="lm" if decodes else "none",
        tied=decodes and f.flag("tie_word_embeddings", True),
        head_bias=decodes,
    )


def layoutlm(f: Fields) -> ModelShape:
    """BERT that is told where on the page a token stands."""
    shape = bert(f)
    places = (f.get("max_2d_position_embeddings", default=1024), shape.hidden)
    others = (*shape.others, Weight("places", places, "position", 4))
    if shape.head == "lm":
        others = (*others, *dense("pooler", shape.hidden))
    return replace(shape, others=others)


def electra(f: Fields) -> ModelShape:
    """The discriminator and the generator; their embeddings may be narrower than their layers."""
    return _narrow(f, f.need("embedding_size"), pooler=False)


def albert(f: Fields) -> ModelShape:
    """One set of weights for all layers, narrow embeddings."""
    return _narrow(f, f.need("embedding_size"), shared=True, pooler=True)


def _narrow(f: Fields, width: int, *, pooler: bool, shared: bool = False) -> ModelShape:
    tower = usual_tower(
        f,
        causal=False,
        softmax_fp32=False,
        shared=shared,
    )
    rows = f.need("max_position_embeddings")
    types = f.get("type_vocab_size", default=2)
    others = [Weight("positions", (rows, width), "position")]
    others += [Weight("token_types", (types, width), "embedding")]
    if width != tower.hidden or shared:
        others.append(Weight("embedding.project.bias", (tower.hidden,), "bias"))
    if shared and width == tower.hidden:
        others.append(Weight("embedding.project", (tower.hidden, width), "matrix"))
    head = f.head()
    if pooler and head["head"] != "lm":
        others += dense("pooler", tower.hidden)
    elif head["head"] == "classes":
        others += dense("classifier.dense", tower.hidden)
    shape = assemble(f, tower, tied=True)
    return changed(
        shape,
        longest=rows,
        embedding_width=width,
        final_norm=False,
        embedding_norm=True,
        embedding_norm_width=width,
        head_transform=head["head"] == "lm",
        upcast=False,
        head_bias=head["head"] != "none",
        others=tuple(others),
    )


def deberta(f: Fields) -> ModelShape:
    """DeBERTa, and its second and third versions, which transformers calls deberta-v2."""
    first = str(f.get("model_type")) == "deberta"
    hidden, kinds = f.need("hidden_size"), f.get("pos_att_type", default=())
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    c2p, p2c = "c2p" in kinds, "p2c" in kinds
    limit = f.get("max_relative_positions", default=-1)
    limit = limit if limit > 0 else f.need("max_position_embeddings")
    buckets = 0 if first else f.get("position_buckets", default=-1)
    rows = 2 * (buckets if buckets > 0 else limit)
    relative = f.flag("relative_attention", False)
    layers = f.need("num_hidden_layers")
    others = []
    if relative:
        others.append(Weight("relative_positions", (rows, hidden), "position"))
        if "layer_norm" in str(f.get("norm_rel_ebd", default="none")) and not first:
            others.append(Weight("relative_norm", (hidden,), "norm", 2))
        if first or not f.flag("share_att_key", False):
            parts, biases = c2p + p2c, p2c + (c2p and not first)
            others.append(Weight("layers.positions", (hidden, hidden), "matrix", parts * layers))
            others.append(Weight("layers.positions.bias", (hidden,), "bias", biases * layers))
    if not first and (kernel := f.get("conv_kernel_size", default=0)):
        groups = f.get("conv_groups", default=1)
        others.append(Weight("conv", (hidden, hidden // groups, kernel), "other"))
        others.append(Weight("conv.vectors", (hidden,), "other", 3))
    if types := f.get("type_vocab_size", default=0):
        others.append(Weight("token_types", (types, hidden), "embedding"))
    tower = Tower(
        layers=layers,
        hidden=hidden,
        heads=f.heads,
        ffn=f.need("intermediate_size"),
        activation=f.activation,
        causal=False,
        softmax_fp32=False,
        fused_qkv=first,
        qkv_bias=not first,
        spelled_norm=first,
        relative=Relative(rows, c2p, p2c, clipped=first) if relative else None,
    )
    if first:
        others.append(Weight("layers.attention.bias", (hidden,), "bias", 2 * layers))
    head = f.head()
    if head["head"] == "classes":
        others += dense("pooler", hidden)
    positions = f.need("max_position_embeddings") if f.flag("position_biased_input", True) else 0
    return changed(
        assemble(f, tower, tied=True, positions=positions),
        final_norm=False,
        embedding_norm=True,
        head_transform=head["head"] == "lm",
        upcast=False,
        head_bias=head["head"] != "none",
        attention="explicit",
        others=tuple(others),
    )


def distilbert(f: Fields) -> ModelShape:
    tower = Tower(
        layers=f.need("n_layers", "num_hidden_layers"),
        hidden=f.need("dim", "hidden_size"),
        heads=f.need("n_heads", "num_attention_heads"),
        ffn=f.need("hidden_dim", "intermediate_size"),
        causal=False,
        softmax_fp32=False,
    )
    shape = assemble(f, tower, tied=True, positions=f.need("max_position_embeddings"))
    others = dense("pre_classifier", tower.hidden) if shape.head == "classes" else []
    return changed(
        shape,
        final_norm=False,
        embedding_norm=True,
        head_transform=shape.head == "lm",
        upcast=False,
        head_bias=shape.head != "none",
        others=tuple(others),
    )


def mpnet(f: Fields) -> ModelShape:
    """BERT whose scores have a bias by relative position, and no token types."""
    plain = Fields({**f.config, "type_vocab_size": 0}, f.where)
    shape = bert(plain)
    table = (f.get("relative_attention_num_buckets", default=32), f.heads)
    others = (*shape.others, Weight("relative_positions", table, "position"))
    return replace(shape, others=others, attention="explicit")


def modernbert(f: Fields) -> ModelShape:
    """Norms before the blocks, but none before the first attention, and one behind the last layer:
    two for each layer."""
    bias = f.flag("norm_bias", False)
    tower = usual_tower(
        f,
        gated=True,
        fused_up=True,
        fused_qkv=True,
        rotary=True,
        causal=False,
        norm_tensors=2 if bias else 1,
        qkv_bias=f.flag("attention_bias", False),
        out_bias=f.flag("attention_bias", False),
        mlp_bias=f.flag("mlp_bias", False),
    )
    shape = assemble(f, tower, tied=True)
    return changed(
        shape,
        final_norm=False,
        embedding_norm=True,
        head_transform=shape.head != "none",
        head_transform_bias=f.flag("classifier_bias", False),
        head_bias=shape.head == "classes" or f.flag("decoder_bias", True),
    )


def nomic_bert(f: Fields) -> ModelShape:
    """BERT with rotary positions and a gated feed-forward block, without biases."""
    tower = usual_tower(
        f,
        gated=True,
        rotary=True,
        causal=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    )
    types = f.get("type_vocab_size", default=2)
    shape = assemble(f, tower, tied=True)
    others = [Weight("token_types", (types, tower.hidden), "embedding")] if types else []
    if shape.head == "classes":
        others += dense("pooler", tower.hidden)
    return changed(
        shape,
        final_norm=False,
        embedding_norm=True,
        head_transform=shape.head == "lm",
        head_bias=shape.head != "none",
        upcast=False,
        others=tuple(others),
    )


def vit(f: Fields) -> ModelShape:
    """ViT; of its relatives some have no pooler, some no class token."""
    kind = str(f.get("model_type", default="vit"))
    tower = usual_tower(f, qkv_bias=f.flag("qkv_bias", True), causal=False)
    pooler = kind not in ("vit_msn", "vit_mae", "ijepa") and f.head()["head"] != "classes"
    shape = _image(f, tower, others=dense("pooler", tower.hidden) if pooler else [])
    if kind == "vit_mae" and "PreTraining" in str(f.get("architectures")):
        return _masked_autoencoder(f, shape)
    if kind != "ijepa":
        return shape
    tokens = shape.tokens_per_sample - 1
    others = [w for w in shape.others if w.name != "class_token" and w.role != "position"]
    others.append(Weight("positions", (1, tokens, shape.hidden), "position"))
    return replace(shape, others=tuple(others), tokens_per_sample=tokens)


def _masked_autoencoder(f: Fields, shape: ModelShape) -> ModelShape:
    """ViT-MAE in pre-training: the encoder sees the patches that are not masked, a narrower decoder
    all of them, and a linear layer makes pixels of what it says."""
    patches, wide = shape.tokens_per_sample - 1, shape.hidden
    seen = int(patches * (1 - f.get("mask_ratio", default=0.75)))
    hidden, bias = f.need("decoder_hidden_size"), f.flag("qkv_bias", True)
    decoding = Tower(
        layers=f.need("decoder_num_hidden_layers"),
        hidden=hidden,
        heads=f.need("decoder_num_attention_heads"),
        ffn=f.need("decoder_intermediate_size"),
        activation=f.activation,
        qkv_bias=bias,
        causal=False,
    )
    pixels = f.need("patch_size") ** 2 * f.get("num_channels", default=3)
    others = [replace(weight, frozen=weight.role == "position") for weight in shape.others]
    others += [
        Weight("decoder.embed", (hidden, wide), "other"),
        Weight("decoder.embed.bias", (hidden,), "other"),
        Weight("decoder.mask_token", (1, 1, hidden), "other"),
        Weight("decoder.positions", (1, patches + 1, hidden), "position", frozen=True),
        Weight("decoder.pixels", (pixels, hidden), "other"),
        Weight("decoder.pixels.bias", (pixels,), "other"),
    ]
    encoder = replace(shape.tower, tokens=seen + 1)
    return replace(shape, towers=(encoder, decoding), others=tuple(others), head="none")


def deit(f: Fields) -> ModelShape:
    """ViT with one more token, which a teacher is asked for."""
    shape = vit(f)
    hidden, tokens = shape.hidden, shape.tokens_per_sample + 1
    others = [weight for weight in shape.others if weight.role != "position"]
    others += [
        Weight("positions", (1, tokens, hidden), "position"),
        Weight("distillation_token", (1, 1, hidden), "other"),
    ]
    return replace(shape, others=tuple(others), tokens_per_sample=tokens)


def dinov2(f: Fields) -> ModelShape:
    """ViT whose blocks are scaled, channel by channel; its classifier reads the class token and the
    mean of all others. The largest has a gated feed-forward block."""
    hidden = f.need("hidden_size")
    ffn = int(hidden * f.get("mlp_ratio", default=4))
    gated = f.flag("use_swiglu_ffn", False)
    tower = Tower(
        layers=f.need("num_hidden_layers"),
        hidden=hidden,
        heads=f.heads,
        ffn=(int(ffn * 2 / 3) + 7) // 8 * 8 if gated else ffn,
        gated=gated,
        activation="silu" if gated else f.activation,
        qkv_bias=f.flag("qkv_bias", True),
        layer_scale=True,
        causal=False,
    )
    others = []
    if f.flag("use_mask_token", True):
        others.append(Weight("mask_token", (1, hidden), "other"))
    registers = 0
    if str(f.get("model_type")) == "dinov2_with_registers":
        registers = f.get("num_register_tokens", default=4)
        others.append(Weight("registers", (1, registers, hidden), "other"))
    shape = _image(f, tower, others)
    shape = replace(shape, tokens_per_sample=shape.tokens_per_sample + registers)
    if shape.head == "classes":
        mean = Weight("head.mean", (shape.head_rows, hidden), "head")
        shape = replace(shape, others=(*shape.others, mean))
    return shape


def dinov3(f: Fields) -> ModelShape:
    """DINOv3: rotated positions instead of learned ones, registers."""
    hidden, heads = f.need("hidden_size"), f.heads
    gated = f.flag("use_gated_mlp", False)
    biased = ("query_bias", True), ("key_bias", False), ("value_bias", True)
    tower = Tower(
        layers=f.need("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        ffn=f.need("intermediate_size"),
        gated=gated,
        activation=f.activation,
        out_bias=f.flag("proj_bias", True),
        mlp_bias=f.flag("mlp_bias", True),
        unbiased=tuple(name[0] for name, usual in biased if not f.flag(name, usual)),
        layer_scale=True,
        rotary=True,
        causal=False,
    )
    registers = f.get("num_register_tokens", default=0)
    made = [
        Weight("mask_token", (1, 1, hidden), "other"),
        Weight("registers", (1, registers, hidden), "other"),
    ]
    shape = _image(f, tower, [weight for weight in made if weight.total])
    return replace(
        shape,
        others=tuple(weight for weight in shape.others if weight.role != "position"),
        tokens_per_sample=shape.tokens_per_sample + registers,
    )


def beit(f: Fields) -> ModelShape:
    """BEiT: relative positions over the scores, scaled blocks, a norm of the mean."""
    hidden, layers = f.need("hidden_size"), f.need("num_hidden_layers")
    tower = usual_tower(f, unbiased=("k",), layer_scale=_positive(f), causal=False)
    mean = f.flag("use_mean_pooling", True)
    made = []
    if f.flag("use_mask_token", False):
        made.append(Weight("mask_token", (1, 1, hidden), "other"))
    side = f.need("image_size") // f.need("patch_size")
    table = ((2 * side - 1) ** 2 + 3, f.heads)
    own, shared = (
        f.flag("use_relative_position_bias", False),
        f.flag("use_shared_relative_position_bias", False),
    )
    if own or shared:
        made.append(Weight("relative_positions", table, "position", layers if own else 1))
    shape = _image(f, tower, made)
    others = shape.others
    if not f.flag("use_absolute_position_embeddings", False):
        others = tuple(weight for weight in others if weight.name != "positions")
    shape = replace(shape, others=others, attention="explicit" if own or shared else "")
    return shape if mean else replace(shape, final_norm=True)


def _positive(f: Fields) -> bool:
    return float(f.get("layer_scale_init_value", default=0.1)) > 0


def _image(f: Fields, tower: Tower, others: list[Weight]) -> ModelShape:
    """Square patches of an image and a class token before ``tower``."""
    size, patch = f.need("image_size"), f.need("patch_size")
    channels, hidden = f.get("num_channels", default=3), tower.hidden
    if size % patch:
        raise PlanError(f"{f.where}: patches of {patch} do not divide an image of {size}")
    tokens = (size // patch) ** 2 + 1
    head: dict[str, Any] = f.head()
    if head["head"] != "classes":
        head = {"head": "none", "tied": False}
    return ModelShape(
        str(f.get("model_type", default="vit")),
        (tower,),
        others=(
            Weight("patches", (hidden, channels, patch, patch), "other"),
            Weight("patches.bias", (hidden,), "other"),
            Weight("class_token", (1, 1, hidden), "other"),
            Weight("positions", (1, tokens, hidden), "position"),
            *others,
        ),
        head_bias=head["head"] == "classes",
        upcast=False,
        tokens_per_sample=tokens,
        pixels_per_sample=channels * size * size,
        **head,
    )

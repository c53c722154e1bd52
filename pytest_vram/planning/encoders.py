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
    tower = usual_tower(f, qkv_bias=f.flag("qkv_bias", True), causal=False)
    pooler = f.head()["head"] != "classes"
    return _image(f, tower, others=dense("pooler", tower.hidden) if pooler else [])


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
    shape = _image(f, tower, others)
    if shape.head == "classes":
        mean = Weight("head.mean", (shape.head_rows, hidden), "head")
        shape = replace(shape, others=(*shape.others, mean))
    return shape


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

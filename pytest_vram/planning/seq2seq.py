"""Encoder-decoder models by their configuration: T5, BART, Whisper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_vram.planning.fields import Fields, dense
from pytest_vram.planning.shapes import ModelShape, PlanError, Tower, Weight, norm


def t5(f: Fields) -> ModelShape:
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
        others += dense("classifier.dense", hidden)
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


def bart(f: Fields) -> ModelShape:
    """BART, and mBART, which puts its norms before the blocks and one more at each tower's end."""
    early = str(f.get("model_type")) == "mbart"
    hidden = f.need("d_model", "hidden_size")
    encoder, decoding = _pair(f, hidden)
    vocab = f.need("vocab_size")
    rows = f.need("max_position_embeddings") + 2
    others = [Weight("positions", (rows, hidden), "position", 2)]
    others += norm("embedding_norm", encoder, 2)
    head = f.head()
    if head["head"] == "classes":
        others += dense("classifier.dense", hidden)
    return ModelShape(
        "bart",
        (encoder, decoding),
        vocab=vocab,
        final_norm=early,
        longest=rows - 2,
        normed_embeddings=True,
        upcast=False,
        wide_logits=True,
        head_bias=head["head"] == "classes",
        others=tuple(others),
        **{"tied": f.flag("tie_word_embeddings", True), **head},
    )


def whisper(f: Fields) -> ModelShape:
    """Two convolutions halve the frames; the encoder sees ``max_source_positions`` of them whatever
    is asked, the decoder the tokens that are asked for."""
    hidden, mels = f.need("d_model", "hidden_size"), f.need("num_mel_bins")
    frames, rows = f.need("max_source_positions"), f.need("max_target_positions")
    encoder, decoding = _pair(f, hidden, unbiased=("k",), scaled_query=True)
    others = [
        Weight("conv1", (hidden, mels, 3), "other"),
        Weight("conv2", (hidden, hidden, 3), "other"),
        Weight("conv.bias", (hidden,), "other", 2),
        Weight("encoder.positions", (frames, hidden), "position", frozen=True),
    ]
    head = f.head()
    if head["head"] == "classes":
        raise PlanError(f"{f.where}: Whisper is planned for speech recognition, not classification")
    return ModelShape(
        "whisper",
        (replace(encoder, tokens=frames), replace(decoding, source=frames)),
        vocab=f.need("vocab_size"),
        positions=rows,
        upcast=False,
        others=tuple(others),
        frames_per_sample=2 * frames * mels,
        kept_per_sample=(2 * 2 + 1) * frames * hidden,
        **{"tied": f.flag("tie_word_embeddings", True), **head},
    )


def _pair(f: Fields, hidden: int, **more: Any) -> tuple[Tower, Tower]:
    """Encoder and decoder of the BART kind."""
    if "CausalLM" in str(f.get("architectures")):
        raise PlanError(f"{f.where}: the decoder alone is not planned, only with its encoder")

    def tower(side: str, **own: Any) -> Tower:
        return Tower(
            layers=f.need(f"{side}_layers"),
            hidden=hidden,
            heads=f.need(f"{side}_attention_heads"),
            ffn=f.need(f"{side}_ffn_dim"),
            activation=f.activation,
            softmax_fp32=False,
            **more,
            **own,
        )

    return tower("encoder", causal=False), tower("decoder", norms=3, cross_attention=True)

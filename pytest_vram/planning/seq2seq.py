"""Encoder-decoder models by their configuration: T5, BART, their relatives, and Whisper."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from pytest_vram.planning.fields import Fields, dense
from pytest_vram.planning.shapes import ModelShape, PlanError, Tower, Weight, norm


def t5(f: Fields) -> ModelShape:
    hidden, heads = f.need("d_model"), f.need("num_heads")
    kind = str(f.get("model_type", default="t5"))
    usual = "relu" if kind == "t5" else "gated-gelu"
    projection = str(f.get("feed_forward_proj", default=usual))
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
        "own_position_bias": kind == "umt5",
        "recast_down": True,
        "softmax_fp32": False,
        "inner_dropout": True,
    }
    layers = f.need("num_layers")
    encoder = Tower(layers=layers, causal=False, **common)
    later = f.get("num_decoder_layers", default=layers)
    decoding = Tower(layers=later, norms=3, cross_attention=True, **common)
    table = (f.get("relative_attention_num_buckets", default=32), heads)
    tables = layers + later if kind == "umt5" else 2  # of every layer, or of each tower's first
    others = [Weight("relative_positions", table, "position", tables)]
    head = {"tied": f.flag("tie_word_embeddings", True), **f.head()}
    if head["head"] == "classes":
        others += dense("classifier.dense", hidden)
    return ModelShape(
        kind,
        (encoder, decoding),
        vocab=f.need("vocab_size"),
        head_bias=head["head"] == "classes",
        others=tuple(others),
        upcast=False,
        notes=("planned without a padding mask: with one, position biases are B times as large",),
        **head,
    )


@dataclass(frozen=True, slots=True)
class _Bart:
    """What a relative of BART does: norms before the blocks and one more at each tower's end;
    position tables that are learned (with rows to spare), constant, or computed; a norm of the
    embeddings; an fp32 buffer that is added to the logits."""

    early: bool = False
    positions: Literal["learned", "constant", "computed"] = "learned"
    spare: int = 0
    normed: bool = False
    biased: bool = True


BART_LIKE = {
    "bart": _Bart(spare=2, normed=True),
    "mbart": _Bart(early=True, spare=2, normed=True),
    "plbart": _Bart(spare=2, normed=True),
    "marian": _Bart(positions="constant"),
    "pegasus": _Bart(early=True, positions="constant"),
    "blenderbot": _Bart(early=True),
    "blenderbot-small": _Bart(normed=True),
    "m2m_100": _Bart(early=True, positions="computed", biased=False),
}


def bart(f: Fields) -> ModelShape:
    """BART and its relatives."""
    kind = str(f.get("model_type", default="bart"))
    like = BART_LIKE[kind]
    hidden = f.need("d_model", "hidden_size")
    encoder, decoding = _pair(f, hidden)
    rows = f.need("max_position_embeddings") + like.spare
    others = []
    if like.positions != "computed":
        constant = like.positions == "constant"
        others.append(Weight("positions", (rows, hidden), "position", 2, frozen=constant))
    if like.normed:
        others += norm("embedding_norm", encoder, 2)
    head = f.head()
    if head["head"] == "classes":
        others += dense("classifier.dense", hidden)
    return ModelShape(
        kind,
        (encoder, decoding),
        vocab=f.need("vocab_size"),
        final_norm=like.early,
        longest=0 if like.positions == "computed" else rows - like.spare,
        normed_embeddings=like.normed,
        upcast=False,
        wide_logits=like.biased,
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

"""Encoders of raw sound by their configuration: wav2vec 2.0 and HuBERT."""

from __future__ import annotations

from typing import Any

from pytest_vram.planning.fields import Fields, usual_tower
from pytest_vram.planning.shapes import ModelShape, PlanError, Weight

_STRIDES, _KERNELS = (5, 2, 2, 2, 2, 2, 2), (10, 3, 3, 3, 3, 2, 2)


def wav2vec2(f: Fields) -> ModelShape:
    """Convolutions make frames of samples, one more makes their positions; layers as BERT's, or
    with the norms first (``do_stable_layer_norm``).

    A position of the sequence is one frame: 320 samples, a fiftieth of a second at 16 kHz.
    """
    kind, hidden = str(f.get("model_type")), f.need("hidden_size")
    early = f.flag("do_stable_layer_norm", False)
    tower = usual_tower(f, inner_dropout=True, causal=False)
    widths = tuple(f.get("conv_dim", default=(512,) * 7))
    strides = tuple(f.get("conv_stride", default=_STRIDES))
    if len(widths) != len(strides):
        raise PlanError(f"{f.where}: {len(widths)} convolutions with {len(strides)} strides")
    samples = 1
    for stride in strides:
        samples *= stride
    kept, wide = _kept(f, widths, strides, samples)
    rate = f"{16000 / samples:.0f}"
    return ModelShape(
        kind,
        (tower,),
        head="none",
        final_norm=early,
        embedding_norm=not early,
        others=(*_convolutions(f, widths), *_beside(f, hidden, widths[-1]), *_head(f, hidden)),
        upcast=False,
        audio_per_token=samples,
        kept_per_token=kept + widths[-1] + 2 * hidden,  # the projection and the positions
        wide_per_token=wide + widths[-1],
        notes=(f"the sequence counts frames of {samples} samples, {rate} a second at 16 kHz",),
    )


def _kept(
    f: Fields, widths: tuple[int, ...], strides: tuple[int, ...], samples: int
) -> tuple[int, int]:
    """Values that the convolutions keep for one frame, in the compute type, and those that
    autocast keeps in fp32: each convolution's input, what its gelu reads, and what a norm between
    the two reads."""
    normed = len(widths) if f.get("feat_extract_norm", default="group") == "layer" else 1
    kept, wide, length, width = samples, 0, samples, 1
    for index, (out, stride) in enumerate(zip(widths, strides, strict=True)):
        if index:
            kept += length * width
        length, width = length // stride, out
        if index < normed:
            wide += 2 * length * width
        else:
            kept += length * width
    return kept, wide


def _convolutions(f: Fields, widths: tuple[int, ...]) -> list[Weight]:
    kernels = f.get("conv_kernel", default=_KERNELS)
    layered = f.get("feat_extract_norm", default="group") == "layer"
    made, inner = [], 1
    for index, (out, kernel) in enumerate(zip(widths, kernels, strict=True)):
        made.append(Weight(f"conv{index}", (out, inner, kernel), "other"))
        if f.flag("conv_bias", False):
            made.append(Weight(f"conv{index}.bias", (out,), "other"))
        if layered or not index:
            made.append(Weight(f"conv{index}.norm", (out,), "norm", 2))
        inner = out
    return made


def _beside(f: Fields, hidden: int, width: int) -> list[Weight]:
    """The projection of frames, the positions' convolution, the vector that masks a frame."""
    kernel, groups = (
        f.get(f"num_conv_pos_{name}", default=usual)
        for name, usual in (("embeddings", 128), ("embedding_groups", 16))
    )
    made: list[Weight] = []
    if f.flag("feat_proj_layer_norm", True):
        made.append(Weight("frames.norm", (width,), "norm", 2))
    made += [
        Weight("frames", (hidden, width), "other"),
        Weight("frames.bias", (hidden,), "other"),
        Weight("positions.scale", (1, 1, kernel), "other"),
        Weight("positions", (hidden, hidden // groups, kernel), "position"),
        Weight("positions.bias", (hidden,), "other"),
    ]
    masked = (f.get("mask_time_prob", default=0.05), f.get("mask_feature_prob", default=0.0))
    if any(rate > 0 for rate in masked):
        made.append(Weight("mask", (hidden,), "other"))
    return made


def _head(f: Fields, hidden: int) -> list[Weight]:
    names: Any = f.get("architectures") or [""]
    first = str(names[0])
    if first.endswith("ForCTC"):
        rows = f.need("vocab_size")
        return [Weight("head", (rows, hidden), "head"), Weight("head.bias", (rows,), "head")]
    if first.endswith("ForSequenceClassification") and not f.flag("use_weighted_layer_sum", False):
        inner = f.get("classifier_proj_size", default=256)
        rows = f.head()["head_rows"]
        return [
            Weight("head.projector", (inner, hidden), "head"),
            Weight("head.projector.bias", (inner,), "head"),
            Weight("head", (rows, inner), "head"),
            Weight("head.bias", (rows,), "head"),
        ]
    if not first or first.endswith("Model"):
        return []
    raise PlanError(f"{f.where}: {first} is not planned; CTC and sequence classification are")

"""Activations: what a forward pass keeps for the backward pass, tensor by tensor.

Nothing here is a magic factor. A layer is the list of tensors that PyTorch's eager autograd saves
(the derivative formulas of ``tools/autograd/derivatives.yaml``, PyTorch 2.13) when the usual
modules run: ``nn.LayerNorm`` or the spelled-out RMSNorm of transformers, linear layers,
``scaled_dot_product_attention`` or the explicit softmax, residual additions.

Symbols (see :mod:`pytest_vram.planning.shapes`): T = B·S tokens, c = bytes of the compute type,
r = bytes of the residual stream. All results are bytes per micro-batch on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from pytest_vram.planning.shapes import ModelShape, PlanError, Tower
from pytest_vram.planning.states import Lora, Precision

#: ``flash``: a fused kernel (flash, memory-efficient, cuDNN); ``math``: PyTorch's own composite
#: inside ``scaled_dot_product_attention``; ``explicit``: the library's own softmax.
Attention = Literal["flash", "math", "explicit"]


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor kept for backward. ``cut`` tensors shrink under tensor parallelism alone; the
    others (norms, residual stream) only under sequence parallelism."""

    name: str
    size: int
    cut: bool = False
    quadratic: bool = False  #: grows with S^2: what selective recomputation drops


@dataclass(frozen=True, slots=True)
class Recompute:
    """Which layers forget their activations and run again in backward.

    ``selective`` drops the attention core (softmax and what surrounds it), ``full`` keeps only
    each layer's input, ``every`` keeps the input of every ``step``-th layer (Chen et al. 2016,
    arXiv 1604.06174, with step = sqrt(L))."""

    kind: Literal["none", "selective", "full", "every"] = "none"
    step: int = 1

    def __str__(self) -> str:
        return f"every:{self.step}" if self.kind == "every" else self.kind

    @property
    def checkpointed(self) -> bool:
        return self.kind in ("full", "every")


def parse_recompute(text: str, layers: int) -> Recompute:
    """``none``, ``selective``, ``full``, ``every:4`` or ``sqrt`` (every sqrt(L) layers)."""
    kind, _, step = text.partition(":")
    if kind in ("none", "selective", "full") and not step:
        return Recompute(kind)  # type: ignore[arg-type]
    if kind == "sqrt" and not step:
        return Recompute("every", math.ceil(math.sqrt(layers)))
    if kind == "every" and step.isdigit() and int(step) > 0:
        return Recompute("every", int(step))
    raise PlanError(f"unknown recomputation {text!r}; known: none, selective, full, every:N, sqrt")


@dataclass(frozen=True, slots=True)
class Forward:
    """One micro-batch's forward pass: everything that decides what a layer saves. With ``lora``
    the base matrices are frozen."""

    batch: int
    sequence: int
    precision: Precision
    attention: Attention = "flash"
    dropout: float = 0.0
    lora: Lora | None = None
    #: Frozen matrices keep what they read all the same: bitsandbytes' 8-bit product does, its 4-bit
    #: product no longer (autograd/_functions.py, 0.50.2; in 0.41.1 it did).
    keeps_inputs: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def at(self, tower: Tower) -> Forward:
        """The same pass as ``tower`` sees it: some have a sequence length of their own."""
        return replace(self, sequence=tower.tokens) if tower.tokens else self

    def inputs(self, *parts: str) -> int:
        """Bytes per element that the linear layers ``parts`` keep of the one tensor they read.

        A trained matrix keeps its input for the weight gradient, a frozen one does not. Without
        autocast the layers share that tensor; autocast casts it once for each of them (only weight
        casts are cached). An adapter keeps its own input, in float32 where peft casts it.
        """
        p, c = self.precision, self.precision.compute
        if self.lora is None:
            return len(parts) * c if p.cache else p.input
        adapted = sum(self.lora.hits(part) for part in parts)
        if p.cache:
            return max(adapted, self.keeps_inputs) * c
        if self.lora.size == c:
            return c * bool(adapted or self.keeps_inputs)
        return adapted * self.lora.size + c * self.keeps_inputs


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of layer in a tower, and its share of the layers. ``core`` mixes tokens, ``block``
    is the feed-forward part; a layer of an alternating tower has one of the two."""

    share: float
    core: Literal["attention", "mixer", ""]
    block: Literal["mlp", "moe", ""]


def kinds(tower: Tower) -> tuple[Kind, ...]:
    """The kinds of layers that ``tower`` has. Where mixers and mixtures are distributed over the
    same layers, each share is the product: their bytes add up to the same."""
    layers = tower.layers
    cores = (("attention", tower.attention_layers), ("mixer", tower.mixer_layers))
    blocks = (("mlp", tower.dense_layers), ("moe", tower.moe_layers))
    if tower.alternating:
        alone = [Kind(count / layers, core, "") for core, count in cores]  # type: ignore[arg-type]
        alone += [Kind(count / layers, "", block) for block, count in blocks]  # type: ignore[arg-type]
        return tuple(kind for kind in alone if kind.share)
    pairs = [
        Kind(count * other / layers**2, core, block)  # type: ignore[arg-type]
        for core, count in cores
        for block, other in blocks
    ]
    return tuple(kind for kind in pairs if kind.share)


def layer_saved(tower: Tower, f: Forward, kind: Kind | None = None) -> tuple[Saved, ...]:
    """Every tensor that one layer of ``tower`` keeps, of the usual kind or of ``kind``."""
    kind = kind or kinds(tower)[0]
    items = [*_norms(tower, f, kind)]
    if kind.core == "attention":
        items += (_latent if tower.latent else _attention)(tower, f, "attention")
    elif kind.core == "mixer":
        items.append(_mixer(tower, f))
    if tower.cross_attention:
        items += _attention(tower, f, "cross")
    if kind.block == "moe":
        items += (_every_expert if tower.every_expert else _mixture)(tower, f)
        if tower.shared_ffn:
            items += _mlp(tower, f, tower.shared_ffn, f.tokens, "shared")
        if tower.shared_gate:
            items.append(Saved("shared output", f.tokens * tower.hidden * f.precision.compute))
    elif kind.block == "mlp":
        items += _mlp(tower, f, tower.ffn, f.tokens, "mlp")
    if tower.layer_scale:
        items.append(
            Saved("blocks before scaling", 2 * f.tokens * tower.hidden * f.precision.compute)
        )
    return tuple(items)


def _mixer(tower: Tower, f: Forward) -> Saved:
    """What a layer that carries a state keeps (:mod:`pytest_vram.planning.mixers`)."""
    mixer = tower.mixer
    assert mixer is not None
    return Saved("mixer", f.tokens * (mixer.kept * f.precision.compute + 4 * mixer.wide), cut=True)


def _norms(tower: Tower, f: Forward, kind: Kind) -> Iterator[Saved]:
    """Norms keep their input, and the linear layers behind them what they read.

    ``layer_norm`` saves x (r), mean and rstd (fp32 each). The spelled-out RMSNorm works in fp32:
    ``pow`` and ``mul`` save the fp32 x, ``weight *`` (if the weight is trained) the normalised x in
    the stream's type.
    """
    elements, p = f.tokens * tower.hidden, f.precision
    for index in range(tower.norms):
        name = f"norm {index + 1}"
        stream = p.compute if index >= tower.norms - tower.post_norms else p.residual
        if tower.norm == "layernorm":
            yield Saved(f"{name} input", elements * _layer_norm(tower, p))
            yield Saved(f"{name} statistics", 2 * f.tokens * 4)
        else:
            yield Saved(f"{name} input in fp32", elements * 4)
            yield Saved(f"{name} statistics", f.tokens * 4)
            if tower.norm_keeps_stream and p.residual != 4:
                yield Saved(f"{name} input", elements * p.residual)
            if f.lora is None and tower.norm_tensors:
                wide = 4 if tower.norm_fp32 else stream
                yield Saved(f"{name} normalised", elements * wide)
    qkv = ("qkv",) if tower.fused_qkv else ("q", "kv_a") if tower.latent else ("q", "k", "v")
    ups = tuple(tower.ups(tower.ffn))
    core = {"attention": qkv, "mixer": ("in",), "": ()}[kind.core]
    together = tower.norms == 1 and not tower.alternating  # both blocks read one norm
    if core:
        readers = core + ups if together else core
        yield Saved("attention input", elements * _input(tower, f, *readers))
    if tower.cross_attention:
        yield Saved("cross attention input", elements * f.inputs("q"))
        if p.cache:  # cast for each reader; without autocast all layers read one tensor
            read = f.batch * (tower.source or f.sequence) * tower.hidden
            yield Saved("encoder output", read * f.inputs("k", "v"))
    if kind.block == "moe":
        yield Saved("router input", elements * f.precision.input)
    elif kind.block and not together:
        yield Saved("feed-forward input", elements * _input(tower, f, *ups))


def _input(tower: Tower, f: Forward, *parts: str) -> int:
    """What the linear layers ``parts`` keep of a norm's output: no casts of their own where the
    norm has made it in 16 bits."""
    kept = f.inputs(*parts)
    return min(kept, f.precision.compute) if tower.norm_casts else kept


def _layer_norm(tower: Tower, p: Precision) -> int:
    """Bytes per element: ``layer_norm`` keeps its input; spelled out, the difference from the mean
    is kept by ``pow`` and by ``div``, both in fp32, and the quotient by the product with the
    weight."""
    stream = 4 if tower.norm_fp32 else p.compute if tower.norm_casts else p.residual
    return 4 + 4 + stream if tower.spelled_norm else stream


def _qk_norm(tower: Tower, p: Precision) -> int:
    """Bytes per element of queries and keys that their norms keep: in fp32 what ``pow`` and ``mul``
    read, and what the product with the weight reads."""
    if tower.norm == "layernorm":
        if tower.spelled_norm or p.cache:
            return 12 if tower.spelled_norm else 4
        return 0 if tower.fused_qkv else p.compute  # views of the fused product, kept anyway
    if tower.qk_norm == "bare":
        return 4
    return 4 + (4 if tower.norm_fp32 else p.compute)


def _attention(tower: Tower, f: Forward, name: str) -> Iterator[Saved]:
    """Queries, keys, values, the output, and what lies between.

    Rotary embeddings make new q and k (the products save only cos and sin); where q, k and v come
    from one fused matrix, v is a view that keeps all of it alive.
    """
    tokens, c = f.tokens, f.precision.compute
    source = f.batch * tower.source if tower.source and name == "cross" else tokens
    if tower.qk_norm:
        rows = tower.query + tower.kv
        yield Saved(f"{name} q, k norms", tokens * rows * _qk_norm(tower, f.precision), cut=True)
    if f.attention == "math":
        yield from _math(tower, f, name)
        return
    if tower.rotary and tower.fused_qkv and not tower.parted_qkv:
        yield Saved(f"{name} fused qkv", tokens * (tower.query + 2 * tower.kv) * c, cut=True)
        yield Saved(f"{name} rotated q, k", tokens * (tower.query + tower.kv) * c, cut=True)
    else:
        size = (tokens * tower.query + 2 * source * tower.kv) * c
        yield Saved(f"{name} q, k, v", size, cut=True)
    yield Saved(f"{name} output", tokens * tower.query * c, cut=True)
    if tower.query_gate:  # the gate, its sigmoid, and their product, which the output matrix reads
        yield Saved(f"{name} gate", 3 * tokens * tower.query * c, cut=True)
    if f.lora and f.lora.hits("o") and f.lora.size != c and not f.precision.cache:
        yield Saved(f"{name} adapter input", tokens * tower.query * f.lora.size, cut=True)
    if f.attention == "flash":
        yield Saved(f"{name} log-sum-exp", tokens * tower.heads * 4, cut=True)
    else:
        yield from _explicit(tower, f, name, source)
        if tower.relative:
            yield from _disentangled(tower, f, name)
    if tower.position_bias and name == "attention" and f.attention == "flash":
        scores = f.sequence * f.sequence * tower.heads
        yield Saved(f"{name} position bias", scores * c, cut=True, quadratic=True)
        if tower.own_position_bias:
            yield Saved(f"{name} position indices", 8 * f.sequence**2, quadratic=True)
    if f.dropout:
        yield Saved(f"{name} residual dropout mask", tokens * tower.hidden)


def _math(tower: Tower, f: Forward, name: str) -> Iterator[Saved]:
    """PyTorch's composite (``_scaled_dot_product_attention_math``,
    aten/src/ATen/native/transformers/attention.cpp): scaled q, scaled and repeated k, repeated v
    and the softmax, all in fp32 whatever the inputs are; the output in c."""
    scores, wide = f.tokens * f.sequence * tower.heads, f.tokens * tower.query
    yield Saved(f"{name} q, k, v in fp32", 3 * wide * 4, cut=True)
    yield Saved(f"{name} softmax", scores * 4, cut=True, quadratic=True)
    yield Saved(f"{name} output", wide * f.precision.compute, cut=True)
    if f.dropout:
        yield Saved(f"{name} dropout", scores * (1 + 4), cut=True, quadratic=True)
        yield Saved(f"{name} residual dropout mask", f.tokens * tower.hidden)


def _latent(tower: Tower, f: Forward, name: str) -> Iterator[Saved]:
    """Multi-head latent attention. Each latent goes through a norm of its own; queries and keys are
    put together from their plain and their rotated parts, values are a view that keeps the whole
    product of ``kv_b`` alive."""
    at, tokens, c = tower.latent, f.tokens, f.precision.compute
    assert at is not None
    for part, rank in (("q", at.q_rank), ("kv_b", at.kv_rank)):
        if rank:
            kept = 4 + (0 if f.lora else c) + f.inputs(part)
            yield Saved(f"{name} {part} latent", tokens * (rank * kept + 4))
    yield Saved(f"{name} q, k", tokens * 2 * tower.query * c, cut=True)
    yield Saved(f"{name} k, v", tokens * tower.heads * (at.nope + at.value) * c, cut=True)
    yield Saved(f"{name} output", tokens * tower.values * c, cut=True)
    if f.attention == "flash":
        yield Saved(f"{name} log-sum-exp", tokens * tower.heads * 4, cut=True)
    else:
        yield from _explicit(tower, f, name, tokens)
    if f.dropout:
        yield Saved(f"{name} residual dropout mask", tokens * tower.hidden)


def _disentangled(tower: Tower, f: Forward, name: str) -> Iterator[Saved]:
    """What DeBERTa's scores against relative positions keep: a second k (the first is divided by
    the scale), the positions' keys and queries repeated for every sample, the scores that
    ``gather`` picks from (its derivative is told their shape by the tensor itself) and its int64
    indices, the mask of the padding. The first version's products make contiguous copies of their
    own of q and k."""
    at, c = tower.relative, f.precision.compute
    assert at is not None
    kinds, rows = at.c2p + at.p2c, at.used(f.sequence)
    again = kinds if tower.fused_qkv else 1
    yield Saved(f"{name} q, k before scaling", again * f.tokens * tower.kv * c, cut=True)
    picked = f.tokens * tower.heads * rows * c * kinds
    yield Saved(f"{name} relative scores", picked, cut=True, quadratic=True)
    repeated = f.batch * rows * tower.query * c * kinds
    yield Saved(f"{name} positions", repeated, cut=True)
    yield Saved(f"{name} indices", kinds * 8 * f.sequence**2, quadratic=True)
    yield Saved(f"{name} padding", f.tokens * f.sequence, quadratic=True)
    cast = f.inputs(*("k", "q")[:kinds])
    yield Saved(f"{name} position embeddings", rows * tower.hidden * (cast + bool(f.dropout)))


def _explicit(tower: Tower, f: Forward, name: str, source: int) -> Iterator[Saved]:
    """Softmax over S x S scores: its output (fp32 under autocast, and where the library asks for
    it), and what the product with v reads: a copy in c, or with dropout the dropped copy and the
    mask."""
    scores, p = f.tokens * (source // f.batch) * tower.heads, f.precision
    c = p.compute
    softmax = 4 if p.cache or tower.softmax_fp32 else c
    yield Saved(f"{name} softmax", scores * softmax, cut=True, quadratic=True)
    if tower.kv_heads < tower.heads:
        extra = 2 * (tower.query - tower.kv) * f.tokens * c
        yield Saved(f"{name} repeated k, v", extra, cut=True)
    if f.dropout:
        yield Saved(f"{name} dropout", scores * (1 + c), cut=True, quadratic=True)
    elif softmax != c:
        yield Saved(f"{name} softmax cast", scores * c, cut=True, quadratic=True)
    if tower.softcap:
        yield Saved(f"{name} capped scores", scores * c, cut=True, quadratic=True)
    if tower.clamped_scores:
        wide = 4 if p.cache else c
        yield Saved(f"{name} clamped scores", scores * wide, cut=True, quadratic=True)


def _mlp(tower: Tower, f: Forward, ffn: int, tokens: int, name: str) -> Iterator[Saved]:
    """The feed-forward block, by activation function.

    Fused gelu and silu save their input, relu its output (which is the next matrix's input), the
    spelled-out tanh gelu of transformers five tensors, three of them fp32 under autocast because
    ``pow`` is on autocast's fp32 list.
    """
    wide, c, kept = tokens * ffn, f.precision.compute, f.inputs("down")
    inner = _activation(tower, f)
    relu = tower.activation == "relu"
    if tower.gated:
        if tower.activation == "clamped":
            yield Saved(f"{name} clamped gate, up; sigmoid", 3 * wide * c, cut=True)
        yield Saved(f"{name} gate", wide * inner, cut=True)
        # Spelled out under autocast, gelu ends in a product with an fp32 tensor.
        spelled = tower.activation == "gelu_new" and f.precision.cache
        yield Saved(f"{name} activated gate", wide * (4 if spelled else c), cut=True)
        yield Saved(f"{name} up", wide * c, cut=True)
    elif relu and (kept != c or (tower.recast_down and f.precision.cache)):
        yield Saved(f"{name} relu", wide * c, cut=True)
    elif not relu:
        yield Saved(f"{name} up", wide * inner, cut=True)
    if kept:
        yield Saved(f"{name} down input", wide * kept, cut=True)
    if f.dropout and tower.inner_dropout:
        yield Saved(f"{name} dropout mask", wide, cut=True)
        if relu and not tower.gated and not (tower.recast_down and f.precision.cache):
            yield Saved(f"{name} dropped", wide * c, cut=True)
    if f.dropout:
        yield Saved(f"{name} residual dropout mask", tokens * tower.hidden)


def _activation(tower: Tower, f: Forward) -> int:
    """Bytes per element that the activation function keeps besides its output."""
    c = f.precision.compute
    if tower.activation == "gelu_new":
        return 12 + 2 if f.precision.cache else 4 * c
    if tower.activation == "relu2":  # the relu's output; ``pow`` reads it, under autocast in fp32
        return c + 4 if f.precision.cache else c
    if tower.activation == "quick_gelu":
        return 2 * c
    return 0 if tower.activation == "relu" else c


def _mixture(tower: Tower, f: Forward) -> Iterator[Saved]:
    """A mixture of experts: router probabilities, and for each token's ``top_k`` copies the input,
    the feed-forward tensors and the weighted output. Assumes that no token is dropped.

    Experts in one tensor are multiplied by ``grouped_mm``, which autocast does not cast
    (aten/src/ATen/autocast_mode.h, PyTorch 2.13): they run in the parameters' type.
    """
    if tower.fused_experts and f.precision.cache:
        p = f.precision
        f = replace(f, precision=replace(p, cache=False, compute=p.parameter, linear_input=0))
    copies, c = f.tokens * tower.top_k, f.precision.compute
    yield Saved("router", f.tokens * tower.experts * 8)
    inputs = f.precision.input
    if f.lora and tower.fused_experts:
        adapted = any(f.lora.hits(part) for part in ("gate", "up", "down"))
        if adapted:  # peft multiplies with the sum of matrix and adapter, made for each layer
            matrices = sum(w.numel for w in tower.weights() if w.role == "expert" and w.count)
            yield Saved("adapted experts", matrices * f.precision.parameter, cut=True)
        f = replace(f, lora=None if adapted else replace(f.lora, targets=()))
        inputs = f.inputs("up")
    yield Saved("expert inputs", copies * tower.hidden * inputs)
    yield from _mlp(tower, replace(f, dropout=0.0), tower.moe_ffn, copies, "experts")
    yield Saved("expert outputs", copies * tower.hidden * c)


def _every_expert(tower: Tower, f: Forward) -> Iterator[Saved]:
    """All experts see all tokens: the repeated input, its product with the router's weights, and
    the feed-forward tensors of one batched product, which autocast does cast."""
    copies = f.tokens * tower.experts
    yield Saved("router", f.tokens * tower.experts * 8)
    yield Saved("expert inputs", 2 * copies * tower.hidden * f.precision.compute)
    yield from _mlp(tower, replace(f, dropout=0.0), tower.moe_ffn, copies, "experts")


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a rank's share of the activations is cut: tensor parallel ``t``, with sequence
    parallelism everything over ``t``; ``context`` ranks divide the sequence."""

    tensor: int = 1
    sequence: bool = False
    context: int = 1

    def share(self, item: Saved) -> float:
        whole = item.cut or self.sequence
        return item.size / self.context / (self.tensor if whole else 1)


def layer_bytes(
    tower: Tower, f: Forward, recompute: Recompute, sharding: Sharding, kind: Kind | None = None
) -> int:
    """Bytes that one layer holds between forward and backward, without checkpointed layers'
    re-runs (see :func:`tower_bytes`)."""
    items = layer_saved(tower, f, kind)
    if recompute.kind == "selective":
        items = tuple(item for item in items if not item.quadratic)
    return int(sum(sharding.share(item) for item in items))


def layer_input(tower: Tower, f: Forward, sharding: Sharding) -> int:
    """What a checkpointed layer keeps: its input, B S H r bytes."""
    whole = Saved("input", f.tokens * tower.hidden * f.precision.residual)
    return int(sharding.share(whole))


@dataclass(frozen=True, slots=True)
class TowerActivations:
    """``kept`` lives from forward to backward; ``rerun`` is what one recomputed stretch of layers
    holds for a moment in backward."""

    kept: int
    rerun: int


def tower_bytes(
    tower: Tower, layers: int, f: Forward, recompute: Recompute, sharding: Sharding
) -> TowerActivations:
    """Activations of ``layers`` layers of a tower.

    * none, selective: L times one layer;
    * full: L inputs, and one whole layer while it is run again;
    * every k: L/k inputs, and k layers while they are run again; k = sqrt(L) makes both O(sqrt L).
    """
    each = [(kind.share, layer_bytes(tower, f, recompute, sharding, kind)) for kind in kinds(tower)]
    if not recompute.checkpointed:
        return TowerActivations(layers * int(sum(share * size for share, size in each)), 0)
    step = min(recompute.step, layers) if recompute.kind == "every" else 1
    inputs = -(-layers // step) * layer_input(tower, f, sharding)
    return TowerActivations(inputs, step * max(size for _, size in each))


def tower_ends(shape: ModelShape, f: Forward, sharding: Sharding) -> int:
    """What an encoder hands to the decoder: its final norm, its output, which all decoder layers
    read, and the one zero bias of their cross attention (T5)."""
    total = 0
    for tower in shape.towers[:-1]:
        tokens, p = f.at(tower).tokens, f.precision
        elements = tokens * tower.hidden
        if shape.final_norm:
            stream = 4 + p.residual if tower.norm == "rmsnorm" else p.residual
            total += elements * stream + 8 * tokens
        total += elements * p.residual
        if tower.position_bias:
            total += f.sequence * f.sequence * tower.heads * p.compute
    return int(sharding.share(Saved("encoder's end", total)))


def embedding_bytes(shape: ModelShape, f: Forward, sharding: Sharding) -> int:
    """Between the token ids and the first layer: dropout's mask, the embedding norm's input, what
    a projection from narrow embeddings and convolutions over audio keep."""
    p = f.precision
    total = f.batch * shape.kept_per_sample * p.compute
    total += f.tokens * (shape.kept_per_token * p.compute)
    total += f.tokens * shape.wide_per_token * (4 if p.cache else p.compute)
    if shape.frames_per_sample and p.cache:
        total += f.batch * shape.frames_per_sample * p.compute  # the cast input
    for tower in shape.towers:
        tokens = f.at(tower).tokens
        width = shape.embedding_norm_width or tower.hidden
        if shape.embedding_norm or shape.normed_embeddings:
            total += tokens * width * _layer_norm(tower, p) + 8 * tokens
        if width != tower.hidden:
            total += tokens * width * p.input
        if f.dropout:
            total += tokens * width
    return int(sharding.share(Saved("embedding", total)))


@dataclass(frozen=True, slots=True)
class Head:
    """The end of the model: final norm, logits, loss.

    ``kept`` is what the norm keeps; ``saved`` what the loss keeps until its backward (with the
    logits, where the caller holds them); ``forward`` and ``backward`` are the temporaries at the
    two moments of the loss, on top of that. ``logits`` are held until the step is over."""

    kept: int = 0
    saved: int = 0
    forward: int = 0
    backward: int = 0
    logits: int = 0


def head_bytes(shape: ModelShape, f: Forward, sharding: Sharding, *, held: bool = True) -> Head:
    """Logits and cross-entropy, V values a token.

    With ``upcast`` (transformers' causal loss calls ``logits.float()``) forward holds the logits
    (c), their fp32 copy (4, none if c = 4) and the log-softmax (4); backward holds the logits if
    the caller still ``held`` the model's output (c), the log-softmax (4), the gradient that
    ``nll_loss`` makes (4) and the one that ``log_softmax`` makes (4).

    Called directly, ``cross_entropy`` computes log_softmax in c; under autocast ``nll_loss`` then
    casts it to fp32 (4) and keeps both.
    """
    tower, p, tokens = shape.tower, f.precision, f.tokens
    c = p.compute
    norm = 0
    if shape.final_norm:
        norm += tokens * tower.hidden * (p.residual + (0 if f.lora else c))
        if tower.norm == "rmsnorm" and not f.lora:
            norm += tokens * tower.hidden * 4
    if shape.head_transform:
        width = shape.embedding_width or tower.hidden
        norm += tokens * (tower.hidden * c + width * (2 * c + p.residual))
    values = (tokens if shape.head == "lm" else f.batch) * shape.logits
    norm = int(sharding.share(Saved("final norm", norm)))
    if shape.wide_logits and p.cache:
        c = 4
    held_bytes = c if held else 0
    if shape.upcast or c == 4:
        saved, forward, backward = 4, 0 if c == 4 else 4, 8
    elif p.cache:
        saved, forward, backward = c + 4, 0, 4
    else:
        saved, forward, backward = c, 0, 2 * c

    if shape.capped_logits:
        saved += c

    def share(size: int) -> int:
        return int(sharding.share(Saved("logits", values * size, cut=True)))

    return Head(
        kept=norm,
        saved=share(held_bytes + saved),
        forward=share(forward + c - held_bytes),
        backward=share(backward),
        logits=share(held_bytes),
    )

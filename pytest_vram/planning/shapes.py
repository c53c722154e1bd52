"""The shape of a transformer: every parameter tensor it has, counted, and nothing else.

A model is a few **towers** (stacks of equal layers: one for a decoder, two for an encoder-decoder)
between an embedding and a head. Symbols used throughout the planning room:

====  =====================================================
L     layers of a tower
H     hidden size
A     attention heads, ``K`` key/value heads, ``D`` size of a head
F     inner size of the feed-forward block
V     vocabulary
B, S  micro-batch size and sequence length (tokens)
N     parameters
====  =====================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pytest_vram.planning.mixers import Mixer

Role = Literal[
    "embedding", "position", "norm", "matrix", "bias", "router", "expert", "head", "other"
]
Cut = Literal["", "columns", "rows"]
#: ``relu2``: the square of a relu; ``clamped``: gpt-oss's gate, spelled out with clamps;
#: ``quick_gelu``: a sigmoid times its input, spelled out.
Activation = Literal["gelu", "gelu_new", "quick_gelu", "silu", "relu", "relu2", "clamped"]


class PlanError(ValueError):
    """A question that has no answer, or a model that cannot exist; the text says why."""


class UnknownFamilyError(PlanError):
    """A configuration whose family has no closed form here. ``readable``: a model that was built of
    it may say more. ``guess``: its shape as Llama's, whose count is known to be wrong."""

    def __init__(
        self, message: str, *, readable: bool = True, guess: ModelShape | None = None
    ) -> None:
        super().__init__(message)
        self.readable = readable
        self.guess = guess


@dataclass(frozen=True, slots=True)
class Weight:
    """``count`` parameter tensors of one shape that do the same job.

    ``cut`` says how tensor parallelism divides it (Shoeybi et al. 2019, arXiv 1909.08053): by
    columns (output features), by rows (input features), or not at all.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    count: int = 1
    cut: Cut = ""
    frozen: bool = False  #: no gradient, no state

    @property
    def numel(self) -> int:
        size = 1
        for side in self.shape:
            size *= side
        return size

    @property
    def total(self) -> int:
        return self.numel * self.count


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values
    come from one latent vector of ``kv_rank`` per token and ``rope`` rotated values that all heads
    share; queries too where ``q_rank`` is set. A head's key is ``nope`` + ``rope`` wide, its
    value ``value``."""

    kv_rank: int
    q_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class Relative:
    """Disentangled attention (DeBERTa, arXiv 2006.03654): scores of content against ``rows``
    relative positions (``c2p``) and of those against content (``p2c``), besides the usual.
    ``clipped``: positions farther than the sequence is long are left out (the first version)."""

    rows: int
    c2p: bool
    p2c: bool
    clipped: bool = False

    def used(self, sequence: int) -> int:
        return min(self.rows, 2 * sequence) if self.clipped else self.rows


@dataclass(frozen=True, slots=True)
class Tower:
    """``layers`` equal transformer layers. Zero for ``kv_heads``, ``head_dim`` and ``moe_layers``
    means the usual: as many as heads, H / A, and every layer."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    activation: Activation = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norms: int = 2  #: norms per layer: 2 usual, 1 with parallel blocks, 4 with sandwich norms
    post_norms: int = 0  #: how many of them read a block's output, not the stream (OLMo 2)
    norm_tensors: int = -1  #: of a norm: weight and bias; -1: both for LayerNorm, one for RMSNorm
    fused_qkv: bool = False
    fused_up: bool = False  #: gate and up are one matrix
    parted_qkv: bool = False  #: q, k, v are copied out of the fused product, not seen in it
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    #: RMSNorms of queries and keys: of each head, of the whole width, or without weights (Llama 4)
    qk_norm: Literal["", "head", "width", "bare"] = ""
    sinks: bool = False  #: a learned score of every head that attends to nothing (gpt-oss)
    rotary: bool = False
    causal: bool = True
    cross_attention: bool = False
    experts: int = 0
    top_k: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False  #: a sigmoid of the token scales the shared expert (Qwen2-MoE)
    expert_bias: bool = False  #: router and experts have biases (gpt-oss)
    every_expert: bool = False  #: all experts see all tokens, weighted by zero or not (Llama 4)
    moe_layers: int = 0
    moe_ffn: int = 0
    fused_experts: bool = False  #: one tensor for all experts, as current libraries keep them
    norm_fp32: bool = False  #: Gemma's RMSNorm multiplies by its weight in fp32
    norm_casts: bool = False  #: autocast reaches the norm: one 16-bit output for all its readers
    softmax_fp32: bool = True  #: the explicit softmax computes in fp32 whatever its input is
    inner_dropout: bool = False  #: dropout inside the feed-forward block too (T5)
    mixer: Mixer | None = None  #: what ``mixer_layers`` have in place of attention
    mixer_layers: int = 0
    #: A layer is one block alone: attention, mixer, feed-forward or mixture (Mamba, Nemotron-H);
    #: then ``mlp_layers`` are feed-forward blocks.
    alternating: bool = False
    mlp_layers: int = 0
    query_gate: bool = (
        False  #: the query matrix makes a gate of attention's output too (Qwen3-Next)
    )
    layer_scale: bool = False  #: each block's output times a learned vector (DINOv2)
    softcap: bool = False  #: a tanh over the attention scores (Gemma 2)
    clamped_scores: bool = False  #: masked scores are held above the least number (XGLM)
    spelled_norm: bool = False  #: LayerNorm in single operators, in fp32 (DeBERTa)
    norm_keeps_stream: bool = False  #: T5's RMSNorm multiplies the stream itself, not its fp32 copy
    position_bias: bool = False  #: a learned bias over the scores, A S S of every layer (T5)
    own_position_bias: bool = False  #: every layer has a table of its own for it (UMT5)
    recast_down: bool = False  #: casts to the down matrix's type before autocast casts back (T5)
    latent: Latent | None = None
    relative: Relative | None = None
    shared: bool = False  #: one set of weights for all layers (ALBERT)
    unbiased: tuple[str, ...] = ()  #: of q, k, v: those without a bias all the same
    tokens: int = 0  #: a fixed sequence length (Whisper's encoder); 0: as asked
    source: int = 0  #: the sequence length that cross attention reads; 0: the tower's own
    scaled_query: bool = False  #: q is multiplied before its layout changes, in fresh memory

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "ffn"):
            _positive(name, getattr(self, name))
        if not self.head_dim and self.hidden % self.heads:
            raise PlanError(
                f"{self.heads} heads do not divide a hidden size of {self.hidden} "
                f"(say head_dim if a head is not hidden/heads wide)"
            )
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise PlanError(f"{self.kv_heads} key/value heads do not divide {self.heads} heads")
        if self.experts:
            if not 0 < self.top_k <= self.experts:
                raise PlanError(f"{self.top_k} experts per token out of {self.experts}")
            object.__setattr__(self, "moe_layers", self.moe_layers or self.layers)
            object.__setattr__(self, "moe_ffn", self.moe_ffn or self.ffn)
        kinds = {"mixture": self.moe_layers, "recurrent": self.mixer_layers}
        for kind, count in kinds.items():
            if count > self.layers:
                raise PlanError(f"{count} {kind} layers out of {self.layers} layers")

    @property
    def query(self) -> int:
        """Width of the queries, A·D."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of the keys, and of the values, K·D."""
        return self.kv_heads * self.head_dim

    @property
    def values(self) -> int:
        """Width of attention's output."""
        return self.heads * (self.latent.value if self.latent else self.head_dim)

    @property
    def dense_layers(self) -> int:
        return self.mlp_layers if self.alternating else self.layers - self.moe_layers

    @property
    def attention_layers(self) -> int:
        others = self.mixer_layers
        if self.alternating:
            others += self.moe_layers + self.mlp_layers
        return self.layers - others

    def weights(self, prefix: str = "layers") -> Iterator[Weight]:
        """Every parameter tensor of the tower."""
        layers = 1 if self.shared else self.layers
        attention = self._latent if self.latent else self._attention
        if self.attention_layers:
            yield from attention(f"{prefix}.attention", min(layers, self.attention_layers))
        if self.mixer:
            yield from self.mixer.weights(f"{prefix}.mixer", self.hidden, self.mixer_layers)
        if self.cross_attention:
            yield from self._attention(f"{prefix}.cross", layers)
        yield from norm(f"{prefix}.norm", self, self.norms * layers)
        if self.layer_scale:
            yield Weight(f"{prefix}.scale", (self.hidden,), "norm", 2 * layers)
        if self.dense_layers:
            yield from self._mlp(f"{prefix}.mlp", self.ffn, min(layers, self.dense_layers))
        if self.experts:
            yield from self._experts(prefix)

    def _attention(self, name: str, count: int) -> Iterator[Weight]:
        wide = self.query + 2 * self.kv
        parts = {"q": (1 + self.query_gate) * self.query, "k": self.kv, "v": self.kv}
        if self.fused_qkv:
            parts = {"qkv": wide}
        for part, out in parts.items():
            yield Weight(f"{name}.{part}", (out, self.hidden), "matrix", count, "columns")
            if self.qkv_bias and part not in self.unbiased:
                yield Weight(f"{name}.{part}.bias", (out,), "bias", count, "columns")
        yield Weight(f"{name}.o", (self.hidden, self.query), "matrix", count, "rows")
        if self.out_bias:
            yield Weight(f"{name}.o.bias", (self.hidden,), "bias", count)
        if self.qk_norm == "head":
            yield Weight(f"{name}.qk_norm", (self.head_dim,), "norm", 2 * count)
        elif self.qk_norm == "width":
            yield Weight(f"{name}.q_norm", (self.query,), "norm", count, "columns")
            yield Weight(f"{name}.k_norm", (self.kv,), "norm", count, "columns")
        if self.sinks:
            yield Weight(f"{name}.sinks", (self.heads,), "other", count, "columns")

    def _latent(self, name: str, count: int) -> Iterator[Weight]:
        at = self.latent
        assert at is not None
        if at.q_rank:
            yield Weight(f"{name}.q_a", (at.q_rank, self.hidden), "matrix", count)
            yield Weight(f"{name}.q_a_norm", (at.q_rank,), "norm", count)
        inner = at.q_rank or self.hidden
        yield Weight(f"{name}.q", (self.query, inner), "matrix", count, "columns")
        yield Weight(f"{name}.kv_a", (at.kv_rank + at.rope, self.hidden), "matrix", count)
        yield Weight(f"{name}.kv_a_norm", (at.kv_rank,), "norm", count)
        wide = self.heads * (at.nope + at.value)
        yield Weight(f"{name}.kv_b", (wide, at.kv_rank), "matrix", count, "columns")
        yield Weight(f"{name}.o", (self.hidden, self.values), "matrix", count, "rows")
        if self.qkv_bias:
            if at.q_rank:
                yield Weight(f"{name}.q_a.bias", (at.q_rank,), "bias", count)
            yield Weight(f"{name}.kv_a.bias", (at.kv_rank + at.rope,), "bias", count)
        if self.out_bias:
            yield Weight(f"{name}.o.bias", (self.hidden,), "bias", count)

    def _mlp(self, name: str, ffn: int, count: int) -> Iterator[Weight]:
        for part, out in self.ups(ffn).items():
            yield Weight(f"{name}.{part}", (out, self.hidden), "matrix", count, "columns")
            if self.mlp_bias:
                yield Weight(f"{name}.{part}.bias", (out,), "bias", count, "columns")
        yield Weight(f"{name}.down", (self.hidden, ffn), "matrix", count, "rows")
        if self.mlp_bias:
            yield Weight(f"{name}.down.bias", (self.hidden,), "bias", count)

    def _experts(self, prefix: str) -> Iterator[Weight]:
        name, layers = f"{prefix}.experts", self.moe_layers
        yield Weight(f"{name}.router", (self.experts, self.hidden), "router", layers)
        ups = 2 if self.gated else 1
        if self.expert_bias:
            yield Weight(f"{name}.router.bias", (self.experts,), "bias", layers)
            wide = (self.experts, ups * self.moe_ffn)
            yield Weight(f"{name}.up.bias", wide, "bias", layers, "columns")
            yield Weight(f"{name}.down.bias", (self.experts, self.hidden), "bias", layers)
        if self.shared_gate:
            yield Weight(f"{name}.shared_gate", (1, self.hidden), "router", layers)
        if self.fused_experts:
            up = (self.experts, ups * self.moe_ffn, self.hidden)
            down = (self.experts, self.hidden, self.moe_ffn)
            yield Weight(f"{name}.up", up, "expert", layers, "columns")
            yield Weight(f"{name}.down", down, "expert", layers, "rows")
        else:
            count = layers * self.experts
            up1, down1 = (self.moe_ffn, self.hidden), (self.hidden, self.moe_ffn)
            yield Weight(f"{name}.up", up1, "expert", ups * count, "columns")
            yield Weight(f"{name}.down", down1, "expert", count, "rows")
        if self.shared_ffn:
            yield from self._mlp(f"{prefix}.shared", self.shared_ffn, layers)

    def ups(self, ffn: int) -> dict[str, int]:
        """The matrices that lead into a feed-forward block of size ``ffn``, and their widths."""
        if not self.gated:
            return {"up": ffn}
        return {"gate_up": 2 * ffn} if self.fused_up else {"gate": ffn, "up": ffn}

    def scaled(self, layers: int) -> Tower:
        """The same tower with another number of layers (mixture layers in proportion)."""

        def part(count: int) -> int:
            return min(layers, round(count * layers / self.layers))

        return replace(
            self,
            layers=layers,
            moe_layers=part(self.moe_layers),
            mixer_layers=part(self.mixer_layers),
            mlp_layers=part(self.mlp_layers),
        )


def norm(name: str, tower: Tower, count: int, width: int = 0) -> Iterator[Weight]:
    """A norm's tensors; ``width`` where it is not the tower's hidden size."""
    tensors = tower.norm_tensors
    if tensors < 0:
        tensors = 2 if tower.norm == "layernorm" else 1
    for part in ("weight", "bias")[:tensors]:
        yield Weight(f"{name}.{part}", (width or tower.hidden,), "norm", count)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A whole model. ``others`` holds what no formula covers (patch projection, pooler, relative
    position tables); ``inputs_per_sample`` is set where the input is not token ids (pixels)."""

    name: str
    towers: tuple[Tower, ...]
    vocab: int = 0
    positions: int = 0  #: rows of a learned position table
    longest: int = 0  #: the longest sequence where that table is one of ``others``
    tied: bool = False  #: the head shares the embedding's tensor
    head: Literal["lm", "classes", "none"] = "lm"
    head_rows: int = 0  #: classes of a classification head
    head_bias: bool = False
    head_transform: bool = False  #: dense + activation + norm before the head (BERT)
    head_transform_bias: bool = True
    final_norm: bool = True
    embedding_width: int = 0  #: 0: hidden
    projects_back: bool = False  #: from hidden to the embedding's width before the head (OPT)
    embedding_norm: bool = False
    embedding_norm_width: int = 0  #: 0: hidden
    normed_embeddings: bool = False  #: every tower has such a norm, counted in ``others`` (BART)
    others: tuple[Weight, ...] = ()
    tokens_per_sample: int = 0  #: fixed sequence (ViT); 0: as asked
    pixels_per_sample: int = 0
    frames_per_sample: int = 0  #: fp32 values of audio beside the tokens (Whisper)
    audio_per_token: int = 0  #: fp32 samples of sound that become one position (wav2vec 2.0)
    kept_per_token: int = 0  #: values that convolutions keep of them, in c each
    wide_per_token: int = 0  #: and those that autocast keeps in fp32
    kept_per_sample: int = 0  #: values that convolutions before the first layer keep, in c each
    capped_logits: bool = False  #: a tanh over the logits (Gemma 2)
    scaled_logits: bool = False  #: the logits are multiplied by a number (Cohere, Granite)
    wide_logits: bool = False  #: an fp32 buffer is added to the logits (BART)
    upcast: bool = True  #: the loss casts the logits to fp32 first, as transformers' causal loss
    #: What the library does when fused attention is asked for, if not that: "explicit" where it has
    #: nothing else, "math" where it calls the fused function with what no fused kernel takes.
    attention: Literal["", "explicit", "math"] = ""
    repeats_kv: bool = False  #: grouped heads are repeated before attention, not left to it
    counted: tuple[Weight, ...] = ()  #: a live module's own tensors; they replace the formula's
    partial: str = ""  #: the note that says which part of the model is not counted
    recognised: bool = False  #: layers read off a live module of a family that is not known
    guessed: bool = False  #: the layers of a family that is not known are taken for Llama's
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.towers:
            raise PlanError(f"{self.name}: a model needs at least one tower of layers")
        if self.head == "lm" and self.vocab <= 0:
            raise PlanError(f"{self.name}: a language-model head needs a vocabulary")
        if self.vocab < 0 or self.positions < 0:
            raise PlanError(f"{self.name}: sizes cannot be negative")

    @property
    def tower(self) -> Tower:
        """The tower that ends in the head."""
        return self.towers[-1]

    @property
    def hidden(self) -> int:
        return self.tower.hidden

    @property
    def layers(self) -> int:
        return sum(tower.layers for tower in self.towers)

    @property
    def logits(self) -> int:
        """Values per token that the head produces; 0 without one."""
        return {"lm": self.vocab, "classes": self.head_rows, "none": 0}[self.head]

    def weights(self) -> Iterator[Weight]:
        """Every parameter tensor of the model, each physical tensor once."""
        if self.counted:
            yield from self.counted
            return
        width = self.embedding_width or self.hidden
        if self.vocab:
            yield Weight("embedding", (self.vocab, width), "embedding", 1, "columns")
        if self.positions:
            yield Weight("positions", (self.positions, self.hidden), "position")
        if width != self.hidden:
            count = 2 if self.projects_back else 1
            yield Weight("embedding.project", (self.hidden, width), "matrix", count)
        if self.embedding_norm:
            yield from norm("embedding.norm", self.tower, 1, self.embedding_norm_width)
        for index, tower in enumerate(self.towers):
            prefix = "layers" if len(self.towers) == 1 else f"tower{index}"
            yield from tower.weights(prefix)
            if self.final_norm:
                yield from norm(f"{prefix}.final_norm", tower, 1)
        yield from self._head()
        yield from self.others

    def _head(self) -> Iterator[Weight]:
        if self.head_transform:
            width = self.embedding_width or self.hidden
            yield Weight("head.transform", (width, self.hidden), "head")
            if self.head_transform_bias:
                yield Weight("head.transform.bias", (width,), "head")
            yield from norm("head.norm", self.tower, 1, width)
        if self.head != "none" and not self.tied:
            narrow = self.head == "lm" or self.projects_back
            width = (narrow and self.embedding_width) or self.hidden
            yield Weight("head", (self.logits, width), "head", 1, "columns")
        if self.head_bias:
            yield Weight("head.bias", (self.logits,), "head", 1, "columns")

    def is_vocabulary(self, weight: Weight) -> bool:
        """Whether ``weight`` is the token embedding."""
        return weight.role == "embedding" and weight.shape[0] == self.vocab

    @property
    def parameters(self) -> int:
        """N: how many parameters the model has."""
        return sum(weight.total for weight in self.weights())

    def largest_layer(self, expert: int = 1) -> int:
        """Parameters of the largest piece that sharded training gathers at once: one layer, or
        the embedding. Of the experts each of ``expert`` ranks gathers its own."""
        layers = []
        for tower in self.towers:
            routed = sum(w.total for w in tower.weights() if w.role == "expert")
            rest = sum(w.total for w in tower.weights()) - routed
            each = routed // expert // max(1, tower.moe_layers)
            layers.append(each + rest // tower.layers)
        tables = [weight.total for weight in self.weights() if weight.role in ("embedding", "head")]
        return max([*layers, *tables])

    def with_layers(self, layers: int) -> ModelShape:
        """The same model, deeper or shallower; towers keep their proportions."""
        if layers < len(self.towers):
            raise PlanError(f"{layers} layers for {len(self.towers)} towers")
        counts = [max(1, round(tower.layers * layers / self.layers)) for tower in self.towers]
        counts[-1] = max(1, counts[-1] + layers - sum(counts))
        towers = tuple(
            tower.scaled(count) for tower, count in zip(self.towers, counts, strict=True)
        )
        return replace(self, towers=towers, counted=())


def decoder(
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    ffn: int = 0,
    kv_heads: int = 0,
    head_dim: int = 0,
    gated: bool = False,
    rotary: bool = False,
    rmsnorm: bool = False,
    bias: bool = True,
    positions: int = 0,
    tied: bool = True,
    experts: int = 0,
    top_k: int = 2,
    activation: Activation = "gelu",
    name: str = "decoder",
) -> ModelShape:
    """A decoder from explicit sizes. ``ffn`` defaults to 4H, or to Llama's 8H/3 rounded up to a
    multiple of 256 when ``gated``."""
    _positive("hidden", hidden)
    if not ffn:
        ffn = -(-(8 * hidden // 3) // 256) * 256 if gated else 4 * hidden
    tower = Tower(
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=ffn,
        kv_heads=kv_heads,
        head_dim=head_dim,
        gated=gated,
        activation="silu" if gated else activation,
        norm="rmsnorm" if rmsnorm else "layernorm",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        rotary=rotary,
        experts=experts,
        top_k=top_k if experts else 0,
    )
    return ModelShape(name, (tower,), vocab=vocab, positions=positions, tied=tied)


def _positive(name: str, value: int) -> None:
    if value <= 0:
        raise PlanError(f"{name} must be positive, not {value}")

"""Layers that carry a state along the sequence instead of attending to it.

Each says which parameter tensors it has and what its fused kernel keeps for backward, read from the
kernel's ``ctx.save_for_backward``. Symbols: H hidden size, I inner size, N state per channel, G
groups, T tokens. Without the kernel's package transformers falls back to a loop in PyTorch, which
keeps many times as much; the plan says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pytest_vram.planning.shapes import Weight


class Mixer(Protocol):
    """What the planner asks of such a layer."""

    @property
    def inner(self) -> int:
        """I: the widest tensor between its two projections."""

    @property
    def kept(self) -> int:
        """Values a token that are kept in the compute type, the input left out."""

    @property
    def wide(self) -> int:
        """Values a token that are kept in fp32."""

    @property
    def kernel(self) -> str:
        """The package whose kernel is assumed; empty where PyTorch's own operators run."""

    def weights(self, name: str, hidden: int, count: int) -> Iterator[Weight]:
        """``count`` layers' parameter tensors."""


def _linear(
    name: str, out: int, inner: int, count: int, bias: bool, cut: str = ""
) -> Iterator[Weight]:
    yield Weight(name, (out, inner), "matrix", count, cut)  # type: ignore[arg-type]
    if bias:
        yield Weight(f"{name}.bias", (out,), "bias", count)


def _conv(name: str, width: int, kernel: int, count: int, bias: bool) -> Iterator[Weight]:
    """A convolution of each channel along the sequence."""
    yield Weight(f"{name}.conv", (width, 1, kernel), "other", count)
    if bias:
        yield Weight(f"{name}.conv.bias", (width,), "other", count)


@dataclass(frozen=True, slots=True)
class Scan:
    """Mamba (arXiv 2312.00752): a selective scan with N states a channel, steps of rank ``rank``.

    ``MambaInnerFn`` (mamba_ssm, ops/selective_scan_interface.py) keeps both halves of the input
    projection (2 I), the projection to step, B and C (R + 2 N), contiguous B and C (2 N) and the
    scan's output (I); the convolution and the steps are computed again. With norms of steps, B and
    C (Jamba) the fused function cannot be used: convolution, steps, output and gated output are
    kept too, and what the three norms read.
    """

    inner: int
    state: int
    rank: int
    conv: int
    conv_bias: bool = True
    bias: bool = False
    normed: bool = False
    kernel: str = "mamba_ssm"

    @property
    def kept(self) -> int:
        projected = self.rank + 2 * self.state
        fused = 3 * self.inner + projected + 2 * self.state
        return fused + 3 * self.inner + 2 * projected if self.normed else fused

    @property
    def wide(self) -> int:
        return self.rank + 2 * self.state if self.normed else 0

    def weights(self, name: str, hidden: int, count: int) -> Iterator[Weight]:
        yield from _linear(f"{name}.in", 2 * self.inner, hidden, count, self.bias, "columns")
        yield from _conv(name, self.inner, self.conv, count, self.conv_bias)
        yield from _linear(f"{name}.x", self.rank + 2 * self.state, self.inner, count, False)
        yield from _linear(f"{name}.dt", self.inner, self.rank, count, True)
        yield Weight(f"{name}.decay", (self.inner, self.state), "other", count)
        yield Weight(f"{name}.skip", (self.inner,), "other", count)
        yield from _linear(f"{name}.out", hidden, self.inner, count, self.bias, "rows")
        if self.normed:
            yield Weight(f"{name}.dt.norm", (self.rank,), "norm", count)
            yield Weight(f"{name}.bc.norm", (self.state,), "norm", 2 * count)


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Mamba-2 (arXiv 2405.21060): ``heads`` of ``head`` channels share a decay, B and C are shared
    by groups.

    ``MambaSplitConv1dScanCombinedFn`` (mamba_ssm, ops/triton/ssd_combined.py) keeps the input
    projection (2 I + 2 G N + heads), the scan's output (I) and the norm's 1/rms (G, fp32); the
    convolution, the chunks' states and the gated output are computed again.
    """

    heads: int
    head: int
    groups: int
    state: int
    conv: int
    conv_bias: bool = True
    bias: bool = False
    kernel: str = "mamba_ssm"

    @property
    def inner(self) -> int:
        return self.heads * self.head

    @property
    def projected(self) -> int:
        return 2 * self.inner + 2 * self.groups * self.state + self.heads

    @property
    def kept(self) -> int:
        return self.projected + self.inner

    @property
    def wide(self) -> int:
        return self.groups

    def weights(self, name: str, hidden: int, count: int) -> Iterator[Weight]:
        mixed = self.inner + 2 * self.groups * self.state
        yield from _linear(f"{name}.in", self.projected, hidden, count, self.bias, "columns")
        yield from _conv(name, mixed, self.conv, count, self.conv_bias)
        yield Weight(f"{name}.heads", (self.heads,), "other", 3 * count)  # step, decay, skip
        yield Weight(f"{name}.norm", (self.inner,), "norm", count)
        yield from _linear(f"{name}.out", hidden, self.inner, count, self.bias, "rows")


@dataclass(frozen=True, slots=True)
class ShortConv:
    """LFM2's gated convolution over ``conv`` tokens: PyTorch's own operators keep the projection
    (3 H), the first product, the convolution's output, and the second product."""

    inner: int
    conv: int
    bias: bool = False
    kernel: str = ""

    @property
    def kept(self) -> int:
        return 6 * self.inner

    @property
    def wide(self) -> int:
        return 0

    def weights(self, name: str, hidden: int, count: int) -> Iterator[Weight]:
        yield from _linear(f"{name}.in", 3 * self.inner, hidden, count, self.bias, "columns")
        yield from _conv(name, self.inner, self.conv, count, self.bias)
        yield from _linear(f"{name}.out", hidden, self.inner, count, self.bias, "rows")


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated delta rule (arXiv 2412.06464), as Qwen3-Next has it: ``keys`` heads of queries and keys
    serve ``values`` heads, each ``key`` and ``value`` wide.

    ``ChunkGatedDeltaRuleFunction`` (flash-linear-attention, fla/ops/gated_delta_rule/chunk.py)
    keeps normalised queries and keys, values, decay and the rows' 1/norms (fp32), strength and, for
    each chunk of 64 tokens, a 64 x 64 matrix a head. Beside it autograd keeps the convolution's
    input, the gate, the rule's output, and the output projection's input.
    """

    keys: int
    values: int
    key: int
    value: int
    conv: int
    split: bool = False  #: four input matrices instead of two (Qwen3.5)
    kernel: str = "flash-linear-attention"

    @property
    def inner(self) -> int:
        return self.values * self.value

    @property
    def mixed(self) -> int:
        return 2 * self.keys * self.key + self.inner

    @property
    def kept(self) -> int:
        normalised = 2 * self.keys * self.key
        return self.mixed + normalised + 4 * self.inner + (64 + 2) * self.values

    @property
    def wide(self) -> int:
        return 3 * self.values + 2 * self.keys

    def weights(self, name: str, hidden: int, count: int) -> Iterator[Weight]:
        gates = (self.mixed, self.inner) if self.split else (self.mixed + self.inner,)
        strengths = (self.values, self.values) if self.split else (2 * self.values,)
        for index, wide in enumerate((*gates, *strengths)):
            yield from _linear(f"{name}.in{index}", wide, hidden, count, False, "columns")
        yield from _conv(name, self.mixed, self.conv, count, False)
        yield Weight(f"{name}.heads", (self.values,), "other", 2 * count)  # decay, its bias
        yield Weight(f"{name}.norm", (self.value,), "norm", count)
        yield from _linear(f"{name}.out", hidden, self.inner, count, False, "rows")

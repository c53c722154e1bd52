"""Scratch of the attention kernels: flash, memory-efficient (CUTLASS) and cuDNN, both directions.

Read from ATen/native/transformers/cuda/attention.cu, attention_backward.cu,
flash_attn/flash_api.cpp and mem_eff_attention/kernel_{forward,backward}.h, cudnn/MHA.cpp and the
cuDNN frontend that is built into PyTorch (v2.6.0, v2.13.0, v2.14.1).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from pytest_vram.sim.kernels import Card, Give, Out, Outputs, Step, Take, rule, scratch, size_of

#: First version whose efficient forward puts an unused seed and offset on the device
#: (``seed_t = at::empty({}, kLong on CUDA)`` when there is no dropout); 2.6 has them on the host.
_SEEDS_ON_DEVICE = (2, 7)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _up(a: int, b: int) -> int:
    return _ceil(a, b) * b


def _argument(
    args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str, other: Any
) -> Any:
    if len(args) > place:
        return args[place]
    return kwargs.get(name, other)


def _deterministic() -> bool:
    """What the host code asks before it takes a reproducible, larger path."""
    return torch.are_deterministic_algorithms_enabled() and not (
        torch.is_deterministic_algorithms_warn_only_enabled()
    )


def _copy_unless_contiguous(tensor: Tensor, key: str, why: str) -> list[Step]:
    return [] if tensor.is_contiguous() else [Take(key, size_of(tensor), why)]


def _give(steps: Sequence[Step]) -> Iterator[Give]:
    """C++ destroys locals in reverse order of their declaration."""
    for step in reversed(steps):
        if isinstance(step, Take):
            yield Give(step.key)


# ---------------------------------------------------------------------------------------- flash


def _recent(seed: Tensor | None) -> bool:
    """FlashAttention 2.7 keeps its random state in two unsigned numbers on the device."""
    return seed is not None and seed.dtype == torch.uint64


def head_rounded(head: int, seed: Tensor | None) -> int:
    """``head_size_rounded`` of flash_api.cpp. With FlashAttention 2.7, which PyTorch took together
    with a random state of two unsigned numbers, kernels above 128 exist in steps of 64 only."""
    return _up(head, 64 if _recent(seed) and head > 128 else 32)


def split_count(blocks: int, processors: int, key_blocks: int, limit: int = 128) -> int:
    """``num_splits_heuristic`` of flash_api.cpp: parts into which the keys are split so that few
    heads still fill the card. ``processors`` is twice the card's (two blocks fit on one).

    The smallest number whose wave efficiency is within 85 % of the best; single precision, as
    the original computes it.
    """
    if blocks >= ctypes.c_float(ctypes.c_float(0.8).value * processors).value:
        return 1
    limit = min(limit, processors, key_blocks)
    efficiency: dict[int, float] = {}
    for splits in range(1, limit + 1):
        if splits > 1 and _ceil(key_blocks, splits) == _ceil(key_blocks, splits - 1):
            continue  # the last part would have nothing to do
        waves = ctypes.c_float(blocks * splits / processors).value
        efficiency[splits] = ctypes.c_float(waves / ceil(waves)).value
    best = max(efficiency.values(), default=0.0)
    return next((n for n, value in efficiency.items() if value >= 0.85 * best), 1)


def _flash_splits(
    batch: int, heads: int, queries: int, keys: int, head: int, head_padded: int, dropout: float,
    card: Card,
) -> list[Step]:  # fmt: skip
    """``set_params_splitkv``: partial results in fp32, unless dropout forbids to split."""
    if dropout > 0 or keys == 0:
        return []
    block = 256 if head <= 64 else 128 if head <= 128 else 64
    blocks = batch * heads * _ceil(queries, 64)
    splits = split_count(blocks, 2 * card.profile.multiprocessors, _ceil(keys, block))
    if splits <= 1:
        return []
    rows = splits * batch * heads * queries
    return [
        Take("split_lse", rows * 4, "log-sum-exp of every split of the keys"),
        Take("split_out", rows * head_padded * 4, "partial output of every split"),
    ]


def _random_state(dropout: float, seed: Tensor, first: int) -> Iterator[Step]:
    """Seed and offset of a flash forward. Since 2.7 they are device tensors (uint64; the state
    of two numbers is made anew when dropout is on); before that they stay on the host."""
    if not _recent(seed):
        return
    if dropout > 0:
        yield Take("rng_state", 16, "random state placeholder")
        yield Out(first + 1)
        yield Out(first)
        yield Give("rng_state")
    else:
        yield Out(first)
        yield Out(first + 1)


@rule(torch.ops.aten._scaled_dot_product_flash_attention.default)
def flash_forward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """``_scaled_dot_product_flash_attention_cuda`` -> ``mha_fwd``; q, k, v are (B, H, S, D)."""
    query, key = args[0], args[1]
    dropout = float(_argument(args, kwargs, 3, "dropout_p", 0.0))
    debug = bool(_argument(args, kwargs, 5, "return_debug_mask", False))
    batch, heads, queries, head = query.shape
    heads_k, keys = key.shape[1], key.shape[2]
    if queries == 1 and heads > heads_k and dropout == 0 and head % 8 == 0:
        # seqlenq_ngroups_swapped: the heads that share a key become rows of the same block
        queries, heads = heads // heads_k, heads_k
    yield Out(0)
    yield Out(1)
    if debug and dropout > 0:
        yield Out(8)
    padded = head_rounded(head, outputs[6])
    splits = _flash_splits(batch, heads, queries, keys, head, padded, dropout, card)
    yield from splits
    if outputs[6] is not None:
        yield from _random_state(dropout, outputs[6], 6)
    yield from _give(splits)


@rule(torch.ops.aten._flash_attention_forward.default)
def flash_forward_plain(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Dense, or variable lengths packed to (tokens, H, D) with cumulative lengths.

    Packed sequences are split only where the heads of a group were swapped into rows.
    """
    query, key = args[0], args[1]
    cumulative, longest, longest_key = args[3], int(args[5]), int(args[6])
    dropout, debug = float(args[7]), bool(args[9])
    window = (kwargs.get("window_size_left"), kwargs.get("window_size_right"))
    no_window = all(size is None or size < 0 for size in window)
    if cumulative is None:
        batch, queries, heads, head = query.shape
        keys = key.shape[1]
    else:
        batch, queries, keys = cumulative.shape[0] - 1, longest, longest_key
        heads, head = query.shape[-2:]
    heads_k = key.shape[-2]
    swapped = queries == 1 and heads > heads_k and no_window and dropout == 0 and head % 8 == 0
    if swapped:
        queries, heads = heads // heads_k, heads_k
    splits: list[Step] = []
    if cumulative is None or swapped:
        padded = head_rounded(head, outputs[2])
        splits = _flash_splits(batch, heads, queries, keys, head, padded, dropout, card)
    regrouped = swapped and cumulative is not None
    if regrouped:  # (tokens, heads, D) cannot be viewed as (tokens * group, heads_k, D)
        yield Take("query_regrouped", size_of(query), "query, one row per head of a group")
        yield Take("out_regrouped", size_of(query), "output, one row per head of a group")
    else:
        yield Out(0)
    yield Out(1)
    if debug and dropout > 0:
        yield Out(4)
    yield from splits
    if outputs[2] is not None:
        yield from _random_state(dropout, outputs[2], 2)
    if regrouped:
        yield from (Out(0), Give("out_regrouped"))
        yield Take("query_back", size_of(query), "query in its own order again")
        yield from (Give("query_back"), Give("query_regrouped"))
    yield from _give(splits)


@dataclass(frozen=True, slots=True)
class _FlashBackward:
    """Shapes of one flash backward; ``packed`` is the number of tokens of a packed batch."""

    batch: int
    queries: int
    keys: int
    heads: int
    heads_k: int
    head: int
    head_padded: int
    itemsize: int
    recent: bool = True  #: FlashAttention 2.7: row sums of packed batches are packed as well
    packed: tuple[int, int] | None = None

    def steps(self, card: Card) -> Iterator[Step]:
        padded = self.batch * _up(self.queries, 128)
        packed = self.packed[0] + 128 * self.batch if self.packed else padded
        sums = packed if self.recent else padded
        yield Take("softmax_d", self.heads * sums * 4, "row sums of dO * O")
        size = packed * self.heads * self.head_padded * 4
        if _deterministic():
            pairs = self.batch * self.heads
            size *= (card.profile.multiprocessors + pairs - 1) // pairs
        yield Take("dq_accum", size, "fp32 accumulator of the query gradient")
        if self.heads != self.heads_k:
            keys = self.packed[1] if self.packed else self.batch * self.keys
            wide = keys * self.heads * self.head * self.itemsize
            yield Take("dk_expanded", wide, "key gradient for every query head")
            yield Take("dv_expanded", wide, "value gradient for every query head")


def _flash_backward(
    grad: Tensor, out: Tensor, shapes: _FlashBackward, card: Card
) -> Iterator[Step]:
    """``_flash_attention_backward`` -> ``mha_bwd``; all tensors (B, S, H, D)."""
    before = _copy_unless_contiguous(grad, "grad_out", "contiguous copy of the output's gradient")
    before += _copy_unless_contiguous(out, "out", "contiguous copy of the output")
    yield from before
    yield from (Out(0), Out(1), Out(2))
    buffers = list(shapes.steps(card))
    yield from buffers
    yield from _give([*before, *buffers])


@rule(torch.ops.aten._scaled_dot_product_flash_attention_backward.default)
def flash_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    grad, query, key, out = args[0], args[1], args[2], args[4]
    batch, heads, queries, head = query.shape
    shapes = _FlashBackward(
        batch, queries, key.shape[2], heads, key.shape[1], head, head_rounded(head, args[12]),
        query.element_size(),
    )  # fmt: skip
    return _flash_backward(grad.transpose(1, 2), out.transpose(1, 2), shapes, card)


@rule(torch.ops.aten._flash_attention_backward.default)
def flash_backward_plain(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    grad, query, key, out, cumulative = args[0], args[1], args[2], args[4], args[6]
    heads, head = query.shape[-2:]
    if cumulative is None:
        batch, queries, keys, packed = query.shape[0], query.shape[1], key.shape[1], None
    else:
        batch, queries, keys = cumulative.shape[0] - 1, int(args[8]), int(args[9])
        packed = (query.shape[0], key.shape[0])
    shapes = _FlashBackward(
        batch, queries, keys, heads, key.shape[-2], head, head_rounded(head, args[12]),
        query.element_size(), _recent(args[12]), packed,
    )  # fmt: skip
    return _flash_backward(grad, out, shapes, card)


# ------------------------------------------------------------------------------ memory efficient


@dataclass(frozen=True, slots=True)
class _Block:
    """One instance of ``AttentionBackwardKernel``: block sizes, largest head, shared memory."""

    rows: int
    keys: int
    head: int
    shared: int
    only: tuple[int, ...] = ()  #: compute capabilities it was built for; empty: all


_ANY_HEAD = 65536

#: The order in which mem_eff_attention/kernels/cutlassB.h tries its kernels (v2.6.0 and v2.14.1
#: alike); the first whose head size and shared memory fit is launched. Shared memory is
#: ``sizeof(SharedStorage)``, a compile-time constant, as the library launches each of them.
#: Variants for aligned and unaligned inputs and for lengths that are multiples of the block have
#: the same blocks, so they are one line. Keys: (family, half or not, dropout).
_BACKWARD: dict[tuple[int, torch.dtype, bool], tuple[_Block, ...]] = {
    (80, torch.float16, False): (
        _Block(64, 64, 32, 40192),
        _Block(64, 64, 64, 44288),
        _Block(128, 64, 96, 91648, only=(86, 89)),
        _Block(128, 128, 128, 154112),
        _Block(64, 64, 128, 34048),
        _Block(128, 64, _ANY_HEAD, 60928),
    ),
    (80, torch.float16, True): (
        _Block(64, 64, 32, 40192),
        _Block(64, 64, 64, 52480),
        _Block(128, 128, 128, 162304),
        _Block(64, 64, 128, 34048),
        _Block(128, 64, _ANY_HEAD, 60928),
    ),
    (80, torch.bfloat16, False): (
        _Block(64, 64, 32, 34560),
        _Block(64, 64, 64, 42240),
        _Block(128, 64, 96, 91648, only=(86, 89)),
        _Block(128, 128, 128, 133632),
        _Block(64, 64, 128, 34048),
        _Block(128, 64, _ANY_HEAD, 60928),
    ),
    (80, torch.bfloat16, True): (
        _Block(64, 64, 32, 39168),
        _Block(64, 64, 64, 51456),
        _Block(128, 128, 128, 152064),
        _Block(64, 64, 128, 34048),
        _Block(128, 64, _ANY_HEAD, 60928),
    ),
    (80, torch.float32, False): (
        _Block(64, 64, 64, 53504),
        _Block(128, 64, 128, 121344),
        _Block(64, 64, 128, 67840),
        _Block(128, 64, _ANY_HEAD, 121344),
        _Block(64, 64, _ANY_HEAD, 67840),
    ),
    (75, torch.float16, False): (
        _Block(64, 64, 32, 27904),
        _Block(64, 64, 64, 27904),
        _Block(128, 64, 128, 54784),
        _Block(128, 64, _ANY_HEAD, 54784),
    ),
    (75, torch.float32, False): (_Block(64, 64, _ANY_HEAD, 37120),),
    (70, torch.float16, False): (
        _Block(64, 64, 32, 25088),
        _Block(64, 64, 64, 25088),
        _Block(128, 64, 128, 50176),
        _Block(128, 64, _ANY_HEAD, 50176),
    ),
    (70, torch.float32, False): (_Block(64, 64, _ANY_HEAD, 37120),),
}


def _family(sm: int) -> int:
    return 80 if sm >= 80 else 75 if sm >= 75 else 70


def backward_block(dtype: torch.dtype, head: int, dropout: bool, card: Card) -> _Block:
    """The backward kernel that ``dispatch_cutlassB`` launches for a head size."""
    family = _family(card.profile.sm)
    blocks = _BACKWARD.get((family, dtype, dropout)) or _BACKWARD[family, dtype, False]
    for block in blocks:
        fits = block.shared <= card.profile.shared_memory_per_block_optin
        if head <= block.head and fits and (not block.only or card.profile.sm in block.only):
            return block
    return blocks[-1]


def backward_workspace(
    dtype: torch.dtype, batch: int, heads: int, queries: int, keys: int, head: int, head_value: int,
    block: _Block,
) -> int:  # fmt: skip
    """``Params::workspace_size`` (kernel_backward.h): staging for the gradients of the keys that
    don't stay in registers, and one fp32 tile with a lock for every block of the query gradient.

    The number of key splits is one per block of keys: the heuristic that would lower it runs only
    for callers that pass ``num_splits_key`` (attention_backward.cu).
    """
    half = dtype != torch.float32
    in_registers = half and block.head <= block.rows
    splits = 1 if _deterministic() else max(1, _ceil(keys, block.keys))
    staged = 0
    if half and not in_registers:
        staged = splits * block.keys * (_up(head, block.rows) + _up(head_value, block.rows))
    tile = 16 + 4 * block.rows * block.keys
    tiles = _ceil(queries, block.rows) * _ceil(head, block.keys) * tile // 4
    return batch * heads * _up(staged + tiles, 4) * 4


def _accumulates_in_memory(dtype: torch.dtype, head: int) -> bool:
    """Forward kernels hold one block of values in registers up to head size 128; half types then
    need an fp32 buffer (kernel_forward.h ``kNeedsOutputAccumulatorBuffer``)."""
    return dtype != torch.float32 and head > 128


def _efficient_forward(
    query: Tensor, value: Tensor, dropout: float, outputs: Outputs, heads_last: bool, card: Card
) -> Iterator[Step]:
    if dropout == 0 and card.torch >= _SEEDS_ON_DEVICE:
        yield from (Out(2), Out(3))
    yield from (Out(0), Out(1))
    head, head_value = query.shape[-1], value.shape[-1]
    if _accumulates_in_memory(query.dtype, max(head, head_value)):
        result = outputs[0]
        assert result is not None
        yield Take("output_accum", int(result.numel()) * 4, "fp32 accumulator of the output")
        yield Give("output_accum")


@rule(torch.ops.aten._scaled_dot_product_efficient_attention.default)
def efficient_forward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    dropout = float(_argument(args, kwargs, 5, "dropout_p", 0.0))
    return _efficient_forward(args[0], args[2], dropout, outputs, False, card)


@rule(torch.ops.aten._efficient_attention_forward.default)
def efficient_forward_plain(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    return _efficient_forward(args[0], args[2], float(args[8]), outputs, True, card)


def _delta(grad: Tensor, dtype: torch.dtype, block: _Block, card: Card) -> Iterator[Step]:
    """Row sums of dO * O, fp32 (B, H, S). Half kernels compute it themselves, except on Volta
    where the output left the registers; otherwise ATen composes it:
    ``(grad.to(float) * out.to(float)).sum(-1).transpose(-2, -1).contiguous()``."""
    batch, queries, heads, _ = grad.shape
    size, product = batch * heads * queries * 4, int(grad.numel()) * 4
    half = dtype != torch.float32
    in_registers = half and block.head <= block.rows
    if half and (in_registers or _family(card.profile.sm) != 70):
        yield Take("delta", size, "row sums of dO * O")
        return
    if half:
        yield Take("grad_float", product, "output's gradient as fp32")
        yield Take("out_float", product, "output as fp32")
    yield Take("product", product, "dO * O")
    same_order = queries == 1 or heads == 1  # the transposed sums are contiguous already
    yield Take("delta" if same_order else "sums", size, "row sums of dO * O")
    if not same_order:
        yield Take("delta", size, "row sums of dO * O, one row per head")
        yield Give("sums")
    yield Give("product")
    if half:
        yield Give("out_float")
        yield Give("grad_float")


def _efficient_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias_gradient: bool, dropout: float,
    outputs: Outputs, card: Card, batches: int, queries: int, keys: int,
) -> Iterator[Step]:  # fmt: skip
    """``_efficient_attention_backward``; all tensors (B, S, H, D)."""
    heads, head, head_value = query.shape[2], query.shape[3], value.shape[3]
    first = _copy_unless_contiguous(grad, "grad_out", "contiguous copy of the output's gradient")
    yield from first
    yield from (Out(0), Out(1), Out(2))
    expanded: list[Step] = []
    if key.shape[2] != heads:
        rows = key.shape[0] * key.shape[1] * heads * query.element_size()
        expanded = [
            Take("dk_expanded", rows * head, "key gradient for every query head"),
            Take("dv_expanded", rows * head_value, "value gradient for every query head"),
        ]
    yield from expanded
    if bias_gradient:
        yield Out(3)
    block = backward_block(query.dtype, max(head, head_value), dropout > 0, card)
    yield from _delta(grad, query.dtype, block, card)
    size = backward_workspace(query.dtype, batches, heads, queries, keys, head, head_value, block)
    yield Take("workspace", size, "staging of key, value and query gradients")
    yield from (Give("delta"), Give("workspace"))
    yield from _give([*first, *expanded])


@rule(torch.ops.aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    grad, query, key, value = (tensor.transpose(1, 2) for tensor in args[:4])
    dropout, wanted = float(args[9]), args[10]
    return _efficient_backward(
        grad, query, key, value, bool(wanted[3]), dropout, outputs, card,
        query.shape[0], query.shape[1], key.shape[1],
    )  # fmt: skip


@rule(torch.ops.aten._efficient_attention_backward.default)
def efficient_backward_plain(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    grad, query, key, value, cumulative = args[0], args[1], args[2], args[3], args[6]
    batches, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    if cumulative is not None:
        batches, queries, keys = cumulative.shape[0] - 1, int(args[8]), int(args[9])
    return _efficient_backward(
        grad, query, key, value, bool(args[15]), float(args[11]), outputs, card,
        batches, queries, keys,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- cuDNN


@rule(torch.ops.aten._scaled_dot_product_cudnn_attention.default)
def cudnn_forward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Seed and offset first, always on the device; then the output and the statistics. The plan's
    own workspace is 0 for the kernels cuDNN picks on sm80 to sm100 (no upper bound is published).
    """
    yield from (Out(6), Out(7), Out(0))
    if len(outputs) > 1 and outputs[1] is not None:
        yield Out(1)


@rule(torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default)
def cudnn_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Gradients, a copy of dO where its layout is not accepted, and the workspace that the cuDNN
    frontend (not the closed library) asks for: an fp32 accumulator of the query gradient and the
    row sums of dO * O."""
    grad, query, out = args[0], args[1], args[4]
    yield from (Out(0), Out(1), Out(2))
    if card.cudnn_version < 90501:  # assumes the strides of the output
        copies = tuple(grad.stride()) != tuple(out.stride())
    else:
        copies = grad.stride(-1) != 1
    if copies:
        yield Take(
            "grad_out", size_of(grad), "copy of the output's gradient, strides of the output"
        )
    batch, heads, queries, head = query.shape
    size = batch * heads * queries * (head + 1) * 4
    yield Take("workspace", size, "fp32 query gradient and row sums")
    yield Give("workspace")
    if copies:
        yield Give("grad_out")


# ------------------------------------------------------------------------------------------ math


@rule(torch.ops.aten._safe_softmax.default)
def safe_softmax(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Softmax that gives 0 for fully masked rows (ATen/native/transformers/attention.cpp): which
    scores are -inf, which rows are nothing else, and the zero to put there."""
    scores, result = args[0], outputs[0]
    assert result is not None
    dim = args[1] % max(scores.dim(), 1)
    yield Out(0)
    if not scores.is_contiguous():
        yield from scratch(size_of(scores), "contiguous scores")
    yield Take("masked", int(scores.numel()), "which scores are -inf")
    yield Take("rows", int(scores.numel()) // max(int(scores.shape[dim]), 1), "which rows are")
    yield Take("zero", result.element_size(), "the zero that fills them")
    yield from (Give("zero"), Give("rows"), Give("masked"))

"""One step of an LSTM or a GRU as PyTorch's fused kernels run it (ATen/native/cuda/RNN.cu; v2.6.0,
v2.14.1: the parts used here act alike)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pytest_vram.sim.kernels import Card, Out, Outputs, Step, rule
from pytest_vram.sim.kernels.iterator import contiguous
from pytest_vram.sim.kernels.reduce import reduction
from pytest_vram.sim.kernels.reductions import summing


@rule("aten::_thnn_fused_lstm_cell")
def lstm_cell_forward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """The gates' workspace first, then the two states."""
    yield from (Out(2), Out(0), Out(1))


@rule("aten::_thnn_fused_gru_cell")
def gru_cell_forward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    yield from (Out(1), Out(0))


def _bias_gradient(index: int, gates: Tensor, card: Card) -> Iterator[Step]:
    """``grad_gates.sum(0)``; ``gates`` has the shape and dtype of what is summed."""
    yield Out(index)
    plain = contiguous(tuple(gates.shape), gates.element_size())
    result = contiguous((plain.shape[1],), plain.itemsize)
    kind = summing(gates.dtype, gates.dtype, card.torch)
    yield from reduction(plain, (0,), (result,), kind, card, f"bias{index}")


@rule("aten::_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    workspace, has_bias = args[4], args[5]
    yield from (Out(0), Out(1))
    if has_bias:
        yield from _bias_gradient(2, workspace, card)


@rule("aten::_thnn_fused_gru_cell_backward")
def gru_cell_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    yield from (Out(0), Out(1), Out(2))
    if args[2]:
        gates = outputs[0]
        assert gates is not None
        yield from _bias_gradient(3, gates, card)
        yield from _bias_gradient(4, gates, card)


def meta_lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Meta kernel of ``aten::_thnn_fused_lstm_cell``: PyTorch's own fails without biases."""
    hy = torch.empty_like(cx, memory_format=torch.contiguous_format)
    workspace = torch.empty_like(input_gates, memory_format=torch.contiguous_format)
    return hy, torch.empty_like(hy), workspace


def meta_gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Meta kernel of ``aten::_thnn_fused_gru_cell``, which PyTorch has none for."""
    hy = torch.empty_like(hx, memory_format=torch.contiguous_format)
    return hy, hx.new_empty((hx.shape[0], hx.shape[1] * 5))


def meta_gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Meta kernel of ``aten::_thnn_fused_gru_cell_backward``."""
    batch, hidden = workspace.shape[0], workspace.shape[1] // 5
    gates = [workspace.new_empty((batch, hidden * 3)) for _ in range(2)]
    grad_hx = torch.empty_like(grad_hy, memory_format=torch.contiguous_format)
    biases = [workspace.new_empty((hidden * 3,)) if has_bias else None for _ in range(2)]
    return gates[0], gates[1], grad_hx, biases[0], biases[1]

"""Losses and softmax.

Read from ATen/native/Loss.cpp, LossNLL.cpp, ATen/native/cuda/Loss.cu, NLLLoss2d.cu,
MultiMarginLoss.cu, MultiLabelMarginCriterion.cu and SoftMax.cu (v2.6.0, v2.14.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pytest_vram.sim.kernels import (
    Card,
    Give,
    Out,
    Outputs,
    Step,
    Take,
    argument,
    outs,
    rule,
    scratch,
    size_of,
)
from pytest_vram.sim.kernels.gemm import handle_workspace
from pytest_vram.sim.kernels.iterator import Layout, broadcast, dense_like, is_contiguous, layout
from pytest_vram.sim.kernels.reduce import reduction
from pytest_vram.sim.kernels.reductions import summing

aten = torch.ops.aten
_NONE = 0


def _reduced(loss: Layout, result: Tensor, card: Card) -> Iterator[Step]:
    """Sum or mean of the unreduced loss into ``result``."""
    if loss.numel:
        kind = summing(result.dtype, result.dtype, card.torch)
        yield from reduction(loss, (), (layout(result),), kind, card)


def _elementwise(first: Tensor, second: Tensor, itemsize: int) -> Layout:
    """Layout of a fresh elementwise result of the two operands."""
    shape = broadcast(first.shape, second.shape)
    template = first if tuple(first.shape) == shape else second
    return dense_like(Layout(shape, template.stride(), itemsize), itemsize)


@rule(aten.mse_loss.default, aten.smooth_l1_loss.default)
def resized_loss(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """The result is first made for the unreduced loss, then shrunk: its storage stays large."""
    result = outputs[0]
    assert result is not None
    if argument(args, kwargs, 2, "reduction", 1) == _NONE:
        yield Out(0)
        return
    loss = _elementwise(args[0], args[1], result.element_size())
    yield Out(0, loss.nbytes)
    yield Take("loss", loss.nbytes, "unreduced loss")
    yield from _reduced(loss, result, card)
    yield Give("loss")


@rule(aten.huber_loss.default)
def huber_loss(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    result = outputs[0]
    assert result is not None
    if argument(args, kwargs, 2, "reduction", 1) == _NONE:
        yield Out(0)
        return
    loss = _elementwise(args[0], args[1], result.element_size())
    yield Take("loss", loss.nbytes, "unreduced loss")
    yield Out(0)
    yield from _reduced(loss, result, card)
    yield Give("loss")


@rule(aten.binary_cross_entropy.default, aten.soft_margin_loss.default)
def copied_loss(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """The unreduced loss becomes the result: its sum is copied into it, its storage stays."""
    result = outputs[0]
    assert result is not None
    index = 3 if len(args) > 2 and not isinstance(args[2], int) else 2
    if argument(args, kwargs, index, "reduction", 1) == _NONE:
        yield Out(0)
        return
    loss = dense_like(layout(args[0]), result.element_size())
    yield Out(0, loss.nbytes)
    yield Take("reduced", result.element_size(), "reduced loss")
    yield from _reduced(loss, result, card)
    yield Give("reduced")


@rule(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """``z = exp(-target * input)`` takes a temporary for each of its three steps."""
    target, product = size_of(args[2]), size_of(args[1])
    yield Take("negated", target, "negated target")
    yield Take("product", product, "target times input")
    yield Take("z", product, "exponentials")
    yield Give("product")
    yield Give("negated")
    yield Out(0)
    yield Give("z")


@rule(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    result = outputs[0]
    assert result is not None
    source, target = args[0], args[1]
    weight = argument(args, kwargs, 3, "pos_weight")
    loss = _elementwise(target, source, result.element_size())
    yield Take("log_sigmoid", size_of(source), "log-sigmoid of the logits")
    if weight is not None:
        scaled = _elementwise(weight, target, target.element_size())
        yield Take("shifted", size_of(weight), "positive weights minus one")
        yield Take("log_weight", scaled.nbytes, "weights of the log-sigmoid")
        yield Give("shifted")
        yield Give("log_weight")
    if argument(args, kwargs, 4, "reduction", 1) == _NONE:
        yield Out(0)
    else:
        yield Take("loss", loss.nbytes, "unreduced loss")
        yield Out(0)
        yield from _reduced(loss, result, card)
        yield Give("loss")
    yield Give("log_sigmoid")


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """The 2d variant resizes the total weight before the loss."""
    reduced = argument(args, kwargs, 3, "reduction", 1) != _NONE
    yield from (Out(i) for i in ((1, 0) if args[0].dim() == 4 else (0, 1)))
    copies = []
    if reduced:
        weight = argument(args, kwargs, 2, "weight")
        for name, operand in (("input", args[0]), ("target", args[1]), ("weight", weight)):
            if operand is not None and not operand.is_contiguous():
                copies.append((name, size_of(operand), f"contiguous copy of the {name}"))
    for copy in copies:
        yield Take(*copy)
    for name, _, _ in reversed(copies):
        yield Give(name)


@rule(aten.multi_margin_loss.default)
def multi_margin_loss(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Of contiguous copies (MultiMarginLoss.cu, v2.6.0, v2.14.1)."""
    source, result = args[0], outputs[0]
    assert result is not None
    yield Out(0)
    copied = not source.is_contiguous()
    if copied:
        yield Take("input", size_of(source), "contiguous copy of the input")
    if argument(args, kwargs, 5, "reduction", 1) != _NONE and source.dim() == 2:
        rows = Layout((source.shape[0],), (1,), source.element_size())
        yield Take("rows", rows.nbytes, "loss of each row")
        yield from _reduced(rows, result, card)
        yield Give("rows")
    if copied:
        yield Give("input")


@rule(aten.multi_margin_loss_backward.default)
def multi_margin_loss_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """As its loss, and with a contiguous gradient of it."""
    grad, source = args[:2]
    yield Out(0)
    copies = [("input", source), ("gradient", grad)]
    taken = [Take(n, size_of(t), f"contiguous {n}") for n, t in copies if not t.is_contiguous()]
    yield from taken
    for copy in reversed(taken):
        yield Give(copy.key)


@rule(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    source, result = args[0], outputs[0]
    assert result is not None
    yield Out(1)
    if argument(args, kwargs, 2, "reduction", 1) == _NONE or source.dim() < 2:
        yield Out(0)
        return
    rows = Layout((source.shape[0],), (1,), source.element_size())
    yield Take("rows", rows.nbytes, "loss of each row")
    yield Out(0)
    yield from _reduced(rows, result, card)
    yield Give("rows")


@rule(aten._softmax.default, aten._log_softmax.default)
def softmax(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    yield Out(0)
    if not args[0].is_contiguous():
        yield from scratch(size_of(args[0]), "contiguous copy of the input")


@rule(aten._softmax_backward_data.default)
def softmax_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """``grad * output`` is made before the kernel runs."""
    yield Out(0)
    product = _elementwise(args[0], args[1], args[0].element_size())
    yield Take("product", product.nbytes, "gradient times output")
    dense = Layout(product.shape, product.stride, product.itemsize)
    yield from _contiguous_operands(dense, args[1])
    yield Give("product")


@rule(aten._log_softmax_backward_data.default)
def log_softmax_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    yield Out(0)
    yield from _contiguous_operands(layout(args[0]), args[1])


def _contiguous_operands(grad: Layout, output: Tensor) -> Iterator[Step]:
    copy_grad = not is_contiguous(grad.shape, grad.stride)
    copy_output = not output.is_contiguous()
    if copy_grad:
        yield Take("grad", grad.nbytes, "contiguous copy of the gradient")
    if copy_output:
        yield Take("output", size_of(output), "contiguous copy of the output")
        yield Give("output")
    if copy_grad:
        yield Give("grad")


@rule(aten._euclidean_dist.default)
def euclidean_dist(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Squared norms, two widened operands and one matrix product (ATen/native/Distance.cpp)."""
    first, second = args[0], args[1]
    item = first.element_size()
    sizes = {"1": size_of(first), "2": size_of(second)}
    rows = {"1": first.numel() // first.shape[-1], "2": second.numel() // second.shape[-1]}
    for side in ("1", "2"):
        yield Take(f"square{side}", sizes[side], "squares")
        yield Take(f"norm{side}", rows[side] * item, "squared norms")
        yield Give(f"square{side}")
        yield Take(f"pad{side}", rows[side] * item, "ones beside the norms")
    yield Take("scaled", sizes["1"], "-2 times the first operand")
    yield Take("wide1", sizes["1"] + 2 * rows["1"] * item, "first operand, widened")
    yield Give("pad1")
    yield Give("norm1")
    yield Give("scaled")
    yield Take("wide2", sizes["2"] + 2 * rows["2"] * item, "second operand, widened")
    yield Give("norm2")
    yield Give("pad2")
    yield Out(0)
    yield from handle_workspace(card)
    yield Give("wide2")
    yield Give("wide1")


@rule(aten._cdist_backward.default)
def cdist_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """One gradient per pair, summed afterwards (ATen/native/cuda/DistanceKernel.cu)."""
    first, second = args[1], args[2]
    yield from outs(outputs)
    pairs = int(args[4].numel())
    yield from scratch(pairs * second.shape[-1] * first.element_size(), "gradient of every pair")


@rule(aten._pdist_backward.default)
def pdist_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    source = args[1]
    yield from outs(outputs)
    size = (source.shape[0] - 1) * source.numel() * source.element_size()
    yield from scratch(size, "gradient of every pair")

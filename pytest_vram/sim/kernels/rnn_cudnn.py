"""cuDNN's LSTM, GRU and plain RNN: the weights' layout, what PyTorch takes around the calls
(ATen/native/cudnn/RNN.cpp; v2.6.0, v2.14.1: the parts used here act alike), and a documented model
of the memory that cuDNN itself asks for, whose code is closed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_vram.sim.kernels import Card, Give, Out, Outputs, Span, Step, Take, rule, size_of

aten = torch.ops.aten

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  #: ``cudnnRNNMode_t``
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}


def cudnn_takes(source: Tensor) -> bool:
    """``cudnn_is_acceptable``; without cuDNN the layers above run."""
    if not torch.backends.cudnn.enabled or source.numel() == 0:
        return False
    return source.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def weight_elements(
    mode: int, input_size: int, hidden: int, projection: int, layers: int, directions: int
) -> int:
    """Elements of cuDNN's weight space: every matrix and, whether the module has biases or not,
    two biases for each (``CUDNN_RNN_DOUBLE_BIAS``), without padding."""
    gates, total = _GATES[mode], 0
    recurrent = projection or hidden
    for layer in range(layers):
        given = input_size if layer == 0 else recurrent * directions
        one = gates * hidden * (given + recurrent + 2) + projection * hidden
        total += directions * one
    return total


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes that a closed library asks for: between ``low`` and ``high``, ``likely`` simulated."""

    low: int
    likely: int
    high: int

    @property
    def span(self) -> Span:
        why = "cuDNN's RNN kernels are closed: a documented model is simulated"
        return Span("cuDNN RNN reserve and workspace", why, self.low, self.high)


def reserve_range(
    mode: int, tokens: int, batch: int, hidden: int, layers: int, directions: int, dropout: float,
    itemsize: int,
) -> Range:  # fmt: skip
    """What forward keeps for backward. Backward needs the activated gates of every token, layer
    and direction (``low``); LSTM also the cell states and GRU the candidate's hidden part, and the
    outputs of all layers but the last (``likely``). ``high`` adds one more state per token, the
    dropout masks, and the layers' inputs in a second layout."""
    gates = _GATES[mode]
    states = tokens * hidden * layers * directions * itemsize
    inner = tokens * hidden * (layers - 1) * directions * itemsize
    low = gates * states
    likely = low + (states if mode in (2, 3) else 0) + inner
    masks = tokens * hidden * (layers - 1) * directions if dropout else 0
    start = batch * hidden * layers * directions * itemsize
    return Range(low, likely, likely + states + 2 * inner + masks + 2 * start)


def workspace_range(
    mode: int, tokens: int, batch: int, hidden: int, directions: int, itemsize: int
) -> Range:
    """Scratch of one pass: the gates' products of one layer for all tokens, which the input GEMM
    writes before the recurrence (``likely``); persistent kernels may do without."""
    gates = tokens * _GATES[mode] * hidden * directions * itemsize
    return Range(0, gates, 2 * gates + 4 * batch * hidden * directions * itemsize)


def dropout_state_range(card: Card) -> Range:
    """cuDNN's generator state, made once per device when dropout is first used in training: 48
    bytes (a ``curandStateXORWOW``) for each thread that may be resident, at least one per 1,024."""
    threads = card.profile.multiprocessors * card.profile.threads_per_multiprocessor
    return Range(threads, threads * 16, threads * 48)


@dataclass(frozen=True, slots=True)
class CudnnCall:
    """``_cudnn_impl``: what the composites hand to ``aten::_cudnn_rnn``."""

    mode: str
    source: Tensor
    hidden: Sequence[Tensor]
    params: Sequence[Tensor]
    biases: bool
    layers: int
    dropout: float
    train: bool

    @classmethod
    def of(
        cls, mode: str, source: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor],
        biases: bool, layers: int, dropout: float, train: bool,
    ) -> CudnnCall:  # fmt: skip
        return cls(mode, source, hidden, params, biases, layers, dropout, train)

    def run(
        self, batch_first: bool, bidirectional: bool, sizes: tuple[int, ...], card: Card
    ) -> tuple[Tensor, ...]:
        hx = self.hidden[0]
        cx = self.hidden[1] if len(self.hidden) == 2 else None
        size = int(hx.shape[2]) if cx is None else int(cx.shape[2])
        projection = int(hx.shape[2]) if cx is not None and hx.shape[2] != size else 0
        per_layer = 2 + 2 * self.biases + (projection > 0)
        buffer = weight_buffer(self.params)
        state = self._dropout_state(card)
        out, hy, cy, _, _ = aten._cudnn_rnn(
            self.source, list(self.params), per_layer, buffer, hx, cx, _MODES[self.mode], size,
            projection, self.layers, batch_first, float(self.dropout), self.train, bidirectional,
            list(sizes), state,
        )  # fmt: skip
        return (out, hy, cy) if cx is not None else (out, hy)

    def _dropout_state(self, card: Card) -> Tensor | None:
        """Kept for the device from its first use on (``DropoutState`` in cudnn/RNN.cpp)."""
        if not (self.dropout and self.train):
            return None
        key = "cudnn dropout state"
        if key not in card.memo:
            state = dropout_state_range(card)
            card.memo[key] = torch.empty(state.likely, dtype=torch.uint8, device=self.source.device)
            mode = getattr(self.source, "fake_mode", None)
            if mode is not None:
                mode.ledger.label(card.memo[key], "workspace", key)
                mode.ledger.uncertain(card.memo[key], state.span)
        made: Tensor = card.memo[key]
        return made


def weight_buffer(params: Sequence[Tensor]) -> Tensor | None:
    """``try_get_weight_buf``: the parameters' common storage if ``flatten_parameters`` made one;
    otherwise cuDNN gets a copy at every call."""
    first = params[0]
    storage = first.untyped_storage()._cdata
    if any(p.untyped_storage()._cdata != storage for p in params) or len(params) == 1:
        return None
    elements = first.untyped_storage().nbytes() // first.element_size()
    with torch.no_grad():
        return first.detach().as_strided((elements,), (1,), 0)


def flatten_weight(
    weights: Sequence[Tensor], stride0: int, input_size: int, mode: int, hidden: int,
    projection: int, layers: int, batch_first: bool, bidirectional: bool,
) -> Tensor:  # fmt: skip
    """``aten::_cudnn_rnn_flatten_weight``: one zeroed buffer, all parameters become views of it.
    Matrices come first, layer by layer, then the biases."""
    elements = weight_elements(mode, input_size, hidden, projection, layers, 1 + bidirectional)
    first = weights[0]
    buffer = torch.zeros(elements, dtype=first.dtype, device=first.device)
    offset = 0
    with torch.no_grad():
        for weight in sorted(weights, key=lambda tensor: tensor.dim(), reverse=True):
            view = buffer.narrow(0, offset, weight.numel()).view(weight.shape)
            view.copy_(weight)
            offset += int(weight.numel())
            weight.data = view
    return buffer


def meta_cudnn_rnn(
    source: Tensor, weight: Sequence[Tensor], stride0: int, buffer: Tensor | None, hx: Tensor,
    cx: Tensor | None, mode: int, hidden: int, projection: int, layers: int, batch_first: bool,
    dropout: float, train: bool, bidirectional: bool, sizes: Sequence[int], state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Meta kernel of ``aten::_cudnn_rnn`` with a reserve space (PyTorch's own has none)."""
    directions = 1 + bidirectional
    size = projection or hidden
    tokens, batch, steps = _extent(source, batch_first, sizes)
    if sizes:
        out = source.new_empty((tokens, size * directions))
    else:
        out = source.new_empty((steps, batch, size * directions))
        out = out.transpose(0, 1) if batch_first else out
    hy = hx.new_empty((layers * directions, batch, size))
    cy = hx.new_empty((0,)) if cx is None else cx.new_empty(cx.shape)
    kept = reserve_range(
        mode, tokens, batch, hidden, layers, directions, dropout, source.element_size()
    )
    reserve = source.new_empty((kept.likely if train else 0,), dtype=torch.uint8)
    if buffer is None:
        given = int(source.shape[-1])
        elements = weight_elements(mode, given, hidden, projection, layers, directions)
        buffer = source.new_empty((elements,))
    return out, hy, cy, reserve, buffer


def _extent(source: Tensor, batch_first: bool, sizes: Sequence[int]) -> tuple[int, int, int]:
    """Tokens, sequences and steps."""
    if sizes:
        return int(source.shape[0]), int(sizes[0]), len(sizes)
    batch, steps = (int(source.shape[i]) for i in ((0, 1) if batch_first else (1, 0)))
    return batch * steps, batch, steps


def meta_cudnn_rnn_backward(
    source: Tensor, weight: Sequence[Tensor], stride0: int, buffer: Tensor, hx: Tensor,
    cx: Tensor | None, output: Tensor, grad_output: Tensor | None, grad_hy: Tensor | None,
    grad_cy: Tensor | None, mode: int, hidden: int, projection: int, layers: int,
    batch_first: bool, dropout: float, train: bool, bidirectional: bool, sizes: Sequence[int],
    state: Tensor | None, reserve: Tensor, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:  # fmt: skip
    """Meta kernel of ``aten::_cudnn_rnn_backward``: the weights' gradients are views of one
    buffer, laid out as the weights are."""
    grad = torch.empty_like(source)
    grad_cx = None if cx is None else torch.empty_like(cx)
    gradients: list[Tensor] = []
    if wanted[3]:
        flat, offset = buffer.new_empty(buffer.shape), 0
        places: dict[int, Tensor] = {}
        for index in sorted(range(len(weight)), key=lambda i: weight[i].dim(), reverse=True):
            count = int(weight[index].numel())
            places[index] = flat.narrow(0, offset, count).view(weight[index].shape)
            offset += count
        gradients = [places[index] for index in range(len(weight))]
    return grad, torch.empty_like(hx), grad_cx, gradients


@rule("aten::_cudnn_rnn")
def cudnn_forward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    source, _, _, buffer, _, cx, mode, hidden = args[:8]
    batch_first, train, bidirectional, sizes = args[10], args[12], args[13], args[14]
    line = source.transpose(0, 1) if batch_first and not sizes else source
    copied = not line.is_contiguous()
    if copied:
        yield Take("input", size_of(source), "contiguous input")
    yield from (Out(0), Out(1))
    if cx is not None:
        yield Out(2)
    if buffer is None:
        yield Out(4)
    tokens, batch, _ = _extent(source, batch_first, sizes)
    scratch = workspace_range(mode, tokens, batch, hidden, 1 + bidirectional, source.element_size())
    yield Take("workspace", scratch.likely, "cuDNN's workspace (modelled)", scratch.span)
    if train:
        directions = 1 + bidirectional
        kept = reserve_range(
            mode, tokens, batch, hidden, args[9], directions, args[11], source.element_size()
        )
        yield Out(3, span=kept.span)
    yield Give("workspace")
    if copied:
        yield Give("input")


@rule("aten::_cudnn_rnn_backward")
def cudnn_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Absent gradients become zeros; the workspace of the data pass serves the weights' too."""
    source, hx, cx, output = args[0], args[4], args[5], args[6]
    grads, mode, hidden = args[7:10], args[10], args[11]
    batch_first, bidirectional, sizes, wanted = args[14], args[17], args[18], args[21]
    keys: list[str] = []
    likes = (("dy", output), ("dhy", hx), ("dcy", cx))
    for (name, like), grad in zip(likes, grads, strict=True):
        if like is None:
            continue
        line = grad
        if grad is not None and name == "dy" and batch_first and not sizes:
            line = grad.transpose(0, 1)
        if grad is None or not line.is_contiguous():
            keys.append(name)
            yield Take(name, size_of(like), "zeros" if grad is None else "contiguous gradient")
    if not (source.transpose(0, 1) if batch_first and not sizes else source).is_contiguous():
        keys.append("input")
        yield Take("input", size_of(source), "contiguous input")
    yield from (Out(0), Out(1))
    if cx is not None:
        yield Out(2)
    tokens, batch, _ = _extent(source, batch_first, sizes)
    scratch = workspace_range(mode, tokens, batch, hidden, 1 + bidirectional, source.element_size())
    yield Take("workspace", scratch.likely, "cuDNN's workspace (modelled)", scratch.span)
    if wanted[3]:
        yield Out(3)
    yield Give("workspace")
    yield from (Give(key) for key in reversed(keys))

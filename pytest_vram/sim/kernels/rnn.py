"""LSTM, GRU and plain RNN on a CUDA card: PyTorch's own layers and cuDNN's.

The composites in ATen/native/RNN.cpp ask ``is_cuda()`` and would take the CPU's cells for
simulated tensors, so they are written out here (:func:`composites`): the same operators in the
same order. Read from ATen/native/RNN.cpp, ATen/native/cuda/RNN.cu and ATen/native/cudnn/RNN.cpp
(v2.6.0, v2.14.1: the parts used here act alike).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_vram.sim.kernels import Card, Give, Out, Outputs, Span, Step, Take, rule, size_of
from pytest_vram.sim.kernels.iterator import contiguous, is_contiguous
from pytest_vram.sim.kernels.reduce import reduction
from pytest_vram.sim.kernels.reductions import summing

aten = torch.ops.aten

Hidden = Any  #: a tensor, or (h, c) for LSTM
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  #: ``cudnnRNNMode_t``
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}


# ---------------------------------------------------------------------------------- fused cells


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


# ------------------------------------------------------------------------------- PyTorch's layers


class Parameters(NamedTuple):
    """``CellParams``: weights and biases of one layer in one direction."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None


Cell = Callable[[Tensor, Hidden, Parameters], Hidden]


def _lstm_step(source: Tensor, hidden: Hidden, p: Parameters) -> Hidden:
    hx, cx = hidden
    igates = torch.matmul(source, p.w_ih.t())
    hgates = torch.matmul(hx, p.w_hh.t())
    hy, cy, _ = aten._thnn_fused_lstm_cell(igates, hgates, cx, p.b_ih, p.b_hh)
    return (hy if p.w_hr is None else torch.matmul(hy, p.w_hr.t())), cy


def _gru_step(source: Tensor, hidden: Hidden, p: Parameters) -> Hidden:
    igates = torch.matmul(source, p.w_ih.t())
    hgates = torch.matmul(hidden, p.w_hh.t())
    return aten._thnn_fused_gru_cell(igates, hgates, hidden, p.b_ih, p.b_hh)[0]


def _simple_step(activation: Callable[[Tensor], Tensor]) -> Cell:
    def step(source: Tensor, hidden: Hidden, p: Parameters) -> Hidden:
        gates = torch.nn.functional.linear(hidden, p.w_hh, p.b_hh)
        added = torch.nn.functional.linear(source, p.w_ih, p.b_ih)
        out = activation(gates.add_(added))
        del added, gates  # both live until C++'s whole expression ends
        return out

    return step


_CELLS: dict[str, Cell] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": _simple_step(torch.tanh),
    "rnn_relu": _simple_step(torch.relu),
}


def _gathered(params: Sequence[Tensor], has_biases: bool, projected: bool) -> list[Parameters]:
    """``gather_params``."""
    width = 2 + 2 * has_biases + projected
    cells = []
    for start in range(0, len(params), width):
        part = list(params[start : start + width])
        w_hr = part.pop() if projected else None
        biases = part[2:] if has_biases else [None, None]
        cells.append(Parameters(part[0], part[1], biases[0], biases[1], w_hr))
    return cells


def _output(hidden: Hidden) -> Tensor:
    return hidden[0] if isinstance(hidden, tuple) else hidden  # type: ignore[no-any-return]


def _mapped(hidden: Hidden, function: Callable[[Tensor], Tensor]) -> Hidden:
    """The cell state first: the compiler of the wheels evaluates arguments from the right."""
    if isinstance(hidden, tuple):
        cx = function(hidden[1])
        return function(hidden[0]), cx
    return function(hidden)


def _joined(parts: Sequence[Hidden]) -> Hidden:
    """``hidden_concat``."""
    if isinstance(parts[0], tuple):
        hxs, cxs = zip(*parts, strict=True)
        cx = torch.cat(list(cxs), 0)
        return torch.cat(list(hxs), 0), cx
    return torch.cat(list(parts), 0)


def _steps(
    cell: Cell, inputs: Sequence[Tensor], hidden: Hidden, p: Parameters
) -> tuple[list[Tensor], Hidden]:
    outputs = []
    for step in inputs:
        hidden = cell(step, hidden, p)
        outputs.append(_output(hidden))
    return outputs, hidden


def _layer(
    cell: Cell, source: Tensor, hiddens: Sequence[Hidden], ps: Sequence[Parameters]
) -> tuple[Tensor, list[Hidden]]:
    """``FullLayer`` and, with two directions, ``FullBidirectionalLayer``."""
    inputs = list(source.unbind(0))
    forward, last = _steps(cell, inputs, hiddens[0], ps[0])
    result = torch.stack(forward, 0)
    if len(ps) == 1:
        return result, [last]
    backward, first = _steps(cell, inputs[::-1], hiddens[1], ps[1])
    reverse = torch.stack(backward[::-1], 0)
    return torch.cat([result, reverse], result.dim() - 1), [last, first]


def _packed_forward(
    cell: Cell, data: Tensor, sizes: Sequence[int], hidden: Hidden, p: Parameters
) -> tuple[Tensor, Hidden]:
    """``PackedLayer``: sequences that end give their hidden state to a list."""
    outputs, done, offset, last = [], [], 0, sizes[0]
    for size in sizes:
        step = data.narrow(0, offset, size)
        offset += size
        if last > size:
            ended = functools.partial(torch.narrow, dim=0, start=size, length=last - size)
            going = functools.partial(torch.narrow, dim=0, start=0, length=size)
            done.append(_mapped(hidden, ended))
            hidden = _mapped(hidden, going)
        last = size
        hidden = cell(step, hidden, p)
        outputs.append(_output(hidden))
    done.append(hidden)
    return torch.cat(outputs, 0), _joined(done[::-1])


def _packed_backward(
    cell: Cell, data: Tensor, sizes: Sequence[int], start: Hidden, p: Parameters
) -> tuple[Tensor, Hidden]:
    """``ReversedPackedLayer``: begins with the few longest sequences, others join."""
    outputs, offset, last = [], int(data.shape[0]), sizes[-1]
    hidden = _mapped(start, functools.partial(torch.narrow, dim=0, start=0, length=last))
    for size in reversed(sizes):
        if size > last:
            joining = functools.partial(torch.narrow, dim=0, start=last, length=size - last)
            hidden = _joined([hidden, _mapped(start, joining)])
        step = data.narrow(0, offset - size, size)
        offset -= size
        last = size
        hidden = cell(step, hidden, p)
        outputs.append(_output(hidden))
    return torch.cat(outputs[::-1], 0), hidden


def _packed_layer(
    cell: Cell, data: Tensor, sizes: Sequence[int], hiddens: Sequence[Hidden],
    ps: Sequence[Parameters],
) -> tuple[Tensor, list[Hidden]]:  # fmt: skip
    result, last = _packed_forward(cell, data, sizes, hiddens[0], ps[0])
    if len(ps) == 1:
        return result, [last]
    reverse, first = _packed_backward(cell, data, sizes, hiddens[1], ps[1])
    return torch.cat([result, reverse], -1), [last, first]


def _stack(
    mode: str, source: Tensor, sizes: Sequence[int] | None, hidden: Sequence[Tensor],
    params: Sequence[Parameters], layers: int, dropout: float, train: bool, directions: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``_lstm_impl`` and ``_rnn_impl_with_concat``: output and stacked final states."""
    states = [tensor.unbind(0) for tensor in hidden]
    pairs: list[Hidden] = list(zip(*states, strict=True)) if len(states) == 2 else list(states[0])
    final: list[Hidden] = []
    cell = _CELLS[mode]
    for layer in range(layers):
        part = slice(layer * directions, (layer + 1) * directions)
        if sizes is None:
            source, last = _layer(cell, source, pairs[part], params[part])
        else:
            source, last = _packed_layer(cell, source, sizes, pairs[part], params[part])
        final += last
        if dropout != 0 and train and layer < layers - 1:
            source = torch.dropout(source, dropout, True)
    if len(states) == 2:
        hy, cy = zip(*final, strict=True)
        cells = torch.stack(list(cy), 0)
        return source, torch.stack(list(hy), 0), cells
    return source, torch.stack(final, 0)


def _run(
    card: Card, mode: str, source: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor],
    biases: bool, layers: int, dropout: float, train: bool, bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``lstm.input``, ``gru.input``, ``rnn_*.input``."""
    if cudnn_takes(source):
        call = CudnnCall.of(mode, source, hidden, params, biases, layers, dropout, train)
        return call.run(batch_first, bidirectional, (), card)
    if batch_first:
        source = source.transpose(0, 1)
    projected = mode == "lstm" and hidden[0].shape[2] != hidden[1].shape[2]
    gathered = _gathered(params, biases, projected)
    out, *states = _stack(
        mode, source, None, hidden, gathered, layers, dropout, train, 1 + bidirectional
    )
    if batch_first:
        out = out.transpose(0, 1) if mode == "lstm" else out.transpose_(0, 1)
    return out, *states


def _run_packed(
    card: Card, mode: str, data: Tensor, batch_sizes: Tensor, hidden: Sequence[Tensor],
    params: Sequence[Tensor], biases: bool, layers: int, dropout: float, train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``lstm.data`` and the others on a packed sequence; ``batch_sizes`` lies on the host."""
    sizes = batch_sizes.tolist()
    if cudnn_takes(data):
        call = CudnnCall.of(mode, data, hidden, params, biases, layers, dropout, train)
        return call.run(False, bidirectional, tuple(sizes), card)
    projected = mode == "lstm" and hidden[0].shape[2] != hidden[1].shape[2]
    gathered = _gathered(params, biases, projected)
    return _stack(mode, data, sizes, hidden, gathered, layers, dropout, train, 1 + bidirectional)


def lstm_cell(
    source: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    hy, cy = _lstm_step(source, (hx[0], hx[1]), Parameters(w_ih, w_hh, b_ih, b_hh, None))
    return hy, cy


def gru_cell(
    source: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out: Tensor = _gru_step(source, hx, Parameters(w_ih, w_hh, b_ih, b_hh, None))
    return out


def composites(card: Card) -> dict[str, Callable[..., Any]]:
    """Operator name -> what it does on a CUDA device, to register on AutogradCUDA. The meta
    kernels :data:`META` must be registered with them."""
    found: dict[str, Callable[..., Any]] = {"lstm_cell": lstm_cell, "gru_cell": gru_cell}
    for mode in _CELLS:
        several = mode == "lstm"

        def whole(
            source: Tensor, hx: Any, *rest: Any, mode: str = mode, several: bool = several
        ) -> Any:
            return _run(card, mode, source, hx if several else [hx], *rest)

        def packed(
            data: Tensor, sizes: Tensor, hx: Any, *rest: Any, mode: str = mode,
            several: bool = several,
        ) -> Any:  # fmt: skip
            return _run_packed(card, mode, data, sizes, hx if several else [hx], *rest)

        found[f"{mode}.input"] = whole
        found[f"{mode}.data"] = packed
    return found


# ---------------------------------------------------------------------------------------- cuDNN


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


#: Meta kernels that FakeTensor needs for the operators above: ``Library.impl(name, function,
#: "Meta")`` while a simulation lasts (some replace PyTorch's own, of which the dispatcher warns).
META: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": meta_lstm_cell,
    "_thnn_fused_gru_cell": meta_gru_cell,
    "_thnn_fused_gru_cell_backward": meta_gru_cell_backward,
    "_cudnn_rnn": meta_cudnn_rnn,
    "_cudnn_rnn_backward": meta_cudnn_rnn_backward,
}


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


# ---------------------------------------------------------------------------------------- packing


def packed_sizes(lengths: Sequence[int]) -> list[int]:
    """How many of the sequences (sorted, longest first) are still running at each step."""
    return [sum(length > step for length in lengths) for step in range(lengths[0])]


@rule("aten::_pack_padded_sequence")
def pack_padded_sequence(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """Steps that equally many sequences reach are copied together unless they already lie in one
    piece, then concatenated (ATen/native/PackedSequence.cpp, ``_pack_padded_sequence``)."""
    source, lengths, batch_first = args
    line = source.transpose(0, 1) if batch_first else source
    batch, row = int(line.shape[1]), size_of(line) // max(1, int(line.shape[0] * line.shape[1]))
    copies, before = 0, 0
    for index in range(batch):
        length = int(lengths[batch - 1 - index])
        if length > before:
            running = batch - index
            shape = (length - before, running, *line.shape[2:])
            if not is_contiguous(shape, line.stride()):
                copies += 1
                yield Take(f"part{copies}", (length - before) * running * row, "steps in one piece")
            before = length
    yield Out(0)
    for number in range(1, copies + 1):
        yield Give(f"part{number}")

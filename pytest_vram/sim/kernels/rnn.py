"""LSTM, GRU and plain RNN on a CUDA card: PyTorch's own layers, and when cuDNN runs instead.

The composites in ATen/native/RNN.cpp ask ``is_cuda()`` and would take the CPU's cells for
simulated tensors, so they are written out here (:func:`composites`): the same operators in the
same order (v2.6.0, v2.14.1: the parts used here act alike).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_vram.sim.kernels import (
    Card,
    Give,
    Out,
    Outputs,
    Step,
    Take,
    rnn_cells,
    rnn_cudnn,
    rule,
    size_of,
)
from pytest_vram.sim.kernels.iterator import is_contiguous
from pytest_vram.sim.kernels.rnn_cudnn import CudnnCall, cudnn_takes

aten = torch.ops.aten

Hidden = Any  #: a tensor, or (h, c) for LSTM

#: Meta kernels that FakeTensor needs for what the composites call: ``Library.impl(name, function,
#: "Meta")`` while a simulation lasts (some replace PyTorch's own, of which the dispatcher warns).
META: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": rnn_cells.meta_lstm_cell,
    "_thnn_fused_gru_cell": rnn_cells.meta_gru_cell,
    "_thnn_fused_gru_cell_backward": rnn_cells.meta_gru_cell_backward,
    "_cudnn_rnn": rnn_cudnn.meta_cudnn_rnn,
    "_cudnn_rnn_backward": rnn_cudnn.meta_cudnn_rnn_backward,
}


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

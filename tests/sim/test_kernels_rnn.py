"""RNN cells against what PyTorch 2.6.0 and 2.14.1 did; the model of cuDNN's layers."""

from __future__ import annotations

import pytest
import torch
from kernel_answers import differences

from pytest_vram.sim import find_profile
from pytest_vram.sim.kernels import Card, Give, Out, Span, Take, program, rnn_cudnn

aten = torch.ops.aten
A100 = Card(find_profile("a100-80gb"), (2, 13))


def test_every_recorded_call_is_reproduced_event_by_event() -> None:
    assert differences("rnn") == []


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("module", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("both", [False, True])
def test_the_weight_space_is_all_parameters(
    module: type[torch.nn.RNNBase], layers: int, both: bool
) -> None:
    made = module(5, 7, num_layers=layers, bidirectional=both, device="meta")
    mode = {"LSTM": 2, "GRU": 3, "RNN_TANH": 1}[made.mode]
    elements = rnn_cudnn.weight_elements(mode, 5, 7, 0, layers, 1 + both)
    assert elements == sum(p.numel() for p in made.parameters())


def test_flattened_weights_share_one_buffer_that_cudnn_is_given() -> None:
    made = torch.nn.LSTM(5, 7, num_layers=2)
    weights = made._flat_weights
    assert rnn_cudnn.weight_buffer(weights) is None
    before = [weight.detach().clone() for weight in weights]
    buffer = rnn_cudnn.flatten_weight(weights, 4, 5, 2, 7, 0, 2, False, False)
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    assert all(torch.equal(old, new) for old, new in zip(before, weights, strict=True))
    given = rnn_cudnn.weight_buffer(weights)
    assert given is not None
    assert given.data_ptr() == buffer.data_ptr()
    assert given.numel() == buffer.numel()
    assert not given.requires_grad


def _span(low: int, high: int) -> Span:
    why = "cuDNN's RNN kernels are closed: a documented model is simulated"
    return Span("cuDNN RNN reserve and workspace", why, low, high)


def test_cudnn_layers_keep_a_reserve_and_take_a_workspace() -> None:
    source, hx = tensor(32, 20, 64), tensor(1, 32, 128)
    weights = [tensor(512, 64), tensor(512, 128), tensor(512), tensor(512)]
    buffer = tensor(rnn_cudnn.weight_elements(2, 64, 128, 0, 1, 1))
    args = (
        source, weights, 4, buffer, hx, hx, 2, 128, 0, 1, True, 0.0, True, False, [], None,
    )  # fmt: skip
    outputs = rnn_cudnn.meta_cudnn_rnn(*args)
    assert [tuple(out.shape) for out in outputs[:3]] == [(32, 20, 128), (1, 32, 128), (1, 32, 128)]
    gates = 640 * 512 * 4
    assert outputs[3].numel() == gates + 640 * 128 * 4  # and the cell states
    steps = program(aten._cudnn_rnn.default, args, {}, outputs, A100)
    assert steps == (
        Take("input", 32 * 20 * 64 * 4, "contiguous input"),
        Out(0),
        Out(1),
        Out(2),
        Take("workspace", gates, "cuDNN's workspace (modelled)", _span(0, 2 * gates + 65536)),
        Out(3, span=_span(gates, gates + 2 * 640 * 128 * 4 + 2 * 32 * 128 * 4)),
        Give("workspace"),
        Give("input"),
    )


def test_gradients_of_cudnn_weights_are_views_of_one_buffer() -> None:
    source, hx = tensor(20, 32, 64), tensor(1, 32, 128)
    weights = [tensor(384, 64), tensor(384, 128), tensor(384), tensor(384)]
    buffer = tensor(rnn_cudnn.weight_elements(3, 64, 128, 0, 1, 1))
    out = tensor(20, 32, 128)
    args = (
        source, weights, 4, buffer, hx, None, out, out, None, None, 3, 128, 0, 1, False, 0.0, True,
        False, [], None, tensor(8, dtype=torch.uint8), [True, True, False, True],
    )  # fmt: skip
    grad, grad_hx, grad_cx, gradients = rnn_cudnn.meta_cudnn_rnn_backward(*args)
    assert grad.shape == source.shape
    assert grad_hx.shape == hx.shape
    assert grad_cx is None
    assert [g.shape for g in gradients] == [w.shape for w in weights]
    assert len({g.untyped_storage()._cdata for g in gradients}) == 1
    steps = program(
        aten._cudnn_rnn_backward.default, args, {}, [grad, grad_hx, None, *gradients], A100
    )
    assert steps is not None
    assert [step for step in steps if isinstance(step, Take)] == [
        Take("dhy", 32 * 128 * 4, "zeros"),
        Take(
            "workspace",
            640 * 384 * 4,
            "cuDNN's workspace (modelled)",
            _span(0, 2 * 640 * 384 * 4 + 65536),
        ),
    ]
    assert [step.index for step in steps if isinstance(step, Out)] == [0, 1, 3]


def test_ranges_of_the_closed_library() -> None:
    for mode in range(4):
        for model in (
            rnn_cudnn.reserve_range(mode, 640, 32, 128, 2, 2, 0.1, 4),
            rnn_cudnn.workspace_range(mode, 640, 32, 128, 2, 4),
            rnn_cudnn.dropout_state_range(A100),
        ):
            assert 0 <= model.low <= model.likely <= model.high

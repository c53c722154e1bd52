"""Composites written out for CUDA against the operators that the real ones call, in order.

``fixtures/kernels/composites.json.gz`` holds what PyTorch 2.6.0 and 2.14.1 called on stand-in
devices, forward and backward: operator, shape and dtype of its first result. Here the same calls
run on meta tensors. Single differences that the device, not the composite, makes are named below.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_answers import argument, card, runs
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_vram.sim.kernels import attention, rnn, versions

RECORDED = runs("composites")

#: Detaching is bookkeeping; AccumulateGrad's copies depend on strides of meta kernels.
_IGNORED = {
    "detach.default", "empty.memory_format", "empty_like.default", "new_empty_strided.default",
    "copy_.default", "lift_fresh.default",
}  # fmt: skip


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = next((t for t in _leaves(result) if t is not None), None)
        told = None if first is None else [list(first.shape), str(first.dtype)[6:]]
        self.calls.append([str(func)[5:], told])
        return result


def _leaves(result: Any) -> Iterator[Any]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from _leaves(item)


def kept(calls: list[list[Any]]) -> list[list[Any]]:
    return [call for call in calls if call[0] not in _IGNORED]


@pytest.fixture(scope="module", autouse=True)
def _meta_kernels() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # replaces a kernel
        for name, function in rnn.META.items():
            library.impl(name, function, "Meta")
    library.impl("dropout", _dropout, "AutogradMeta")
    yield
    library._destroy()


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """As CUDA decides it; on other devices dropout is composed."""
    fused = p and train and tensor.numel()
    return torch.native_dropout(tensor, p, train)[0] if fused else tensor


def ids(run: dict[str, Any]) -> str:
    return f"{run['device']}-{run['torch']}"


def grouped_by_a_newer_torch(shapes: list[Any], run: dict[str, Any]) -> bool:
    """2.14's efficient kernel takes fewer key heads; older meta kernels give other gradients."""
    several = len({shape[1][-3] for shape in shapes}) > 1
    return several and card(run).torch >= (2, 14) and not torch.__version__.startswith("2.14")


@pytest.mark.parametrize("run", RECORDED, ids=ids)
def test_attention(run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    old = run["torch"].startswith("2.6")
    monkeypatch.setattr(versions, "masks_count_for_gradients", lambda version: not old)
    for call in run["attention"]:
        *shapes, mask, dropout, causal, gqa, grad, recorded = call
        if grouped_by_a_newer_torch(shapes, run):
            continue
        query, key, value = (argument({"t": shape}, {}) for shape in shapes)
        if grad:
            for tensor in (query, key, value):
                tensor.requires_grad_()
        bias = argument(mask, {}) if mask else None
        if mask and mask.get("grad"):
            bias.requires_grad_()
        with Log() as log:
            out = attention.sdpa(
                query, key, value, bias, dropout, causal, enable_gqa=gqa, card=card(run)
            )
            if out.requires_grad:
                out.backward(torch.empty_like(out))
        assert [name for name, _ in kept(log.calls)] == [name for name, _ in kept(recorded)], call
        assert kept(log.calls)[0] == kept(recorded)[0]


@pytest.mark.parametrize("run", [run for run in RECORDED if run["rnn"]], ids=ids)
def test_rnn(run: dict[str, Any]) -> None:
    composites = rnn.composites(card(run))
    with torch.backends.cudnn.flags(enabled=False):
        for call in run["rnn"]:
            log, recorded = _rnn(composites, call)
            assert kept(log) == kept(recorded), call[:-1]


def _rnn(composites: dict[str, Any], call: list[Any]) -> tuple[list[Any], list[Any]]:
    mode, weights, size, hidden, projection, layers, both, first, bias, dropout, steps, packed = (
        call[:-1]
    )
    params = [_leaf(*shape) for shape in weights]
    count = layers * (1 + both)
    hx: Any = torch.zeros(count, 3, projection or hidden, device="meta")
    if mode == "lstm":
        hx = [hx, torch.zeros(count, 3, hidden, device="meta")]
    source = _leaf(9, size) if packed else _leaf(*((3, steps) if first else (steps, 3)), size)
    with Log() as log:
        rest = (hx, params, bias, layers, dropout, True, both)
        if packed:
            sizes = torch.tensor([3, 3, 2, 1])
            log.calls.clear()
            out = composites[f"{mode}.data"](source, sizes, *rest)
        else:
            out = composites[f"{mode}.input"](source, *rest, first)
        out[0].backward(torch.empty_like(out[0]))
    return log.calls, call[-1]


def _leaf(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta", requires_grad=True)

"""Random draws that CUDA's host code composes of other operators.

Read from ATen/native/Distributions.cpp, DistributionTemplates.h and
ATen/native/cuda/MultinomialKernel.cu (v2.14.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pytest_vram.sim.device import SimMode
from pytest_vram.sim.handlers import HANDLERS
from pytest_vram.sim.kernels import Card, Out, Outputs, Step, argument, rule, versions
from pytest_vram.sim.tensors import CUDA, META, SimTensor, wrap

aten = torch.ops.aten


def _on_card(tensor: Any) -> bool:
    return type(tensor) is SimTensor and tensor.is_cuda


@rule(aten.multinomial.default)
def multinomial(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """The result comes first; the rest is put together from other operators."""
    yield Out(0)


def _multinomial(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """One draw, or draws without replacement: the chances over exponential noise, and the largest.
    Several with replacement: cumulated chances."""
    chances, count = args[:2]
    again = argument(args, kwargs, 2, "replacement", False)
    if not _on_card(chances) or not chances.dim() or not count:
        return NotImplemented
    shape = (*chances.shape[:-1], count)
    result = wrap(mode, torch.empty(shape, dtype=torch.int64, device=META), CUDA)
    mode.ledger.operator(func, args, kwargs, [result], None, True)
    with mode, torch._C._AutoDispatchBelowAutograd():
        if again and count > 1:
            _cumulated(chances)
        else:
            checked = _extremes(chances, mode.ledger.card)
            _largest(chances, result)
            del checked
    return result


def _cumulated(chances: Tensor) -> None:
    rows = chances if chances.dim() == 2 else chances.unsqueeze(0)
    copy, normalised = torch.empty_like(rows), torch.empty_like(rows)
    sums = normalised.cumsum(1)
    del sums, normalised, copy


def _extremes(chances: Tensor, card: Card) -> tuple[Tensor, ...]:
    """That the chances are finite and positive, and what lives as long as this answer."""
    if versions.multinomial_asks_once(card.torch):
        least, largest = torch.aminmax(chances)
        positive, finite = least >= 0, largest < float("inf")
        return least, largest, finite & positive
    least = chances.min()
    positive = least >= 0
    largest = chances.max()
    finite = largest < float("inf")
    valid = finite & positive
    del finite, largest, positive, least
    return (valid,)


def _largest(chances: Tensor, result: Tensor) -> None:
    sums = chances.sum() if chances.dim() == 1 else chances.sum(1)
    nothing = sums == 0
    if chances.dim() > 1:
        rows = nothing
        nothing = rows.any()
        del rows
    del sums
    possible = ~nothing
    del possible
    noise = torch.empty_like(chances)
    if result.shape[-1] > 1:
        values = torch.empty(result.shape, dtype=chances.dtype, device=CUDA)
        torch.topk(noise, result.shape[-1], out=(values, result))
        del values
    del noise, nothing


def _checked(deviation: Tensor) -> None:
    """``CHECK_NORMAL_TENSOR_STD``: none is negative."""
    if deviation.numel():
        least = deviation.min()
        fine = least >= 0
        del fine, least


def _normal(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``normal_impl`` checks the deviation, makes the result, and checks in ``normal_out_impl``
    once more; a single mean or deviation becomes a tensor there."""
    mean = args[0]
    deviation = argument(args, kwargs, 1, "std", 1.0)
    given = [one for one in (mean, deviation) if isinstance(one, Tensor)]
    if not all(_on_card(one) for one in given):
        return NotImplemented
    shape = torch.broadcast_shapes(*(one.shape for one in given))  # type: ignore[no-untyped-call]
    with mode, torch._C._AutoDispatchBelowAutograd():
        if isinstance(deviation, Tensor):
            _checked(deviation)
        result = torch.empty(shape, dtype=given[0].dtype, device=CUDA)
        if isinstance(deviation, Tensor):
            _checked(deviation)
            if not isinstance(mean, Tensor):
                single = torch.empty((), dtype=deviation.dtype, device=CUDA)
                del single
        else:
            scaled = torch.empty_like(result)
            del scaled
    return result


HANDLERS[aten.multinomial.default] = _multinomial
for _operator in (
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
):
    HANDLERS[_operator] = _normal

"""cuFFT: results, and a span for what the closed library and PyTorch's copies for it take.

``_exec_fft`` and ``_fft_c2r_cufft`` (ATen/native/cuda/SpectralOps.cpp, v2.6.0) allocate the result,
copy operands into the order that a plan of at most three dimensions wants, and give every plan the
work area that it asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from pytest_vram.sim.kernels import Card, Outputs, Span, Step, moment, outs, rule, size_of


def work_area(source: Tensor, result: Tensor) -> int:
    """The most that cuFFT's documentation names ("Multidimensional Transforms", plan creation):
    8 complex numbers for each element of the transforms. A half-sided side counts less than the
    other, so the larger of the two is the number of elements."""
    elements = max(source.numel(), result.numel())
    real = min(one.element_size() // (2 if one.is_complex() else 1) for one in (source, result))
    return 8 * elements * 2 * real


@rule("aten::_fft_c2c", "aten::_fft_r2c", "aten::_fft_c2r")
def transform(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs, card: Card
) -> Iterator[Step]:
    """The high end has one copy of the operand and one of the result beside the work area."""
    yield from outs(outputs)
    source, result = args[0], outputs[0]
    if result is None or not result.numel():
        return
    high = work_area(source, result) + size_of(source) + size_of(result)
    why = "cuFFT documents only the worst case of its work area"
    yield from moment(Span("cuFFT work area", why, 0, high))

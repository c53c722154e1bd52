"""Scratch of the reduction kernel: partial results in global memory, and semaphores.

Read from ATen/native/cuda/Reduce.cuh (v2.6.0, v2.7.1 to v2.14.1): ``setReduceConfig``,
``global_memory_size``, ``semaphore_size``, ``AccumulationBuffer``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pytest_vram.sim.kernels import Card, Give, Step, Take, versions
from pytest_vram.sim.kernels.iterator import Dimensions, Layout, dimensions

_MIN_VALUES, _MAX_VALUES = 16, 256


class Kind(NamedTuple):
    """How a kernel instantiates the reduction: bytes of its accumulator, unrolling ``vt0``, width
    of vectorised loads, and whether a 64-bit range accumulates in the output itself."""

    accumulator: int
    vt0: int = 4
    vector: int = 4
    in_output: bool = True
    max_threads: int = 512


def reduced_shape(shape: Sequence[int], dims: Sequence[int], keepdim: bool) -> tuple[int, ...]:
    """Shape of the result; no dims at all means every dimension."""
    mask = _mask(len(shape), dims)
    if keepdim:
        return tuple(1 if m else n for n, m in zip(shape, mask, strict=True))
    return tuple(n for n, m in zip(shape, mask, strict=True) if not m)


def _mask(ndim: int, dims: Sequence[int]) -> list[bool]:
    chosen = {d % ndim for d in dims} if ndim else set()
    return [not dims or i in chosen for i in range(ndim)]


def reduction(
    source: Layout,
    dims: Sequence[int],
    results: Sequence[Layout],
    kind: Kind,
    card: Card,
    key: str = "reduce",
) -> Iterator[Step]:
    """Scratch of one reduction of ``source`` over ``dims`` into ``results`` (contiguous layouts
    without or with the reduced dimensions)."""
    memo_key = ("reduce", source, tuple(dims), tuple(results), kind)
    sizes = card.memo.get(memo_key)
    if sizes is None:
        sizes = card.memo[memo_key] = _sizes(source, dims, results, kind, card)
    accumulation, parts = sizes
    if accumulation:
        yield Take(f"{key}.acc", accumulation, "accumulation buffer of a split reduction")
    for partial, semaphores in parts:
        yield Take(f"{key}.cta", partial, "partial results of a reduction")
        yield Take(f"{key}.sem", semaphores, "semaphores of a reduction")
        yield Give(f"{key}.sem")
        yield Give(f"{key}.cta")
    if accumulation:
        yield Give(f"{key}.acc")


def _sizes(
    source: Layout, dims: Sequence[int], results: Sequence[Layout], kind: Kind, card: Card
) -> tuple[int, tuple[tuple[int, int], ...]]:
    if 0 in source.shape:
        return 0, ()
    mask = _mask(len(source.shape), dims)
    viewed = [_with_reduced_dims(result, mask) for result in results]
    space = dimensions([*viewed, source], reduction=True, outputs=len(viewed))
    accumulation = 0
    parts = space.parts()
    if len(parts) > 1 and not kind.in_output and kind.accumulator > results[0].itemsize:
        extent = max(n * s for n, s in zip(space.shape, space.strides[0], strict=True))
        elements = max(extent, results[0].itemsize) // results[0].itemsize
        accumulation = elements * kind.accumulator
    found = []
    for part in parts:
        size = _global_memory(part, source.itemsize, kind, card)
        if size is not None:
            found.append(size)
    return accumulation, tuple(found)


def _with_reduced_dims(result: Layout, mask: list[bool]) -> Layout:
    """``review_reduce_result``: dimensions of size 1 and stride 0 where the input is reduced."""
    if len(result.shape) == len(mask):
        return result
    shape, stride = iter(result.shape), iter(result.stride)
    pairs = [(1, 0) if reduced else (next(shape), next(stride)) for reduced in mask]
    return Layout(
        tuple(n for n, _ in pairs), tuple(s for _, s in pairs), result.itemsize, result.offset
    )


def _power_of_two(n: int) -> int:
    """``last_pow2``: the largest power of two not above ``n``, at least 1."""
    return 1 << (max(n, 1).bit_length() - 1)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _global_memory(
    space: Dimensions, itemsize: int, kind: Kind, card: Card
) -> tuple[int, int] | None:
    """Bytes of partial results and of semaphores, or ``None`` where one block per output does."""
    shape, out, source = space.shape, space.strides[0], space.strides[-1]
    reduced = sum(1 for s in out if s == 0)
    outputs = 1
    for n, s in zip(shape, out, strict=True):
        if s != 0 or n == 0:
            outputs *= n
    inputs = space.numel // outputs
    if shape:
        on_fastest = reduced == len(shape) or source[0] < source[reduced]
        fastest_stride = source[0] if on_fastest else source[reduced]
        dim0, dim1 = (inputs, outputs) if on_fastest else (outputs, inputs)
    else:
        on_fastest, fastest_stride, dim0, dim1 = True, itemsize, 1, 1

    output_vector = 1
    if fastest_stride == itemsize:
        if on_fastest and reduced == 1 and versions.vectorises_input(dim0, kind.vt0, card.torch):
            dim0 //= kind.vector
        elif not on_fastest:
            output_vector = _output_vector(space, reduced, itemsize)
            dim0 //= output_vector

    limit = kind.max_threads // output_vector
    x = _power_of_two(dim0) if dim0 < limit else limit
    y = _power_of_two(dim1) if dim1 < limit else limit
    width = min(x, card.profile.warp_size)
    height = min(y, limit // width)
    width = min(x, limit // height)

    step_input = width if on_fastest else 1
    step_output = 1 if on_fastest else width
    if _ceil(inputs, step_input) < min(height * 16, _MAX_VALUES):
        return None  # each warp has its own output
    step_input *= height
    values = _ceil(inputs, step_input)
    blocks = card.profile.threads_per_multiprocessor // (width * height)
    target = card.profile.multiprocessors * blocks
    grid = _ceil(outputs // output_vector, step_output)
    if values < _MAX_VALUES or grid > target:
        return None
    ctas = max(min(_ceil(target, grid), _ceil(values, _MIN_VALUES)), _ceil(values, _MAX_VALUES))
    if ctas <= 1:
        return None
    size = kind.accumulator * outputs * ctas
    if not on_fastest:
        size *= width * output_vector
    return size, 4 * grid


def _output_vector(space: Dimensions, reduced: int, itemsize: int) -> int:
    """``get_output_vec_size``: 4, 2 or 1, as address, size and the other strides divide."""
    vector = 4
    numbers = [space.offset // itemsize, space.shape[reduced]]
    numbers += [s // itemsize for i, s in enumerate(space.strides[-1]) if i != reduced]
    for n in numbers:
        while n % vector:
            vector //= 2
    return vector

"""Operators that C++ composes otherwise for a card than for tensor subclasses.

Every list is what PyTorch 2.14.1's CUDA build requests on the stub driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_vram.sim import Simulation, find_profile
from pytest_vram.sim.kernels.versions import INSTALLED
from pytest_vram.sim.selection import assume_selected

K = 1000


def _events(run: Callable[[], object], card: str = "a100-80gb") -> list[int]:
    """Bytes that ``run`` allocates (+) and frees (-); what it returns lives on."""
    with Simulation(find_profile(card)) as gpu:
        result = run()
        trace = gpu.trace()
        del result
    return [
        trace.allocations[event.index].requested * (1 if event.kind == "alloc" else -1)
        for event in trace.events
        if event.kind in ("alloc", "free")
    ]


def _ones(*shape: int, dtype: torch.dtype = torch.float32, trained: bool = False) -> Tensor:
    return torch.ones(*shape, dtype=dtype, device="cuda", requires_grad=trained)


def test_isclose_takes_nan_for_equal_in_place() -> None:
    found = _events(lambda: torch.isclose(_ones(K), _ones(K), equal_nan=True))
    assert found[2:] == [
        K, K, K, -K, -K,
        4 * K, 4 * K, 4 * K, -4 * K, -4 * K, 4 * K, 4 * K, -4 * K,
        4 * K, K, K, K, -K, -K, -4 * K, K, -K, -K, -4 * K, -4 * K, -4 * K, -4 * K,
    ]  # fmt: skip


def test_allclose_of_integers_compares_floating_numbers() -> None:
    found = _events(lambda: torch.allclose(*[_ones(K, dtype=torch.int64)] * 2))
    assert max(found) == 8 * K
    assert found.count(4 * K) == 7
    assert found[-3:] == [1, -1, -K] or found[-4:-1] == [1, -1, -K]


def test_isclose_refuses_what_a_card_refuses() -> None:
    with Simulation(find_profile("a100-80gb")):
        with pytest.raises(RuntimeError, match=r"^Float did not match Long$"):
            torch.isclose(_ones(2), _ones(2, dtype=torch.int64))
        with pytest.raises(RuntimeError, match="rtol must be greater than or equal to zero"):
            torch.isclose(_ones(2), _ones(2), rtol=-1)


@pytest.mark.parametrize(
    ("elements", "wanted", "unique", "expected"),
    [
        (K, 5, False, [K, 5 * K, K, -K, -5 * K]),
        (
            K, 5000, True,
            [K, 48 * K, 48 * K, 48 * K, 48 * K, 115199, -115199, -48 * K,
             6 * K, 5999, -5999, 6 * K, -6 * K, -6 * K, -48 * K, -48 * K, -48 * K],
        ),
    ],
)  # fmt: skip
def test_isin_compares_few_values_and_sorts_many(
    elements: int, wanted: int, unique: bool, expected: list[int]
) -> None:
    def run() -> object:
        mine, theirs = (_ones(n, dtype=torch.int64) for n in (elements, wanted))
        return mine, theirs, torch.isin(mine, theirs, assume_unique=unique)

    found = _events(run)[2:]
    assert [size for size in found if abs(size) != 115199] == [
        size for size in expected if abs(size) != 115199
    ]


def test_isin_of_known_values_removes_repeated_ones() -> None:
    """Ten elements of which three differ, among thirty values of which two do."""

    def run() -> object:
        mine = torch.tensor([1, 2, 3] * 3 + [1]).cuda()
        theirs = torch.tensor([3, 4] * 15).cuda()
        return mine, theirs, torch.isin(mine, theirs)

    assert 5 * 8 in _events(run)  # three and two, joined


def test_ldexp_by_floating_exponents_is_a_product() -> None:
    kept: list[Any] = []

    def run(exponent: torch.dtype) -> object:
        kept[:] = [_ones(K), _ones(K, dtype=exponent)]
        return torch.ldexp(*kept)

    assert _events(lambda: run(torch.float32))[-5:] == [4 * K, 8, -8, 4 * K, -4 * K]
    if INSTALLED >= (2, 11):  # a composite of its parts before
        assert _events(lambda: run(torch.int32))[-1:] == [4 * K]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x: x.nanmedian(), [4 * K, 8 * K, 8 * K, -8 * K, -8 * K, K, 8, 8 * K, -8 * K, 8, 4,
                                   8, -4, -8, -8, -K, 4, -8, -4 * K]),
        (lambda x: x.to(torch.complex64).logsumexp(0),
         [8 * K, 4, 4, 1, -1, -4, 8 * K, 8, -8 * K, -4, -8 * K]),
        (lambda x: torch.var_mean(x.to(torch.complex64), 0),
         [8 * K, 4, 4, 4, 4, 4, 8, -4, -4, -4, -4, -8 * K]),
        (lambda x: x.view(10, 100).mode(0), [400, 800, 4 * K, -4 * K]),
        (lambda x: x.view(10, 100).mode(1), [40, 80]),
        (lambda x: x.view(10, 100).bool().trace(), [K, 8, 80, -80, -K]),
        (lambda x: torch.nonzero_static(x, size=5), [40, 4, 8, -8, -4]),
        (lambda x: torch.nonzero_static(x, size=0), []),
    ],
)  # fmt: skip
def test_scratch_of_single_operators(run: Callable[[Tensor], object], expected: list[int]) -> None:
    def both() -> object:
        source = _ones(K)
        return source, run(source)

    assert _events(both)[1:] == expected


@pytest.mark.parametrize(
    ("size", "dtype", "blocks"),
    [(10**6, torch.float32, 62), (10**7 + 3, torch.float32, 102), (10**7 + 3, torch.bool, 204)],
)
def test_nonzero_static_counts_in_turns(size: int, dtype: torch.dtype, blocks: int) -> None:
    found = _events(lambda: torch.nonzero_static(_ones(size, dtype=dtype), size=5))
    assert found[2:6] == [4 * blocks, 8 * blocks, -8 * blocks, -4 * blocks]


def test_long_slices_have_a_mode_that_thrust_finds() -> None:
    with Simulation(find_profile("a100-80gb")) as gpu:
        _ones(2, 3000).mode(1)
        bounds = gpu.trace().bounds
    assert bounds is not None
    assert [part.part for part in bounds.parts] == ["mode of long slices: scratch"]


def _backward(result: Tensor | tuple[Tensor, ...]) -> None:
    results = result if isinstance(result, tuple) else (result,)
    torch.autograd.backward(results, [torch.ones_like(one) for one in results])


def test_gradients_of_both_extrema_are_one_block() -> None:
    with Simulation(find_profile("a100-80gb")):
        if "Aminmax" not in torch.aminmax(_ones(2, trained=True))[0].grad_fn.name():  # type: ignore[union-attr]
            pytest.skip("this PyTorch cannot differentiate aminmax")

    def run() -> object:
        source = _ones(K, trained=True)
        _backward(torch.aminmax(source))
        return source

    found = _events(run)
    assert found.count(4 * K) == 1 + 2  # the input, and the two parts of its gradient


def test_gradients_of_a_renormalised_complex_tensor_are_single() -> None:
    def run() -> object:
        source = _ones(100, 10, dtype=torch.complex64, trained=True)
        _backward(torch.renorm(source, 2, 0, 1.0))
        return source

    assert max(_events(run)) == 8 * K


def test_the_gradient_of_a_trace_is_one_block() -> None:
    def run() -> object:
        source = _ones(50, 50, trained=True)
        _backward(source.trace())
        return source

    assert _events(run)[:7] == [10_000, 4, 4, 10_000, 400, -400, -4]


# -- a mask decides how much ----------------------------------------------------------------


def _filled(mask: Callable[[], Tensor]) -> tuple[list[int], list[str]]:
    with Simulation(find_profile("a100-80gb")) as gpu:
        source, value = _ones(100, 64, trained=True), _ones(1, trained=True).view(())
        _backward(source.masked_fill(mask(), value))
        trace = gpu.trace()
    events = [
        trace.allocations[event.index].requested * (1 if event.kind == "alloc" else -1)
        for event in trace.events
        if event.kind in ("alloc", "free")
    ]
    return events, [part.part for part in trace.bounds.parts] if trace.bounds else []


def test_a_trained_fill_gathers_the_gradients_that_a_known_mask_selects() -> None:
    mask = torch.arange(6400).view(100, 64) < 10
    events, unknown = _filled(lambda: mask.cuda())
    assert unknown == []
    assert 10 * 2 * 8 in events  # positions
    assert 10 * 4 in events  # gradients


def test_a_trained_fill_says_that_an_unknown_mask_decides() -> None:
    _, unknown = _filled(lambda: torch.rand(100, 64, device="cuda") < 0.5)
    assert unknown == ["masked_fill with a trained value: selected gradients"]


def test_a_trained_fill_believes_a_declared_share() -> None:
    with assume_selected(0.25):
        events, unknown = _filled(lambda: torch.rand(100, 64, device="cuda") < 0.5)
    assert unknown == []
    assert 1600 * 4 in events


def test_a_mask_on_the_host_selects_there() -> None:
    def run() -> object:
        source, mask = _ones(64, 100, trained=True), torch.arange(64) % 3 == 0
        _backward(source[mask].sum())
        return source

    assert _events(run) == [
        25600, 176, 8800, -176, 4, -8800, 4,
        25600, 176, 8800, 176, 176, 176, 1, -1, -176, -176, -176, -8800, -176, -4, -4,
    ]  # fmt: skip


def test_what_a_mask_on_the_host_selects_is_written() -> None:
    def run() -> object:
        source, mask = _ones(64, 100), torch.arange(64) % 3 == 0
        source[mask] = 1.0
        return source

    assert _events(run) == [25600, 4, 176, -176, -4]


def test_written_where_an_unknown_mask_is_true() -> None:
    with Simulation(find_profile("a100-80gb")) as gpu:
        source = torch.rand(64, 100, device="cuda")
        source[source > 0.5] = _ones(1)
        bounds = gpu.trace().bounds
    assert bounds is not None
    assert [part.part for part in bounds.parts] == ["index_put with a mask: positions"]


def test_factors_in_a_host_tensor() -> None:
    with Simulation(find_profile("a100-80gb")):
        tensors = [_ones(3), _ones(4)]
        made = torch._foreach_addcdiv(tensors, tensors, tensors, torch.tensor([1.0, 2.0]))
        torch._foreach_addcmul_(tensors, tensors, tensors, torch.tensor([1.0, 2.0]))
        assert [one.shape for one in made] == [(3,), (4,)]


# -- torch.func -----------------------------------------------------------------------------


def test_attention_in_vmap_runs_the_kernel_of_the_card() -> None:
    from torch.func import vmap
    from torch.nn.functional import scaled_dot_product_attention

    with Simulation(find_profile("a100-80gb")) as gpu:
        q = torch.ones(6, 2, 4, 16, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        vmap(scaled_dot_product_attention)(q, q, q).sum().backward()
        assert "flash" in [choice.backend for _, choice in gpu.attention]
        if INSTALLED >= (2, 7):  # seed and offset are on the host before
            assert gpu.allocator.peak_allocated == 1_160_192


def test_dropout_in_vmap_keeps_its_mask() -> None:
    from torch.func import vmap

    def run() -> object:
        source = _ones(8, 100, trained=True)
        out = vmap(torch.nn.functional.dropout, randomness="different")(source)
        return source, out

    assert _events(run) == [3200, 800, 3200]


def test_a_single_number_is_selected_by_a_single_mask() -> None:
    """``masked_select_out_cuda_impl`` gives both a dimension first (IndexKernel.cpp)."""
    with Simulation(find_profile("a100-80gb")):
        number = _ones(1).view(())
        assert number.masked_select(torch.tensor(True).cuda()).shape == (1,)
        assert number.masked_select(torch.tensor(False).cuda()).shape == (0,)


def test_single_numbers_have_an_angle() -> None:
    with Simulation(find_profile("a100-80gb")):
        one = torch.nn.functional.cosine_similarity(*[_ones(1).view(())] * 2, dim=0)
        assert one.shape == ()


def test_a_margin_loss_reads_contiguous_copies() -> None:
    def run() -> object:
        source, target = _ones(1024, 8, trained=True), _ones(1024, dtype=torch.int64)
        part = source.narrow(1, 1, 6)
        _backward(torch.nn.functional.multi_margin_loss(part, target, reduction="none").sum())
        return source

    assert _events(run)[2:13] == [
        4096, 24576, -24576, 4, -4096, 4, 24576, 24576, 4096, -4096, -24576,
    ]  # fmt: skip

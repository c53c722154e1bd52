"""Sparse COO tensors in a simulation. Events are those of PyTorch 2.14.1's CUDA build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_vram.sim import Simulation, find_profile
from pytest_vram.sim.kernels import versions
from pytest_vram.sim.selection import assume_selected

ENTRIES, ROWS, COLUMNS = 300, 1000, 16
VALUES, INDICES = ENTRIES * COLUMNS * 4, ENTRIES * 8


def _joined(*parts: Any, **options: Any) -> Tensor:
    return torch.sparse_coo_tensor(*parts, check_invariants=False, **options)


def _sparse(coalesced: bool) -> Tensor:
    """Rows 0 to 299 of a table."""
    indices = torch.arange(ENTRIES).reshape(1, -1).cuda()
    values = torch.randn(ENTRIES, COLUMNS, device="cuda")
    return _joined(indices, values, (ROWS, COLUMNS), is_coalesced=coalesced)


def _entries() -> Tensor:
    """300 single entries of a matrix."""
    indices = torch.arange(2 * ENTRIES).reshape(2, -1).cuda()
    values = torch.randn(ENTRIES, device="cuda")
    return _joined(indices, values, (400, 700))


def _random() -> Tensor:
    """300 single entries at places that nobody knows."""
    indices = torch.randint(0, 400, (2, ENTRIES), device="cuda")
    return _joined(indices, torch.randn(ENTRIES, device="cuda"), (400, 700))


def _unknown() -> Tensor:
    indices = torch.randint(0, ROWS, (1, ENTRIES), device="cuda")
    values = torch.randn(ENTRIES, COLUMNS, device="cuda")
    return _joined(indices, values, (ROWS, COLUMNS))


def _events(make: Callable[[], Any], run: Callable[[Any], Any]) -> list[int]:
    """Bytes that ``run`` allocates (positive) and frees (negative), its result's end included."""
    with Simulation(find_profile("a100-80gb")) as gpu:
        given = make()  # lives on
        before = len(gpu.trace().events)
        result = run(given)
        del result
        trace = gpu.trace()
    return [
        trace.allocations[event.index].requested * (1 if event.kind == "alloc" else -1)
        for event in trace.events[before:]
        if event.kind in ("alloc", "free")
    ]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda s: s.clone(), [VALUES, INDICES, -VALUES, -INDICES]),
        (lambda s: -s, [VALUES, INDICES, -VALUES, -INDICES]),
        (lambda s: s * 2, [INDICES, VALUES, -VALUES, -INDICES]),
        (lambda s: s.to_dense(), [64000, -64000]),
        (
            lambda s: s.add(s, alpha=3),
            [VALUES, 2 * INDICES, 2 * VALUES, -VALUES, -2 * VALUES, -2 * INDICES],
        ),
    ],
)
def test_what_a_sparse_operator_allocates(run: Any, expected: list[int]) -> None:
    assert _events(lambda: _sparse(False), run) == expected


def test_a_sparse_host_tensor_goes_to_the_card_part_by_part() -> None:
    """How the adjacency of a graph network gets there."""
    with Simulation(find_profile("a100-80gb")) as gpu:
        adjacency = torch.eye(100).to_sparse().coalesce().to("cuda")
        wide = adjacency.to(torch.float64)
        found = [allocation.requested for allocation in gpu.trace().allocations]
        assert adjacency.is_coalesced()
        assert wide._nnz() == 100
        features = torch.ones(100, 8, device="cuda", requires_grad=True)
        torch.sparse.mm(adjacency, features * 2).sum().backward()
    assert found == [2 * 100 * 8, 100 * 4, 2 * 100 * 8, 100 * 8]
    assert features.grad is not None


def test_a_mask_gathers_and_multiplies() -> None:
    def run(mask: Tensor) -> Tensor:
        return torch.zeros(ROWS, COLUMNS, device="cuda").sparse_mask(mask)

    expected = [64000, 4, VALUES, INDICES, VALUES, -VALUES, -4, -64000, -VALUES, -INDICES]
    assert sorted(_events(lambda: _sparse(True), run)) == sorted(expected)


@pytest.mark.skipif(versions.INSTALLED < (2, 12), reason="older CUB pads its states otherwise")
def test_coalescing_sorts_by_comparison_and_keeps_what_is_distinct() -> None:
    with assume_selected(0.0):
        rows = _events(_unknown, lambda s: s.coalesce())
        entries = _events(_random, lambda s: s.coalesce())
    assert rows == [2400] * 3 + [5631, -5631, 1535, -1535] + [-2400] * 3
    assert entries == [2400] * 3 + [5631, -5631, 1535, -1535] + [-2400] * 3


def test_equal_rows_of_known_indices_become_one() -> None:
    with Simulation(find_profile("a100-80gb")):
        indices = torch.tensor([[1, 5, 1, 7, 5]]).cuda()
        sparse = _joined(indices, torch.ones(5, 4, device="cuda"), (9, 4))
        assert sparse.coalesce().values().shape == (3, 4)


def test_unknown_rows_are_all_distinct_unless_the_test_says_how_many_are() -> None:
    with Simulation(find_profile("a100-80gb")) as gpu:
        kept = _unknown().coalesce()
        assert kept._nnz() == ENTRIES
        (bound,) = gpu.trace().bounds.parts
        assert bound.part == "rows of a sparse gradient"
        assert bound.allocated[1] == gpu.allocator.peak_allocated
        assert bound.allocated[0] < bound.allocated[1]
        with assume_selected(0.5):
            assert _unknown().coalesce()._nnz() == ENTRIES // 2


def test_a_first_sparse_gradient_is_kept_and_a_second_one_joined_to_it() -> None:
    with Simulation(find_profile("a100-80gb")) as gpu:
        table = nn.Embedding(ROWS, COLUMNS, sparse=True).to("cuda")
        held = []
        for _ in range(2):
            table(torch.randint(0, ROWS, (ENTRIES,), device="cuda")).sum().backward()
            gradient = table.weight.grad
            assert gradient is not None
            held.append((gradient._nnz(), gpu.allocation_of(gradient._values()) >= 0))
        torch.optim.SGD(table.parameters(), lr=0.1).step()
    assert held == [(ENTRIES, True), (2 * ENTRIES, True)]


def test_sparse_adam_updates_the_rows_that_were_looked_up() -> None:
    with Simulation(find_profile("a100-80gb")) as gpu:
        table = nn.Embedding(ROWS, COLUMNS, sparse=True).to("cuda")
        optimizer = torch.optim.SparseAdam(table.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.randint(0, ROWS, (ENTRIES,), device="cuda")).sum().backward()
            optimizer.step()
        operators = [one.operator for one in gpu.trace().allocations if one.requested == VALUES]
    assert operators.count("aten::index") == 4  # both averages, in both steps


def test_a_sparse_matrix_times_a_dense_one_has_scratch_that_nobody_knows() -> None:
    with Simulation(find_profile("a100-80gb")) as gpu:
        adjacency = _entries()
        features = torch.randn(700, 8, device="cuda", requires_grad=True)
        torch.sparse.mm(adjacency, features).sum().backward()
        assert features.grad is not None
        assert features.grad.shape == (700, 8)
        assert (adjacency @ features).shape == (400, 8)
        assert gpu.trace().bounds.allocated[1] is None


def _adjacency() -> Tensor:
    indices = torch.stack([torch.arange(100), torch.arange(100).flip(0)])
    return torch.sparse_coo_tensor(indices, torch.ones(100), (120, 110)).coalesce().cuda()


_COALESCED = [800, 800, 800, 2559, 1535, 400, 1600]
_ROWS = [484, 400, 400]  # compressed rows, rows and columns in 32 bits
_BY_COLUMN = 3840


def _dense(rows: int, columns: int = 8) -> Tensor:
    return torch.ones(rows, columns, device="cuda")


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda a: a.t(), [400, 1600, 800]),
        (lambda a: a.transpose(0, 1), [400, 1600, 800]),
        (lambda a: a.T, [16, 1600]),
        (lambda a: torch.mm(a, _dense(110)), [3520, 3840, 3840, *_ROWS, _BY_COLUMN]),
        (lambda a: a @ _dense(110), [3520, 3840, 3840, *_ROWS, _BY_COLUMN]),
        (lambda a: torch.sparse.mm(a, _dense(110)), [3520, 3840, 3840, *_ROWS, _BY_COLUMN]),
        (
            lambda a: torch.mm(a, _dense(110, 16)[:, ::2]),
            [7040, 3840, 3840, *_ROWS, _BY_COLUMN, 3520],
        ),
        (
            lambda a: torch.mv(a, torch.ones(110, device="cuda")),
            [440, 480, 480, *_ROWS, 480],
        ),
        (
            lambda a: torch.addmm(torch.ones(8, device="cuda"), a, _dense(110)),
            [32, 3520, 3840, *_ROWS, _BY_COLUMN],
        ),
    ],
)
def test_products_hold_compressed_rows(run: Any, expected: list[int]) -> None:
    """Up to cuSPARSE's own call as the stub driver records them with PyTorch 2.14.1, then as
    SparseBlasLegacy.cpp has it."""
    assert [size for size in _events(_adjacency, run) if size > 0] == expected


@pytest.mark.skipif(versions.INSTALLED < (2, 12), reason="older CUB pads its states otherwise")
def test_a_transposed_matrix_is_coalesced_again_where_it_is_multiplied() -> None:
    """The backward of every graph convolution, and a dense matrix times a sparse one."""

    def taken(run: Any) -> list[int]:
        return [size for size in _events(_adjacency, run) if size > 0]

    turned = taken(lambda a: torch.mm(a.t(), _dense(120)))
    assert turned == [400, 1600, 800, 3840, 3520, 3520, *_COALESCED, 444, 400, 400, 3520]
    after = taken(lambda a: torch.mm(_dense(8, 120), a))
    assert after == [3840, 3520, 400, 1600, 800, 3520, *_COALESCED, 444, 400, 400, 3520]


def test_products_of_sparse_matrices_need_no_cublas_and_are_uncertain() -> None:
    with Simulation(find_profile("a100-80gb")) as gpu:
        assert (_adjacency() @ _dense(110)).shape == (120, 8)
        assert (_dense(8, 120) @ _adjacency()).shape == (8, 110)
        trace = gpu.trace()
        assert not any("cublas" in one.name for one in trace.allocations)
        assert trace.bounds.allocated[1] is None

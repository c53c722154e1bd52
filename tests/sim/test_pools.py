"""Private pools as programs make them; the figures are those of PyTorch 2.14.1 on the stub driver
(tests/stub_driver), where there are any: it captures no graphs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from pytest_vram.sim import Simulation, find_profile

MIB = 1 << 20
needs_pools = pytest.mark.skipif(
    not hasattr(torch.cuda, "use_mem_pool"), reason="this torch has no MemPool"
)


def empty(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


@pytest.fixture
def gpu() -> Any:
    with Simulation(find_profile("a100-80gb")) as simulation:
        yield simulation


@needs_pools
def test_a_pool_has_segments_of_its_own_until_it_dies(gpu: Simulation) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = empty(3 * MIB)
    outside = empty(3 * MIB)
    assert torch.cuda.memory_reserved() == 40 * MIB
    assert [one["total_size"] for one in pool.snapshot()] == [20 * MIB]
    del inside, outside
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 20 * MIB  # the pool's is kept for it
    del pool
    assert torch.cuda.memory_reserved() == 0


@needs_pools
def test_statistics_of_a_pool(gpu: Simulation) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = empty(3 * MIB)
    assert pool.use_count() == 1
    nested = torch.cuda.memory_stats_as_nested_dict()
    if "reserved_bytes_by_private_pools" in nested:  # since 2.13
        found = nested["reserved_bytes_by_private_pools"][pool.id]
        assert found["large_pool"]["current"] == 20 * MIB
        prefix = f"reserved_bytes_by_private_pools.{pool.id[0]}_{pool.id[1]}"
        assert torch.cuda.memory_stats()[f"{prefix}.all.current"] == 20 * MIB
    del kept


@needs_pools
def test_backward_allocates_outside_of_the_programs_pool(gpu: Simulation) -> None:
    """``use_mem_pool`` routes the calling thread's requests; backward is another thread's."""
    weight = torch.ones(MIB, device="cuda", requires_grad=True)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        (weight * 2).sum().backward()
    (segment,) = (one for one in pool.snapshot() if one["segment_type"] == "large")
    assert segment["active_size"] == 0
    assert weight.grad is not None


def test_a_graph_keeps_what_it_captured_apart(gpu: Simulation) -> None:
    source = torch.zeros(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        result = source * 2 + 1
    assert not torch.cuda.is_current_stream_capturing()
    # two products of 4 MiB in the pool's segment of 20, the source in one of the default pool
    assert torch.cuda.memory_reserved() == 40 * MIB
    assert torch.cuda.memory_allocated() == 8 * MIB
    pools = {one["segment_pool_id"] for one in torch.cuda.memory_snapshot()}
    assert pools == {(0, 0), graph.pool()}
    for _ in range(3):
        graph.replay()
    assert torch.cuda.memory_allocated() == 8 * MIB
    del result
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 40 * MIB  # replays need it
    graph.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 20 * MIB
    del source


def test_graphs_share_a_pool(gpu: Simulation) -> None:
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        one = empty(4 * MIB)
    with torch.cuda.graph(second, pool=first.pool()):
        other = empty(4 * MIB)
    assert first.pool() == second.pool()
    assert torch.cuda.memory_reserved() == 20 * MIB
    del one, other


def test_graphed_callables(gpu: Simulation) -> None:
    layer = torch.nn.Linear(64, 64).cuda()
    sample = torch.randn(8, 64, device="cuda")
    graphed = torch.cuda.make_graphed_callables(layer, (sample,))
    graphed(torch.randn(8, 64, device="cuda")).sum().backward()
    pools = {one["segment_pool_id"] for one in torch.cuda.memory_snapshot()}
    assert len(pools) == 2


def test_raw_allocations(gpu: Simulation) -> None:
    address = torch.cuda.caching_allocator_alloc(1000)
    assert torch.cuda.memory_allocated() == 1024
    torch.cuda.caching_allocator_delete(address)
    assert torch.cuda.memory_allocated() == 0
    with pytest.raises(RuntimeError, match="invalid device pointer"):
        torch.cuda.caching_allocator_delete(address)


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda: torch.cuda.memory_allocated("cpu"), ValueError,
         "Expected a cuda device, but got: cpu"),
        (lambda: torch.cuda.set_per_process_memory_fraction(2.0), ValueError,
         "Invalid fraction value: 2.0. Allowed range: 0~1"),
        (lambda: torch.cuda.set_per_process_memory_fraction(1), TypeError,
         "Invalid type for fraction argument, must be `float`"),
    ],
)  # fmt: skip
def test_what_pytorch_refuses(gpu: Simulation, call: Any, kind: type, sentence: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == sentence


def test_the_fraction_is_remembered(gpu: Simulation) -> None:
    torch.cuda.set_per_process_memory_fraction(0.5)
    if hasattr(torch.cuda, "get_per_process_memory_fraction"):
        assert torch.cuda.get_per_process_memory_fraction() == 0.5
    with pytest.raises(torch.OutOfMemoryError):
        empty(60 << 30)


def test_free_blocks_of_a_snapshot_say_what_was_last_asked_of_them(gpu: Simulation) -> None:
    first, second, third = empty(2000), empty(3000), empty(100)
    del second
    (segment,) = torch.cuda.memory_snapshot()
    assert [(one["state"], one["requested_size"]) for one in segment["blocks"]] == [
        ("active_allocated", 2000),
        ("inactive", 3000),
        ("active_allocated", 100),
        ("inactive", 0),
    ]
    del first, third


def test_settings_in_a_snapshot() -> None:
    conf = "max_split_size_mb:64,roundup_power2_divisions:[256:4,>:2]"
    with Simulation(find_profile("a100-80gb"), alloc_conf=conf):
        found = torch.cuda.memory._snapshot()["allocator_settings"]
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == conf
    assert found["max_split_size"] == 64 * MIB
    assert found["expandable_segments"] is False
    divisions = found["roundup_power2_divisions"]
    assert len(divisions) == 16
    # up to 2.8 what follows ``>`` overwrites the last boundary too
    older = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)
    assert (divisions["256"], divisions["512"]) == (2 if older else 4, 2)

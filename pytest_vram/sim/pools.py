"""Private pools of a simulated card: ``torch.cuda.MemPool``, CUDA graphs, raw allocations.

A pool is the allocator's; here is what PyTorch's classes say to it (``MemPool`` of
c10/cuda/CUDACachingAllocator.cpp, ATen/cuda/CUDAGraph.cpp, v2.14). A captured graph keeps its
pool's blocks; replaying it allocates nothing.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_vram.sim.patching import Patches

PoolId = tuple[int, int]


def install(held: Patches, simulation: Any) -> None:
    """Until ``held`` is undone, pools and graphs are the simulated card's."""
    numbers = itertools.count(1)
    capturing: list[Any] = []

    class MemPool(_Pool):
        def __init__(
            self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False, **_: Any
        ) -> None:
            options = {"foreign": allocator is not None}
            options |= {"use_on_oom": use_on_oom, "no_split": no_split}
            super().__init__(simulation, (0, next(numbers)), options)
            self.allocator = allocator

    class CUDAGraph(_Graph):
        def __new__(cls, *_: Any, **__: Any) -> Any:
            return object.__new__(cls)

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(simulation, lambda: (next(numbers), 0), capturing)

    @contextlib.contextmanager
    def use_mem_pool(pool: Any, device: Any = None) -> Iterator[None]:
        # only this thread's allocations: those of backward are the engine's
        thread = simulation.thread()
        simulation.adjust(
            "begin_allocate_to_pool", pool.id, lambda stream: simulation.thread() == thread
        )
        try:
            yield
        finally:
            simulation.adjust("end_allocate_to_pool", pool.id)
            simulation.adjust("release_pool", pool.id)

    functions: dict[str, Any] = {
        "MemPool": MemPool,
        "use_mem_pool": use_mem_pool,
        "CUDAGraph": CUDAGraph,
        "graph": _capturing_class(),
        "graph_pool_handle": lambda: (next(numbers), 0),
        "is_current_stream_capturing": lambda: bool(capturing),
        "caching_allocator_alloc": lambda size, *_, **__: simulation.raw_alloc(size),
        "caching_allocator_delete": simulation.raw_delete,
    }
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.graphs):
        held.replace(module, **functions)
    held.replace(torch._C, _cuda_isCurrentStreamCapturing=lambda: bool(capturing))


class _Pool:
    """What ``torch.cuda.MemPool`` is: an id, whose pool lives as long as the object."""

    def __init__(self, simulation: Any, number: PoolId, options: dict[str, bool]) -> None:
        self.id, self._simulation = number, simulation
        simulation.adjust("create_pool", number, **options)

    def use_count(self) -> int:
        return int(self._simulation.pool_users(self.id))

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        segments = self._simulation.segments()
        return [one for one in segments if one["segment_pool_id"] == self.id]

    def __del__(self) -> None:
        # MemPool::~MemPool
        self._simulation.adjust("release_pool", self.id)
        self._simulation.adjust("empty_cache", self.id)


class _Graph:
    """``torch.cuda.CUDAGraph``: what is allocated between begin and end goes to its pool."""

    def __init__(self, simulation: Any, fresh: Callable[[], PoolId], capturing: list[Any]) -> None:
        self._simulation, self._fresh, self._capturing = simulation, fresh, capturing
        self._pool: PoolId | None = None

    def capture_begin(self, pool: Any = None, *_: Any, **__: Any) -> None:
        self._pool = self._fresh() if pool is None else tuple(getattr(pool, "id", pool))
        self._simulation.adjust("begin_allocate_to_pool", self._pool)
        self._capturing.append(self)

    def capture_end(self) -> None:
        self._simulation.adjust("end_allocate_to_pool", self._pool)
        self._capturing.remove(self)

    def instantiate(self) -> None: ...

    def replay(self) -> None: ...

    def pool(self) -> PoolId:
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def reset(self) -> None:
        if self._pool is not None:
            self._simulation.adjust("release_pool", self._pool)
            self._pool = None

    def register_generator_state(self, generator: Any) -> None: ...

    def enable_debug_mode(self) -> None: ...

    def debug_dump(self, debug_path: str) -> None: ...

    def __del__(self) -> None:
        self.reset()


def _capturing_class() -> type:
    class graph:  # noqa: N801 (PyTorch's name)
        """``torch.cuda.graph``: empties the cache, captures on a stream of its own."""

        default_capture_stream: Any = None

        def __init__(self, cuda_graph: Any, pool: Any = None, stream: Any = None, **_: Any) -> None:
            kind = type(self)
            if stream is None and kind.default_capture_stream is None:
                kind.default_capture_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self.pool = () if pool is None else (pool,)
            self.capture_stream = stream or kind.default_capture_stream
            self.stream_ctx: Any = torch.cuda.stream(self.capture_stream)
            self.cuda_graph = cuda_graph

        def __enter__(self) -> None:
            if _collects():
                gc.collect()
            torch.cuda.empty_cache()
            self.stream_ctx.__enter__()
            self.cuda_graph.capture_begin(*self.pool)

        def __exit__(self, *exc: Any) -> None:
            self.cuda_graph.capture_end()
            self.stream_ctx.__exit__(*exc)

    return graph


def _collects() -> bool:
    """2.6 collects garbage before every capture, 2.11 only when that is asked for
    (torch/cuda/graphs.py)."""
    config = getattr(torch.compiler, "config", None)
    return bool(getattr(config, "force_cudagraph_gc", True))

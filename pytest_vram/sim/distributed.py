"""``torch.distributed`` seen from one rank: there are no other processes to talk to.

A process group is PyTorch's own ``fake`` one (``torch.testing._internal.distributed.fake_pg``),
whose collectives return at once. The rank and the number of ranks are what the launcher's
environment (``RANK``, ``WORLD_SIZE``) or the caller says.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from pytest_vram.sim.patching import Patches


def one_rank(held: Patches) -> None:
    """Until ``held`` is undone, process groups are fake and DistributedDataParallel's gradients
    need no reduction."""
    if not distributed.is_available():
        return
    start = distributed.init_process_group

    def init_process_group(
        backend: Any = None, init_method: Any = None, timeout: Any = None,
        world_size: int = -1, rank: int = -1, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        from torch.testing._internal.distributed.fake_pg import FakeStore

        size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", 1))
        mine = rank if rank >= 0 else int(os.environ.get("RANK", 0))
        start("fake", store=FakeStore(), rank=mine, world_size=size)

    parallel = torch.nn.parallel.DistributedDataParallel
    held.set(distributed, "init_process_group", init_process_group)
    held.set(parallel, "__init__", _with_hook(parallel.__init__))
    processes: Any = torch.multiprocessing
    held.set(processes, "spawn", _spawn(processes.spawn))


def _with_hook(init: Callable[..., None]) -> Callable[..., None]:
    """The fake group's futures hold nothing, so the gradient bucket is handed on as it is. The
    default reduction works in place and takes no memory of its own either."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # PyTorch checks annotations
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        init(self, *args, **kwargs)
        self.register_comm_hook(None, hook)
        self.register_comm_hook = lambda state, hook: None  # there can be one alone

    return __init__


def _spawn(spawn: Callable[..., Any]) -> Callable[..., Any]:
    """A simulation lives in one process: a single child runs in it."""

    def spawning(
        fn: Callable[..., Any], args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any
    ) -> Any:
        if nprocs != 1:
            return spawn(fn, args, nprocs, *rest, **kwargs)
        return fn(0, *args)

    return spawning

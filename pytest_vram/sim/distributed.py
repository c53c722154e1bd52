"""``torch.distributed`` seen from one rank: there are no other processes to talk to.

A process group is PyTorch's own ``fake`` one (``torch.testing._internal.distributed.fake_pg``),
whose collectives return at once. The rank and the number of ranks are what the launcher's
environment (``RANK``, ``WORLD_SIZE``) or the caller says. FSDP is refused with a sentence.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import distributed

from pytest_vram.frames import user_line
from pytest_vram.sim.patching import Patches
from pytest_vram.sim.tensors import SimTensor
from pytest_vram.sim.values import NoSimulatedKernel


def one_rank(held: Patches, stack: contextlib.ExitStack) -> None:
    """Until ``held`` is undone, process groups are fake and DistributedDataParallel's gradients
    need no reduction. A group that the program leaves to the end of the process ends with
    ``stack``: the next pass begins without one."""
    if not distributed.is_available():
        return
    if not distributed.is_initialized():
        stack.callback(_end_groups)
    start = distributed.init_process_group

    def init_process_group(
        backend: Any = None, init_method: Any = None, timeout: Any = None,
        world_size: int = -1, rank: int = -1, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        from torch.testing._internal.distributed.fake_pg import FakeStore

        size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", 1))
        mine = rank if rank >= 0 else int(os.environ.get("RANK", 0))
        start("fake", store=FakeStore(), rank=mine, world_size=size)
        _refuse_sharding(held)

    parallel = torch.nn.parallel.DistributedDataParallel
    held.set(distributed, "init_process_group", init_process_group)
    held.set(parallel, "__init__", _with_hook(parallel.__init__))
    processes: Any = torch.multiprocessing
    held.set(processes, "spawn", _spawn(processes.spawn))
    for name, answer in _OBJECTS.items():
        held.set(distributed, name, _among_fakes(getattr(distributed, name), answer))


def one_process(held: Patches) -> None:
    """Until ``held`` is undone, a process that is started with tensors of the card is refused."""

    def reduce(tensor: SimTensor) -> Any:
        if get_spawning_popen() is not None:
            raise NoSimulatedKernel(
                f"A process is started at {user_line()} with tensors of the card, and the "
                "simulated card lives in one process. Simulate a script or an option that trains "
                "in its main process, or the function that the process would run."
            )
        return tensor.__reduce_ex__(2)

    reducers: Any = ForkingPickler
    held.set(reducers, "_extra_reducers", {**reducers._extra_reducers, SimTensor: reduce})


def _end_groups() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _refuse_sharding(held: Patches) -> None:
    """FSDP decides by its streams, events and storages that it resizes what is there when. Imported
    here because who has no process group has no FSDP either: it takes half a second."""
    from torch.distributed import fsdp
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    def refusing(*_: Any, **__: Any) -> None:
        raise NoSimulatedKernel(
            "FSDP is not simulated; measure it on a CUDA machine (--vram-device cuda), or plan it: "
            "pytest-vram plan MODEL --zero 3 --data RANKS"
        )

    for owner in (fsdp.FullyShardedDataParallel, FSDPState):
        held.set(owner, "__init__", refusing)


def _all_gather_object(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: Any, object_gather_list: Any = None, *_: Any, **__: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _broadcast_object_list(object_list: list[Any], *_: Any, **__: Any) -> None:
    """What the source sends is what is here."""


def _scatter_object_list(
    scatter_object_output_list: list[Any], scatter_object_input_list: Any = None, *_: Any, **__: Any
) -> None:
    if scatter_object_input_list:
        scatter_object_output_list[0] = scatter_object_input_list[distributed.get_rank()]


#: They pickle into tensors; other ranks' objects are taken to be this rank's.
_OBJECTS: dict[str, Callable[..., None]] = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "scatter_object_list": _scatter_object_list,
}


def _among_fakes(real: Callable[..., Any], answer: Callable[..., None]) -> Callable[..., Any]:
    """``answer`` where the process group is the fake one."""

    @functools.wraps(real)
    def collective(*args: Any, **kwargs: Any) -> Any:
        fake = distributed.is_initialized() and distributed.get_backend() == "fake"
        return (answer if fake else real)(*args, **kwargs)

    return collective


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

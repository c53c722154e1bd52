"""The books of one simulated card: every block, who asked for it, what it holds, when it went."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from pytest_vram.frames import describe, nearest_frame
from pytest_vram.sim.allocator import Block, CachingAllocator, DeviceOutOfMemory
from pytest_vram.sim.sequence import made_as
from pytest_vram.sim.tensors import SimTensor
from pytest_vram.trace import BILLS, Allocation, Event, OutOfMemory, Phase, Trace

_RANK = {bill: rank for rank, bill in enumerate(BILLS)}

#: What an event is called in PyTorch's memory history.
_ACTIONS = {
    "alloc": ("alloc",),
    "free": ("free_requested", "free_completed"),
    "segment_alloc": ("segment_alloc",),
    "segment_free": ("segment_free",),
    "oom": ("oom",),
}

_SEGMENTS = {
    "segment_alloc": "segment_alloc",
    "segment_map": "segment_alloc",
    "segment_free": "segment_free",
    "segment_unmap": "segment_free",
}


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    """A storage's death certificate: which allocation ends with it."""

    __slots__ = ("index", "key")
    index: int
    key: int


class Books:
    """Allocations by index, in the order of their requests, and everything that befell them.

    A block lives as long as the storage that follows it, or until :meth:`free`. ``lock`` is held
    while a storage's death, which comes at any moment and in any thread, is booked.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self.allocator: CachingAllocator  # which needs a listener, :meth:`segment`, first
        self.allocations: list[Allocation] = []
        self.events: list[tuple[str, int, int, int]] = []
        self.phases: list[Phase] = []
        self.oom: OutOfMemory | None = None
        self._lock = lock
        self._frames: list[tuple[Any, int] | None] = []
        self._blocks: list[Block | None] = []
        self._nodes: list[int] = []  #: of each block: the autograd node that ran, or -1
        self._live: dict[int, _StorageRef] = {}
        self._busy = 0
        self._late: list[int] = []  #: died while the allocator was at work

    # -- blocks -----------------------------------------------------------------------------

    def allocate(
        self, size: int, stream: int, operator: str, module: str, bill: str = "", name: str = ""
    ) -> int:
        """The index of a new block of ``size`` bytes; raises torch.OutOfMemoryError."""
        self._busy += 1
        try:
            block = self.allocator.malloc(size, stream)
        except DeviceOutOfMemory as error:
            raise self._out_of_memory(error, operator, module) from None
        finally:
            self._busy -= 1
        index = len(self.allocations)
        self.allocations.append(
            Allocation(
                requested=size,
                block=block.size,
                address=block.address,
                stream=stream,
                bill=bill,
                name=name,
                operator=operator,
                module=module,
            )
        )
        self._frames.append(nearest_frame())
        self._blocks.append(block)
        self._nodes.append(_running_node())
        self.events.append(("alloc", index, 0, 0))
        self._free_late()
        return index

    def free(self, index: int) -> None:
        """Give the block back; nothing happens where it went before."""
        block = self._blocks[index]
        if block is None:
            return
        if self._busy:
            self._late.append(index)
            return
        self._blocks[index] = None
        self.events.append(("free", index, 0, 0))
        self._busy += 1
        try:
            self.allocator.free(block)
        finally:
            self._busy -= 1
        self._free_late()

    def _free_late(self) -> None:
        """Python may collect garbage while our allocator works, which a card's, being C++, never
        sees: what died then is given back afterwards."""
        while self._late and not self._busy:
            self.free(self._late.pop(0))

    @contextlib.contextmanager
    def allocator_at_work(self) -> Iterator[None]:
        """While something else is done to the allocator."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
        self._free_late()

    def block(self, index: int) -> Block | None:
        """The block while it is held."""
        return self._blocks[index]

    def _out_of_memory(
        self, error: DeviceOutOfMemory, operator: str, module: str
    ) -> torch.OutOfMemoryError:
        frame = nearest_frame()
        self.events.append(("oom", -1, error.requested, 0))
        message = error.message()
        self.oom = OutOfMemory(
            requested=error.requested,
            allocated=error.allocated,
            reserved=error.reserved,
            capacity=error.capacity,
            free=error.free,
            message=message,
            operator=operator,
            module=module,
            frame=describe(*frame) if frame else "",
            allowed=error.allowed,
        )
        return torch.OutOfMemoryError(message)

    # -- storages ---------------------------------------------------------------------------

    def knows(self, storage: Any) -> bool:
        return storage._cdata in self._live

    def index_of(self, tensor: torch.Tensor) -> int:
        """The allocation in which ``tensor`` lives; -1 where there is none."""
        found = self._live.get(tensor.untyped_storage()._cdata)
        return -1 if found is None else found.index

    def made_in(self, tensor: torch.Tensor) -> int:
        """The number of the autograd node in which ``tensor``'s block was made; -1 for none."""
        index = self.index_of(tensor)
        return self._nodes[index] if index >= 0 else -1

    def follow(self, storage: Any, index: int) -> None:
        """The block is given back when ``storage`` dies."""
        key = storage._cdata
        ref = _StorageRef(storage, self._died)
        ref.index, ref.key = index, key
        self._live[key] = ref

    def _died(self, ref: _StorageRef) -> None:
        with self._lock:
            if self._live.get(ref.key) is ref:
                del self._live[ref.key]
            if ref.index >= 0:
                self.free(ref.index)

    def unfollow(self, storage: Any) -> int:
        """The death of ``storage`` means nothing any more; the index of its block, or -1."""
        found = self._live.pop(storage._cdata, None)
        if found is None:
            return -1
        index, found.index = found.index, -1
        return index

    def take_over(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """``new`` lives in ``old``'s block from now on."""
        index = self.unfollow(old.untyped_storage())
        if index >= 0:
            self.follow(new.untyped_storage(), index)

    # -- what is read of them ---------------------------------------------------------------

    def phase(self, name: str, step: int) -> None:
        self.phases.append(Phase(name, step))
        self.events.append(("phase", len(self.phases) - 1, 0, 0))

    def segment(self, kind: str, address: int, size: int, stream: int) -> None:
        """The allocator took memory from the card, or gave it back."""
        if kind in _SEGMENTS:
            self.events.append((_SEGMENTS[kind], -1, size, address))

    def label(self, tensor: Any, bill: str, name: str = "") -> None:
        """What ``tensor``'s block is for; of several answers the first in :data:`BILLS` counts."""
        if type(tensor) is not SimTensor or not tensor.is_cuda:
            return
        index = self.index_of(tensor)
        if index < 0:
            return
        allocation = self.allocations[index]
        if not allocation.bill or _RANK[bill] < _RANK[allocation.bill]:
            allocation.bill, allocation.name = bill, name

    def trace(self, device: str, bounds: Any, notes: tuple[str, ...]) -> Trace:
        """The events so far. Allocations are copies: later labels do not change a Trace."""
        allocations = []
        for allocation, frame in zip(self.allocations, self._frames, strict=True):
            allocations.append(
                Allocation(
                    allocation.requested,
                    allocation.block,
                    allocation.address,
                    allocation.stream,
                    allocation.bill,
                    allocation.name,
                    allocation.shape,
                    allocation.dtype,
                    allocation.operator,
                    allocation.module,
                    describe(*frame) if frame else "",
                )
            )
        return Trace(
            allocations=allocations,
            events=[Event(*event) for event in self.events],  # type: ignore[arg-type]
            phases=list(self.phases),
            device=device,
            oom=self.oom,
            bounds=bounds,
            notes=notes,
        )

    def snapshot(self, version: tuple[int, int]) -> dict[str, Any]:
        """What ``torch.cuda.memory._snapshot()`` of that PyTorch returns, with the history."""
        entries: list[dict[str, Any]] = []
        for kind, index, size, address in self.events:
            if kind == "phase":
                continue
            stream = 0
            frames: list[dict[str, Any]] = []
            if kind in ("alloc", "free"):
                allocation = self.allocations[index]
                size, address = allocation.requested, allocation.address
                stream = allocation.stream
                frames = self._frames_of(index)
            for action in _ACTIONS[kind]:
                entry = {"action": action, "size": size, "stream": stream, "time_us": 0}
                if kind == "oom":
                    entry["device_free"] = self.oom.free if self.oom else 0
                entries.append({**entry, "addr": address, "frames": frames})
        segments = self.allocator.segments()
        frames_at = {
            self.allocations[ref.index].address: self._frames_of(ref.index)
            for ref in self._live.values()
        }
        for segment in segments:
            segment.setdefault("frames", [])
            for block in segment["blocks"]:
                block["frames"] = frames_at.get(block["address"], [])
        host: dict[str, Any] = {"host_segments": [], "host_traces": []}
        return {
            "segments": segments,
            "device_traces": [entries],
            "allocator_settings": self.allocator.settings(),
            "external_annotations": [],
            **(host if version >= (2, 14) else {}),
        }

    def _frames_of(self, index: int) -> list[dict[str, Any]]:
        """Innermost first, as PyTorch lists them: operator, module, user line."""
        allocation, frame = self.allocations[index], self._frames[index]
        frames = [{"name": allocation.operator or allocation.name, "filename": "??", "line": 0}]
        if allocation.module:
            frames.append({"name": allocation.module, "filename": "module", "line": 0})
        if frame is not None:
            code, line = frame
            frames.append({"name": code.co_name, "filename": code.co_filename, "line": line})
        return frames


def _running_node() -> int:
    if torch._C._current_graph_task_id() == -1:
        return -1
    node = torch._C._current_autograd_node()
    return -1 if node is None else made_as(node)

"""One simulated GPU, from entering to leaving: the books of every block, and what is patched."""

from __future__ import annotations

import bisect
import contextlib
import logging
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from pytest_vram.frames import describe, nearest_frame
from pytest_vram.places import here
from pytest_vram.sim import (
    composites,
    inplace,
    modules,
    selection,
    sequence,
    torch_cuda,
    values,
)
from pytest_vram.sim.allocator import Block, CachingAllocator, DeviceOutOfMemory, Listener
from pytest_vram.sim.answers import Answers
from pytest_vram.sim.autocast import CastPolicy
from pytest_vram.sim.bounds import Uncertainty, Unknown
from pytest_vram.sim.device import SimMode, parts_of
from pytest_vram.sim.distributed import one_rank
from pytest_vram.sim.eager import run_eagerly
from pytest_vram.sim.files import save_and_load
from pytest_vram.sim.kernels import RULES, Card, Give, Out, Program, Span, Take, program
from pytest_vram.sim.kernels.attention import Choice
from pytest_vram.sim.kernels.fallback import declarations, fallback
from pytest_vram.sim.kernels.versions import INSTALLED, WORKSPACE_VARIABLES, default_cudnn
from pytest_vram.sim.ordinals import understand_ordinals
from pytest_vram.sim.patching import patches
from pytest_vram.sim.profiles import Profile
from pytest_vram.sim.recipes import ProgramKey, Recipe
from pytest_vram.sim.tensors import SimTensor
from pytest_vram.sim.threads import FollowedThreads
from pytest_vram.sim.triton_kernels import skip_launches
from pytest_vram.trace import BILLS, Allocation, Event, OutOfMemory, Phase, Trace

_RANK = {bill: rank for rank, bill in enumerate(BILLS)}
VERSION = INSTALLED

_STREAM = "pytest_vram_stream"  # in the metadata of an AccumulateGrad

_ACTIONS = {
    "alloc": ("alloc",),
    "free": ("free_requested", "free_completed"),
    "segment_alloc": ("segment_alloc",),
    "segment_free": ("segment_free",),
    "oom": ("oom",),
}


class _StorageRef(weakref.ref):  # type: ignore[type-arg]
    """A storage's death certificate: which allocation ends with it."""

    __slots__ = ("index", "key")
    index: int
    key: int


class _OfThread(threading.local):
    """What the program has chosen in one thread: stream, and the module that runs."""

    def __init__(self) -> None:
        self.stream = 0
        #: From which autograd sequence number on which stream was current.
        self.stream_marks: list[tuple[int, int]] = []
        self.node_stream = 0
        self.chosen_in: tuple[int, int] | None = None
        self.modules: list[str] = []
        self.seen = 0
        self.count_nodes()

    def count_nodes(self) -> None:
        """Autograd's nodes are counted from here."""
        self.sequence = sequence.Sequence(self._backward_begins, self._backward_ended)

    def stream_at(self, number: int) -> int:
        """The stream on which the node of this sequence number was made."""
        place = bisect.bisect_right(self.stream_marks, (number, sys.maxsize))
        return self.stream_marks[place - 1][1] if place else 0

    def mark_stream(self, number: int) -> None:
        """Nodes made since the last mark or allocation in backward run on this stream: a node is
        made just before its operator allocates."""
        if self.stream_marks and self.stream_marks[-1][1] != number:
            self.stream_marks.append((max(self.seen, self.stream_marks[-1][0]), number))
        self.seen = sequence.counter()

    def _backward_begins(self, outputs: Any) -> None:
        """A leaf's AccumulateGrad is made by the first node that uses it, on the stream of that
        moment (autograd/input_metadata.cpp), and lives as long as any graph does."""
        if not self.stream_marks:
            return
        self.seen = sequence.counter()
        first: dict[Any, int] = {}
        for node in sequence.nodes_of(outputs):
            number = sequence.made_as(node)
            for following, _ in node.next_functions:
                if following is not None and "AccumulateGrad" in following.name():
                    first[following] = min(number, first.get(following, number))
        for accumulator, number in first.items():
            accumulator.metadata.setdefault(_STREAM, self.stream_at(number))

    def _backward_ended(self) -> None:
        self.seen = sequence.counter()
        self.mark_stream(self.stream)


class Simulation:
    """A simulated GPU as a context manager; also the Recorder of what happens on it.

    ``alloc_conf`` is a ``PYTORCH_CUDA_ALLOC_CONF`` text (default: that variable). Everything is
    undone on leaving, also after exceptions; a Simulation is entered once. Raises RuntimeError
    while another one, or :class:`pytest_vram.numerics.CpuStandIn`, has replaced ``torch.cuda``.
    """

    def __init__(self, profile: Profile, *, alloc_conf: str | None = None) -> None:
        if alloc_conf is None:
            alloc_conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get(
                "PYTORCH_ALLOC_CONF", ""
            )
        self.profile = profile
        self.alloc_conf = alloc_conf
        self.card = Card(profile, VERSION, cudnn_version=default_cudnn(VERSION))
        # PyTorch reads these once per process; recipes outlive a simulation.
        self._card_key = hash((self.card, *map(os.environ.get, WORKSPACE_VARIABLES)))
        self.allocator = self._allocator(self._segment)
        self.answers = Answers(profile, self.allocator)
        self.uncertainty = Uncertainty(self._allocator, profile.memory - profile.context)
        self.mode = SimMode(self)
        self._here = _OfThread()
        self._handles = {threading.get_ident(): "main"}
        self._free_handles: list[str] = []
        self.notes: list[str] = []
        self._allocations: list[Allocation] = []
        self._frames: list[tuple[Any, int] | None] = []
        self._events: list[tuple[str, int, int, int]] = []
        self._phases: list[Phase] = []
        self._blocks: list[Block | None] = []
        self._live: dict[int, _StorageRef] = {}
        self._busy = 0
        self._late: list[int] = []  #: died while the allocator was at work
        self._raw: dict[int, int] = {}
        self._workspaces: dict[tuple[str, str, int], int] = {}
        self._oom: OutOfMemory | None = None
        self._names: dict[OpOverload, str] = {}
        self._stack: contextlib.ExitStack | None = None
        self._quiet = False
        self.attention: list[tuple[str, Choice]] = []

    def _allocator(self, listener: Listener | None = None) -> CachingAllocator:
        profile = self.profile
        return CachingAllocator(
            profile.memory,
            self.alloc_conf,
            listener=listener,
            context=profile.context,
            version=VERSION,
        )

    # -- entering and leaving ---------------------------------------------------------------

    def __enter__(self) -> Simulation:
        if self._stack is not None:
            raise RuntimeError("a Simulation can be entered once; make another one")
        if torch.cuda.Stream is torch_cuda.Stream:  # type: ignore[comparison-overlap]
            raise RuntimeError(
                "torch.cuda is simulated already; leave that simulation before entering another"
            )
        with contextlib.ExitStack() as stack:
            self.policy = CastPolicy("AutocastCUDA", "cuda", on_cast=self._weight_cast)
            stack.callback(self.policy.close)
            held = stack.enter_context(patches())
            stack.callback(self.mode.end)  # for threads that outlive the simulation
            # Fake execution logs every error that it raises, with its own frames.
            held.set(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
            directory = here()
            self.threads = FollowedThreads(
                held, lambda: self.mode.in_thread(directory), self._thread_ended
            )
            run_eagerly(held, stack, self._compiles)
            skip_launches(held, self._say, lambda span: self._note(span, -1, None))
            understand_ordinals(held, stack)
            one_rank(held)
            save_and_load(held, self._upload)
            values.trust_distributions(held)
            stack.enter_context(torch_cuda.installed(self))
            stack.enter_context(composites.installed(self))
            stack.enter_context(modules.installed(self))
            stack.enter_context(self.mode)
            self._calibrate()
            stack.callback(self.answers.follow_steps())
            self._here.count_nodes()
            sequence.installed(held, lambda: self._here.sequence)
            self._stack = stack.pop_all()
        return self

    def _upload(self, value: torch.Tensor) -> torch.Tensor:
        """A host tensor's copy on the card, also while the modes are set aside."""
        with self.mode:
            return value.to(self.device)

    def __exit__(self, *exc: Any) -> None:
        stack = self._stack
        assert stack is not None
        self.policy.clear()
        stack.__exit__(*exc)

    def _calibrate(self) -> None:
        """Count the references that the dispatch holds on a gradient that is nobody else's."""
        if inplace.known():
            return
        self._quiet = True
        try:
            with torch.enable_grad():
                inplace.calibrate(lambda: torch.empty(2, device=self.device, requires_grad=True))
        finally:
            self._quiet = False

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    # -- Recorder ---------------------------------------------------------------------------

    def phase(self, name: str, step: int) -> None:
        self._phases.append(Phase(name, step))
        self._events.append(("phase", len(self._phases) - 1, 0, 0))

    def enter_module(self, path: str) -> None:
        self._here.modules.append(path)

    def leave_module(self) -> None:
        if self._here.modules:
            self._here.modules.pop()

    def _module(self) -> str:
        modules = self._here.modules
        return modules[-1] if modules else ""

    def allocation_of(self, tensor: Any) -> int:
        """The index in the Trace of the allocation behind ``tensor``; -1 where there is none."""
        if type(tensor) is not SimTensor or not tensor.is_cuda:
            return -1
        found = self._live.get(tensor.untyped_storage()._cdata)
        return -1 if found is None else found.index

    def label(self, tensor: Any, bill: str, name: str = "") -> None:
        if type(tensor) is not SimTensor or not tensor.is_cuda:
            return
        found = self._live.get(tensor.untyped_storage()._cdata)
        if found is None:
            return
        allocation = self._allocations[found.index]
        if not allocation.bill or _RANK[bill] < _RANK[allocation.bill]:
            allocation.bill, allocation.name = bill, name

    def trace(self) -> Trace:
        """The events so far. Allocations are copies: later labels do not change a Trace."""
        allocations = []
        for allocation, frame in zip(self._allocations, self._frames, strict=True):
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
            events=[Event(*event) for event in self._events],  # type: ignore[arg-type]
            phases=list(self._phases),
            device=f"{self.profile.title} (simulated)",
            oom=self._oom,
            bounds=self.uncertainty.bounds(allocations, self._events),
            notes=tuple(self.notes),
        )

    def snapshot(self) -> dict[str, Any]:
        """What ``torch.cuda.memory._snapshot()`` returns, with the simulated card's history."""
        entries: list[dict[str, Any]] = []
        for kind, index, size, address in self._events:
            if kind == "phase":
                continue
            stream = 0
            frames: list[dict[str, Any]] = []
            if kind in ("alloc", "free"):
                allocation = self._allocations[index]
                size, address = allocation.requested, allocation.address
                stream = allocation.stream
                frames = self._frames_of(index)
            for action in _ACTIONS[kind]:
                entry = {"action": action, "size": size, "stream": stream, "time_us": 0}
                if kind == "oom":
                    entry["device_free"] = self._oom.free if self._oom else 0
                entries.append({**entry, "addr": address, "frames": frames})
        segments = self.allocator.segments()
        frames_at = {
            self._allocations[ref.index].address: self._frames_of(ref.index)
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
            **(host if VERSION >= (2, 14) else {}),
        }

    def _frames_of(self, index: int) -> list[dict[str, Any]]:
        """Innermost first, as PyTorch lists them: operator, module, user line."""
        allocation, frame = self._allocations[index], self._frames[index]
        frames = [{"name": allocation.operator or allocation.name, "filename": "??", "line": 0}]
        if allocation.module:
            frames.append({"name": allocation.module, "filename": "module", "line": 0})
        if frame is not None:
            code, line = frame
            frames.append({"name": code.co_name, "filename": code.co_filename, "line": line})
        return frames

    # -- what torch.cuda answers

    def shown(self) -> dict[str, Any]:
        """``torch.cuda.memory._snapshot()``."""
        snapshot = self.snapshot()
        self.answers.keep("snapshot", snapshot)
        return snapshot

    def figure(self, name: str) -> Any:
        return self.answers.figure(name)

    def segments(self) -> list[dict[str, Any]]:
        segments = self.allocator.segments()
        self.answers.keep("segments", segments)
        return segments

    def reset(self, what: str) -> None:
        """``peak``: the peaks start anew from what is; ``accumulated``: totals start at 0."""
        self.allocator.reset_peak() if what == "peak" else self.allocator.reset_accumulated()

    def pool_users(self, number: tuple[int, int]) -> int:
        return self.allocator.pool_users(number)

    def dump(self, filename: str | os.PathLike[str]) -> None:
        """``torch.cuda.memory._dump_snapshot``: a pickle for PyTorch's memory visualiser."""
        with open(filename, "wb") as file:
            pickle.dump(self.snapshot(), file)

    def attention_chosen(self, choice: Choice) -> None:
        """Which attention kernel ran, in which module, and why the others did not."""
        self.attention.append((self._module(), choice))

    # -- the books --------------------------------------------------------------------------

    def operator(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[Any],
        recipe: Recipe | None,
        on_gpu: bool,
    ) -> None:
        """Account for one operator call: its program, or its new outputs in order."""
        if self._quiet or not on_gpu:
            return
        steps = self._program(func, args, kwargs, outputs, recipe)
        if steps is not None:
            self._run(steps, outputs, func)
        for tensor in outputs:
            if type(tensor) is SimTensor:
                self._new_tensor(tensor, func)

    def _run(self, steps: Program, outputs: list[Any], func: OpOverload) -> None:
        taken: dict[str, int] = {}
        for step in steps:
            if isinstance(step, Out):
                tensor = outputs[step.index]
                if type(tensor) is SimTensor:
                    self._new_tensor(tensor, func, step.size)
                if step.span is not None and type(tensor) is SimTensor:
                    self.uncertain(tensor, step.span, func)
            elif isinstance(step, Take):
                index = -1
                if step.size:
                    index = self._allocate(step.size, func, bill="temporary", name=step.why)
                    taken[step.key] = index
                if step.span is not None:
                    self._note(step.span, index, func)
            elif isinstance(step, Give):
                if step.key in taken:
                    self._free(taken.pop(step.key))
            else:
                self._workspace(step.kind, step.size, func)
        for index in reversed(taken.values()):
            self._free(index)

    def _program(
        self, func: Any, args: Any, kwargs: Any, outputs: list[Any], recipe: Recipe | None
    ) -> Program | None:
        key = ProgramKey(self._card_key, _switches(), declarations())
        if recipe is not None and key in recipe.programs:
            return recipe.programs[key]
        flat = [out if isinstance(out, torch.Tensor) else None for out in outputs]
        steps = program(func, args, kwargs, flat, self.card)
        if steps is None and func not in RULES:
            steps = fallback(func, args, flat)
        if recipe is not None:
            recipe.programs[key] = steps
        return steps

    # -- what is not known ------------------------------------------------------------------

    def uncertain(self, tensor: SimTensor, span: Span, func: Any = None) -> None:
        """The size of ``tensor``'s storage is closed code's choice."""
        found = self._live.get(tensor.untyped_storage()._cdata)
        if found is not None:
            self._note(span, found.index, func)

    def _note(self, span: Span, index: int, func: Any) -> None:
        self.uncertainty.note(
            Unknown(
                len(self._events),
                index,
                span,
                self._name(func) if func is not None else "",
                self._module(),
                nearest_frame(),
                self._current_stream(),
            )
        )

    def _compiles(self, note: str, open_ended: bool) -> None:
        self._say(note)
        self.uncertainty.compiled(open_ended)

    def _say(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def adjust(self, name: str, *arguments: Any, **options: Any) -> None:
        """The program changes how the allocator goes on: ``empty_cache``, a memory fraction ..."""
        self._busy += 1
        try:
            getattr(self.allocator, name)(*arguments, **options)
        finally:
            self._busy -= 1
        self.uncertainty.adjusted(len(self._events), name, *arguments, **options)
        self._free_late()

    def raw_alloc(self, size: int) -> int:
        """``torch.cuda.caching_allocator_alloc``: a block without a tensor; its address."""
        index = self._allocate(int(size), None, bill="other", name="caching_allocator_alloc")
        address = self._allocations[index].address
        self._raw[address] = index
        return address

    def raw_delete(self, address: int) -> None:
        """``torch.cuda.caching_allocator_delete``."""
        if address not in self._raw:
            raise RuntimeError(f"invalid device pointer: {hex(address)}")
        self._free(self._raw.pop(address))

    def thread(self) -> str:
        """Whose library handles are used now: the program's, its threads' or the engine's."""
        return self._thread()

    def _thread(self) -> str:
        """Library handles belong to threads: the engine's own thread runs backward, and a new
        thread takes a handle that an ended one left (ATen/cuda/detail/DeviceThreadHandles.h)."""
        if torch._C._current_graph_task_id() != -1:
            return "autograd"
        thread = threading.get_ident()
        if thread not in self._handles:
            free = self._free_handles
            self._handles[thread] = free.pop() if free else f"thread {len(self._handles)}"
        return self._handles[thread]

    def _thread_ended(self) -> None:
        handle = self._handles.pop(threading.get_ident(), None)
        if handle is not None:
            self._free_handles.append(handle)

    def use_stream(self, number: int) -> None:
        """The program made a stream current in this thread."""
        here, task = self._here, torch._C._current_graph_task_id()
        if task != -1 and here.chosen_in is None:
            here.chosen_in = (task, here.stream)
        elif here.chosen_in is not None and here.chosen_in[1] == number:
            here.chosen_in = None
        here.stream = number
        here.stream_marks.append((sequence.counter(), number))

    def _current_stream(self) -> int:
        """In backward the engine runs every node on the stream where it was made (engine.cpp,
        ``evaluate_function``), which its sequence number tells; an AccumulateGrad has none, and
        was marked when backward began."""
        here = self._here
        if not here.stream_marks:
            return here.stream
        task = torch._C._current_graph_task_id()
        if task == -1 or (here.chosen_in is not None and here.chosen_in[0] == task):
            return here.stream
        node = torch._C._current_autograd_node()
        if node is not None and "AccumulateGrad" in node.name():
            here.node_stream = node.metadata.get(_STREAM, 0)  # type: ignore[attr-defined]
        elif node is not None:
            here.node_stream = here.stream_at(sequence.made_as(node))
            if torch.is_grad_enabled():
                here.mark_stream(here.node_stream)  # nodes that backward makes run there too
        return here.node_stream

    def _workspace(self, kind: str, size: int, func: OpOverload) -> None:
        key = (kind, self._thread(), self._current_stream())
        if key not in self._workspaces and size:
            self._workspaces[key] = self._allocate(
                size, func, bill="workspace", name=f"{kind} workspace ({key[1]} thread)"
            )

    def clear_workspaces(self) -> None:
        for index in self._workspaces.values():
            self._free(index)
        self._workspaces.clear()

    def _new_tensor(self, tensor: SimTensor, func: OpOverload, size: int | None = None) -> None:
        if tensor.__dict__["_fake_device"].type != "cuda":
            return
        for part in parts_of(self.mode, tensor):
            storage = part.untyped_storage()
            key, taken = storage._cdata, size or storage.nbytes()
            if taken == 0 or key in self._live:
                continue
            index = self._allocate(taken, func)
            allocation = self._allocations[index]
            allocation.shape = tuple(part.shape)
            allocation.dtype = _dtype_name(part.dtype)
            self._follow(storage, key, index)

    def _follow(self, storage: Any, key: int, index: int) -> None:
        ref = _StorageRef(storage, self._died)
        ref.index, ref.key = index, key
        self._live[key] = ref

    def _died(self, ref: _StorageRef) -> None:
        with self.mode.lock:
            if self._live.get(ref.key) is ref:
                del self._live[ref.key]
            self._free(ref.index)

    def _allocate(self, size: int, func: Any, bill: str = "", name: str = "") -> int:
        stream = self._current_stream()
        self._busy += 1
        try:
            block = self.allocator.malloc(size, stream)
        except DeviceOutOfMemory as error:
            raise self._out_of_memory(error, func) from None
        finally:
            self._busy -= 1
        index = len(self._allocations)
        self._allocations.append(
            Allocation(
                requested=size,
                block=block.size,
                address=block.address,
                stream=stream,
                bill=bill,
                name=name,
                operator=self._name(func),
                module=self._module(),
            )
        )
        self._frames.append(nearest_frame())
        self._blocks.append(block)
        self._events.append(("alloc", index, 0, 0))
        self._free_late()
        return index

    def _free(self, index: int) -> None:
        block = self._blocks[index]
        if block is None:
            return
        if self._busy:
            self._late.append(index)
            return
        self._blocks[index] = None
        self._events.append(("free", index, 0, 0))
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
            self._free(self._late.pop(0))

    def in_place(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], new: SimTensor
    ) -> None:
        """``func`` ran out of place here; on the card it writes into its first argument's block."""
        if self._quiet:
            return
        self._take_over(args[0], new)
        twin, more = inplace.TWINS[func]
        self.operator(twin, args, {**kwargs, **more}, [new], None, True)

    def _take_over(self, old: SimTensor, new: SimTensor) -> None:
        """``new`` lives in ``old``'s block from now on; the old storage's death means nothing."""
        found = self._live.get(old.untyped_storage()._cdata)
        if found is None:
            return
        index = found.index
        del self._live[found.key]
        found.index = -1
        storage = new.untyped_storage()
        self._follow(storage, storage._cdata, index)

    def _segment(self, kind: str, address: int, size: int, stream: int) -> None:
        events = {
            "segment_alloc": "segment_alloc",
            "segment_map": "segment_alloc",
            "segment_free": "segment_free",
            "segment_unmap": "segment_free",
        }
        if kind in events:
            self._events.append((events[kind], -1, size, address))

    def _out_of_memory(self, error: DeviceOutOfMemory, func: Any) -> torch.OutOfMemoryError:
        frame = nearest_frame()
        self._events.append(("oom", -1, error.requested, 0))
        message = error.message()
        self._oom = OutOfMemory(
            requested=error.requested,
            allocated=error.allocated,
            reserved=error.reserved,
            capacity=error.capacity,
            free=error.free,
            message=message,
            operator=self._name(func),
            module=self._module(),
            frame=describe(*frame) if frame else "",
            allowed=error.allowed,
        )
        return torch.OutOfMemoryError(message)

    def _name(self, func: Any) -> str:
        name = self._names.get(func)
        if name is None:
            name = "" if func is None else str(func)
            name = self._names[func] = func._schema.name if hasattr(func, "_schema") else name
        return name

    def _weight_cast(self, cast: Any, source: Any) -> None:
        self.label(cast, "autocast_cache", "autocast copy")

    def record_stream(self, tensor: SimTensor, stream: Any) -> None:
        found = self._live.get(tensor.untyped_storage()._cdata)
        block = self._blocks[found.index] if found is not None else None
        if block is not None:
            assert found is not None
            number = torch_cuda.stream_id(stream)
            self.uncertainty.adjusted(len(self._events), "record_stream", found.index, number)
            self.allocator.record_stream(block, number)

    def address_of(self, tensor: SimTensor) -> int:
        found = self._live.get(tensor.untyped_storage()._cdata)
        if found is None:
            return 0
        offset = tensor.storage_offset() * tensor.element_size()
        return self._allocations[found.index].address + offset  # type: ignore[return-value]

    def maker(self, tensor: torch.Tensor) -> str:
        """The operator that made the block in which a tensor lives; "" for none."""
        found = self._live.get(tensor.untyped_storage()._cdata)
        return self._allocations[found.index].operator if found is not None else ""

    def resized(self, storage: Any, size: int) -> None:
        """``UntypedStorage.resize_``: the old block goes, a new one comes (resizing to 0 frees)."""
        found = self._live.pop(storage._cdata, None)
        if size and found is not None:
            # resize_bytes_cuda (native/cuda/Resize.cpp) allocates before it lets the old data go
            index = self._allocate(size, torch.ops.aten.resize_.default)
            self._free(found.index)
            self._follow(storage, storage._cdata, index)
        elif found is not None:
            self._free(found.index)
        elif size:
            index = self._allocate(size, torch.ops.aten.resize_.default)
            self._follow(storage, storage._cdata, index)


assume_selected = selection.assume_selected


@contextlib.contextmanager
def simulated(profile: Profile, **options: Any) -> Iterator[Simulation]:
    """``with simulated(profile) as gpu:``: shorthand for entering a :class:`Simulation`."""
    with Simulation(profile, **options) as simulation:
        yield simulation


def _switches() -> tuple[bool, ...]:
    """What a user can turn over between two calls of one operator, and rules look at."""
    c = torch._C
    return (
        c._get_deterministic_algorithms(),
        c._get_deterministic_fill_uninitialized_memory(),
        c._get_cudnn_enabled(),
        c._get_cudnn_benchmark(),
        c._get_cudnn_deterministic(),
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

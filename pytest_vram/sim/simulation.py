"""One simulated GPU, from entering to leaving: the books of every block, and what is patched."""

from __future__ import annotations

import bisect
import contextlib
import logging
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload

from pytest_vram.frames import nearest_frame
from pytest_vram.places import here
from pytest_vram.sim import (
    composites,
    inplace,
    jagged,
    modules,
    selection,
    sequence,
    torch_cuda,
    values,
)
from pytest_vram.sim.allocator import CachingAllocator, Listener
from pytest_vram.sim.answers import Answers
from pytest_vram.sim.autocast import CastPolicy
from pytest_vram.sim.books import Books
from pytest_vram.sim.bounds import Uncertainty, Unknown
from pytest_vram.sim.device import SimMode, parts_of
from pytest_vram.sim.distributed import one_process, one_rank
from pytest_vram.sim.eager import run_eagerly
from pytest_vram.sim.files import save_and_load
from pytest_vram.sim.kernels import Card, Give, Out, Program, Span, Take, program, rule_of
from pytest_vram.sim.kernels.attention import Choice
from pytest_vram.sim.kernels.fallback import declarations, fallback
from pytest_vram.sim.kernels.versions import INSTALLED, WORKSPACE_VARIABLES, default_cudnn
from pytest_vram.sim.meta import mean_what_python_says
from pytest_vram.sim.ordinals import understand_ordinals
from pytest_vram.sim.patching import patches
from pytest_vram.sim.profiles import Profile
from pytest_vram.sim.recipes import ProgramKey, Recipe
from pytest_vram.sim.tensor_types import keep_defaults
from pytest_vram.sim.tensors import SimTensor
from pytest_vram.sim.threads import FollowedThreads
from pytest_vram.sim.traced import run_instead_of_tracing
from pytest_vram.sim.triton_kernels import skip_launches
from pytest_vram.trace import Trace

VERSION = INSTALLED

_STREAM = "pytest_vram_stream"  # in the metadata of an AccumulateGrad


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
        #: By number of the backward pass, how many allocations there were when it began.
        self.backward_begins: dict[int, int] = {}
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
        self.mode = SimMode(self)
        self.books = Books(self.mode.lock)
        self.allocator = self.books.allocator = self._allocator(self.books.segment)
        self.answers = Answers(profile, self.allocator)
        self.uncertainty = Uncertainty(self._allocator, profile.memory - profile.context)
        self._here = _OfThread()
        self._handles = {threading.get_ident(): "main"}
        self._free_handles: list[str] = []
        self.notes: list[str] = []
        self._raw: dict[int, int] = {}
        self._workspaces: dict[tuple[str, str, int], int] = {}
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
            keep_defaults(stack)
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
            run_instead_of_tracing(held)
            skip_launches(held, self._say, lambda span: self._note(span, -1, None))
            understand_ordinals(held, stack)
            mean_what_python_says(held, stack)
            one_rank(held, stack)
            one_process(held)
            save_and_load(held, self._upload)
            jagged.understood(held, self.card)
            values.trust_distributions(held)
            values.trust_values(held)
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
        self.books.phase(name, step)

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
        return self.books.index_of(tensor)

    def label(self, tensor: Any, bill: str, name: str = "") -> None:
        self.books.label(tensor, bill, name)

    def trace(self) -> Trace:
        """The events so far. Allocations are copies: later labels do not change a Trace."""
        books = self.books
        return books.trace(
            f"{self.profile.title} (simulated)",
            self.uncertainty.bounds(books.allocations, books.events),
            tuple(self.notes),
        )

    def snapshot(self) -> dict[str, Any]:
        """What ``torch.cuda.memory._snapshot()`` returns, with the simulated card's history."""
        return self.books.snapshot(VERSION)

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

    # -- operators ---------------------------------------------------------------------------

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
                    self.books.free(taken.pop(step.key))
            else:
                self._workspace(step.kind, step.size, func)
        for index in reversed(taken.values()):
            self.books.free(index)

    def _program(
        self, func: Any, args: Any, kwargs: Any, outputs: list[Any], recipe: Recipe | None
    ) -> Program | None:
        key = ProgramKey(self._card_key, _switches(), declarations())
        if recipe is not None and key in recipe.programs:
            return recipe.programs[key]
        flat = [out if isinstance(out, torch.Tensor) else None for out in outputs]
        steps = program(func, args, kwargs, flat, self.card)
        if steps is None and rule_of(func, args) is None:
            steps = fallback(func, args, flat)
        if recipe is not None:
            recipe.programs[key] = steps
        return steps

    # -- what is not known ------------------------------------------------------------------

    def uncertain(self, tensor: SimTensor, span: Span, func: Any = None) -> None:
        """The size of ``tensor``'s storage is closed code's choice."""
        index = self.books.index_of(tensor)
        if index >= 0:
            self._note(span, index, func)

    def _note(self, span: Span, index: int, func: Any) -> None:
        self.uncertainty.note(
            Unknown(
                len(self.books.events),
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
        with self.books.allocator_at_work():
            getattr(self.allocator, name)(*arguments, **options)
            self.uncertainty.adjusted(len(self.books.events), name, *arguments, **options)

    def raw_alloc(self, size: int) -> int:
        """``torch.cuda.caching_allocator_alloc``: a block without a tensor; its address."""
        index = self._allocate(int(size), None, bill="other", name="caching_allocator_alloc")
        address = self.books.allocations[index].address
        self._raw[address] = index
        return address

    def raw_delete(self, address: int) -> None:
        """``torch.cuda.caching_allocator_delete``."""
        if address not in self._raw:
            raise RuntimeError(f"invalid device pointer: {hex(address)}")
        self.books.free(self._raw.pop(address))

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
            self.books.free(index)
        self._workspaces.clear()

    def _new_tensor(self, tensor: SimTensor, func: OpOverload, size: int | None = None) -> None:
        if tensor.__dict__["_fake_device"].type != "cuda":
            return
        for part in parts_of(self.mode, tensor):
            storage = part.untyped_storage()
            taken = size or storage.nbytes()
            if taken == 0 or self.books.knows(storage):
                continue
            index = self._allocate(taken, func)
            allocation = self.books.allocations[index]
            allocation.shape = tuple(part.shape)
            allocation.dtype = _dtype_name(part.dtype)
            self.books.follow(storage, index)

    def _allocate(self, size: int, func: Any, bill: str = "", name: str = "") -> int:
        begins, task = self._here.backward_begins, torch._C._current_graph_task_id()
        if task != -1:
            begins.setdefault(task, len(self.books.allocations))
        elif begins:
            begins.clear()
        return self.books.allocate(
            size, self._current_stream(), self._name(func), self._module(), bill, name
        )

    def in_place(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], new: SimTensor
    ) -> None:
        """``func`` ran out of place here; on the card it writes into its first argument's block."""
        if self._quiet:
            return
        self.books.take_over(args[0], new)
        twin, more = inplace.TWINS[func]
        self.operator(twin, args, {**kwargs, **more}, [new], None, True)

    def _name(self, func: Any) -> str:
        name = self._names.get(func)
        if name is None:
            name = "" if func is None else str(func)
            name = self._names[func] = func._schema.name if hasattr(func, "_schema") else name
        return name

    def _weight_cast(self, cast: Any, source: Any) -> None:
        self.label(cast, "autocast_cache", "autocast copy")

    def record_stream(self, tensor: SimTensor, stream: Any) -> None:
        index = self.books.index_of(tensor)
        block = self.books.block(index) if index >= 0 else None
        if block is not None:
            number = torch_cuda.stream_id(stream)
            self.uncertainty.adjusted(len(self.books.events), "record_stream", index, number)
            self.allocator.record_stream(block, number)

    def address_of(self, tensor: SimTensor) -> int:
        index = self.books.index_of(tensor)
        if index < 0:
            return 0
        offset = tensor.storage_offset() * tensor.element_size()
        return self.books.allocations[index].address + offset  # type: ignore[return-value]

    def of_this_backward(self, tensor: torch.Tensor) -> bool:
        """Whether the backward pass that runs made the block in which a tensor lives."""
        begins = self._here.backward_begins.get(torch._C._current_graph_task_id())
        index = self.books.index_of(tensor)
        return index < 0 or (begins is not None and index >= begins)

    def maker(self, tensor: torch.Tensor) -> str:
        """The operator that made the block in which a tensor lives; "" for none."""
        index = self.books.index_of(tensor)
        return self.books.allocations[index].operator if index >= 0 else ""

    def suspend(self, on: bool) -> None:
        """Keep no books until told otherwise: what runs does not run on a card."""
        self._quiet = on

    def made_in(self, tensor: torch.Tensor) -> int:
        """The number of the autograd node in which a tensor's block was made; -1 for none."""
        return self.books.made_in(tensor)

    def resized(self, storage: Any, size: int) -> None:
        """``UntypedStorage.resize_``: the old block goes, a new one comes (resizing to 0 frees)."""
        # resize_bytes_cuda (native/cuda/Resize.cpp) allocates before it lets the old data go
        index = self._allocate(size, torch.ops.aten.resize_.default) if size else -1
        old = self.books.unfollow(storage)
        if index >= 0:
            self.books.follow(storage, index)
        if old >= 0:
            self.books.free(old)


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

"""``torch.cuda`` as the simulated card answers it.

Code that asks for capability, memory, streams, events or random state gets the profile's answers
and the simulated allocator's figures. Functions imported before the simulation began are reached
too where they look their own helpers up in their module.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import pickle
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.backends.cudnn.rnn
from torch.optim import Optimizer
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map_only

from pytest_vram.sim import pools
from pytest_vram.sim.kernels.versions import INSTALLED
from pytest_vram.sim.patching import Patches, patches
from pytest_vram.sim.tensor_types import cast_by_card_types, speak_of_card_types
from pytest_vram.sim.tensors import CUDA, SimTensor

torch_optimizer = sys.modules[Optimizer.__module__]

__all__ = ["Event", "Stream", "installed", "stream_id"]


def stream_id(stream: Any) -> int:
    """The allocator's number of a stream: 0 is the default stream."""
    return int(getattr(stream, "stream_id", 0))


#: PyTorch makes so many streams of each priority and hands them out in turn, again and again
#: (``kStreamsPerPool``, c10/cuda/CUDAStream.cpp, 2.6 to 2.14; four priorities at the most).
_STREAMS = 32
_PRIORITIES = 4


class Stream:
    """A queue of the simulated card: it only says in whose pool a block is taken."""

    _made: ClassVar[dict[int, int]] = {}  # priority -> streams handed out by this simulation

    def __init__(
        self, device: Any = None, priority: int = 0, stream_id: int | None = None, **_: Any
    ) -> None:
        if stream_id is None:
            pool = min(max(-priority, 0), _PRIORITIES - 1)
            turn = Stream._made[pool] = Stream._made.get(pool, -1) + 1
            stream_id = 1 + pool * _STREAMS + turn % _STREAMS
        self.stream_id = stream_id
        self.device = CUDA
        self.device_index = 0
        self.device_type = 1
        self.priority = priority
        self.cuda_stream = stream_id
        self._previous: list[Any] = []

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None: ...

    def __enter__(self) -> Stream:
        self._previous.append(torch.cuda.current_stream())
        torch.cuda.set_stream(self)  # type: ignore[arg-type]
        return self

    def __exit__(self, *exc: Any) -> None:
        torch.cuda.set_stream(self._previous.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash((Stream, self.stream_id))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device=cuda:0 cuda_stream={self.stream_id:#x}>"


class Event:
    """A mark in a queue; everything before it has always happened."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False,
        **_: Any,
    ) -> None:  # fmt: skip
        self.enable_timing = enable_timing
        self._when = 0.0
        self.device = CUDA
        self.event_id = id(self)

    def record(self, stream: Any = None) -> None:
        self._when = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return (end._when - self._when) * 1000.0

    def __repr__(self) -> str:
        return "<torch.cuda.Event simulated>"


class _StreamContext:
    """``torch.cuda.stream(s)``."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *exc: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__(*exc)


class _Device:
    """``torch.cuda.device(i)`` and ``device_of(t)``: there is one card."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0
        self.prev_idx = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: Any) -> None: ...


def scatter_to_one(self: Any, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
    """``torch.nn.DataParallel.scatter`` on one card: it takes the whole batch."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cuda", non_blocking=True)

    both: tuple[Any, Any] = tree_map_only(torch.Tensor, move, (inputs, kwargs or {}))
    return (both[0],), (both[1],)


def _index(device: Any) -> int:
    """The index of a named device; only ``cuda:0`` exists."""
    if device is None:
        return 0
    if not isinstance(device, int):
        device = torch.device(device)
        if device.type not in ("cuda", "meta"):  # meta: what C++ hears of the card
            raise ValueError(f"Expected a cuda device, but got: {device}")
    index = device if isinstance(device, int) else device.index or 0
    if index not in (0, -1):
        raise AssertionError("Invalid device id")
    return 0


def _pool_key(part: str) -> str | tuple[int, ...]:
    """``0_1`` of a flat key is the pool (0, 1)."""
    numbers = part.split("_")
    return tuple(map(int, numbers)) if all(one.isdigit() for one in numbers) else part


def _properties(profile: Any) -> Any:
    major, minor = profile.capability
    return types.SimpleNamespace(
        name=profile.title,
        major=major,
        minor=minor,
        total_memory=profile.memory,
        multi_processor_count=profile.multiprocessors,
        warp_size=profile.warp_size,
        max_threads_per_multi_processor=profile.threads_per_multiprocessor,
        max_threads_per_block=1024,
        regs_per_multiprocessor=profile.registers_per_multiprocessor,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=profile.shared_memory_per_block_optin,
        shared_memory_per_multiprocessor=profile.shared_memory_per_multiprocessor,
        L2_cache_size=profile.l2_cache,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
        uuid="simulated",
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
    )


@contextlib.contextmanager
def installed(simulation: Any) -> Iterator[None]:
    """Replace what the simulation answers; everything comes back on leaving."""
    with patches() as held:
        speak_for(held, simulation)
        _cudnn(held, simulation)
        _mixed_precision(held, simulation)
        _tensors(held, simulation)
        yield


def speak_for(held: Patches, card: Any) -> None:
    """Until ``held`` is undone, ``torch.cuda`` and ``torch.accelerator`` answer for ``card``: a
    Simulation, or a :class:`~pytest_vram.sim.answers.CardOfAnswers`."""
    _device_queries(held, card)
    _memory(held, card)
    _streams(held, card)
    _random(held)
    _accelerator(held)
    speak_of_card_types(held)
    held.set(torch.nn.DataParallel, "scatter", scatter_to_one)
    held.replace(torch.cuda.amp.common, amp_definitely_not_available=lambda: False)


def _bfloat16_supported(in_hardware: bool) -> Any:
    """``torch.cuda.is_bf16_supported``: an older card is asked to hold a number, once
    (torch/cuda/__init__.py, v2.6.0, v2.14.1)."""

    @functools.cache
    def held() -> bool:
        return bool(torch.tensor([1.0], dtype=torch.bfloat16, device="cuda").numel())

    return lambda including_emulation=True: in_hardware or (including_emulation and held())


def _device_queries(held: Patches, simulation: Any) -> None:
    profile = simulation.profile
    properties = _properties(profile)
    nothing = lambda *a, **k: None  # noqa: E731
    held.replace(
        torch.cuda,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        _device_count_nvml=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: _index(device) and None,
        device=_Device,
        device_of=_Device,
        init=nothing,
        _lazy_init=nothing,
        _lazy_call=lambda function, **_: function(),
        synchronize=nothing,
        ipc_collect=nothing,
        _sleep=nothing,
        get_device_name=lambda device=None: _index(device) or profile.title,
        get_device_capability=lambda device=None: _index(device) or profile.capability,
        get_device_properties=lambda device=None: _index(device) or properties,
        can_device_access_peer=lambda *a: False,
        get_arch_list=lambda: [f"sm_{profile.sm}"],
        get_gencode_flags=lambda: "",
        is_bf16_supported=_bfloat16_supported(profile.capability[0] >= 8),
        is_tf32_supported=lambda: profile.capability[0] >= 8,
        set_sync_debug_mode=nothing,
        get_sync_debug_mode=lambda: 0,
        current_blas_handle=lambda: 0,
        utilization=lambda device=None: 0,
        memory_usage=lambda device=None: 0,
        temperature=lambda device=None: 0,
        power_draw=lambda device=None: 0,
        clock_rate=lambda device=None: 0,
        device_memory_used=lambda device=None: profile.memory
        - simulation.figure("mem_get_info")[0],
    )  # fmt: skip
    held.replace(
        torch._C,
        _cuda_getDevice=lambda: 0,
        _cuda_setDevice=nothing,
        _cuda_clearCublasWorkspaces=simulation.clear_workspaces,
    )
    pools.install(held, simulation)
    nvtx = torch.cuda.nvtx
    held.replace(
        nvtx,
        range_push=lambda msg: 0,
        range_pop=lambda: 0,
        range_start=lambda msg: 0,
        range_end=nothing,
        mark=nothing,
        range=lambda *a, **k: contextlib.nullcontext(),
    )


def _cudnn(held: Patches, simulation: Any) -> None:
    """cuDNN of the simulated card: there, and of the version that the wheels bring."""
    module = torch.backends.cudnn
    held.replace(
        getattr(module, "m", module),  # behind the object that serves its switches as properties
        is_available=lambda: True,
        version=lambda: simulation.card.cudnn_version,
        _init=lambda: True,
    )
    held.replace(torch, _use_cudnn_rnn_flatten_weight=lambda: True)
    modes = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}  # cudnnRNNMode_t
    held.replace(torch.backends.cudnn.rnn, get_cudnn_mode=lambda mode: modes[mode])
    limit = [10]

    def set_limit(value: int) -> None:
        limit[0] = value

    if not torch._C._has_cudnn:  # what torch.backends.cudnn.flags() asks of a build that has it
        held.set(torch._C, "_cuda_get_cudnn_benchmark_limit", lambda: limit[0])
        held.set(torch._C, "_cuda_set_cudnn_benchmark_limit", set_limit)


def _memory(held: Patches, simulation: Any) -> None:
    def figure(name: str) -> Any:
        return lambda: simulation.figure(name)

    def dump(filename: Any = "dump_snapshot.pickle", **_: Any) -> None:
        with open(filename, "wb") as file:
            pickle.dump(simulation.shown(), file)

    def reset(what: str) -> Any:
        return lambda: simulation.reset(what)

    def nested(device: Any = None) -> dict[str, Any]:
        _index(device)
        tree: dict[str, Any] = {}
        if INSTALLED >= (2, 13):
            tree["reserved_bytes_by_private_pools"] = {}
        for key, value in simulation.figure("memory_stats").items():
            node: dict[Any, Any] = tree
            *path, last = key.split(".")
            for part in path:
                node = node.setdefault(_pool_key(part), {})
            node[last] = value
        return tree

    def stats(device: Any = None) -> Any:
        _index(device)
        return collections.OrderedDict(sorted(simulation.figure("memory_stats").items()))

    def reading(read: Any) -> Any:
        return lambda device=None: _index(device) or read()

    def old(name: str, function: Any) -> Any:
        def call(device: Any = None) -> Any:
            warnings.warn(f"torch.cuda.{name} is deprecated", FutureWarning, stacklevel=2)
            return function()

        return call

    fractions = [1.0]

    def set_fraction(fraction: float, device: Any = None) -> None:
        _index(device)
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        fractions[0] = fraction
        simulation.adjust("set_memory_fraction", fraction)

    functions: dict[str, Any] = {
        "memory_stats": stats,
        "memory_stats_as_nested_dict": nested,
        "memory_allocated": reading(figure("allocated")),
        "max_memory_allocated": reading(figure("peak_allocated")),
        "memory_reserved": reading(figure("reserved")),
        "max_memory_reserved": reading(figure("peak_reserved")),
        "memory_cached": old("memory_cached", figure("reserved")),
        "max_memory_cached": old("max_memory_cached", figure("peak_reserved")),
        "reset_peak_memory_stats": reading(reset("peak")),
        "reset_accumulated_memory_stats": reading(reset("accumulated")),
        "reset_max_memory_allocated": old("reset_max_memory_allocated", reset("peak")),
        "reset_max_memory_cached": old("reset_max_memory_cached", reset("peak")),
        "empty_cache": lambda: simulation.adjust("empty_cache"),
        "mem_get_info": reading(figure("mem_get_info")),
        "memory_snapshot": lambda *a, **k: simulation.segments(),
        "list_gpu_processes": lambda device=None: "no processes are running",
        "set_per_process_memory_fraction": set_fraction,
        "get_per_process_memory_fraction": reading(lambda: fractions[0]),
        "_record_memory_history": lambda *a, **k: None,
        "_snapshot": lambda device=None, **k: simulation.shown(),
        "_dump_snapshot": dump,
        "_set_allocator_settings": lambda conf: simulation.adjust("configure", conf),
        "get_allocator_backend": lambda: "native",
    }
    held.replace(torch.cuda.memory, **functions)
    held.replace(torch.cuda, **functions)


def _streams(held: Patches, simulation: Any) -> None:
    held.set(Stream, "_made", {})
    default = Stream(stream_id=0)
    current = threading.local()  # every thread has its own current stream

    def set_stream(stream: Any) -> None:
        if stream is not None:
            current.stream = stream
            simulation.use_stream(stream_id(stream))

    functions: dict[str, Any] = {
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "StreamContext": _StreamContext,
        "stream": _StreamContext,
        "current_stream": lambda device=None: getattr(current, "stream", default),
        "default_stream": lambda device=None: default,
        "set_stream": set_stream,
    }
    held.replace(torch.cuda, **functions)
    held.replace(torch.cuda.streams, Stream=Stream, Event=Event)
    held.replace(torch, Event=Event, Stream=Stream)
    held.set(torch.Tensor, "record_stream", functools.partialmethod(_record_stream, simulation))


_RECORD_STREAM = torch.Tensor.record_stream


def _record_stream(self: torch.Tensor, simulation: Any, stream: Any) -> None:
    """C++ takes only streams of its own."""
    if isinstance(self, SimTensor):
        simulation.record_stream(self, stream)
    else:
        _RECORD_STREAM(self, stream)


def _random(held: Patches) -> None:
    state = [torch.zeros(16, dtype=torch.uint8)]
    seed = [0]

    def set_state(new_state: Any, device: Any = None) -> None:
        state[0] = new_state

    def manual_seed(value: int) -> None:
        seed[0] = int(value)

    functions: dict[str, Any] = {
        "get_rng_state": lambda device="cuda": state[0].clone(),
        "get_rng_state_all": lambda: [state[0].clone()],
        "set_rng_state": set_state,
        "set_rng_state_all": lambda states: set_state(states[0]) if states else None,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "seed": lambda: None,
        "seed_all": lambda: None,
        "initial_seed": lambda: seed[0],
    }
    held.replace(torch.cuda.random, **functions)
    held.replace(torch.cuda, **functions)
    generator = torch.Generator

    class Kind(type(generator)):  # type: ignore[misc]
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, generator)

    class Generator(generator, metaclass=Kind):  # type: ignore[misc, valid-type]
        """A generator of the simulated card is the host's: it holds no device memory."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return generator.__new__(generator, device="cpu")  # type: ignore[call-arg]

    held.set(torch, "Generator", Generator)


def _mixed_precision(held: Patches, simulation: Any) -> None:
    leave = torch.autocast.__exit__

    def leaving(self: Any, *exc: Any) -> Any:
        # the outermost region clears C++'s cache of weight copies; ours goes with it
        before = torch.is_autocast_enabled("cuda")
        result = leave(self, *exc)
        if before:
            if torch.autocast_increment_nesting() == 1:
                simulation.policy.clear()
            torch.autocast_decrement_nesting()
        return result

    held.set(torch.autocast, "__exit__", leaving)
    clear = torch.clear_autocast_cache

    def clear_cache() -> None:
        simulation.policy.clear()
        clear()

    held.set(torch, "clear_autocast_cache", clear_cache)
    for module in (_foreach_utils, torch_optimizer):
        known = getattr(module, "_foreach_supported_types", None)
        if known is not None:
            held.set(module, "_foreach_supported_types", [*known, SimTensor])
    fake = torch._subclasses.fake_tensor
    held.replace(fake, init_gpu_context=lambda *a, **k: None)


def _accelerator(held: Patches) -> None:
    module = getattr(torch, "accelerator", None)
    if module is None:
        return
    cuda = torch.cuda
    held.replace(
        module,
        is_available=lambda: True,
        device_count=lambda: 1,
        current_accelerator=lambda check_available=False: torch.device("cuda"),
        current_device_index=lambda: 0,
        current_device_idx=lambda: 0,
        set_device_index=lambda device: None,
        set_device_idx=lambda device: None,
        current_stream=lambda device=None: cuda.current_stream(),
        set_stream=lambda stream: cuda.set_stream(stream),
        synchronize=lambda device=None: None,
        get_device_capability=lambda device=None: {},
        empty_cache=lambda: cuda.empty_cache(),
        memory_stats=lambda device=None: cuda.memory_stats(),
        memory_allocated=lambda device=None: cuda.memory_allocated(),
        max_memory_allocated=lambda device=None: cuda.max_memory_allocated(),
        memory_reserved=lambda device=None: cuda.memory_reserved(),
        max_memory_reserved=lambda device=None: cuda.max_memory_reserved(),
        reset_peak_memory_stats=lambda device=None: cuda.reset_peak_memory_stats(),
        reset_accumulated_memory_stats=lambda device=None: cuda.reset_accumulated_memory_stats(),
        get_memory_info=lambda device=None: cuda.mem_get_info(),
    )


def _tensors(held: Patches, simulation: Any) -> None:
    """Methods that C++ serves before anything is dispatched."""

    def pin_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    held.set(torch.Tensor, "pin_memory", pin_memory)
    cast_by_card_types(held)
    resize = torch.UntypedStorage.resize_

    def resize_storage(self: Any, size: int) -> Any:
        if self.device.type != "meta":
            return resize(self, size)
        result = resize(self, size)
        simulation.resized(self, int(size))
        return result

    held.set(torch.UntypedStorage, "resize_", resize_storage)
    # Libraries take fake tensors for a compiler's tracing and then avoid reading values (e.g.
    # transformers' is_tracing); a card is no tracer. PyTorch itself uses the class's own module.
    held.set(torch._subclasses, "FakeTensor", _NotATracer)
    group = torch._C._group_tensors_by_device_and_dtype

    def group_by_device(*args: Any, **kwargs: Any) -> Any:
        # C++ groups by what simulated tensors answer to C++
        return {
            (CUDA if device is not None and device.type == "meta" else device, dtype): group_
            for (device, dtype), group_ in group(*args, **kwargs).items()
        }

    held.replace(torch._C, _group_tensors_by_device_and_dtype=group_by_device)


class _NotATracer:
    """What ``torch._subclasses.FakeTensor`` is while a simulation lasts: nothing is one."""

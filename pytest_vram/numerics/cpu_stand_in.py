"""The CPU in the GPU's place: a test body written for CUDA runs for real where there is no GPU.

Inside :class:`CpuStandIn` the device ``cuda`` means the CPU. Tensors that were sent there say so
(``x.device``, ``x.is_cuda``), ``torch.cuda`` says what the simulated card said
(:mod:`pytest_vram.sim.answers`), and ``torch.autocast("cuda")`` casts on the CPU by CUDA's policy
(:mod:`pytest_vram.sim.autocast`): layer_norm in fp32, ``binary_cross_entropy`` refused.
Values are then those of the CPU's kernels in the dtypes of a GPU; products of 16-bit types that the
host is slow at go through float32 (:mod:`pytest_vram.numerics.half_products`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from pytest_vram.frames import user_line
from pytest_vram.numerics.half_products import ThroughFloat32, slow_types
from pytest_vram.sim import torch_cuda
from pytest_vram.sim.allocator import CachingAllocator
from pytest_vram.sim.answers import Answers, CardOfAnswers
from pytest_vram.sim.autocast import CastPolicy
from pytest_vram.sim.distributed import one_rank
from pytest_vram.sim.eager import run_eagerly
from pytest_vram.sim.files import load_elsewhere
from pytest_vram.sim.patching import Patches, patches
from pytest_vram.sim.profiles import find_profile
from pytest_vram.sim.tensor_types import card_dtype, keep_defaults, name_on_card
from pytest_vram.sim.threads import FollowedThreads
from pytest_vram.sim.values import NoSimulatedKernel

#: The mark on tensors that are "on the GPU". Not a subclass: type(x) is what the user expects.
_MARK = "_vram_on_cuda"
_CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")


class CpuStandIn(TorchFunctionMode):
    """Context manager; everything is undone on exit, also after exceptions. ``answers``: those of
    the simulated pass (default: those of an empty card)."""

    def __init__(self, answers: Answers | None = None) -> None:
        super().__init__()
        if answers is None:
            profile = find_profile("a100-80gb")
            answers = Answers(profile, CachingAllocator(profile.memory, context=profile.context))
        self._card = CardOfAnswers(answers)
        self._stack = contextlib.ExitStack()
        self.policy: CastPolicy | None = None
        self.over = False
        self.default_is_cuda = False  # torch.set_default_device("cuda")

    def __enter__(self) -> CpuStandIn:
        # Every optimizer imports Dynamo, whose rules name torch.cuda's own functions: not ours.
        import torch._dynamo  # noqa: F401

        keep_defaults(self._stack)
        held = self._stack.enter_context(patches())
        try:
            self.policy = CastPolicy("AutocastCPU", "cpu")
            self._stack.callback(self.policy.close)
            _patch_cuda(held, self._card)
            self._stack.callback(self._card.follow_steps())
            run_eagerly(held, self._stack, lambda note, open_ended: None)
            load_elsewhere(held, lambda tensor: tensor.to("cuda"))
            # DataLoader pins batches in a thread of its own, which no mode reaches
            held.set(Tensor, "pin_memory", lambda self, *args, **kwargs: self)
            _patch_default_device(held, self)
            FollowedThreads(held, self.in_thread)
            one_rank(held, self._stack)  # a CPU has no NCCL, and the other ranks are not there
            held.set(nn.Parameter, "__new__", _marking_parameter(nn.Parameter.__new__))
            _patch_autocast(held, self.policy, self._stack)
            self._stack.enter_context(_fast_products())
            super().__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, tb)  # type: ignore[no-untyped-call]
        self.over = True
        self._stack.close()

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[None]:
        """The mode in another thread than the one that entered it."""
        stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if self.over or self in stack:
            yield
            return
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            with _fast_products():
                yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.over:  # a thread that was started inside and goes on
            return func(*args, **kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs)
        device = kwargs.get("device")
        onto_gpu = _is_cuda(device) or type(device) is int
        if onto_gpu:
            kwargs = {**kwargs, "device": _CPU}
        elif self.default_is_cuda and device is None and func in _device_constructors():
            onto_gpu = True
        result = func(*args, **kwargs)
        if onto_gpu or _any_marked(args) or (kwargs and _any_marked(kwargs.values())):
            _mark(result)
        return result


def _fast_products() -> contextlib.AbstractContextManager[object]:
    slow = slow_types()
    return ThroughFloat32(slow) if slow else contextlib.nullcontext()


# ---- marks


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


def on_the_cpu() -> bool:
    """Whether a CPU stands in for the GPU now."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, CpuStandIn) for mode in modes)


def on_cuda(tensor: Tensor) -> bool:
    return _MARK in tensor.__dict__


def _any_marked(values: Any) -> bool:
    for value in values:
        if isinstance(value, Tensor):
            if _MARK in value.__dict__:
                return True
        elif isinstance(value, (list, tuple)) and value and _any_marked(value):
            return True
    return False


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        value.__dict__[_MARK] = True
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _mark(inner)
    return value


def _unmarked_copy(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    copy.__dict__.pop(_MARK, None)
    return copy


def _marking_parameter(new: Any) -> Any:
    """``Parameter(data)`` makes a new tensor in C++, which no mode sees."""

    def __new__(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:  # noqa: N807
        parameter = new(cls, data, requires_grad)
        if isinstance(data, Tensor) and on_cuda(data):
            _mark(parameter)
        return parameter

    return staticmethod(__new__)


# ---- functions that speak of devices


def _to(func: Any, args: Any, kwargs: Any) -> Any:
    """``Tensor.to``: a move between host and card copies, a cast on the same side does not."""
    tensor, rest = args[0], list(args[1:])
    marked = on_cuda(tensor)
    target: bool | None = None
    for place, value in enumerate(rest):
        if isinstance(value, Tensor):
            target = on_cuda(value)
        elif _is_cuda(value) or (place == 0 and isinstance(value, int)):
            target, rest[place] = True, _CPU
        elif isinstance(value, (str, torch.device)):
            target = False
    device = kwargs.get("device")
    if _is_cuda(device) or isinstance(device, int):
        target, kwargs = True, {**kwargs, "device": _CPU}
    elif device is not None:
        target = False
    if isinstance(kwargs.get("other"), Tensor):
        target = on_cuda(kwargs["other"])
    result = func(tensor, *rest, **kwargs)
    if target is None:
        target = marked
    if target != marked and result is tensor:
        result = _unmarked_copy(tensor)
    return _mark(result) if target else _without_mark(result)


def _without_mark(tensor: Tensor) -> Tensor:
    tensor.__dict__.pop(_MARK, None)
    return tensor


def _cuda(func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    return tensor if on_cuda(tensor) else _mark(_unmarked_copy(tensor))


def _cpu(func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    return _unmarked_copy(tensor) if on_cuda(tensor) else tensor


def _device(func: Any, args: Any, kwargs: Any) -> Any:
    return _CUDA if on_cuda(args[0]) else func(*args, **kwargs)


def _tensor_is_cuda(func: Any, args: Any, kwargs: Any) -> Any:
    return on_cuda(args[0]) or func(*args, **kwargs)


def _tensor_is_cpu(func: Any, args: Any, kwargs: Any) -> Any:
    return not on_cuda(args[0]) and func(*args, **kwargs)


def _get_device(func: Any, args: Any, kwargs: Any) -> Any:
    return 0 if on_cuda(args[0]) else func(*args, **kwargs)


def _pin_memory(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


def _is_pinned(func: Any, args: Any, kwargs: Any) -> Any:
    return False


def _set_data(func: Any, args: Any, kwargs: Any) -> Any:
    """``parameter.data = value``: how ``Module.to`` moves a model."""
    result = func(*args, **kwargs)
    _mark(args[0]) if on_cuda(args[1]) else _without_mark(args[0])
    return result


def _plain(func: Any, args: Any, kwargs: Any) -> Any:
    """Functions without a tensor result that must not pay for the search for marks."""
    return func(*args, **kwargs)


def _type(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.type(torch.cuda.FloatTensor)``, ``x.type("torch.FloatTensor")`` and ``x.type()``."""
    tensor, marked = args[0], on_cuda(args[0])
    wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
    if wanted is None:
        name: str = func(tensor)
        return name_on_card(name) if marked else name
    dtype = card_dtype(wanted)
    if dtype is not None:
        return _to(Tensor.to, (tensor, _CUDA, dtype), {})
    result = func(*args, **kwargs)
    if isinstance(wanted, torch.dtype):
        return _mark(result) if marked else result
    return _without_mark(_unmarked_copy(tensor) if result is tensor and marked else result)


_SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    Tensor.to: _to,
    Tensor.cuda: _cuda,
    Tensor.cpu: _cpu,
    Tensor.device.__get__: _device,
    Tensor.is_cuda.__get__: _tensor_is_cuda,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: _tensor_is_cpu,  # type: ignore[attr-defined]
    Tensor.get_device: _get_device,
    Tensor.pin_memory: _pin_memory,
    Tensor.is_pinned: _is_pinned,
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.type: _type,
    Tensor.shape.__get__: _plain,  # type: ignore[attr-defined]
    Tensor.dtype.__get__: _plain,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__: _plain,  # type: ignore[attr-defined]
    Tensor.grad_fn.__get__: _plain,  # type: ignore[union-attr]
    Tensor.size: _plain,
    Tensor.dim: _plain,
    Tensor.item: _plain,
    Tensor.backward: _plain,
}


# ---- torch.cuda


class _NoGraph:
    """``torch.cuda.CUDAGraph``: a CPU records nothing that it could replay."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NoSimulatedKernel(f"torch.cuda.CUDAGraph at {user_line()}: a CPU replays no graphs")


def _patch_cuda(held: Patches, card: CardOfAnswers) -> None:
    torch_cuda.speak_for(held, card)
    held.replace(torch.cuda, CUDAGraph=_NoGraph)
    held.replace(torch.cuda.graphs, CUDAGraph=_NoGraph)
    # A build with cuDNN would lay out the weights of an RNN, which look like CUDA's, with it
    # (torch/nn/modules/rnn.py, flatten_parameters); they lie on the CPU.
    held.replace(torch, _use_cudnn_rnn_flatten_weight=lambda: False)
    # Its arguments are parsed before any mode is asked.
    held.set(Tensor, "record_stream", lambda *args: None)


def _patch_default_device(held: Patches, stand_in: CpuStandIn) -> None:
    put, get = torch.set_default_device, torch.get_default_device

    def set_default_device(device: Any) -> None:
        stand_in.default_is_cuda = _is_cuda(device)
        put(None if stand_in.default_is_cuda else device)

    def get_default_device() -> torch.device:
        return _CUDA if stand_in.default_is_cuda else get()

    held.replace(
        torch, set_default_device=set_default_device, get_default_device=get_default_device
    )


# ---- autocast


def _patch_autocast(held: Patches, policy: CastPolicy, stack: contextlib.ExitStack) -> None:
    """The ``cuda`` switch of autocast becomes the CPU's, whose kernels follow CUDA's policy."""
    dtype = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
    stack.callback(torch.set_autocast_dtype, "cpu", dtype)

    def onto_cpu(name: str) -> None:
        original = getattr(torch, name)

        def redirected(device_type: str = "cuda", *args: Any) -> Any:
            if isinstance(device_type, bool):  # set_autocast_enabled(enabled), the old form
                return original("cpu", device_type)
            return original("cpu" if _is_cuda(device_type) else device_type, *args)

        held.set(torch, name, redirected)

    for name in (
        "is_autocast_enabled",
        "set_autocast_enabled",
        "get_autocast_dtype",
        "set_autocast_dtype",
    ):
        onto_cpu(name)
    get, put = torch.get_autocast_dtype, torch.set_autocast_dtype
    held.replace(
        torch,
        get_autocast_gpu_dtype=lambda: get("cuda"),
        set_autocast_gpu_dtype=lambda value: put("cuda", value),
    )
    # torch/amp/autocast_mode.py binds this one to its own name.
    held.replace(torch.amp.autocast_mode, is_autocast_available=lambda device_type: True)
    clear = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        policy.clear()
        clear()

    held.set(torch, "clear_autocast_cache", clear_autocast_cache)

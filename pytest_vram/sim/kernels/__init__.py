"""Kernel scratch: the allocator calls that PyTorch's CUDA host code makes inside one operator.

An operator without a rule allocates its outputs in order and nothing else. Every other operator
has a rule: a small function that yields, in the order of the host code, its allocator calls.
Rules look only at shapes, strides and dtypes (plus the process's own switches, such as
``torch.are_deterministic_algorithms_enabled()``), so they accept fake and meta tensors alike.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from pytest_vram.sim.kernels import versions
from pytest_vram.sim.profiles import Profile


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of ``part`` that code which cannot be read decides: at least ``low``, at most ``high``
    (``None``: no upper end is known). What a step simulates lies between them; ``why`` is the
    reason, for a report."""

    part: str
    why: str
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Take:
    """Scratch of ``size`` bytes begins to live. ``why`` names it for the reader of a report.
    ``span`` is set where the size is closed code's choice; such scratch may have a size of 0."""

    key: str
    size: int
    why: str
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Give:
    """The scratch taken under ``key`` dies."""

    key: str


@dataclass(frozen=True, slots=True)
class Out:
    """The storage of ``outputs[index]`` is allocated now, unless it already lives (in-place and
    ``out=`` variants, aliases) or is empty. ``size`` is set where the storage is larger than the
    tensor needs: a result that was made large and then shrunk. ``span`` as in :class:`Take`."""

    index: int
    size: int | None = None
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class Workspace:
    """A buffer that a library handle keeps per (thread, stream, kind): the device allocates it at
    the first such step and never again."""

    kind: str
    size: int


Step = Take | Give | Out | Workspace
Program = tuple[Step, ...]
Outputs = Sequence[Tensor | None]  #: the operator's results, flattened, in order
Rule = Callable[[tuple[Any, ...], dict[str, Any], Outputs, "Card"], Iterable[Step] | None]


@dataclass(frozen=True, slots=True)
class Card:
    """What a rule knows about the device and the library: ``Card(profile, (2, 13))``.

    ``cublas_workspace`` and ``cublaslt_workspace`` are bytes; left out, they are what PyTorch
    would read from the environment.
    """

    profile: Profile
    torch: tuple[int, int]
    cublas_workspace: int = -1
    cublaslt_workspace: int = -1
    cudnn_version: int = 92000
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.cublas_workspace < 0:
            size = versions.cublas_workspace(self.profile.capability, self.torch)
            object.__setattr__(self, "cublas_workspace", size)
        if self.cublaslt_workspace < 0:
            size = versions.cublaslt_workspace(self.profile.capability, self.torch)
            object.__setattr__(self, "cublaslt_workspace", size)


#: One rule per overload. Filled by the modules of this package through :func:`rule`.
RULES: dict[OpOverload, Rule] = {}


def rule(*overloads: OpOverload | str) -> Callable[[Rule], Rule]:
    """Register a rule for ``overloads``; a string names one that only some versions of torch have:
    ``"aten::_fused_rms_norm"`` (``.default``) or ``"aten::var.correction"``."""

    def register(function: Rule) -> Rule:
        for overload in overloads:
            found = versions.overload(overload) if isinstance(overload, str) else overload
            if found is not None:
                RULES[found] = function
        return function

    return register


def rule_of(func: OpOverload, args: tuple[Any, ...]) -> Rule | None:
    """The rule of an operator, if there is one; rules were read from the kernels of strided
    tensors, and operands of other layouts have kernels of their own."""
    found = RULES.get(func)
    if found is not None and any(
        isinstance(one, Tensor) and one.layout is not torch.strided for one in args
    ):
        return None
    return found


def program(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Outputs,
    card: Card,
) -> Program | None:
    """The ordered allocator calls of one operator call; ``None``: its outputs in order, no more.

    ``outputs`` are the flattened results, ``None`` where the operator returned no tensor.
    """
    found = rule_of(func, args)
    if found is None:
        return None
    steps = found(args, kwargs, outputs, card)
    return None if steps is None else tuple(steps)


def moment(span: Span, key: str = "closed") -> Iterator[Step]:
    """Scratch of one library call of which only a span is known; nothing is simulated."""
    if span.high != 0:
        yield Take(key, 0, span.part, span)
        yield Give(key)


def outs(outputs: Outputs) -> Iterator[Out]:
    """All outputs in order: what most rules end or begin with."""
    for index, output in enumerate(outputs):
        if output is not None:
            yield Out(index)


def scratch(size: int, why: str, key: str = "scratch") -> Iterator[Step]:
    """Scratch that nothing else is allocated beside: taken and given back at once."""
    if size > 0:
        yield Take(key, size, why)
        yield Give(key)


def filled_resize(itemsize: int) -> Iterator[Step]:
    """In deterministic mode a resized tensor's new memory is filled through a view that begins as
    a scalar of its own (``fill_resize_deterministic_``, ATen/native/Resize.cpp)."""
    if (
        torch.are_deterministic_algorithms_enabled()
        and torch._C._get_deterministic_fill_uninitialized_memory()
    ):
        yield from scratch(itemsize, "scalar that becomes a view of new memory")


def resized_result(outputs: Outputs) -> Iterator[Step]:
    """The one result, made empty and then resized, as ``index_select`` does."""
    yield Out(0)
    result = outputs[0]
    if result is not None and result.numel():
        yield from filled_resize(result.element_size())


def size_of(tensor: Tensor) -> int:
    """Bytes of a fresh contiguous tensor of this shape and dtype."""
    return int(tensor.numel()) * int(tensor.element_size())


def argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any = None
) -> Any:
    """An argument of the call, given by position or by name."""
    return args[index] if len(args) > index else kwargs.get(name, default)


# Every module of this package registers its rules when it is imported; they import the names above.
for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

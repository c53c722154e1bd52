"""CUDA's autocast policy as Python kernels, read from the installed PyTorch itself.

C++ autocast asks a tensor ``is_cuda()``; simulated tensors answer ``meta`` there (see
:mod:`pytest_vram.sim.device`), so its kernels would leave every operand alone. The same policy is
registered from Python for as long as a simulation lasts. The numerics run on the CPU registers it
for ``AutocastCPU``, so that a CPU checks the dtypes that a GPU would use.

The lists come from the macros ``AT_FORALL_*`` of ``ATen/autocast_mode.h``, which every PyTorch
wheel ships: a PyTorch that changes a policy changes the simulation with it (2.12 put ``rms_norm``
on the fp32 list; 2.6 does not have it).
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from pytest_vram.sim.kernels import versions

#: ``binary_cross_entropy`` raises under CUDA autocast (autocast_mode.cpp,
#: ``binary_cross_entropy_banned``).
BANNED: tuple[str, ...] = ("binary_cross_entropy",)

#: Registered for CUDA beside the macros (autocast_mode.cpp,
#: ``TORCH_LIBRARY_IMPL(aten, AutocastCUDA)``).
LOWER_PRECISION_EXTRA: tuple[str, ...] = (
    "cudnn_convolution",
    "cudnn_convolution_transpose",
)

BANNED_MESSAGE = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_"
    "logits\nor torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits "
    "are\nsafe to autocast."
)


def _header() -> str:
    path = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RuntimeError(
            f"the autocast policy of torch {torch.__version__} cannot be read: {path} is missing; "
            "install PyTorch from a wheel that ships its headers"
        ) from error


@functools.lru_cache(maxsize=1)
def policies() -> dict[str, tuple[str, ...]]:
    """Operator names (``pow.Tensor_Scalar``) per policy of the installed PyTorch.

    Keys: ``lower_precision``, ``fp32``, ``fp32_set_opt_dtype``, ``fp32_append_dtype``, ``promote``,
    ``banned``.
    """
    text = _header()

    def macro(name: str) -> str:
        found = re.search(rf"#define {name}\(_\)(.*?)\n(?=#|\n)", text, re.S)
        return found.group(1) if found else ""

    def names(body: str) -> tuple[str, ...]:
        pairs = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body)
        return tuple(f"{base}.{overload}" if overload else base for base, overload in pairs)

    appended = re.findall(r'"(norm\.\w+)"', macro("AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE"))
    return {
        "lower_precision": names(macro("AT_FORALL_LOWER_PRECISION_FP")) + LOWER_PRECISION_EXTRA,
        "fp32": names(macro("AT_FORALL_FP32")),
        "fp32_set_opt_dtype": names(macro("AT_FORALL_FP32_SET_OPT_DTYPE")),
        "fp32_append_dtype": tuple(appended),
        "promote": names(macro("AT_FORALL_PROMOTE")),
        "banned": BANNED,
    }


def operators(names: Iterable[str]) -> list[tuple[str, Any]]:
    """The overloads that exist in the installed PyTorch, with their qualified names."""
    found = []
    for name in names:
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None)
        operator = getattr(packet, overload or "default", None) if packet is not None else None
        if operator is not None:
            found.append((name, operator))
    return found


class CastPolicy:
    """One registration of the policy for one autocast key; undone by :meth:`close`.

    ``on_cast(cast, source)`` is told about every low-precision copy that enters the weight cache.
    The cache follows ``cached_cast`` of autocast_mode.cpp: fp32 leaves that require grad and are
    no views, cast to the autocast dtype, until :meth:`clear`.
    """

    def __init__(
        self, key: str, device_type: str, on_cast: Callable[[Any, Any], None] | None = None
    ) -> None:
        self.key, self.device_type, self.on_cast = key, device_type, on_cast
        self._below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        self._cache: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._register()

    def close(self) -> None:
        """Give the operators their own kernels back."""
        self._cache.clear()
        if self._library is not None:
            self._library._destroy()  # type: ignore[no-untyped-call]
            self._library = None

    def clear(self) -> None:
        """Drop the weight cache, as leaving the outermost autocast region does."""
        self._cache.clear()

    # -- casting ----------------------------------------------------------------------------

    def eligible(self, value: Any) -> bool:
        """``is_eligible`` of autocast_mode.h: a floating tensor of this device, not double."""
        return (
            isinstance(value, torch.Tensor)
            and value.dtype.is_floating_point
            and value.dtype is not torch.float64
            and _device_type(value) == self.device_type
        )

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """``cached_cast``: tensors and lists of tensors; everything else is returned as it is."""
        if isinstance(value, torch.Tensor):
            if value.dtype is dtype or not self.eligible(value):
                return value
            return self._cast_tensor(value, dtype)
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return [self.cast(item, dtype) for item in value]
        return value

    def _cast_tensor(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        cacheable = (
            value.dtype is torch.float32
            and value.requires_grad
            and value.is_leaf
            and torch.is_autocast_cache_enabled()
            and dtype is torch.get_autocast_dtype(self.device_type)
            and not value._is_view()
            and not (CASTS_SERVE_GRADIENTS and torch.is_inference_mode_enabled())
        )
        if not cacheable:
            return value.to(dtype)
        known = self._cache.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]  # type: ignore[no-any-return]
        with torch.set_grad_enabled(torch.is_grad_enabled() or CASTS_SERVE_GRADIENTS):
            cast = value.to(dtype)
        self._cache[id(value)] = (weakref.ref(value), cast)
        if self.on_cast is not None:
            self.on_cast(cast, value)
        return cast

    # -- registration -----------------------------------------------------------------------

    def _register(self) -> None:
        table = policies()
        kinds: dict[str, Callable[[Any], Callable[..., Any]]] = {
            "lower_precision": self._lower,
            "fp32": self._fp32,
            "fp32_set_opt_dtype": self._set_dtype,
            "fp32_append_dtype": self._append_dtype,
            "promote": self._promote,
            "banned": self._banned,
        }
        for policy, make in kinds.items():
            for name, operator in operators(table[policy]):
                register_kernel(self._library, name, make(operator), self.key)

    def _lower(self, operator: Any) -> Callable[..., Any]:
        guard, below, cast, device = _exclude, self._below, self.cast, self.device_type

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with guard(below):
                dtype = torch.get_autocast_dtype(device)
                named = named_casts(cast, kwargs, dtype)
                return called(operator, backwards(cast, args, dtype), named)

        return kernel

    def _fp32(self, operator: Any) -> Callable[..., Any]:
        guard, below, cast = _exclude, self._below, self.cast

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with guard(below):
                dtype = torch.float32
                named = named_casts(cast, kwargs, dtype)
                return called(operator, backwards(cast, args, dtype), named)

        return kernel

    def _set_dtype(self, operator: Any) -> Callable[..., Any]:
        """Only a dtype that the caller left open becomes fp32; a given one is respected."""
        guard, below = _exclude, self._below
        position = [argument.name for argument in operator._schema.arguments].index("dtype")
        positional = not operator._schema.arguments[position].kwarg_only

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with guard(below):
                if args and self.eligible(args[0]):
                    given = kwargs.get("dtype")
                    if positional and len(args) > position:
                        given = args[position]
                    if given is None:
                        return operator(*args[:position], **{**kwargs, "dtype": torch.float32})
                return operator(*args, **kwargs)

        return kernel

    def _append_dtype(self, operator: Any) -> Callable[..., Any]:
        """``norm`` is redispatched to its overload with a dtype: fp32 for this device's tensors."""
        guard, below = _exclude, self._below
        with_dtype = {
            "Scalar": torch.ops.aten.norm.ScalarOpt_dtype,
            "ScalarOpt_dim": torch.ops.aten.norm.ScalarOpt_dim_dtype,
        }.get(operator._overloadname)

        def kernel(self_: Any, *args: Any) -> Any:
            with guard(below):
                if with_dtype is None or not self.eligible(self_):
                    return operator(self_, *args)
                rest = args or (2,)
                if operator._overloadname == "ScalarOpt_dim" and len(rest) == 2:
                    rest = (*rest, False)
                return with_dtype(self_, *rest, dtype=torch.float32)

        return kernel

    def _promote(self, operator: Any) -> Callable[..., Any]:
        """The widest floating type among the operands (``prioritize`` of autocast_mode.h)."""
        guard, below, cast = _exclude, self._below, self.cast

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with guard(below):
                widest = torch.get_autocast_dtype(self.device_type)
                for value in _tensors((*args, *kwargs.values())):
                    if self.eligible(value) and value.dtype is torch.float32:
                        widest = torch.float32
                named = named_casts(cast, kwargs, widest)
                return called(operator, backwards(cast, args, widest), named)

        return kernel

    def _banned(self, operator: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(BANNED_MESSAGE)

        return kernel


CASTS_SERVE_GRADIENTS = versions.casts_serve_gradients(versions.INSTALLED)

_exclude = torch._C._ExcludeDispatchKeyGuard


def backwards(cast: Callable[[Any, Any], Any], values: tuple[Any, ...], dtype: Any) -> list[Any]:
    """Cast arguments last to first, as the wheels' compiler (GCC) evaluates the arguments of the
    wrapped call: bias, weight, input. The order of the copies decides where blocks are placed and
    in which order autograd visits them."""
    return [cast(value, dtype) for value in reversed(values)][::-1]


def named_casts(
    cast: Callable[[Any, Any], Any], values: dict[str, Any], dtype: Any
) -> dict[str, Any]:
    return {key: cast(values[key], dtype) for key in reversed(list(values))}


def called(operator: Any, values: list[Any], named: dict[str, Any]) -> Any:
    """Call with casts, which die first to last: C++ destroys temporaries against the order of their
    making, and a vector's elements in order, while Python drops containers from the end."""
    try:
        return operator(*values, **named)
    finally:
        for position, value in enumerate(values):
            values[position] = None
            if type(value) is list:
                for inner in range(len(value)):
                    value[inner] = None
            del value


def _device_type(value: torch.Tensor) -> str:
    """Where a tensor lives; one that ``torch.func`` wrapped asks C++, so what it wraps is asked."""
    found = value.device.type
    while found == "meta" and torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
        found = value.device.type
    return found


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@functools.lru_cache(maxsize=1)
def _override() -> dict[str, bool]:
    import inspect

    accepted = inspect.signature(torch.library.Library.impl).parameters
    return {"allow_override": True} if "allow_override" in accepted else {}


def register_kernel(
    library: Any, name: str, kernel: Callable[..., Any], key: str, with_keyset: bool = False
) -> None:
    """``Library.impl`` over an existing kernel; the library's ``_destroy`` brings that one back."""
    import warnings

    if not _override():
        # Older versions refuse a second kernel from Python, by this list alone.
        torch.library._impls.discard(f"{library.ns}/{name}/{key}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Overriding a previously registered kernel"
        library.impl(name, kernel, key, with_keyset=with_keyset, **_override())

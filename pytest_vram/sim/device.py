"""The simulated GPU's dispatch: every operator runs on shapes alone and tells what it allocates.

``SimMode`` is a FakeTensorMode. An operator goes one of four ways:

* no tensor and no argument of it is on the GPU: it runs for real on the host (small tensors) or on
  shapes alone (large ones);
* its arguments' shapes were seen before: the outputs are made from the remembered recipe;
* it reads a value (``item``, ``nonzero`` ...): answered from what the program itself determined,
  else by the documented policy (:mod:`pytest_vram.sim.values`);
* otherwise PyTorch's own fake execution runs, and a recipe is remembered.

Then the storages that are new are handed to ``ledger`` in the order in which the real operator
would have allocated them, with its scratch (:mod:`pytest_vram.sim.kernels`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    in_kernel_invocation_manager,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from pytest_vram.places import shown_from
from pytest_vram.sim import errors, inplace, layouts, meta, rewritten, values, zeros
from pytest_vram.sim.callers import storing_item
from pytest_vram.sim.handlers import HANDLERS
from pytest_vram.sim.kernels import RULES, Card, Span, attention
from pytest_vram.sim.kernels.convolution_choice import laid_out
from pytest_vram.sim.recipes import (
    RECIPES,
    Argument,
    CallKey,
    Fresh,
    Recipe,
    Uncacheable,
    ViewOf,
    add_to_key,
    make_recipe,
)
from pytest_vram.sim.tensors import (
    CPU,
    CUDA,
    MADE_AT,
    META,
    REAL_ON_HOST,
    SimTensor,
    answer_device,
    wrap,
)

aten = torch.ops.aten


class StorageLedger(Protocol):
    """Who keeps the books: :class:`pytest_vram.sim.simulation.Simulation`."""

    card: Card

    def operator(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[Any],
        recipe: Recipe | None,
        on_gpu: bool,
    ) -> None: ...

    def in_place(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], new: SimTensor
    ) -> None: ...

    def record_stream(self, tensor: SimTensor, stream: Any) -> None: ...

    def address_of(self, tensor: SimTensor) -> int: ...

    def uncertain(self, tensor: SimTensor, span: Span, func: Any = None) -> None: ...

    def label(self, tensor: Any, bill: str, name: str = "") -> None: ...

    def maker(self, tensor: torch.Tensor) -> str: ...

    def made_in(self, tensor: torch.Tensor) -> int: ...

    def suspend(self, on: bool) -> None: ...

    def of_this_backward(self, tensor: torch.Tensor) -> bool: ...


_NOT_CACHEABLE: set[OpOverload] = {
    aten.set_.source_Tensor,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Storage,
    aten.set_.default,
    aten.resize_.default,
    aten.resize_as_.default,
    aten.as_strided.default,
    aten.lift_fresh.default,
    aten.lift.default,
    aten.lift_fresh_copy.default,
}

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def _has_kernel(func: OpOverload, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))  # type: ignore[no-untyped-call]


class _Kernel(threading.local):
    running = False


class SimMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """The dispatch of one simulation. ``ledger`` hears of every allocation."""

    def __init__(self, ledger: StorageLedger) -> None:
        self._kernel = _Kernel()
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.version = ledger.card.torch
        self.cache_enabled = False  # ours below is keyed and applied in a tenth of the time
        self.ledger = ledger
        self.lock = threading.RLock()  # one operator at a time keeps the books right
        self.over = False
        self.nested = 0
        self.zeros = False  #: whether the program has had zeros without memory (sim.zeros)
        self.added_in_place: Any = None  # by the composite that is running
        self._cacheable: dict[OpOverload, bool] = {}
        self._composites: dict[OpOverload, bool] = {}

    @property
    def in_kernel_invocation(self) -> bool:
        """Whether this thread is inside an operator's fake execution: tensors then say ``meta``."""
        return self._kernel.running

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._kernel.running = value

    @property
    def avoid_device_init(self) -> bool:
        """There is no device to initialise, whatever ``torch.cuda.is_available`` now says."""
        return True

    @avoid_device_init.setter
    def avoid_device_init(self, value: bool) -> None: ...

    # -- threads ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_thread(self, directory: str) -> Iterator[None]:
        """The mode in another thread than the one that entered it. ``__enter__`` keeps what it
        finds on the mode itself, which threads share. ``directory``: see :func:`places.here`."""
        if self.over or torch._C._get_dispatch_mode(self._mode_key) is not None:
            yield
            return
        lifting = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        torch._C._set_dispatch_mode(self)
        try:
            with shown_from(directory):
                yield
        finally:
            torch._C._unset_dispatch_mode(self._mode_key)
            torch._C._set_only_lift_cpu_tensors(lifting)

    def end(self) -> None:
        """The simulation is over; threads that still have this mode run for real."""
        self.over = True

    # -- services for SimTensor -------------------------------------------------------------

    def host_values(self, tensor: SimTensor) -> torch.Tensor:
        return values.on_host(tensor)

    def address_of(self, tensor: SimTensor) -> int:
        return self.ledger.address_of(tensor)

    # -- dispatch ---------------------------------------------------------------------------

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return answer_device(args)
        if self.over:  # a thread that the simulation started and that goes on
            return func(*args, **kwargs)
        with self.lock:
            return self._dispatch(func, types, args, kwargs)

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if self.nested:
            # inside another operator's fake execution: its implementation detail, not memory
            args, kwargs, _ = self._devices(func, args, kwargs, True)
            return self._slow(func, types, args, kwargs)
        try:
            key, tensors, on_gpu, simulated = self._scan(func, args, kwargs)
        except Uncacheable:
            key = None
            tensors = [
                leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
            ]
            if any(map(is_traceable_wrapper_subclass, tensors)):
                return NotImplemented  # its own dispatch comes first, and calls with its parts
            for tensor in tensors:
                if tensor.is_cuda and not isinstance(tensor, FakeTensor):
                    raise values.real_tensor(func, tensor) from None
            simulated = any(isinstance(t, FakeTensor) for t in tensors)
            on_gpu = any(isinstance(t, SimTensor) and t.is_cuda for t in tensors)
        if simulated:
            rewritten.look(tensors, self.ledger)
        if self.zeros:
            result = zeros.answered(self, func, args, kwargs, tensors)
            if result is not NotImplemented:
                return result
        args, kwargs, moved = self._devices(func, args, kwargs, simulated)
        if moved is not None:
            on_gpu = on_gpu or moved.type == "cuda"
        on_host = not simulated and (moved is None or moved.type in ("cpu", "meta"))
        if on_host and (moved is META or not _too_large(func, args)):
            if kwargs.get("pin_memory"):  # needs a driver; to pin is nothing that PyTorch counts
                kwargs = {**kwargs, "pin_memory": False}
            return func(*args, **kwargs)
        handler = HANDLERS.get(func)
        if handler is not None:
            result = handler(self, func, args, kwargs)
            if result is not NotImplemented:
                return result
        if self._is_composite(func):
            with self.as_called(func):
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        return self._simulate(func, types, args, kwargs, key, tensors, on_gpu)

    def _simulate(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any,
        tensors: list[torch.Tensor],
        on_gpu: bool,
    ) -> Any:
        recipe = RECIPES.get(key) if key is not None else None
        if recipe is not None:
            result, flat = self._from_recipe(recipe, tensors)
        else:
            result, made, recipe = self._from_scratch(func, types, args, kwargs, key, tensors)
            if made is None:
                return result
            flat = made
        if recipe is not None and recipe.views and torch.is_grad_enabled():
            _remember_versions(recipe, tensors, flat)
        if inplace.takes_over(func, args, self.added_in_place, self.ledger):
            self.ledger.in_place(func, args, kwargs, result)
        else:
            self.ledger.operator(func, args, kwargs, flat, recipe, on_gpu)
        if on_gpu:
            inplace.count_write(func, args)
        if not tensors:
            values.from_factory(func, args, kwargs, result)
        elif values.concerned(func, tensors):
            values.propagate(func, args, kwargs, result)
        return result

    def _from_scratch(
        self, func: Any, types: Any, args: Any, kwargs: Any, key: Any, tensors: list[torch.Tensor]
    ) -> tuple[Any, list[Any] | None, Recipe | None]:
        try:
            result = self._slow(func, types, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            result = values.data_dependent(self, func, args, kwargs)
        except UnsupportedOperatorException as error:
            raise values.unsupported_operator(func) from error
        except (torch.OutOfMemoryError, values.DataDependent, values.NoSimulatedKernel):
            raise
        except Exception as error:
            raise errors.as_the_card_says(func, args, kwargs, error) from None
        if result is NotImplemented:
            return result, None, None
        flat = self._adopt_outputs(func, args, kwargs, result)
        recipe = None
        if key is not None and self._may_cache(func):
            recipe = make_recipe(result, flat, tensors)
            if recipe is not None:
                RECIPES.remember(key, recipe)
        return result, flat, recipe

    def _slow(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """PyTorch's own fake execution; what it calls inside belongs to this operator."""
        if func is aten.view.default and not self.nested and _is_plain(args[0]):
            return self._viewed(*args)
        self.nested += 1
        try:
            result: Any = self.dispatch(func, types, args, kwargs)
            if func in CONVOLUTIONS and self.nested == 1 and result is not NotImplemented:
                single = isinstance(result, torch.Tensor)
                results: list[Any] = [result] if single else list(result)
                with self:
                    results = laid_out(func, args, results, self.ledger.card)
                return results[0] if single else tuple(results)
            if self.nested == 1 and result is not NotImplemented:
                with self:
                    return layouts.laid_out(func, args, result)
            return result
        finally:
            self.nested -= 1

    def _adopt_outputs(self, func: Any, args: Any, kwargs: Any, result: Any) -> list[Any]:
        """The flat results, as tensors of this simulation and on the device CUDA puts them on."""
        flat = tree_leaves(result)
        for position, out in enumerate(flat):
            if isinstance(out, FakeTensor) and out.fake_mode is self:
                if type(out) is FakeTensor:
                    out.__class__ = SimTensor
                    state = out.__dict__
                    state["_fake_device"] = state.get("_fake_device") or out.fake_device
                if out.__dict__["_fake_device"].type == "meta":
                    out.__dict__["_fake_device"] = CUDA  # a meta kernel that names its own device
                if attention.on_host(func, position, args, kwargs, self.version):
                    out.__dict__["_fake_device"] = CPU
        return flat

    @contextlib.contextmanager
    def as_called(self, func: Any) -> Iterator[None]:
        """The parts of a composite that came here whole see views and autocast as its caller did.

        Autograd takes composites apart; inference tensors come here without it, and a dispatch
        turns everything above it off. Autocast stays off where ``func`` has a cast policy of its
        own: that has been followed already.
        """
        followed = _has_kernel(func, "AutocastCUDA")
        with self, torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
            if followed:
                with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
                    yield
            else:
                yield

    def _is_composite(self, func: Any) -> bool:
        """Whether CUDA runs ``func`` as a composition of other operators."""
        known = self._composites.get(func)
        if known is None:
            # Some have kernels of their own beside (silu_backward); CUDA's are not registered in
            # a CPU build, but the CPU's are, or this package has a rule.
            known = (
                isinstance(func, OpOverload)
                and func not in RULES
                and _has_kernel(func, "CompositeImplicitAutograd")
                and not _has_kernel(func, "CPU")
                and not _has_kernel(func, "CUDA")
            )
            self._composites[func] = known
        return known

    def _may_cache(self, func: Any) -> bool:
        known = self._cacheable.get(func)
        if known is None:
            tags = getattr(func, "tags", ())
            known = (
                isinstance(func, OpOverload)
                and func not in _NOT_CACHEABLE
                and torch.Tag.dynamic_output_shape not in tags
                and torch.Tag.data_dependent_output not in tags
                and torch.Tag.inplace_view not in tags
            )
            self._cacheable[func] = known
        return known

    # -- keys and recipes -------------------------------------------------------------------

    def _scan(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallKey | None, list[torch.Tensor], bool, bool]:
        """The call's key, its flat tensor arguments, whether any is on the GPU, any simulated."""
        flat: list[Any] = []
        tensors: list[torch.Tensor] = []
        add_to_key(args, flat, tensors)
        if kwargs:
            for name, value in kwargs.items():
                flat.append(name)
                add_to_key((value,), flat, tensors)
        on_gpu = simulated = False
        for tensor in tensors:
            if type(tensor) is SimTensor:
                simulated = True
                if tensor.__dict__["_fake_device"] is CUDA or tensor.is_cuda:
                    on_gpu = True
            elif tensor.is_cuda and not isinstance(tensor, FakeTensor):
                raise values.real_tensor(func, tensor)
        layout: tuple[Any, bool] | bool | None = None
        if func in CONVOLUTIONS:  # cuDNN or not decides the layout of results
            layout = (self.ledger.card, torch._C._get_cudnn_enabled())
        elif func is aten.masked_fill.Scalar:  # in place or not decides the layout of the result
            layout = inplace.of_fresh(func)
        inference = torch.is_inference_mode_enabled()
        key = CallKey(func, tuple(flat), torch.get_default_dtype(), inference, layout)
        return key, tensors, on_gpu, simulated

    def _from_recipe(self, recipe: Recipe, tensors: list[torch.Tensor]) -> tuple[Any, list[Any]]:
        made: list[Any] = []
        for out in recipe.outputs:
            if out is None:
                made.append(None)
                continue
            tensor: torch.Tensor
            if isinstance(out, Fresh):
                elem = torch.empty_strided(out.shape, out.stride, dtype=out.dtype, device=META)
                tensor = wrap(self, elem, out.device)
            elif isinstance(out, Argument):
                tensor = tensors[out.position]
            else:
                tensor = self._view(tensors[out.position], out)
            made.append(tensor)
        if recipe.packing is None:
            return made[0], made
        return recipe.packing(made), made

    def _viewed(self, source: SimTensor, size: Any) -> SimTensor:
        """``view`` with C++'s strides: fake execution gives other ones to dimensions of size 1, and
        these decide memory formats."""
        flat = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=META)
        shaped = flat.view(size)
        place, device = int(source.storage_offset()), source.__dict__["_fake_device"]
        out = ViewOf(0, tuple(shaped.shape), shaped.stride(), place, source.dtype, device)
        return self._view(source, out)

    def _view(self, base: torch.Tensor, out: ViewOf) -> SimTensor:
        if torch.is_inference_mode_enabled() and not base.is_inference():
            with torch.inference_mode(False):  # a view of an ordinary tensor is one too
                return self._view(base, out)
        elem = torch.empty(0, dtype=out.dtype, device=META)
        elem.set_(base.untyped_storage(), out.offset, out.shape, out.stride)
        return wrap(self, elem, out.device)

    # -- devices ----------------------------------------------------------------------------

    def _devices(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], simulated: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any], torch.device | None]:
        """C++ composites that make a tensor "like" a simulated one ask for ``meta``: they mean the
        GPU. A generator of another device than the fake tensors' says nothing about memory."""
        named = None
        device = kwargs.get("device")
        if device is not None:
            if (
                func is aten.scalar_tensor.default
                and torch.device(device).type == "meta"
                and storing_item()
            ):
                # x[i] = 3: the number stays on the host where the tensor is_cuda()
                # (python_variable_indexing.cpp, THPVariable_setitem)
                return args, {**kwargs, "device": CPU}, CPU
            named = _meant(device)
            if named is not device:
                kwargs = {**kwargs, "device": named}
        if (
            "generator" in kwargs
            and kwargs["generator"] is not None
            and (simulated or (named is not None and named.type == "cuda"))
        ):
            kwargs = {**kwargs, "generator": None}
        for position, item in enumerate(args):
            if type(item) is torch.device:
                named = _meant(item)
                if named is not item:
                    args = (*args[:position], named, *args[position + 1 :])
        return args, kwargs, named


def _meant(device: Any) -> torch.device:
    device = torch.device(device)
    if device.type == "meta":
        return META if meta.is_meant() else CUDA
    if device.type == "cuda":
        if device.index not in (None, 0):
            raise errors.no_such_device()
        return CUDA
    return CPU if device.type == "cpu" else device


def _remember_versions(recipe: Recipe, tensors: list[torch.Tensor], results: list[Any]) -> None:
    """See :mod:`pytest_vram.sim.rewritten`."""
    for place, position in recipe.views:
        if not tensors[position].is_inference():
            results[place].__dict__[MADE_AT] = tensors[position]._version


def parts_of(mode: FakeTensorMode, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors whose storages a tensor keeps: itself, or a sparse one's components."""
    if tensor.layout is torch.strided:
        return [tensor]
    with in_kernel_invocation_manager(mode):
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _is_plain(tensor: Any) -> bool:
    if type(tensor) is not SimTensor or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_conj() or tensor.is_neg())


_FACTORIES = {
    "empty", "zeros", "ones", "full", "rand", "randn", "randint", "empty_strided", "eye",
    "empty_permuted", "normal", "new_empty", "new_zeros", "new_ones", "new_full",
    "new_empty_strided", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
    "randn_like", "randint_like", "arange", "linspace", "randperm", "repeat", "clone",
}  # fmt: skip


def _too_large(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a host operator without simulated arguments makes something too large to be real."""
    name = getattr(func, "_opname", "")
    if name not in _FACTORIES:
        return False
    for item in args:
        if isinstance(item, (list, tuple, torch.Size)) and item:
            count = 1
            for size in item:
                if not isinstance(size, int):
                    return False
                count *= size
            return count > REAL_ON_HOST
    return False

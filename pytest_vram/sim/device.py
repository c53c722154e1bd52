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
from collections.abc import Callable, Iterator, Sequence
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
from torch.utils._pytree import tree_leaves, tree_map

from pytest_vram.places import shown_from
from pytest_vram.sim import errors, inplace, layouts, values
from pytest_vram.sim.frames import storing_item
from pytest_vram.sim.kernels import RULES, Card, Span, attention, convolution, rnn
from pytest_vram.sim.tensors import CPU, CUDA, META, REAL_ON_HOST, SimTensor, answer_device, wrap

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


class Recipe:
    """What an operator returns for arguments of given shapes, and the kernel program that goes
    with it (per card, filled in by the ledger).

    ``outputs``: per flat output ``None``, ``("arg", position)`` (returned as it came),
    ``("new", shape, stride, dtype, device, bytes)`` or
    ``("view", position, shape, stride, offset, dtype, device)``; positions count the flat tensor
    arguments. ``packing``: ``None`` for a single tensor, else ``tuple`` or ``list``.
    """

    __slots__ = ("outputs", "packing", "programs")

    def __init__(self, outputs: list[Any], packing: type | None) -> None:
        self.outputs = outputs
        self.packing = packing
        self.programs: dict[tuple[Any, ...], Any] = {}


#: Shapes are a property of PyTorch, not of a card or a run, so all simulations share the recipes.
_RECIPES: dict[Any, Recipe] = {}
_RECIPE_LIMIT = 200_000
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

_SCALARS = (int, float, bool, str, type(None), complex)
_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)


CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def _has_kernel(func: OpOverload, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))  # type: ignore[no-untyped-call]


class _Uncacheable(Exception):  # noqa: N818
    pass


class SimMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """The dispatch of one simulation. ``ledger`` hears of every allocation."""

    def __init__(self, ledger: StorageLedger) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.version = ledger.card.torch
        self.cache_enabled = False  # ours below is keyed and applied in a tenth of the time
        self.ledger = ledger
        self.lock = threading.RLock()  # one operator at a time keeps the books right
        self.over = False
        self.nested = 0
        self.added_in_place: Any = None  # by the composite that is running
        self._cacheable: dict[OpOverload, bool] = {}
        self._composites: dict[OpOverload, bool] = {}

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
        except _Uncacheable:
            key = None
            tensors = [
                leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
            ]
            simulated = any(isinstance(t, FakeTensor) for t in tensors)
            on_gpu = any(isinstance(t, SimTensor) and t.is_cuda for t in tensors)
        args, kwargs, moved = self._devices(func, args, kwargs, simulated)
        if moved is not None:
            on_gpu = on_gpu or moved.type == "cuda"
        on_host = not simulated and (moved is None or moved.type in ("cpu", "meta"))
        if on_host and (moved is META or not _too_large(func, args)):
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
        recipe = _RECIPES.get(key) if key is not None else None
        if recipe is not None:
            result, flat = self._from_recipe(recipe, tensors)
        else:
            result, made, recipe = self._from_scratch(func, types, args, kwargs, key, tensors)
            if made is None:
                return result
            flat = made
        if inplace.takes_over(func, args, self.added_in_place):
            self.ledger.in_place(func, args, kwargs, result)
        else:
            self.ledger.operator(func, args, kwargs, flat, recipe, on_gpu)
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
            recipe = _make_recipe(result, flat, tensors)
            if recipe is not None:
                if len(_RECIPES) > _RECIPE_LIMIT:
                    _RECIPES.clear()
                _RECIPES[key] = recipe
        return result, flat, recipe

    def _slow(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """PyTorch's own fake execution; what it calls inside belongs to this operator."""
        self.nested += 1
        try:
            result: Any = self.dispatch(func, types, args, kwargs)
            if func in CONVOLUTIONS and self.nested == 1 and result is not NotImplemented:
                single = isinstance(result, torch.Tensor)
                results: list[Any] = [result] if single else list(result)
                with self:
                    results = convolution.laid_out(func, args, results, self.ledger.card)
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
    ) -> tuple[Any, list[torch.Tensor], bool, bool]:
        """The call's key, its flat tensor arguments, whether any is on the GPU, any simulated."""
        key: list[Any] = [func]
        tensors: list[torch.Tensor] = []
        self._key_of(args, key, tensors)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                self._key_of((value,), key, tensors)
        on_gpu = simulated = False
        for tensor in tensors:
            if type(tensor) is SimTensor:
                simulated = True
                if tensor.__dict__["_fake_device"] is CUDA or tensor.is_cuda:
                    on_gpu = True
        if func in CONVOLUTIONS:  # cuDNN or not decides the layout of results
            key.append((self.ledger.card, torch._C._get_cudnn_enabled()))
        # Factories, and integers that become floating point (x / 2), ask for the default.
        key.append(torch.get_default_dtype())
        key.append(torch.is_inference_mode_enabled())
        return tuple(key), tensors, on_gpu, simulated

    def _key_of(self, items: Sequence[Any], key: list[Any], tensors: list[torch.Tensor]) -> None:
        for item in items:
            kind = type(item)
            if kind is SimTensor:
                if item.layout is not torch.strided:
                    raise _Uncacheable
                tensors.append(item)
                key.append(
                    (
                        item.shape,
                        item.stride(),
                        item.dtype,
                        item.storage_offset(),
                        item.__dict__["_fake_device"],
                    )
                )
            elif kind in _SCALARS:
                key.append(kind)
                key.append(item)
            elif kind in (list, tuple, torch.Size):
                key.append(len(item))
                self._key_of(item, key, tensors)
            elif kind in _PLAIN:
                key.append(item)
            elif isinstance(item, torch.Tensor):
                if item.layout is not torch.strided or item.is_quantized or item.is_nested:
                    raise _Uncacheable
                tensors.append(item)
                key.append((item.shape, item.stride(), item.dtype, item.storage_offset(), "host"))
            elif isinstance(item, torch.Generator):
                key.append("generator")
            else:
                raise _Uncacheable

    def _from_recipe(self, recipe: Recipe, tensors: list[torch.Tensor]) -> tuple[Any, list[Any]]:
        made: list[Any] = []
        for out in recipe.outputs:
            if out is None:
                made.append(None)
                continue
            kind = out[0]
            if kind == "new":
                elem = torch.empty_strided(out[1], out[2], dtype=out[3], device=META)
                tensor = wrap(self, elem, out[4])
            elif kind == "arg":
                tensor = tensors[out[1]]
            elif torch.is_inference_mode_enabled() and not tensors[out[1]].is_inference():
                with torch.inference_mode(False):  # a view of an ordinary tensor is one too
                    tensor = self._view(tensors[out[1]], out)
            else:
                tensor = self._view(tensors[out[1]], out)
            made.append(tensor)
        if recipe.packing is None:
            return made[0], made
        return recipe.packing(made), made

    def _view(self, base: torch.Tensor, out: Any) -> SimTensor:
        elem = torch.empty(0, dtype=out[5], device=META)
        elem.set_(base.untyped_storage(), out[4], out[2], out[3])
        return wrap(self, elem, out[6])

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
        current = torch.get_default_device()
        return META if current.type == "meta" else CUDA
    if device.type == "cuda":
        if device.index not in (None, 0):
            raise errors.no_such_device()
        return CUDA
    return CPU if device.type == "cpu" else device


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


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _make_recipe(result: Any, flat: list[Any], tensors: list[torch.Tensor]) -> Recipe | None:
    """A recipe for outputs that are plainly new tensors, arguments or views of arguments."""
    if isinstance(result, torch.Tensor):
        packing = None
    elif type(result) in (tuple, list):
        packing = type(result)
        if len(result) != len(flat):
            return None
    elif result is None:
        return None
    else:
        return None
    places = {id(t): n for n, t in enumerate(tensors)}
    if any(isinstance(t, torch.Tensor) and t.layout is not torch.strided for t in flat):
        return None
    storages = {_storage_key(t): n for n, t in enumerate(tensors) if isinstance(t, FakeTensor)}
    outputs: list[Any] = []
    new: set[int] = set()
    for out in flat:
        if out is None:
            outputs.append(None)
            continue
        if not isinstance(out, SimTensor) and id(out) not in places:
            return None
        if id(out) in places:
            outputs.append(("arg", places[id(out)]))
            continue
        if out.is_conj() or out.is_neg() or out.layout is not torch.strided:
            return None
        storage = out.untyped_storage()
        shape, stride, device = tuple(out.shape), out.stride(), out.__dict__["_fake_device"]
        if storage._cdata in storages:
            position = storages[storage._cdata]
            outputs.append(
                ("view", position, shape, stride, out.storage_offset(), out.dtype, device)
            )
            continue
        if storage._cdata in new or out.storage_offset() != 0:
            return None
        new.add(storage._cdata)
        again = torch.empty_strided(shape, stride, dtype=out.dtype, device=META)
        if again.untyped_storage().nbytes() != storage.nbytes():
            return None
        outputs.append(("new", shape, stride, out.dtype, device, storage.nbytes()))
    return Recipe(outputs, packing)


#: Operators that need more than shapes: func -> handler(mode, func, args, kwargs) -> result or
#: NotImplemented.
HANDLERS: dict[Any, Callable[[SimMode, Any, tuple[Any, ...], dict[str, Any]], Any]] = {}

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


def _handles(*overloads: Any) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        for overload in overloads:
            HANDLERS[overload] = function
        return function

    return register


@_handles(aten._local_scalar_dense.default)
def _read_scalar(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    return values.scalar(args[0])


@_handles(aten.equal.default)
def _read_equal(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    return values.equal(args[0], args[1])


@_handles(aten.record_stream.default)
def _record_stream(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    mode.ledger.record_stream(args[0], args[1])
    return None


@_handles(aten._pin_memory.default, aten.pin_memory.default)
def _pin(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


@_handles(aten.lift_fresh.default, aten.lift.default)
def _lift(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.tensor(...)``: data that the program wrote down, so its values are known."""
    return args[0]


@_handles(aten._to_copy.default)
def _to_copy(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    source, target = args[0], kwargs.get("device")
    here = isinstance(source, SimTensor)
    if target is None or target.type == source.device.type:
        return NotImplemented
    if target.type == "cpu" and here:
        return values.to_host(mode, source, kwargs)
    if not here and target.type == "cuda" and source.layout is torch.strided:
        return _upload(mode, func, source, kwargs)
    return NotImplemented


def _upload(mode: SimMode, func: Any, source: torch.Tensor, kwargs: Any) -> SimTensor:
    """A host tensor goes to the GPU: a new block, and the value kept beside it if small."""
    shape_of = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=META)
    options = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format") and v is not None}
    elem = torch.ops.aten._to_copy.default(shape_of, **options)
    tensor = wrap(mode, elem, CUDA)
    mode.ledger.operator(func, (source,), kwargs, [tensor], None, True)
    values.remember(tensor, source, options.get("dtype"))
    return tensor


@_handles(aten.copy_.default, aten._copy_from_and_resize.default)
def _copy(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[0], args[1]
    if isinstance(target, SimTensor):
        return NotImplemented
    values.fill_host(target, source)
    return target


@_handles(aten._pack_padded_sequence.default)
def _pack(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Packing reads the lengths, which lie on the host."""
    source, lengths, batch_first = args
    known = values.known(lengths)
    if known is None or not isinstance(source, SimTensor):
        return NotImplemented
    ends = [int(length) for length in known]
    if min(ends) <= 0:
        raise RuntimeError("Length of all samples has to be greater than 0")
    sizes = rnn.packed_sizes(ends)
    rest = source.shape[2:]
    elem = torch.empty((sum(ends), *rest), dtype=source.dtype, device=META)
    data = wrap(mode, elem, source.device)
    mode.ledger.operator(func, (source, known, batch_first), kwargs, [data], None, source.is_cuda)
    return data, torch.tensor(sizes, dtype=torch.int64)


@_handles(
    *[
        op
        for op in (getattr(getattr(aten, "_grouped_mm", None), "default", None),)
        if op is not None
    ]
)
def _grouped_mm(mode: SimMode, func: Any, args: Any, kwargs: Any) -> Any:
    """PyTorch's meta kernel only knows bfloat16; CUDA multiplies the groups one by one in any
    floating type (native/cuda/GroupedBlas.cpp, ``_grouped_mm_fallback``)."""
    first, second = args[0], args[1]
    if first.dtype is torch.bfloat16 or first.dtype is not second.dtype:
        return NotImplemented
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    groups = offsets.shape[0] if offsets is not None else 0
    if first.dim() == 2 and second.dim() == 2:
        shape: tuple[int, ...] = (groups, first.shape[0], second.shape[1])
    elif first.dim() == 2:
        shape = (first.shape[0], second.shape[2])
    elif second.dim() == 2:
        shape = (first.shape[1], second.shape[1])
    else:
        shape = (first.shape[0], first.shape[1], second.shape[2])
    out = wrap(mode, torch.empty(shape, dtype=first.dtype, device=META), CUDA)
    mode.ledger.operator(func, args, kwargs, [out], None, True)
    return out


def tree_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


__all__ = ["HANDLERS", "Recipe", "SimMode", "StorageLedger", "tree_map", "tree_tensors"]

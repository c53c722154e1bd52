"""Simulated tensors: a shape, a dtype and a life on ``cuda:0``, but no values."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pytest_vram.sim.files import mark_as_on_card

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
META = torch.device("meta")

#: Small tensors on the host keep their values and run for real; larger ones (weights that are built
#: on the CPU and moved) are simulated too. Elements, not bytes.
REAL_ON_HOST = 1 << 18

#: Where a view keeps the version of its memory with which it was made.
MADE_AT = "_made_at"

_PLAIN_INDICES = {int, slice, type(None), type(Ellipsis), bool}


class SimTensor(FakeTensor):
    """A FakeTensor that tells Python it lives on the simulated GPU and C++ that it is on ``meta``.

    C++ asks a tensor for its device when it builds autograd metadata and in the engine. The answer
    ``cuda`` needs device guards and streams that a PyTorch without a GPU lacks (a CPU wheel aborts
    the process); with ``meta`` the engine runs on the caller's thread, in every build.
    """

    # FakeTensor.__init__ is skipped (it costs as much as the whole operator): its attributes'
    # defaults live on the class.
    constant = None
    real_tensor = None
    pytype = None
    dispatch_keys = None
    _nonzero_memo = None
    _nonzero_memo_vc = None
    _item_memo = None
    _item_memo_vc = None
    _unique_memo = None
    _unique_memo_vc = None
    _unique_consecutive_memo = None
    _unique_consecutive_memo_vc = None
    _nested_int_memo = None
    _nested_int_memo_vc = None
    sim_value: Any = None  #: (value on the host, version at which it is true), or None

    @property  # type: ignore[misc]
    def device(self) -> torch.device:  # type: ignore[override]
        if self.fake_mode.in_kernel_invocation:
            return META
        return self.__dict__["_fake_device"]  # type: ignore[no-any-return]

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.__dict__["_fake_device"].type == "cuda"  # type: ignore[no-any-return]

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.__dict__["_fake_device"].type == "cpu"  # type: ignore[no-any-return]

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return bool(self.fake_mode.in_kernel_invocation)

    def get_device(self) -> int:
        return 0 if self.is_cuda else -1

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.fake_mode.in_kernel_invocation:
            return "SimTensor(...)"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"tensor(..., device='{self.device}', size={tuple(self.shape)}, "
            f"dtype={self.dtype}{grad})"
        )

    def __format__(self, format_spec: str) -> str:
        # Tensor.__format__ reads the item of plain tensors only (torch/_tensor.py).
        if self.dim() == 0:
            return format(self.detach().item(), format_spec)
        return object.__format__(self, format_spec)

    def tolist(self) -> Any:
        return self.fake_mode.host_values(self).tolist()  # type: ignore[attr-defined]

    def numpy(self, *, force: bool = False) -> Any:
        if self.is_cuda and not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. "
                "Use tensor.detach().numpy() instead."
            )
        return self.fake_mode.host_values(self).numpy()  # type: ignore[attr-defined]

    def __array__(self, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def data_ptr(self) -> int:
        return self.fake_mode.address_of(self)  # type: ignore[attr-defined, no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled (``torch.save``) as a host tensor: known values, else the policy's."""
        value: torch.Tensor = self.fake_mode.host_values(self)  # type: ignore[attr-defined]
        if self.is_cuda:
            value = mark_as_on_card(value)
        if getattr(self, "_is_param", False):
            value = torch.nn.Parameter(value, requires_grad=self.requires_grad)
        return value.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(self._index_on_card(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(self._index_on_card(index), value)

    def _index_on_card(self, index: Any) -> Any:
        """A list among the indices becomes a tensor on the card, which autograd then keeps
        (``sequenceToVariable`` of python_variable_indexing.cpp, v2.6.0, v2.14.1)."""
        if type(index) in _PLAIN_INDICES or not self.is_cuda:
            return index
        if type(index) is tuple:
            return tuple(self._index_on_card(part) for part in index)
        if not isinstance(index, (list, range)) or not all(type(i) in (int, bool) for i in index):
            return index
        return torch.tensor(index, dtype=None if len(index) else torch.int64, device=self.device)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """To ``meta``, as ``torch.func``'s ensembles ask: shapes without memory. C++ says ``meta``
        when it means the card (see the class), so only here can the two be told apart."""
        if any(_names_meta(part) for part in (*args[:1], kwargs.get("device"))):
            with torch._C._DisableTorchDispatch():
                bare = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=META)
            return bare.to(*args, **kwargs)
        return super().to(*args, **kwargs)

    def get_nested_int(self, *, coeff: int | Any = 1) -> Any:
        """The ragged size of jagged tensors that these offsets or lengths describe: the same for
        the same tensor, as for tensors that are not fake (torch/nested/_internal/nested_tensor.py,
        ``get_tensor_symint``)."""
        from torch.nested._internal import nested_tensor as jagged
        from torch.nested._internal.nested_int import NestedIntNode

        found = jagged._tensor_symint_registry.get(self)  # type: ignore[no-untyped-call]
        if found is None:
            number = jagged._tensor_id_counter
            jagged._tensor_id_counter = number + 1
            found = torch.SymInt(NestedIntNode(number, coeff))  # type: ignore[no-untyped-call]
            jagged._tensor_symint_registry[self] = found
        return found

    def pin_memory(self, *args: Any, **kwargs: Any) -> SimTensor:
        return self

    def is_pinned(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def share_memory_(self) -> SimTensor:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment."
            )
        with torch.no_grad():
            # Tensor.__deepcopy__ copies the whole storage and takes the same view of it.
            whole = torch.empty_strided(
                (self.untyped_storage().nbytes() // self.element_size(),),
                (1,),
                dtype=self.dtype,
                device=self.device,
            )
            if not getattr(self, "_is_param", False):
                self.new_empty(())  # which then becomes the view
            copy = whole.as_strided(self.shape, self.stride(), self.storage_offset())
        if getattr(self, "_is_param", False):
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
        elif self.requires_grad:
            copy.requires_grad_()
        memo[id(self)] = copy
        for key, value in self.__dict__.items():
            if key not in _OWN_ATTRIBUTES:
                import copy as copying

                setattr(copy, key, copying.deepcopy(value, memo))
        if self.grad is not None:
            copy.grad = self.grad.__deepcopy__(memo)  # type: ignore[no-untyped-call]
        return copy

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.prim.device.default:
            return answer_device(args)
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def _names_meta(device: Any) -> bool:
    return device == "meta" or (isinstance(device, torch.device) and device.type == "meta")


_OWN_ATTRIBUTES = {
    "_fake_device",
    "fake_device",
    "fake_mode",
    "constant",
    "pytype",
    "dispatch_keys",
    "real_tensor",
    "sim_value",
    "_is_param",
    MADE_AT,
    "nonzero_memo",
    "item_memo",
    "unique_memo",
}


def answer_device(args: Any) -> torch.device:
    """What C++ hears when it asks a tensor for its device."""
    tensor = args[0]
    if tensor.fake_mode.in_kernel_invocation:
        return META
    device = tensor.fake_device
    return META if device.type == "cuda" else device


def wrap(mode: FakeTensorMode, elem: torch.Tensor, device: torch.device) -> SimTensor:
    """The simulated tensor whose shape, strides and storage are those of ``elem`` (on meta)."""
    tensor = torch.Tensor._make_subclass(
        SimTensor, elem, False, dispatch_device=True, device_for_backend_keys=device
    )
    attributes = tensor.__dict__
    attributes["_fake_device"] = device
    attributes["fake_device"] = device  # where torch 2.6 keeps it
    attributes["fake_mode"] = mode
    return tensor


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory without holes or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def adopt(owner: torch.Tensor, content: torch.Tensor) -> None:
    """Give the Python object ``owner`` the tensor, class and attributes of ``content``.

    What ``param.data = ...`` does on a GPU: optimizers, tied modules and hooks that hold ``owner``
    keep holding the same object. ``content`` is left with what ``owner`` was.
    """
    owner_class, content_class = owner.__class__, content.__class__
    owner_state, content_state = dict(owner.__dict__), dict(content.__dict__)
    torch._C._swap_tensor_impl(owner, content)
    owner.__class__, content.__class__ = content_class, owner_class
    extra = {key: value for key, value in owner_state.items() if key not in _OWN_ATTRIBUTES}
    owner.__dict__.clear()
    owner.__dict__.update({**content_state, **extra})
    content.__dict__.clear()
    content.__dict__.update(
        {key: value for key, value in owner_state.items() if key in _OWN_ATTRIBUTES}
    )

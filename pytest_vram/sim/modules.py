"""Moving modules and parameters to the simulated GPU without changing who they are.

On a GPU ``module.to("cuda")`` writes ``param.data``: optimizers, tied modules and hooks keep the
same Parameter. A host tensor cannot hold simulated data, so the objects exchange their contents
instead (:func:`pytest_vram.sim.tensors.adopt`), and get their own back when the simulation ends:
a fixture's model is what it was before.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import UninitializedBuffer, UninitializedParameter
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from pytest_vram.sim import values
from pytest_vram.sim.patching import patches
from pytest_vram.sim.tensors import META, SimTensor, adopt

_GOES_TO = "_pytest_vram_device"  #: of an uninitialized parameter or buffer


class _Moved:
    """Real host tensors whose owners became simulated, to be given back."""

    def __init__(self) -> None:
        self._contents: list[tuple[weakref.ref[Any], torch.Tensor]] = []
        self._buffers: list[tuple[weakref.ref[Any], str, torch.Tensor]] = []
        self._states: list[tuple[weakref.ref[Any], dict[Any, Any]]] = []

    def move(self, owner: torch.Tensor, content: torch.Tensor) -> None:
        real = type(owner) is not SimTensor
        adopt(owner, content)
        if real:
            self._contents.append((weakref.ref(owner), content))

    def buffer(self, module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
        if type(value) is not SimTensor:
            self._buffers.append((weakref.ref(module), name, value))

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """The state as it was when the optimizer was first seen stepping; what is simulated of it
        was made inside, and is not kept from dying."""
        if not any(ref() is optimizer for ref, _ in self._states):
            state = {
                key: dict(value) if isinstance(value, dict) else value
                for key, value in optimizer.state.items()
                if not any(type(leaf) is SimTensor for leaf in tree_leaves(value))
            }
            self._states.append((weakref.ref(optimizer), state))

    def restore(self) -> None:
        for ref, state in self._states:
            optimizer = ref()
            if optimizer is not None:
                optimizer.state.clear()
                optimizer.state.update(state)
        for ref, content in reversed(self._contents):
            owner = ref()
            if owner is not None:
                owner.grad = None
                adopt(owner, content)
        for ref, name, value in reversed(self._buffers):
            module = ref()
            if module is not None and name in module._buffers:
                module._buffers[name] = value


@contextlib.contextmanager
def installed(simulation: Any) -> Iterator[None]:
    moved = _Moved()
    data = torch._C.TensorBase.data

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        if type(self) is SimTensor and type(value) is SimTensor:
            # Graph nodes hold the C++ tensor: it must stay and take the new storage, or the old
            # one would live as long as the graph does.
            data.__set__(self, value)  # type: ignore[attr-defined]
            values.take_over(self, value)
        elif type(self) is SimTensor or type(value) is SimTensor:
            grad = self.grad
            with torch.no_grad():
                content = _like(self, value)
            moved.move(self, content)
            self.grad = grad
        else:
            data.__set__(self, value)  # type: ignore[attr-defined]

    def apply(module: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        if recurse:
            for child in module.children():
                child._apply(fn)  # type: ignore[no-untyped-call]
        for name, param in module._parameters.items():
            if param is not None and is_lazy(param):
                _later(param, fn)
            elif param is not None:
                module._parameters[name] = _convert(param, fn, moved)
        for name, buffer in module._buffers.items():
            if buffer is not None and is_lazy(buffer):
                _later(buffer, fn)
            elif buffer is not None:
                moved.buffer(module, name, buffer)
                module._buffers[name] = fn(buffer)
        return module

    materialize = UninitializedParameter.materialize

    def made_real(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        """A lazy module's parameter gets its shape, on the card if the module went there."""
        there = device if device is not None else self.__dict__.pop(_GOES_TO, None)
        if there is None or torch.device(there).type != "cuda":
            materialize(self, shape, device, dtype)
            return
        content = torch.empty(shape, device=there, dtype=dtype or self.data.dtype)
        if isinstance(self, torch.nn.Parameter):
            content = torch.nn.Parameter(content, requires_grad=self.requires_grad)
        moved.move(self, content)

    with patches() as held:
        held.set(torch.nn.Module, "_apply", apply)
        for kind in (UninitializedParameter, UninitializedBuffer):
            held.set(kind, "materialize", made_real)
        held.set(torch.Tensor, "data", property(data.__get__, set_data))  # type: ignore[attr-defined]
        handle = register_optimizer_step_pre_hook(
            lambda optimizer, args, kwargs: moved.optimizer(optimizer)
        )
        try:
            yield
        finally:
            handle.remove()
            moved.restore()


def _like(owner: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value`` dressed as ``owner``: a Parameter if that is one, same ``requires_grad``."""
    content = value.detach()
    if isinstance(owner, torch.nn.Parameter):
        return torch.nn.Parameter(content, requires_grad=owner.requires_grad)
    return content.requires_grad_(owner.requires_grad)


def _later(lazy: Any, fn: Callable[[Any], Any]) -> None:
    """What has no shape yet goes where ``fn`` sends it when it gets one."""
    with torch.no_grad():
        sent = fn(torch.empty(0, dtype=lazy.data.dtype))
    if sent.device.type == "cuda":
        setattr(lazy, _GOES_TO, sent.device)
    else:
        lazy.data = sent


def _convert(param: Any, fn: Callable[[Any], Any], moved: _Moved) -> Any:
    """One parameter (and its gradient) of ``Module._apply``: ``param.data = fn(param)``, or another
    parameter where it comes from or goes to ``meta``."""
    with torch.no_grad():
        applied = fn(param)
    if applied.device != param.device and META in (applied.device, param.device):
        return torch.nn.Parameter(applied, requires_grad=param.requires_grad)
    grad = param.grad
    if applied is not param:
        param.grad = None
        if (type(applied) is SimTensor) != (type(param) is SimTensor):
            content = _like(param, applied)
            del applied
            moved.move(param, content)
        else:
            param.data = applied
    if grad is not None:
        with torch.no_grad():
            param.grad = fn(grad).requires_grad_(grad.requires_grad)
    return param

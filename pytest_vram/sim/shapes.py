"""Shape rules and composites that PyTorch's own fake execution lacks.

``META`` are meta kernels, registered while a simulation lasts. The handlers at the end run, in
terms of operators that have rules, what CUDA's host code composes of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_vram.sim import values
from pytest_vram.sim.handlers import HANDLERS
from pytest_vram.sim.tensors import CUDA, wrap
from pytest_vram.sim.tensors import META as META_DEVICE

aten = torch.ops.aten

_VIEWS_AND_VERSIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def _like_input(grad: Tensor, source: Tensor, *rest: Any, **more: Any) -> Tensor:
    """MultiMarginLoss.cu, MultiLabelMarginCriterion.cu: a contiguous gradient."""
    return torch.empty_like(source, memory_format=torch.contiguous_format)


def _like_first(source: Tensor, *rest: Any, **more: Any) -> Tensor:
    """Distributions.cpp: samples in the shape of the first argument, contiguous."""
    return torch.empty_like(source, memory_format=torch.contiguous_format)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Fused optimizer steps write into their arguments."""


def _ctc_gradient(grad: Tensor, log_probs: Tensor, *rest: Any, **more: Any) -> Tensor:
    """LossCTC.cu, ``ctc_loss_backward_gpu_template``."""
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _weight_norm_gradients(grad: Tensor, v: Tensor, g: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """``weight_norm_backward_cuda`` (WeightNorm.cu), which torch 2.6 has no shapes for."""
    return v.new_empty(v.shape), g.new_empty(g.shape)


META: dict[str, Callable[..., Any]] = {
    "_ctc_loss_backward": _ctc_gradient,
    "_weight_norm_interface_backward": _weight_norm_gradients,
    "multi_margin_loss_backward": _like_input,
    "multilabel_margin_loss_backward": _like_input,
    "_fused_sgd_": _nothing,
    "_fused_sgd_.tensor_lr": _nothing,
    "_fused_adagrad_": _nothing,
    "_fused_adagrad_.tensor_lr": _nothing,
    "_fused_adam_.tensor_lr": _nothing,
    "_fused_adamw_.tensor_lr": _nothing,
    "fractional_max_pool3d_backward": _like_input,
    "binomial": _like_first,
    "_sample_dirichlet": _like_first,
    "_dirichlet_grad": _like_first,
    "_standard_gamma": _like_first,
    "_standard_gamma_grad": _like_first,
}


#: Composites that have a kernel of their own in CUDA builds (native_functions.yaml, 2.14.1).
#: Without it autograd takes them apart before anybody can say that the kernel would have run.
CUDA_KERNELS = ("_fused_rms_norm", "mish_backward", "silu_backward")


def kernel_of_cuda(*args: Any, **kwargs: Any) -> Any:
    """Stands for the kernel; the simulation's dispatch comes first."""
    raise AssertionError("a CUDA kernel ran outside of the simulation's dispatch")


# -- losses that read lengths ---------------------------------------------------------------


def ctc_loss_tensor(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *rest: Any
) -> Tensor:
    """LossCTC.cpp: the lengths become lists on the host, wherever they were."""
    inputs, outputs = (
        values.on_host(t) if t.is_cuda else t  # type: ignore[arg-type]
        for t in (input_lengths, target_lengths)
    )
    return aten.ctc_loss.IntList(log_probs, targets, inputs.tolist(), outputs.tolist(), *rest)  # type: ignore[no-any-return]


def _ctc_loss(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """``ctc_loss_gpu_template`` of LossCTC.cu: the losses, and alpha as large as the longest target
    needs."""
    log_probs, target_lengths = args[0], args[3]
    steps, batch, _ = log_probs.shape
    alpha = (batch, steps, 2 * max(target_lengths) + 1)
    outputs = [
        wrap(mode, torch.empty(shape, dtype=log_probs.dtype, device=META_DEVICE), CUDA)
        for shape in ((batch,), alpha)
    ]
    mode.ledger.operator(func, args, kwargs, outputs, None, True)
    return tuple(outputs)


def one_hot(self: Tensor, num_classes: int = -1) -> Tensor:
    """Onehot.cpp (v2.6.0, v2.14.1): zeros and a scatter into them; fake tensors would be compared
    with ``arange``. How many classes there are is asked of the values only where nobody says."""
    if self.dtype is not torch.int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if num_classes == -1:
        known = values.known(self)
        if known is None:
            raise values.DataDependent(values.explain(aten.one_hot.default))
        self.max()
        num_classes = int(known.max()) + 1
    shape = (*self.shape, num_classes)
    if not self.numel():
        return torch.empty(shape, dtype=self.dtype, device=self.device)
    return torch.zeros(shape, dtype=self.dtype, device=self.device).scatter_(
        -1, self.unsqueeze(-1), 1
    )


# -- what is a loop of other operators ------------------------------------------------------


@functools.cache
def swaps_operands() -> bool:
    """Whether ``sumproduct_pair`` swaps its operands where the product then lies in the order of
    the result: asked of the installed PyTorch (2.6.0 does not, 2.11.0 does)."""
    with torch._C._DisableTorchDispatch():
        left, right = torch.zeros(1, 2, device="cpu"), torch.zeros(1, 3, device="cpu")
        return torch.einsum("ka,kb->ba", left, right).is_contiguous()


def _pair(left: Tensor, right: Tensor, summed: set[int]) -> Tensor:
    """``sumproduct_pair`` of Linear.cpp with ``keepdim`` (v2.6.0, v2.14.1): one batched product, in
    which dimensions that both have are the batch, and those that only one has its rows or
    columns; elementwise where nothing is summed."""
    if not summed:
        return left * right
    batch: list[int] = []
    rows: list[int] = []
    columns: list[int] = []
    inner: list[int] = []
    for dim in range(left.dim()):
        mine, theirs = left.shape[dim] != 1, right.shape[dim] != 1
        if dim in summed:
            if mine and theirs:
                inner.append(dim)
            elif mine:
                left = left.sum(dim, keepdim=True)
            elif theirs:
                right = right.sum(dim, keepdim=True)
        elif mine and theirs:
            batch.append(dim)
        else:
            (rows if mine else columns).append(dim)
    if rows and columns and columns[-1] < rows[0] and swaps_operands():
        left, right, rows, columns = right, left, columns, rows
    rest = sorted(summed)
    size = math.prod(left.shape[d] for d in inner)
    tall = math.prod(left.shape[d] for d in rows)
    broad = math.prod(right.shape[d] for d in columns)
    count = math.prod(left.shape[d] for d in batch)
    first = left.permute(*batch, *rows, *rest, *columns).reshape(count, tall, size)
    second = right.permute(*batch, *rest, *columns, *rows).reshape(count, size, broad)
    kept = [left.shape[d] for d in batch + rows] + [1] * len(rest)
    kept += [right.shape[d] for d in columns]
    order = [*batch, *rows, *rest, *columns]
    return torch.bmm(first, second).view(kept).permute(*(order.index(d) for d in range(len(order))))


def _trilinear(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Linear.cpp, ``_trilinear``: a loop over one dimension, two batched products in each turn."""
    given, expands, summed = list(args[:3]), args[3:6], set(args[6])
    unrolled = args[7] if len(args) > 7 else 1
    # its kernel sees autocast as its caller does: it has no cast policy, its products have
    with (
        mode.as_called(func),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._ExcludeDispatchKeyGuard(_VIEWS_AND_VERSIONS),
    ):
        for number, expand in enumerate(expands):
            for dim in sorted(expand):
                given[number] = given[number].unsqueeze(dim)
        shape = torch.broadcast_shapes(*(t.shape for t in given))  # type: ignore[no-untyped-call]
        last = {d for d in summed - {unrolled} if d not in expands[2]}
        out = torch.zeros(
            [1 if d in summed else n for d, n in enumerate(shape)],
            dtype=given[0].dtype, device=given[0].device,
        )  # fmt: skip
        for k in range(shape[unrolled]):
            one, two, three = (
                t if unrolled in expand else t.narrow(unrolled, k, 1)
                for t, expand in zip(given, expands, strict=True)
            )
            part = _pair(_pair(one, two, summed - {unrolled} - last), three, last)
            target = out if unrolled in summed else out.narrow(unrolled, k, 1)
            target.add_(part)
            del part
        return out.squeeze(sorted(summed))


HANDLERS[aten._ctc_loss.default] = _ctc_loss
HANDLERS[aten._trilinear.default] = _trilinear

#: Composites that ask where their arguments are.
COMPOSITES: dict[str, Callable[..., Any]] = {
    "ctc_loss.Tensor": ctc_loss_tensor,
    "one_hot": one_hot,
}

__all__ = ["COMPOSITES", "CUDA_KERNELS", "META", "kernel_of_cuda"]

"""A few elements of a tensor on the CPU, read without any device memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: Elements looked at per parameter: all of a small one, a stretch from the middle of a larger one.
_ON_CPU, _ON_CUDA = 16_384, 256


def piece(tensor: Tensor) -> Tensor | None:
    """Some elements on the CPU. From a GPU a contiguous stretch, which needs no device memory."""
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_contiguous():
        return None
    if tensor.device.type == "meta" or tensor.layout is not torch.strided or not tensor.numel():
        return None
    if not tensor.dtype.is_floating_point:
        return None
    flat = tensor.detach().view(-1)
    most = _ON_CUDA if tensor.device.type == "cuda" else _ON_CPU
    start = max(0, (flat.numel() - most) // 2)
    found = flat[start : start + most]
    return found.to("cpu") if tensor.device.type == "cuda" else found.clone()


def spread(parameters: list[Tensor], most_on_cuda: int) -> list[Tensor]:
    """On a GPU each sample costs a copy: at most so many parameters, spread over the model."""
    if not parameters or parameters[0].device.type != "cuda" or len(parameters) <= most_on_cuda:
        return parameters
    stride = len(parameters) / most_on_cuda
    return [parameters[int(i * stride)] for i in range(most_on_cuda)]

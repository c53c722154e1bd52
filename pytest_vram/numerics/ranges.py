"""The ends of a dtype's range: float16 values about to overflow, and infinities that vanish again.

Both leave everything finite, so nobody else notices them. Values are read where that costs no
device memory: in the run on the CPU, never on a card.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_vram.findings import Finding
from pytest_vram.frames import user_line
from pytest_vram.numerics.events import Listener
from pytest_vram.numerics.loop import Loop
from pytest_vram.numerics.nonfinite import plain_data

_END = torch.finfo(torch.float16).max  # 65504
#: Less than one doubling is left.
_NEAR = _END / 2
#: They put large values there on purpose: masks, clamps at the end of the range.
_INTENDED = re.compile(r"MaskedFill|Where|Clamp|IndexPut|Hardtanh|ConstantPad|Scatter")


class RangeWatch(Listener):
    """The largest float16 output of each module, where it comes near the end of the range; and
    which activations gave nothing but zeros."""

    def __init__(self, loop: Loop, values: bool) -> None:
        self._loop, self._values = loop, values
        self.near: dict[str, tuple[float, str, int]] = {}  # module -> (max |x|, operator, step)
        self.silent: dict[str, bool] = {}  # activation -> only zeros until now

    def module_ran(self, module: nn.Module, output: Any) -> None:
        if not self._values or not isinstance(output, Tensor) or not output.requires_grad:
            return
        if output.device.type != "cpu":
            return
        if not module._parameters and not module._modules:
            self._note_zeros(module, output)
        if output.dtype is torch.float16:
            self._note_peak(module, output)

    def _note_peak(self, module: nn.Module, output: Tensor) -> None:
        data = _on_cpu(output)
        node = output.grad_fn.name() if output.grad_fn is not None else ""
        if data is None or _INTENDED.search(node):
            return
        low, high = torch.aminmax(data)
        peak = max(float(high), -float(low))
        if _NEAR <= peak < _END:
            name = self._loop.names.module_name(module)
            if peak > self.near.get(name, (0.0, "", 0))[0]:
                self.near[name] = peak, _operator(node), self._loop.backward_step()

    def _note_zeros(self, module: nn.Module, output: Tensor) -> None:
        """Of modules without parameters, such as ReLU: one look at its output, until it opens."""
        name = f"{self._loop.names.module_name(module)} ({type(module).__name__})"
        if self.silent.get(name, True):
            data = _on_cpu(output)
            self.silent[name] = data is not None and not bool(data.any())

    def only_zeros(self) -> list[str]:
        return [name for name, silent in self.silent.items() if silent]

    def findings(self) -> list[Finding]:
        if not self.near:
            return []
        ranked = sorted(self.near.items(), key=lambda entry: -entry[1][0])
        name, (peak, operator, step) = ranked[0]
        return [
            Finding(
                "non-finite",
                "warn",
                f"near the end of float16's range: max |output| of module {name} ({operator}) is "
                f"{peak:.5g} at step {step}, {100 * peak / _END:.0f} % of 65504; at "
                f"{_END / peak:.3g} times that it is inf",
                tuple(
                    f"also module {other} ({made_by}): {value:.5g}"
                    for other, (value, made_by, _) in ranked[1:8]
                ),
                "compute this part in bfloat16 or float32, or scale its inputs down: no loss scale "
                "helps a forward",
                {"module": name, "peak": peak},
            )
        ]


class VanishingInfinities:
    """A sight of :class:`~pytest_vram.numerics.functions.Functions`: divisions by a float16 inf,
    which give 0.

    A norm's sum of squares that overflows becomes ``x * rsqrt(inf) = 0``: the layer's output is 0
    and everything stays finite. Looked at are roots' reciprocals and divisors that are broadcast,
    as a normaliser is; an inf written on purpose (a masked distance) divides its own element.
    """

    def __init__(self) -> None:
        self.functions: Collection[Any] = _DIVISIONS
        self.found: list[Finding] = []

    def called(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if self.found:
            return
        divisor = _divisor(func, args)
        if divisor is None or divisor.dtype is not torch.float16:
            return
        data = _on_cpu(divisor)
        if data is None or not bool(data.isinf().any()):
            return
        count = int(data.isinf().sum())
        self.found.append(
            Finding(
                "non-finite",
                "warn",
                f"{count} of {data.numel()} divisors overflowed to inf in float16: "
                f"{func.__name__.strip('_')} at {user_line()} makes 0 of what they divide, and "
                "nothing else is not finite",
                (),
                "float16 ends at 65504, so squares overflow beyond 255: sum them in float32, "
                "x.float().pow(2).mean(-1)",
                {"what": "divisor", "count": count},
            )
        )


_ROOTS = {torch.rsqrt, Tensor.rsqrt}
_QUOTIENTS = {
    torch.div, torch.true_divide, torch.divide, Tensor.div, Tensor.divide, Tensor.true_divide,
    Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__,
}  # fmt: skip
_DIVISIONS = {*_ROOTS, *_QUOTIENTS, F.normalize}


def _divisor(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    if func in _ROOTS:
        return args[0] if args else None
    if func is F.normalize:  # its norm is not seen: a row of zeros out of one that is not
        return _norm_of(args[0]) if args and isinstance(args[0], Tensor) else None
    if len(args) < 2 or not all(isinstance(arg, Tensor) for arg in args[:2]):
        return None
    above, below = args[:2]
    broadcast = below.numel() < above.numel() or 0 in below.stride()
    return below if broadcast else None


def _norm_of(rows: Tensor) -> Tensor | None:
    """The Euclidean norms along dimension 1, ``normalize``'s default."""
    if rows.dtype is not torch.float16 or rows.dim() < 2:
        return None
    data = _on_cpu(rows)
    return None if data is None else torch.linalg.vector_norm(data, dim=1)


def _on_cpu(tensor: Tensor) -> Tensor | None:
    data = plain_data(tensor)
    return data if data is not None and data.device.type == "cpu" else None


def _operator(node: str) -> str:
    """``AddmmBackward0`` -> ``addmm``."""
    name = re.sub(r"Backward\d*$", "", node)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()

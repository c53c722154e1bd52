"""Gradients that the loop changes itself while they are multiplied by the loss scale.

A constant factor means the same in both units. Clipping, noise, a penalty or ``nan_to_num`` do not:
samples of the gradients from the end of backward are compared with those that the scaler gets. A
norm that is brought to a limit is told from a factor by what stays the same from step to step: the
norm afterwards, or the factor.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_vram.findings import Finding
from pytest_vram.frames import user_line
from pytest_vram.numerics.collector import Collector
from pytest_vram.numerics.events import Backward, ScalerCall, Update
from pytest_vram.numerics.loop import Loop
from pytest_vram.numerics.names import listed, optimizer_parameters
from pytest_vram.numerics.samples import piece, spread
from pytest_vram.numerics.scaler_calls import ScalerCalls

#: Parameters that are compared on a GPU, and how often gradients are compared.
_MOST_CUDA, _LOOKS = 4, 8
#: Relative difference up to which factors and norms are the same: float32's rounding, summed up.
_SAME = 1e-3


@dataclass(frozen=True, slots=True)
class _Look:
    """What happened to the gradients of one optimizer before a step, if to all alike."""

    factors: dict[int, float]  #: parameter -> what its gradient was multiplied by
    norms: tuple[float, float]  #: of all, before and after; not known on a GPU
    scale: float


class HandWrittenWatch(Collector):
    """Also a sight of :class:`~pytest_vram.numerics.functions.Functions`, for the line."""

    def __init__(
        self, loop: Loop, found: dict[str, Finding], calls: ScalerCalls, values: bool
    ) -> None:
        super().__init__(loop, found)
        self.functions: Collection[Any] = _WRITES
        self._calls, self._values = calls, values
        self._samples: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._norms: dict[int, float] = {}
        self._storages: set[int] = set()  # of scaled gradients
        self._wrote = ""  # the function that last wrote into one, and the line
        self._looks: dict[int, list[_Look]] = {}  # of an optimizer
        self._backward = ""
        self._compared = 0

    # ---- from backward to the scaler

    def backward_ends(self, call: Backward) -> None:
        if not self._values or call.scaler is None or self._compared >= _LOOKS:
            return
        self._wrote, self._backward = "", call.line
        parameters = [p for r in self._loop.reached if (p := r.state.parameter()) is not None]
        for parameter in spread(parameters, _MOST_CUDA):
            assert parameter.grad is not None
            sample = piece(parameter.grad)
            if sample is not None:
                self._samples[id(parameter)] = weakref.ref(parameter), sample
        for parameter in parameters:
            assert parameter.grad is not None
            if parameter.grad.device.type == "cpu" and not parameter.grad.is_sparse:
                self._storages.add(_storage(parameter.grad))
                self._norms[id(parameter)] = float(parameter.grad.norm())

    def called(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """In place, or by a new ``.grad``."""
        if not self._storages or not args:
            return
        first = args[0][0] if isinstance(args[0], (list, tuple)) and args[0] else args[0]
        if not isinstance(first, Tensor):
            return
        written = id(first) in self._norms if func == _SET else _storage(first) in self._storages
        if written:
            name = "" if func == _SET else f" by {_name(func)}"
            self._wrote = f"at {user_line()}{name}"

    def unscale_begins(self, call: ScalerCall) -> None:
        self._compare(call.optimizer, call.line)

    def update_begins(self, update: Update) -> None:
        scaler = update.scaler
        if scaler is not None and id(update.optimizer) not in self._calls.of(scaler).unscaled:
            self._compare(update.optimizer, update.line)

    def _compare(self, optimizer: Any, line: str) -> None:
        if not self._samples:
            return
        self._compared += 1
        looks = self._looks.setdefault(id(optimizer), [])
        parameters = [p for p in optimizer_parameters(optimizer) if p.grad is not None]
        scale, factors = 1.0, {}
        for parameter in parameters:
            before = self._sample(parameter)
            now = (
                piece(parameter.grad) if before is not None and parameter.grad is not None else None
            )
            if before is None or now is None or before.shape != now.shape:
                continue
            scale = self._loop.state(parameter).scale
            if scale == 1.0 or torch.equal(before, now):
                continue
            factor = self._judge(parameter, before, now, scale, line)
            if factor is None:
                return
            factors[id(parameter)] = factor
        if factors:
            looks.append(_Look(factors, self._norms_of(parameters), scale))
            self._judge_looks(optimizer, looks, line)
        self._forget(parameters)

    def _sample(self, parameter: Tensor) -> Tensor | None:
        known = self._samples.get(id(parameter))
        return known[1] if known is not None and known[0]() is parameter else None

    def _forget(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            self._samples.pop(id(parameter), None)
        self._storages.clear()

    def _norms_of(self, parameters: list[Tensor]) -> tuple[float, float]:
        if any(id(p) not in self._norms for p in parameters):
            return math.nan, math.nan
        before = [self._norms[id(p)] for p in parameters]
        after = [float(p.grad.norm()) for p in parameters if p.grad is not None]
        return math.hypot(*before), math.hypot(*after)

    # ---- judging

    def _judge(
        self, parameter: Tensor, before: Tensor, now: Tensor, scale: float, line: str
    ) -> float | None:
        """The factor between the two; None where there is none, and that was told."""
        name = self._loop.names.name(parameter)
        where = self._wrote or f"between backward at {self._backward} and {line}"
        finite = before.isfinite()
        if bool((~finite & now.isfinite()).any()):
            self._add(
                "inf hidden",
                f"inf or NaN was replaced in the scaled gradient of {name} {where}: the scaler "
                "does not see the overflow, keeps its scale and applies what is left",
                hint="leave inf and NaN to the scaler, which skips such a step",
            )
            return None
        both = finite & (before != 0) & (now != 0)
        ratio = now[both] / before[both]
        if not ratio.numel():
            return 1.0
        low, high = float(ratio.min()), float(ratio.max())
        if high - low <= _SAME * abs(high):
            return high
        different = ratio[ratio != 1]
        if _alike(different.min(), different.max()):
            return 1.0  # a part of it was multiplied: rows, a mask
        changed = now[both][ratio != 1].abs()
        if _alike(changed.min(), changed.max()):
            limit = float(changed.max())
            self._clipped(scale, where, f"{name} is limited to {limit:g}", limit / scale, limit)
        else:
            self._add(
                "changed scaled",
                f"gradients were changed while scaled by {scale:g} {where}, element by element "
                f"({name}): a threshold, noise or a penalty is {scale:g} times smaller there than "
                "it is meant",
                hint="call scaler.unscale_(optimizer) before changing gradients",
                scale=scale,
            )
        return None

    def _judge_looks(self, optimizer: Any, looks: list[_Look], line: str) -> None:
        if len(looks) < 2:
            return
        old, new = looks[-2:]
        common = [key for key in new.factors if key in old.factors]
        changes = [new.factors[key] / old.factors[key] for key in common]
        if not changes or all(_alike(change, 1.0) for change in changes):
            return  # a constant: 1 / world size, a rate per layer
        where = self._wrote or f"between backward at {self._backward} and {line}"
        names = listed(
            self._loop.names.name(p)
            for p in optimizer_parameters(optimizer)
            if id(p) in new.factors
        )
        if not _alike(min(changes), max(changes)):
            self._clipped(new.scale, where, f"each of {names} is brought to its own norm")
        elif _alike(old.norms[1], new.norms[1]) and not _alike(old.norms[0], new.norms[0]):
            limit = new.norms[1]
            what = f"the norm over {names} is brought to {limit:.4g}"
            self._clipped(new.scale, where, what, limit / new.scale, limit)

    def _clipped(
        self, scale: float, where: str, what: str, true: float = 0.0, limit: float = 0.0
    ) -> None:
        after = f"; after unscaling that is {true:.4g} instead of {limit:.4g}" if limit else ""
        self._add(
            "clip scaled",
            f"gradients were clipped while scaled by {scale:g} {where}: {what}{after}",
            hint="call scaler.unscale_(optimizer) before clipping",
            scale=scale,
        )


def _alike(one: Any, other: Any) -> bool:
    a, b = float(one), float(other)
    return abs(a - b) <= _SAME * max(abs(a), abs(b))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", "") or "")


_SET: Any = vars(torch._C.TensorBase)["grad"].__set__
_WRITES = frozenset(
    [
        _SET,
        *(
            getattr(Tensor, name)
            for name in (
                "mul_", "multiply_", "div_", "divide_", "true_divide_", "add_", "sub_", "subtract_",
                "clamp_", "clamp_min_", "clamp_max_", "clip_", "copy_", "nan_to_num_", "renorm_",
                "lerp_", "addcmul_", "masked_fill_", "__setitem__", "__imul__", "__itruediv__",
                "__iadd__", "__isub__", "sign_", "tanh_",
            )
        ),
        *(
            getattr(torch, name)
            for name in (
                "_foreach_mul_", "_foreach_div_", "_foreach_add_", "_foreach_sub_",
                "_foreach_clamp_min_", "_foreach_clamp_max_", "_foreach_copy_", "_foreach_lerp_",
                "clamp_", "clip_", "nan_to_num_",
            )
        ),
    ]
)  # fmt: skip

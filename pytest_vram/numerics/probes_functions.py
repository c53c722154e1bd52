"""Probes of functions that a loop calls: clipping, checkpointing, losses, the autocast cache."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor

from pytest_vram.frames import user_line
from pytest_vram.numerics.events import Clip
from pytest_vram.numerics.wire import Wire


class FunctionProbes:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def install(self) -> None:
        """Clipping and checkpointing are functions that user modules import by name."""
        for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
            original = getattr(torch.nn.utils, name)
            around = self._around_clip(original)
            for module in list(sys.modules.values()):
                namespace = getattr(module, "__dict__", None)
                if isinstance(namespace, dict) and namespace.get(name) is original:
                    setattr(module, name, around)
                    self._wire.undo.callback(setattr, module, name, original)
        self._wire.patch(torch.nn.functional, "binary_cross_entropy", self._around_banned)
        # torch.utils.checkpoint.checkpoint looks both up when it is called (2.6 to 2.14).
        self._wire.patch(checkpointing, "CheckpointFunction", self._around_reentrant)
        self._wire.patch(
            checkpointing,
            "_checkpoint_without_reentrant_generator",
            self._around_non_reentrant,
        )
        self._wire.patch(torch, "clear_autocast_cache", self._around_cache_clear)

    def _around_clip(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clip)
        def clip_gradients(parameters: Any, limit: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            owned = [p for p in tensors if isinstance(p, Tensor)]
            seen = Clip(owned, clip.__name__.lstrip("_"), float(limit), user_line())
            self._wire.tell("clip_begins", seen)
            result = clip(tensors, limit, *args, **kwargs)
            seen.norm = kwargs.get("total_norm", args[0] if args else None)
            if clip.__name__ == "clip_grad_norm_":
                seen.norm = result
            self._wire.tell("clipped", seen)
            return result

        return clip_gradients

    def _around_banned(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """CUDA's autocast refuses it (autocast_mode.cpp), the CPU's casts to fp32."""

        @functools.wraps(function)
        def banned(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if any(torch.is_autocast_enabled(device) for device in ("cuda", "cpu")):
                self._wire.tell("banned_called", function.__name__, user_line())
            return function(*args, **kwargs)

        return banned

    def _around_reentrant(self, original: Any) -> Any:
        wire = self._wire

        class Reentrant:
            """Stands where ``torch.utils.checkpoint`` looks ``CheckpointFunction`` up."""

            @staticmethod
            def apply(function: Any, preserve: bool, *args: Any) -> Any:
                wire.tell("checkpointed", function, args, True, user_line())
                return original.apply(function, preserve, *args)

        return Reentrant

    def _around_non_reentrant(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def generator(function: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            self._wire.tell("checkpointed", function, args, False, user_line())
            return original(function, *args, **kwargs)

        return generator

    def _around_cache_clear(self, clear: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clear)
        def clear_autocast_cache() -> None:
            clear()
            self._wire.tell("autocast_cache_cleared")

        return clear_autocast_cache

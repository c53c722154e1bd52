"""Which of autocast's casts are kept: copies of weights, once per autocast region.

``at::autocast::cached_cast`` (ATen/autocast_mode.cpp) casts weights and inputs alike, and keeps
the copies of fp32 leaves that require gradients until the outermost autocast ends. A stack shows
the cast, not whether it is kept: the module that runs and the size say whose copy it is.
"""

from __future__ import annotations

from collections import defaultdict

from pytest_vram.trace import Allocation

#: Autocast's low-precision types have two bytes an element.
_BYTES = 2


class Casts:
    """Matches casts with the trained fp32 parameters that are known so far."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._of_module: dict[str, list[str]] = defaultdict(list)
        self._of_size: dict[int, list[str]] = defaultdict(list)
        self._kept: dict[str, Allocation] = {}  # in this autocast region

    def parameter(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        if dtype != "float32" or name in self._known:
            return
        elements = 1
        for extent in shape:
            elements *= extent
        self._known.add(name)
        self._of_module[name.rpartition(".")[0]].append(name)
        self._of_size[elements].append(name)

    def forget(self) -> None:
        """The outermost autocast ended."""
        self._kept.clear()

    def made(self, cast: Allocation) -> None:
        """``cast`` was just allocated; label it if it is a parameter's."""
        fitting = self._fitting(cast.module, cast.requested // _BYTES)
        if not fitting:
            return
        name = next((n for n in fitting if n not in self._kept), fitting[-1])
        earlier = self._kept.get(name)
        if earlier is not None:
            # An input of the same size was cast first: operators take it before their weights.
            earlier.bill = earlier.name = ""
        self._kept[name] = cast
        cast.bill, cast.name = "autocast_cache", f"autocast copy of {name}"

    def _fitting(self, module: str, elements: int) -> list[str]:
        """Parameters of that size that ``module`` is likely to cast, in order."""
        sized = self._of_size.get(elements, [])
        own = self._of_module.get(module, [])
        if fitting := [name for name in own if name in sized]:
            return fitting
        waiting = [name for name in sized if name not in self._kept]
        # nn.MultiheadAttention uses the weight of its out_proj without calling it.
        if inside := [name for name in waiting if name.startswith(f"{module}.")]:
            return inside[:1]
        # Weights used outside the module that they are named after: tied or functional.
        return [] if own else waiting[:1]

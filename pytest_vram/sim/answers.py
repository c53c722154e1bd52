"""What the simulated card says about its memory, and again in the pass that has no card.

A test may read ``torch.cuda.max_memory_allocated()`` and its relatives. Where its numbers are
checked on the CPU there is nothing to read, so it hears what the simulated pass heard at the same
line. A line that the simulated pass did not reach (``if vram.has_values:``), or not as often, hears
what the card would have said after the same optimizer step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from pytest_vram.frames import nearest_frame
from pytest_vram.sim.allocator import CachingAllocator
from pytest_vram.sim.profiles import Profile

#: The figures, all in bytes (``memory_stats``: PyTorch's keys; ``mem_get_info``: free and total).
_FIGURES: dict[str, Callable[[CachingAllocator], Any]] = {
    "allocated": lambda allocator: allocator.allocated,
    "peak_allocated": lambda allocator: allocator.peak_allocated,
    "reserved": lambda allocator: allocator.reserved,
    "peak_reserved": lambda allocator: allocator.peak_reserved,
    "memory_stats": lambda allocator: allocator.memory_stats(),
    "mem_get_info": lambda allocator: allocator.mem_get_info(),
}

_Place = tuple[str, CodeType | None, int]


def _asked_at(name: str) -> _Place:
    code, line = nearest_frame() or (None, 0)
    return name, code, line


class Answers:
    """What one simulated pass was told. ``profile``: its card."""

    def __init__(self, profile: Profile, allocator: CachingAllocator) -> None:
        self.profile = profile
        self._allocator = allocator
        self.said: dict[_Place, list[Any]] = defaultdict(list)
        #: Every figure at the beginning, after each optimizer step, and at the end.
        self.moments: list[dict[str, Any]] = [self._figures()]

    def _figures(self) -> dict[str, Any]:
        return {name: read(self._allocator) for name, read in _FIGURES.items()}

    def figure(self, name: str) -> Any:
        """One of the card's figures now."""
        value = _FIGURES[name](self._allocator)
        self.keep(name, value)
        return value

    def keep(self, name: str, value: Any) -> None:
        """``value`` is what the program is told under ``name``."""
        self.said[_asked_at(name)].append(value)

    def follow_steps(self) -> Callable[[], None]:
        """Optimizer steps are moments from now on, until what is returned is called."""
        return register_optimizer_step_post_hook(lambda *_: self.moment()).remove

    def moment(self) -> None:
        self.moments.append(self._figures())


class CardOfAnswers:
    """In the place of a simulation: the card that ``torch.cuda`` speaks for where numbers are
    checked on the CPU. It says again what it said, and does nothing."""

    def __init__(self, answers: Answers) -> None:
        self.profile = answers.profile
        self._answers = answers
        self._again = {place: iter(values) for place, values in answers.said.items()}
        self._steps = 0

    def follow_steps(self) -> Callable[[], None]:
        return register_optimizer_step_post_hook(self._step).remove

    def _step(self, *_: Any) -> None:
        self._steps += 1

    def figure(self, name: str) -> Any:
        for value in self._again.get(_asked_at(name), ()):
            return value
        moments = self._answers.moments
        # Before the first step: as after it, when there is a model.
        return moments[min(max(self._steps, 1), len(moments) - 1)].get(name)

    def segments(self) -> list[dict[str, Any]]:
        return self.figure("segments") or []

    def shown(self) -> dict[str, Any]:
        return self.figure("snapshot") or {"segments": self.segments(), "device_traces": [[]]}

    # ---- what a simulation does to its allocator

    def adjust(self, name: str, *arguments: Any, **options: Any) -> None: ...

    def reset(self, what: str) -> None: ...

    def use_stream(self, number: int) -> None: ...

    def clear_workspaces(self) -> None: ...

    def thread(self) -> str:
        return "main"

    def raw_alloc(self, size: int) -> int:
        return 1 << 40

    def raw_delete(self, address: int) -> None: ...

    def pool_users(self, number: tuple[int, int]) -> int:
        return 1

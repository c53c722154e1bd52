"""PYTORCH_CUDA_ALLOC_CONF: what it says, and the rounding it asks for.

Read from c10/cuda/CUDAAllocatorConfig.cpp (2.6 to 2.8, and later its CUDA part) and
c10/core/AllocatorConfig.cpp (2.9 on); checked against the binaries of 2.6, 2.12, 2.13 and 2.14.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

MIB = 1 << 20
MIN_BLOCK = 512
UNLIMITED = (1 << 64) - 1
INTERVALS = 16  # power-of-two divisions are set for up to 1 MiB, 2 MiB, ... 32 GiB and above

Version = tuple[int, int]

#: Keys that steer pinned host memory or locking, not where device memory goes: since which version
#: they are known, and how their value is checked.
_ELSEWHERE: dict[str, tuple[Version, str]] = {
    "release_lock_on_cudamalloc": ((2, 6), "bool"),
    "release_lock_on_hipmalloc": ((2, 6), "bool"),
    "pinned_use_cuda_host_register": ((2, 6), "bool"),
    "pinned_use_hip_host_register": ((2, 6), "bool"),
    "pinned_use_background_threads": ((2, 6), "bool"),
    "pinned_num_register_threads": ((2, 6), "threads"),
    "pinned_reserve_segment_size_mb": ((2, 9), "positive"),
    "graph_capture_record_stream_reuse": ((2, 9), "bool"),
    "pinned_free_catch_all": ((2, 12), "bool"),
    "pinned_max_round_threshold_mb": ((2, 13), "size"),
    "pinned_max_cached_size_mb": ((2, 13), "size"),
}


class InvalidConfig(ValueError):  # noqa: N818 (a fixed name)
    """PYTORCH_CUDA_ALLOC_CONF is not understood; the text is PyTorch's."""


@dataclass(frozen=True, slots=True)
class Config:
    """The settings that decide the allocator's behaviour; sizes in bytes."""

    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    expandable_segments: bool = False
    large_segment: int = 20 * MIB
    memory_fraction: float = 1.0
    reject_early: bool = False  # throw_on_cudamalloc_oom
    text: str = field(default="", compare=False)

    def updated(self, text: str, version: Version) -> Config:
        """These settings with those of ``text`` on top, as PyTorch's parser changes them: three
        go back to their defaults with every new text, the others stay as they were."""
        start = replace(
            self,
            max_split_size=UNLIMITED,
            garbage_collection_threshold=0.0,
            roundup_power2_divisions=(0,) * INTERVALS,
            text=text,
        )
        return replace(start, **_Parser(text, version, start).parse())

    @property
    def rounds_to_power2(self) -> bool:
        return any(divisions > 1 for divisions in self.roundup_power2_divisions)

    def round_size(self, size: int) -> int:
        """What the allocator looks for when ``size`` bytes are asked for (``round_size``)."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        interval = min(max(size.bit_length() - 21, 0), INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and size > MIN_BLOCK * divisions:
            return round_to_division(size, divisions)
        return -(-size // MIN_BLOCK) * MIN_BLOCK


def round_to_division(size: int, divisions: int) -> int:
    """``size`` up to the next of ``divisions`` equal steps between two powers of two."""
    floor = 1 << (size.bit_length() - 1)
    if size == floor:
        return size
    step = floor >> (divisions.bit_length() - 1)
    if step == 0:
        return floor << 1
    return -(-size // step) * step


class _Parser:
    """One reading of the text. Two dialects: 2.6 to 2.8 are stricter about punctuation."""

    def __init__(self, text: str, version: Version, start: Config) -> None:
        # 2.6 to 2.8 drop blanks, later versions all white space.
        bare = text.replace(" ", "") if version < (2, 9) else re.sub(r"\s+", "", text)
        self._tokens = [token for token in re.split(r"([,:\[\]])", bare) if token]
        self._at = 0
        self._version = version
        self._strict = version < (2, 9)
        self._start = start
        self._found: dict[str, Any] = {}

    def parse(self) -> dict[str, Any]:
        if self._version >= (2, 10) and "large_segment_size_mb" in self._tokens:
            # Read before all others, wherever it stands: it is the floor of two of them.
            self._at = self._tokens.index("large_segment_size_mb")
            self._found["large_segment"] = self._large_segment()
            self._at = 0
        while self._at < len(self._tokens):
            self._pair(self._tokens[self._at])
            self._at += 1
            if self._at < len(self._tokens):
                self._expect(",")
                self._at += 1
        return self._found

    def _pair(self, key: str) -> None:
        if key == "max_split_size_mb":
            self._found["max_split_size"] = self._at_least_large(key)
        elif key == "max_non_split_rounding_mb":
            self._found["max_non_split_rounding"] = self._at_least_large(key)
        elif key == "garbage_collection_threshold":
            self._found["garbage_collection_threshold"] = self._threshold()
        elif key == "roundup_power2_divisions":
            self._found["roundup_power2_divisions"] = self._divisions()
        elif key == "expandable_segments":
            self._found["expandable_segments"] = self._bool(key)
        elif key == "large_segment_size_mb" and self._version >= (2, 10):
            self._found["large_segment"] = self._large_segment()
        elif key == "per_process_memory_fraction" and self._version >= (2, 10):
            self._found["memory_fraction"] = self._fraction()
        elif key == "throw_on_cudamalloc_oom" and self._version >= (2, 12):
            self._found["reject_early"] = self._bool(key)
        elif key == "backend":
            self._backend()
        elif key in _ELSEWHERE and self._version >= _ELSEWHERE[key][0]:
            self._elsewhere(key, _ELSEWHERE[key][1])
        else:
            raise InvalidConfig(self._unknown(key))

    def _unknown(self, key: str) -> str:
        if self._strict:
            return f"Unrecognized CachingAllocator option: {key}"
        parser = "CUDA" if self._version == (2, 9) else "Accelerator"
        return f"Unrecognized key '{key}' in {parser} allocator config."

    # -- tokens --------------------------------------------------------------------------------

    def _next(self, key: str) -> str:
        """The value behind ``key`` and its colon."""
        self._at += 1
        self._expect(":")
        self._at += 1
        if self._at >= len(self._tokens):
            raise InvalidConfig(
                f"Error, expecting {key} value"
                if self._strict
                else "Index out of bounds in ConfigTokenizer"
            )
        return self._tokens[self._at]

    def _expect(self, token: str) -> None:
        # From 2.9 on the tokenizer looks at the token but does not insist on it.
        if self._strict and (self._at >= len(self._tokens) or self._tokens[self._at] != token):
            raise InvalidConfig(f"Error parsing CachingAllocator settings, expected {token}")
        if self._at >= len(self._tokens):
            raise InvalidConfig("Index out of bounds in ConfigTokenizer")

    def _int(self, token: str) -> int:
        # stoi and stoull read the digits that a text begins with.
        match = re.match(r"\s*\+?(\d+)", token)
        if match is None:
            raise InvalidConfig("stoi" if self._strict else "stoull")
        return int(match[1])

    def _float(self, token: str) -> float:
        match = re.match(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", token)
        if match is None:
            raise InvalidConfig("stod")
        return float(match[0])

    def _bool(self, key: str) -> bool:
        value = self._next(key)
        if value not in ("True", "False"):
            raise InvalidConfig(
                f"Expected a single True/False argument for {key}"
                if self._strict
                else f"Expected 'True' or 'False' at index {self._at} in ConfigTokenizer but got "
                f"'{value}'"
            )
        return value == "True"

    # -- values --------------------------------------------------------------------------------

    def _at_least_large(self, key: str) -> int:
        value = self._int(self._next(key))
        large = self._found.get("large_segment", self._start.large_segment) // MIB
        if self._version < (2, 7):
            if value <= large:
                raise InvalidConfig(f"CachingAllocator option {key} too small, must be > {large}")
        elif value < large:
            raise InvalidConfig(f"CachingAllocator option {key} too small, must be >= {large}")
        return min(value * MIB, UNLIMITED)

    def _large_segment(self) -> int:
        value = self._int(self._next("large_segment_size_mb"))
        if value <= 10:
            raise InvalidConfig("CachingAllocator option large_segment_size_mb must be > 10 MB")
        return value * MIB

    def _threshold(self) -> float:
        value = self._float(self._next("garbage_collection_threshold"))
        if self._version < (2, 7) and value <= 0:
            raise InvalidConfig("garbage_collect_threshold too small, set it 0.0~1.0")
        if self._version < (2, 7) and value >= 1:
            raise InvalidConfig("garbage_collect_threshold too big, set it 0.0~1.0")
        if not 0 < value < 1:
            raise InvalidConfig("garbage_collect_threshold is invalid, set it in (0.0, 1.0)")
        return value

    def _fraction(self) -> float:
        value = self._float(self._next("per_process_memory_fraction"))
        if not 0 <= value <= 1:
            raise InvalidConfig("per_process_memory_fraction is invalid, set it in [0.0, 1.0]")
        return value

    def _divisions(self) -> tuple[int, ...]:
        first = self._next("roundup_power2_divisions")
        word = "divisons" if self._strict else "divisions"  # PyTorch's spelling, then and now
        if first != "[":
            value = self._int(first)
            if not _is_power2(value):
                raise InvalidConfig(f"For roundups, the {word} has to be power of 2 ")
            return (value,) * INTERVALS
        result = list(self._start.roundup_power2_divisions)
        last = -1
        self._at += 1
        while self._at < len(self._tokens) and self._tokens[self._at] != "]":
            boundary = self._tokens[self._at]
            value = self._int(self._next("roundup_power2_divisions"))
            if value and not _is_power2(value):
                raise InvalidConfig(
                    f"For roundups, the {word} has to be power of 2 or 0 to disable roundup "
                )
            if boundary == ">":
                # Up to 2.8 this overwrote the last interval that was named, too.
                begin = max(last, 0) if self._strict else max(last, 0) + 1
                result[begin:] = [value] * (INTERVALS - begin)
            else:
                last = self._interval(boundary, value, result, first=last < 0)
            self._at += 1
            if self._at < len(self._tokens) and self._tokens[self._at] != "]":
                self._expect(",")
                self._at += 1
        if self._at >= len(self._tokens):
            raise InvalidConfig("Expected closing bracket ']' in ConfigTokenizer but reached end")
        return tuple(result)

    def _interval(self, boundary: str, value: int, result: list[int], *, first: bool) -> int:
        size = self._int(boundary)
        if not _is_power2(size):
            raise InvalidConfig("For roundups, the intervals have to be power of 2 ")
        index = min(size.bit_length() - 1, INTERVALS - 1)
        if first:
            result[:index] = [value] * index
        result[index] = value
        return index

    def _backend(self) -> None:
        value = self._next("backend")
        if value == "cudaMallocAsync":
            raise InvalidConfig(
                "backend:cudaMallocAsync leaves placement to the driver; only backend:native can "
                "be simulated"
            )
        if value != "native":
            raise InvalidConfig("Unknown allocator backend, options are native and cudaMallocAsync")

    def _elsewhere(self, key: str, kind: str) -> None:
        if kind == "bool":
            self._bool(key)
            return
        value = self._int(self._next(key))
        got = "" if self._strict else f", got {value}"
        if kind == "threads" and not _is_power2(value):
            space = " " if self._strict else ""
            raise InvalidConfig(f"Number of register threads has to be power of 2{space}{got}")
        if kind == "threads" and value > 128:
            raise InvalidConfig(
                f"Number of register threads should be less than or equal to 128{got}"
            )
        if kind == "positive" and value == 0:
            raise InvalidConfig("Pinned reserve segment size has to be greater than 0")


def _is_power2(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0

"""The simulated allocator and PyTorch's own, given the same events: every answer equal.

PyTorch's runs in its CUDA build on the stub driver (tests/stub_driver): addresses, memory_stats(),
snapshots, the memory history and the text of out-of-memory errors are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from allocator_events import random_events

from pytest_vram.sim.allocator import CachingAllocator, DeviceOutOfMemory, FirstFit

HERE = Path(__file__).resolve().parent
RUN = HERE.parent / "stub_driver" / "run.sh"
CACHE = Path(os.environ.get("VRAM_STUB_CACHE") or Path.home() / ".cache/pytest-vram-stub")
EVENTS = 2500

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CACHE / "lib" / "libcudastub.so").exists(),
        reason="the stub driver is not built: run tests/stub_driver/build.sh",
    ),
]


def ask_pytorch(seed: int, streams: int, conf: str, output: Path) -> dict[str, Any]:
    command = [RUN, HERE / "allocator_events.py", seed, EVENTS, streams, output]
    settings = {"PYTORCH_CUDA_ALLOC_CONF": conf, "STUB_MEM_GIB": "3"}
    subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **settings},
        check=True,
        capture_output=True,
        timeout=300,
    )
    answers: dict[str, Any] = json.loads(output.read_text())
    return answers


class Simulated:
    def __init__(self, asked: dict[str, Any], conf: str) -> None:
        first = min(entry[1] for entry in asked["trace"] if entry[0].startswith("segment_"))
        self.streams = asked["streams"]
        self.trace: list[list[Any]] = []
        self.live: dict[int, Any] = {}
        self.allocator = CachingAllocator(
            asked["total"],
            conf,
            context=asked["context"],
            addresses=FirstFit(first),
            version=tuple(asked["version"]),
        )
        self.allocator.tracer = lambda *entry: self.trace.append(list(entry))

    def answer(self, kind: str, key: Any, value: Any, stream: Any) -> Any:
        allocator = self.allocator
        if kind == "malloc":
            try:
                self.live[key] = allocator.malloc(value, self.streams[stream])
            except DeviceOutOfMemory as error:
                return str(error)
            return self.live[key].address
        if kind == "free" and key in self.live:
            allocator.free(self.live.pop(key))
        elif kind == "record_stream" and key in self.live:
            allocator.record_stream(self.live[key], self.streams[value])
        elif kind == "empty_cache":
            allocator.empty_cache()
        elif kind == "reset_peak":
            allocator.reset_peak()
        elif kind == "reset_accumulated":
            allocator.reset_accumulated()
        elif kind == "fraction":
            allocator.set_memory_fraction(value)
        elif kind == "state":
            return [allocator.memory_stats(), json.loads(json.dumps(allocator.segments()))]
        return None


def comparable(answer: Any) -> Any:
    """Without the requested sizes of free blocks, which PyTorch leaves from their last use."""
    if isinstance(answer, list):
        for segment in answer[1]:
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    block["requested_size"] = 0
    return answer


def in_order(trace: list[list[Any]]) -> list[list[Any]]:
    """PyTorch takes back blocks of several streams in the order of a hash table: sort each run."""
    result: list[list[Any]] = []
    run: list[list[Any]] = []
    for entry in [*trace, ["end"]]:
        if entry[0] == "free_completed":
            run.append(entry)
        elif entry[0] != "snapshot":
            result += [*sorted(run), entry]
            run = []
    return result


@pytest.mark.parametrize(
    ("seed", "streams", "conf"),
    [
        (1, 1, ""),
        (2, 3, ""),
        (3, 1, "expandable_segments:True"),
        (4, 3, "expandable_segments:True,large_segment_size_mb:12"),
        (5, 1, "max_split_size_mb:40"),
        (6, 2, "max_split_size_mb:20,max_non_split_rounding_mb:30"),
        (7, 1, "garbage_collection_threshold:0.5,max_split_size_mb:64"),
        (8, 2, "expandable_segments:True,garbage_collection_threshold:0.4"),
        (9, 1, "roundup_power2_divisions:[1:4,4:2,>:8],large_segment_size_mb:32"),
        (10, 2, "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.6"),
    ],
)
def test_every_answer_is_equal(seed: int, streams: int, conf: str, tmp_path: Path) -> None:
    asked = ask_pytorch(seed, streams, conf, tmp_path / "answers.json")
    answers = iter(asked["answers"])
    simulated = Simulated(asked, conf)
    for number, event in enumerate(random_events(seed, EVENTS, streams)):
        got = simulated.answer(*event)
        if got is not None:
            assert (number, comparable(got)) == (number, comparable(next(answers)))
    assert next(answers, None) is None
    assert in_order(simulated.trace) == in_order(asked["trace"])

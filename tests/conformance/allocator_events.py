"""Random allocator events, and PyTorch's own answers to them.

As a script (on the CUDA build of PyTorch, with a card or the stub driver) it runs the events of one
seed and writes what happened: ``allocator_events.py SEED COUNT STREAMS OUTPUT``.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

MIB = 1 << 20
Event = tuple[str, Any, Any, Any]


def _size(rng: random.Random) -> int:
    low, high = rng.choice(
        [(1, 5000), (1, MIB + 2000), (MIB, 11 * MIB), (10 * MIB, 60 * MIB), (60 * MIB, 300 * MIB)]
    )
    return rng.randint(low, high)


def random_events(seed: int, count: int, streams: int) -> list[Event]:
    """``(kind, key, size or stream or fraction, stream)``; sizes repeat as in training."""
    rng = random.Random(seed)
    usual = [_size(rng) for _ in range(12)]
    live: list[int] = []
    events: list[Event] = []
    for number in range(count):
        dice = rng.random()
        growing = 0.75 if number // 150 % 2 else 0.25
        if dice < 0.004:
            events.append(("empty_cache", None, None, None))
        elif dice < 0.006:
            events.append(("reset_peak", None, None, None))
        elif dice < 0.008:
            events.append(("reset_accumulated", None, None, None))
        elif dice < 0.01:
            events.append(("fraction", None, rng.choice([0.3, 0.5, 0.8, 1.0]), None))
        elif dice < 0.014:
            events.append(("state", None, None, None))
        elif dice < 0.03 and live:
            events.append(("record_stream", rng.choice(live), rng.randrange(streams), None))
        elif dice < growing or not live:
            size = rng.choice(usual) if rng.random() < 0.5 else _size(rng)
            events.append(("malloc", number, size, rng.randrange(streams)))
            live.append(number)
        else:
            events.append(("free", live.pop(rng.randrange(len(live))), None, None))
    return [*events, ("state", None, None, None)]


def main(seed: int, count: int, number: int, output: str) -> None:
    import torch

    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=1 << 20, context=None)
    others = [torch.cuda.Stream() for _ in range(number - 1)]
    streams = [torch.cuda.default_stream(), *sorted(others, key=lambda each: each.cuda_stream)]
    live: dict[int, torch.Tensor] = {}
    answers: list[Any] = []
    for kind, key, value, stream in random_events(seed, count, number):
        if kind == "malloc":
            try:
                with torch.cuda.stream(streams[stream]):
                    live[key] = torch.empty(value, dtype=torch.uint8, device="cuda")
                answers.append(live[key].data_ptr())
            except torch.OutOfMemoryError as error:
                answers.append(str(error))
        elif kind == "free":
            live.pop(key, None)
        elif kind == "record_stream" and key in live:
            live[key].record_stream(streams[value])
        elif kind == "empty_cache":
            torch.cuda.empty_cache()
        elif kind == "reset_peak":
            torch.cuda.reset_peak_memory_stats()
        elif kind == "reset_accumulated":
            torch.cuda.memory.reset_accumulated_memory_stats()
        elif kind == "fraction":
            torch.cuda.set_per_process_memory_fraction(value)
        elif kind == "state":
            segments = torch.cuda.memory._snapshot()["segments"]
            answers.append([torch.cuda.memory_stats(), segments])
    free, total = torch.cuda.mem_get_info()
    trace = [
        [
            entry["action"],
            entry.get("addr", entry.get("device_free")),
            entry["size"],
            entry["stream"],
        ]
        for entry in torch.cuda.memory._snapshot()["device_traces"][0]
    ]
    result = {
        "version": [int(part) for part in torch.__version__.split(".")[:2]],
        "streams": [each.cuda_stream for each in streams],
        "total": total,
        "context": total - free - torch.cuda.memory_reserved(),
        "answers": answers,
        "trace": trace,
    }
    with open(output, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

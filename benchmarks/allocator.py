"""How fast the simulated allocator is: events a second, and against a loop that only keeps a dict.

    python benchmarks/allocator.py [--rounds 9] [--conf TEXT]

The stream is that of a training loop: parameters, optimizer states and gradients stay, activations
come in the forward pass and go in the backward pass, temporaries live for an event or two. The two
loops run in turns, so that a busy machine slows both; the best round of each counts.
"""

from __future__ import annotations

import argparse
import time

from pytest_vram.sim.allocator import Block, CachingAllocator

#: ``(key, size)`` allocates, ``(key, 0)`` frees.
Stream = list[tuple[int, int]]


def training_stream(
    layers: int = 24, hidden: int = 1024, tokens: int = 2048, steps: int = 6
) -> Stream:
    """The allocations of ``steps`` Adam steps of a transformer in fp32, tensor by tensor."""
    stream: Stream = []
    keys = iter(range(1 << 40))

    def alloc(elements: int) -> int:
        key = next(keys)
        stream.append((key, 4 * elements))
        return key

    def free(key: int) -> None:
        stream.append((key, 0))

    weights = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
    for _ in range(layers * 3):  # parameters and both moments
        for rows, columns in weights:
            alloc(rows * columns)
            alloc(columns)
        for _ in range(4):
            alloc(hidden)
    for _ in range(steps):
        saved: list[int] = []
        for _ in range(layers):
            for rows, columns in weights:
                saved += [alloc(tokens * columns), alloc(tokens), alloc(tokens)]
                free(alloc(tokens * rows))
        gradients: list[int] = []
        for _ in range(layers):
            for rows, columns in reversed(weights):
                upstream = alloc(tokens * columns)
                gradients += [alloc(rows * columns), alloc(columns)]
                for _ in range(3):
                    free(saved.pop())
                downstream = alloc(tokens * rows)
                free(upstream)
                free(downstream)
        temporaries = [alloc(hidden * hidden) for _ in gradients]
        for key in temporaries + gradients:
            free(key)
    return stream


def run_allocator(stream: Stream, conf: str) -> float:
    allocator = CachingAllocator(1 << 40, conf)
    blocks: dict[int, Block] = {}
    malloc, free = allocator.malloc, allocator.free
    begin = time.perf_counter()
    for key, size in stream:
        if size:
            blocks[key] = malloc(size)
        else:
            free(blocks.pop(key))
    return time.perf_counter() - begin


def run_dict(stream: Stream) -> float:
    blocks: dict[int, int] = {}
    begin = time.perf_counter()
    for key, size in stream:
        if size:
            blocks[key] = size
        else:
            blocks.pop(key)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--conf", default="", help="PYTORCH_CUDA_ALLOC_CONF")
    options = parser.parse_args()
    stream = training_stream()
    rounds = [
        (run_allocator(stream, options.conf), run_dict(stream)) for _ in range(options.rounds)
    ]
    allocator = min(took for took, _ in rounds)
    nothing = min(took for _, took in rounds)
    print(f"{len(stream):,} events, statistics kept, settings {options.conf or 'default'}")
    print(f"allocator  {len(stream) / allocator:>12,.0f} events/s")
    print(f"dict only  {len(stream) / nothing:>12,.0f} events/s")
    print(f"ratio      {allocator / nothing:>12.1f}")


if __name__ == "__main__":
    main()

"""What the health checks add to a step that has values, as a ratio.

    python benchmarks/watch.py            the CPU: kernels and checks really run
    tests/stub_driver/run.sh benchmarks/watch.py
                                          a card whose kernels take no time: only what Python and
                                          PyTorch do on the host, the worst case for the checks

Four mixed-precision steps, as a marked test runs them, of a small transformer; plain and watched
runs are interleaved and the least of each is compared, so that a busy machine matters little.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings

import torch
from simulation import Model

from pytest_vram.numerics import Watch

STEPS, ROUNDS = 4, 7


def seconds(shape: tuple[int, ...], device: str, precision: torch.dtype, watched: bool) -> float:
    """Process time of the optimizer and its steps; the model is built before."""
    *sizes, batch, length = shape
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(*sizes)
        tokens = torch.randint(0, sizes[-1], (batch, length))
    with Watch() if watched else contextlib.nullcontext():
        start = time.process_time()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        scaler = torch.amp.GradScaler(
            device, init_scale=256.0, enabled=precision is torch.float16 and device == "cuda"
        )
        for _ in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=precision):
                loss = model(tokens)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return time.process_time() - start


def main() -> None:
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    precision = torch.float16 if device == "cuda" else torch.bfloat16
    # layers, width, heads, vocabulary, batch, length
    for name, shape in {
        "4 layers of width 256": (4, 256, 4, 2048, 4, 128),
        "12 layers of width 256": (12, 256, 4, 2048, 4, 128),
        "12 layers of width 768": (12, 768, 12, 8192, 2, 256),
    }.items():
        plain, watched = [], []
        for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS):
            plain.append(seconds(shape, device, precision, watched=False))
            watched.append(seconds(shape, device, precision, watched=True))
        ratio = min(watched) / min(plain)
        print(
            f"{name:24s} on {device}: {min(plain) / STEPS * 1e3:8.1f} ms a step, watched "
            f"{min(watched) / STEPS * 1e3:8.1f} ms, ratio {ratio:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

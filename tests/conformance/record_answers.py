"""Ask a CUDA build again for the answers in ``fixtures/kernels``: real card or stub driver.

    STUB_DEVICE=h100 run.sh record_answers.py attention convolution batchnorm rnn

Every recorded call of the running torch version and device is made again; the fixture is rewritten
with the events, results and strides that come out, so ``git diff --stat`` says whether anything
changed. New calls are added by hand, with empty results and events. The format is described in
``tests/sim/kernel_answers.py``.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[2] / "fixtures" / "kernels"


def argument(spec: Any, known: dict[str, torch.Tensor]) -> Any:
    if isinstance(spec, list):
        return [argument(item, known) for item in spec]
    if not isinstance(spec, dict):
        return spec
    if "dt" in spec:
        return getattr(torch, spec["dt"])
    if spec.get("alias") in known:
        return known[spec["alias"]]
    dtype, shape, stride = spec["t"]
    place = spec.get("d", "cuda")
    tensor = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=place)
    if spec.get("zero"):
        tensor.zero_()
    if "alias" in spec:
        known[spec["alias"]] = tensor
    return tensor


def leaves(result: Any) -> list[torch.Tensor | None]:
    if isinstance(result, (list, tuple)):
        return [leaf for item in result for leaf in leaves(item)]
    return [result if isinstance(result, torch.Tensor) else None]


def described(tensor: torch.Tensor | None) -> list[Any] | None:
    if tensor is None:
        return None
    return [
        str(tensor.dtype)[6:], list(tensor.shape), list(tensor.stride()), tensor.device.type,
        tensor.untyped_storage().nbytes(), tensor.storage_offset(),
    ]  # fmt: skip


def events(trace: list[dict[str, Any]], results: list[torch.Tensor | None]) -> list[list[Any]]:
    """Allocator events in the fixtures' words: result storages, scratch, ends of scratch."""
    places: dict[int, int] = {}
    for index, tensor in enumerate(results):
        if tensor is not None and tensor.is_cuda and tensor.untyped_storage().nbytes():
            places.setdefault(tensor.untyped_storage().data_ptr(), index)
    live: dict[int, int] = {}
    told: list[list[Any]] = []
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = len(told)
            told.append(["+", event["addr"], event["size"]])
        elif event["action"] == "free_requested":
            told.append(["-", live.pop(event["addr"])])
    kept = {position for address, position in live.items() if address in places}
    numbers: dict[int, int] = {}
    for position, event in enumerate(told):
        if event[0] == "-":
            event[1] = numbers[event[1]]
        elif position in kept:
            event[:2] = ["o", places[event[1]]]
        else:
            event[1] = numbers[position] = len(numbers)
    return told


def answer(call: list[Any]) -> list[Any]:
    name, arguments, settings, *_ = call
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    func = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    known: dict[str, torch.Tensor] = {}
    args = argument(arguments, known)
    kwargs = {key: argument(item, known) for key, item in settings.get("kwargs", {}).items()}
    torch.backends.cudnn.enabled = settings.get("cudnn", True)
    torch.backends.cudnn.benchmark = settings.get("bench", False)
    torch.use_deterministic_algorithms(settings.get("det", False))
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=100_000)
    try:
        with torch.no_grad():
            results = leaves(func(*args, **kwargs))
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(None)
        torch.use_deterministic_algorithms(False)
    return [name, arguments, settings, [described(r) for r in results], events(trace, results)]


def main(names: list[str]) -> None:
    device = os.environ.get("STUB_DEVICE", "a100")
    version = torch.__version__.split("+")[0]
    warm = torch.randn(64, 64, device="cuda")
    _ = warm @ warm, warm.half() @ warm.half()  # workspaces that stay
    for name in names:
        path = FOLDER / f"{name}.json.gz"
        runs = json.loads(gzip.decompress(path.read_bytes()))
        for run in runs:
            if (run["device"], run["torch"]) == (device, version):
                run["calls"] = [answer(call) for call in run["calls"]]
        text = json.dumps(runs, separators=(",", ":")).encode()
        with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
            packed.write(text)
        print(f"{name}: {device}, torch {version}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Records what PyTorch's CUDA host code asks the allocator for, operator by operator.

Run with a CUDA build of PyTorch, on a real card or on a stub driver (device reads give zeros),
once per card; every run adds its card to the file:

    for card in a100 h100 t4 l4 rtx4090; do
        STUB_MEM_GIB=80 STUB_DEVICE=$card run.sh tests/conformance/kernel_probe.py \\
            fixtures/kernels/torch-2.14.json.gz
    done

Every operator call of the workloads in ``kernel_workloads.py`` becomes one record: operator,
arguments (shape, stride, dtype), results and the ordered allocator events. Equal calls are kept
once. ``test_kernels.py`` computes the same events from the rules and compares them.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

MARK = 999_983  # bytes asked for between two operators: the border in the allocator's history


def encode(value: Any) -> Any:
    """An argument as JSON: tensors by shape, stride and dtype."""
    if isinstance(value, torch.Tensor):
        stride = list(value.stride())
        dense = torch.empty(value.shape, device="meta").stride() == tuple(stride)
        spec: dict[str, Any] = {"t": list(value.shape), "d": str(value.dtype)[6:]}
        if not dense:
            spec["s"] = stride
        if value.device.type == "cpu":
            spec["cpu"] = 1
            if value.is_pinned():
                spec["cpu"] = 2
        if value.is_conj():
            spec["conj"] = 1
        if value.storage_offset():
            spec["o"] = value.storage_offset()
        return spec
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, (torch.dtype, torch.device, torch.memory_format, torch.layout)):
        return {"x": str(value)}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, (bool, int, float, str)) or value is None:
        return repr(value) if isinstance(value, float) and value in (1e400, -1e400) else value
    return {"r": str(value)[:60]}


def decode(spec: Any) -> Any:
    """The inverse: CUDA tensors come back on the meta device, CPU tensors on the CPU."""
    if isinstance(spec, list):
        return [decode(item) for item in spec]
    if isinstance(spec, str) and spec in ("inf", "-inf"):
        return float(spec)
    if not isinstance(spec, dict):
        return spec
    if "t" in spec:
        dtype = getattr(torch, spec["d"])
        where = "cpu" if "cpu" in spec else "meta"
        shape = spec["t"]
        stride = spec.get("s") or torch.empty(shape, device="meta").stride()
        offset = spec.get("o", 0)
        extent = 1 + offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        flat = torch.empty(extent if 0 not in shape else 0, dtype=dtype, device=where)
        view = flat.as_strided(shape, stride, offset if 0 not in shape else 0)
        return view.conj() if "conj" in spec else view
    if "x" in spec:
        name = spec["x"]
        if name.startswith("torch."):
            return getattr(torch, name[6:])
        return torch.device(name)
    if "c" in spec:
        return complex(*spec["c"])
    return None


class Recorder(TorchDispatchMode):
    """Notes every operator call and marks its border in the allocator's history."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[str, Any]] = {}
        self.marks = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        call = {"op": str(func), "a": encode(args)}
        if kwargs:
            call["k"] = {name: encode(value) for name, value in kwargs.items()}
        if torch.are_deterministic_algorithms_enabled():
            call["det"] = 1
        key = json.dumps(call)
        new = key not in self.calls
        marks = self.marks
        if new:
            self.marks += 2
            torch._C._cuda_clearCublasWorkspaces()
            torch.empty(MARK, dtype=torch.uint8, device="cuda")
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self.marks -= new
            raise RuntimeError(f"{key[:300]}: {error}") from error
        if new:
            torch.empty(MARK, dtype=torch.uint8, device="cuda")
            flat = tree_flatten(result)[0]
            call["r"] = [encode(t) if isinstance(t, torch.Tensor) else None for t in flat]
            call["_p"] = [
                t.untyped_storage().data_ptr()
                if isinstance(t, torch.Tensor) and t.device.type == "cuda"
                else 0
                for t in flat
            ]
            call["_m"] = (marks, marks + 1)
            self.calls[key] = call
        return result


def events(history: Sequence[tuple[str, int, int]], pointers: Sequence[int]) -> list[str]:
    """``o0:512`` output 0 allocated with 512 bytes, ``+1:64`` scratch 1 taken, ``-1`` given back,
    ``w:8519680`` kept although nobody returned it."""
    live: dict[int, str] = {}
    found: list[str] = []
    place: dict[int, int] = {}
    for action, address, size in history:
        if action == "alloc":
            live[address] = str(sum(1 for e in found if e[0] == "+"))
            place[address] = len(found)
            found.append(f"+{live[address]}:{size}")
        elif action == "free_completed" and address in live:
            found.append(f"-{live.pop(address)}")
    for address in live:
        at = place[address]
        size = found[at].partition(":")[2]
        found[at] = f"o{pointers.index(address)}:{size}" if address in pointers else f"w:{size}"
    names: dict[str, str] = {}
    result = []
    for event in found:
        if event[0] in "+-":
            key, _, size = event[1:].partition(":")
            names.setdefault(key, str(len(names)))
            event = event[0] + names[key] + (f":{size}" if size else "")
        result.append(event)
    return result


def record(workloads: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Run every workload under the recorder; a failing one is named and ends the recording."""
    torch.empty(1, device="cuda")
    torch.cuda.memory._record_memory_history(
        "all", context=None, stacks="python", max_entries=50_000_000
    )
    calls: list[dict[str, Any]] = []
    recorder = Recorder()
    for name, workload in workloads:
        try:
            with recorder:
                workload()
        except Exception as error:
            print(f"{name}: {type(error).__name__} {str(error)[:300]}", file=sys.stderr)
            if "--keep-going" not in sys.argv:
                raise
    calls = list(recorder.calls.values())
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    history = [(e["action"], e["addr"], e["size"]) for e in trace]
    marks = [i for i, e in enumerate(history) if e[0] == "alloc" and e[2] == MARK]
    for call in calls:
        begin, end = (marks[i] for i in call.pop("_m"))
        call["e"] = events(history[begin + 1 : end], call.pop("_p"))
    return calls


def merge(path: Path, profile: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Add one card's calls: ``e`` lists the different event streams of a call, ``d`` which of them
    each card had (-1: the call was not made there), left out where all had the first."""
    known: dict[str, Any] = {"torch": torch.__version__, "profiles": [], "calls": []}
    if path.exists():
        before = json.loads(gzip.decompress(path.read_bytes()))
        if before["torch"] == torch.__version__ and profile not in before["profiles"]:
            known = before
    count = len(known["profiles"])
    by_key = {_key(call): call for call in known["calls"]}
    for call in by_key.values():
        call["d"] = [*call.get("d", [0] * count), -1]
    for call in calls:
        events = call.pop("e")
        kept = by_key.setdefault(_key(call), {**call, "e": [], "d": [-1] * (count + 1)})
        if events not in kept["e"]:
            kept["e"].append(events)
        kept["d"][count] = kept["e"].index(events)
    for call in by_key.values():
        if not any(call["d"]):
            del call["d"]
    known["profiles"].append(profile)
    known["calls"] = list(by_key.values())
    return known


def _key(call: dict[str, Any]) -> str:
    return json.dumps([call["op"], call["a"], call.get("k"), call.get("det")])


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from kernel_workloads import WORKLOADS

    path, only = Path(sys.argv[1]), [a for a in sys.argv[2:] if not a.startswith("--")]
    calls = record([w for w in WORKLOADS if not only or w[0] in only])
    profile = torch.cuda.get_device_name(0)
    known = merge(path, profile, calls)
    lines = ",\n".join(json.dumps(call, separators=(",", ":")) for call in known.pop("calls"))
    text = json.dumps(known)[:-1] + f', "calls": [\n{lines}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as out:
        out.write(text.encode())
    print(f"{len(calls)} calls on {profile} -> {path}")


if __name__ == "__main__":
    main()

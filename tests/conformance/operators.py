"""Every operator that PyTorch tests itself with, on the stub driver and simulated: the allocator's
calls of each, side by side.

    python operators.py sweep FOLDER [--card a100] [--only GLOB]    both runs; streams in FOLDER
    python operators.py compare FOLDER [--only GLOB] [--show N]     what differs

The operators, and the arguments they are called with, are PyTorch's own: ``op_db`` of
``torch.testing._internal``, of each dtype a few samples as they are, with the sizes that the
samples are made of set larger, and in the channels-last layout. Every sample runs forward and,
where it has a gradient, backward. Runs with the PyTorch of the stub driver, batch by batch in
processes of their own: an operator that crashes or does not end costs its own samples only.
PyTorch's test database needs the package expecttest. What needs values differs by nature: the stub
driver reads zeros (ctc_loss with lengths on the card).
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gc
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from align import CACHE, CARDS, STUB, align  # noqa: E402

#: Seconds that all samples of one operator may take, and that a process may be silent.
SECONDS, SILENCE = 40, 90
#: What operators run in; of all but the first two only the samples as they are.
DTYPES = ("float32", "bfloat16", "float16", "complex64", "int64", "bool")
#: What the samples are made of (``S``, ``M``, ``L`` in PyTorch's tests), as it is and larger.
SIZES: dict[str, dict[str, int]] = {"": {}, "large": {"S": 24, "M": 70, "L": 300, "XS": 9}}
SAMPLES = 3  #: of an operator, dtype and size
MOST = 1 << 25  #: elements of a sample's largest argument


# ---- one run: a list of operators, on whatever "cuda" is here


def operators() -> dict[str, Any]:
    """All operators by name: ``nn.functional.conv2d``, ``linalg.det.singular``."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op
            for op in op_db}  # fmt: skip


@contextlib.contextmanager
def sizes(wanted: dict[str, int]) -> Iterator[None]:
    """The sizes that PyTorch's samples are made of are these within."""
    from torch.testing._internal import common_methods_invocations, opinfo
    from torch.testing._internal.opinfo import definitions

    rooms = [common_methods_invocations, importlib.import_module(f"{opinfo.__name__}.core")]
    for found in pkgutil.iter_modules(definitions.__path__):
        rooms.append(importlib.import_module(f"{definitions.__name__}.{found.name}"))
    before = [(room, dict(vars(room))) for room in rooms]
    for room in rooms:
        for name in wanted.keys() & vars(room).keys():
            setattr(room, name, wanted[name])
    try:
        yield
    finally:
        for room, names in before:
            for name in wanted.keys() & names.keys():
                setattr(room, name, names[name])


def samples(op: Any, dtype: Any, wanted: dict[str, int]) -> list[Any]:
    """A few of the operator's samples, made on the host; spread over all that there are."""
    import torch

    torch.manual_seed(0)
    # a process without a card and one with it must run the same: both lists count
    trained = {*op.backward_dtypes, *op.supported_backward_dtypes("cuda")}
    grad = op.supports_autograd and dtype in trained
    found = []
    with sizes(wanted):
        for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=grad)):
            if number >= 60:
                break
            found.append((number, sample))
    step = max(1, len(found) // SAMPLES)
    return found[::step][:SAMPLES]


def to_card(tensor: Any, layout: str) -> Any:
    """A copy on the card with the same strides, or in the channels-last layout; values unknown."""
    import torch

    source = tensor.detach()
    if layout and source.dim() in (4, 5):
        form = torch.channels_last if source.dim() == 4 else torch.channels_last_3d
        made = torch.empty(source.shape, dtype=source.dtype, device="cuda", memory_format=form)
    elif source.layout is torch.strided:
        extent = 1 + sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True))
        flat = torch.empty(extent if source.numel() else 0, dtype=source.dtype, device="cuda")
        made = flat.as_strided(source.shape, source.stride())
    else:
        made = source.to("cuda")
    return made.detach().requires_grad_(tensor.requires_grad)


def call(op: Any, sample: Any, layout: str) -> None:
    """One sample, forward and backward."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return to_card(value, layout)
        if isinstance(value, (str, torch.device)) and str(value) == "cpu":
            return torch.device("cuda")
        return value

    first, args, kwargs = tree_map(moved, (sample.input, sample.args, sample.kwargs))
    results = [
        leaf
        for leaf in tree_leaves(op(first, *args, **kwargs))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if results:
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])


def cases(op: Any) -> Iterator[tuple[str, Any, str]]:
    """``(name, sample, layout)`` of every call that is made of one operator."""
    import torch
    from torch.utils._pytree import tree_leaves

    for dtype in (getattr(torch, name) for name in DTYPES):
        if dtype not in {*op.dtypes, *op.supported_dtypes("cuda")}:
            continue
        for size, wanted in SIZES.items():
            if size and str(dtype)[6:] not in DTYPES[:2]:
                continue
            try:
                found = samples(op, dtype, wanted)
            except Exception as error:
                if not wanted:
                    yield f"{str(dtype)[6:]}: no samples: {error}"[:200], None, ""
                continue
            for number, sample in found:
                leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
                tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
                if any(one.numel() > MOST for one in tensors):
                    continue
                name = f"{str(dtype)[6:]} {size or 'plain'} {number}"
                yield name, sample, ""
                if any(one.dim() in (4, 5) for one in tensors):
                    yield f"{name} channels_last", sample, "channels_last"


def described(sample: Any) -> str:
    import torch
    from torch.utils._pytree import tree_map

    def one(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype)[6:]}{list(value.shape)}"
        return value if isinstance(value, (int, float, bool, type(None))) else str(value)[:40]

    return str(tree_map(one, (sample.input, sample.args, sample.kwargs)))[:300]


class OnCard:
    """The allocator's calls as CUDA's own memory history has them."""

    def __init__(self) -> None:
        import torch

        torch.empty(1, device="cuda")
        self.begin()

    def __enter__(self) -> OnCard:
        return self

    def __exit__(self, *exc: Any) -> None: ...

    def begin(self) -> None:
        import torch

        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.memory._record_memory_history(None)
        torch.cuda.memory._record_memory_history(
            "all", context=None, max_entries=1_000_000, clear_history=True
        )

    def calls(self) -> tuple[list[Any], list[str]]:
        import torch

        events, live = [], {}
        for entry in torch.cuda.memory._snapshot()["device_traces"][0]:
            if entry["action"] == "alloc":
                live[entry["addr"]] = entry["size"]
                events.append(["alloc", entry["size"], "", ""])
            elif entry["action"] == "free_requested" and entry["addr"] in live:
                events.append(["free", live.pop(entry["addr"]), "", ""])
        return events, []


class Simulated:
    """The same of the simulated card, and which parts it says are not known."""

    def __init__(self, profile: str) -> None:
        from pytest_vram.sim import Simulation, find_profile
        from pytest_vram.sim.selection import assume_selected

        self.gpu = Simulation(find_profile(profile))
        self.zeros = assume_selected(0.0)  # what a device that holds zeros selects
        self.event = self.allocation = 0
        self.known: dict[str, int] = {}

    def __enter__(self) -> Simulated:
        self.gpu.__enter__()
        self.zeros.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.zeros.__exit__(*exc)
        self.gpu.__exit__(*exc)

    def begin(self) -> None:
        gc.collect()
        self.gpu.clear_workspaces()
        self.event = len(self.gpu.books.events)
        self.known = self._parts()
        self.allocation = len(self.gpu.books.allocations)

    def calls(self) -> tuple[list[Any], list[str]]:
        made = self.gpu.books.allocations
        events = [
            [kind, made[index].requested, made[index].operator, ""]
            for kind, index, _, _ in self.gpu.books.events[self.event :]
            if kind in ("alloc", "free") and index >= self.allocation
        ]
        parts = self._parts()
        return events, sorted(part for part in parts if parts[part] != self.known.get(part))

    def _parts(self) -> dict[str, int]:
        return {part: len(found) for part, found in self.gpu.uncertainty._known.items()}


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds")


def run_one(name: str, op: Any, profile: str | None) -> dict[str, Any]:
    """All cases of one operator: their streams, or why there are none."""
    import torch

    found: dict[str, Any] = {}
    made = []
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        made = list(cases(op))
        with Simulated(profile) if profile else OnCard() as card:
            for case, sample, layout in made:
                if sample is None:
                    continue
                card.begin()
                row: dict[str, Any] = {"arguments": described(sample)}
                found[case] = row
                try:
                    torch.manual_seed(0)
                    call(op, sample, layout)
                except TimeoutError:
                    raise
                except Exception as error:
                    row["error"] = f"{type(error).__name__}: {error}"[:400]
                    continue
                row["events"], row["unknown"] = card.calls()
    except Exception as error:
        return {"operator": name, "cases": found, "error": f"{type(error).__name__}: {error}"[:400]}
    finally:
        signal.alarm(0)
    return {"operator": name, "cases": found}


def work(names: Sequence[str], out: Path, profile: str | None) -> None:
    import torch

    warnings.simplefilter("ignore")
    torch.backends.cudnn.enabled = False
    known = operators()
    gc.collect()
    gc.freeze()  # what is imported is not garbage: a collection before every call costs nothing
    gc.disable()
    with out.open("a") as file:
        for name in names:
            row = run_one(name, known[name], profile)
            file.write(json.dumps(row) + "\n")
            file.flush()
            gc.collect()


# ---- both runs, in processes


def sweep(folder: Path, card: str, only: str) -> None:
    """Run what is not in ``folder`` yet, on both sides."""
    folder.mkdir(parents=True, exist_ok=True)
    for side in ("card", "simulated"):
        sweep_side(folder, card, only, side)


def sweep_side(folder: Path, card: str, only: str, side: str) -> None:
    """What crashes or does not end is killed and named, and the next process goes on after it."""
    interpreter = (CACHE / "interpreter").read_text().strip()
    environment = {**os.environ, "STUB_DEVICE": card, "PYTHONPATH": str(HERE.parents[1])}
    listing = [interpreter, __file__, "list", only]
    names = subprocess.check_output(listing, env=environment, text=True).split()
    command = ["bash", str(STUB)] if side == "card" else [interpreter]
    options = ["--profile", CARDS[card]] if side == "simulated" else []
    out = folder / f"{side}.jsonl"
    out.touch()
    while todo := [name for name in names if name not in read(out)]:
        process = subprocess.Popen(
            [*command, __file__, "work", str(out), *options, *todo], env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        _watch(process, out)
        done = read(out)
        if (left := [name for name in todo if name not in done]) and process.returncode:
            row = {"operator": left[0], "cases": {}, "error": f"ended {process.returncode}"}
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(side, len(read(out)), "of", len(names), flush=True)


def _watch(process: subprocess.Popen[bytes], out: Path) -> None:
    size, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.5)
        if out.stat().st_size != size:
            size, since = out.stat().st_size, time.monotonic()
        if time.monotonic() - since > SILENCE:
            process.kill()


def read(path: Path) -> dict[str, Any]:
    with path.open() as file:
        rows = [json.loads(line) for line in file]
    return {row["operator"]: row for row in rows}


# ---- what differs


def compare(folder: Path, only: str, show: int) -> None:
    card, simulated = read(folder / "card.jsonl"), read(folder / "simulated.jsonl")
    count: Counter[str] = Counter()
    per_operator: dict[str, Counter[str]] = {}
    shown: list[tuple[str, str, str]] = []
    for name, theirs in card.items():
        if not fnmatch.fnmatch(name, only) or name not in simulated:
            continue
        mine = simulated[name]["cases"]
        verdicts = per_operator.setdefault(name, Counter())
        for side, row in (("card", theirs), ("simulated", simulated[name])):
            if "error" in row:
                shown.append((name, f"{side} ended", row["error"]))
        for case, reference in theirs["cases"].items():
            verdict, text = judge(reference, mine.get(case))
            count[verdict] += 1
            verdicts[verdict] += 1
            if verdict in ("differs", "fails"):
                shown.append((name, case, f"{reference['arguments']}\n{text}"))
    seen: Counter[str] = Counter()
    for name, case, text in shown:
        seen[name] += 1
        if seen[name] <= show:
            print(f"{name} [{case}] {text}")
    for name, verdicts in per_operator.items():
        if set(verdicts) - {"equal", "order", "card fails too", "not on the stub"}:
            print(f"{name:50s} {dict(verdicts)}")
    print(len(per_operator), "operators,", sum(count.values()), "calls:", dict(count))


def judge(reference: dict[str, Any], mine: dict[str, Any] | None) -> tuple[str, str]:
    """``equal``, ``order`` (the same blocks, and some die in another order), ``named`` (another
    stream, and the simulation says what is not known), ``differs``, or who failed."""
    if mine is None:
        return "not reached", ""
    if "error" in reference:
        both = "error" in mine
        return ("card fails too", "") if both else ("not on the stub", reference["error"])
    if "error" in mine:
        return "fails", "  " + mine["error"]
    theirs, ours = ([event[:2] for event in side["events"]] for side in (reference, mine))
    if theirs == ours:
        return "equal", ""
    if sorted(theirs) == sorted(ours):
        return "order", ""
    lines = []
    for one in align(reference["events"], mine["events"]):
        sides = [
            ", ".join(f"{'+' if k == 'alloc' else '-'}{n}" for k, n, *_ in side[:12])
            for side in (one.missing, one.extra)
        ]
        lines.append(f"  {one.operator}: card {sides[0] or 'nothing'} | simulated "
                     f"{sides[1] or 'nothing'} ({one.cause})")  # fmt: skip
    if mine["unknown"]:
        return "named", "\n".join(lines)
    return "differs", "\n".join(lines[:6])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("sweep", "compare"):
        one = commands.add_parser(name)
        one.add_argument("folder", type=Path)
        one.add_argument("--card", choices=CARDS, default="a100")
        one.add_argument("--only", default="*", metavar="GLOB")
        one.add_argument("--show", type=int, default=2, metavar="N", help="cases an operator")
    listing = commands.add_parser("list")
    listing.add_argument("only")
    worker = commands.add_parser("work")
    worker.add_argument("out", type=Path)
    worker.add_argument("--profile")
    worker.add_argument("names", nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "sweep":
        sweep(arguments.folder, arguments.card, arguments.only)
        compare(arguments.folder, arguments.only, arguments.show)
    elif arguments.command == "compare":
        compare(arguments.folder, arguments.only, arguments.show)
    elif arguments.command == "list":
        print("\n".join(name for name in operators() if fnmatch.fnmatch(name, arguments.only)))
    else:
        work(arguments.names, arguments.out, arguments.profile)


if __name__ == "__main__":
    main()

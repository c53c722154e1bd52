"""Random training programs, for comparing the simulated GPU with PyTorch's own host code.

    python fuzz.py show SEED                 the program of a seed, as code that runs by itself
    python fuzz.py compare FIRST:COUNT       both sides of so many seeds; what differs
    python fuzz.py shrink SEED               the smallest program that still differs, as code
    python fuzz.py record FIRST:COUNT FILE   programs with the reference's figures
    python fuzz.py sweep FIRST:COUNT         rows for the conformance page: so many seeds a card

``compare``, ``shrink``, ``record`` and ``sweep`` start the reference with ``--reference COMMAND`` (a Python
with PyTorch's CUDA build, on a card or a stub driver; default: ``tests/stub_driver/run.sh``).

A program is a list of segments (plain, checkpointed, without gradients ...), each a list of parts
(:mod:`fuzz_parts`), a loss, and a training step with its options. It is kept as names and seeds, so
that a part may be dropped and those after it adapt to the shape that they then get.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from fuzz_losses import loss_code  # noqa: E402
from fuzz_parts import PARTS, Shape  # noqa: E402
from fuzz_wide import NOT_HOOKED, NOT_TWICE, WIDE, WIDE_FROM  # noqa: E402

#: Tensors of a generated program have at most so many elements.
LIMIT = 1 << 22

Slot = tuple[str, int]


@dataclass(frozen=True)
class Segment:
    wrapper: str
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Spec:
    """One program. Every field's first choice is the simplest one, to which shrinking returns."""

    segments: tuple[Segment, ...]
    entry: str
    shape: Shape
    loss: int
    options: dict[str, Any] = field(hash=False)


# ---- choosing ----------------------------------------------------------------------------------

WRAPPERS = (
    "plain", "reentrant", "checkpoint", "offload", "no_grad", "full", "stream", "nested",
    "checked", "packed",
)  # fmt: skip
_WRAPPER_WEIGHTS = (60, 8, 12, 4, 4, 4, 4, 4, 4, 4)

SIMPLEST: dict[str, Any] = dict(
    optimizer="torch.optim.SGD(parameters, lr=0.1)",
    autocast=None, dtype="float32", scaler=False, clip=None, accumulate=1, set_to_none=True,
    penalty=False, frozen=False, input_grad=False, clip_foreach=None, cache=True,
    channels_last=False, module_hooks=False, ema=False, source="device", twice=False,
    in_backward=False,
)  # fmt: skip


def _optimizer(r: Random) -> str:
    name = r.choice((
        "SGD", "SGD", "Adam", "AdamW", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam",
        "RAdam", "RMSprop", "Rprop", "Adafactor",
    ))  # fmt: skip
    given = ["lr=1e-3"]

    def maybe(text: str, chance: float = 0.4) -> None:
        if r.random() < chance:
            given.append(text)

    if name != "Rprop":
        maybe("weight_decay=0.01")
    if name == "SGD":
        momentum = r.random() < 0.6
        if momentum:
            given.append("momentum=0.9")
            maybe("nesterov=True" if r.random() < 0.5 else "dampening=0.1")
    if name in ("Adam", "AdamW"):
        maybe("amsgrad=True")
    if name == "RMSprop":
        maybe("momentum=0.9")
        maybe("centered=True")
    if name in ("NAdam", "RAdam"):
        maybe("decoupled_weight_decay=True")
    if name not in ("Adafactor",):
        maybe("maximize=True", 0.2)
    forms = ["", "", "foreach=True", "foreach=False"]
    if name == "ASGD":  # reads from the device whether it averages yet; the stub driver says zero
        forms.remove("foreach=False")
    if name in ("SGD", "Adam", "AdamW", "Adagrad"):
        forms += ["fused=True"] * 2
    if name not in ("SGD", "Adagrad", "Adafactor"):
        forms += ["capturable=True", "capturable=True, foreach=False"]
    given += [form for form in [r.choice(forms)] if form]
    if "fused" in given[-1]:
        given = [g for g in given if g != "differentiable=True"]
    return f"torch.optim.{name}(parameters, {', '.join(given)})"


def spec_of(seed: int) -> Spec:
    r = Random(seed)
    autocast = r.choice((None, None, "float16", "bfloat16", "bfloat16"))
    dtype = "float32"
    if autocast is None:
        dtype = r.choices(("float32", "bfloat16", "float16", "float64"), (8, 2, 1, 1))[0]
    options = dict(
        SIMPLEST,
        optimizer=_optimizer(r), autocast=autocast, dtype=dtype,
        scaler=autocast == "float16" or (autocast is None and dtype == "float32" and r.random() < 0.1),
        clip=r.choice((None, None, "1.0", "1.0, 1.0", "1.0, float('inf')", "0.5, 3.0", "1.0, 0.5", "value")),
        clip_foreach=r.choice((None, None, True, False)), accumulate=r.choice((1, 1, 1, 2, 3)),
        set_to_none=r.random() < 0.75, penalty=r.random() < 0.09, frozen=r.random() < 0.12,
        input_grad=r.random() < 0.2, cache=r.random() < 0.9, channels_last=r.random() < 0.1,
        module_hooks=r.random() < 0.08, ema=r.random() < 0.07,
        source=r.choice(("device", "device", "host", "pinned")), twice=r.random() < 0.06,
        in_backward=r.random() < 0.06,
    )  # fmt: skip
    if options["in_backward"]:  # what has been updated cannot be run backward again
        options["twice"] = options["penalty"] = False
    if "Adafactor" in options["optimizer"] and dtype == "float64":
        options["dtype"] = "float32"
    entry = r.choice(("dense", "dense", "tokens", "image"))
    batch = r.choice((1, 2, 4, 8, 16, 32))
    width = r.choice((16, 24, 33, 64, 128, 256, 512))
    length = r.choice((7, 16, 32, 64, 100, 128, 256))
    shape: Shape = {
        "dense": r.choice(
            ((batch * length, width), (batch, length, width), (batch * 32, width * 2))
        ),
        "tokens": (batch, length, width),
        "image": (batch, r.choice((1, 3, 4)), r.choice((8, 16, 28, 32)), r.choice((8, 16, 28, 32))),
    }[entry]
    spec = Spec((), entry, shape, r.randrange(1 << 30), options)
    for _ in range(r.choice((1, 2, 2, 3, 3, 4))):
        wrapper = r.choices(WRAPPERS, _WRAPPER_WEIGHTS)[0]
        if wrapper == "reentrant" and options["penalty"]:
            wrapper = "checkpoint"  # the other form knows nothing of torch.autograd.grad
        spec = replace(spec, segments=(*spec.segments, Segment(wrapper, ())))
        for _ in range(r.randint(1, 5)):
            spec = _extended(spec, r, wide=seed >= WIDE_FROM)
    return spec


def _excluded(spec: Spec) -> set[str]:
    """Parts that PyTorch refuses: attention kernels have no second derivative, and torch.func no
    hooks for saved tensors."""
    refused: set[str] = set()
    if spec.options["penalty"]:
        refused |= {"scaled_dot_product", "multihead_attention", "transformer_layer", *NOT_TWICE}
    if spec.segments[-1].wrapper not in ("plain", "no_grad", "full", "stream"):
        refused |= {"transformed", *NOT_HOOKED}
    return refused


def _extended(spec: Spec, r: Random, *, wide: bool) -> Spec:
    """One more part, of a kind that applies to the shape that is reached."""
    shape = _Renderer(spec).shape
    kinds = {**PARTS, **WIDE} if wide else PARTS
    names = [name for name in kinds if name not in _excluded(spec)]
    weights = [kinds[name][1] for name in names]
    for _ in range(20):
        name = r.choices(names, weights)[0]
        slot = (name, r.randrange(1 << 30))
        if applied(slot, shape) is not None:
            last = spec.segments[-1]
            grown = replace(last, slots=(*last.slots, slot))
            return replace(spec, segments=(*spec.segments[:-1], grown))
    return spec


# ---- shapes ------------------------------------------------------------------------------------


@lru_cache(maxsize=100_000)
def applied(slot: Slot, shape: Shape) -> tuple[str, str, Shape] | None:
    """A part's module, its statements and the shape it makes of ``shape``; None: not for it."""
    name, seed = slot
    code = {**PARTS, **WIDE}[name][0](Random(seed), shape)
    if code is None:
        return None
    module, statements = code
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}
    try:
        with torch.device("meta"), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scope["m"] = eval(module, scope) if module else None
            scope["x"] = torch.empty(shape)
            exec(statements.replace("@", "m") if module else statements, scope)
    except Exception:
        return None
    reached = tuple(scope["x"].shape)
    if not reached or not 0 < prod(reached) <= LIMIT or len(reached) > 5:
        return None
    return module, statements, reached


# ---- rendering ---------------------------------------------------------------------------------


class _Renderer:
    """The source text of a program."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.shape = spec.shape
        self.members: list[str] = []
        self.methods: list[str] = []
        self.calls: list[str] = []
        dtype = spec.options["dtype"]
        if spec.entry == "tokens":
            self.members.append(f"self.words = nn.Embedding(4000, {spec.shape[-1]})")
            self.calls.append("x = self.words(x)")
        elif dtype != "float32":
            self.calls.append(f"x = x.to(torch.{dtype})")
        for number, segment in enumerate(spec.segments):
            self._segment(number, segment)

    def _segment(self, number: int, segment: Segment) -> None:
        body: list[str] = []
        for slot in segment.slots:
            made = applied(slot, self.shape)
            if made is None:
                continue
            module, statements, self.shape = made
            name = f"self.p{len(self.members)}"
            if module:
                self.members.append(f"{name} = {module}")
                statements = statements.replace("@", name)
            body += statements.split("\n")
            if slot[0] == "cast" and self.spec.options["dtype"] != "float32":
                body.append("x = x.to(self.scale.dtype)")
        if not body:
            return
        name = f"part{number}"
        lines = textwrap.indent("\n".join([*body, "return x"]), " " * 8)
        self.methods.append(f"    def {name}(self, x):\n{lines}")
        self.calls += _call(segment.wrapper, f"self.{name}")

    def text(self) -> str:
        spec, o = self.spec, self.spec.options
        members = self.members or ["pass"]
        forward = [*self.calls, "return x"]
        parts = [
            "import torch, torch.nn.functional as F",
            "from torch import nn",
            "from torch.utils.checkpoint import checkpoint",
            "",
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            # so that every program has something to train
            "        self.scale = nn.Parameter(torch.ones(()))",
            *(f"        {line}" for line in members),
            *self.methods,
            "    def forward(self, x):",
            *(f"        {line}" for line in forward),
            "",
            "def make(device):",
            textwrap.indent("\n".join(_make(spec, self.shape)), "    "),
        ]
        del o
        return "\n".join(parts) + "\n"


def _call(wrapper: str, name: str) -> list[str]:
    if wrapper == "plain":
        return [f"x = {name}(x)"]
    if wrapper == "reentrant":
        return [f"x = checkpoint({name}, x, use_reentrant=True)"]
    if wrapper == "checkpoint":
        return [f"x = checkpoint({name}, x, use_reentrant=False)"]
    if wrapper == "nested":
        return [
            f"x = checkpoint(lambda x: checkpoint({name}, x * 1, use_reentrant=False), x, "
            "use_reentrant=False)"
        ]
    if wrapper == "checked":
        return [
            f"x = checkpoint(lambda x: checkpoint({name}, x + 1, use_reentrant=False, "
            "preserve_rng_state=False), x, use_reentrant=False, determinism_check='default')"
        ]
    if wrapper == "packed":
        return [
            "with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):",
            f"    x = {name}(x)",
        ]
    if wrapper == "offload":
        return ["with torch.autograd.graph.save_on_cpu():", f"    x = {name}(x)"]
    if wrapper == "no_grad":
        return ["with torch.no_grad():", f"    x = {name}(x)"]
    if wrapper == "full":
        return ["with torch.autocast('cuda', enabled=False):", "    dtype = x.dtype",
                f"    x = {name}(x.to(self.scale.dtype)).to(dtype)"]  # fmt: skip
    assert wrapper == "stream"
    return [
        "side.wait_stream(torch.cuda.current_stream())",
        "with torch.cuda.stream(side):",
        f"    x = {name}(x)",
        "torch.cuda.current_stream().wait_stream(side)",
        "x.record_stream(torch.cuda.current_stream())",
    ]


def _batch(spec: Spec) -> list[str]:
    o, shape = spec.options, spec.shape
    where = "device=device" if o["source"] == "device" else ""
    moved = {
        "device": "",
        "host": ".to(device)",
        "pinned": ".pin_memory().to(device, non_blocking=True)",
    }
    if spec.entry == "tokens":
        made = f"torch.randint(0, 4000, {shape[:-1]}, {where})"
    else:
        made = f"torch.randn({shape}, {where})"
    lines = [f"x = {made.replace(', )', ')')}{moved[o['source']]}"]
    if o["channels_last"] and len(shape) == 4:
        lines.append("x = x.contiguous(memory_format=torch.channels_last)")
    if (o["input_grad"] or o["penalty"]) and spec.entry != "tokens":
        lines.append("x.requires_grad_()")
    return lines


def _make(spec: Spec, shape: Shape) -> list[str]:
    o = spec.options
    lines = ["model = Net().to(device)"]
    if o["dtype"] != "float32":
        lines = [f"model = Net().to(device, torch.{o['dtype']})"]
    if any(segment.wrapper == "stream" for segment in spec.segments):
        lines = ["global side", "side = torch.cuda.Stream()", *lines]
    if o["channels_last"]:
        lines.append("model = model.to(memory_format=torch.channels_last)")
    if o["frozen"]:
        lines += ["for p in list(model.parameters())[1:3]:", "    p.requires_grad_(False)"]
    if o["module_hooks"]:
        lines += ["for m in [m for m in model.children() if not getattr(m, 'inplace', False)]:",
                  "    m.register_forward_hook(lambda m, i, y: None)",
                  "    m.register_full_backward_hook(lambda m, i, o: None)"]  # fmt: skip
    if o["ema"]:
        lines.append("average = torch.optim.swa_utils.AveragedModel(model, "
                     "multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))")  # fmt: skip
    lines.append("parameters = [p for p in model.parameters() if p.requires_grad]")
    lines.append(f"optimizer = {o['optimizer']}")
    if o["in_backward"] and not o["scaler"]:
        one = o["optimizer"].replace("parameters", "[p]")
        lines += [f"each = {{p: {one} for p in parameters}}",
                  "def update(p):",
                  "    each[p].step()",
                  "    each[p].zero_grad()",
                  "for p in parameters:",
                  "    p.register_post_accumulate_grad_hook(update)"]  # fmt: skip
    if o["scaler"]:
        lines.append("scaler = torch.amp.GradScaler('cuda')")
    step = [f"optimizer.zero_grad(set_to_none={o['set_to_none']})"]
    inner = [*_batch(spec), *_loss(spec, shape), *_backward(o)]
    if o["accumulate"] > 1:
        step += [f"for _ in range({o['accumulate']}):", *(f"    {line}" for line in inner)]
    else:
        step += inner
    step += _update(o)
    return [*lines, "def step():", *(f"    {line}" for line in step), "return step"]


def _loss(spec: Spec, shape: Shape) -> list[str]:
    o = spec.options
    code = loss_code(Random(spec.loss), shape, o["autocast"] is not None, o["penalty"])
    code = ["given = x", "x = model(x)", *code, "loss = loss * model.scale"]
    if o["penalty"] and spec.entry != "tokens":
        code += ["g, = torch.autograd.grad(loss, given, create_graph=True, allow_unused=True)",
                 "loss = loss + g.float().square().mean() if g is not None else loss"]  # fmt: skip
    if o["autocast"]:
        cache = "" if o["cache"] else ", cache_enabled=False"
        head = f"with torch.autocast('cuda', dtype=torch.{o['autocast']}{cache}):"
        return [head, *(f"    {line}" for line in code)]
    return code


def _backward(o: dict[str, Any]) -> list[str]:
    value = f"(loss / {o['accumulate']})" if o["accumulate"] > 1 else "loss"
    if o["scaler"]:
        value = f"scaler.scale({value})"
    if o["twice"]:
        return [f"loss = {value}", "loss.backward(retain_graph=True)", "loss.backward()"]
    return [f"{value}.backward()"]


def _update(o: dict[str, Any]) -> list[str]:
    lines = []
    if o["in_backward"] and not o["scaler"]:
        return lines
    if o["clip"]:
        if o["scaler"]:
            lines.append("scaler.unscale_(optimizer)")
        foreach = "" if o["clip_foreach"] is None else f", foreach={o['clip_foreach']}"
        name = "clip_grad_value_" if o["clip"] == "value" else "clip_grad_norm_"
        limit = "1.0" if o["clip"] == "value" else o["clip"]
        lines.append(f"nn.utils.{name}(model.parameters(), {limit}{foreach})")
    lines += ["scaler.step(optimizer)", "scaler.update()"] if o["scaler"] else ["optimizer.step()"]
    if o["ema"]:
        lines.append("average.update_parameters(model)")
    return lines


def render(spec: Spec) -> str:
    return _Renderer(spec).text()


def compiled(source: str) -> Callable[[str], Any]:
    scope: dict[str, Any] = {"__name__": "generated"}
    exec(compile(source, "<generated>", "exec"), scope)
    return scope["make"]  # type: ignore[no-any-return]


def generated(seed: int) -> Callable[[str], Any]:
    """The program of a seed, as ``programs.PROGRAMS`` has them."""
    return compiled(render(spec_of(seed)))


# ---- both sides --------------------------------------------------------------------------------


def serve(profile: str | None) -> None:
    """Read programs (JSON texts, one a line) and print what their memory did."""
    from measure import measured, simulated

    out = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        torch.manual_seed(0)
        make = compiled(json.loads(line))
        try:
            result = simulated(make, profile, 3) if profile else measured(make, 3)
        except (Exception, SystemExit) as error:
            result = dict(error=f"{type(error).__name__}: {error}"[:600])
        result["torch"] = torch.__version__.split("+")[0]
        print(json.dumps(result), file=out, flush=True)


ENDED = "the process ended"


class Side:
    """One of the two sides, in a process of its own; a program that breaks it costs that process."""

    def __init__(self, command: list[str], more: list[str], env: dict[str, str]) -> None:
        self.command = [*command, str(HERE / "fuzz.py"), "serve", *more]
        self.env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), **env}
        self.process: subprocess.Popen[str] | None = None
        self.left = False

    def ask(self, source: str) -> None:
        # autograd's threads count from 0 in a process that did nothing before; hooks that hold
        # their own parameter outlive their program
        if "create_graph" in source or self.left:
            self.close()
        self.left = "accumulate_grad_hook" in source
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                stderr=subprocess.DEVNULL, env=self.env,
            )  # fmt: skip
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(source) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process = None
            return dict(error=ENDED)
        result: dict[str, Any] = json.loads(line)
        if "error" in result:  # what a failed program leaves behind is not the next one's
            self.close()
        return result

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()
            self.process = None


STUB_CARDS = {
    "a100": "a100-80gb",
    "h100": "h100-80gb",
    "t4": "t4",
    "l4": "l4",
    "rtx4090": "rtx4090",
}


@contextlib.contextmanager
def both(
    reference: str, card: str, python: str | Path = sys.executable
) -> Iterator[Callable[[str], tuple[dict[str, Any], dict[str, Any]]]]:
    """``(reference, simulated)`` figures of a program; ``python`` runs the simulation."""
    left = Side([reference], [], {"STUB_DEVICE": card})
    right = Side([str(python)], ["--simulate", STUB_CARDS[card]], {})

    def run(source: str) -> tuple[dict[str, Any], dict[str, Any]]:
        for side in (left, right):
            side.ask(source)
        return left.answer(), right.answer()

    try:
        yield run
    finally:
        left.close()
        right.close()


def difference(theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """What differs, or ``""``. A program that fails on both sides says nothing."""
    if "error" in theirs:
        # Triton loads a driver of its own, which the stub does not stand for
        same = "error" in mine or ".triton" in theirs["error"]
        return "" if same else f"only the reference fails: {theirs['error'][:200]}"
    if "error" in mine:
        return f"only the simulation fails: {mine['error'][:400]}"
    text = []
    for key in ("peak_allocated", "peak_reserved"):
        off = mine[key] - theirs[key]
        if off:
            text.append(f"{key[5:]} {off:+,} ({100 * off / theirs[key]:+.3f} %)")
    return ", ".join(text)


def streams_differ(theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """The first places where the event streams part, for a reader who looks for the rule."""
    from align import align, describe

    if "error" in theirs or "error" in mine:
        return ""
    found = align(theirs["events"], mine["events"])
    return describe(found, 4) if found else ""


# ---- shrinking ---------------------------------------------------------------------------------


def smaller(spec: Spec) -> Iterator[Spec]:
    """Programs with one thing less: a segment, a part, a wrapper, an option."""
    for n, segment in enumerate(spec.segments):
        before, after = spec.segments[:n], spec.segments[n + 1 :]
        if len(spec.segments) > 1:
            yield replace(spec, segments=(*before, *after))
        if segment.wrapper != "plain":
            yield replace(spec, segments=(*before, replace(segment, wrapper="plain"), *after))
        for i in range(len(segment.slots)):
            less = replace(segment, slots=segment.slots[:i] + segment.slots[i + 1 :])
            yield replace(spec, segments=(*before, less, *after))
    for name, value in SIMPLEST.items():
        if spec.options[name] != value:
            yield replace(spec, options={**spec.options, name: value})
    if spec.loss:
        yield replace(spec, loss=0)


def shrink(spec: Spec, differs: Callable[[str], bool], patience: int = 150) -> Spec:
    """Drop one thing after the other while ``differs`` holds for the program's text."""
    going = True
    while going and patience:
        going = False
        for candidate in smaller(spec):
            text = render(candidate)
            if text != render(spec):
                patience -= 1
            if not patience:
                break
            if text == render(spec) or differs(text):
                spec, going = candidate, True
                break
    return spec


# ---- the command -------------------------------------------------------------------------------


def seeds_of(text: str) -> range:
    first, _, count = text.partition(":")
    return range(int(first), int(first) + int(count or 1))


def compare(arguments: argparse.Namespace) -> None:
    equal = compared = failed = 0
    worst = 0.0
    with both(arguments.reference, arguments.card) as run:
        for seed in seeds_of(arguments.what):
            theirs, mine = run(render(spec_of(seed)))
            text = difference(theirs, mine)
            if "error" in theirs and (not text or theirs["error"] == ENDED):
                failed += 1
                if arguments.verbose:
                    print(f"seed {seed}: neither side: {theirs['error'][:150]}", flush=True)
                continue
            compared += 1
            equal += not text
            if "error" not in theirs and "error" not in mine:
                keys = ("peak_allocated", "peak_reserved")
                worst = max(worst, *(abs(mine[k] / theirs[k] - 1) for k in keys))
            streams = streams_differ(theirs, mine) if text or arguments.streams else ""
            if text or streams:
                print(f"seed {seed}: {text or 'the peaks are equal'}", flush=True)
                print(textwrap.indent(streams, "    "), flush=True)
    print(f"{equal} of {compared} equal, largest error {100 * worst:.3f} %, {failed} run nowhere")


def shrunk(arguments: argparse.Namespace) -> None:
    with both(arguments.reference, arguments.card) as run:

        def differs(source: str) -> bool:
            theirs, mine = run(source)
            return "error" not in theirs and bool(
                streams_differ(theirs, mine) if arguments.streams else difference(theirs, mine)
            ) and mine.get("error", "")[:50] == failing  # fmt: skip

        spec = spec_of(int(arguments.what))
        failing = run(render(spec))[1].get("error", "")[:50]
        if not differs(render(spec)):
            print("both sides are equal")
            return
        source = render(shrink(spec, differs))
        print(source)
        theirs, mine = run(source)
        print(textwrap.indent(difference(theirs, mine) + "\n" + streams_differ(theirs, mine), "# "))


def record(arguments: argparse.Namespace) -> None:
    """The reference's figures, with the program's text, so that a changed generator does not
    change what was recorded."""
    programs = []
    with both(arguments.reference, arguments.card) as run:
        for seed in seeds_of(arguments.what):
            source = render(spec_of(seed))
            theirs, _ = run(source)
            if "error" not in theirs:
                keys = ("peak_allocated", "peak_reserved")
                programs.append(dict(seed=seed, program=source, **{k: theirs[k] for k in keys}))
    known = json.loads(arguments.file.read_text()) if arguments.file.exists() else {}
    known[STUB_CARDS[arguments.card]] = programs
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    arguments.file.write_text(json.dumps(known, indent=1) + "\n")


#: The seeds of the conformance page: where each card's begin.
SWEPT = {"a100": 20000, "t4": 21000, "h100": 22000}
FIGURES = HERE.parents[1] / "fixtures" / "conformance"


def digest(source: str) -> str:
    """What tells that a seed still is the program that was measured."""
    return hashlib.sha256(source.encode()).hexdigest()[:8]


def sweep(arguments: argparse.Namespace) -> None:
    """``fixtures/conformance/generated-*.json`` of this torch: page.Row of every seed."""
    from page import Row, write

    rows = []
    for card, first in SWEPT.items():
        with both(arguments.reference, card) as run:
            for offset in seeds_of(arguments.what):
                source = render(spec_of(first + offset))
                rows.append(Row(**row_of(first + offset, card, source, *run(source))))
                print(rows[-1].case, card, rows[-1].error("allocated"), rows[-1].error("reserved"),
                      rows[-1].note, flush=True)  # fmt: skip
    version = ".".join(torch.__version__.split(".")[:2])
    write(FIGURES / f"generated-{version}.json", rows)


def row_of(
    seed: int, card: str, source: str, theirs: dict[str, Any], mine: dict[str, Any]
) -> dict[str, Any]:
    """The fields of a page.Row. Without a reference there is nothing to be right about."""
    note = ""
    if "error" in theirs:
        note = f"no reference: {theirs['error'].splitlines()[0][:150]}"
    elif "error" in mine:
        note = f"failed: {mine['error'].splitlines()[0][:150]}"
    figures = {}
    for key in ("allocated", "reserved"):
        figures[f"reference_{key}"] = theirs.get(f"peak_{key}")
        figures[key] = mine.get(f"peak_{key}")
    here = torch.__version__.split("+")[0]
    return dict(
        suite="generated", case=f"{seed} {digest(source)}", card=card, **figures, note=note,
        torch=here, reference_torch=theirs.get("torch", here),
    )  # fmt: skip


_ACTIONS = {"compare": compare, "shrink": shrunk, "record": record, "sweep": sweep}


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("show", *_ACTIONS, "serve"))
    parser.add_argument("what", nargs="?", default="0:20", help="SEED or FIRST:COUNT")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--simulate", metavar="PROFILE", help="for serve")
    parser.add_argument("--card", default="a100", choices=STUB_CARDS)
    parser.add_argument("--streams", action="store_true", help="every event, not only the peaks")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--reference", default=str(HERE.parent / "stub_driver" / "run.sh"))
    arguments = parser.parse_args()
    if arguments.action == "show":
        print(render(spec_of(int(arguments.what))))
    elif arguments.action == "serve":
        serve(arguments.simulate)
    else:
        _ACTIONS[arguments.action](arguments)


if __name__ == "__main__":
    main()

"""The marker, the command-line options and the ini settings by name.

Every pytest run imports this module and registers what it says, with marked tests or without:
there is nothing here but text, and what the text means is read elsewhere (:mod:`settings`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

MARKER = "vram_budget"

#: What `pytest --markers` prints.
HELP = (
    f'{MARKER}(peak=None, *, reserved=None, precision="fp32", steps=3, warmup=1, '
    'baseline="2% + 1 MiB", estimate="5% + 16 MiB", skipped_steps=None, trainable=None, '
    'growth="64 KiB", gpu=None): give a training test a GPU-memory budget: ceilings on peak '
    "allocated and reserved bytes, the precision to train in, how far figures may move from the "
    "baseline and the estimate, and what counts as healthy training (pytest-vram)."
)

DEFAULT_GPU = "a100-80gb"
#: What `--vram-update` may be restricted to. Plain `--vram-update` is new and changed.
CATEGORIES = ("new", "changed", "tighten", "prune")

#: Settings that can be given on the command line and in the configuration: name, metavar, help.
#: The flag is the name with dashes.
_BOTH = (
    (
        "vram_device",
        "DEVICE",
        "who answers how much memory a marked test takes: auto (CUDA where there is one, else a "
        "simulated GPU), cuda, cuda:N, sim or sim:PROFILE",
    ),
    (
        "vram_estimate",
        "on|off",
        "on or off: whether a measured test is simulated first, to compare both",
    ),
    (
        "vram_numerics",
        "auto|cpu|off",
        "how the numbers of a simulated test are checked: auto (a real run on the CPU unless the "
        "model is too large), cpu (always) or off",
    ),
    (
        "vram_baselines",
        "DIR",
        "directory of the stored baselines, relative to the rootdir (default: vram_baselines)",
    ),
)
#: Settings of the configuration alone: name, pytest's type, help.
_INI = (
    ("vram_gpu", "string", f"the GPU to simulate where nothing else names one ({DEFAULT_GPU})"),
    (
        "vram_gpus",
        "linelist",
        "own GPUs to simulate, one a line: 'name: like=rtx4090, memory=48 GiB'; keys: like, "
        "memory, capability, multiprocessors, ...",
    ),
    (
        "vram_numerics_limit",
        "string",
        "tests whose simulated peak is above this are not run on the CPU (default: 1 GiB)",
    ),
    (
        "vram_budget",
        "linelist",
        "vram_budget keywords for every marked test that does not give them, one a line: "
        "'peak = 20 GiB'",
    ),
    ("vram_strict", "bool", "like --vram-strict"),
)
#: Options of the command line alone; the run means something only with marked tests.
_FLAGS = ("vram_strict", "vram_update", "vram_dry_run", "vram_report", "vram_snapshots")

_UPDATE = "--vram-update"


class _Update(argparse.Action):
    """``--vram-update`` or ``--vram-update=CATEGORY``. Every form is an option string of its own:
    with ``nargs="?"`` argparse would take the path in ``--vram-update tests/`` for a category."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        given = list(getattr(namespace, self.dest) or [])
        given.append((option_string or "").partition("=")[2])
        setattr(namespace, self.dest, given)


def check_update(arguments: Iterable[object]) -> None:
    """argparse would call an unknown category an "ignored explicit argument".

    :raises pytest.UsageError: with the categories there are.
    """
    for argument in map(str, arguments):
        name, sign, category = argument.partition("=")
        if name == _UPDATE and sign and category not in (*CATEGORIES, "all"):
            import pytest

            known = ", ".join(CATEGORIES)
            raise pytest.UsageError(f"{argument}: expected {known} or all, or no category")


def add_options(parser: pytest.Parser) -> None:
    """Register every option and ini setting of the plugin."""
    group = parser.getgroup("vram", "GPU-memory budgets for training tests (pytest-vram)")
    add = group.addoption
    for name, metavar, text in _BOTH:
        flag = "--" + name.replace("_", "-")
        add(flag, dest=name, metavar=metavar, default=None, help=f"{text} (ini: {name})")
        parser.addini(name, text, type="string", default=None)
    for name, kind, text in _INI:
        parser.addini(name, text, type=kind, default=False if kind == "bool" else None)  # type: ignore[arg-type]
    add(
        "--no-vram",
        dest="vram_enabled",
        action="store_false",
        default=True,
        help=f"marked tests run as plain tests: {MARKER} markers do nothing",
    )
    add(
        "--vram-strict",
        action="store_true",
        default=None,
        help="missing and stale baselines, and improvements, fail (ini: vram_strict)",
    )
    categories = (*CATEGORIES, "all")
    add(
        _UPDATE,
        f"{_UPDATE}={'|'.join(categories)}",  # for people: in --help, and where one is misspelt
        dest="vram_update",
        action=_Update,
        help="write baselines of tests that pass everything else: new and changed ones, or only "
        "the given category (repeatable)",
    )
    for category in categories:
        add(f"{_UPDATE}={category}", dest="vram_update", action=_Update, help=argparse.SUPPRESS)
    add(
        "--vram-dry-run",
        action="store_true",
        default=None,
        help=f"with {_UPDATE}: say what would be written, write nothing",
    )
    add(
        "--vram-report",
        dest="vram_report",
        action="append",
        metavar="FILE",
        help="write a report of the marked tests: FILE.html, .json, .md, .csv or "
        ".codequality.json (GitLab); repeatable",
    )
    add(
        "--vram-snapshots",
        dest="vram_snapshots",
        metavar="DIR",
        help="write a snapshot of every measured and simulated run for PyTorch's memory visualiser",
    )


def any_given(option: Callable[[str], Any], ini: Callable[[str], Any]) -> bool:
    """Whether a person chose anything: what they wrote is then read, and refused, at the start."""
    return any(option(name) for name in (*(name for name, _, _ in _BOTH), *_FLAGS)) or any(
        ini(name) for name, _, _ in (*_BOTH, *_INI)
    )

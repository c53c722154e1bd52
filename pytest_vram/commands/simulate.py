"""``pytest-vram simulate``: any training script, unmodified, on a card that is not there."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_vram.commands.common import (
    CARD,
    Exit,
    Problem,
    assumption,
    emit,
    json_option,
    say,
    table,
)
from pytest_vram.quantities import format_bytes
from pytest_vram.sim.profiles import Profile, find_profile

if TYPE_CHECKING:
    from pytest_vram.commands.dryrun import DryRun


@click.command("simulate", context_settings={"allow_interspersed_args": False})
@click.option("-g", "--gpu", type=CARD, help="The card to simulate (default: a100-80gb).")
@click.option(
    "--steps",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Training steps to watch; 0: run to the end, training or not.",
)
@click.option("--limit", type=float, default=0, help="Seconds after which to stop; 0: none.")
@assumption
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.option("--snapshot", type=click.Path(path_type=Path), help="Write a memory snapshot.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the timeline: .png or .svg.")
@json_option
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    gpu: Profile | None,
    steps: int,
    limit: float,
    selected: float | None,
    module: bool,
    snapshot: Path | None,
    plot: Path | None,
    as_json: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT with ARGUMENTS on a simulated card and say what it takes.

    \b
    pytest-vram simulate --gpu rtx4090 train.py --epochs 1
    pytest-vram simulate --gpu t4 -m package.train --config small.yaml

    Options of pytest-vram go before SCRIPT. Tensors have shapes but no values.
    """
    from pytest_vram.commands.dryrun import Script, dry_run

    profile = gpu or find_profile("a100-80gb")
    _check_target(script, module)
    for file in (snapshot, plot):
        if file is not None and not file.parent.is_dir():
            raise Problem(f"{file}: no such folder")
    # The script's own prints must not end up in the JSON document.
    quiet: Any = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with quiet:
        run = dry_run(
            Script(script, arguments, module),
            profile,
            steps=steps,
            limit=limit,
            snapshot=snapshot,
            selected=selected,
        )
    if plot:
        from pytest_vram.commands.plots import draw_timeline

        draw_timeline(run.timeline, profile, plot)
    code = _code(run, steps)
    if as_json:
        emit(to_dict(run, profile, code))
    else:
        show(run, profile, code, steps)
    ctx.exit(code)


def _check_target(script: str, module: bool) -> None:
    if not module:
        if not Path(script).is_file():
            raise Problem(f"{script}: no such script")
        return
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(script)
    except (ImportError, ValueError) as error:
        raise Problem(f"-m {script}: {error}") from None
    finally:
        sys.path.pop(0)
    if found is None:
        raise Problem(f"-m {script}: no such module")


def _code(run: DryRun, steps: int) -> Exit:
    if run.out_of_memory:
        return Exit.NO
    if run.unknown:
        return Exit.UNKNOWN
    if run.error:
        return Exit.SCRIPT
    unseen = run.unused if run.steps else steps
    return Exit.UNKNOWN if unseen else Exit.YES


def to_dict(run: DryRun, profile: Profile, code: Exit) -> dict[str, Any]:
    """JSON-serialisable; sizes in bytes."""
    return {
        "gpu": profile.name,
        "memory": profile.memory,
        "answer": code.name.lower(),
        "steps": run.steps,
        "seconds": round(run.seconds, 3),
        "ended": run.ended,
        "error": run.error,
        "unknown": run.unknown,
        "out_of_memory": run.out_of_memory,
        "peak_allocated": run.ledger.peak_allocated,
        "peak_reserved": run.ledger.peak_reserved,
        "ledger": run.ledger.to_dict(),
        "notes": list(run.notes),
    }


def show(run: DryRun, profile: Profile, code: Exit, steps: int) -> None:
    """Why it ended, the ledger, the steps, and the answer last."""
    from pytest_vram.commands.ledger_report import show_ledger

    ledger = run.ledger
    say(
        f"{profile.title} ({profile.name}, simulated), {run.steps} training steps in "
        f"{run.seconds:.1f} s: {run.ended}."
    )
    if run.error:
        click.echo(run.error, err=True)
    if run.unknown:
        say(run.unknown)
    say()
    if not run.unused:
        show_ledger(ledger)
    for note in run.notes:
        say(f"Note: {note}")
    if ledger.steps and not run.unused:
        say()
        _show_steps(run)
    say()
    say(_conclusion(run, profile, code, steps))


def _conclusion(run: DryRun, profile: Profile, code: Exit, steps: int) -> str:
    ledger = run.ledger
    room = profile.free
    if code is Exit.NO:
        return f"Does not fit on {profile.name}: {format_bytes(room)} are there for PyTorch."
    if run.unknown:
        return "What it would take cannot be told; the figures above end where the simulation did."
    if run.error:
        return "The script failed by itself; the figures above end there."
    if run.unused and (run.steps or steps):
        return (
            f"Nothing was put on {profile.name}: the script ran on the CPU. Does it want an option "
            "such as --cuda or --device cuda?"
        )
    if code is Exit.UNKNOWN:
        return (
            "No optimizer stepped, so no training was seen (--steps 0 runs a script that does "
            "not train)."
        )
    spare = format_bytes(room - ledger.peak_reserved)
    return (
        f"Fits on {profile.name}: {format_bytes(ledger.peak_reserved)} reserved, {spare} to spare."
    )


def _show_steps(run: DryRun) -> None:
    """The timeline in figures: peaks of each phase, step by step."""
    names = [name for name in run.ledger.phases if name not in ("setup", "between")]
    rows = [
        (
            str(step.number),
            *(format_bytes(step.phases[name]) if name in step.phases else "-" for name in names),
            format_bytes(step.live),
        )
        for step in run.ledger.steps
    ]
    table(("step", *names, "alive after"), rows)

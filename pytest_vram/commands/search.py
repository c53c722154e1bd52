"""``pytest-vram search``: the largest value of an argument with which a script still fits."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Trial:
    """One value that was tried; ``fits`` is what the simulated card said."""

    value: int
    fits: bool
    allocated: int
    reserved: int


@click.command("search", context_settings={"allow_interspersed_args": False})
@click.option("-g", "--gpu", type=CARD, help="The card to simulate (default: a100-80gb).")
@click.option("--low", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--high", type=click.IntRange(min=1), default=4096, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--limit", type=float, default=0, help="Seconds per trial; 0: none.")
@assumption
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@json_option
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    gpu: Profile | None,
    low: int,
    high: int,
    steps: int,
    limit: float,
    selected: float | None,
    module: bool,
    as_json: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """The largest whole number that can stand for {} in ARGUMENTS before SCRIPT runs out of memory.

    \b
    pytest-vram search --gpu rtx4090 train.py --batch-size {}
    pytest-vram search --gpu t4 --high 8192 train.py --seq-len={}

    Doubles from --low until it fails, then bisects; every trial is a simulation of its own.
    """
    if not any("{}" in argument for argument in arguments):
        raise Problem("no {} among the script's arguments: say where the number goes")
    if low > high:
        raise Problem(f"--low {low} is above --high {high}")
    profile = gpu or find_profile("a100-80gb")
    options = ["--gpu", profile.name, "--steps", str(steps), "--limit", str(limit)]
    options += ["-m"] if module else []
    options += [] if selected is None else ["--assume-selected", str(selected)]
    trials: list[Trial] = []

    def works(value: int) -> bool:
        filled = [argument.replace("{}", str(value)) for argument in arguments]
        trial = _try([*options, script, *filled], value)
        trials.append(trial)
        if not as_json:
            word = "fits" if trial.fits else "out of memory"
            click.echo(f"{value:>8,}  {format_bytes(trial.reserved):>11}  {word}", err=True)
        return trial.fits

    best = bisect(works, low, high)
    if as_json:
        emit({"gpu": profile.name, "best": best, "trials": [_trial(t) for t in trials]})
    else:
        _show(best, trials, profile, high)
    ctx.exit(Exit.YES if best else Exit.NO)


def bisect(works: Any, low: int, high: int) -> int:
    """The largest value from ``low`` to ``high`` that works; 0 if ``low`` does not. Assumes that
    what works for a value works for every smaller one."""
    if not works(low):
        return 0
    best, value = low, min(2 * low, high)
    while best < high:
        if not works(value):
            break
        best, value = value, min(2 * value, high)
    else:
        return best
    worst = value
    while worst - best > 1:
        middle = (best + worst) // 2
        if works(middle):
            best = middle
        else:
            worst = middle
    return best


def _try(words: list[str], value: int) -> Trial:
    """One simulation in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest_vram", "simulate", "--json", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (Exit.YES, Exit.NO):
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        why = lines[-1] if lines else "no message"
        try:
            answer = json.loads(done.stdout)
            why = answer["unknown"] or answer["error"].splitlines()[-1:] or answer["ended"]
        except (ValueError, KeyError):
            pass
        code = Exit(done.returncode) if done.returncode in set(Exit) else Exit.SCRIPT
        raise Problem(f"with {value}: {why if isinstance(why, str) else why[0]}", code)
    answer = json.loads(done.stdout)
    fits = not answer["out_of_memory"]
    return Trial(value, fits, answer["peak_allocated"], answer["peak_reserved"])


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "value": trial.value,
        "fits": trial.fits,
        "peak_allocated": trial.allocated,
        "peak_reserved": trial.reserved,
    }


def _show(best: int, trials: list[Trial], profile: Profile, high: int) -> None:
    rows = [
        (
            f"{trial.value:,}",
            format_bytes(trial.allocated),
            format_bytes(trial.reserved),
            "yes" if trial.fits else "no",
        )
        for trial in sorted(trials, key=lambda trial: trial.value)
    ]
    table(("value", "allocated", "reserved", "fits"), rows)
    if not best:
        say(f"Not even the smallest value fits on {profile.name}.")
    elif len(trials) > 1 and len({trial.allocated for trial in trials if trial.fits}) == 1:
        say("The peak never changed: is {} really the batch size, and is there enough data?")
    elif best == high:
        say(f"{best:,} fits on {profile.name}, and is all that was asked for (--high).")
    else:
        say(f"{best:,} is the largest that fits on {profile.name}.")

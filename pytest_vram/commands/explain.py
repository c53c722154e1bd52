"""``pytest-vram explain``: what a memory snapshot says, whoever made it."""

from __future__ import annotations

from pathlib import Path

import click

from pytest_vram.commands.common import Exit, Problem, emit, json_option, say
from pytest_vram.commands.ledger_report import show_ledger
from pytest_vram.commands.snapshots import (
    Explained,
    Snapshot,
    SnapshotError,
    explain,
    read_snapshot,
)
from pytest_vram.ledger import Ledger


@click.command("explain")
@click.argument("snapshot", type=click.Path(path_type=Path))
@click.option("--device", type=click.IntRange(min=0), help="Device (default: the fullest).")
@click.option("--largest", type=click.IntRange(min=0), default=12, show_default=True)
@json_option
@click.pass_context
def command(
    ctx: click.Context, snapshot: Path, device: int | None, largest: int, as_json: bool
) -> None:
    """Ledger and largest tensors of SNAPSHOT.

    SNAPSHOT is what torch.cuda.memory._dump_snapshot() or pytest-vram wrote, or a JSON
    recording with the same fields; plain or gzipped. It is read without running anything in it.
    """
    try:
        read = read_snapshot(snapshot)
        chosen, explained = _choose(read, device)
    except SnapshotError as error:
        raise Problem(f"{snapshot}: {error}") from None
    ledger = Ledger.from_trace(explained.trace, largest=largest)
    if as_json:
        emit({"device": chosen, "inferred": explained.inferred, **ledger.to_dict()})
    else:
        _show(ledger, explained, chosen)
    ctx.exit(Exit.NO if ledger.failure else Exit.YES)


def _choose(snapshot: Snapshot, device: int | None) -> tuple[int, Explained]:
    """The asked device, or the one whose peak is highest."""
    devices = snapshot.devices()
    if not devices:
        raise SnapshotError("the snapshot is empty: no segments, no events")
    if device is None and len(devices) == 1:
        device = devices[0]
    if device is not None:
        if device not in devices:
            raise SnapshotError(f"nothing about device {device}; it has {devices}")
        return device, explain(snapshot, device)
    made = {index: explain(snapshot, index) for index in devices}
    fullest = max(made, key=lambda index: Ledger.from_trace(made[index].trace).peak_allocated)
    return fullest, made[fullest]


def _show(ledger: Ledger, explained: Explained, device: int) -> None:
    say(f"cuda:{device}, {len(explained.trace.events):,} events")
    show_ledger(ledger)
    if not explained.inferred:
        say(
            "The snapshot carries no stacks, so nobody can say whose bytes these are; record with "
            "torch.cuda.memory._record_memory_history(stacks='all')."
        )
    else:
        say("Bills are inferred from the stacks of each allocation and of its release.")

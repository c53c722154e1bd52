"""``pytest-vram gpus``: the cards that are known."""

from __future__ import annotations

from dataclasses import asdict

import click

from pytest_vram.commands.common import CARD, emit, json_option, own_profiles, say, table
from pytest_vram.quantities import format_bytes
from pytest_vram.sim.profiles import PROFILES, Profile


@click.command("gpus")
@click.argument("card", type=CARD, required=False)
@json_option
def command(card: Profile | None, as_json: bool) -> None:
    """List the known cards, or show everything about CARD.

    Cards of your own are lines of the pytest setting vram_gpus, for example
    "lab-box: like=rtx4090, memory=48 GiB".
    """
    cards = [card] if card else [*PROFILES.values(), *own_profiles()]
    if as_json:
        emit([_as_dict(item) for item in cards])
    elif card:
        table(("", "value"), [(key.replace("_", " "), _text(key, v)) for key, v in _facts(card)])
    else:
        table(
            ("name", "driver's name", "sm", "SMs", "memory", "bytes"),
            [_row(item) for item in cards],
            left=2,
        )
        say("Memory is what the driver reports; a CUDA context takes about 500 MiB of it.")


def _row(card: Profile) -> tuple[str, ...]:
    title = card.title.removeprefix("NVIDIA ").removeprefix("GeForce ")
    major, minor = card.capability
    return (
        card.name,
        title,
        f"{major}.{minor}",
        str(card.multiprocessors),
        format_bytes(card.memory),
        f"{card.memory:,}",
    )


def _as_dict(card: Profile) -> dict[str, object]:
    return {**asdict(card), "free": card.free}


def _facts(card: Profile) -> list[tuple[str, object]]:
    return list(_as_dict(card).items())


def _text(key: str, value: object) -> str:
    if isinstance(value, tuple):
        return ".".join(map(str, value))
    if isinstance(value, int) and value >= 1024 and not key.startswith(("threads", "registers")):
        return f"{value:,} ({format_bytes(value)})"
    return str(value)

"""``pytest-vram plan``: the planning questions, answered from formulas in a moment."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from pytest_vram.commands import plan_report
from pytest_vram.commands.common import CARD, Exit, Problem, emit, json_option
from pytest_vram.commands.setup_options import build_setup, model_names, setup_options
from pytest_vram.planning.plan import make_plan
from pytest_vram.planning.questions import (
    fits,
    largest_batch,
    largest_layers,
    largest_sequence,
    rescue,
    sensitivity,
)
from pytest_vram.planning.runs import Setup
from pytest_vram.planning.shapes import PlanError
from pytest_vram.sim.profiles import Profile

_LARGEST = {"batch": largest_batch, "sequence": largest_sequence, "layers": largest_layers}


@click.command("plan")
@click.argument("model", required=False, shell_complete=model_names)
@click.option("-g", "--gpu", type=CARD, help="The card that it should fit on.")
@click.option("--cards", is_flag=True, help="How many of which cards.")
@click.option(
    "--largest",
    type=click.Choice(tuple(_LARGEST)),
    help="The largest batch, sequence or depth that fits on --gpu.",
)
@click.option("--sensitivity", "sensitive", is_flag=True, help="What each change would do.")
@click.option("--versus", help="Other options to compare with, in quotes.")
@click.option("--check", is_flag=True, help="Simulate it too, and compare (module:attribute).")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw bills to FILE.png or .svg.")
@click.option("--plot-over", type=click.Choice(("batch", "sequence")), default="batch")
@setup_options
@json_option
@click.pass_context
def command(ctx: click.Context, /, model: str | None, as_json: bool, **values: Any) -> None:
    """Plan the memory of training MODEL.

    MODEL is a published model's name (llama-3-8b, gpt2), a transformers config.json or its
    folder, module:attribute of a live nn.Module, or nothing with --layers --hidden --heads.

    \b
    pytest-vram plan llama-3-8b -b 2 -s 2048 --gpu a100-80gb
    pytest-vram plan gpt2 --gpu rtx3090 --largest batch
    pytest-vram plan llama-7b --precision bf16-pure --cards
    pytest-vram plan gpt2 --versus "--recompute full --batch 8"
    """
    card: Profile | None = values["gpu"]
    setup = build_setup(model, values, card)
    try:
        answer = _answer(ctx, setup, model, values)
    except PlanError as error:
        raise Problem(str(error)) from None
    if values["plot"]:
        from pytest_vram.commands.plots import draw

        draw(setup, card, values["plot"], values["plot_over"])
    if as_json:
        emit(answer.to_dict())
    else:
        answer.show()
        if values["plot"]:
            click.echo(f"plot written to {values['plot']}")
    ctx.exit(_code(answer))


def _answer(
    ctx: click.Context, setup: Setup, model: str | None, values: dict[str, Any]
) -> plan_report.Answer:
    card: Profile | None = values["gpu"]
    plan = make_plan(setup)
    fit = fits(setup, card) if card else None
    largest = None
    if values["largest"]:
        if card is None:
            raise Problem("--largest needs --gpu")
        largest = (values["largest"], _LARGEST[values["largest"]](setup, card))
    other = None
    if values["versus"]:
        other = make_plan(_other(ctx, model, values))
    check = None
    if values["check"]:
        from pytest_vram.commands.check import simulate_setup

        check = simulate_setup(model, setup, card)
    return plan_report.Answer(
        plan=plan,
        fit=fit,
        rescue=rescue(setup, card) if card and fit and fit.verdict == "no" else (),
        largest=largest,
        cards=plan_report.all_cards(setup) if values["cards"] else (),
        sensitivity=sensitivity(setup) if values["sensitive"] else (),
        other=other,
        check=check,
    )


def _other(ctx: click.Context, model: str | None, values: dict[str, Any]) -> Setup:
    """The setup of ``--versus``: the same options, with the quoted ones on top."""
    try:
        words = shlex.split(values["versus"])
    except ValueError as error:
        raise Problem(f"--versus: {error}") from None
    inner = command.make_context("--versus", list(words), parent=ctx.parent)
    given = {
        name: value
        for name, value in inner.params.items()
        if inner.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE
    }
    model = given.pop("model", None) or model
    return build_setup(model, {**values, **given}, values["gpu"])


def _code(answer: plan_report.Answer) -> Exit:
    if answer.largest is not None:
        return Exit.YES if answer.largest[1] else Exit.NO
    if answer.fit is None:
        return Exit.YES
    return {"yes": Exit.YES, "no": Exit.NO, "tight": Exit.UNKNOWN}[answer.fit.verdict]

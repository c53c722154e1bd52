"""The command line, ``pytest-vram``. Every command is its own module, imported when it is asked
for, so that ``plan`` answers without waiting for PyTorch."""

from __future__ import annotations

import importlib

import click

from pytest_vram import __version__

#: Command -> module of :mod:`pytest_vram.commands` and one line of help (so that ``--help``
#: imports none of them).
COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("plan", "Does it fit, on which cards, and if not, what to change? From formulas."),
    "simulate": ("simulate", "Run any training script on a simulated card."),
    "search": ("search", "The largest batch with which a script fits, by simulation."),
    "diff": ("diff", "What a change costs: two reports compared, test by test."),
    "report": ("report", "Join the reports of shards; write them in other formats."),
    "baselines": ("baselines", "List, explain and prune stored baselines."),
    "gpus": ("gpus", "The cards that can be planned for and simulated."),
    "explain": ("explain", "Ledger and largest tensors of a PyTorch memory snapshot."),
    "completion": ("completion", "Print the shell code that completes commands and options."),
}

EXIT_CODES = """\b
Exit codes:
  0  done; the answer is yes
  1  the answer is no: does not fit, ran out of memory, grew
  2  bad usage or bad input
  3  could not be determined
  4  the simulated script failed by itself
"""


class LazyGroup(click.Group):
    """A group whose commands are imported one by one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"pytest_vram.commands.{COMMANDS[cmd_name][0]}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)
@click.version_option(__version__, prog_name="pytest-vram")
def main() -> None:
    """GPU memory of training runs: planned from formulas, simulated, compared, explained."""

"""``pytest-vram completion``: shell completion, as click makes it."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print SHELL's completion code; add it to your profile.

    \b
    bash:  pytest-vram completion bash >> ~/.bashrc
    zsh:   pytest-vram completion zsh >> ~/.zshrc
    fish:  pytest-vram completion fish >> ~/.config/fish/config.fish
    """
    made = get_completion_class(shell)
    assert made is not None, "unreachable: the choice above lists click's own shells"
    click.echo(made(ctx.find_root().command, {}, "pytest-vram", "_PYTEST_VRAM_COMPLETE").source())

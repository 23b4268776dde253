"""``janitor completion``: let the shell complete verbs and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a shell's completion script.

    With it the shell completes janitor's commands and options.

    \b
    Examples:
      eval "$(janitor completion bash)"
      janitor completion fish > ~/.config/fish/completions/janitor.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"there is no completion for {shell}")
    root = click.get_current_context().find_root().command
    click.echo(kind(root, {}, "janitor", "_JANITOR_COMPLETE").source())

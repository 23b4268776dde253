"""``completion``: let the shell complete verbs, options and topics."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_HELP = """Print a shell's completion script.

With it the shell completes {program}'s commands, options and topics.

\b
Examples:
  eval "$({program} completion bash)"
  {program} completion fish > ~/.config/fish/completions/{program}.fish
"""


def completion(program: str) -> click.Command:
    """The command of a program that prints its completion script."""

    @click.command("completion", help=_HELP.format(program=program))
    @click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
    def command(shell: str) -> None:
        kind = get_completion_class(shell)
        if kind is None:
            raise click.UsageError(f"there is no completion for {shell}")
        if shell == "bash":
            # A colon would end a word, and each topic has one.
            click.echo("COMP_WORDBREAKS=${COMP_WORDBREAKS//:/}")
        root = click.get_current_context().find_root().command
        click.echo(kind(root, {}, program, f"_{program.upper()}_COMPLETE").source())

    return command

"""Groups that import a command only when the user types it, and shell completion.

Imports take most of a command's time, and users wait for help texts and completions, which need no imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import click
from click.exceptions import NoSuchCommand
from click.shell_completion import CompletionItem, get_completion_class

from tms_core.cli.help import Command, CommandGroup

_HELP = """Print a shell's completion script.

The script completes the commands, options and topics of {program}.

\b
Examples:
  eval "$({program} completion bash)"
  {program} completion fish > ~/.config/fish/completions/{program}.fish
"""


class LazyCommand(NamedTuple):
    """A command that is not imported yet.

    Attributes:
        place: the module and the name of the command: ``janitor.cli.plan:command``.
        help: the first sentence of the command's help.
        section: the section of the command in the help of its group.
    """

    place: str
    help: str
    section: str = "Commands"


class LazyGroup(CommandGroup):
    """A group that lists commands without importing them.

    Args:
        lazy: the commands by name; ``add_command`` can add imported commands.
    """

    def __init__(
        self,
        *args: Any,
        lazy: Mapping[str, LazyCommand] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._lazy = lazy or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self._lazy, *self.commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands and cmd_name in self._lazy:
            module, _, attribute = self._lazy[cmd_name].place.partition(":")
            self.commands[cmd_name] = getattr(import_module(module), attribute)
        return self.commands.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except NoSuchCommand as error:
            # click suggests only imported commands.
            raise NoSuchCommand(error.command_name, possibilities=self.list_commands(ctx), ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {command.section: [] for command in self._lazy.values()}
        last = next(reversed(sections))
        for name in [*self._lazy, *(name for name in self.list_commands(ctx) if name not in self._lazy)]:
            section = self._lazy[name].section if name in self._lazy else last
            sections[section].append((name, self._short_help(name)))
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=self._short_help(name)) for name in names]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def _short_help(self, name: str) -> str:
        known = self._lazy.get(name)
        return known.help if known is not None else self.commands[name].get_short_help_str(100)


def completion(program: str) -> click.Command:
    """Return the command of a program that prints a completion script."""

    @click.command("completion", cls=Command, help=_HELP.format(program=program))
    @click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
    def command(shell: str) -> None:
        kind = get_completion_class(shell)
        if kind is None:
            raise click.UsageError(f"completion for {shell} is not available")
        if shell == "bash":
            # Bash splits words at colons by default, and topics contain a colon.
            click.echo("COMP_WORDBREAKS=${COMP_WORDBREAKS//:/}")
        root = click.get_current_context().find_root().command
        click.echo(kind(root, {}, program, f"_{program.upper()}_COMPLETE").source())

    return command

"""Groups of commands that import a command only when it is typed, with shell completion.

Users and shells wait for help texts, versions and completions, and most of a command's time is spent on imports.
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

With it the shell completes {program}'s commands, options and topics.

\b
Examples:
  eval "$({program} completion bash)"
  {program} completion fish > ~/.config/fish/completions/{program}.fish
"""


class LazyCommand(NamedTuple):
    """A command that is not imported yet.

    Attributes:
        place: its module and name: ``janitor.cli.plan:command``.
        help: the first sentence of its own help.
        section: the heading that it is under in the help of its group.
    """

    place: str
    help: str
    section: str = "Commands"


class LazyGroup(CommandGroup):
    """A group whose commands are known by name and first sentence.

    Args:
        lazy: its commands by their names; others may be added as ever.
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
            # click suggests only commands that are imported already.
            raise NoSuchCommand(error.command_name, possibilities=self.list_commands(ctx), ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {command.section: [] for command in self._lazy.values()}
        last = next(reversed(sections))
        for name in [*self._lazy, *(name for name in self.list_commands(ctx) if name not in self._lazy)]:
            section = self._lazy[name].section if name in self._lazy else last
            sections[section].append((name, self._sentence(name)))
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=self._sentence(name)) for name in names]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def _sentence(self, name: str) -> str:
        known = self._lazy.get(name)
        return known.help if known is not None else self.commands[name].get_short_help_str(100)


def completion(program: str) -> click.Command:
    """Return the command of a program that prints its completion script."""

    @click.command("completion", cls=Command, help=_HELP.format(program=program))
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

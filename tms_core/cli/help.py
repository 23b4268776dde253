"""Help texts of both programs, with a separate section for the options that all commands have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from tms_core.settings import CONFIG_ENV

#: The help of ``--log-format``, in both programs.
LOG_FORMAT = "Log format on standard error; auto: json for daemons outside a terminal, else text."
#: Options of click itself that belong to every command.
_GLOBAL_OPTIONS = {"--help", "--version"}


class GlobalOption(click.Option):
    """An option of all commands of a program.

    Args:
        env: the environment variable in the help; by default the variable that click reads.
        shown: the default value in the help; empty: the help shows no default.
    """

    def __init__(self, *args: Any, env: str = "", shown: str = "", **more: Any) -> None:
        super().__init__(*args, **more)
        self._env = env or (self.envvar if isinstance(self.envvar, str) else "")
        self._default_text = shown

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return the source of an invalid value: the environment variable or the option."""
        if ctx is not None and self.name and ctx.get_parameter_source(self.name) is ParameterSource.ENVIRONMENT:
            return f"'{self._env}'"
        return super().get_error_hint(ctx)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None:
            return None
        extra = [f"[{name}: {value}]" for name, value in (("env", self._env), ("default", self._default_text)) if value]
        return record[0], "  ".join([record[1], *extra])


shared = partial(click.option, cls=GlobalOption)
#: The click parameters of an option ``--config``.
CONFIG_FILE: dict[str, Any] = {
    "envvar": CONFIG_ENV,
    "type": click.Path(exists=True, dir_okay=False, path_type=Path),
    "metavar": "FILE",
    "help": "Settings file (YAML).",
}


def combine_options(*decorators: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Combine the decorators of several options into one decorator."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(decorators):
            command = option(command)
        return command

    return add


def _format_options(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the options of a command in two sections: its specific options, and the global options."""
    sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Global options": []}
    for option in command.get_params(ctx):
        record = option.get_help_record(ctx)
        if record is not None:
            is_global = isinstance(option, GlobalOption) or not _GLOBAL_OPTIONS.isdisjoint(option.opts)
            sections["Global options" if is_global else "Options"].append(record)
    for name, records in sections.items():
        if records:
            with formatter.section(name):
                formatter.write_dl(records)


class Command(click.Command):
    """A command whose help separates specific from global options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _format_options(self, ctx, formatter)


class CommandGroup(click.Group):
    """A group of commands whose help separates specific from global options."""

    command_class = Command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        _format_options(self, ctx, formatter)

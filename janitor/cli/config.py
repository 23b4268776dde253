"""``janitor config``: the settings in force."""

from __future__ import annotations

import click

from janitor.cli import render
from janitor.cli.options import common_options, session
from tms_core.cli.help import CommandGroup


@click.group("config", cls=CommandGroup)
def command() -> None:
    """Show the settings."""


@command.command("show")
@common_options
def show() -> None:
    """Show each setting with its present value and its source.

    Options override TMS_... variables, variables override the file, and the file overrides the
    defaults.

    \b
    Example:
      janitor config show --config janitor.yaml
    """
    from tms_core.settings.fields import text  # noqa: PLC0415 not needed for help

    current = session()
    entries = current.loaded.entries()
    if current.as_json:
        render.print_json({entry.path: {"value": _plain(entry.value), "origin": entry.origin} for entry in entries})
        return
    table = render.grid(["setting", "value", "source"])
    for entry in entries:
        table.add_row(entry.path, text(entry.value), entry.origin)
    render.print_table(table)


def _plain(value: object) -> object:
    """Return the value as a JSON value."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)

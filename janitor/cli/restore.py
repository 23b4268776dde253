"""``janitor restore``: the restore of a backup to the configured folders."""

from __future__ import annotations

from pathlib import Path

import click

from janitor.cli import render
from janitor.cli.options import common_options, session
from janitor.cli.outcome import command_line
from tms_core.cli.help import Command
from tms_core.errors import ConfigurationError


@click.command("restore", cls=Command)
@click.argument("folder", type=click.Path(path_type=Path))
@common_options
def command(folder: Path) -> None:
    """Restore a backup to the configured place.

    The command copies store, side table, transaction log and state to the configured folders. These
    folders must be empty or must not exist, so move the old store away first. The janitor deletes
    nothing from the restored store until you adopt it.

    \b
    Example:
      janitor restore /backup/2026-11-26 --leveldb data/messaging
    """
    from janitor.app.backup import folders_of, restore  # noqa: PLC0415 not needed for help

    current = session()
    if current.settings.storage.kind != "leveldb":
        raise ConfigurationError(
            "Tables in HBase are restored in the HBase shell.", "See restore_snapshot in docs/operate/backups.md."
        )
    made = restore(folder, folders_of(current.settings))
    if current.as_json:
        render.print_json({"restored": [str(path) for path in made]})
        return
    out = render.console()
    out.print(f"restored: {', '.join(map(str, made))}")
    out.print(f"next: {command_line(current, 'plan')}, then: {command_line(current, 'adopt')}")

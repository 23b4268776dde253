"""``tms admin``: for the operator of a store."""

from __future__ import annotations

from pathlib import Path

import click

from tms_core.cli.create_tables import create_hbase_tables
from tms_core.cli.token import make_token
from tms_core.tables.leveldb.store import release


@click.group("admin")
def admin() -> None:
    """For the operator of a store."""


admin.add_command(create_hbase_tables)
admin.add_command(make_token)


@admin.command("release")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def release_store(folder: Path) -> None:
    """Make a LevelDB store readable for CDAP again.

    A sweep does this when it ends. After one that was killed, tables may still carry names that
    CDAP's Java library does not know; this puts them right and changes nothing else.

    \b
    Example:
      tms admin release data/messaging
    """
    release(folder)
    click.echo(f"{folder} can be opened by CDAP")

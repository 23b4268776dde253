"""``janitor backup``: a backup of the store with its side table, log and state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from janitor.cli import render
from janitor.cli.options import common_options, session
from tms_core.cli.help import Command
from tms_core.errors import ConfigurationError, StoreBusy

if TYPE_CHECKING:
    from janitor.app.session import Session


@click.command("backup", cls=Command)
@click.argument("folder", type=click.Path(path_type=Path))
@common_options
def command(folder: Path) -> None:
    """Back up the store to a new folder.

    The backup contains the three tables, the side table (positions of consumers, claims, producers),
    the transaction log and the janitor's state, all of the same time. The command works while tms
    serve or a janitor holds the store: that process blocks writes until the tables are linked. For a
    store in HBase, the command prints the commands for the HBase shell; FOLDER names the snapshots.

    \b
    Examples:
      janitor backup /backup/2026-11-26 --leveldb data/messaging
      janitor backup 2026-11-26 --hbase thrift-1:9090
    """
    current = session()
    if current.settings.storage.kind == "hbase":
        _print_snapshots(current, folder.name)
        return
    size = _back_up(current, folder.absolute())
    if current.as_json:
        render.print_json({"folder": str(folder), "bytes": size})
    else:
        render.console().print(f"backed up to {folder}: {render.size(size)}")


def _back_up(current: Session, folder: Path) -> int:
    from janitor.app.backup import back_up, folders_of  # noqa: PLC0415 not needed for help

    if current.settings.storage.kind != "leveldb":
        raise ConfigurationError("A store in memory is lost when its process ends.", "Set storage.kind: leveldb.")
    holder = current.holder()
    if holder is not None:
        return holder.back_up(folder)
    try:
        return back_up(folders_of(current.settings), folder)
    except StoreBusy as error:
        raise StoreBusy(
            error.message,
            "No janitor responds there: stop that process, or start tms serve with its janitor.",
        ) from error


def _print_snapshots(current: Session, end: str) -> None:
    from tms_core.tables.hbase.schema import JANITOR_TABLE, table_name  # noqa: PLC0415 as above
    from tms_core.tables.hbase.side import HBASE_TABLE  # noqa: PLC0415 as above

    namespace = current.settings.storage.hbase.namespace
    # Messages before their payloads, both before the transactions that decide their visibility, and topics last.
    message, payload, topics = (table_name(namespace, table).decode() for table in ("message", "payload", "metadata"))
    for table in (message, payload, f"{namespace}:{HBASE_TABLE}", topics, f"{namespace}:{JANITOR_TABLE}"):
        click.echo(f"snapshot '{table}', '{table.partition(':')[2]}-{end}'")
    click.echo("Stop servers and janitors first: HBase does not take these snapshots at the same time.", err=True)
    transactions = current.settings.transactions
    if transactions.source in ("manager", "directory"):
        click.echo(f"Copy {transactions.directory} last, if it exists.", err=True)

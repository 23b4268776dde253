"""``tms admin``: commands for the operator of a store.

Only ``tms admin token`` creates tokens. A secret that a user chooses could be guessed from its hash, and a secret in
an argument would appear in the process list and in the history of the shell.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from copy import copy
from importlib.metadata import entry_points
from pathlib import Path

import click

from tms_core.cli.help import CONFIG_FILE, Command, shared
from tms_core.cli.lazy import LazyCommand, LazyGroup
from tms_core.errors import ConfigurationError

#: The time limit for creating a table, in seconds; HBase responds once all regions are open.
_CREATE_SECONDS = 300

#: The entry-point group of commands that another package provides, and those commands.
GROUP = "tms.admin"
PROVIDED = {
    "backup": LazyCommand("", "Back up the store to a new folder."),
    "restore": LazyCommand("", "Restore a backup to the configured place."),
}

_FLAGS: Mapping[str, Callable[[str], Mapping[str, object]]] = {
    "thrift2": lambda servers: {"storage.hbase.thrift2": servers.replace(" ", "").split(",")},
    "namespace": lambda namespace: {"storage.hbase.namespace": namespace},
    "buckets": lambda buckets: {"storage.hbase.buckets": int(buckets)},
}


@click.command("create-tables", cls=Command)
@shared("--config", **CONFIG_FILE)
@click.option("--thrift2", metavar="HOST:PORT[,…]", help="HBase Thrift 2 servers (storage.hbase.thrift2).")
@click.option("--namespace", metavar="NAME", help="HBase namespace (storage.hbase.namespace, cdap_system by default).")
@click.option(
    "--buckets",
    type=click.IntRange(1, 256),
    metavar="N",
    help="Number of salt buckets (storage.hbase.buckets, 16 by default).",
)
@click.option(
    "--compression",
    type=click.Choice(["none", "snappy", "gz", "lz4", "zstd"]),
    default="snappy",
    help="Compression of the tables' files; the region servers need its library. CDAP's default is snappy.",
)
@click.option("--script", is_flag=True, help="Print commands for the HBase shell instead of creating tables.")
def create_hbase_tables(
    config: Path | None,
    thrift2: str | None,
    namespace: str | None,
    buckets: int | None,
    compression: str,
    *,
    script: bool,
) -> None:
    """Create CDAP's messaging tables in HBase.

    The command creates the namespace, the tables with one region for each bucket as CDAP does, and
    the janitor's table. It does not change existing tables; an existing table with another number
    of buckets is an error.

    \b
    Examples:
      tms admin create-tables --thrift2 hbase-thrift2:9091
      tms admin create-tables --script | hbase shell
    """
    flags = {"thrift2": thrift2, "namespace": namespace, "buckets": buckets}
    # Help texts do not need these imports.
    from tms_core.settings.layers import load_as  # noqa: PLC0415
    from tms_core.settings.models import Settings  # noqa: PLC0415
    from tms_core.tables.hbase.pool import HBasePool  # noqa: PLC0415
    from tms_core.tables.hbase.schema import (  # noqa: PLC0415
        create_tables,
        janitor_table_spec,
        shell_script,
        table_specs,
    )

    hbase = load_as(Settings, config, os.environ, flags, _FLAGS).settings.storage.hbase
    specs = [*table_specs(hbase.namespace, hbase.buckets, compression.upper()), janitor_table_spec(hbase.namespace)]
    if script:
        click.echo(shell_script(specs), nl=False)
        return
    if hbase.thrift2 is None:
        raise ConfigurationError(
            "storage.hbase.thrift2 is not set, and only Thrift 2 servers create tables.",
            "Set --thrift2 HOST:PORT, or run the output of --script in the HBase shell.",
        )
    admin = HBasePool.configured(hbase, connections=1, timeout_seconds=_CREATE_SECONDS, service="HbaseAdmin")
    try:
        created = create_tables(admin, specs)
    finally:
        admin.close()
    for spec in specs:
        click.echo(f"{spec.full_name}: {'created' if spec.full_name in created else 'exists'}")


@click.command("token", cls=Command)
@click.argument("principal")
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the token to this new file, which only its owner can read, instead of printing it.",
)
def make_token(principal: str, token_file: Path | None) -> None:
    """Create a token for PRINCIPAL, a name in server.auth.rules.

    The command shows the token only once, because the server keeps only its SHA-256. Add the printed
    line to server.auth.tokens_file; a running server reads a changed file again. To replace a token,
    add the line of a new token, distribute the token, and remove the old line.

    \b
    Examples:
      tms admin token ada
      tms admin token ada --token-file ada.token >> tokens
    """
    from tms_core.server.auth.tokens import new_token, token_line  # noqa: PLC0415 help texts do not need it

    token = new_token()
    line = token_line(principal, token)
    if token_file is None:
        click.echo(token)
        click.echo(f"The token of {principal}, shown only once. Its line for server.auth.tokens_file:", err=True)
    else:
        _write(token_file, token)
    click.echo(line)


def _write(path: Path, token: str) -> None:
    try:
        # Require a new file, because other users may have permission to read an existing one.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be created: {error.strerror}.", "Give --token-file a new file."
        ) from error
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{token}\n")
    except OSError as error:
        path.unlink()
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror}.", "Free space there, or give --token-file another file."
        ) from error


class AdminGroup(LazyGroup):
    """The group of ``tms admin``, with commands that another package provides (entry points ``tms.admin``)."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in PROVIDED and cmd_name not in self.commands:
            self.commands[cmd_name] = _load_command(cmd_name)
        return super().get_command(ctx, cmd_name)


def _load_command(name: str) -> click.Command:
    """Import a command of another package.

    Raises:
        ConfigurationError: the package is not installed, or the command cannot be imported.
    """
    entry = next(iter(entry_points(group=GROUP, name=name)), None)
    try:
        found: click.Command | None = None if entry is None else entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"The command {name} cannot be loaded: {error}.", "Repair the installation."
        ) from error
    if found is None:
        raise ConfigurationError(
            f"The command {name} belongs to the janitor, which is not installed.",
            "Install it from a checkout: pip install .",
        )
    # Copy the command, because the examples in its help name the program, and the janitor also shows it.
    found = copy(found)
    found.help = (found.help or "").replace(f"janitor {name} ", f"tms admin {name} ")
    return found


# Set the help options here, because click keeps the help option of its first context, which may have no parent.
@click.group("admin", cls=AdminGroup, lazy=PROVIDED, context_settings={"help_option_names": ["-h", "--help"]})
def admin() -> None:
    """Administer a store."""


admin.add_command(create_hbase_tables)
admin.add_command(make_token)


@admin.command("release")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def release_store(folder: Path) -> None:
    """Release a LevelDB store, so that CDAP can read it again.

    A sweep releases the store when it stops. After a sweep was killed, table files may have names that
    CDAP's Java library does not know. The command renames these files and changes nothing else.

    \b
    Example:
      tms admin release data/messaging
    """
    from tms_core.tables.leveldb.store import release  # noqa: PLC0415 help texts do not need it

    release(folder)
    click.echo(f"{folder} can be opened by CDAP")


@admin.command("accept")
@shared("--config", **CONFIG_FILE)
@shared("--leveldb", metavar="DIR", help="LevelDB store.")
@shared("--hbase", metavar="HOST:PORT[,…]", help="HBase Thrift servers.")
def accept_store(config: Path | None, leveldb: str | None, hbase: str | None) -> None:
    """Accept the present transaction log and side table of a store.

    A server does not start if its transaction log differs from the store's record, or if the side
    table was lost. After this command it starts once with any log and side table, and records them.
    Messages of transactions that were open or invalid in a lost log become visible.

    \b
    Example:
      tms admin accept --leveldb data/messaging
    """
    from tms_core.clock import SystemClock  # noqa: PLC0415 help texts do not need them
    from tms_core.server.serving import open_side  # noqa: PLC0415
    from tms_core.settings.models import load  # noqa: PLC0415
    from tms_core.tables.leveldb.layout import find_tables  # noqa: PLC0415
    from tms_core.tables.record import SystemRecord, record_transactions, recorded_transactions  # noqa: PLC0415

    settings = load(config, os.environ, {"leveldb": leveldb, "hbase": hbase}).settings
    if settings.storage.kind == "leveldb":
        find_tables(settings.storage.leveldb.path)
    with open_side(settings.storage, SystemClock()) as side:
        before, directory = recorded_transactions(side), settings.transactions.directory
        record_transactions(side, SystemRecord("", directory))
    if before is not None:
        click.echo(f"no longer expected: the transactions in {before.place}, up to write pointer {before.pointer}")
    click.echo(f"accepted: the transactions in {directory}")

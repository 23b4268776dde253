"""``tms admin create-tables``: CDAP's three tables in HBase and the janitor's own, through Thrift 2 or by a script."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from tms_core.errors import ConfigurationError

#: Making a table waits until all its regions are open.
_CREATE_SECONDS = 300

_FLAGS: Mapping[str, Callable[[str], Mapping[str, object]]] = {
    "thrift2": lambda servers: {"storage.hbase.thrift2": servers.replace(" ", "").split(",")},
    "namespace": lambda namespace: {"storage.hbase.namespace": namespace},
    "buckets": lambda buckets: {"storage.hbase.buckets": int(buckets)},
}


@click.command("create-tables")
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A configuration file.")
@click.option("--thrift2", metavar="HOST:PORT[,…]", help="HBase Thrift 2 servers (storage.hbase.thrift2).")
@click.option("--namespace", help="The HBase namespace (storage.hbase.namespace, cdap_system by default).")
@click.option(
    "--buckets", type=click.IntRange(1, 256), help="Salt buckets, a region each (storage.hbase.buckets, 16 by default)."
)
@click.option(
    "--compression",
    type=click.Choice(["none", "snappy", "gz", "lz4", "zstd"]),
    default="snappy",
    help="Of the tables' files; the region servers need its library. CDAP's default is snappy.",
)
@click.option("--script", is_flag=True, help="Print what the HBase shell takes to do the same, and make nothing.")
def create_hbase_tables(
    config: Path | None,
    thrift2: str | None,
    namespace: str | None,
    buckets: int | None,
    compression: str,
    *,
    script: bool,
) -> None:
    """Make CDAP's messaging tables in HBase.

    Namespace, tables, attributes and one region for each bucket, as CDAP makes them, and the
    janitor's own table beside them. What is there already stays as it is; a table with another
    number of buckets is an error.

    \b
    Examples:
      tms admin create-tables --thrift2 hbase-thrift2:9091
      tms admin create-tables --script | hbase shell
    """
    flags = {"thrift2": thrift2, "namespace": namespace, "buckets": buckets}
    # A help text does without them.
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
            "Tables are made through a Thrift 2 server, and storage.hbase.thrift2 is not set.",
            "Give --thrift2 HOST:PORT, or hand what --script prints to the HBase shell.",
        )
    admin = HBasePool(hbase.thrift2, connections=1, timeout_seconds=_CREATE_SECONDS, service="HbaseAdmin")
    try:
        made = create_tables(admin, specs)
    finally:
        admin.close()
    for spec in specs:
        click.echo(f"{spec.full_name}: {'made' if spec.full_name in made else 'was there'}")

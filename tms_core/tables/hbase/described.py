"""The current settings of tables: all settings from a Thrift 2 server, or some of them from Thrift 1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tms_core.clock import Clock
from tms_core.tables.base import TableName
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.rows import HBaseRows
from tms_core.tables.hbase.salts import read_sample
from tms_core.tables.hbase.schema import (
    BUCKETS_ATTRIBUTE,
    FOREVER_SECONDS,
    read_buckets,
    table_name,
    texts,
    thrift_table_name,
)
from tms_core.tables.hbase.thrift import interface

#: The HBase shell's name for an unlimited TTL.
FOREVER = "FOREVER"
#: Values of settings that a sweep requires, HBase's defaults: a read-only table cannot be swept, a TTL of HBase ignores
#: topics and holds, and with other values of the rest, deleted rows stay on disk.
REQUIRED_SETTINGS: Mapping[str, str] = {
    "READONLY": "false",
    "TTL": FOREVER,
    "VERSIONS": "1",
    "MIN_VERSIONS": "0",
    "KEEP_DELETED_CELLS": "FALSE",
}


@dataclass(frozen=True, slots=True)
class TableSettings:
    """The current settings of a table.

    Attributes:
        starts: the first keys of its regions.
        buckets: the number of salts of its rows; None: no salts, or unknown.
        settings: attributes of the table and settings of its family, by their names in the HBase shell; other settings
            have HBase's default, or could not be read.
    """

    name: str
    starts: Sequence[bytes]
    buckets: int | None
    settings: Mapping[str, str]

    @property
    def missing_starts(self) -> list[bytes]:
        """Return the salts at which no region starts."""
        return [start for salt in range(1, self.buckets or 1) if (start := bytes([salt])) not in self.starts]

    @property
    def unfavorable(self) -> dict[str, str]:
        """Return the settings that hinder a sweep, with their current values."""
        return {
            name: value
            for name, required in REQUIRED_SETTINGS.items()
            if (value := self.settings.get(name, required)).upper() != required.upper()
        }


def read_settings(
    pool: HBasePool, admin: HBasePool | None, namespace: str, table: TableName, clock: Clock
) -> TableSettings:
    """Return the current settings of a table of CDAP.

    Args:
        pool: connections to Thrift 1 servers.
        admin: connections to Thrift 2 servers; None: some settings stay unknown.

    Raises:
        StoreNotFound: the table does not exist.
        StoreError: HBase could not be reached.
    """
    name = table_name(namespace, table)
    starts = sorted(region["start_key"] for region in pool.run(lambda connection: connection.table(name).regions()))
    if admin is None:
        settings = dict(_parse_families(pool.run(lambda connection: connection.table(name).families())))
    else:
        settings = dict(_parse_descriptor(admin.call("getTableDescriptor", thrift_table_name(namespace, table))))
    buckets = read_buckets(settings.get(BUCKETS_ATTRIBUTE, "")) or read_sample(HBaseRows(pool, name, clock)).best()
    return TableSettings(name.decode(), starts, buckets, settings)


def _parse_families(families: dict[bytes, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for family in families.values():
        yield from _common_settings(family["max_versions"], family["time_to_live"])


def _parse_descriptor(descriptor: Any) -> Iterator[tuple[str, str]]:
    thrift = interface()
    yield from texts(descriptor.attributes).items()
    for family in descriptor.families:
        yield from _common_settings(family.maxVersions, family.ttlSeconds)
        yield "MIN_VERSIONS", str(family.minVersions)
        yield "KEEP_DELETED_CELLS", thrift.KeepDeleted._VALUES_TO_NAMES.get(family.keepDeleted, str(family.keepDeleted))


def _common_settings(versions: int, ttl_seconds: int) -> Iterator[tuple[str, str]]:
    yield "VERSIONS", str(versions)
    yield "TTL", FOREVER if ttl_seconds == FOREVER_SECONDS else str(ttl_seconds)

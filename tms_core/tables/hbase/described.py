"""Tables as they are set: all of it from a Thrift 2 server, some of it from Thrift 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tms_core.clock import Clock
from tms_core.tables.base import TableName
from tms_core.tables.hbase_advice import FOREVER, TableSettings
from tms_core.tables.hbase_pool import HBasePool
from tms_core.tables.hbase_rows import HBaseRows
from tms_core.tables.hbase_salts import sampled
from tms_core.tables.hbase_schema import BUCKETS_ATTRIBUTE, table_name, texts, thrift_table_name
from tms_core.tables.hbase_wire import interface

#: Seconds that mean for ever.
_FOREVER_SECONDS = 2**31 - 1


def described(
    pool: HBasePool, admin: HBasePool | None, namespace: str, table: TableName, clock: Clock
) -> TableSettings:
    """A table of CDAP's as it is.

    Args:
        pool: connections to Thrift 1 servers.
        admin: connections to Thrift 2 servers; None: there are none, and most attributes stay unknown.
        namespace: the HBase namespace.
        table: which one, the message or the payload table.
        clock: our own clock.

    Raises:
        StoreNotFound: there is no such table.
        StoreError: HBase could not be asked.
    """
    name = table_name(namespace, table)
    starts = sorted(region.startKey for region in pool.call("getTableRegions", name))
    if admin is None:
        settings = dict(_of_thrift_1(pool.call("getColumnDescriptors", name)))
    else:
        settings = dict(_of_thrift_2(admin.call("getTableDescriptor", thrift_table_name(namespace, table))))
    said = settings.get(BUCKETS_ATTRIBUTE, "")
    buckets = int(said) if said.isdigit() else sampled(HBaseRows(pool, name, clock)).best()
    return TableSettings(name.decode(), starts, buckets, settings, complete=admin is not None)


def _of_thrift_1(families: dict[bytes, Any]) -> Iterator[tuple[str, str]]:
    for family in families.values():
        yield from _common(family)
        yield "COMPRESSION", family.compression.decode()
        yield "BLOOMFILTER", family.bloom.decode()


def _of_thrift_2(descriptor: Any) -> Iterator[tuple[str, str]]:
    thrift = interface()
    yield from texts(descriptor.attributes).items()
    for family in descriptor.families:
        yield from _common(family)
        yield "MIN_VERSIONS", str(family.minVersions)
        yield "KEEP_DELETED_CELLS", thrift.KeepDeleted._VALUES_TO_NAMES[family.keepDeleted]
        yield "COMPRESSION", thrift.Compression._VALUES_TO_NAMES[family.compression]
        yield "DATA_BLOCK_ENCODING", thrift.BlockEncoding._VALUES_TO_NAMES[family.blockEncoding]
        yield "BLOOMFILTER", thrift.Bloom._VALUES_TO_NAMES[family.bloom]


def _common(family: Any) -> Iterator[tuple[str, str]]:
    yield "VERSIONS", str(family.maxVersions)
    yield "TTL", FOREVER if family.ttlSeconds == _FOREVER_SECONDS else str(family.ttlSeconds)
    yield "BLOCKCACHE", str(bool(family.blockCache)).lower()

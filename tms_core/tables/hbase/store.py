"""The store on a cluster: CDAP's three tables in HBase over its Thrift servers, byte for byte.

Keys have no salt here. The whole store merges the salts, for readers in key order. :meth:`parts` returns each salt as a
store with rows in storage order; a sweep scans several of them at once. ``docs/reference/formats/tables.md`` describes
the cells.

HBase differs in three points: a ``put`` of several rows is durable but not atomic; a deleted key can be written again
only after the millisecond of its marker; and sizes are unknown.

A table that was restored, or dropped and cloned from a snapshot, keeps its name, regions and start codes
(``docs/how-to/hbase.md``, "What a restored table keeps"). But both operations disable a table or create one, and HBase
then writes the state of the table again: a cell in ``hbase:meta`` with the time. Nothing else writes it: not a stop of
a server, a split, a move, or an ``alter``. The trade: a table that was only disabled and enabled looks like a restored
one (invariant S13). HBase 1 has no such cell, so a restore is not noticed there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any

from tms_core.clock import Clock, SystemClock
from tms_core.errors import StoreError
from tms_core.settings.models import HBaseSettings
from tms_core.tables.base import Calls, KeyRange, MessageTable, MetadataTable, PayloadTable, Store, TableName
from tms_core.tables.hbase.cdap import CdapWatch
from tms_core.tables.hbase.cells import (
    CellLimit,
    HBaseMessageTable,
    HBaseMetadataTable,
    HBasePayloadTable,
)
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.rows import HBaseRows, after_salt, newest_of
from tms_core.tables.hbase.salts import AllSalts, Buckets, OneSalt, Salts, read_sample
from tms_core.tables.hbase.schema import table_name
from tms_core.tables.hbase.thrift import NotServed
from tms_core.tables.hbase.wire.security import ThriftSecurity
from tms_core.tables.wrapped import WrappedStore

_TABLES: tuple[TableName, ...] = ("metadata", "message", "payload")
#: A row that is read to check whether its table exists; not the key of any row.
_NO_ROW = b"\x00"
_META, _STATE = b"hbase:meta", b"table:state"


class HBaseStore(Store):
    """Three tables in one HBase namespace.

    Rows of the message and the payload table that lack the cells CDAP reads are never touched and never returned; each
    one met counts in ``calls["unreadable"]``. Their keys are listed like all others.

    Args:
        settings: ``storage.hbase``. If a Thrift server fails, the others replace it; without Thrift 2 servers some
            settings of the tables stay unknown. The number of buckets is checked before the first put.

    Attributes:
        pool: the connections; its ``calls`` counts Thrift calls.

    Raises:
        StoreNotFound: a table does not exist.
        StoreUnavailable: no Thrift server responds, or HBase does not.
        StoreError: HBase refuses.
    """

    def __init__(self, settings: HBaseSettings, clock: Clock | None = None) -> None:
        clock, namespace, buckets = clock or SystemClock(), settings.namespace, settings.buckets
        opens = partial(
            HBasePool,
            timeout_seconds=settings.timeout_seconds,
            security=ThriftSecurity.configured(settings),
            clock=clock,
        )
        self.calls = self._calls = Calls()
        self._limit = CellLimit(settings.max_cell_bytes)
        self.pool = opens(settings.thrift, connections=settings.connections)
        self._namespace = namespace
        self._clock = clock
        self._threads = ThreadPoolExecutor(settings.connections, thread_name_prefix="hbase")
        metadata, self._message, self._payload = (self._rows(table_name(namespace, name)) for name in _TABLES)
        self._admin = opens(settings.thrift2, connections=1, service="HbaseAdmin") if settings.thrift2 else None
        salted: dict[TableName, HBaseRows] = {"message": self._message, "payload": self._payload}
        self._buckets = Buckets(buckets, salted, namespace, self._admin)
        self._states = TableStates(self.pool, {name: table_name(namespace, name) for name in _TABLES})
        self._cdap = CdapWatch(self.pool, self._admin, namespace, clock)
        try:
            for rows in (metadata, self._message, self._payload):
                rows.get(_NO_ROW)
        except StoreError:
            self.close()
            raise
        self.metadata = HBaseMetadataTable(metadata, self._calls)
        self.message = self._message_table(AllSalts(self._message, buckets, self._threads))
        self.payload = self._payload_table(AllSalts(self._payload, buckets, self._threads))

    @property
    def ahead_ms(self) -> int:
        """Return how far the newest deleted cell was ahead of the local clock, in milliseconds; 0: no cell was."""
        return max(self._message.ahead_ms, self._payload.ahead_ms)

    @property
    def wrong_salts(self) -> int:
        """Return the number of rows that pages found under a wrong salt.

        Up to about sixty rows of a page are checked, or all rows of a page with a wrong one. They are read and deleted
        like all others, but CDAP never finds them.
        """
        return self._message.wrong_salts + self._payload.wrong_salts

    def parts(self) -> Sequence[Store]:
        """Return one store for each salt that rows have now, right or wrong; a salt that appears later is in none of
        them.
        """
        salts = sorted({*self._message.salts(), *self._payload.salts()})
        buckets = self._buckets.known or read_sample(self._message).best() or read_sample(self._payload).best()
        return [self._part(byte, buckets) for byte in salts]

    def part(self, salt: int) -> HBasePart:
        """Return the rows under one salt, whether there are any, without asking which salts there are.

        Where the number of buckets is not known, wrong salts are not counted there.
        """
        return self._part(salt, self._buckets.known)

    def check_buckets(self) -> None:
        """Check the configured number of buckets against the tables, as the first ``put`` does.

        Empty tables without Thrift 2 pass, with a line in the log.

        Raises:
            StoreError: the number differs from that of the tables; the error has the right number if it can be found.
        """
        self._buckets.checked()

    def obstacles(self) -> Sequence[str]:
        """Return what CDAP still does to these tables; it is looked up once an hour at most."""
        return self._cdap.obstacles()

    def region(self, row: bytes) -> str:
        return self._message.regions.holding(row)

    def identity(self) -> str:
        """Return cluster and namespace; if Thrift servers do not know the cluster's name, the creation time of the
        namespace.
        """
        try:
            cluster = self.pool.call("getClusterId").decode()
        except NotServed:
            row = self._rows(b"hbase:namespace").get(self._namespace.encode())
            cluster = f"since-{newest_of(row)}" if row else "unknown"
        return f"hbase:{cluster}:{self._namespace}"

    def lineage(self) -> Mapping[str, Any]:
        return self._states.remembered()

    def restored_since(self, known: Mapping[str, Any]) -> str | None:
        return self._states.restored_since(known)

    def close(self) -> None:
        self._threads.shutdown()
        self.pool.close()
        if self._admin is not None:
            self._admin.close()

    def _rows(self, name: bytes) -> HBaseRows:
        return HBaseRows(self.pool, name, self._clock)

    def _part(self, byte: int, buckets: int | None) -> HBasePart:
        message = self._message_table(OneSalt(self._message, byte, buckets))
        return HBasePart(self, byte, message, self._payload_table(OneSalt(self._payload, byte, buckets)))

    def _message_table(self, salts: Salts) -> HBaseMessageTable:
        return HBaseMessageTable(salts, self._calls, self._buckets, self._limit, self._threads)

    def _payload_table(self, salts: Salts) -> HBasePayloadTable:
        return HBasePayloadTable(salts, self._calls, self._buckets, self._limit)


class HBasePart(WrappedStore, Store):
    """The rows under one salt, with the metadata of all. ``close`` does nothing, because the whole store is closed.

    Attributes:
        salt: the first byte of its rows in HBase.
    """

    metadata: MetadataTable
    message: MessageTable
    payload: PayloadTable

    def __init__(self, whole: HBaseStore, salt: int, message: MessageTable, payload: PayloadTable) -> None:
        super().__init__(whole, whole.metadata, message, payload)
        self.salt = salt
        self.span = KeyRange(bytes([salt]), after_salt(salt))


class TableStates:
    """The times of the last state changes of a store's tables.

    Args:
        pool: connections to Thrift 1 servers.
    """

    def __init__(self, pool: HBasePool, names: Mapping[TableName, bytes]) -> None:
        self._pool = pool
        self._names = names

    def remembered(self) -> dict[str, Any]:
        """Return the milliseconds at which each table was last created, enabled or disabled, if HBase has them.

        Raises:
            StoreError: as any call.
        """
        names = list(self._names.values())
        found = dict(
            self._pool.run(lambda connection: connection.table(_META).rows(names, [_STATE], include_timestamp=True))
        )
        return {table: found[name][_STATE][1] for table, name in self._names.items() if _STATE in found.get(name, {})}

    def restored_since(self, known: Mapping[str, Any]) -> str | None:
        """Return the evidence that a table may be another one than the remembered one; None: there is no evidence.

        Raises:
            StoreError: as any call.
        """
        if not known:
            return None
        present = self.remembered()
        for table, before_ms in known.items():
            now_ms = present.get(table)
            if now_ms is None:
                return f"the {table} table is gone"
            if now_ms != before_ms:
                when = datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="seconds")
                return f"the {table} table was disabled, or recreated, and enabled at {when}"
        return None

"""The store on a cluster: CDAP's three tables in HBase, byte for byte, over Thrift servers.

Keys have no salt here. The whole store merges the salts, for readers in key order. :meth:`parts` returns a store for
each salt, with rows in storage order; a sweep scans several of them at once. ``docs/reference/formats/tables.md``
describes the cells.

HBase differs in three points: a ``put`` of several rows is durable but not atomic; a deleted key can be written again
only after the millisecond of its marker; and sizes are unknown.

A table that was restored, or dropped and cloned from a snapshot, keeps its name, regions and start codes
(``docs/how-to/hbase.md``, "What a restored table keeps"). But both operations disable or create a table, and HBase then
writes the state of the table: a cell in ``hbase:meta`` with a timestamp. No other operation writes this cell, such as a
stop of a server, a split, a move, or an ``alter``. The trade-off: a table that was only disabled and enabled looks like
a restored table (invariant S13). HBase 1 has no such cell, so a restore is not detected there.
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
#: The key of no row; a read of it checks whether its table exists.
_NO_ROW = b"\x00"
_META, _STATE = b"hbase:meta", b"table:state"


class HBaseStore(Store):
    """Three tables in one HBase namespace.

    The store never changes or returns rows of message and payload table without the cells that CDAP reads, but counts
    them in ``calls["unreadable"]``. It lists their keys as all other keys.

    Args:
        settings: ``storage.hbase``. If a Thrift server fails, the others replace it; without Thrift 2 servers some
            settings of the tables stay unknown. The number of buckets is checked before the first put.

    Attributes:
        pool: the connections; its ``calls`` counts Thrift calls.

    Raises:
        StoreNotFound: a table does not exist.
        StoreUnavailable: no Thrift server responds, or HBase does not.
        StoreError: HBase rejects a request.
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
        """Return the largest advance of a deleted cell's timestamp over the local clock, in milliseconds, or 0."""
        return max(self._message.ahead_ms, self._payload.ahead_ms)

    @property
    def wrong_salts(self) -> int:
        """Return the number of rows that pages found under a wrong salt.

        A page checks about sixty of its rows, and all rows if one of these is wrong. Such rows are read and deleted as
        all others, but CDAP never finds them.
        """
        return self._message.wrong_salts + self._payload.wrong_salts

    def parts(self) -> Sequence[Store]:
        """Return a store for each salt that rows have now, right or wrong; a salt that appears later has no store."""
        salts = sorted({*self._message.salts(), *self._payload.salts()})
        buckets = self._buckets.known or read_sample(self._message).best() or read_sample(self._payload).best()
        return [self._part(byte, buckets) for byte in salts]

    def part(self, salt: int) -> HBasePart:
        """Return the rows under one salt, which may be empty, without a search for the existing salts.

        If the number of buckets is unknown, the part does not count wrong salts.
        """
        return self._part(salt, self._buckets.known)

    def check_buckets(self) -> None:
        """Check the configured number of buckets against the tables, as the first ``put`` does.

        Without Thrift 2, empty tables pass the check, with a line in the log.

        Raises:
            StoreError: the number differs from that of the tables; the error has the right number if it can be found.
        """
        self._buckets.check()

    def obstacles(self) -> Sequence[str]:
        """Return the cleaning that CDAP still does on these tables, checked at most once an hour."""
        return self._cdap.obstacles()

    def region(self, row: bytes) -> str:
        return self._message.regions.name_of(row)

    def identity(self) -> str:
        """Return cluster and namespace; old Thrift servers do not know the cluster, so use the namespace's creation."""
        try:
            cluster = self.pool.call("getClusterId").decode()
        except NotServed:
            row = self._rows(b"hbase:namespace").get(self._namespace.encode())
            cluster = f"since-{newest_of(row)}" if row else "unknown"
        return f"hbase:{cluster}:{self._namespace}"

    def lineage(self) -> Mapping[str, Any]:
        return self._states.current_marks()

    def find_restore_evidence(self, known: Mapping[str, Any]) -> str | None:
        return self._states.find_restore_evidence(known)

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
    """The rows under one salt, with all metadata. ``close`` does nothing, because the caller closes the whole store.

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

    def current_marks(self) -> dict[str, Any]:
        """Return the time in milliseconds at which each table was last created, enabled or disabled, if HBase has it.

        Raises:
            StoreError: as any call.
        """
        names = list(self._names.values())
        found = dict(
            self._pool.run(lambda connection: connection.table(_META).rows(names, [_STATE], include_timestamp=True))
        )
        return {table: found[name][_STATE][1] for table, name in self._names.items() if _STATE in found.get(name, {})}

    def find_restore_evidence(self, known: Mapping[str, Any]) -> str | None:
        """Return the evidence that a table may not be the recorded table; None without evidence.

        Raises:
            StoreError: as any call.
        """
        if not known:
            return None
        present = self.current_marks()
        for table, before_ms in known.items():
            now_ms = present.get(table)
            if now_ms is None:
                return f"the {table} table is missing"
            if now_ms != before_ms:
                when = datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="seconds")
                return f"the {table} table was disabled, or recreated, and enabled at {when}"
        return None

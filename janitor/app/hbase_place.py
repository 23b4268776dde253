"""The place of a store in HBase and of its state (:mod:`janitor.app.place`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager

from janitor.state.base import State
from janitor.state.hbase.state import HBaseState
from tms_core.clock import Clock
from tms_core.settings.models import HBaseSettings
from tms_core.tables.base import Reads, Store, TableName
from tms_core.tables.hbase.described import TableSettings, read_settings
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.side import HBaseSide
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.hbase.thrift import Service
from tms_core.tables.read_only import read_only
from tms_core.tables.side import SideTable

#: The tables that a sweep changes.
_SALTED: tuple[TableName, ...] = ("message", "payload")
_OBSERVERS_UNSEEN = (
    "the janitor could not check whether the tables still have CDAP's observers, which needs a Thrift 2 server: set "
    "storage.hbase.thrift2, or check that describe in the HBase shell shows no coprocessor of CDAP"
)


class HBasePlace:
    """The tables in an HBase namespace.

    Args:
        settings: the namespace and the addresses.
        clock: the clock for timeouts of calls.
    """

    exclusive = False

    def __init__(self, settings: HBaseSettings, clock: Clock) -> None:
        self.name = f"HBase namespace {settings.namespace} at {', '.join(settings.thrift)}"
        self.state_name = f"table {settings.namespace}:tms.janitor"
        self.unseen: tuple[str, ...] = () if settings.thrift2 else (_OBSERVERS_UNSEEN,)
        self._settings = settings
        self._clock = clock

    def identity(self) -> str:
        with self.writable() as store:
            return store.identity()

    def disk_bytes(self) -> int | None:
        return None

    def require(self) -> None:
        with self.writable():
            """Opening the store checks that it exists."""

    def writable(self) -> AbstractContextManager[Store]:
        return HBaseStore(self._settings, self._clock)

    @contextmanager
    def readable(self) -> Iterator[Reads]:
        with self.writable() as store:
            yield read_only(store)

    def has_state(self) -> bool:
        # A check would cost as much as opening it, and an empty table is harmless.
        return True

    def state(self) -> AbstractContextManager[State]:
        return HBaseState(self._settings, self._clock)

    @contextmanager
    def side(self, *, read_only: bool) -> Iterator[SideTable | None]:
        # tms serve creates the table; without the server, the janitor needs neither the table nor a permission.
        with HBaseSide(self._pool(), self._settings.namespace, self._clock, create=False) as side:
            yield side

    def table_settings(self) -> list[TableSettings]:
        with ExitStack() as stack:
            pool = stack.enter_context(closing(self._pool()))
            admin = stack.enter_context(closing(self._pool("HbaseAdmin"))) if self._settings.thrift2 else None
            return [read_settings(pool, admin, self._settings.namespace, table, self._clock) for table in _SALTED]

    def _pool(self, service: Service = "Hbase") -> HBasePool:
        return HBasePool.configured(self._settings, connections=1, service=service, clock=self._clock)

"""The state in an HBase table next to the store's tables, for a janitor without a permanent disk.

:mod:`janitor.state.hbase.root` explains the commit, and ``docs/reference/formats/state.md`` the contents of the table.
"""

from __future__ import annotations

from janitor.state.base import State
from janitor.state.hbase.commit import HBaseDocuments
from janitor.state.hbase.table import TABLE, JanitorTable
from tms_core.clock import Clock, SystemClock
from tms_core.errors import StateError
from tms_core.settings.models import HBaseSettings
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.wire.security import ThriftSecurity

__all__ = ["TABLE", "HBaseState"]


class HBaseState(State):
    """The state of one store, on a cluster. Threads may share an object, and processes may share a table.

    Args:
        settings: ``storage.hbase``; with Thrift 2 servers a missing table is created.
        prefix: the prefix of the keys of this state, if several states share the table.

    Attributes:
        pool: the connections; its ``calls`` counts Thrift calls.

    Raises:
        StateError: the table does not exist and cannot be created, HBase does not respond, or the table belongs to
            another program.
    """

    driver: HBaseDocuments

    def __init__(self, settings: HBaseSettings, clock: Clock | None = None, prefix: bytes = b"") -> None:
        clock, security, seconds = clock or SystemClock(), ThriftSecurity.configured(settings), settings.timeout_seconds
        self.pool = HBasePool(settings.thrift, timeout_seconds=seconds, security=security, clock=clock)
        super().__init__(HBaseDocuments(JanitorTable(self.pool, settings.namespace, prefix, clock)), clock)
        try:
            self.driver.table.open(settings.thrift2 or (), seconds, security)
            self.driver.root()
        except StateError:
            self.close()
            raise

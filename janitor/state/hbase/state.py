"""The state in a table of its own beside the store's, for a janitor that has no disk that stays.

How documents are written together there stands in :mod:`janitor.state.hbase.root`, what the table holds in
``docs/reference/formats/hbase.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

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
    """The state of one store, on a cluster. Threads may share one; processes may each have their own on the same table.

    Args:
        thrift: ``HOST:PORT`` of each Thrift 1 server.
        namespace: the HBase namespace.
        thrift2: of Thrift 2 servers, with which the table is made if it is not there.
        connections: how many may be open at once.
        timeout_seconds: the longest one call may take.
        clock: our own clock.
        security: what protects the connections; None: nothing does.
        prefix: what the keys of this state start with, where several share the table.

    Attributes:
        pool: the connections; its ``calls`` counts Thrift calls.

    Raises:
        StateError: the table is not there and cannot be made, HBase cannot be asked, or what is there is not ours.
    """

    driver: HBaseDocuments

    def __init__(
        self,
        thrift: Sequence[str],
        *,
        namespace: str = "cdap_system",
        thrift2: Sequence[str] = (),
        connections: int = 4,
        timeout_seconds: float = 30,
        security: ThriftSecurity | None = None,
        clock: Clock | None = None,
        prefix: bytes = b"",
    ) -> None:
        clock = clock or SystemClock()
        self.pool = HBasePool(
            thrift, connections=connections, timeout_seconds=timeout_seconds, security=security, clock=clock
        )
        super().__init__(HBaseDocuments(JanitorTable(self.pool, namespace, prefix, clock)), clock)
        try:
            self.driver.table.open(thrift2, timeout_seconds, security)
            self.driver.root()
        except StateError:
            self.close()
            raise

    @classmethod
    def configured(cls, settings: HBaseSettings, clock: Clock | None = None) -> Self:
        """Return the state beside the store that settings name."""
        return cls(
            settings.thrift,
            namespace=settings.namespace,
            thrift2=settings.thrift2 or (),
            timeout_seconds=settings.timeout_seconds,
            security=ThriftSecurity.configured(settings),
            clock=clock,
        )

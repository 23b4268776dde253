"""Everything a server on HBase has because it may not be the only one there.

With an address (``server.leader.advertise``) it is one of several: it listens at once, and leads or passes on. Without
one no other server could pass anything on to it, so it is the only one: it leads before it starts, or does not start.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.parse import urlsplit

from tms_core.clock import Clock
from tms_core.messaging.service import MessagingService
from tms_core.messaging.work import THREADS
from tms_core.server.forward import Forwarder
from tms_core.server.ha.fenced_store import FencedSide, FencedStore
from tms_core.server.ha.leadership import Leadership, Watch
from tms_core.server.ha.sealed_ids import Seals
from tms_core.settings.models import HBaseSettings, LeaderSettings
from tms_core.tables.base import Store
from tms_core.tables.hbase.cell import HBaseCell
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.lease import Lease, LeaseCell
from tms_core.tables.side import HBASE_TABLE, SideTable

#: The row of the side table in which the lease is.
_LEASE_ROW = b"l"


class HaMember:
    """A server among others, be there any or not.

    Args:
        store: the tables; stays the caller's.
        side: where gaps are written down; stays the caller's.
        cell: where the lease is.
        wanted: the settings.
        clock: the clocks of this machine.

    Attributes:
        leadership: knows who leads.
        store: the tables as a leader may use them.
        side: the side table as a leader may use it, for positions and claims.
        forwarder: passes on what this server has not to answer.
    """

    def __init__(self, store: Store, side: SideTable, cell: LeaseCell, wanted: LeaderSettings, clock: Clock) -> None:
        holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._lease = Lease(cell, holder, wanted.seconds, clock, wall_clocks=False)
        self._advertise = wanted.advertise
        self.leadership = Leadership(self._lease, clock, fencing_delay_seconds=wanted.fencing_delay_seconds)
        self.store = FencedStore(store, self.leadership, Seals(store.message, side, clock))
        self.side = FencedSide(side, self.leadership)
        self.forwarder = Forwarder(self.leadership)
        self._watch: Watch | None = None

    @property
    def is_alone(self) -> bool:
        """Whether it leads before anything else is begun."""
        return self._advertise is None

    def begin(self, service: MessagingService, port: int = 0) -> None:
        """Lead, or wait for one's turn. If it stands alone, it leads when this returns.

        Args:
            service: what speaks for the store; forgets what it knew before each term.
            port: where this server listens.

        Raises:
            LeaseHeld: it stands alone, and another server leads.
        """

        def prepare() -> bool:
            service.forget()
            # What was accepted in another term has ids of that one; it fails soon.
            return service.queue_size == 0

        if self._advertise is None:
            self.leadership.win(prepare)
        else:
            self._lease.address = _with_port(self._advertise, port)
        self._watch = Watch(self.leadership, prepare)

    def stop(self) -> None:
        """Give the lead back; all that was accepted is answered by then."""
        if self._watch is not None:
            self._watch.stop()


@contextmanager
def on_hbase(
    hbase: HBaseSettings, wanted: LeaderSettings, store: Store, side: SideTable, clock: Clock
) -> Iterator[HaMember]:
    """What a server on HBase has, while the block runs; behind it the lead is given back."""
    # Of its own, and soon given up: who leads must be found out also while all other connections wait.
    pool = HBasePool(
        hbase.thrift,
        connections=THREADS + 1,
        timeout_seconds=min(hbase.timeout_seconds, max(1, wanted.seconds // 3)),
        clock=clock,
    )
    with closing(HBaseCell(pool, f"{hbase.namespace}:{HBASE_TABLE}".encode(), _LEASE_ROW, clock)) as cell:
        member = HaMember(store, side, cell, wanted, clock)
        try:
            yield member
        finally:
            member.stop()


def _with_port(url: str, port: int) -> str:
    """A URL that names this port if it says 0."""
    scheme, host, said = urlsplit(url).scheme, urlsplit(url).netloc.rpartition(":")[0], urlsplit(url).port
    return f"{scheme}://{host}:{said or port}"

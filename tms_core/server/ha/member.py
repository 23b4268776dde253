"""Everything a server on HBase has because it may not be the only one there.

With an address (``server.leader.advertise``) it is one of several: it listens at once, and leads or passes on. Without
one no other server could pass anything on to it, so it is the only one: it leads before it starts, or does not start.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from urllib.parse import urlsplit

from tms_core.clock import Clock
from tms_core.errors import ConfigurationError
from tms_core.messaging.publish.workers import THREADS
from tms_core.messaging.service import MessagingService
from tms_core.server.ha.fenced_store import FencedSide, FencedStore
from tms_core.server.ha.leadership import Watch
from tms_core.server.ha.sealed_ranges import SealedRanges
from tms_core.server.ha.shared_manager import SharedManager
from tms_core.server.ha.slot_assignment import SlotAssignment
from tms_core.server.rest.forward import Forwarder
from tms_core.settings.models import HBaseSettings, LeaderSettings
from tms_core.tables.base import Store
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.side import HBaseSide
from tms_core.tables.side import SideTable


class HaMember:
    """A server among others, be there any or not.

    Args:
        store: the tables; stays the caller's.
        side: where gaps are written down; stays the caller's.
        leases: the side table again, over connections of its own; stays the caller's.

    Attributes:
        slots: know the leader what.
        store: the tables as a leader may use them.
        side: the side table as a leader may use it, for positions and claims.
        forwarder: forwards requests for other leaders.

    Raises:
        ConfigurationError: there are several slots, and it is not said which of the servers this is.
    """

    def __init__(self, store: Store, side: SideTable, leases: SideTable, wanted: LeaderSettings, clock: Clock) -> None:
        name = socket.gethostname()
        holder = f"{name}:{os.getpid()}:{secrets.token_hex(4)}"
        self._assignment = SlotAssignment(leases, holder, wanted, _ordinal(wanted, name), clock)
        self._advertise = wanted.advertise
        self.slots = self._assignment.slots
        self.store = FencedStore(store, self.slots, SealedRanges(store.message, side, clock))
        self.side = FencedSide(side, self.slots)
        self.forwarder = Forwarder(self.slots, wanted.ca_file, wanted.certificate_name)
        self._watch: Watch | None = None

    @property
    def is_alone(self) -> bool:
        """Return whether it leads before anything else is started."""
        return self._advertise is None

    def begin(self, service: MessagingService, port: int = 0, manager: SharedManager | None = None) -> None:
        """Lead, or wait for one's turn. If it stands alone, it leads when this returns.

        Args:
            service: what speaks for the store; drops its caches before each term.
            port: where this server listens.
            manager: takes over before each term of slot 0; None: transactions are managed elsewhere.

        Raises:
            LeaseHeld: it stands alone, and another server leads.
        """

        def prepare(slot: int) -> bool:
            if slot == 0 and manager is not None and not manager.ready():
                return False
            # What was accepted in another term has ids of that one; it fails soon.
            return service.start_over(lambda key: self.slots.number(key) == slot)

        look = partial(self._assignment.look, prepare)
        if self._advertise is None:
            self.slots.leaderships[0].win(look)
        else:
            self._assignment.at(_with_port(self._advertise, port))
        self._watch = Watch(look, self._assignment.resign)

    def stop(self) -> None:
        """Give the lead back; all that was accepted is answered by then."""
        if self._watch is not None:
            self._watch.stop()


@contextmanager
def on_hbase(
    hbase: HBaseSettings, wanted: LeaderSettings, store: Store, side: SideTable, clock: Clock
) -> Iterator[HaMember]:
    """Yield the objects of a server on HBase; behind it the lead is given back."""
    # Of its own, and soon given up: who leads must be found out also while all other connections wait.
    pool = HBasePool.configured(
        hbase,
        connections=THREADS + 1,
        timeout_seconds=min(hbase.timeout_seconds, max(1, wanted.seconds // 3)),
        clock=clock,
    )
    with HBaseSide(pool, hbase.namespace, clock) as leases:
        member = HaMember(store, side, leases, wanted, clock)
        try:
            yield member
        finally:
            member.stop()


def _ordinal(wanted: LeaderSettings, name: str) -> int:
    """Return which of the servers this is: as configured, or by the trailing number of its host name."""
    found = re.search(r"-(\d{1,4})$", name)
    if wanted.slots == 1 or wanted.ordinal is not None:
        return wanted.ordinal or 0
    if found is None:
        raise ConfigurationError(
            f"The host name {name} does not end in a number, so which server this is remains open.",
            "Set server.leader.ordinal, from 0, another number for each server.",
        )
    return int(found[1])


def _with_port(url: str, port: int) -> str:
    """Return a URL that names this port if it says 0."""
    scheme, host, said = urlsplit(url).scheme, urlsplit(url).netloc.rpartition(":")[0], urlsplit(url).port
    return f"{scheme}://{host}:{said or port}"

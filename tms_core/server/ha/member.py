"""A server as a member of a group of servers on one store in HBase.

With an address (``server.leader.advertise``), a server listens immediately, and leads or forwards requests. Without an
address, other servers cannot forward requests to it, so it becomes the leader before it starts, or does not start.
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
from tms_core.server.ha.leadership import LeaseWatcher
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
    """A member of a group of servers on one store.

    Args:
        store: the tables; the caller closes them.
        side: the side table; the caller closes it.
        leases: the side table with separate connections, for leases; the caller closes it.

    Attributes:
        slots: the leadership of each slot.
        store: the tables with the leader's fence.
        side: the side table with the leader's fence, for positions and claims.
        forwarder: forwards requests to other leaders.

    Raises:
        ConfigurationError: with several slots, the ordinal of this server is unknown.
    """

    def __init__(
        self, store: Store, side: SideTable, leases: SideTable, settings: LeaderSettings, clock: Clock
    ) -> None:
        name = socket.gethostname()
        holder = f"{name}:{os.getpid()}:{secrets.token_hex(4)}"
        self._assignment = SlotAssignment(leases, holder, settings, _ordinal(settings, name), clock)
        self._advertise = settings.advertise
        self.slots = self._assignment.slots
        self.store = FencedStore(store, self.slots, SealedRanges(store.message, side, clock))
        self.side = FencedSide(side, self.slots)
        self.forwarder = Forwarder(self.slots, settings.ca_file, settings.certificate_name)
        self._watch: LeaseWatcher | None = None

    @property
    def is_alone(self) -> bool:
        """Return whether this server has no address, so that it must lead before it starts."""
        return self._advertise is None

    def start(self, service: MessagingService, port: int = 0, manager: SharedManager | None = None) -> None:
        """Start to compete for leadership; a server without an address leads on return.

        Args:
            service: the messaging service; it drops its caches before each term.
            port: the port of this server.
            manager: takes over before each term of slot 0; None: another process manages transactions.

        Raises:
            LeaseHeld: this server has no address, and another server leads.
        """

        def prepare(slot: int) -> bool:
            if slot == 0 and manager is not None and not manager.is_ready():
                return False
            # Drop caches before the term, because another leader has written. Requests accepted in an earlier term have
            # outdated ids; the term waits until they have failed.
            return service.invalidate_topics(lambda key: self.slots.number(key) == slot)

        check_leases = partial(self._assignment.check_leases, prepare)
        if self._advertise is None:
            self.slots.leaderships[0].wait_for_term(check_leases)
        else:
            self._assignment.set_address(_with_port(self._advertise, port))
        self._watch = LeaseWatcher(check_leases, self._assignment.resign)

    def stop(self) -> None:
        """Release the leadership; call it after all accepted requests have their outcomes."""
        if self._watch is not None:
            self._watch.stop()


@contextmanager
def on_hbase(
    hbase: HBaseSettings, settings: LeaderSettings, store: Store, side: SideTable, clock: Clock
) -> Iterator[HaMember]:
    """Yield the member of a server on HBase; release the leadership afterwards."""
    # Separate connections with a short timeout: leases must be renewed while all other connections wait.
    pool = HBasePool.configured(
        hbase,
        connections=THREADS + 1,
        timeout_seconds=min(hbase.timeout_seconds, max(1, settings.seconds // 3)),
        clock=clock,
    )
    with HBaseSide(pool, hbase.namespace, clock) as leases:
        member = HaMember(store, side, leases, settings, clock)
        try:
            yield member
        finally:
            member.stop()


def _ordinal(settings: LeaderSettings, name: str) -> int:
    """Return the ordinal of this server: as configured, or the trailing number of the host name."""
    found = re.search(r"-(\d{1,4})$", name)
    if settings.slots == 1 or settings.ordinal is not None:
        return settings.ordinal or 0
    if found is None:
        raise ConfigurationError(
            f"The host name {name} does not end in a number, so the ordinal of this server is unknown.",
            "Set server.leader.ordinal to a different number for each server, starting at 0.",
        )
    return int(found[1])


def _with_port(url: str, port: int) -> str:
    """Replace the port 0 of a URL by this port."""
    scheme, host, own_port = urlsplit(url).scheme, urlsplit(url).netloc.rpartition(":")[0], urlsplit(url).port
    return f"{scheme}://{host}:{own_port or port}"

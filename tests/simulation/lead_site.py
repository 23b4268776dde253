"""Producers on two servers of which one leads: the lead changes, and what the deposed one had under way comes late.

The histories are those of :mod:`tests.simulation.producer_site`, and the same must hold. A write may be cut in the
middle: then its server is deposed, and the other rows arrive whenever they like, also between two reads of the server
that leads by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

from tests.builders import SECOND
from tests.simulation import group_site
from tests.simulation.producer_site import WEIGHTS, ProducerSite
from tests.simulation.slot_site import SETTINGS, SlotServer
from tms_core.messaging.service import MessagingService
from tms_core.tables.side import MemorySide

#: One slot, so one server leads.
ONE_SLOT = SETTINGS.model_copy(update={"slots": 1})
#: After so many seconds one of two servers leads, whatever has happened.
_SETTLED = 12


class LeadSite(ProducerSite):
    """Two servers."""

    write_faults = ("before", "after", "late", "late", "late")

    def __init__(self, random: Random) -> None:
        self.leases = MemorySide()
        self.names: Iterator[int] = iter(range(10**9))
        self.servers: list[SlotServer] = []
        super().__init__(random)
        for table, reads in ((self.store.message, ("keys", "rows", "cells")), (self.store.payload, ("keys", "rows"))):
            for name in reads:
                vars(table)[name] = partial(self._read, getattr(table, name))

    @property
    def service(self) -> MessagingService:
        """That of the server that leads; one of which a write is late is deposed."""
        if self.writes.is_stalled:
            self.take_over()
        return self._leader().service

    def serve(self) -> MessagingService:
        for server in self.servers:
            server.service.close()
        self.servers = [self._server(ordinal) for ordinal in range(2)]
        return self._leader().service

    # -- steps --------------------------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """The leader is held up until another one leads, or it dies."""
        self.writes.is_stalled = False
        leader = self._leader()
        self.servers.remove(leader)
        self._leader()
        self.reached["deposed"] += 1
        if self.random.random() < 0.5:
            leader.service.close()
            leader = self._server(leader.ordinal)
        self.servers.append(leader)
        leader.look()

    def hand_over(self) -> None:
        """The leader gives its lease back."""
        leader = self._leader()
        leader.rota.resign()
        self.servers.reverse()
        self.reached["handed over"] += 1

    def arrive(self) -> None:
        super().arrive()
        self._arrive()

    def rest(self) -> None:
        # Nothing is under way for so long.
        self.arrive()
        super().rest()

    def close(self) -> None:
        for server in self.servers:
            server.service.close()
        super().close()

    # -- how ----------------------------------------------------------------------------------------------------------

    def _leader(self) -> SlotServer:
        for _ in range(_SETTLED):
            for server in self.servers:
                if server.rota.slots.led:
                    return server
            self.clock.advance(SECOND)
            for server in self.servers:
                server.look()
        raise AssertionError("no server leads")

    def _server(self, ordinal: int) -> SlotServer:
        return SlotServer(self, ordinal, self.random.choice((0, 1 << 20)), ONE_SLOT)

    def _read(self, read: Callable[..., Any], *given: Any) -> Any:
        """Read a page; behind it something may arrive."""
        page = read(*given)
        if self.writes.late and self.random.random() < 0.15:
            self._arrive()
        return page

    def _arrive(self) -> None:
        while self.writes.late:
            self.reached["rows arrived late"] += 1
            self.writes.late.pop()()


LEAD_WEIGHTS = WEIGHTS | {"load": 5, "register": 5, "together": 2, "take_over": 1, "hand_over": 0.7}


def play(seed: int) -> Any:
    """Play the history of a seed, as :func:`tests.simulation.group_site.play` does."""
    return group_site.play(seed, make=LeadSite, weights=LEAD_WEIGHTS)

"""Producers on two servers of which one leads: the lead changes, and what the deposed one had under way comes late.

The histories are those of :mod:`tests.simulation.producer_world`, and the same must hold. A write may be cut in the
middle: then its server is deposed, and the other rows arrive whenever they like, also between two reads of the server
that leads by then. Or the store does not answer in time: then its server goes on, and the rows arrive all the same. So
may what it takes back of them.

A reader follows both topics, and must have seen in the end all that was acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

from tests.builders import SECOND
from tests.kit.servers import SlotServer
from tests.simulation import group_world
from tests.simulation.group_world import Violation
from tests.simulation.producer_world import BILLS, ORDERS, WEIGHTS, ProducerWorld
from tests.simulation.slot_world import SETTINGS, start_server
from tms_core.messaging.model import FetchRequest
from tms_core.messaging.service import MessagingService
from tms_core.rowkey import MessageId
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId

#: One slot, so one server leads.
ONE_SLOT = SETTINGS.model_copy(update={"slots": 1})
#: After so many seconds one of two servers leads, whatever has happened.
_SETTLED = 12


class LeadWorld(ProducerWorld):
    write_faults = ("before", "after", "late", "late", "late", "slow", "slow")

    def __init__(self, random: Random) -> None:
        self.leases = MemorySide()
        self.names: Iterator[int] = iter(range(10**9))
        self.servers: list[SlotServer] = []
        #: How far the reader has come, and what it has read.
        self.followed: dict[TopicId, MessageId | None] = {BILLS: None, ORDERS: None}
        self.read: set[tuple[TopicId, bytes]] = set()
        super().__init__(random)
        for table in (self.store.message, self.store.payload):
            vars(table)["read"] = partial(self._read, table.read)

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
        leader.assignment.resign()
        self.servers.reverse()
        self.reached["handed over"] += 1

    def follow(self) -> None:
        """The reader goes on where it was."""
        for topic, start in self.followed.items():
            request = FetchRequest(start, inclusive=False)
            for message in [one for page in self.service.fetch(topic, request) for one in page]:
                self.followed[topic] = MessageId.parse(message.id)
                self.read.add((topic, message.payload))

    def fail(self, *, restarts: bool) -> None:
        super().fail(restarts=restarts)
        if self.random.random() < 0.2:
            self.take_over()

    def arrive(self) -> None:
        super().arrive()
        self._arrive()

    def rest(self) -> None:
        # Nothing is under way for so long.
        self.arrive()
        super().rest()

    def drain(self) -> None:
        super().drain()
        self.follow()
        if unread := [one for one in self.acknowledged if one not in self.read]:
            raise Violation(f"Q9: {unread} was acknowledged, and a reader has passed it")

    def close(self) -> None:
        for server in self.servers:
            server.service.close()
        super().close()

    # -- how ----------------------------------------------------------------------------------------------------------

    def _leader(self) -> SlotServer:
        for _ in range(_SETTLED):
            for server in self.servers:
                if server.assignment.slots.led:
                    return server
            self.clock.advance(SECOND)
            for server in self.servers:
                server.look()
        raise AssertionError("no server leads")

    def _server(self, ordinal: int) -> SlotServer:
        return start_server(self, ordinal, self.random.choice((0, 1 << 20)), ONE_SLOT)

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


LEAD_WEIGHTS = WEIGHTS | {"load": 5, "register": 5, "together": 2, "take_over": 1, "hand_over": 0.7, "follow": 4}


def play(seed: int) -> Any:
    return group_world.play(seed, make=LeadWorld, weights=LEAD_WEIGHTS)

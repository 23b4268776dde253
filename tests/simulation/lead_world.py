"""Producers on two servers under changes of the leader, with late writes of the former leader.

Histories and invariants are those of :mod:`tests.simulation.producer_world`. A write may be interrupted: its server
loses the leadership, and the other rows arrive at any time, also between two reads of the new leader. Or the store
times out: the server continues, and the rows or their rollback arrive later.

A reader follows both topics and must see every acknowledged message.
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

#: One slot has one leader.
ONE_SLOT = SETTINGS.model_copy(update={"slots": 1})
#: Seconds after which one of the servers leads in any case.
_SETTLED = 12


class LeadWorld(ProducerWorld):
    write_faults = ("before", "after", "late", "late", "late", "slow", "slow")

    def __init__(self, random: Random) -> None:
        self.leases = MemorySide()
        self.names: Iterator[int] = iter(range(10**9))
        self.servers: list[SlotServer] = []
        #: Positions and messages of the reader.
        self.followed: dict[TopicId, MessageId | None] = {BILLS: None, ORDERS: None}
        self.read: set[tuple[TopicId, bytes]] = set()
        super().__init__(random)
        for table in (self.store.message, self.store.payload):
            vars(table)["read"] = partial(self._read, table.read)

    @property
    def service(self) -> MessagingService:
        """The service of the leader; a leader with a stalled write is replaced first."""
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
        """Stall or kill the leader until another server leads."""
        self.writes.is_stalled = False
        leader = self._leader()
        self.servers.remove(leader)
        self._leader()
        self.event_counts["leader replaced"] += 1
        if self.random.random() < 0.5:
            leader.service.close()
            leader = self._server(leader.ordinal)
        self.servers.append(leader)
        leader.check_leases()

    def hand_over(self) -> None:
        """Release the lease of the leader."""
        self._leader().assignment.resign()
        self.servers.reverse()
        self.event_counts["lease released"] += 1

    def follow(self) -> None:
        """Continue the reader at its positions."""
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
        # No write is delayed for this long.
        self.arrive()
        super().rest()

    def drain(self) -> None:
        super().drain()
        self.follow()
        if unread := [one for one in self.acknowledged if one not in self.read]:
            raise Violation(f"Q9: {unread} was acknowledged, but a reader has passed it")

    def close(self) -> None:
        for server in self.servers:
            server.service.close()
        super().close()

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _leader(self) -> SlotServer:
        for _ in range(_SETTLED):
            for server in self.servers:
                if server.assignment.slots.led:
                    return server
            self.clock.advance(SECOND)
            for server in self.servers:
                server.check_leases()
        raise AssertionError("no server leads")

    def _server(self, ordinal: int) -> SlotServer:
        return start_server(self, ordinal, self.random.choice((0, 1 << 20)), ONE_SLOT)

    def _read(self, read: Callable[..., Any], *given: Any) -> Any:
        """Read a page; late writes may arrive after it."""
        page = read(*given)
        if self.writes.late and self.random.random() < 0.15:
            self._arrive()
        return page

    def _arrive(self) -> None:
        while self.writes.late:
            self.event_counts["late rows"] += 1
            self.writes.late.pop()()


LEAD_WEIGHTS = WEIGHTS | {"load": 5, "register": 5, "together": 2, "take_over": 1, "hand_over": 0.7, "follow": 4}


def play(seed: int) -> Any:
    return group_world.play(seed, make=LeadWorld, weights=LEAD_WEIGHTS)

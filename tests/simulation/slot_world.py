"""Consumer groups on two servers that each lead a part of the topics, with changes of the leaders.

Histories and invariants are those of :mod:`tests.simulation.group_world`. Each request goes to the leader of its topic.
If a server is killed, the other server takes its slots, and returns them after a restart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.builders import SECOND
from tests.kit.servers import SlotServer
from tests.simulation.group_world import LIFETIME_MS, WEIGHTS, FaultySide, GroupWorld
from tms_core.clock import ManualClock
from tms_core.messaging.service import ServiceOptions
from tms_core.settings.models import LeaderSettings
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId
from tms_core.transaction.manager.manager import TransactionManager

#: These numbers assign the two topics to different servers.
SLOTS, SERVERS = 5, 2
SETTINGS = LeaderSettings(advertise="http://here:1", slots=SLOTS, servers=SERVERS, seconds=3, fencing_delay_seconds=1)
#: Seconds after which all slots have a leader in any case.
_SETTLED = 12


class Shared(Protocol):
    leases: MemorySide
    side: FaultySide
    names: Iterator[int]
    store: MemoryStore
    clock: ManualClock
    manager: TransactionManager


def start_server(world: Shared, ordinal: int, cache_bytes: int, settings: LeaderSettings = SETTINGS) -> SlotServer:
    """Start a server with a new name."""
    options = ServiceOptions(
        max_lifetime_seconds=LIFETIME_MS // 1000, grace_seconds=LIFETIME_MS // 1000, cache_bytes=cache_bytes
    )
    return SlotServer(world, ordinal, settings, f"server {next(world.names)}", options, world.manager)


class LeaderProxy:
    """A proxy of all servers that sends each request to the leader of its topic."""

    def __init__(self, world: SlotWorld, part: str = "") -> None:
        self._world = world
        self._part = part
        if not part:
            self.consumers, self.groups = LeaderProxy(world, "consumers"), LeaderProxy(world, "groups")

    def __getattr__(self, name: str) -> Any:
        def ask(topic: TopicId, *given: Any, **more: Any) -> Any:
            service = self._world.leader(topic).service
            return getattr(getattr(service, self._part) if self._part else service, name)(topic, *given, **more)

        return ask

    def close(self) -> None:
        """Kill all servers."""
        for server in self._world.servers:
            server.service.close()
        self._world.servers.clear()


@dataclass
class SlotWorld(GroupWorld):
    leases: MemorySide = field(default_factory=MemorySide)
    servers: list[SlotServer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names: Iterator[int] = iter(range(10**9))
        #: The server that this history kills; the other one runs between restarts.
        self.victim = self.random.randrange(SERVERS)
        super().__post_init__()

    def serve(self) -> Any:
        for ordinal in range(SERVERS):
            self._start(ordinal)
        return LeaderProxy(self)

    def leader(self, topic: TopicId) -> SlotServer:
        for _ in range(_SETTLED):
            for server in self.servers:
                if server.assignment.slots.of(topic.prefix).leads:
                    return server
            self._settle(1)
        raise AssertionError(f"no server leads {topic}")

    def die(self) -> None:
        """Kill a server; the other server takes its slots at once or later."""
        if len(self.servers) == SERVERS:
            gone = next(server for server in self.servers if server.ordinal == self.victim)
            self.servers.remove(gone)
            gone.service.close()
            self.event_counts["one of two servers killed"] += 1
            self._settle(self.random.choice((0, _SETTLED)))

    def come_back(self) -> None:
        """Restart a killed server, which takes its slots back."""
        for ordinal in {*range(SERVERS)} - {server.ordinal for server in self.servers}:
            self._start(ordinal)
            self._settle(self.random.choice((1, 3, _SETTLED)))
            self.event_counts["slots handed back"] += 1

    def swing(self) -> None:
        """Move a slot to the other server and back twice, with requests to each leader."""
        for _ in range(2):
            self.die()
            self._settle(_SETTLED)
            self.publish()
            self.work()
            self.come_back()
            self._settle(_SETTLED)
            self.publish()
            self.work()

    def _start(self, ordinal: int) -> None:
        self.servers.append(start_server(self, ordinal, self.random.choice((0, 1 << 20))))

    def _settle(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.advance(SECOND)
            for server in self.servers:
                server.check_leases()


SLOT_WEIGHTS = WEIGHTS | {"die": 1.5, "come_back": 2.5, "swing": 0.7}

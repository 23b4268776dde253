"""Several servers on the same tables, in this process and at one clock.

    with closing(TwoServers()) as two:
        two.one.service.publish(TOPIC, [b"a"])
        two.other.take_over()
        assert two.other.payloads() == [b"a"]

:class:`Contender` is a server without tables, for tests of leadership. :class:`LeaderServer` has a service over all
topics, :class:`SlotServer` a service over the topics of its slots. Servers check the leadership only in
:meth:`Contender.step` and :meth:`SlotServer.check_leases`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tests.builders import MINUTE, NOW_MS, SECOND
from tests.kit.messaging import read_payloads
from tms_core.clock import Clock, ManualClock
from tms_core.errors import StoreError
from tms_core.messaging.service import MessagingService, ServiceOptions
from tms_core.rowkey import generation_prefix
from tms_core.server.ha.fenced_store import FencedSide, FencedStore
from tms_core.server.ha.leadership import Leadership
from tms_core.server.ha.sealed_ranges import SealedRanges
from tms_core.server.ha.slot_assignment import SlotAssignment, Slots
from tms_core.settings.models import LeaderSettings
from tms_core.tables.base import MESSAGES, MessageValue
from tms_core.tables.lease import Lease, LeaseRecord
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide, SideTable
from tms_core.topic import TopicId
from tms_core.transaction.manager.manager import TransactionManager

#: The duration of a lease and the fencing delay, in seconds.
SECONDS, DELAY_SECONDS = 15, 5
TOPIC = TopicId.parse("default:t")
PREFIX = generation_prefix(TOPIC.prefix, 1)
Rows = Sequence[tuple[bytes, MessageValue]]


class LeaseCell:
    """The cell of a lease in memory, and the clock of its holders.

    Attributes:
        reads, writes: the number of calls.
        before_swap: called once, before the next write.
        fails_after_writing: whether the responses of writes are lost.
    """

    def __init__(self) -> None:
        self.clock = ManualClock(NOW_MS, monotonic_ms=MINUTE)
        self.value: bytes | None = None
        self.reads = self.writes = 0
        self.before_swap: Callable[[], object] = lambda: None
        self.fails_after_writing = False

    def lease(self) -> bytes | None:
        self.reads += 1
        return self.value

    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        self.writes += 1
        before, self.before_swap = self.before_swap, lambda: None
        before()
        if self.value != expected:
            return False
        self.value = value
        if self.fails_after_writing:
            raise StoreError("the answer was lost.")
        return True

    @property
    def record(self) -> LeaseRecord:
        found = LeaseRecord.parse(self.value)
        assert found is not None
        return found


class Contender:
    """A server that contends for the leadership.

    Args:
        clock: the clock of the server; None: the clock of the cell.

    Attributes:
        ready: whether it may lead as soon as it has the lease.
    """

    def __init__(self, cell: LeaseCell, name: str, clock: ManualClock | None = None) -> None:
        self.clock = clock = clock or cell.clock
        self.ready = True
        self.lease = Lease(cell, name, SECONDS, clock, wall_clocks=False)
        self.lease.address = f"http://{name}:1"
        self.leadership = Leadership(self.lease, clock, fencing_delay_seconds=DELAY_SECONDS)

    def step(self) -> bool:
        """Check the leadership; return whether this server leads."""
        self.leadership.step(self.prepare)
        return self.leadership.leads

    def prepare(self) -> bool:
        return self.ready

    def take_over(self) -> None:
        """Take the leadership from an idle former leader."""
        for _ in range(2 * (SECONDS + DELAY_SECONDS)):
            if self.step():
                return
            self.clock.advance(SECOND)
        raise AssertionError("it does not lead")

    @property
    def leader(self) -> str:
        """Return the address of the leader."""
        found = self.leadership.leader
        return found.address if found is not None else ""


class WatchedTable:
    """A table of one server, whose methods a test can replace."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


class SharedTables(Protocol):
    """The tables and the clock that servers share."""

    store: MemoryStore
    side: Any
    leases: MemorySide
    clock: Any


class FencedServer:
    """A service over tables that only the leader of a topic may use.

    Attributes:
        message, payload, side: the tables of this server, whose calls a test may replace.
    """

    def open(
        self,
        shared: SharedTables,
        slots: Slots,
        options: ServiceOptions | None = None,
        transactions: TransactionManager | None = None,
    ) -> None:
        """Open the tables and the service."""
        self.fenced = FencedStore(shared.store, slots, SealedRanges(shared.store.message, shared.side, shared.clock))
        self.message = vars(self.fenced.message)["_table"] = WatchedTable(shared.store.message)
        self.payload = vars(self.fenced.payload)["_table"] = WatchedTable(shared.store.payload)
        self.side = WatchedTable(shared.side)
        clock: Clock = shared.clock
        fenced_side: SideTable = FencedSide(self.side, slots)  # type: ignore[arg-type]  # it forwards all calls
        self.service = MessagingService(
            self.fenced, clock, options, side=shared.side, transactions=transactions, fenced_side=fenced_side
        )

    def payloads(self, topic: TopicId = TOPIC) -> list[bytes]:
        return read_payloads(self.service, topic)

    def interrupt_write(self, during_write: Callable[[], object], first: Callable[[Rows], Rows] = lambda _: []) -> None:
        """Call a function during the next write of messages, after its first rows and before the others."""
        put = self.message.put

        def halfway(rows: Rows) -> None:
            self.message.put = put
            done = first(rows)
            if done:
                put(done)
            during_write()
            put([row for row in rows if row not in done])

        self.message.put = halfway


class LeaderServer(Contender, FencedServer):
    """A server that serves all topics while it leads."""

    def __init__(self, shared: TwoServers, name: str) -> None:
        super().__init__(shared.cell, name)
        self.open(shared, Slots([self.leadership]))

    def prepare(self) -> bool:
        return self.service.invalidate_topics(lambda _: True)


class TwoServers:
    """Two servers on the same tables; ``one`` leads, and the topic :data:`TOPIC` exists."""

    def __init__(self) -> None:
        self.store, self.side, self.leases, self.cell = MemoryStore(), MemorySide(), MemorySide(), LeaseCell()
        self.clock = self.cell.clock
        self.one, self.other = LeaderServer(self, "a"), LeaderServer(self, "b")
        self.one.take_over()
        self.one.service.create_topic(TOPIC)

    def close(self) -> None:
        for server in (self.one, self.other):
            server.service.close()

    def rows(self) -> list[bytes | None]:
        """Return the payloads in the store, in order."""
        return [row.payload for _, row in self.store.message.read(MESSAGES, PREFIX, None, 100_000).items]


class SlotServer(FencedServer):
    """A server that serves the topics of the slots that it leads.

    Args:
        name: the holder's name in its leases.
    """

    def __init__(
        self,
        shared: SharedTables,
        ordinal: int,
        settings: LeaderSettings,
        name: str,
        options: ServiceOptions | None = None,
        transactions: TransactionManager | None = None,
    ) -> None:
        self.ordinal = ordinal
        self.assignment = SlotAssignment(shared.leases, name, settings, ordinal, shared.clock)
        self.assignment.set_address(f"http://{name}")
        self.slots = self.assignment.slots
        self.open(shared, self.slots, options, transactions)

    def check_leases(self) -> list[int]:
        """Check the leadership; return the slots of this server."""
        self.assignment.check_leases(
            lambda slot: self.service.invalidate_topics(lambda key: self.slots.number(key) == slot)
        )
        return self.led

    @property
    def led(self) -> list[int]:
        """Return the slots that this server leads."""
        return [slot for slot, leadership in enumerate(self.slots.leaderships) if leadership.leads]


class SlotServers:
    """Servers on the same tables, each of which leads a part of the slots.

    Attributes:
        servers: all started servers, including servers that a test does not use any longer.
    """

    def __init__(self) -> None:
        self.store, self.side, self.leases = MemoryStore(), MemorySide(), MemorySide()
        self.clock = ManualClock(NOW_MS, monotonic_ms=MINUTE)
        self.servers: list[SlotServer] = []

    def start(self, ordinal: int, settings: LeaderSettings) -> SlotServer:
        server = SlotServer(self, ordinal, settings, f"server {ordinal} of {len(self.servers)}")
        self.servers.append(server)
        return server

    def check_leases(self, *servers: SlotServer, seconds: int = 1) -> None:
        """Advance the clock second by second; in each second, some servers check the leadership."""
        for _ in range(seconds):
            self.clock.advance(SECOND)
            for server in servers:
                server.check_leases()

    def close(self) -> None:
        for server in self.servers:
            server.service.close()

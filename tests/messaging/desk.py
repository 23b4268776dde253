"""A messaging service and all it stands on, told in the words of a test.

    desk.create("orders", ttl="60")
    desk.publish("orders", b"a", b"b")
    assert desk.payloads("orders") == [b"a", b"b"]

Time stands still unless a test moves ``desk.clock``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tests.builders import DAY, NOW_MS, pointer
from tms_core.clock import ManualClock
from tms_core.messaging.model import FetchedMessage, FetchRequest, RollbackRange
from tms_core.messaging.service import MessagingService, ServiceOptions
from tms_core.rowkey import MessageId
from tms_core.tables.base import Store
from tms_core.tables.leveldb.side import LevelDBSide
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide, SideTable
from tms_core.topic import TopicId
from tms_core.transaction.model import Transaction

#: How long a test waits for another thread before it fails.
PATIENCE_SECONDS = 120

HOUR_SECONDS = 3600
P = pointer(NOW_MS - 1000)


@dataclass
class Desk:
    """A service over a store; ``open`` opens it again."""

    store: Store
    side: SideTable
    clock: ManualClock
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.service = self.serve()

    def serve(self) -> MessagingService:
        """Another service over the same store."""
        figures = {
            field.name: self.options[field.name] for field in fields(ServiceOptions) if field.name in self.options
        }
        options = replace(
            ServiceOptions(
                default_ttl_seconds=7 * 24 * HOUR_SECONDS,
                max_lifetime_seconds=HOUR_SECONDS,
                grace_seconds=HOUR_SECONDS,
                cache_bytes=1 << 20,
            ),
            **figures,
        )
        more = {name: value for name, value in self.options.items() if name not in figures}
        return MessagingService(self.store, self.clock, options, **{"side": self.side, **more})

    def restart(self, **options: Any) -> None:
        """Stop the service and start another one."""
        self.service.close()
        self.options |= options
        self.service = self.serve()

    def close(self) -> None:
        self.service.close()
        self.side.close()
        self.store.close()

    def create(self, name: str = "orders", **properties: str) -> TopicId:
        self.service.create_topic(named(name), properties)
        return named(name)

    def publish(self, name: str, *messages: bytes, pointer: int | None = None, ttl: int | None = None) -> RollbackRange:
        """Publish; outside a transaction the answer means nothing."""
        answer = self.service.publish(named(name), messages, pointer=pointer, ttl_seconds=ttl)
        return answer or RollbackRange(0, 0, 0, 0, 0)

    def put(self, name: str, pointer: int, *messages: bytes) -> None:
        """Store payloads."""
        self.service.store(named(name), messages, pointer=pointer)

    def fetch(self, name: str, start: MessageId | int | None = None, **options: Any) -> list[FetchedMessage]:
        request = FetchRequest(start, **options)
        return [message for page in self.service.fetch(named(name), request) for message in page]

    def payloads(self, name: str = "orders", start: MessageId | int | None = None, **options: Any) -> list[bytes]:
        return [message.payload for message in self.fetch(name, start, **options)]

    def ids(self, name: str = "orders", **options: Any) -> list[MessageId]:
        return [MessageId.parse(message.id) for message in self.fetch(name, **options)]


def named(name: str) -> TopicId:
    return TopicId("default", name)


def reader(
    read_pointer: int = pointer(NOW_MS + DAY),
    invalid: Iterable[int] = (),
    in_progress: Iterable[int] = (),
    write_pointer: int = 2**62,
) -> Transaction:
    """A transaction that reads up to a pointer."""
    return Transaction(
        read_pointer, write_pointer, write_pointer, invalids=sorted(invalid), in_progress=sorted(in_progress)
    )


def memory(_: Path) -> Desk:
    return Desk(MemoryStore(), MemorySide(), ManualClock(NOW_MS, monotonic_ms=DAY))


def leveldb(folder: Path) -> Desk:
    store = LevelDBStore(folder / "messaging", create=True)
    return Desk(store, LevelDBSide(folder / "side"), ManualClock(NOW_MS, monotonic_ms=DAY))


MAKERS: dict[str, Callable[[Path], Desk]] = {"memory": memory, "leveldb": leveldb}

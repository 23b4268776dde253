"""A messaging service on a store of your choice, with short methods for tests.

    kit.create("orders", ttl="60")
    kit.publish("orders", b"a", b"b")
    assert kit.payloads("orders") == [b"a", b"b"]

:class:`GroupKit` also has a transaction manager and a consumer group:

    tx = kit.begin()
    assert kit.poll(tx) == [b"a"]
    kit.commit(tx)

Time stands still until a test advances ``kit.clock``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.builders import DAY, NOW_MS, pointer
from tms_core.clock import ManualClock
from tms_core.consumers.claim_rows import claims_of
from tms_core.consumers.claims import ConsumerGroup, GroupClaim
from tms_core.errors import StoreError
from tms_core.messaging.groups.claims import GroupBatch, GroupPoll, Order
from tms_core.messaging.model import FetchedMessage, FetchRequest, RollbackRange
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.producers.rows import LastTransaction
from tms_core.messaging.service import MessagingService, ServiceOptions
from tms_core.rowkey import MessageId
from tms_core.tables.base import Store
from tms_core.tables.leveldb.side import LevelDBSide
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide, SideTable
from tms_core.topic import TopicId
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage
from tms_core.transaction.model import Transaction

HOUR_SECONDS = 3600
P = pointer(NOW_MS - 1000)


@dataclass
class ServiceKit:
    """A messaging service on a store; a test can restart it.

    Args:
        options: arguments of ``ServiceOptions`` and ``MessagingService``.
    """

    store: Store
    side: SideTable
    clock: ManualClock
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.service = self.serve()

    def serve(self) -> MessagingService:
        """Return another service on the same store."""
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
        """Stop the service and start another service with more options."""
        self.service.close()
        self.options |= options
        self.service = self.serve()

    def close(self) -> None:
        self.service.close()
        self.side.close()
        self.store.close()


class Kit(ServiceKit):
    """A service with methods that take names of topics in the namespace ``default``."""

    def create(self, name: str = "orders", **properties: str) -> TopicId:
        self.service.create_topic(named(name), properties)
        return named(name)

    def publish(self, name: str, *messages: bytes, pointer: int | None = None, ttl: int | None = None) -> RollbackRange:
        """Publish messages; the result is meaningful only in a transaction."""
        answer = self.service.publish(named(name), messages, pointer=pointer, ttl_seconds=ttl)
        return answer or RollbackRange(0, 0, 0, 0, 0)

    def put(self, name: str, pointer: int, *messages: bytes) -> None:
        """Store payloads in the payload table."""
        self.service.store(named(name), messages, pointer=pointer)

    def fetch(self, name: str, start: MessageId | int | None = None, **options: Any) -> list[FetchedMessage]:
        return fetch(self.service, named(name), start, **options)

    def payloads(self, name: str = "orders", start: MessageId | int | None = None, **options: Any) -> list[bytes]:
        return read_payloads(self.service, named(name), start, **options)

    def ids(self, name: str = "orders", **options: Any) -> list[MessageId]:
        return [MessageId.parse(message.id) for message in self.fetch(name, **options)]


def named(name: str) -> TopicId:
    return TopicId("default", name)


def fetch(service: MessagingService, topic: TopicId, start: Any = None, **options: Any) -> list[FetchedMessage]:
    """Return all messages of a topic that a request finds; the arguments are those of ``FetchRequest``."""
    return [message for page in service.fetch(topic, FetchRequest(start, **options)) for message in page]


def read_payloads(service: MessagingService, topic: TopicId, start: Any = None, **options: Any) -> list[bytes]:
    return [message.payload for message in fetch(service, topic, start, **options)]


def reader(
    read_pointer: int = pointer(NOW_MS + DAY),
    invalid: Iterable[int] = (),
    in_progress: Iterable[int] = (),
    write_pointer: int = 2**62,
) -> Transaction:
    """Return a transaction that reads up to a pointer."""
    return Transaction(
        read_pointer, write_pointer, write_pointer, invalids=sorted(invalid), in_progress=sorted(in_progress)
    )


def memory(_: Path) -> Kit:
    return Kit(MemoryStore(), MemorySide(), ManualClock(NOW_MS, monotonic_ms=DAY))


def leveldb(folder: Path) -> Kit:
    store = LevelDBStore(folder / "messaging", create=True)
    return Kit(store, LevelDBSide(folder / "side"), ManualClock(NOW_MS, monotonic_ms=DAY))


MAKERS: dict[str, Callable[[Path], Kit]] = {"memory": memory, "leveldb": leveldb}

ORDERS, GROUP = named("orders"), "billing"
READ_NONE = MessageId(0, 0)


class GroupKit(ServiceKit):
    """A service with the topic ``orders``, the group ``billing`` and a transaction manager."""

    def __init__(self, store: Store, side: SideTable) -> None:
        clock = ManualClock(NOW_MS, monotonic_ms=DAY)
        self.manager = TransactionManager(MemoryStorage(), clock)
        super().__init__(store, side, clock)
        self.service.create_topic(ORDERS)
        self.service.consumers.put(ORDERS, GROUP, READ_NONE)

    def serve(self) -> MessagingService:
        self.options["transactions"] = self.manager
        return super().serve()

    def close(self) -> None:
        super().close()
        self.manager.close()

    def publish(self, *messages: bytes, tx: Transaction | None = None) -> RollbackRange | None:
        return self.service.publish(ORDERS, messages, pointer=None if tx is None else tx.write_pointer)

    def begin(self, timeout_seconds: int | None = None) -> Transaction:
        return self.manager.start_short(timeout_seconds)

    def ask(self, tx: Transaction, limit: int = 100, group: str = GROUP, **options: Any) -> GroupBatch:
        return self.service.groups.poll(ORDERS, group, GroupPoll(tx, limit, **options))

    def poll(self, tx: Transaction, limit: int = 100, **options: Any) -> list[bytes]:
        return [message.payload for message in self.ask(tx, limit, **options).messages]

    def any(self, tx: Transaction, limit: int = 100, **options: Any) -> list[bytes]:
        """Poll without an order of delivery."""
        return self.poll(tx, limit, order=Order.NONE, **options)

    def process(self, limit: int = 100, **options: Any) -> list[bytes]:
        """Poll in a transaction that commits."""
        tx = self.begin()
        found = self.poll(tx, limit, **options)
        self.commit(tx)
        return found

    def fail(self, limit: int = 100, **options: Any) -> list[bytes]:
        """Poll in a transaction that is rolled back."""
        tx = self.begin()
        found = self.poll(tx, limit, **options)
        self.roll_back(tx)
        return found

    def commit(self, tx: Transaction) -> None:
        self.manager.commit(tx.transaction_id)

    def roll_back(self, tx: Transaction, group: str = GROUP) -> None:
        self.service.groups.roll_back(ORDERS, group, tx.transaction_id)
        self.manager.abort(tx)

    def time_out(self, tx: Transaction) -> None:
        """Invalidate a transaction, as its timeout does."""
        self.manager.invalidate(tx.transaction_id)

    def claims(self, group: str = GROUP) -> list[GroupClaim]:
        return [claim for _, claim in claims_of(self.side, ConsumerGroup(ORDERS, 1, group))]

    def base(self, group: str = GROUP) -> MessageId:
        return self.service.consumers.get(ORDERS, group).id

    def ids(self) -> list[MessageId]:
        return [MessageId.parse(message.id) for message in fetch(self.service, ORDERS)]


class CrashingStore(MemoryStore):
    """A store in memory whose writes of metadata fail, as after a crash of the server.

    Attributes:
        writes_left: the number of writes that succeed; None: all succeed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes_left: int | None = None
        write = self.metadata.compare_and_set

        def write_or_crash(key: bytes, expected: bytes | None, value: bytes) -> bool:
            if self.writes_left == 0:
                raise StoreError("the server died")
            if self.writes_left is not None:
                self.writes_left -= 1
            return write(key, expected, value)

        self.metadata.compare_and_set = write_or_crash  # type: ignore[method-assign]


@contextmanager
def group_kit(kind: str, folder: Path) -> Iterator[GroupKit]:
    """Yield a kit on a store in memory or in LevelDB."""
    made = MAKERS[kind](folder)
    made.service.close()
    kit = GroupKit(made.store, made.side)
    try:
        yield kit
    finally:
        kit.close()


BILLS = named("bills")


class Instance:
    """An instance of a producer whose home is the topic ``bills``."""

    def __init__(self, kit: GroupKit, name: str = "importer") -> None:
        self.kit, self.name, self.uuid, self.sequence = kit, name, uuid4(), 0
        self.generation, self.previous = self.register()

    def register(self) -> tuple[int, LastTransaction | None]:
        known = self.kit.service.producers.register(BILLS, self.name, self.uuid)
        return known.generation, known.previous

    def sent(self, *, again: bool = False, label: str = "") -> Sent:
        self.sequence += not again
        return Sent(BILLS, self.name, self.generation, self.sequence, label)

    def publish(
        self, *messages: bytes, tx: Transaction | None = None, again: bool = False, label: str = "", **options: Any
    ) -> object:
        sent, pointer = self.sent(again=again, label=label), None if tx is None else tx.write_pointer
        topic = options.pop("topic", BILLS)
        return self.kit.service.publish(topic, messages, pointer=pointer, sent=sent, **options)

    def store(self, *messages: bytes, tx: Transaction, again: bool = False) -> None:
        self.kit.service.store(BILLS, messages, pointer=tx.write_pointer, sent=self.sent(again=again))

    def begin(self, tx: Transaction, label: str = "") -> None:
        self.kit.service.store_transaction(self.sent(label=label), tx.write_pointer)

    def roll_back(self, tx: Transaction) -> None:
        self.kit.service.producers.roll_back(self.sent(again=True), tx.write_pointer)
        self.kit.service.rollback(BILLS, tx.write_pointer)


def read_committed(kit: GroupKit, topic: TopicId = BILLS) -> list[bytes]:
    """Return the messages of a topic that a new transaction reads."""
    tx = kit.begin()
    found = read_payloads(kit.service, topic, transaction=tx)
    kit.manager.abort(tx)
    return found


def read_all(kit: GroupKit, topic: TopicId = BILLS) -> list[bytes]:
    return read_payloads(kit.service, topic)

"""A messaging service with its transaction manager, and workers of groups, told in the words of a test.

one = desk.begin()
assert desk.poll(one) == [b"a"]
desk.commit(one)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.builders import DAY, NOW_MS
from tests.messaging.desk import HOUR_SECONDS, named
from tms_core.clock import ManualClock
from tms_core.consumers.claim_rows import claims_of
from tms_core.consumers.claims import ConsumerGroup, GroupClaim
from tms_core.messaging.groups.claims import GroupBatch, GroupPoll, Order
from tms_core.messaging.model import FetchRequest, RollbackRange
from tms_core.messaging.service import MessagingService, ServiceOptions
from tms_core.rowkey import MessageId
from tms_core.tables.base import Store
from tms_core.tables.leveldb.side import LevelDBSide
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide, SideTable
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage
from tms_core.transaction.model import Transaction

ORDERS, GROUP = named("orders"), "billing"
READ_NONE = MessageId(0, 0)


class GroupDesk:
    """A topic ``orders`` with the group ``billing``."""

    def __init__(self, store: Store, side: SideTable) -> None:
        self.store, self.side, self.options = store, side, dict[str, Any]()
        self.clock = ManualClock(NOW_MS, monotonic_ms=DAY)
        self.manager = TransactionManager(MemoryStorage(), self.clock)
        self.service = self.serve()
        self.service.create_topic(ORDERS)
        self.service.consumers.put(ORDERS, GROUP, READ_NONE)

    def serve(self) -> MessagingService:
        return MessagingService(
            self.store,
            self.clock,
            ServiceOptions(
                max_lifetime_seconds=HOUR_SECONDS, grace_seconds=HOUR_SECONDS, cache_bytes=1 << 20, **self.options
            ),
            side=self.side,
            transactions=self.manager,
        )

    def restart(self, **options: Any) -> None:
        self.service.close()
        self.options |= options
        self.service = self.serve()

    def close(self) -> None:
        self.service.close()
        self.manager.close()
        self.side.close()
        self.store.close()

    def publish(self, *messages: bytes, tx: Transaction | None = None) -> RollbackRange | None:
        return self.service.publish(ORDERS, messages, pointer=None if tx is None else tx.write_pointer)

    def begin(self, timeout_seconds: int | None = None) -> Transaction:
        return self.manager.start_short(timeout_seconds)

    def ask(self, tx: Transaction, limit: int = 100, group: str = GROUP, **options: Any) -> GroupBatch:
        return self.service.groups.poll(ORDERS, group, GroupPoll(tx, limit, **options))

    def poll(self, tx: Transaction, limit: int = 100, **options: Any) -> list[bytes]:
        return [message.payload for message in self.ask(tx, limit, **options).messages]

    def any(self, tx: Transaction, limit: int = 100, **options: Any) -> list[bytes]:
        """Poll without an order."""
        return self.poll(tx, limit, order=Order.NONE, **options)

    def commit(self, tx: Transaction) -> None:
        self.manager.commit(tx.transaction_id)

    def roll_back(self, tx: Transaction, group: str = GROUP) -> None:
        self.service.groups.roll_back(ORDERS, group, tx.transaction_id)
        self.manager.abort(tx)

    def time_out(self, tx: Transaction) -> None:
        """Its client is never heard of again."""
        self.manager.invalidate(tx.transaction_id)

    def claims(self, group: str = GROUP) -> list[GroupClaim]:
        return [claim for _, claim in claims_of(self.side, ConsumerGroup(ORDERS, 1, group))]

    def base(self, group: str = GROUP) -> MessageId:
        return self.service.consumers.get(ORDERS, group).id

    def ids(self) -> list[MessageId]:
        pages = self.service.fetch(ORDERS, FetchRequest())
        return [MessageId.parse(message.id) for page in pages for message in page]


@contextmanager
def opened(kind: str, folder: Path) -> Iterator[GroupDesk]:
    """A desk on a store of that kind."""
    if kind == "memory":
        desk = GroupDesk(MemoryStore(), MemorySide())
    else:
        desk = GroupDesk(LevelDBStore(folder / "messaging", create=True), LevelDBSide(folder / "side"))
    try:
        yield desk
    finally:
        desk.close()

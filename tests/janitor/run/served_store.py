"""A server in memory with one topic, and a janitor of its store, at one clock."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from tests.builders import DAY, NOW_MS, Kit, janitor
from tests.kit.messaging import ORDERS
from tms_core.clock import ManualClock
from tms_core.messaging.service import MessagingService, ServiceOptions
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide, SideTable
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage


class ServedStore:
    """A server in memory, and a janitor that has not adopted its store.

    Args:
        stack: closes the server.
        properties: the properties of the topic.
        side: the side table; None: in memory.
        options: more options of the service.
    """

    def __init__(
        self, stack: ExitStack, properties: dict[str, str], side: SideTable | None = None, **options: Any
    ) -> None:
        self.clock = ManualClock(NOW_MS, monotonic_ms=DAY)
        self.store, self.side = MemoryStore(), side or MemorySide()
        self.manager = stack.enter_context(TransactionManager(MemoryStorage(), self.clock))
        figures = ServiceOptions(max_lifetime_seconds=3600, **options)
        self.service = stack.enter_context(
            MessagingService(self.store, self.clock, figures, side=self.side, transactions=self.manager)
        )
        self.service.create_topic(ORDERS, properties)

    def made(self, **options: Any) -> Kit:
        """Return a janitor of the store; ``options`` as of :func:`tests.builders.janitor`."""
        return janitor(self.store, clock=self.clock, snapshots=self.manager, side=self.side, **options)

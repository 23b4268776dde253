"""The dependencies that all batches of a store share."""

from __future__ import annotations

from typing import NamedTuple

from tms_core.clock import HonestClock
from tms_core.messaging.cache import MessageCache
from tms_core.messaging.producers.announcements import Announcements
from tms_core.messaging.producers.requests import Requests
from tms_core.messaging.publish.open_topics import OpenTopics
from tms_core.messaging.publish.workers import PublishWorkers
from tms_core.messaging.topics.catalog import TopicRegistry
from tms_core.tables.base import Store
from tms_core.tables.side import Expiries
from tms_core.transaction.manager.manager import TransactionManager


class WriterContext(NamedTuple):
    """The parts of a messaging service that process a batch.

    Attributes:
        max_lifetime_ms: how long after its start a transaction may write, in milliseconds.
        transactions: the manager in this process; None: another process manages transactions.
    """

    topics: TopicRegistry
    store: Store
    open_topics: OpenTopics
    cache: MessageCache
    expiries: Expiries
    clock: HonestClock
    max_lifetime_ms: int
    workers: PublishWorkers
    requests: Requests
    announcements: Announcements
    transactions: TransactionManager | None = None

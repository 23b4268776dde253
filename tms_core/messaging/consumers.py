"""Consumers by name: how far each has read, kept for them, and how far they are behind.

A position is whatever the consumer says, so it may also go back, to read again. No messages are read here, and reading
a lag changes no position.
"""

from __future__ import annotations

from threading import Lock

from tms_core.clock import HonestClock
from tms_core.consumers import lag
from tms_core.consumers.lag import Lag
from tms_core.consumers.positions import NAME, Floor, Position, Positions, cutoff_at
from tms_core.errors import BadRequest, ConsumerNotFound
from tms_core.messaging.topics import TopicRegistry
from tms_core.rowkey import MessageId
from tms_core.tables.base import Store
from tms_core.tables.side import Expiries
from tms_core.topic import TopicId, TopicMetadata

#: How many rows are counted for one answer, of all consumers of a topic together: about a second's work.
COUNTED_ROWS = 100_000


class ConsumerRegistry:
    """The consumers of one store's topics; threads may share it.

    Args:
        topics: which topics there are.
        store: where messages are counted.
        positions: where positions are written down.
        expiries: messages with a ttl of their own.
        floor: what holds unread messages; None: nothing does.
        clock: what time it is for readers.
    """

    def __init__(
        self,
        topics: TopicRegistry,
        store: Store,
        positions: Positions,
        expiries: Expiries,
        floor: Floor | None,
        clock: HonestClock,
    ) -> None:
        self._topics = topics
        self._store = store
        self._positions = positions
        self._expiries = expiries
        self._floor = floor
        self._clock = clock
        self._lock = Lock()

    def put(self, topic: TopicId, name: str, message: MessageId) -> None:
        """Store how far a consumer has read; the first time, it is registered. Durable on return.

        Args:
            message: the last one it has read; all zeros for one that has read nothing yet.

        Raises:
            BadRequest: that is no name, or no id of a message.
            TopicNotFound, MetadataError: there is no such topic, or its row is damaged.
            StoreError: the store failed.
        """
        check_name(name)
        if message.publish_ms < 0 or message.payload_ms < 0:
            raise BadRequest(f"{message} is no message id: its times lie before 1970.", "Send one that a poll gave.")
        metadata = self._topics.get(topic)
        # One at a time, or a position could be written with a cut-off that another one has let go meanwhile.
        with self._lock:
            now_ms = self._clock.now_ms()
            since = cutoff_at(metadata, now_ms, self._floor, message.publish_ms)
            if self._positions.get(metadata, name) is None:
                self._positions.forget_former(metadata)
            self._positions.put(metadata, Position(name, message, now_ms, since.ms))

    def get(self, topic: TopicId, name: str) -> Position:
        """How far a consumer has read.

        Raises:
            ConsumerNotFound: there is none of that name.
            BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`put`.
        """
        return self._found(self._topics.get(topic), name)

    def delete(self, topic: TopicId, name: str) -> None:
        """Forget a consumer; nothing is held for it any more.

        Raises:
            ConsumerNotFound, BadRequest, TopicNotFound, MetadataError, StoreError: as :meth:`get`.
        """
        metadata = self._topics.get(topic)
        with self._lock:
            self._found(metadata, name)
            self._positions.delete(metadata, name)

    def lags(self, topic: TopicId) -> tuple[list[Lag], int]:
        """How far each of a topic's consumers is behind, by their names, and the moment it is said of.

        No more than :data:`COUNTED_ROWS` are counted; those who are furthest come first.

        Raises:
            TopicNotFound, MetadataError, StoreError: as :meth:`put`.
        """
        metadata, now_ms = self._topics.get(topic), self._clock.now_ms()
        positions = self._positions.of(metadata)
        counting = lag.count(self._store, self._expiries, metadata, positions, self._floor, now_ms, COUNTED_ROWS)
        return lag.finish(counting), now_ms

    def _found(self, topic: TopicMetadata, name: str) -> Position:
        check_name(name)
        found = self._positions.get(topic, name)
        if found is None:
            raise ConsumerNotFound(f"Topic {topic.topic} has no consumer {name}.", "Put its position first.")
        return found


def check_name(name: str) -> None:
    """Check that a consumer can have this name.

    Raises:
        BadRequest: it is none.
    """
    if not NAME.fullmatch(name):
        raise BadRequest(f"{name!r} cannot be a consumer.", "Use at most 255 letters, digits, '_' and '-'.")

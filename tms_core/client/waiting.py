"""The buffer of messages that are to be published some time, without a lock and without anybody who publishes.

Messages are numbered in the order in which they came. Each batch is of one topic, the one whose message waits longest,
so that each topic keeps its order and none waits for ever.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from tms_core.client.values import Buffer, WhenFull
from tms_core.errors import BufferFull, ClientClosed, NotPublished, TmsError
from tms_core.topic import TopicId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PublishFigures:
    """What became of the messages that ``publish_async`` was given.

    Attributes:
        waiting: how many are to be published, those just being sent included.
        published: how many were.
        dropped: how many were not taken, or were let go to make room.
        failed: how many the server did not take, after all attempts.
        retries: how often a batch was sent again.
    """

    waiting: int = 0
    published: int = 0
    dropped: int = 0
    failed: int = 0
    retries: int = 0


class Batch(NamedTuple):
    """Messages of one topic, and the number of the first."""

    topic: TopicId
    first: int
    payloads: list[bytes]


class Waiting:
    """The buffer, without a lock; numbers messages in the order in which they came.

    Args:
        buffer: how much of it there is.
        request_bytes: payloads in one request.
    """

    def __init__(self, buffer: Buffer, request_bytes: int) -> None:
        self.closed = False
        self.retries = 0
        self._buffer = buffer
        self._request_bytes = request_bytes
        self._topics: dict[TopicId, deque[tuple[int, bytes]]] = {}
        self._messages = 0
        self._size_bytes = 0
        self._next = 0
        self._sent: Batch | None = None
        self._published = self._dropped = self._failed = 0
        self._told = 0
        self._reason: TmsError | None = None

    @property
    def figures(self) -> PublishFigures:
        sent = len(self._sent.payloads) if self._sent else 0
        return PublishFigures(self._messages + sent, self._published, self._dropped, self._failed, self.retries)

    @property
    def full_batch(self) -> bool:
        """Whether nobody need wait for more."""
        return self._messages >= self._buffer.batch_messages or self._size_bytes >= self._request_bytes

    def offer(self, topic: TopicId, payload: bytes) -> bool:
        """Take a message, or do with it what is done when there is no room.

        Returns:
            False where it has to wait for room.

        Raises:
            ClientClosed, BufferFull: it is not taken.
        """
        if self.closed:
            raise ClientClosed("The client is closed.", "Make another one.")
        when_full = self._buffer.when_full
        if not self._fits(payload):
            if when_full is WhenFull.BLOCK:
                return False
            if when_full is WhenFull.RAISE:
                raise BufferFull(f"{self._messages} messages wait to be published.", "Try again later, or drop it.")
            if not self._dropped:
                logger.warning(
                    "there is no room for more messages that wait to be published: the %s are dropped",
                    "oldest" if when_full is WhenFull.DROP_OLDEST else "newest",
                )
            if when_full is WhenFull.DROP_NEWEST:
                self._dropped += 1
                return True
            while not self._fits(payload):
                self._take_from(self._oldest(), 1)
                self._dropped += 1
        self._topics.setdefault(topic, deque()).append((self._next, payload))
        self._next += 1
        self._messages += 1
        self._size_bytes += len(payload)
        return True

    def take(self) -> Batch | None:
        """What is sent next: of the topic whose message waits longest."""
        if not self._messages:
            return None
        topic = self._oldest()
        first = self._topics[topic][0][0]
        self._sent = Batch(topic, first, self._take_from(topic, self._buffer.batch_messages))
        return self._sent

    def settle(self, error: TmsError | None) -> None:
        """What was sent is published, or never will be."""
        if self._sent is None:
            return
        batch, self._sent = self._sent, None
        if error is None:
            self._published += len(batch.payloads)
        else:
            self._failed += len(batch.payloads)
            self._reason = error
            logger.error("%d messages for %s are not published: %s", len(batch.payloads), batch.topic, error)

    def abandon(self, error: TmsError) -> None:
        """Nobody publishes any more: what waits never will be, and of what was just sent nobody knows."""
        self.settle(error)
        while self.take() is not None:
            self.settle(error)

    def mark(self) -> int:
        """Stands for all messages taken until now."""
        return self._next

    def settled(self, mark: int) -> bool:
        """Whether nothing waits of what was taken before a mark."""
        firsts = [waiting[0][0] for waiting in self._topics.values()]
        if self._sent is not None:
            firsts.append(self._sent.first)
        return all(first >= mark for first in firsts)

    def tell(self) -> None:
        """Say what has failed since this was last asked.

        Raises:
            NotPublished: something has.
        """
        failed, self._told = self._failed - self._told, self._failed
        if failed and self._reason is not None:
            raise NotPublished(
                f"{failed} messages are not published: {self._reason.message}", "Publish them again.", failed
            ) from self._reason

    def _fits(self, payload: bytes) -> bool:
        if not self._messages:
            return True
        room = self._size_bytes + len(payload) <= self._buffer.size_bytes
        return room and self._messages < self._buffer.messages

    def _oldest(self) -> TopicId:
        return min(self._topics, key=lambda topic: self._topics[topic][0])

    def _take_from(self, topic: TopicId, most: int) -> list[bytes]:
        waiting = self._topics[topic]
        found: list[bytes] = []
        size = 0
        while waiting and len(found) < most and (not found or size + len(waiting[0][1]) <= self._request_bytes):
            payload = waiting.popleft()[1]
            found.append(payload)
            size += len(payload)
        if not waiting:
            del self._topics[topic]
        self._messages -= len(found)
        self._size_bytes -= size
        return found

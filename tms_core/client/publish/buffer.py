"""The buffer of messages that wait to be published. Its callers hold the lock and send the batches.

The buffer numbers messages in order of arrival. Each batch comes from the topic with the oldest message, so each topic
keeps its order, and no topic starves.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tms_core.client.protocol.values import Buffer, WhenFull
from tms_core.errors import BufferFull, ClientClosed, NotPublished, TmsError
from tms_core.topic import TopicId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PublishFigures:
    """Counts of the messages of ``publish_async``.

    Attributes:
        waiting: messages in the buffer and in the batch that is being sent.
        published: published messages.
        dropped: messages that were dropped because the buffer was full.
        failed: messages that the server did not accept after all attempts.
        retries: repeated attempts to send a batch.
    """

    waiting: int = 0
    published: int = 0
    dropped: int = 0
    failed: int = 0
    retries: int = 0


#: A callback; its arguments are the payload, and the error or None if the message is on the server's disk.
OnDelivery = Callable[[bytes, TmsError | None], object]
#: A callback that is due, with its arguments.
DueCallback = tuple[OnDelivery, bytes, TmsError | None]


class MessageBatch(NamedTuple):
    """A batch of messages with the same topic and TTL, and the number of its first message."""

    topic: TopicId
    first: int
    payloads: list[bytes]
    ttl_seconds: int | None = None
    #: The callback of each message; empty: no message has a callback.
    on_delivery: tuple[OnDelivery | None, ...] = ()

    def callbacks(self, error: TmsError | None) -> list[DueCallback]:
        """Return the callbacks with their arguments, in the order of the messages."""
        return [
            (on_delivery, payload, error)
            for on_delivery, payload in zip(self.on_delivery, self.payloads, strict=False)
            if on_delivery is not None
        ]


class _Message(NamedTuple):
    number: int
    payload: bytes
    ttl_seconds: int | None
    on_delivery: OnDelivery | None


class MessageBuffer:
    """The buffer; callers hold a lock around each call."""

    def __init__(self, buffer: Buffer, request_bytes: int) -> None:
        self.closed = False
        self.retries = 0
        self._buffer = buffer
        self._request_bytes = request_bytes
        self._topics: dict[TopicId, deque[_Message]] = {}
        self._messages = 0
        self._size_bytes = 0
        self._next_number = 0
        self._sent: MessageBatch | None = None
        #: Due callbacks, and the number of the first message whose callback is due or running.
        self._due_callbacks: list[DueCallback] = []
        self._first_unreported: int | None = None
        self._running_reports = 0
        self._published = self._dropped = self._failed = 0
        self._raised = 0
        self._last_error: TmsError | None = None

    @property
    def figures(self) -> PublishFigures:
        sent = len(self._sent.payloads) if self._sent else 0
        return PublishFigures(self._messages + sent, self._published, self._dropped, self._failed, self.retries)

    @property
    def has_full_batch(self) -> bool:
        """Return whether a full batch is ready, so that lingering is useless."""
        return self._messages >= self._buffer.batch_messages or self._size_bytes >= self._request_bytes

    def offer(
        self, topic: TopicId, payload: bytes, ttl_seconds: int | None = None, on_delivery: OnDelivery | None = None
    ) -> bool:
        """Accept a message, or apply the policy for a full buffer.

        Args:
            ttl_seconds: the TTL of the message; None: the topic's TTL.

        Returns:
            False if the caller has to wait for space.

        Raises:
            ClientClosed, BufferFull: the message is rejected.
        """
        if self.closed:
            raise ClientClosed("The client is closed.", "Create another client.")
        when_full = self._buffer.when_full
        if not self._fits(payload):
            if when_full is WhenFull.BLOCK:
                return False
            if when_full is WhenFull.RAISE:
                raise BufferFull(f"{self._messages} messages fill the buffer.", "Retry later, or drop the message.")
            if not self._dropped:
                kind = "oldest" if when_full is WhenFull.DROP_OLDEST else "newest"
                logger.warning("the publish buffer is full: the client drops the %s messages", kind)
            if when_full is WhenFull.DROP_NEWEST:
                self._drop([_Message(self._next_number, payload, ttl_seconds, on_delivery)])
                return True
            while not self._fits(payload):
                self._drop(self._remove_messages(self._oldest_topic(), 1))
        self._topics.setdefault(topic, deque()).append(_Message(self._next_number, payload, ttl_seconds, on_delivery))
        self._next_number += 1
        self._messages += 1
        self._size_bytes += len(payload)
        return True

    def take(self) -> MessageBatch | None:
        """Remove and return the next batch, from the topic with the oldest message; None: the buffer is empty."""
        if not self._messages:
            return None
        topic = self._oldest_topic()
        found = self._remove_messages(topic, self._buffer.batch_messages)
        callbacks = tuple(message.on_delivery for message in found)
        self._sent = MessageBatch(
            topic,
            found[0].number,
            [message.payload for message in found],
            found[0].ttl_seconds,
            callbacks if any(callbacks) else (),
        )
        return self._sent

    def settle(self, error: TmsError | None) -> None:
        """Record the final outcome of the batch that was sent; None: published."""
        if self._sent is None:
            return
        batch, self._sent = self._sent, None
        if batch.on_delivery:
            self._due_callbacks += batch.callbacks(error)
            self._first_unreported = batch.first if self._first_unreported is None else self._first_unreported
        if error is None:
            self._published += len(batch.payloads)
        else:
            self._failed += len(batch.payloads)
            self._last_error = error
            logger.error("%d messages for %s were not published: %s", len(batch.payloads), batch.topic, error)

    def abandon(self, error: TmsError) -> None:
        """Record the error for all waiting messages, and for the sent batch, whose real outcome is unknown."""
        self.settle(error)
        while self.take() is not None:
            self.settle(error)

    def callbacks(self) -> list[DueCallback]:
        """Remove and return the due callbacks; the caller calls them, then :meth:`mark_reported`."""
        found, self._due_callbacks = self._due_callbacks, []
        self._running_reports += bool(found)
        return found

    def mark_reported(self) -> None:
        """Record that the caller has called the callbacks of one :meth:`callbacks` call."""
        self._running_reports -= 1
        if not self._running_reports and not self._due_callbacks:
            self._first_unreported = None

    def mark(self) -> int:
        """Return a mark after the last accepted message, for :meth:`is_settled`."""
        return self._next_number

    def is_settled(self, mark: int) -> bool:
        """Return whether all messages before a mark have an outcome and their callbacks were called."""
        firsts = [waiting[0].number for waiting in self._topics.values()]
        if self._first_unreported is not None:
            firsts.append(self._first_unreported)
        if self._sent is not None:
            firsts.append(self._sent.first)
        return all(first >= mark for first in firsts)

    def raise_failures(self) -> None:
        """Raise an error if messages failed since the last call.

        Raises:
            NotPublished: some messages were not published.
        """
        failed, self._raised = self._failed - self._raised, self._failed
        if failed and self._last_error is not None:
            raise NotPublished(
                f"{failed} messages were not published: {self._last_error.message}", "Publish them again.", failed
            ) from self._last_error

    def _fits(self, payload: bytes) -> bool:
        if not self._messages:
            return True
        has_space = self._size_bytes + len(payload) <= self._buffer.size_bytes
        return has_space and self._messages < self._buffer.messages

    def _oldest_topic(self) -> TopicId:
        return min(self._topics, key=lambda topic: self._topics[topic][0])

    def _drop(self, messages: list[_Message]) -> None:
        self._dropped += len(messages)
        error = BufferFull("The buffer was full.", "Publish the message again later.")
        self._due_callbacks += [
            (found.on_delivery, found.payload, error) for found in messages if found.on_delivery is not None
        ]

    def _remove_messages(self, topic: TopicId, limit: int) -> list[_Message]:
        """Remove and return the oldest messages of a topic that have the same TTL and fit into a request."""
        waiting = self._topics[topic]
        found: list[_Message] = []
        size, ttl_seconds = 0, waiting[0].ttl_seconds
        while waiting and len(found) < limit and waiting[0].ttl_seconds == ttl_seconds:
            if found and size + len(waiting[0].payload) > self._request_bytes:
                break
            found.append(waiting.popleft())
            size += len(found[-1].payload)
        if not waiting:
            del self._topics[topic]
        self._messages -= len(found)
        self._size_bytes -= size
        return found

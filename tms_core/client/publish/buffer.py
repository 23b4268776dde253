"""The buffer of messages that wait to be published; it takes no lock and sends nothing itself.

It numbers messages in the order of their arrival. Each batch is of the topic whose oldest message has waited longest.
Therefore each topic keeps its order, and no topic waits forever.
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
        waiting: messages in the buffer, including the batch that is being sent.
        published: published messages.
        dropped: messages that were rejected, or dropped to make room.
        failed: messages that the server did not accept after all attempts.
        retries: repeated attempts to send a batch.
    """

    waiting: int = 0
    published: int = 0
    dropped: int = 0
    failed: int = 0
    retries: int = 0


#: A callback: it gets the payload of a message, and None once the message is on the server's disk, or else the error.
OnDelivery = Callable[[bytes, TmsError | None], object]
#: A due call of a callback with its arguments.
Fate = tuple[OnDelivery, bytes, TmsError | None]


class MessageBatch(NamedTuple):
    """A batch of messages of one topic with one TTL, and the number of the first message."""

    topic: TopicId
    first: int
    payloads: list[bytes]
    ttl_seconds: int | None = None
    #: The callback of each message; empty: no message has a callback.
    on_delivery: tuple[OnDelivery | None, ...] = ()

    def fates(self, error: TmsError | None) -> list[Fate]:
        """Return the callbacks with their results, in the order of the messages."""
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
    """The buffer, without a lock; numbers messages in the order in which they came."""

    def __init__(self, buffer: Buffer, request_bytes: int) -> None:
        self.closed = False
        self.retries = 0
        self._buffer = buffer
        self._request_bytes = request_bytes
        self._topics: dict[TopicId, deque[_Message]] = {}
        self._messages = 0
        self._size_bytes = 0
        self._next = 0
        self._sent: MessageBatch | None = None
        #: Due callbacks, and the number of the first message whose callback is due or running.
        self._fates: list[Fate] = []
        self._telling: int | None = None
        self._tellers = 0
        self._published = self._dropped = self._failed = 0
        self._reported = 0
        self._reason: TmsError | None = None

    @property
    def figures(self) -> PublishFigures:
        sent = len(self._sent.payloads) if self._sent else 0
        return PublishFigures(self._messages + sent, self._published, self._dropped, self._failed, self.retries)

    @property
    def full_batch(self) -> bool:
        """Return whether the next batch is full, so that waiting for more messages is useless."""
        return self._messages >= self._buffer.batch_messages or self._size_bytes >= self._request_bytes

    def offer(
        self, topic: TopicId, payload: bytes, ttl_seconds: int | None = None, on_delivery: OnDelivery | None = None
    ) -> bool:
        """Accept a message, or apply the rule for a full buffer.

        Args:
            ttl_seconds: the TTL of the message; None: that of the topic.

        Returns:
            False if the caller has to wait for room.

        Raises:
            ClientClosed, BufferFull: the message is rejected.
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
                self._drop([_Message(self._next, payload, ttl_seconds, on_delivery)])
                return True
            while not self._fits(payload):
                self._drop(self._take_from(self._oldest(), 1))
        self._topics.setdefault(topic, deque()).append(_Message(self._next, payload, ttl_seconds, on_delivery))
        self._next += 1
        self._messages += 1
        self._size_bytes += len(payload)
        return True

    def take(self) -> MessageBatch | None:
        """Take the next batch, from the topic whose oldest message has waited longest; None: the buffer is empty."""
        if not self._messages:
            return None
        topic = self._oldest()
        found = self._take_from(topic, self._buffer.batch_messages)
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
        """Note the outcome of the batch that was sent: published, or failed for good with an error."""
        if self._sent is None:
            return
        batch, self._sent = self._sent, None
        if batch.on_delivery:
            self._fates += batch.fates(error)
            self._telling = batch.first if self._telling is None else self._telling
        if error is None:
            self._published += len(batch.payloads)
        else:
            self._failed += len(batch.payloads)
            self._reason = error
            logger.error("%d messages for %s are not published: %s", len(batch.payloads), batch.topic, error)

    def abandon(self, error: TmsError) -> None:
        """Stop publishing: waiting messages are never sent, and the outcome of the last batch is unknown."""
        self.settle(error)
        while self.take() is not None:
            self.settle(error)

    def fates(self) -> list[Fate]:
        """Return the due callbacks with their arguments; call :meth:`mark_reported` after them."""
        found, self._fates = self._fates, []
        self._tellers += bool(found)
        return found

    def mark_reported(self) -> None:
        """Note that the callbacks of :meth:`fates` were called."""
        self._tellers -= 1
        if not self._tellers and not self._fates:
            self._telling = None

    def mark(self) -> int:
        """Return a mark that stands for all messages accepted until now."""
        return self._next

    def settled(self, mark: int) -> bool:
        """Return whether all messages before a mark are published and reported."""
        firsts = [waiting[0].number for waiting in self._topics.values()]
        if self._telling is not None:
            firsts.append(self._telling)
        if self._sent is not None:
            firsts.append(self._sent.first)
        return all(first >= mark for first in firsts)

    def tell(self) -> None:
        """Report the failures since the last call.

        Raises:
            NotPublished: some messages were not published.
        """
        failed, self._reported = self._failed - self._reported, self._failed
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

    def _drop(self, messages: list[_Message]) -> None:
        self._dropped += len(messages)
        for _, payload, _, on_delivery in messages:
            if on_delivery is not None:
                self._fates.append((on_delivery, payload, BufferFull("There was no room for it.", "Try again later.")))

    def _take_from(self, topic: TopicId, most: int) -> list[_Message]:
        """Remove and return the oldest messages of a topic that share one TTL and fit into a request."""
        waiting = self._topics[topic]
        found: list[_Message] = []
        size, ttl_seconds = 0, waiting[0].ttl_seconds
        while waiting and len(found) < most and waiting[0].ttl_seconds == ttl_seconds:
            if found and size + len(waiting[0].payload) > self._request_bytes:
                break
            found.append(waiting.popleft())
            size += len(found[-1].payload)
        if not waiting:
            del self._topics[topic]
        self._messages -= len(found)
        self._size_bytes -= size
        return found

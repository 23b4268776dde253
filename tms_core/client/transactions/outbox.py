"""The messages of a transaction, kept until it commits.

The outbox publishes them after all participants have written, so that a transaction that fails earlier leaves nothing.

Above a limit, the outbox sends payloads ahead to the server's payload table (``store``). They are not visible until an
empty publish refers to them. One such publish for each topic is enough: it publishes all payloads that the transaction
has stored in the topic. Payloads with a TTL of their own cannot be stored. The outbox publishes them ahead, and readers
outside transactions see them before the commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

from tms_core.client.protocol import calls
from tms_core.client.protocol.calls import topic_id
from tms_core.client.protocol.core import Core
from tms_core.client.protocol.messages import payloads_of, seconds
from tms_core.client.transactions.partitions import Key, changing, number_for, places, read_again, read_layout
from tms_core.errors import PartitionsChanged
from tms_core.messaging.model import RollbackRange
from tms_core.topic import TopicId

#: The least number of bytes that a message counts towards a request: a server limits the messages of a request, too.
_LEAST_BYTES = 100


class _PendingMessage(NamedTuple):
    """A message to publish.

    Attributes:
        topic, number: the topic that the program named, and the number that determines the partition.
    """

    payload: bytes
    ttl_seconds: int | None
    topic: TopicId
    number: int


class Outbox:
    """The messages that one transaction publishes.

    All messages carry one write pointer, the transaction's id, also after a checkpoint.
    """

    def __init__(self, core: Core, pointer: int) -> None:
        self._core = core
        self._pointer = pointer
        #: The kept messages, by the topic or partition that they are published to.
        self._pending: dict[TopicId, list[_PendingMessage]] = {}
        self._pending_bytes = 0
        self._stored: dict[TopicId, None] = {}
        #: Topics with a publish. Payloads stored after it would become visible with the payloads stored before it.
        self._published_topics: set[TopicId] = set()
        self._published: list[tuple[TopicId, RollbackRange]] = []
        #: Publishes that the program has sent itself with the transaction's pointers.
        self._by_hand: list[tuple[TopicId, RollbackRange]] = []
        self._moves = 0
        #: Topics with payloads stored by other processes: their write pointers of checkpoints, and a TTL in seconds.
        self._elsewhere: list[tuple[TopicId, Sequence[int], int | None]] = []

    async def add(
        self,
        topic: calls.Topic,
        messages: Sequence[bytes],
        ttl: timedelta | int | str | None = None,
        key: Key | None = None,
    ) -> None:
        """Keep messages; above the limit, send all kept messages ahead to the server."""
        name, payloads = topic_id(topic), payloads_of(messages)
        ttl_seconds = None if ttl is None else seconds(ttl)
        number = number_for(self._core, key)
        if not payloads:
            return
        if isinstance(number, Mapping) and name not in self._core.layouts:
            await read_layout(self._core, name)
        for place in places(self._core, name, number):
            pending = [_PendingMessage(payload, ttl_seconds, place.topic, place.number) for payload in payloads]
            self._pending.setdefault(place.partition, []).extend(pending)
            self._pending_bytes += sum(map(len, payloads))
        if self._pending_bytes > self._core.limits.transaction_bytes:
            for name in list(self._pending):
                await self._send_topic(name)

    def refer(self, topic: calls.Topic, pointers: Sequence[int], ttl: timedelta | int | str | None = None) -> None:
        """Also publish payloads that were stored under write pointers of the transaction's checkpoints."""
        self._elsewhere.append((topic_id(topic), pointers, None if ttl is None else seconds(ttl)))

    def note(self, topic: TopicId, published: RollbackRange) -> None:
        """Include a publish that the program has sent itself in the rollback."""
        self._by_hand.append((topic, published))

    async def publish(self) -> None:
        """Publish all messages, in the order of each topic; payloads stored by other processes come first.

        Without messages, still register a producer's transaction at the server.
        """
        for topic, pointers, ttl_seconds in self._elsewhere:
            await self._publish_elsewhere(topic, pointers, ttl_seconds)
        while waiting := [*self._stored, *self._pending]:
            topic = waiting[0]
            if topic in self._stored:
                await self._send_topic(topic)
            await self._publish_all(topic, self._pending.pop(topic, []))
        if self._core.home is not None and not self._published:
            # The server knows a producer's transaction only by its requests. A newer instance invalidates the
            # transactions that the server knows; without this request, it would miss this one.
            await self._core.ask(calls.store(self._core.home, [], self._pointer))

    async def roll_back(self) -> None:
        """Roll back the publishes; stored payloads are invisible without a publish.

        Raises:
            MessagingError: some rows may not be rolled back.
        """
        for topic, published in (*self._published, *self._by_hand):
            await self._core.ask(calls.rollback(topic, published))

    async def _send_topic(self, topic: TopicId) -> None:
        """Store the kept messages of a topic; publish them if they have TTLs, or follow a publish."""
        pending = self._pending.pop(topic, [])
        self._pending_bytes -= sum(len(one.payload) for one in pending)
        if topic in self._published_topics or any(one.ttl_seconds is not None for one in pending):
            await self._publish_all(topic, pending)
            return
        for batch, rest in self._batches(pending):
            previous = dict(self._stored)
            self._stored[topic] = None
            try:
                with changing(batch[0].topic, topic):
                    await self._core.ask(calls.store(topic, [one.payload for one in batch], self._pointer))
            except PartitionsChanged as error:
                if topic in previous:
                    # The sealed partition has stored payloads, and rejects the publish that would make them visible.
                    raise
                self._stored = previous
                await self._move([*batch, *rest], error)
                return

    async def _publish_all(self, topic: TopicId, pending: Sequence[_PendingMessage]) -> None:
        """Publish the stored payloads of a topic, then these messages."""
        if topic in self._stored:
            del self._stored[topic]
            await self._publish(topic, [], None)
        self._published_topics.add(topic)
        for batch, rest in self._batches(pending):
            try:
                with changing(batch[0].topic, topic):
                    await self._publish(topic, [one.payload for one in batch], batch[0].ttl_seconds)
            except PartitionsChanged as error:
                await self._move([*batch, *rest], error)
                return

    async def _publish_elsewhere(self, topic: TopicId, pointers: Sequence[int], ttl_seconds: int | None) -> None:
        """Publish payloads that other processes have stored under pointers of checkpoints.

        The first request carries the transaction's own pointer, by which the server knows a producer's transaction. The
        other requests do not name the producer. A newer instance still fences them, because it invalidates the
        transaction.
        """
        self._stored.pop(topic, None)
        self._published_topics.add(topic)
        await self._publish(topic, [], None)
        for pointer in pointers:
            call = replace(calls.publish_in(topic, [], pointer, ttl_seconds), writes=False)
            self._published.append((topic, await self._core.ask(call)))

    async def _publish(self, topic: TopicId, messages: list[bytes], ttl_seconds: int | None) -> None:
        published = await self._core.ask(calls.publish_in(topic, messages, self._pointer, ttl_seconds))
        self._published.append((topic, published))

    async def _move(self, pending: Sequence[_PendingMessage], error: PartitionsChanged) -> None:
        """Keep messages that a sealed partition has rejected, for the open partitions.

        Raises:
            PartitionsChanged: all attempts were used.
        """
        self._moves += 1
        for topic in dict.fromkeys(one.topic for one in pending):
            await read_again(self._core, topic, self._moves, error)
        moved: dict[TopicId, list[_PendingMessage]] = {}
        for one in pending:
            for place in places(self._core, one.topic, one.number):
                moved.setdefault(place.partition, []).append(one._replace(topic=place.topic, number=place.number))
                self._pending_bytes += len(one.payload)
        # Moved messages are older than the messages kept for the new partitions, so they come first.
        self._pending |= {partition: [*found, *self._pending.get(partition, [])] for partition, found in moved.items()}

    def _batches(
        self, pending: Sequence[_PendingMessage]
    ) -> Iterator[tuple[Sequence[_PendingMessage], Sequence[_PendingMessage]]]:
        """Yield requests of about the right size with messages of one TTL, and the remaining messages after each."""
        first, size = 0, 0
        for at, one in enumerate(pending):
            weight = max(len(one.payload), _LEAST_BYTES)
            is_full = size + weight > self._core.limits.request_bytes
            if at > first and (is_full or one.ttl_seconds != pending[first].ttl_seconds):
                yield pending[first:at], pending[at:]
                first, size = at, 0
            size += weight
        if first < len(pending):
            yield pending[first:], ()

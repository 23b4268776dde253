"""The messages of a transaction, kept until it commits.

The outbox publishes them after all participants have written, so that an earlier failure leaves no messages.

Above a size limit, the outbox sends payloads early to the server's payload table (``store``). They stay invisible until
an empty publish refers to them. One such publish per topic is enough: it publishes all payloads that the transaction
has stored in the topic. Payloads with a message TTL cannot be stored. The outbox publishes them early, so readers
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
from tms_core.client.transactions.partitions import Key, detect_change, number_for, places, read_layout, reread_layout
from tms_core.errors import PartitionsChanged
from tms_core.messaging.model import RollbackRange
from tms_core.topic import TopicId

#: The minimum size of a message in the size of a request, because the server also limits the messages of a request.
_MIN_WEIGHT_BYTES = 100


class _PendingMessage(NamedTuple):
    """A message to publish.

    Attributes:
        topic, number: the topic in the program's call, and the number that determines the partition.
    """

    payload: bytes
    ttl_seconds: int | None
    topic: TopicId
    number: int


class Outbox:
    """The messages that one transaction publishes.

    All messages have the same write pointer, the transaction's id, even after a checkpoint.
    """

    def __init__(self, core: Core, pointer: int) -> None:
        self._core = core
        self._pointer = pointer
        #: Messages to publish, by topic or partition.
        self._pending: dict[TopicId, list[_PendingMessage]] = {}
        self._pending_bytes = 0
        self._stored: dict[TopicId, None] = {}
        #: Topics with a publish; payloads stored later would become visible with the payloads stored before it.
        self._published_topics: set[TopicId] = set()
        self._published: list[tuple[TopicId, RollbackRange]] = []
        #: Publishes that the program itself has sent with the transaction's pointers.
        self._external_publishes: list[tuple[TopicId, RollbackRange]] = []
        self._move_attempts = 0
        #: Topics with payloads stored by other processes, their checkpoints' write pointers, and a TTL in seconds.
        self._external_payloads: list[tuple[TopicId, Sequence[int], int | None]] = []

    async def add(
        self,
        topic: calls.Topic,
        messages: Sequence[bytes],
        ttl: timedelta | int | str | None = None,
        key: Key | None = None,
    ) -> None:
        """Keep messages; above the size limit, send all kept messages to the server before the commit."""
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
        self._external_payloads.append((topic_id(topic), pointers, None if ttl is None else seconds(ttl)))

    def note(self, topic: TopicId, published: RollbackRange) -> None:
        """Record a publish that the program itself has sent, for a rollback."""
        self._external_publishes.append((topic, published))

    async def publish(self) -> None:
        """Publish all messages in order per topic, after the payloads stored by other processes.

        A producer's transaction without messages is still registered with the server.
        """
        for topic, pointers, ttl_seconds in self._external_payloads:
            await self._publish_external(topic, pointers, ttl_seconds)
        while waiting := [*self._stored, *self._pending]:
            topic = waiting[0]
            if topic in self._stored:
                await self._send_topic(topic)
            await self._publish_all(topic, self._pending.pop(topic, []))
        if self._core.home is not None and not self._published:
            # The server learns of a producer's transaction only by its requests. A newer instance invalidates the known
            # transactions; without this request, it would miss this transaction.
            await self._core.ask(calls.store(self._core.home, [], self._pointer))

    async def roll_back(self) -> None:
        """Roll back the publishes; stored payloads stay invisible without a publish.

        Raises:
            MessagingError: a rollback failed, so some messages may remain.
        """
        for topic, published in (*self._published, *self._external_publishes):
            await self._core.ask(calls.rollback(topic, published))

    async def _send_topic(self, topic: TopicId) -> None:
        """Store the kept messages of a topic; publish them instead if they have TTLs or follow a publish."""
        pending = self._pending.pop(topic, [])
        self._pending_bytes -= sum(len(message.payload) for message in pending)
        if topic in self._published_topics or any(message.ttl_seconds is not None for message in pending):
            await self._publish_all(topic, pending)
            return
        for batch, rest in self._batches(pending):
            previous = dict(self._stored)
            self._stored[topic] = None
            try:
                with detect_change(batch[0].topic, topic):
                    await self._core.ask(calls.store(topic, [message.payload for message in batch], self._pointer))
            except PartitionsChanged as error:
                if topic in previous:
                    # The sealed partition holds stored payloads, and rejects the publish that would make them visible.
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
                with detect_change(batch[0].topic, topic):
                    await self._publish(topic, [message.payload for message in batch], batch[0].ttl_seconds)
            except PartitionsChanged as error:
                await self._move([*batch, *rest], error)
                return

    async def _publish_external(self, topic: TopicId, pointers: Sequence[int], ttl_seconds: int | None) -> None:
        """Publish payloads that other processes have stored under pointers of checkpoints.

        The first request carries the transaction's pointer, which identifies a producer's transaction to the server.
        The other requests do not name the producer; a newer instance still fences them, because it invalidates the
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
        """Assign messages that a sealed partition has rejected to the open partitions.

        Raises:
            PartitionsChanged: the limit of attempts is reached.
        """
        self._move_attempts += 1
        for topic in dict.fromkeys(message.topic for message in pending):
            await reread_layout(self._core, topic, self._move_attempts, error)
        moved: dict[TopicId, list[_PendingMessage]] = {}
        for message in pending:
            for place in places(self._core, message.topic, message.number):
                moved.setdefault(place.partition, []).append(message._replace(topic=place.topic, number=place.number))
                self._pending_bytes += len(message.payload)
        # Moved messages are older than messages already kept for the new partitions, so they come first.
        self._pending |= {partition: [*found, *self._pending.get(partition, [])] for partition, found in moved.items()}

    def _batches(
        self, pending: Sequence[_PendingMessage]
    ) -> Iterator[tuple[Sequence[_PendingMessage], Sequence[_PendingMessage]]]:
        """Yield batches that have one TTL and fit into a request, each with the messages that remain after it."""
        first, size = 0, 0
        for at, message in enumerate(pending):
            weight = max(len(message.payload), _MIN_WEIGHT_BYTES)
            is_full = size + weight > self._core.limits.request_bytes
            if at > first and (is_full or message.ttl_seconds != pending[first].ttl_seconds):
                yield pending[first:at], pending[at:]
                first, size = at, 0
            size += weight
        if first < len(pending):
            yield pending[first:], ()

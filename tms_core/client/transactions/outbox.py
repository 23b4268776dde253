"""The messages of a transaction, kept until it commits.

They are published last, when all others that take part have done their work, so that a transaction that fails before
leaves nothing. Past a limit payloads go to the server's payload table ahead of that (``store``), where they are not
visible until an empty publish refers to them: one for each topic, since it publishes all that the transaction has
stored there.
Payloads with a ttl of their own are published instead: readers outside transactions see them before it commits.
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
from tms_core.client.protocol.values import Limits
from tms_core.client.transactions.partitions import Key, changing, number_for, places, read_again, read_layout
from tms_core.errors import PartitionsChanged
from tms_core.messaging.model import RollbackRange
from tms_core.topic import TopicId

#: What a message counts towards a request at least, in bytes: a server takes only so many with one, however small.
_LEAST_BYTES = 100


class _Kept(NamedTuple):
    """A message that is to be published.

    Attributes:
        topic, number: the topic that the program named, and what its partition is found by.
    """

    payload: bytes
    ttl_seconds: int | None
    topic: TopicId
    number: int


class Outbox:
    """The messages that one transaction publishes.

    Everything is written with one pointer, the transaction's id, also after a checkpoint: it is visible with the rest.
    """

    def __init__(self, core: Core, pointer: int, limits: Limits) -> None:
        self._core = core
        self._pointer = pointer
        self._limits = limits
        #: By the topics they are published to, which are partitions where a topic has some.
        self._kept: dict[TopicId, list[_Kept]] = {}
        self._kept_bytes = 0
        self._stored: dict[TopicId, None] = {}
        #: Where something is published: what would be stored behind that would be seen with what was stored before.
        self._begun: set[TopicId] = set()
        self._published: list[tuple[TopicId, RollbackRange]] = []
        #: What the program itself has published with the transaction's pointers.
        self._by_hand: list[tuple[TopicId, RollbackRange]] = []
        self._moves = 0
        #: Write pointers of checkpoints, whose payloads other processes have stored, and how long those live.
        self._elsewhere: list[tuple[TopicId, Sequence[int], int | None]] = []

    async def add(
        self,
        topic: calls.Topic,
        messages: Sequence[bytes],
        ttl: timedelta | int | str | None = None,
        key: Key | None = None,
    ) -> None:
        """Take messages; an excess is stored at the server ahead of the commit."""
        name, given = topic_id(topic), payloads_of(messages)
        ttl_seconds = None if ttl is None else seconds(ttl)
        number = number_for(self._core, key)
        if not given:
            return
        if isinstance(number, Mapping) and name not in self._core.layouts:
            await read_layout(self._core, name)
        for place in places(self._core, name, number):
            kept = [_Kept(payload, ttl_seconds, place.topic, place.number) for payload in given]
            self._kept.setdefault(place.partition, []).extend(kept)
            self._kept_bytes += sum(map(len, given))
        if self._kept_bytes > self._limits.transaction_bytes:
            for name in list(self._kept):
                await self._send_ahead(name)

    def refer(self, topic: calls.Topic, pointers: Sequence[int], ttl: timedelta | int | str | None = None) -> None:
        """Also publish payloads that were stored with pointers of the transaction's checkpoints."""
        self._elsewhere.append((topic_id(topic), pointers, None if ttl is None else seconds(ttl)))

    def note(self, topic: TopicId, published: RollbackRange) -> None:
        """Include a publish by another way in the rollback."""
        self._by_hand.append((topic, published))

    async def publish(self) -> None:
        """Publish all; in the order of each topic, payloads stored by others first.

        Where there is nothing to publish, tell a producer's server of the transaction all the same.
        """
        for topic, pointers, ttl_seconds in self._elsewhere:
            await self._publish_elsewhere(topic, pointers, ttl_seconds)
        while waiting := [*self._stored, *self._kept]:
            topic = waiting[0]
            if topic in self._stored:
                await self._send_ahead(topic)
            await self._publish_all(topic, self._kept.pop(topic, []))
        if self._core.home is not None and not self._published:
            # The server knows a producer's transaction by what is sent in it; a newer instance ends those it knows.
            await self._core.ask(calls.store(self._core.home, [], self._pointer))

    async def roll_back(self) -> None:
        """Roll back the publishes; stored payloads are not visible anyway.

        Raises:
            MessagingError: not all of it was rolled back.
        """
        for topic, published in (*self._published, *self._by_hand):
            await self._core.ask(calls.rollback(topic, published))

    async def _send_ahead(self, topic: TopicId) -> None:
        """Store the kept messages of a topic; or publish them if they have TTLs or the stored payloads are already
        published.
        """
        kept = self._kept.pop(topic, [])
        self._kept_bytes -= sum(len(one.payload) for one in kept)
        if topic in self._begun or any(one.ttl_seconds is not None for one in kept):
            await self._publish_all(topic, kept)
            return
        for batch, behind in self._batches(kept):
            former = dict(self._stored)
            self._stored[topic] = None
            try:
                with changing(batch[0].topic, topic):
                    await self._core.ask(calls.store(topic, [one.payload for one in batch], self._pointer))
            except PartitionsChanged as error:
                if topic in former:
                    # What was stored cannot be published any more.
                    raise
                self._stored = former
                await self._move([*batch, *behind], error)
                return

    async def _publish_all(self, topic: TopicId, kept: Sequence[_Kept]) -> None:
        """Publish the stored payloads of a topic, then these messages."""
        if topic in self._stored:
            del self._stored[topic]
            await self._publish(topic, [], None)
        self._begun.add(topic)
        for batch, behind in self._batches(kept):
            try:
                with changing(batch[0].topic, topic):
                    await self._publish(topic, [one.payload for one in batch], batch[0].ttl_seconds)
            except PartitionsChanged as error:
                await self._move([*batch, *behind], error)
                return

    async def _publish_elsewhere(self, topic: TopicId, pointers: Sequence[int], ttl_seconds: int | None) -> None:
        """Publish payloads that were stored with other pointers.

        The first request has the transaction's own: a producer's server knows a transaction by that alone, so the
        others go without the producer. A newer instance fences them all the same: it invalidates the transaction.
        """
        self._stored.pop(topic, None)
        self._begun.add(topic)
        await self._publish(topic, [], None)
        for pointer in pointers:
            call = replace(calls.publish_in(topic, [], pointer, ttl_seconds), writes=False)
            self._published.append((topic, await self._core.ask(call)))

    async def _publish(self, topic: TopicId, messages: list[bytes], ttl_seconds: int | None) -> None:
        published = await self._core.ask(calls.publish_in(topic, messages, self._pointer, ttl_seconds))
        self._published.append((topic, published))

    async def _move(self, kept: Sequence[_Kept], error: PartitionsChanged) -> None:
        """Keep messages that a closed partition rejects for the open ones."""
        self._moves += 1
        for topic in dict.fromkeys(one.topic for one in kept):
            await read_again(self._core, topic, self._moves, error)
        moved: dict[TopicId, list[_Kept]] = {}
        for one in kept:
            for place in places(self._core, one.topic, one.number):
                moved.setdefault(place.partition, []).append(one._replace(topic=place.topic, number=place.number))
                self._kept_bytes += len(one.payload)
        # What was given later may be there already.
        self._kept |= {partition: [*found, *self._kept.get(partition, [])] for partition, found in moved.items()}

    def _batches(self, kept: Sequence[_Kept]) -> Iterator[tuple[Sequence[_Kept], Sequence[_Kept]]]:
        """Yield requests of about the right size with messages of one TTL, and the remaining messages after each."""
        first, size = 0, 0
        for at, one in enumerate(kept):
            weight = max(len(one.payload), _LEAST_BYTES)
            is_full = size + weight > self._limits.request_bytes
            if at > first and (is_full or one.ttl_seconds != kept[first].ttl_seconds):
                yield kept[first:at], kept[at:]
                first, size = at, 0
            size += weight
        if first < len(kept):
            yield kept[first:], ()

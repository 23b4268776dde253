"""The messages of a transaction, kept until it commits.

They are published last, when all others that take part have done their work, so that a transaction that fails before
leaves nothing. Past a limit payloads go to the server's payload table ahead of that (``store``), where they are not
visible until an empty publish refers to them: one for each topic, since it publishes all that the transaction has
stored there.
Payloads with a ttl of their own are published instead: readers outside transactions see them before it commits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from operator import itemgetter

from tms_core.client import calls
from tms_core.client.calls import topic_id
from tms_core.client.core import Core
from tms_core.client.messages import payloads_of, seconds
from tms_core.client.values import Limits
from tms_core.messaging.model import RollbackRange
from tms_core.topic import TopicId

#: What a message counts towards a request at least, in bytes: a server takes only so many with one, however small.
_LEAST_BYTES = 100


class Outbox:
    """The messages that one transaction publishes.

    Everything is written with one pointer, the transaction's id, also after a checkpoint: it is visible with the rest.

    Args:
        core: who publishes.
        pointer: the transaction's id.
        limits: how much is kept, and how much is sent at once.
    """

    def __init__(self, core: Core, pointer: int, limits: Limits) -> None:
        self._core = core
        self._pointer = pointer
        self._limits = limits
        #: Payloads and their ttls.
        self._kept: dict[TopicId, list[tuple[bytes, int | None]]] = {}
        self._kept_bytes = 0
        self._stored: dict[TopicId, None] = {}
        #: Where something is published: what would be stored behind that would be seen with what was stored before.
        self._begun: set[TopicId] = set()
        self._published: list[tuple[TopicId, RollbackRange]] = []
        #: Write pointers of checkpoints, whose payloads other processes have stored.
        self._elsewhere: list[tuple[TopicId, Sequence[int]]] = []

    async def add(self, topic: calls.Topic, messages: Sequence[bytes], ttl: timedelta | int | None = None) -> None:
        """Take messages; what is too much goes to the server ahead."""
        name, given = topic_id(topic), payloads_of(messages)
        ttl_seconds = None if ttl is None else seconds(ttl)
        if not given:
            return
        self._kept.setdefault(name, []).extend((payload, ttl_seconds) for payload in given)
        self._kept_bytes += sum(map(len, given))
        if self._kept_bytes > self._limits.transaction_bytes:
            for name in list(self._kept):
                await self._send_ahead(name)

    def refer(self, topic: calls.Topic, pointers: Sequence[int]) -> None:
        """Have what was stored with pointers of the transaction's checkpoints published, too."""
        self._elsewhere.append((topic_id(topic), pointers))

    async def publish(self) -> None:
        """Publish all; in each topic in the order in which it was given, what others have stored first."""
        for topic, pointers in self._elsewhere:
            await self._publish_elsewhere(topic, pointers)
        for topic in dict.fromkeys([*self._stored, *self._kept]):
            if topic in self._stored:
                await self._send_ahead(topic)
            await self._publish_all(topic, self._kept.pop(topic, []))

    async def roll_back(self) -> None:
        """Take back what was published; what was stored is not visible anyway.

        Raises:
            MessagingError: not all of it was taken back.
        """
        for topic, published in self._published:
            await self._core.ask(calls.rollback(topic, published))

    async def _send_ahead(self, topic: TopicId) -> None:
        """Store what is kept of a topic; or publish it, where it has ttls or what was stored is published already."""
        kept = self._kept.pop(topic, [])
        self._kept_bytes -= sum(len(payload) for payload, _ in kept)
        if topic in self._begun or any(ttl_seconds is not None for _, ttl_seconds in kept):
            await self._publish_all(topic, kept)
            return
        for batch in self._batches([payload for payload, _ in kept]):
            self._stored[topic] = None
            await self._core.ask(calls.store(topic, batch, self._pointer))

    async def _publish_all(self, topic: TopicId, kept: Sequence[tuple[bytes, int | None]]) -> None:
        """Publish what was stored in a topic, and then this."""
        if topic in self._stored:
            del self._stored[topic]
            await self._publish(topic, [], None)
        self._begun.add(topic)
        for ttl_seconds, group in groupby(kept, itemgetter(1)):
            for batch in self._batches([payload for payload, _ in group]):
                await self._publish(topic, batch, ttl_seconds)

    async def _publish_elsewhere(self, topic: TopicId, pointers: Sequence[int]) -> None:
        """Publish what was stored with other pointers.

        The first request has the transaction's own: a producer's server knows a transaction by that alone, so the
        others go without the producer. A newer instance fences them all the same: it invalidates the transaction.
        """
        self._stored.pop(topic, None)
        self._begun.add(topic)
        await self._publish(topic, [], None)
        for pointer in pointers:
            call = replace(calls.publish_in(topic, [], pointer, None), writes=False)
            self._published.append((topic, await self._core.ask(call)))

    async def _publish(self, topic: TopicId, messages: list[bytes], ttl_seconds: int | None) -> None:
        published = await self._core.ask(calls.publish_in(topic, messages, self._pointer, ttl_seconds))
        self._published.append((topic, published))

    def _batches(self, messages: list[bytes]) -> Iterator[list[bytes]]:
        """The messages in requests of about the right size."""
        batch: list[bytes] = []
        size = 0
        for message in messages:
            weight = max(len(message), _LEAST_BYTES)
            if batch and size + weight > self._limits.request_bytes:
                yield batch
                batch, size = [], 0
            batch.append(message)
            size += weight
        if batch:
            yield batch

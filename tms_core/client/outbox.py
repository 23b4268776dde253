"""The messages of a transaction, kept until it commits.

They are published last, when all others that take part have done their work, so that a transaction that fails before
leaves nothing. Past a limit payloads go to the server's payload table ahead of that (``store``), where nobody sees them
until an empty publish refers to them: one for each topic, since it publishes all that the transaction has stored there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tms_core.client import calls
from tms_core.client.calls import topic_id
from tms_core.client.core import Core
from tms_core.client.messages import payloads_of
from tms_core.client.values import Limits
from tms_core.messaging.model import RollbackRange
from tms_core.topic import TopicId

#: What a message counts towards a request at least, in bytes: a server takes only so many with one, however small.
_LEAST_BYTES = 100


class Outbox:
    """What one transaction publishes.

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
        self._kept: dict[TopicId, list[bytes]] = {}
        self._kept_bytes = 0
        self._stored: set[TopicId] = set()
        self._published: list[tuple[TopicId, RollbackRange]] = []

    async def add(self, topic: calls.Topic, messages: Sequence[bytes]) -> None:
        """Take messages; what is too much is stored."""
        name, given = topic_id(topic), payloads_of(messages)
        if not given:
            return
        self._kept.setdefault(name, []).extend(given)
        self._kept_bytes += sum(map(len, given))
        if self._kept_bytes > self._limits.transaction_bytes:
            for name in list(self._kept):
                await self._store(name)

    async def publish(self) -> None:
        """Publish all; in each topic in the order in which it was given."""
        for topic in self._stored:
            await self._store(topic)
            await self._publish(topic, [])
        for topic, messages in self._kept.items():
            for batch in self._batches(messages):
                await self._publish(topic, batch)

    async def roll_back(self) -> None:
        """Take back what was published; what was stored is seen by nobody.

        Raises:
            MessagingError: not all of it was taken back.
        """
        for topic, published in self._published:
            await self._core.ask(calls.rollback(topic, published))

    async def _store(self, topic: TopicId) -> None:
        for batch in self._batches(self._kept.pop(topic, [])):
            self._stored.add(topic)
            await self._core.ask(calls.store(topic, batch, self._pointer))
            self._kept_bytes -= sum(map(len, batch))

    async def _publish(self, topic: TopicId, messages: list[bytes]) -> None:
        published = await self._core.ask(calls.publish_in(topic, messages, self._pointer, None))
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

"""The methods of both clients that send one request, as coroutines and as plain methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from datetime import timedelta
from typing import Self

from tms_core.client.protocol import calls, consumer_calls, producer_calls
from tms_core.client.protocol.calls import Topic
from tms_core.client.protocol.consumer_calls import ConsumerPosition, FailedMessages, OpenClaim
from tms_core.client.protocol.core import Core
from tms_core.client.protocol.producer_calls import ProducerState
from tms_core.client.protocol.wire import waits
from tms_core.client.transactions.transaction import store_in
from tms_core.messaging.model import Ages, RollbackRange
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import Transaction


class _Limited:
    """The common part of both clients."""

    _core: Core

    def within(self, seconds: float) -> Self:
        """Return this client with a time limit for each call: ``client.within(2).publish(…)``.

        The limit includes all attempts and pauses of a call. For a poll, it applies to the first piece of the response.
        Calls of the transaction service keep ``Timeouts.transaction_seconds``. The returned client shares all
        connections, so do not close it.

        Raises:
            ConfigurationError: ``seconds`` is not above 0.
        """
        found = copy(self)
        found._core = self._core.within(seconds)
        return found


class AsyncTopics(_Limited):
    """Methods for topics, for named consumers and producers, and for the rows of a transaction."""

    async def create_topic(
        self, topic: Topic, *, ttl: timedelta | int | str | None = None, properties: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic.

        Args:
            topic: ``namespace:topic``.
            ttl: the TTL of the messages: whole seconds, a timedelta, or text such as ``7d`` or ``1h30m``; None: the
                server's default.
            properties: further properties.

        Raises:
            TopicExists: the topic exists.
            BadRequest: the name or the TTL is invalid.
        """
        await self._core.ask(calls.create_topic(topic, ttl, properties))

    async def update_topic(
        self, topic: Topic, *, ttl: timedelta | int | str | None = None, properties: Mapping[str, str] | None = None
    ) -> None:
        """Replace all properties of a topic; an omitted property returns to its default.

        Raises:
            TopicNotFound: the topic does not exist.
            BadRequest: the TTL is invalid.
        """
        await self._core.ask(calls.update_topic(topic, ttl, properties))

    async def topic(self, topic: Topic) -> TopicMetadata:
        """Return a topic's TTL, its generation and all its properties.

        Raises:
            TopicNotFound: the topic does not exist.
        """
        return await self._core.ask(calls.show_topic(topic))

    async def ages(self, topic: Topic, older_than: timedelta | int | str) -> Ages:
        """Return the number of unexpired messages, and the number that a TTL of ``older_than`` would hide.

        Raises:
            TopicNotFound: the topic does not exist.
            BadRequest: ``older_than`` is not a valid TTL.
        """
        return await self._core.ask(calls.ages(topic, older_than))

    async def ping(self) -> None:
        """Check that the server responds; set the time limit with :meth:`within`.

        Raises:
            Unavailable: the server cannot be reached.
            Unanswered: the server did not respond in time.
        """
        await self._core.ask(calls.ping())

    async def topics(self, namespace: str | None = "default") -> list[TopicId]:
        """Return the topics of a namespace, or of all namespaces (None)."""
        return await self._core.ask(calls.list_topics(namespace))

    async def delete_topic(self, topic: Topic) -> None:
        """Delete a topic and all its messages.

        Raises:
            TopicNotFound: the topic does not exist.
        """
        await self._core.ask(calls.delete_topic(topic))

    async def position(self, topic: Topic, consumer: str) -> MessageId:
        """Return the stored position of a consumer: the last message it has read.

        Raises:
            TopicNotFound, ConsumerNotFound: the topic or the consumer does not exist.
        """
        return await self._core.ask(consumer_calls.position(topic, consumer))

    async def claims(self, topic: Topic, consumer: str) -> list[OpenClaim]:
        """Return the claims of transactions in progress for a consumer.

        Raises:
            TopicNotFound, ConsumerNotFound: the topic or the consumer does not exist.
        """
        return await self._core.ask(consumer_calls.claims(topic, consumer))

    async def failed(self, topic: Topic, consumer: str) -> list[FailedMessages]:
        """Return messages that a consumer group has received but not processed, most deliveries first.

        Raises:
            TopicNotFound, ConsumerNotFound: the topic or the consumer does not exist.
        """
        return await self._core.ask(consumer_calls.failed(topic, consumer))

    async def set_position(self, topic: Topic, consumer: str, position: MessageId, *, force: bool = False) -> None:
        """Set the position of a consumer; register the consumer if it does not exist.

        Args:
            position: the last message that the consumer has read.
            force: set the position even if claims are open, and invalidate their transactions.

        Raises:
            ConsumerConflict: claims are open.
            TopicNotFound: the topic does not exist.
            BadRequest: the name is invalid.
        """
        await self._core.ask(consumer_calls.set_position(topic, consumer, position, force=force))

    async def delete_position(self, topic: Topic, consumer: str, *, force: bool = False) -> None:
        """Delete a consumer.

        Args:
            force: delete the consumer even if claims are open, and invalidate their transactions.

        Raises:
            ConsumerConflict: claims are open.
            TopicNotFound, ConsumerNotFound: the topic or the consumer does not exist.
        """
        await self._core.ask(consumer_calls.delete_position(topic, consumer, force=force))

    async def positions(self, topic: Topic) -> list[ConsumerPosition]:
        """Return the positions and lags of a topic's consumers, in the order of their names."""
        return await self._core.ask(consumer_calls.positions(topic))

    async def producers(self, topic: Topic) -> list[ProducerState]:
        """Return the producers of a topic, in the order of their names."""
        return await self._core.ask(producer_calls.list_producers(topic))

    async def producer_state(self, topic: Topic, name: str) -> ProducerState:
        """Return the state of a producer, without a registration.

        Raises:
            TopicNotFound, ProducerNotFound: the topic or the producer does not exist.
        """
        return await self._core.ask(producer_calls.show(topic, name))

    async def delete_producer(self, topic: Topic, name: str) -> None:
        """Delete a producer; the server fences its instance, and invalidates its open transactions.

        Raises:
            TopicNotFound, ProducerNotFound: the topic or the producer does not exist.
        """
        await self._core.ask(producer_calls.delete(topic, name))

    async def store(self, topic: Topic, messages: Sequence[bytes], *, transaction: Transaction) -> None:
        """Store payloads for an empty :meth:`publish` in the same transaction; raises as :meth:`publish`."""
        await store_in(self._core, topic, messages, transaction)

    async def rollback(self, topic: Topic, published: RollbackRange | int) -> None:
        """Roll back the rows of a publish in a transaction.

        Args:
            topic: the topic of the publish.
            published: the result of the publish; or a write pointer, to roll back all rows with this pointer.

        Raises:
            TopicNotFound: the topic does not exist.
            Unanswered: some rows may not be rolled back; invalidate the transaction.
        """
        await self._core.ask(calls.rollback(topic, published))


class Topics(_Limited):
    """The blocking methods of :class:`AsyncTopics`."""

    create_topic = waits(AsyncTopics.create_topic)
    update_topic = waits(AsyncTopics.update_topic)
    topic = waits(AsyncTopics.topic)
    ages = waits(AsyncTopics.ages)
    ping = waits(AsyncTopics.ping)
    topics = waits(AsyncTopics.topics)
    delete_topic = waits(AsyncTopics.delete_topic)
    position = waits(AsyncTopics.position)
    claims = waits(AsyncTopics.claims)
    failed = waits(AsyncTopics.failed)
    set_position = waits(AsyncTopics.set_position)
    delete_position = waits(AsyncTopics.delete_position)
    positions = waits(AsyncTopics.positions)
    producers = waits(AsyncTopics.producers)
    producer_state = waits(AsyncTopics.producer_state)
    delete_producer = waits(AsyncTopics.delete_producer)
    store = waits(AsyncTopics.store)
    rollback = waits(AsyncTopics.rollback)

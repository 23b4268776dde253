"""Requests about topics, consumers and producers, which are answered at once. Each comes awaited and plain."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from tms_core.client.protocol import calls, consumer_calls, producer_calls
from tms_core.client.protocol.calls import Topic
from tms_core.client.protocol.consumer_calls import ConsumerPosition, FailedMessages, OpenClaim
from tms_core.client.protocol.core import Core
from tms_core.client.protocol.producer_calls import ProducerState
from tms_core.client.protocol.wire import waits
from tms_core.messaging.model import Ages
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId, TopicMetadata


class AsyncTopics:
    """Topics, and the consumers and producers that have a name."""

    _core: Core

    async def create_topic(
        self, topic: Topic, *, ttl: timedelta | int | str | None = None, properties: Mapping[str, str] | None = None
    ) -> None:
        """Make a topic.

        Args:
            topic: ``namespace:topic``.
            ttl: how long its messages live: whole seconds, a timedelta, or text as ``7d`` or ``1h30m``; None: as long
                as the server says.
            properties: any others.

        Raises:
            TopicExists: there is one.
            BadRequest: a name or a ttl is none.
        """
        await self._core.ask(calls.create_topic(topic, ttl, properties))

    async def update_topic(
        self, topic: Topic, *, ttl: timedelta | int | str | None = None, properties: Mapping[str, str] | None = None
    ) -> None:
        """Replace all properties of a topic: an omitted property returns to its default.

        Raises:
            TopicNotFound: there is none.
            BadRequest: a ttl is none.
        """
        await self._core.ask(calls.update_topic(topic, ttl, properties))

    async def topic(self, topic: Topic) -> TopicMetadata:
        """Return a topic's ttl, its generation and all its properties.

        Raises:
            TopicNotFound: there is none.
        """
        return await self._core.ask(calls.show_topic(topic))

    async def ages(self, topic: Topic, older_than: timedelta | int | str) -> Ages:
        """Return how many messages live, and how many of them a ttl of ``older_than`` (whole seconds) would hide.

        Raises:
            TopicNotFound: there is none.
            BadRequest: that is no ttl.
        """
        return await self._core.ask(calls.ages(topic, older_than))

    async def ping(self) -> None:
        """Return when the server answers; :meth:`within` says how soon it has to.

        Raises:
            Unavailable: it cannot be reached.
            Unanswered: it did not answer in time.
        """
        await self._core.ask(calls.ping())

    async def topics(self, namespace: str | None = "default") -> list[TopicId]:
        """Return the topics of a namespace; of all namespaces with None."""
        return await self._core.ask(calls.list_topics(namespace))

    async def delete_topic(self, topic: Topic) -> None:
        """Delete a topic and all its messages.

        Raises:
            TopicNotFound: there is none.
        """
        await self._core.ask(calls.delete_topic(topic))

    async def position(self, topic: Topic, consumer: str) -> MessageId:
        """Return the last message that a consumer has said to have read.

        Raises:
            ConsumerNotFound: there is no such consumer, or no such topic.
        """
        return await self._core.ask(consumer_calls.position(topic, consumer))

    async def claims(self, topic: Topic, consumer: str) -> list[OpenClaim]:
        """What transactions in progress have claimed for a consumer.

        Raises:
            ConsumerNotFound: there is no such consumer, or no such topic.
        """
        return await self._core.ask(consumer_calls.claims(topic, consumer))

    async def failed(self, topic: Topic, consumer: str) -> list[FailedMessages]:
        """Return messages that a consumer group received and did not process, those with the most failures first.

        Raises:
            ConsumerNotFound: there is no such consumer, or no such topic.
        """
        return await self._core.ask(consumer_calls.failed(topic, consumer))

    async def set_position(self, topic: Topic, consumer: str, position: MessageId, *, force: bool = False) -> None:
        """Set up to where a consumer has read; the first time it is registered.

        Args:
            topic, consumer: whose.
            position: the last message it has read.
            force: also where claims are open; their transactions are invalidated.

        Raises:
            ConsumerConflict: claims are open.
            TopicNotFound: there is no such topic.
            BadRequest: that is no name.
        """
        await self._core.ask(consumer_calls.set_position(topic, consumer, position, force=force))

    async def delete_position(self, topic: Topic, consumer: str, *, force: bool = False) -> None:
        """Forget a consumer; with ``force`` also where claims are open, whose transactions are invalidated.

        Raises:
            ConsumerConflict: claims are open.
            ConsumerNotFound: there is no such consumer, or no such topic.
        """
        await self._core.ask(consumer_calls.delete_position(topic, consumer, force=force))

    async def positions(self, topic: Topic) -> list[ConsumerPosition]:
        """Return the consumers of a topic by their names, and how far each is behind. Looking consumes nothing."""
        return await self._core.ask(consumer_calls.positions(topic))

    async def producers(self, topic: Topic) -> list[ProducerState]:
        """Return the producers of a topic by their names."""
        return await self._core.ask(producer_calls.list_producers(topic))

    async def producer_state(self, topic: Topic, name: str) -> ProducerState:
        """Return a producer as the server knows it; it is not registered by this.

        Raises:
            ProducerNotFound: there is no such producer, or no such topic.
        """
        return await self._core.ask(producer_calls.show(topic, name))

    async def delete_producer(self, topic: Topic, name: str) -> None:
        """Forget a producer; the server rejects its instance from then on, and its open transactions are invalidated.

        Raises:
            ProducerNotFound: there is no such producer, or no such topic.
        """
        await self._core.ask(producer_calls.delete(topic, name))


class Topics:
    """The same, without ``await``."""

    _core: Core
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

"""Requests about topics, consumers and producers, which are answered at once. Each comes plain and awaited."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from tms_core.client import calls, consumer_calls, producer_calls
from tms_core.client.calls import Topic
from tms_core.client.consumer_calls import ConsumerPosition, OpenClaim
from tms_core.client.core import Core
from tms_core.client.producer_calls import ProducerState
from tms_core.client.wire import run
from tms_core.messaging.model import Ages
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId, TopicMetadata


class Topics:
    """Topics, and the consumers that have a name."""

    _core: Core

    def create_topic(
        self, topic: Topic, *, ttl: timedelta | int | None = None, properties: Mapping[str, str] | None = None
    ) -> None:
        """Make a topic.

        Args:
            topic: ``namespace:topic``.
            ttl: how long its messages live, in whole seconds; None: as long as the server says.
            properties: any others.

        Raises:
            TopicExists: there is one.
            BadRequest: a name or a ttl is none.
        """
        run(self._core.ask(calls.create_topic(topic, ttl, properties)))

    def update_topic(
        self, topic: Topic, *, ttl: timedelta | int | None = None, properties: Mapping[str, str] | None = None
    ) -> None:
        """Replace all properties of a topic: what is left out is the default again.

        Raises:
            TopicNotFound: there is none.
            BadRequest: a ttl is none.
        """
        run(self._core.ask(calls.update_topic(topic, ttl, properties)))

    def topic(self, topic: Topic) -> TopicMetadata:
        """A topic's ttl, its generation and all its properties.

        Raises:
            TopicNotFound: there is none.
        """
        return run(self._core.ask(calls.show_topic(topic)))

    def ages(self, topic: Topic, older_than: timedelta | int) -> Ages:
        """How many messages live, and how many of them a ttl of ``older_than`` (whole seconds) would hide.

        Raises:
            TopicNotFound: there is none.
            BadRequest: that is no ttl.
        """
        return run(self._core.ask(calls.ages(topic, older_than)))

    def topics(self, namespace: str = "default") -> list[TopicId]:
        """The topics of a namespace."""
        return run(self._core.ask(calls.list_topics(namespace)))

    def delete_topic(self, topic: Topic) -> None:
        """Delete a topic and all its messages.

        Raises:
            TopicNotFound: there is none.
        """
        run(self._core.ask(calls.delete_topic(topic)))

    def position(self, topic: Topic, consumer: str) -> MessageId:
        """The last message that a consumer has said to have read.

        Raises:
            ConsumerNotFound: there is no such consumer, or no such topic.
        """
        return run(self._core.ask(consumer_calls.position(topic, consumer)))

    def claims(self, topic: Topic, consumer: str) -> list[OpenClaim]:
        """What transactions in progress have claimed for a consumer.

        Raises:
            ConsumerNotFound: there is no such consumer, or no such topic.
        """
        return run(self._core.ask(consumer_calls.claims(topic, consumer)))

    def set_position(self, topic: Topic, consumer: str, position: MessageId, *, force: bool = False) -> None:
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
        run(self._core.ask(consumer_calls.set_position(topic, consumer, position, force=force)))

    def delete_position(self, topic: Topic, consumer: str, *, force: bool = False) -> None:
        """Forget a consumer; with ``force`` also where claims are open, whose transactions are invalidated.

        Raises:
            ConsumerConflict: claims are open.
            ConsumerNotFound: there is no such consumer, or no such topic.
        """
        run(self._core.ask(consumer_calls.delete_position(topic, consumer, force=force)))

    def positions(self, topic: Topic) -> list[ConsumerPosition]:
        """The consumers of a topic by their names, and how far each is behind. Looking consumes nothing."""
        return run(self._core.ask(consumer_calls.positions(topic)))

    def producers(self, topic: Topic) -> list[ProducerState]:
        """The producers of a topic by their names."""
        return run(self._core.ask(producer_calls.list_producers(topic)))

    def producer_state(self, topic: Topic, name: str) -> ProducerState:
        """A producer as the server knows it; it is not registered by this.

        Raises:
            ProducerNotFound: there is no such producer, or no such topic.
        """
        return run(self._core.ask(producer_calls.show(topic, name)))

    def delete_producer(self, topic: Topic, name: str) -> None:
        """Forget a producer; its instance is refused from then on, and what it has open is given up.

        Raises:
            ProducerNotFound: there is no such producer, or no such topic.
        """
        run(self._core.ask(producer_calls.delete(topic, name)))


class AsyncTopics:
    """The same, to be awaited."""

    _core: Core

    async def create_topic(
        self, topic: Topic, *, ttl: timedelta | int | None = None, properties: Mapping[str, str] | None = None
    ) -> None:
        """As :meth:`Topics.create_topic`."""
        await self._core.ask(calls.create_topic(topic, ttl, properties))

    async def update_topic(
        self, topic: Topic, *, ttl: timedelta | int | None = None, properties: Mapping[str, str] | None = None
    ) -> None:
        """As :meth:`Topics.update_topic`."""
        await self._core.ask(calls.update_topic(topic, ttl, properties))

    async def topic(self, topic: Topic) -> TopicMetadata:
        """As :meth:`Topics.topic`."""
        return await self._core.ask(calls.show_topic(topic))

    async def ages(self, topic: Topic, older_than: timedelta | int) -> Ages:
        """As :meth:`Topics.ages`."""
        return await self._core.ask(calls.ages(topic, older_than))

    async def topics(self, namespace: str = "default") -> list[TopicId]:
        """As :meth:`Topics.topics`."""
        return await self._core.ask(calls.list_topics(namespace))

    async def delete_topic(self, topic: Topic) -> None:
        """As :meth:`Topics.delete_topic`."""
        await self._core.ask(calls.delete_topic(topic))

    async def position(self, topic: Topic, consumer: str) -> MessageId:
        """As :meth:`Topics.position`."""
        return await self._core.ask(consumer_calls.position(topic, consumer))

    async def claims(self, topic: Topic, consumer: str) -> list[OpenClaim]:
        """As :meth:`Topics.claims`."""
        return await self._core.ask(consumer_calls.claims(topic, consumer))

    async def set_position(self, topic: Topic, consumer: str, position: MessageId, *, force: bool = False) -> None:
        """As :meth:`Topics.set_position`."""
        await self._core.ask(consumer_calls.set_position(topic, consumer, position, force=force))

    async def delete_position(self, topic: Topic, consumer: str, *, force: bool = False) -> None:
        """As :meth:`Topics.delete_position`."""
        await self._core.ask(consumer_calls.delete_position(topic, consumer, force=force))

    async def positions(self, topic: Topic) -> list[ConsumerPosition]:
        """As :meth:`Topics.positions`."""
        return await self._core.ask(consumer_calls.positions(topic))

    async def producers(self, topic: Topic) -> list[ProducerState]:
        """As :meth:`Topics.producers`."""
        return await self._core.ask(producer_calls.list_producers(topic))

    async def producer_state(self, topic: Topic, name: str) -> ProducerState:
        """As :meth:`Topics.producer_state`."""
        return await self._core.ask(producer_calls.show(topic, name))

    async def delete_producer(self, topic: Topic, name: str) -> None:
        """As :meth:`Topics.delete_producer`."""
        await self._core.ask(producer_calls.delete(topic, name))

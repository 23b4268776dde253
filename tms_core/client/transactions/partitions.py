"""Topics with partitions: the partition of a message, and the order in which a member of a group polls partitions.

The core of the client caches the layout of each topic for all publishers and consumers. It reads a layout only after
the server has rejected a message with ``PartitionsChanged``. Therefore a topic without partitions needs no request, and
a change of the number of partitions is noticed when an old partition rejects a message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import count
from typing import NamedTuple, TypeVar

from tms_core.client.protocol import calls
from tms_core.client.protocol.calls import Topic, topic_id
from tms_core.client.protocol.core import Core
from tms_core.client.protocol.values import Retry
from tms_core.client.transactions.participant import ClaimedBatch
from tms_core.errors import BadRequest, PartitionsChanged, TopicNotFound
from tms_core.messaging.topics.partitions import Layout, hash_key, layout_of
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId, no_topic

T = TypeVar("T")

#: The key of messages: one key, or one for each route of the topic.
Key = bytes | str | Mapping[str, bytes | str]
#: The number that determines a partition: one number, or one for each route.
Number = int | Mapping[str, int]

#: The pauses during a change of partitions.
_CHANGING = Retry(first_seconds=0.02, longest_seconds=1, attempts=20)
#: The interval at which the topics of a pattern are listed, in seconds.
_LISTED_SECONDS = 5.0


class Destination(NamedTuple):
    """The destination of a message.

    Attributes:
        topic: the topic that has partitions, or an ordinary topic.
        number: the number that determines the partition.
        partition: the topic that the message is published to.
    """

    topic: TopicId
    number: int
    partition: TopicId


def number_for(core: Core, key: Key | None) -> Number:
    """Return the number that determines the partition of messages; without a key, the partitions are used in turn.

    Raises:
        BadRequest: the key is neither bytes nor text.
    """
    if key is None:
        return next(core.turns)
    if isinstance(key, Mapping):
        return {route: hash_key(one) for route, one in key.items()}
    if not isinstance(key, bytes | str):
        raise BadRequest(f"A key is bytes or text, not {type(key).__name__}.", "Encode it: str(key).encode().")
    return hash_key(key)


def places(core: Core, topic: TopicId, number: Number) -> list[Destination]:
    """Return the destinations of a message according to the cached layout: one, or one for each route.

    Raises:
        BadRequest: the keys are for other routes than those of the topic.
    """
    layout = core.layouts.get(topic)
    if layout is not None and layout.routes:
        if isinstance(number, Mapping) and set(number) != set(layout.routes):
            names = ", ".join(layout.routes)
            raise BadRequest(f"The keys do not match the routes of topic {topic}.", f"Use a key for each of: {names}.")
        by_route = {name: number[name] if isinstance(number, Mapping) else number for name in layout.routes}
        return [place for name in layout.routes for place in places(core, layout.route(name), by_route[name])]
    if isinstance(number, Mapping):
        raise BadRequest(f"Topic {topic} has no routes.", "Use a single key.")
    return [Destination(topic, number, topic if layout is None else layout.place(number))]


async def read_layout(core: Core, topic: TopicId) -> Layout | None:
    """Read the layout of a topic and of its routes from the server, and cache it."""
    metadata = await core.ask(calls.show_topic(topic))
    core.layouts[topic] = layout = layout_of(topic, metadata.properties)
    for route in [] if layout is None else map(layout.route, layout.routes):
        await read_layout(core, route)
    return layout


async def reread_layout(core: Core, topic: TopicId, attempts: int, error: PartitionsChanged) -> None:
    """Read the layout of a topic again, after a pause from the second attempt on.

    Raises:
        PartitionsChanged: all attempts were used.
    """
    if not _CHANGING.again(attempts):
        raise error
    if attempts > 1:
        await core.wire.stop().wait(_CHANGING.pause_seconds(attempts, core.random))
    await read_layout(core, topic)


@contextmanager
def detect_change(topic: TopicId, partition: TopicId) -> Iterator[None]:
    """Treat a missing partition as a change of the topic's partitions.

    Raises:
        PartitionsChanged: the partition does not exist.
    """
    try:
        yield
    except TopicNotFound as error:
        if partition == topic:
            raise
        raise PartitionsChanged(error.message, error.hint) from error


async def send_to_partition(core: Core, topic: TopicId, number: int, send: Callable[[TopicId], Awaitable[T]]) -> T:
    """Publish to the current partition; read the layout again if the partitions have changed.

    Raises:
        MessagingError: the message could not be published.
    """
    for attempts in count(1):
        [place] = places(core, topic, number)
        try:
            with detect_change(topic, place.partition):
                return await send(place.partition)
        except PartitionsChanged as error:
            await reread_layout(core, topic, attempts, error)
            if len(places(core, topic, number)) > 1:
                raise
    raise AssertionError("every retry failed")


def without_key(key: Key | None) -> None:
    """Check that a program that selects the partition itself passes no key.

    Raises:
        BadRequest: the program passes a key.
    """
    if key is not None:
        raise BadRequest(
            "A publish cannot have both transaction and key.", "Use client.transaction(), or publish to a partition."
        )


class Rotation:
    """The topics that a member of a group polls in turn, starting with the last topic that had messages.

    Args:
        topic: a topic, with or without partitions; or a pattern of several topics: ``default:orders-*``.

    Attributes:
        positions: the next possible position of each topic polled since the last messages; None: unknown.
        is_complete: whether all topics have been polled since the last messages.
        has_answer: whether a server has responded in this round.
        retry_seconds: the time until the server delivers failed messages again; None: no failed messages wait.
    """

    def __init__(self, core: Core, topic: Topic) -> None:
        self._core = core
        self._pattern = pattern_of(topic)
        self._tops = [] if self._pattern is not None else [topic_id(topic)]
        self._listed: float | None = None
        self._layouts: dict[TopicId, Layout | None] = {}
        self._wholes: dict[TopicId, TopicId] = {}
        #: Sealed topics that the group has drained, in the order of the responses.
        self._drained: dict[TopicId, None] = {}
        self._stale: set[TopicId] = set()
        self._last: TopicId | None = None
        # Consumers that start together start at different partitions, so that they do not compete for the same claims.
        self._start = core.random.random()
        self._blocked: set[TopicId] = set()
        self.positions: dict[TopicId, MessageId | None] = {}
        self.is_complete = True
        self.has_answer = False
        self.retry_seconds: float | None = None

    async def round(self, most: int | None = None) -> AsyncIterator[TopicId]:
        """Yield the topics to poll, each once; pass each result to :meth:`learn` before the next.

        Args:
            most: the most topics; the next round continues after them. None: all.
        """
        if self.is_complete or most is None:
            self.positions, self.retry_seconds = {}, None
            self._blocked.clear()
        self.is_complete = self.has_answer = False
        await self._list()
        for _ in count() if most is None else range(most):
            topic = await self._next()
            if topic is None:
                break
            self.positions[topic] = None
            yield topic
        self.is_complete = most is None or await self._next() is None
        if self.is_complete and self._drained:
            # No topic has messages. If an operator has set the group back, a drained topic has messages again. Polling
            # one drained topic a round finds that out without a request for each drained topic.
            del self._drained[next(iter(self._drained))]

    def learn(self, topic: TopicId, batch: ClaimedBatch) -> None:
        """Record the response of a topic."""
        whole = self.whole(topic)
        self.has_answer = True
        self.positions[topic] = batch.position
        if batch.retry_seconds is not None:
            self.retry_seconds = min(batch.retry_seconds, self.retry_seconds or batch.retry_seconds)
        if batch.messages:
            self._last, self.is_complete = topic, True
        if batch.drained:
            self._drained[topic] = None
            self.positions.pop(topic)
        if batch.earlier_partition is not None:
            self._blocked.add(whole)
            self._drained.pop(batch.earlier_partition, None)
        is_news = batch.sealed and not self._is_sealed(topic)
        if is_news or (batch.earlier_partition is not None and batch.earlier_partition not in self._wholes):
            self._stale.add(whole)

    def whole(self, topic: TopicId) -> TopicId:
        """Return the topic that a partition belongs to; a topic without known partitions belongs to itself."""
        return self._wholes.get(topic, topic)

    def siblings(self, topic: TopicId) -> list[TopicId]:
        """Return the other partitions of the same topic; a group is registered in all of them together."""
        return [one for one, whole in self._wholes.items() if whole == self.whole(topic) and one != topic]

    def lose(self, topic: TopicId) -> None:
        """Record that a topic was deleted, so that the topics are listed again.

        Raises:
            TopicNotFound: no other topic remains.
        """
        if self._pattern is None and not self._wholes:
            raise no_topic(topic)
        self._drained.clear()
        self._listed = None
        self._stale |= {top for top, layout in self._layouts.items() if layout is not None}

    async def _list(self) -> None:
        now = self._core.monotonic()
        if self._pattern is not None and (self._listed is None or now - self._listed >= _LISTED_SECONDS):
            self._listed = now
            namespace = self._pattern.partition(":")[0]
            found = await self._core.ask(calls.list_topics(namespace))
            self.has_answer = True
            self._tops = [one for one in found if fnmatchcase(str(one), self._pattern)]

    async def _next(self) -> TopicId | None:
        for top in sorted(self._stale):
            try:
                layout = self._layouts[top] = await read_layout(self._core, top)
            except TopicNotFound:
                if self._pattern is None:
                    raise
                self._tops, layout = [one for one in self._tops if one != top], None
            self._wholes |= {} if layout is None else dict.fromkeys([*layout.parts, top], top)
        self._stale.clear()
        order = [one for top in self._tops for one in self._order(top)]
        if len(order) > 1:
            # The order starts with the last topic. Sealed partitions come first, because the group must drain them
            # before their successors.
            at = order.index(self._last) if self._last in order else int(self._start * len(order))
            order = [one for one in order[:at] if self._is_sealed(one)] + order[at:] + order[:at]
        free = (one for one in order if self.whole(one) not in self._blocked or self._is_sealed(one))
        return next((one for one in free if one not in self.positions and one not in self._drained), None)

    def _order(self, top: TopicId) -> list[TopicId]:
        layout = self._layouts.get(top)
        if layout is None:
            return [top]
        return [member for family in layout.families for member in layout.members(family)]

    def _is_sealed(self, topic: TopicId) -> bool:
        """Return whether a topic is sealed, according to the cached layout."""
        whole = self.whole(topic)
        layout = self._layouts.get(whole)
        if layout is None:
            return whole in self._layouts
        sealed = (layout.members(family) for family in layout.families if family.sealed_ms is not None)
        return topic == whole or any(topic in members for members in sealed)


def pattern_of(topic: Topic) -> str | None:
    """Return the pattern of several topics; None: the text names a single topic.

    Raises:
        BadRequest: the pattern does not name exactly one namespace.
    """
    if not isinstance(topic, str) or not any(char in topic for char in "*?["):
        return None
    namespace, colon, _ = topic.partition(":")
    topic_id(f"{namespace}{colon}topics")
    return topic

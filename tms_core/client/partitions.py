"""Topics with partitions: where a message goes.

What is known of a topic is kept in the core of the client, for all that publish and consume with it. It is read when
the server says that messages go elsewhere, so a topic without partitions costs no request, and a change of their number
is noticed with the first message that the old ones refuse.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple, TypeVar

from tms_core.client import calls
from tms_core.client.core import Core
from tms_core.client.values import Retry
from tms_core.errors import BadRequest, PartitionsChanged, TopicNotFound
from tms_core.messaging.partitions import Layout, layout_of, number_of
from tms_core.topic import TopicId

T = TypeVar("T")

#: What messages of a kind have in common: one key, or one for each route of the topic.
Key = bytes | str | Mapping[str, bytes | str]
#: What a partition is found by: one number, or one for each route.
Number = int | Mapping[str, int]

#: Pauses while a change of partitions is under way.
_CHANGING = Retry(first_seconds=0.02, longest_seconds=1, attempts=20)


class Destination(NamedTuple):
    """Where a message goes.

    Attributes:
        topic: the topic that has partitions, or an ordinary one.
        number: what its partition is found by.
        partition: the topic that the message is published to.
    """

    topic: TopicId
    number: int
    partition: TopicId


def number_for(core: Core, key: Key | None) -> Number:
    """What the partition of some messages is found by; without a key partitions have their turn."""
    if key is None:
        return next(core.turns)
    if isinstance(key, Mapping):
        return {route: number_of(one) for route, one in key.items()}
    if not isinstance(key, bytes | str):
        raise BadRequest(f"A key is bytes or text, not {type(key).__name__}.", "Encode it: str(key).encode().")
    return number_of(key)


def places(core: Core, topic: TopicId, number: Number) -> list[Destination]:
    """Where a message goes, as far as is known: a place, or one for each route.

    Raises:
        BadRequest: there is a key for each route, and the topic has others.
    """
    layout = core.layouts.get(topic)
    if layout is not None and layout.routes:
        if isinstance(number, Mapping) and set(number) != set(layout.routes):
            names = ", ".join(layout.routes)
            raise BadRequest(f"Topic {topic} has other routes than keys were given.", f"Give one for each: {names}.")
        by_route = {name: number[name] if isinstance(number, Mapping) else number for name in layout.routes}
        return [place for name in layout.routes for place in places(core, layout.route(name), by_route[name])]
    if isinstance(number, Mapping):
        raise BadRequest(f"Topic {topic} has no routes.", "Give one key.")
    return [Destination(topic, number, topic if layout is None else layout.place(number))]


async def read_layout(core: Core, topic: TopicId) -> Layout | None:
    """Read where a topic's messages are."""
    metadata = await core.ask(calls.show_topic(topic))
    core.layouts[topic] = layout = layout_of(topic, metadata.properties)
    for route in [] if layout is None else map(layout.route, layout.routes):
        await read_layout(core, route)
    return layout


async def read_again(core: Core, topic: TopicId, attempts: int, error: PartitionsChanged) -> None:
    """Read where messages go now, after a pause from the second time on.

    Raises:
        PartitionsChanged: it was tried often enough.
    """
    if not _CHANGING.again(attempts):
        raise error
    if attempts > 1:
        await core.wire.stop().wait(_CHANGING.pause_seconds(attempts, core.random))
    await read_layout(core, topic)


@contextmanager
def changing(topic: TopicId, partition: TopicId) -> Iterator[None]:
    """Take a partition that is not there for one that is there no longer: its topic has others by now.

    Raises:
        PartitionsChanged: it is not there.
    """
    try:
        yield
    except TopicNotFound as error:
        if partition == topic:
            raise
        raise PartitionsChanged(error.message, error.hint) from error


async def to_partition(core: Core, topic: TopicId, number: int, send: Callable[[TopicId], Awaitable[T]]) -> T:
    """Publish to the partition that takes messages now.

    Raises:
        MessagingError: what publishing raises.
    """
    for attempts in count(1):
        [place] = places(core, topic, number)
        try:
            with changing(topic, place.partition):
                return await send(place.partition)
        except PartitionsChanged as error:
            await read_again(core, topic, attempts, error)
            if len(places(core, topic, number)) > 1:
                raise
    raise AssertionError("it was tried again without end")


def without_key(key: Key | None) -> None:
    """See that no key is given where the program says itself what it writes to which topic.

    Raises:
        BadRequest: there is one.
    """
    if key is not None:
        raise BadRequest("With transaction= a key has no effect.", "Use client.transaction(), or name the partition.")

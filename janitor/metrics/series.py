"""The selection of topics and consumers with their own series, and these series.

Each series needs memory in Prometheus. Therefore only the largest topics have separate series, and other topics are
summed up. Sizes change continuously, and a topic that changes sides often would leave gaps in its line and steps in the
sum. Therefore a topic keeps its series until another topic is larger by a quarter. Clients choose the names of
consumers, so only the consumers with the largest lags have separate series.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from prometheus_client.core import Metric, Sample

from janitor.metrics.catalogue import (
    COUNTED,
    LAG,
    LAG_COUNTED,
    MESSAGES,
    NEWEST,
    OLDEST,
    OLDEST_UNREAD,
    POSITION,
    SIZE,
    Definition,
    legible,
    seconds,
)
from janitor.state.figures import ConsumerFigures
from janitor.status.status import TopicFigures

PerTopic = Literal["none", "top"]
#: The name of a topic, or of an object in a topic.
N = TypeVar("N", bound=tuple[str, ...])


class TopicName(NamedTuple):
    """The name of a topic, as in labels."""

    tms_namespace: str
    topic: str


#: The name for all topics without separate series; a topic with this name never has a separate series.
_OTHER = "_other"
OTHER = TopicName(_OTHER, _OTHER)

_SERIES: tuple[tuple[Definition, Callable[[TopicFigures], float | None]], ...] = (
    (MESSAGES, lambda topic: topic.messages),
    (SIZE, lambda topic: topic.size_bytes),
    (COUNTED, lambda topic: seconds(topic.counted_ms)),
    (OLDEST, lambda topic: seconds(topic.oldest_ms)),
    (NEWEST, lambda topic: seconds(topic.newest_ms)),
)


def select_series(sizes: Mapping[N, int | None], before: Collection[N], per_topic: PerTopic, top: int) -> frozenset[N]:
    """Return the names that get separate series.

    Args:
        sizes: sizes by name; None if unknown.
        before: the names that have had separate series.
        top: the number of names with ``top``.
    """
    own = {name: size for name, size in sizes.items() if set(name) != {_OTHER}}
    if per_topic == "none":
        return frozenset()
    return largest({name: size for name, size in own.items() if size is not None}, before, top)


def sizes_of(topics: Iterable[TopicFigures]) -> dict[TopicName, int | None]:
    """Return the sizes of topics by name."""
    return {TopicName(topic.tms_namespace, topic.topic): topic.size_bytes for topic in topics}


def largest(sizes: Mapping[N, int], before: Collection[N], top: int) -> frozenset[N]:
    """Return the largest names; a name in ``before`` stays until a new name is larger by more than a quarter."""
    weighed = ((-(5 if name in before else 4) * size, name not in before, name) for name, size in sizes.items())
    return frozenset(name for *_, name in heapq.nsmallest(top, weighed))


def families(topics: Sequence[TopicFigures], named: Collection[TopicName]) -> list[Metric]:
    """Return the series of the named topics, and of all other topics together."""
    own = [topic for topic in topics if (topic.tms_namespace, topic.topic) in named]
    others = [topic for topic in topics if (topic.tms_namespace, topic.topic) not in named]
    # Share one set of labels between all series of a topic, since there may be very many.
    labelled = [(_labels(topic), topic) for topic in (*own, sum_topics(others))]
    return [_family(definition, value, labelled) for definition, value in _SERIES]


def sum_topics(topics: Collection[TopicFigures]) -> TopicFigures:
    """Sum up topics as one topic, with the oldest count and message and the newest message."""

    def known(value: Callable[[TopicFigures], int | None]) -> list[int]:
        return [found for topic in topics if (found := value(topic)) is not None]

    messages, sizes = known(lambda topic: topic.messages), known(lambda topic: topic.size_bytes)
    return TopicFigures(
        *OTHER,
        generation=0,
        ttl_seconds=0,
        messages=sum(messages) if messages else None,
        size_bytes=sum(sizes) if sizes else None,
        oldest_ms=min(known(lambda topic: topic.oldest_ms), default=None),
        newest_ms=max(known(lambda topic: topic.newest_ms), default=None),
        counted_ms=min(known(lambda topic: topic.counted_ms), default=None),
    )


def _labels(topic: TopicFigures) -> dict[str, str]:
    return {"tms_namespace": legible(topic.tms_namespace), "topic": legible(topic.topic)}


def _family(
    definition: Definition,
    value: Callable[[TopicFigures], float | None],
    labelled: Iterable[tuple[dict[str, str], TopicFigures]],
) -> Metric:
    family = definition.empty()
    family.samples = [
        Sample(definition.name, labels, found) for labels, topic in labelled if (found := value(topic)) is not None
    ]
    return family


# -- consumers ---------------------------------------------------------------------------------------------------------


class ConsumerName(NamedTuple):
    """The name of a consumer, as in labels."""

    tms_namespace: str
    topic: str
    consumer: str


#: The name for all consumers without separate series; a consumer with this name never has a separate series.
OTHER_CONSUMERS = ConsumerName(_OTHER, _OTHER, _OTHER)


def lags_of(consumers: Iterable[ConsumerFigures]) -> dict[ConsumerName, int | None]:
    """Return the lags of consumers plus one, so that consumers without lag keep their series."""
    return {_name(found): found.lag_messages + 1 for found in consumers}


def consumer_families(consumers: Sequence[ConsumerFigures], named: Collection[ConsumerName]) -> list[Metric]:
    """Return the series of the named consumers, and of all other consumers together."""
    own = {_name(found): [found] for found in consumers if _name(found) in named}
    others = [found for found in consumers if _name(found) not in named]
    series = own | ({OTHER_CONSUMERS: others} if others else {})
    return [
        LAG.family({"": {name: sum(found.lag_messages for found in part) for name, part in series.items()}}),
        OLDEST_UNREAD.family(
            {"": {name: _first(found.oldest_unread_ms for found in part) for name, part in series.items()}}
        ),
        POSITION.family(
            {"": {name: _first(found.position_ms or None for found in part) for name, part in series.items()}}
        ),
        LAG_COUNTED.family({"": {name: _first(found.counted_ms for found in part) for name, part in series.items()}}),
    ]


def _name(found: ConsumerFigures) -> ConsumerName:
    return ConsumerName(found.tms_namespace, found.topic, found.consumer)


def _first(moments: Iterable[int | None]) -> float | None:
    """Return the earliest known time in seconds."""
    return seconds(min((moment for moment in moments if moment is not None), default=None))

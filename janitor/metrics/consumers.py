"""How far consumers are behind: which of them get series of their own, and those series.

Their names come from clients, so there may be very many, and a series costs memory in Prometheus for as long as
it is kept. So, as of topics, only the first ones are shown, those that are furthest behind, and the others as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from prometheus_client.core import Metric

from janitor.metrics.catalogue import LAG, LAG_COUNTED, OLDEST_UNREAD, POSITION
from janitor.metrics.gauges import seconds
from janitor.metrics.series import PerTopic, largest
from janitor.status.status import ConsumerFigures


class ConsumerName(NamedTuple):
    """A consumer's name, as labels have it."""

    tms_namespace: str
    topic: str
    consumer: str


#: Under this name stand all consumers that have no series of their own. It can be one's, which is then one of them.
OTHER = ConsumerName("_other", "_other", "_other")


def shown(
    consumers: Iterable[ConsumerFigures], before: Collection[ConsumerName], per_topic: PerTopic, top: int
) -> frozenset[ConsumerName]:
    """The consumers that get series of their own.

    Args:
        before: those that had them so far.
        top: how many, where ``per_topic`` is ``top``.
    """
    # One message more than there are, or nothing would keep those who have read all where they are.
    lags = {_name(found): found.lag_messages + 1 for found in consumers if _name(found) != OTHER}
    if per_topic == "none":
        return frozenset()
    return frozenset(lags) if per_topic == "all" else largest(lags, before, top)


def families(consumers: Sequence[ConsumerFigures], named: Collection[ConsumerName]) -> list[Metric]:
    """The series of the consumers named, and of all others together."""
    own = {_name(found): [found] for found in consumers if _name(found) in named}
    others = [found for found in consumers if _name(found) not in named]
    series = own | ({OTHER: others} if others else {})
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
    """The earliest that is known."""
    return seconds(min((moment for moment in moments if moment is not None), default=None))

"""Metrics of the server for Prometheus (``docs/reference/rest.md``, "Metrics of the server").

The cardinality of the labels (routes, status codes, topics) is bounded. Because clients create topics, only the topics
that are used first have their own series; all other topics share one. When a topic is deleted, the next topic that is
used gets its series.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import add
from threading import Lock

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tms_core.messaging.publish.open_topics import BOUNDS_MS
from tms_core.messaging.service import MessagingService
from tms_core.server.ha.slot_assignment import Slots
from tms_core.topic import TopicId
from tms_core.web.exposition import render

#: The histogram buckets of requests in seconds: from a publish on a fast disk to a publish on a slow disk.
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
#: The histogram buckets of single topics in seconds; fewer, because each topic has all of them.
_TOPIC_BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5)
#: The maximum number of topics with their own series.
MAX_TOPICS = 200
#: The label of all other topics. A topic of this name counts towards it.
_OTHER = TopicId("_other", "_other")


class Tally:
    """A histogram of durations without locks: one thread counts, and any thread reads.

    A metric of the library acquires a lock for each number.

    Args:
        bounds: the upper bounds of all buckets except the last, in seconds.
    """

    __slots__ = ("_bounds", "_counts", "_seconds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._seconds = 0.0

    def note(self, seconds: float) -> None:
        """Count one duration."""
        self._seconds += seconds
        self._counts[bisect_left(self._bounds, seconds)] += 1

    @property
    def count(self) -> int:
        """Return the number of durations."""
        return sum(self._counts)

    def add(self, other: Tally) -> None:
        """Add the durations of another tally."""
        self._seconds += other._seconds
        self._counts = list(map(add, self._counts, other._counts))

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add a series with these durations to a family."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, map(float, accumulate(self._counts)), strict=True)), self._seconds)


class TopicTally:
    """The counts of published and fetched messages of a topic, and the durations of its publishes."""

    __slots__ = ("durations", "fetched", "published")

    def __init__(self) -> None:
        self.published = self.fetched = 0
        self.durations = Tally(_TOPIC_BUCKETS)


class ServerMetrics(Collector):
    """The metrics of requests and messages.

    Attributes:
        redelivered, dead_letters: counters of consumer groups.
    """

    def __init__(self, registry: CollectorRegistry, service: MessagingService) -> None:
        self.registry = registry
        self._service = service
        self._lock, self._dropping = Lock(), Lock()
        self._requests: dict[tuple[str, int], Tally] = {}
        self._all = TopicTally()
        self._topics: dict[TopicId, TopicTally] = {}
        registry.register(_ServiceMetrics(service))
        registry.register(self)
        self.redelivered = Counter(
            "tms_messages_redelivered", "Messages delivered to a consumer group again.", registry=registry
        )
        self.dead_letters = Counter(
            "tms_dead_letters",
            "Messages delivered after their last attempt, to be moved to the dead letter topic.",
            registry=registry,
        )

    def request(self, route: str, code: int, seconds: float) -> None:
        """Count one request; for the event loop's thread."""
        tally = self._requests.get((route, code))
        if tally is None:
            tally = self._requests[route, code] = Tally(BUCKETS)
        tally.note(seconds)

    def published(self, topic: TopicId, messages: int, seconds: float | None = None) -> None:
        """Count messages that were published or stored; for the event loop's thread.

        Args:
            seconds: the duration of the publish; None: the messages were stored.
        """
        self._all.published += messages
        tally = self._topics.get(topic) or self._tally_of(topic)
        tally.published += messages
        if seconds is not None:
            tally.durations.note(seconds)

    def fetched(self, topic: TopicId, messages: int) -> None:
        """Count messages that were sent to a consumer; any thread may call it."""
        tally = self._topics.get(topic) or self._tally_of(topic)
        with self._lock:
            self._all.fetched += messages
            tally.fetched += messages

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all tallies."""
        requests = CounterMetricFamily(
            "tms_requests", "Requests with a response, by route and status code.", labels=["route", "code"]
        )
        durations = HistogramMetricFamily(
            "tms_request_duration_seconds",
            "Duration of requests, from the first byte of the request to the last byte of the response, in seconds.",
            labels=["route"],
        )
        routes: dict[str, Tally] = {}
        for (route, code), tally in list(self._requests.items()):
            requests.add_metric([route, str(code)], tally.count)
            routes.setdefault(route, Tally(BUCKETS)).add(tally)
        for route, tally in routes.items():
            tally.add_to(durations, [route])
        yield from (requests, durations)
        yield CounterMetricFamily("tms_messages_published", "Messages published or stored.", self._all.published)
        yield CounterMetricFamily("tms_messages_fetched", "Messages sent to consumers.", self._all.fetched)
        yield from self._of_topics(["tms_namespace", "topic"])

    def _of_topics(self, labels: Sequence[str]) -> Iterator[Metric]:
        published = CounterMetricFamily(
            "tms_topic_messages_published", "Messages published or stored, by topic.", labels=labels
        )
        fetched = CounterMetricFamily(
            "tms_topic_messages_fetched", "Messages sent to consumers, by topic.", labels=labels
        )
        durations = HistogramMetricFamily(
            "tms_topic_publish_duration_seconds",
            "Duration of publishes, from the complete body to durable messages, by topic, in seconds.",
            labels=labels,
        )
        for topic, tally in list(self._topics.items()):
            names = (topic.namespace, topic.topic)
            published.add_metric(names, tally.published)
            fetched.add_metric(names, tally.fetched)
            tally.durations.add_to(durations, names)
        yield from (published, fetched, durations)

    def _tally_of(self, topic: TopicId) -> TopicTally:
        """Create the tally of a topic; at the limit, return the tally that all other topics share."""
        with self._lock:
            name = topic if len(self._topics.keys() - {_OTHER}) < MAX_TOPICS else _OTHER
            return self._topics.setdefault(name, TopicTally())

    def drop_deleted_topics(self) -> None:
        """Remove the series of deleted topics, including topics that another process has deleted.

        Only one thread at a time does this, and others return immediately: a store that hangs blocks only one thread.

        Raises:
            StoreError: the store failed; the next call removes the remaining series.
        """
        if not self._dropping.acquire(blocking=False):
            return
        try:
            for topic in list(self._topics.keys() - {_OTHER}):
                if not self._service.has_topic(topic):
                    self._drop_topic(topic)
        finally:
            self._dropping.release()

    def _drop_topic(self, topic: TopicId) -> None:
        with self._lock:
            del self._topics[topic]

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in the format of the ``Accept`` header, and their content type."""
        return render(self.registry, accept)


class _ServiceMetrics(Collector):
    """The metrics of the messaging service: queue, cache, and delays of first reads."""

    def __init__(self, service: MessagingService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        cache = self._service.cache.stats
        yield GaugeMetricFamily(
            "tms_publish_queue_size", "Accepted requests that are not durable yet.", self._service.workers.requests
        )
        yield CounterMetricFamily("tms_cache_hits", "Reads served from the message cache.", cache.hits)
        yield CounterMetricFamily("tms_cache_misses", "Reads from the store.", cache.misses)
        yield GaugeMetricFamily("tms_cache_bytes", "Memory of the message cache, in bytes.", cache.weight)
        delays = self._service.first_reads.delays
        bounds = [*(str(bound_ms / 1000) for bound_ms in BOUNDS_MS), "+Inf"]
        yield HistogramMetricFamily(
            "tms_publish_visible_seconds",
            "Delay from the publish of a message to its first poll, for one message per page, in seconds.",
            buckets=list(zip(bounds, map(float, delays.counts), strict=True)),
            sum_value=delays.sum_ms / 1000,
        )


class LeadershipMetrics(Collector):
    """The metrics of a server's leadership."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def collect(self) -> Iterator[Metric]:
        first = self._slots.leaderships[0]
        yield GaugeMetricFamily("tms_server_is_leader", "1 if this server leads slot 0.", int(first.leads))
        yield GaugeMetricFamily("tms_server_slots", "Slots that this server leads.", self._slots.led)
        terms = sum(leadership.fence for leadership in self._slots.leaderships)
        yield GaugeMetricFamily("tms_server_term", "Sum of the newest terms of all slots.", terms)

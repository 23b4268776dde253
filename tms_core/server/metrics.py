"""Metrics of the server for Prometheus (``docs/reference/rest.md``, "Metrics of the server").

The number of label values is bounded: routes, status codes, and topics. Because clients choose the number of topics,
only the first used topics have series; all others share one. A deleted topic leaves its place to the next used topic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from threading import Lock
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from tms_core.messaging.publish.open_topics import BOUNDS_MS
from tms_core.messaging.service import MessagingService
from tms_core.server.ha.slot_assignment import Slots
from tms_core.topic import TopicId

#: From a publish that waits for no other to one that waits for a slow disk, in seconds.
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


#: The same for each topic, where a series more costs more.
_TOPIC_BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5)
#: How many topics have series of their own: the first that are used.
MOST_TOPICS = 200
#: Under this name stand all others. It can be a topic's, which is then one of them.
_OTHER = TopicId("_other", "_other")


class Tally:
    """Plain numbers for a counter and a histogram, which :meth:`hand_over` gives them.

    A metric takes a lock for each number. A tally takes none, and the metrics get its numbers when somebody reads them.
    One thread counts. Another may hand over at the same time, because the numbers only grow.
    """

    __slots__ = ("_counts", "_given", "_seconds")

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0
        self._given = list(self._counts), 0.0

    def note(self, seconds: float) -> None:
        """Count one request by its duration."""
        self._seconds += seconds
        self._counts[bisect_left(BUCKETS, seconds)] += 1

    def hand_over(self, requests: Counter, durations: Histogram) -> None:
        """Add the new numbers to metrics; one thread at a time.

        Args:
            durations: with the buckets of all requests.
        """
        counts, seconds = self._given
        self._given = list(self._counts), self._seconds
        # A histogram has no other way to observe many values at once.
        durations._sum.inc(self._given[1] - seconds)
        for at, before in enumerate(counts):
            new = self._given[0][at] - before
            if new:
                requests.inc(new)
                durations._buckets[at].inc(new)


class TopicMetrics(NamedTuple):
    """The series of one topic."""

    published: Counter
    fetched: Counter
    seconds: Histogram


class ServerMetrics:
    """The server's own metrics."""

    def __init__(self, registry: CollectorRegistry, service: MessagingService) -> None:
        self.registry = registry
        self._service = service
        self._lock, self._looking = Lock(), Lock()
        # The first of all, so that whoever reads the other metrics finds the tallies in them.
        registry.register(_HandOver(self))
        registry.register(_Service(service))
        self._requests = Counter(
            "tms_requests", "Requests answered, by route and status code.", ["route", "code"], registry=registry
        )
        self._seconds = Histogram(
            "tms_request_duration_seconds",
            "From a request's first byte read to its answer's last byte sent.",
            ["route"],
            buckets=BUCKETS,
            registry=registry,
        )
        self._tallies: dict[tuple[str, int], Tally] = {}
        self._published = Counter("tms_messages_published", "Messages published or stored.", registry=registry)
        self._fetched = Counter("tms_messages_fetched", "Messages sent to consumers.", registry=registry)
        labels = ["tms_namespace", "topic"]
        self._by_topic = TopicMetrics(
            Counter("tms_topic_messages_published", "The same by topic.", labels, registry=registry),
            Counter("tms_topic_messages_fetched", "The same by topic.", labels, registry=registry),
            Histogram(
                "tms_topic_publish_duration_seconds",
                "From a publish's body read to its messages on disk, by topic.",
                labels,
                buckets=_TOPIC_BUCKETS,
                registry=registry,
            ),
        )
        self._topics: dict[TopicId, TopicMetrics] = {}
        self.redelivered = Counter(
            "tms_messages_redelivered", "Messages given to a consumer group once more.", registry=registry
        )
        self.dead_letters = Counter(
            "tms_dead_letters", "Messages that were given out more often than they should be.", registry=registry
        )

    def request(self, route: str, code: int, seconds: float) -> None:
        """Count one request."""
        tally = self._tallies.get((route, code))
        if tally is None:
            tally = self._tallies[route, code] = Tally()
        tally.note(seconds)

    def hand_over(self) -> None:
        """Add the new numbers of all tallies to the metrics."""
        with self._lock:
            for (route, code), tally in list(self._tallies.items()):
                tally.hand_over(self._requests.labels(route, code), self._seconds.labels(route))

    def published(self, topic: TopicId, messages: int, seconds: float | None = None) -> None:
        """Count messages that were published or stored.

        Args:
            seconds: how long the publish took; None: they were stored.
        """
        self._published.inc(messages)
        series = self._of(topic)
        series.published.inc(messages)
        if seconds is not None:
            series.seconds.observe(seconds)

    def fetched(self, topic: TopicId, messages: int) -> None:
        """Count messages that were sent to a consumer."""
        self._fetched.inc(messages)
        self._of(topic).fetched.inc(messages)

    def _of(self, topic: TopicId) -> TopicMetrics:
        """Return the series of a topic; after the limit, the series that all other topics share."""
        found = self._topics.get(topic)
        if found is not None:
            return found
        # Not while series are removed: those of this topic could be among them, and would be counted in but not shown.
        with self._lock:
            name = topic if len(self._topics.keys() - {_OTHER}) < MOST_TOPICS else _OTHER
            made, labels = self._by_topic, (name.namespace, name.topic)
            found = self._topics[name] = TopicMetrics(
                made.published.labels(*labels), made.fetched.labels(*labels), made.seconds.labels(*labels)
            )
        return found

    def forget_deleted(self) -> None:
        """Remove the series of deleted topics, including topics that another process has deleted.

        It returns at once while another thread does the same, so that a store that hangs blocks one thread only.

        Raises:
            StoreError: the store failed; the next call removes the remaining series.
        """
        if not self._looking.acquire(blocking=False):
            return
        try:
            for topic in list(self._topics.keys() - {_OTHER}):
                if not self._service.has_topic(topic):
                    self._forget(topic)
        finally:
            self._looking.release()

    def _forget(self, topic: TopicId) -> None:
        with self._lock:
            del self._topics[topic]
            for family in self._by_topic:
                family.remove(topic.namespace, topic.topic)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return everything in the registry, as the ``Accept`` header wants it, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class _HandOver(Collector):
    """Has tallies handed over before other metrics are read."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield nothing: the other collectors have the metrics."""
        self._metrics.hand_over()
        return iter(())


class _Service(Collector):
    """Metrics of the service itself."""

    def __init__(self, service: MessagingService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        cache = self._service.cache.figures
        yield GaugeMetricFamily(
            "tms_publish_queue_size", "Requests accepted and not yet on disk.", self._service.workers.requests
        )
        yield CounterMetricFamily("tms_cache_hits", "Reads that the message cache answered.", cache.hits)
        yield CounterMetricFamily("tms_cache_misses", "Reads that went to the store.", cache.misses)
        yield GaugeMetricFamily("tms_cache_bytes", "Memory that the message cache takes.", cache.weight)
        delays = self._service.first_reads.delays
        bounds = [*(str(bound_ms / 1000) for bound_ms in BOUNDS_MS), "+Inf"]
        yield HistogramMetricFamily(
            "tms_publish_visible_seconds",
            "From a message's publish time to the first poll that read it; one message of each page.",
            buckets=list(zip(bounds, map(float, delays.counts), strict=True)),
            sum_value=delays.sum_ms / 1000,
        )


class LeadershipMetrics(Collector):
    """Who leads of several servers, as this one sees it."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def collect(self) -> Iterator[Metric]:
        first = self._slots.leaderships[0]
        yield GaugeMetricFamily("tms_server_is_leader", "1 in the server that leads slot 0.", int(first.leads))
        yield GaugeMetricFamily("tms_server_slots", "Slots that this server leads.", self._slots.led)
        terms = sum(leadership.fence for leadership in self._slots.leaderships)
        yield GaugeMetricFamily("tms_server_term", "The number of the newest term, of all slots together.", terms)

"""What the server counts, for Prometheus (``docs/rest.md``, "Metrics").

Labels are few and bounded: routes and status codes, never topics, whose number is up to the clients.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from tms_core.messaging.service import MessagingService
from tms_core.messaging.visible import BOUNDS_MS
from tms_core.server.ha.slots import Slots

#: From a publish that waits for no other to one that waits for a slow disk, in seconds.
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class ServerMetrics:
    """The server's own metrics.

    Args:
        registry: where they are registered; all of it is shown by :meth:`text`.
        service: whose queue and cache are read at each scrape.
    """

    def __init__(self, registry: CollectorRegistry, service: MessagingService) -> None:
        self.registry = registry
        registry.register(_Service(service))
        self._requests = Counter(
            "tms_requests", "Requests answered, by route and status code.", ["route", "code"], registry=registry
        )
        self._seconds = Histogram(
            "tms_request_duration_seconds",
            "From a request's first byte read to its answer's last byte sent.",
            ["route"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._known: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self.published = Counter("tms_messages_published", "Messages published or stored.", registry=registry)
        self.fetched = Counter("tms_messages_fetched", "Messages sent to consumers.", registry=registry)

    def request(self, route: str, code: int, seconds: float) -> None:
        """Count one request."""
        known = self._known.get((route, code))
        if known is None:
            # There are few routes and codes, and to look up their metrics by name costs more than to count.
            known = self._known[route, code] = self._requests.labels(route, code), self._seconds.labels(route)
        requests, durations = known
        requests.inc()
        durations.observe(seconds)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Everything in the registry, as the ``Accept`` header wants it, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class _Service(Collector):
    """What the service knows itself."""

    def __init__(self, service: MessagingService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        cache = self._service.cache
        yield GaugeMetricFamily(
            "tms_publish_queue_size", "Requests accepted and not yet on disk.", self._service.queue_size
        )
        yield CounterMetricFamily("tms_cache_hits", "Reads that the message cache answered.", cache.hits)
        yield CounterMetricFamily("tms_cache_misses", "Reads that went to the store.", cache.misses)
        yield GaugeMetricFamily("tms_cache_bytes", "Memory that the message cache takes.", cache.weight)
        delays = self._service.delays
        bounds = [*(str(bound_ms / 1000) for bound_ms in BOUNDS_MS), "+Inf"]
        yield HistogramMetricFamily(
            "tms_publish_visible_seconds",
            "From a message's publish time to the first poll that read it; one message of each page.",
            buckets=list(zip(bounds, map(float, delays.counts), strict=True)),
            sum_value=delays.sum_ms / 1000,
        )


class LeadershipMetrics(Collector):
    """Who leads of several servers, as this one sees it.

    Args:
        slots: know.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def collect(self) -> Iterator[Metric]:
        first = self._slots.leaderships[0]
        yield GaugeMetricFamily("tms_server_is_leader", "1 in the server that leads slot 0.", int(first.leads))
        yield GaugeMetricFamily("tms_server_slots", "Slots that this server leads.", self._slots.led)
        terms = sum(leadership.fence for leadership in self._slots.leaderships)
        yield GaugeMetricFamily("tms_server_term", "The number of the newest term, of all slots together.", terms)

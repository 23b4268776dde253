"""Prepares the metrics and writes them out at a scrape.

All that depends on the status is prepared when the status comes, once, and only written out at a scrape. Until
the first status there are no metrics of the janitor: its counters go on from what the state holds, and a 0 before
that would look to Prometheus like a counter that began anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from janitor.metrics import consumers, counters, gauges
from janitor.metrics import series as topics
from janitor.metrics.series import PerTopic, TopicName
from janitor.status.status import Status

#: The version of OpenMetrics that prometheus-client writes.
OPENMETRICS_VERSION = "1.0.0"

OPENMETRICS, TEXT = "application/openmetrics-text", "text/plain"


class Metrics(Collector):
    """The metrics of one janitor.

    Args:
        per_topic: which topics get series of their own.
        top: how many of them, where that is ``top``.
        registry: what is written out, where others in this process may have registered theirs; one of its own by
            default.
    """

    def __init__(self, per_topic: PerTopic, top: int, registry: CollectorRegistry | None = None) -> None:
        self._per_topic = per_topic
        self._top = top
        self._shown: frozenset[TopicName] = frozenset()
        self._consumers: frozenset[consumers.ConsumerName] = frozenset()
        self._families: tuple[Metric, ...] = ()
        self.registry = registry or CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def update(self, status: Status) -> None:
        """Prepare the metrics of a status; until it is done, scrapes get those of the one before."""
        self._shown = topics.shown(status.topics, self._shown, self._per_topic, self._top)
        self._consumers = consumers.shown(status.consumers, self._consumers, self._per_topic, self._top)
        self._families = (
            *counters.families(status.counters),
            *gauges.families(status),
            *topics.families(status.topics, self._shown),
            *consumers.families(status.consumers, self._consumers),
        )

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """The metrics as text, and its content type.

        Args:
            accept: the request's ``Accept`` header; OpenMetrics when it asks for that.
        """
        # The library's own choice trips over headers it does not expect, so it is not shown what others wrote.
        encode, content_type = choose_encoder(OPENMETRICS if wants_openmetrics(accept or "") else TEXT)
        return encode(self.registry), content_type

    def collect(self) -> Iterable[Metric]:
        """What is prepared; called by the registry."""
        return self._families


def wants_openmetrics(accept: str) -> bool:
    """Whether an ``Accept`` header asks for OpenMetrics, in the version that is written here, rather than for text."""
    asked = {OPENMETRICS: 0.0, TEXT: 0.0}
    for part in accept.lower().replace(" ", "").split(","):
        kind, *rest = part.split(";")
        parameters = {name: value.strip('"') for name, _, value in (text.partition("=") for text in rest)}
        if kind == OPENMETRICS and parameters.get("version", OPENMETRICS_VERSION) != OPENMETRICS_VERSION:
            continue
        if kind in asked:
            asked[kind] = max(asked[kind], _quality(parameters.get("q", "1")))
    return asked[OPENMETRICS] > 0 and asked[OPENMETRICS] >= asked[TEXT]


def _quality(text: str) -> float:
    """A quality as HTTP writes it; 1 for nonsense."""
    return float(text) if re.fullmatch(r"[01](\.[0-9]{0,3})?", text) else 1.0

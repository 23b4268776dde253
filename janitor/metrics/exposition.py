"""Preparation of the metrics, and their output at a scrape.

The values of a status are prepared once, and a scrape only writes them. Before the first status there are no metrics of
the janitor: its counters continue from the state, and a 0 before that would look like a counter reset.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from janitor.metrics import series
from janitor.metrics.catalogue import COUNTERS, DUE, GAUGES, PHASE_DURATION, PREFIX, Definition, Labels, Series, seconds
from janitor.metrics.series import PerTopic, TopicName
from janitor.rules.policy import Hold
from janitor.state.base import CounterKey
from janitor.status.health import Condition, find_problems
from janitor.status.status import Status
from janitor.sweep.transactions import Problem
from tms_core.transaction.model import transaction_ms
from tms_core.web.exposition import render


class Metrics(Collector):
    """The metrics of one janitor.

    Args:
        per_topic: the topics with separate series.
        top: the number of these topics, if ``per_topic`` is ``top``.
        registry: the registry, which may have other metrics of this process; None for a new registry.
    """

    def __init__(self, per_topic: PerTopic, top: int, registry: CollectorRegistry | None = None) -> None:
        self._per_topic = per_topic
        self._top = top
        self._topics: frozenset[TopicName] = frozenset()
        self._consumers: frozenset[series.ConsumerName] = frozenset()
        self._families: tuple[Metric, ...] = ()
        self.registry = registry or CollectorRegistry()
        self.registry.register(self)
        process, platform = ProcessCollector(registry=self.registry), PlatformCollector(registry=self.registry)
        self._collectors = (self, process, platform)

    def close(self) -> None:
        """Remove the metrics from the registry, so that another janitor of this process can add its own."""
        for collector in self._collectors:
            self.registry.unregister(collector)

    def update(self, status: Status) -> None:
        """Prepare the metrics of a status; until then, scrapes get the metrics of the previous status."""
        self._topics = series.select_series(series.sizes_of(status.topics), self._topics, self._per_topic, self._top)
        lags = series.lags_of(status.consumers)
        self._consumers = series.select_series(lags, self._consumers, self._per_topic, self._top)
        self._families = (
            *_counters(status.counters),
            *_gauges(status),
            *series.families(status.topics, self._topics),
            *series.consumer_families(status.consumers, self._consumers),
        )

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """Return the metrics as text, and its content type.

        Args:
            accept: the ``Accept`` header of the request; it may request OpenMetrics.
        """
        return render(self.registry, accept or "")

    def collect(self) -> Iterable[Metric]:
        """Return the prepared metrics; the registry calls this."""
        return self._families


# -- counters: the sums of all runs in the state -----------------------------------------------------------------------


def _counters(counters: Mapping[CounterKey, float]) -> Iterator[Metric]:
    """Yield the counters of the catalogue; skip other counters in the state, which a newer version has written."""
    for definition in COUNTERS:
        yield definition.family({"": _counter_values(definition, "", counters)})
    yield PHASE_DURATION.family(
        {suffix: _counter_values(PHASE_DURATION, suffix, counters) for suffix in ("_count", "_sum")}
    )


def _counter_values(definition: Definition, suffix: str, counters: Mapping[CounterKey, float]) -> dict[Labels, float]:
    """Return a counter's values; known label values without an event are 0."""
    name = definition.name.removeprefix(PREFIX) + suffix
    values = dict.fromkeys(definition.known or (), 0.0)
    for key, value in counters.items():
        pairs = dict(key.labels)
        if key.name == name and pairs.keys() == set(definition.labels):
            labels = tuple(pairs[label] for label in definition.labels)
            values[labels] = values.get(labels, 0.0) + value
    return values


# -- gauges from the status; a gauge without a known value is missing --------------------------------------------------


def _gauges(status: Status) -> Iterator[Metric]:
    """Yield the gauges of the catalogue, except gauges of topics."""
    values = {**_janitor(status), **_rows(status), **_transactions(status), **_statistics(status)}
    for definition in GAUGES:
        yield definition.family({"": values[definition.name.removeprefix(PREFIX)]})


def _janitor(status: Status) -> dict[str, Series]:
    """Return the metrics of the process and its runs."""
    conditions = {reason.condition for reason in find_problems(status)}
    return {
        "attention": {(condition,): condition in conditions for condition in Condition},
        "build_info": {(status.version,): 1},
        "heartbeat_timestamp_seconds": {(): seconds(status.heartbeat_ms)},
        "next_run_timestamp_seconds": {(): seconds(status.next_run_ms)},
        "last_success_timestamp_seconds": {(table,): seconds(at_ms) for table, at_ms in status.last_success_ms.items()},
        "paused": {(): bool(status.paused)},
        "plan_only": {(): status.mode == "plan_only"},
        "is_leader": {(): status.leader},
        "clock_skew_seconds": {(source,): skew for source, skew in status.skew_seconds.items()},
    }


def _rows(status: Status) -> dict[str, Series]:
    """Return the metrics of kept rows and of their topics."""
    overdue = {(item.table, item.rule): item for item in status.overdue}
    holds = Counter(reason for reason, _ in {(item.reason, item.topic) for item in status.held})
    return {
        "overdue_rows": {**dict.fromkeys(DUE, 0), **{due: item.rows for due, item in overdue.items()}},
        "oldest_overdue_timestamp_seconds": {due: seconds(item.oldest_ms) for due, item in overdue.items()},
        "kept_rows": {(reason,): rows for reason, rows in status.kept.items()},
        "held_topics": {(reason,): holds[reason] for reason in {*map(str, Hold), *holds}},
        "quarantined_topics": {(): len(status.quarantined)},
    }


def _transactions(status: Status) -> dict[str, Series]:
    """Return the metrics of transactions; empty without a snapshot."""
    snapshot, bound = status.snapshot, status.boundary.bound
    if snapshot.problem == Problem.NOT_CONFIGURED:
        # The settings have no transaction system any longer, so the last values would only become outdated.
        snapshot, bound = replace(snapshot, timestamp_ms=None), None
    has_snapshot = snapshot.timestamp_ms is not None
    return {
        "snapshot_timestamp_seconds": {(): seconds(snapshot.timestamp_ms)},
        "invalid_transactions": {(): snapshot.invalid if has_snapshot else None},
        "in_progress_transactions": {(): snapshot.in_progress if has_snapshot else None},
        "open_invalid_transactions": {(): snapshot.open},
        "prune_boundary_timestamp_seconds": {(): None if bound is None else seconds(transaction_ms(int(bound)))},
    }


def _statistics(status: Status) -> dict[str, Series]:
    """Return the metrics of the last count of the whole store."""
    found = status.statistics
    total = found.rows + found.payload_rows if found else 0
    overdue = found.overdue if found and total else {}
    return {
        "statistics_timestamp_seconds": {(): seconds(found.counted_ms) if found else None},
        "statistics_overdue_ratio": {(rule,): rows / total for rule, rows in overdue.items()},
        "orphan_payload_rows": {(): found.orphans if found else None},
        "missing_payloads": {(): found.missing if found else None},
        "blocking_transaction_timestamp_seconds": {(): seconds(found.blocking_since_ms) if found else None},
    }

"""What transactions in progress hold up: readers of topics, and messages that consumer groups have claimed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tms_core.clock import Clock
from tms_core.consumers.claim_rows import all_claims
from tms_core.errors import StoreError, TransactionError
from tms_core.tables.side import SideTable
from tms_core.topic import TopicId
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.model import late_transactions, transaction_ms

#: What the alert on readers that wait goes by.
UNDECIDED = "tms_topic_first_undecided_timestamp_seconds"
#: For how long readers wait before a transaction has a series of its own; shorter ones would each leave one behind.
LATE_SECONDS = 30
#: How many pairs of topic and transaction are shown, those that wait longest.
MOST_SERIES = 100


class TransactionMetrics(Collector):
    """Read at each scrape from the transaction manager in this process.

    Args:
        manager: knows what is in progress.
        side: where consumer groups note what they have claimed.
        clock: what time it is.
    """

    def __init__(self, manager: TransactionManager, side: SideTable, clock: Clock) -> None:
        self._manager = manager
        self._side = side
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        manager = self._manager
        undecided = GaugeMetricFamily(
            UNDECIDED,
            "Time of the first message at which readers in transactions wait for a late transaction.",
            labels=["tms_namespace", "topic", "transaction"],
        )
        claims = GaugeMetricFamily("tms_open_claims", "Claims of consumer groups whose transactions are in progress.")
        oldest = GaugeMetricFamily(
            "tms_oldest_open_claim_timestamp_seconds", "When the oldest transaction began that has an open claim."
        )
        if manager.running:
            # One that has just been deposed says nothing.
            with suppress(TransactionError, StoreError):
                self._look(undecided, claims, oldest)
        yield from (undecided, claims, oldest)

    def _look(self, undecided: GaugeMetricFamily, claims: GaugeMetricFamily, oldest: GaugeMetricFamily) -> None:
        manager = self._manager
        before_ms = self._clock.now_ms() - LATE_SECONDS * 1000
        waiting = sorted(
            (publish_ms, topic, late.pointer)
            for late in late_transactions(manager.published(), {}, before_ms)
            for topic, publish_ms in late.topics
        )
        for publish_ms, topic, pointer in waiting[:MOST_SERIES]:
            name = TopicId.parse(topic)
            undecided.add_metric([name.namespace, name.topic, str(pointer)], publish_ms / 1000)
        in_progress = manager.visibility().open_pointers
        opened = [claim.pointer for _, _, claim in all_claims(self._side) if claim.pointer in in_progress]
        claims.add_metric([], len(opened))
        if opened:
            oldest.add_metric([], transaction_ms(min(opened)) / 1000)

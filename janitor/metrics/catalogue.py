"""The definitions of all metrics, and their conversion for prometheus-client.

Dashboards and alerts use the names, so their meaning never changes. A counter with known label values is exported as 0
before its first event; otherwise ``rate()`` would miss the first event, and an alert on it would not fire.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

from prometheus_client.core import Metric, Sample

from janitor.report import COUNTED_REASONS
from janitor.rules.policy import Hold, Rule
from janitor.status.health import Condition
from janitor.sweep.transactions import Problem

#: Label values of one series, in the order of the metric's labels.
Labels = tuple[str, ...]

#: Values by label values; None for a missing series.
Series = Mapping[Labels, float | None]


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric.

    Attributes:
        name: its full name; for a summary without ``_sum`` and ``_count``.
        help: its description in one line.
        labels: the names of its labels.
        known: the label values of all possible series; None if users choose the values.
    """

    name: str
    kind: Literal["counter", "gauge", "summary"]
    help: str
    labels: tuple[str, ...] = ()
    known: tuple[Labels, ...] | None = ((),)

    def family(self, parts: Mapping[str, Series]) -> Metric:
        """Return the metric with its values.

        Args:
            parts: values by the suffix of the name: ``_sum`` and ``_count`` for a summary, else an empty suffix.
        """
        family = self.empty()
        # OpenMetrics requires count and sum of a summary next to each other.
        ordered = dict.fromkeys(labels for series in parts.values() for labels in series)
        family.samples = [
            Sample(self.name + suffix, dict(zip(self.labels, map(legible, labels), strict=True)), value)
            for labels in ordered
            for suffix, series in parts.items()
            if (value := series.get(labels)) is not None
        ]
        return family

    def empty(self) -> Metric:
        """Return the metric without values; prometheus-client names the family of a counter without ``_total``."""
        return Metric(self.name.removesuffix("_total"), self.help, self.kind)


def legible(value: str) -> str:
    """Return a label value that is valid UTF-8; prometheus-client adds the escapes of the text formats."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")


def seconds(moment_ms: int | None) -> float | None:
    """Return a time in seconds, the unit of Prometheus."""
    return None if moment_ms is None else moment_ms / 1000


TABLES = ("message", "payload")

#: ``RunRecord.result`` of finished runs.
RESULTS = ("done", "partial", "blocked", "interrupted", "failed", "lost")

#: The phases of a run whose duration is measured.
PHASES = ("message", "invert", "payload", "sync", "compact")

#: Guards that block a run.
GUARDS = ("clock", "identity", "adoption")

#: The clocks with which wall time is compared (``Status.skew_seconds``).
CLOCKS = ("monotonic",)

#: The reasons why a topic was left undone (``Outcome.failures``).
FAILURES = ("store", "moved")

#: The operations that a store counts (``Store.calls``).
CALLS = ("cells", "compact", "delete", "get", "invert", "keys", "metadata", "put", "rows", "set", "sync")

#: The rules that delete rows.
DELETING = (Rule.EXPIRED, Rule.OLD_GENERATION, Rule.PROCESSED)

PREFIX = "tms_janitor_"


def _counter(name: str, text: str, **labels: Iterable[str]) -> Definition:
    """Return a counter whose labels have every combination of these values."""
    return Definition(f"{PREFIX}{name}_total", "counter", text, tuple(labels), _combinations(*labels.values()))


def _gauge(name: str, text: str, **labels: Iterable[str]) -> Definition:
    """Return a gauge whose labels have every combination of these values."""
    return Definition(f"{PREFIX}{name}", "gauge", text, tuple(labels), _combinations(*labels.values()))


def _combinations(*values: Iterable[str]) -> tuple[Labels, ...]:
    return tuple(product(*(map(str, part) for part in values)))


COUNTERS = (
    _counter("sweeps", "Finished runs, by result.", result=RESULTS),
    _counter("rows_scanned", "Rows read by runs.", table=TABLES),
    _counter("rows_deleted", "Rows deleted.", table=TABLES, rule=DELETING),
    _counter("bytes_deleted", "Bytes of deleted rows; estimated for values.", table=TABLES, rule=DELETING),
    _counter("rows_inverted", "Inverted message rows of invalid transactions."),
    _counter("delete_errors", "Topics that a run did not finish, by cause.", table=TABLES, reason=FAILURES),
    _counter("store_calls", "Operations of runs on the store.", call=CALLS),
    _counter("snapshot_errors", "Runs without a usable transaction snapshot.", reason=Problem),
    _counter("guard_trips", "Runs that a guard stopped.", guard=GUARDS),
)

PHASE_DURATION = Definition(
    f"{PREFIX}sweep_phase_duration_seconds",
    "summary",
    "Duration of the phases of runs, in seconds.",
    ("phase",),
    _combinations(PHASES),
)

#: The kinds of due rows: rows to delete, and rows whose pointer is to be inverted.
DUE = (*_combinations(TABLES, DELETING), ("message", str(Rule.INVALID_TRANSACTION)))

GAUGES = (
    Definition(f"{PREFIX}build_info", "gauge", "The running version, as a label; always 1.", ("version",), None),
    _gauge("heartbeat_timestamp_seconds", "Time of the last heartbeat of the daemon, or of the last run."),
    _gauge("next_run_timestamp_seconds", "Time of the next run."),
    _gauge("last_success_timestamp_seconds", "Time of the last run that completed all its work.", table=TABLES),
    Definition(
        f"{PREFIX}overdue_rows", "gauge", "Rows that are due but not deleted or inverted.", ("table", "rule"), DUE
    ),
    Definition(
        f"{PREFIX}oldest_overdue_timestamp_seconds", "gauge", "Time of the oldest overdue row.", ("table", "rule"), DUE
    ),
    _gauge("kept_rows", "Rows that a run kept although they are not live, by reason.", reason=COUNTED_REASONS),
    _gauge("attention", "1 if janitor status asks an operator to check this condition.", condition=Condition),
    _gauge("held_topics", "Topics with held deletions.", reason=Hold),
    _gauge("quarantined_topics", "Topics in quarantine after repeated failures."),
    _gauge("paused", "1 if at least one topic is paused."),
    _gauge("plan_only", "1 if janitor.apply is false, so that nothing is deleted."),
    _gauge("is_leader", "1 in the process that holds the lease."),
    _gauge("snapshot_timestamp_seconds", "Time of the transaction snapshot."),
    _gauge("invalid_transactions", "Transactions in the snapshot's invalid list."),
    _gauge("open_invalid_transactions", "Invalid transactions that may still write, or wait for a full pass."),
    _gauge("in_progress_transactions", "Transactions in progress in the snapshot."),
    _gauge("prune_boundary_timestamp_seconds", "Start time up to which no transaction has rows left to invert."),
    _gauge("clock_skew_seconds", "Wall clock minus the reference clock, in seconds.", source=CLOCKS),
    _gauge("statistics_timestamp_seconds", "Time of the last count of the whole store on Spark."),
    _gauge("statistics_overdue_ratio", "Overdue rows divided by all rows, in that count.", rule=DELETING[:2]),
    _gauge("orphan_payload_rows", "Payload rows without a message that refers to them, in that count."),
    _gauge("missing_payloads", "References to payloads without a row, in that count."),
    _gauge(
        "blocking_transaction_timestamp_seconds",
        "Start of the undecided transaction that has blocked readers for longest.",
    ),
)


def _of_topic(name: str, text: str) -> Definition:
    """Return a gauge with a series for each topic."""
    return Definition(f"tms_topic_{name}", "gauge", text, ("tms_namespace", "topic"), None)


MESSAGES = _of_topic("messages", "Messages in the topic.")
SIZE = _of_topic("bytes", "Bytes of the topic's keys and payloads.")
COUNTED = _of_topic("stats_timestamp_seconds", "Time of the count of messages and bytes.")
OLDEST = _of_topic("oldest_message_timestamp_seconds", "Publish time of the oldest message.")
NEWEST = _of_topic("newest_message_timestamp_seconds", "Publish time of the newest message.")
TOPICS = (MESSAGES, SIZE, COUNTED, OLDEST, NEWEST)


def _of_consumer(name: str, text: str) -> Definition:
    """Return a gauge with a series for each consumer of each topic."""
    return Definition(f"tms_consumer_{name}", "gauge", text, ("tms_namespace", "topic", "consumer"), None)


LAG = _of_consumer("lag_messages", "Unread messages of the consumer.")
OLDEST_UNREAD = _of_consumer("oldest_unread_timestamp_seconds", "Publish time of the consumer's oldest unread message.")
POSITION = _of_consumer("position_timestamp_seconds", "Publish time of the last message that the consumer has read.")
LAG_COUNTED = _of_consumer("stats_timestamp_seconds", "Time of the count of unread messages.")
CONSUMERS = (LAG, OLDEST_UNREAD, POSITION, LAG_COUNTED)

CATALOGUE = (*COUNTERS, PHASE_DURATION, *GAUGES, *TOPICS, *CONSUMERS)

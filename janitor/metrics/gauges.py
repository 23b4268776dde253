"""Gauges: what the status shows of the janitor itself.

A value that is not known is a series that is not there: a 0 would look like a fact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric

from janitor.law.policy import Hold
from janitor.metrics.catalogue import DUE, GAUGES, PREFIX
from janitor.metrics.definition import Series
from janitor.status.status import Status
from tms_core.transaction.model import transaction_ms


def families(status: Status) -> Iterator[Metric]:
    """Every gauge of the catalogue that is not a topic's."""
    values = {**_janitor(status), **_rows(status), **_transactions(status), **_statistics(status)}
    for definition in GAUGES:
        yield definition.family({"": values[definition.name.removeprefix(PREFIX)]})


def seconds(moment_ms: int | None) -> float | None:
    """A moment as Prometheus has it."""
    return None if moment_ms is None else moment_ms / 1000


def _janitor(status: Status) -> dict[str, Series]:
    """Figures of the process and its runs."""
    return {
        "build_info": {(status.version,): 1},
        "heartbeat_timestamp_seconds": {(): seconds(status.heartbeat_ms)},
        "next_run_timestamp_seconds": {(): seconds(status.next_run_ms)},
        "last_success_timestamp_seconds": {(table,): seconds(at_ms) for table, at_ms in status.last_success_ms.items()},
        "paused": {(): bool(status.paused)},
        "plan_only": {(): status.mode == "plan_only"},
        "is_leader": {(): status.leader},
        "clock_skew_seconds": {(source,): ahead for source, ahead in status.skew_seconds.items()},
    }


def _rows(status: Status) -> dict[str, Series]:
    """Figures of rows that stay, and of topics that have them."""
    overdue = {(item.table, item.rule): item for item in status.overdue}
    held = Counter(reason for reason, _ in {(item.reason, item.topic) for item in status.held})
    return {
        "overdue_rows": {**dict.fromkeys(DUE, 0), **{due: item.rows for due, item in overdue.items()}},
        "oldest_overdue_timestamp_seconds": {due: seconds(item.oldest_ms) for due, item in overdue.items()},
        "kept_rows": {(reason,): rows for reason, rows in status.kept.items()},
        "held_topics": {(reason,): held[reason] for reason in {*map(str, Hold), *held}},
        "quarantined_topics": {(): len(status.quarantined)},
    }


def _transactions(status: Status) -> dict[str, Series]:
    """Figures of transactions; none of a snapshot that is not there."""
    snapshot, bound = status.snapshot, status.boundary.bound
    there = snapshot.timestamp_ms is not None
    return {
        "snapshot_timestamp_seconds": {(): seconds(snapshot.timestamp_ms)},
        "invalid_transactions": {(): snapshot.invalid if there else None},
        "in_progress_transactions": {(): snapshot.in_progress if there else None},
        "open_invalid_transactions": {(): snapshot.open},
        "prune_boundary_timestamp_seconds": {(): None if bound is None else seconds(transaction_ms(int(bound)))},
    }


def _statistics(status: Status) -> dict[str, Series]:
    """What was found when the whole store was counted."""
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

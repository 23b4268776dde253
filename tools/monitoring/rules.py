"""The alerts and their conditions.

Each alert is one expression over the metrics of ``docs/reference/metrics.md`` and ``docs/reference/rest.md``. Names in
braces differ between sites: ``${scope}`` selects the janitors, ``${servers}`` the janitors and servers, and the others
are the thresholds below. A daemon that sweeps every minute and a nightly CronJob differ only in thresholds.

Alerts identify a release (a namespace and a job), never a pod, which may no longer exist when an operator looks.

Severities: ``critical`` should wake an operator, because rows may be lost, or deletion has stopped. ``warning`` can
wait until the morning. ``info`` needs no notification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Template
from typing import Any, Literal

from janitor.status.health import Condition

#: The default selector of janitors: the usual name of their scrape job.
SCOPE = 'job="tms-janitor"'
#: The default selector of janitors and of servers, which may have a janitor inside.
SERVERS = 'job=~"tms-janitor(-server)?"'

Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """A threshold of the alerts that a site may change.

    Attributes:
        name: its name in values files.
        daemon: the value for a daemon that sweeps every minute.
        cronjob: the value for runs that another program starts at least once a day.
        meaning: the quantity with its unit.
    """

    name: str
    daemon: int
    cronjob: int
    meaning: str


THRESHOLDS = (
    Threshold("downSeconds", 600, 93_600, "seconds without a sign of life before a janitor counts as down"),
    Threshold("absentSeconds", 600, 600, "seconds without a scrape of any janitor, for example during a pod change"),
    Threshold("newSeconds", 0, 93_600, "seconds from the end of plan-only mode until the first run"),
    Threshold("successSeconds", 3_600, 93_600, "seconds without a successful run"),
    Threshold("windowSeconds", 3_600, 93_600, "seconds over which guards and errors are counted"),
    Threshold("overdueSeconds", 21_600, 43_200, "seconds of the last day in which due rows may stay"),
    Threshold("invalidGrowth", 1_000, 1_000, "transactions by which the invalid list may grow in a day"),
    Threshold("invalidIds", 200_000, 200_000, "transactions that the invalid list may contain"),
    Threshold("repeats", 3, 0, "errors with the same table and reason within windowSeconds that need no alert"),
    Threshold("skewSeconds", 60, 60, "seconds by which two clocks may differ"),
    Threshold("pausedSeconds", 86_400, 86_400, "seconds for which topics may be paused"),
    Threshold("planOnlySeconds", 604_800, 604_800, "seconds for which a janitor may only plan"),
    Threshold("growthBytes", 1 << 30, 1 << 30, "bytes by which a topic may grow in a day, if it more than doubles"),
    Threshold("lagMessages", 10_000, 10_000, "messages by which a consumer may lag"),
    Threshold("lagSeconds", 3_600, 3_600, "age of the oldest unread message of a lagging consumer, in seconds"),
    Threshold("undecidedSeconds", 300, 300, "seconds that readers may wait for an open transaction"),
    Threshold("unauthorized", 100, 100, "requests without a valid token in five minutes"),
    Threshold("forSeconds", 300, 300, "seconds for which the condition of most alerts must hold"),
)


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert.

    Attributes:
        name: the name in Prometheus, and of the section in ``docs/operate/alerts.md``.
        wait: how long the expression must hold: a threshold's name, or ``now``.
        summary: one line with Prometheus' placeholders, for a screen or a telephone.
        meaning: the consequence for the store, or the usual causes.
    """

    name: str
    severity: Severity
    expression: str
    wait: str
    summary: str
    meaning: str


def _any_pod(metric: str, labels: str = "") -> str:
    """Return an expression: a gauge of a janitor from any of its pods; between two pods, the last value."""
    by, series = "max by (namespace, job)", f"{metric}{{{labels}${{scope}}}}"
    return f"({by} ({series}) or {by} (last_over_time({series}[1h])))"


def _has_condition(*conditions: Condition) -> str:
    """Return an expression: whether ``janitor status`` reports one of these conditions."""
    alternatives = "|".join(conditions)
    condition = f'condition="{conditions[0]}",' if len(conditions) == 1 else f'condition=~"{alternatives}",'
    return _any_pod("tms_janitor_attention", condition) + " == 1"


_TRIPS, _BY_GUARD = "tms_janitor_guard_trips_total{${scope}}", "max by (namespace, job, guard)"
#: Whether due rows stay, 1 or 0. Rows that wait for an adoption or, as configured, for a consumer do not count.
_OVERDUE = (
    "((sum by (namespace, job) (tms_janitor_overdue_rows{${scope}})"
    " unless max by (namespace, job) (tms_janitor_plan_only{${scope}}) == 1"
    ' unless sum by (namespace, job) (tms_janitor_held_topics{reason!~"consumer|protected",${scope}}) == 0) > bool 0)'
)

_OF_CONSUMER = "max by (namespace, job, tms_namespace, topic, consumer)"

ALERTS = (
    Alert(
        "TmsJanitorDown",
        "critical",
        # Prometheus rejects an offset of 0, so it is a minute. Single runs that only plan send no heartbeat; a daemon
        # does, and only a daemon knows its next run.
        "absent_over_time(tms_janitor_heartbeat_timestamp_seconds{${scope}}[${absentSeconds}s])"
        " unless on () max(tms_janitor_plan_only{${scope}}) == 1"
        " unless on () (max(tms_janitor_plan_only{${scope}})"
        " unless on () max(max_over_time(tms_janitor_plan_only{${scope}}[1h] offset 1m${newSeconds}s)) == 0)"
        " or time() - max by (namespace, job) (tms_janitor_heartbeat_timestamp_seconds{${scope}}) > ${downSeconds}"
        " unless on (namespace, job) (max by (namespace, job) (tms_janitor_plan_only{${scope}}) == 1"
        " unless on (namespace, job) max by (namespace, job) (tms_janitor_next_run_timestamp_seconds{${scope}}))",
        "forSeconds",
        "The janitor sends no heartbeat; nothing is deleted",
        "No janitor is scraped, the daemon hangs, or no run starts. Expired rows are not deleted, and the disk fills.",
    ),
    Alert(
        "TmsJanitorNotKeepingUp",
        "warning",
        "time() - max by (namespace, job, table) (tms_janitor_last_success_timestamp_seconds{${scope}})"
        " > ${successSeconds}"
        " or ${successSeconds} + (max by (namespace, job)"
        " (max_over_time(tms_janitor_plan_only{${scope}}[1h] offset 1m${successSeconds}s)) == 0)"
        " and max by (namespace, job) (tms_janitor_plan_only{${scope}}) == 0"
        " unless on (namespace, job) tms_janitor_last_success_timestamp_seconds{${scope}}",
        "forSeconds",
        "No run has completed for {{ $value | humanizeDuration }}",
        "Runs fail, are too slow, or do not start. Expired rows are deleted late or not at all.",
    ),
    Alert(
        "TmsOverdueBudgetBurn",
        "warning",
        f"sum_over_time({_OVERDUE}[1d:5m]) * 300 > ${{overdueSeconds}} and sum_over_time({_OVERDUE}[1h:5m]) > 6",
        "forSeconds",
        "Rows were overdue for {{ $value | humanizeDuration }} of the last day",
        "Topics are held, paused or quarantined, and the disk fills. An hour a day is normal.",
    ),
    Alert(
        "TmsSnapshotStale",
        "warning",
        _has_condition(Condition.SNAPSHOT_UNUSABLE),
        "forSeconds",
        "No usable transaction snapshot: no rows are inverted, and no boundary is published",
        "The transaction service writes no snapshots, or writes them to another place. Expired rows are still deleted.",
    ),
    Alert(
        "TmsInvalidListGrowing",
        "warning",
        "max by (namespace, job) (tms_janitor_invalid_transactions{${scope}})"
        " - max by (namespace, job) (tms_janitor_invalid_transactions{${scope}} offset 1d) > ${invalidGrowth}",
        "forSeconds",
        "The invalid list has grown by {{ $value }} transactions in a day",
        "Transactions time out, or the list is not truncated. Every snapshot and every client has the whole list.",
    ),
    Alert(
        "TmsInvalidListLarge",
        "warning",
        "max by (namespace, job) (tms_janitor_invalid_transactions{${scope}}) > ${invalidIds}",
        "forSeconds",
        "The invalid list has {{ $value }} transactions",
        "Every transaction carries the whole list: 8 bytes for each id at its start, 11 in each poll.",
    ),
    Alert(
        "TmsBoundaryStuck",
        "warning",
        _has_condition(Condition.BOUNDARY_STUCK, Condition.BOUNDARY_REFUTED),
        "forSeconds",
        "The prune boundary does not move",
        "The boundary is four days old, or was refuted. A topic is paused or quarantined, or a transaction is open.",
    ),
    Alert(
        "TmsGuardTripped",
        "critical",
        # Compare the last minute in which the counter rose with the last success. The subquery over 10 minutes bridges
        # the gap between two pods.
        f"max_over_time((({_BY_GUARD} ({_TRIPS}) > {_BY_GUARD} (last_over_time({_TRIPS}[10m] offset 1m))) * 0 + time())"
        "[${windowSeconds}s:1m])"
        " > on (namespace, job) group_left ()"
        " (max by (namespace, job) (tms_janitor_last_success_timestamp_seconds{${scope}})"
        f" or 0 * max by (namespace, job) ({_TRIPS}))",
        # An operator who sets janitor.apply adopts the store shortly after, so wait before this alert fires.
        "forSeconds",
        "The {{ $labels.guard }} guard stopped a run; nothing is deleted",
        "The clock jumped, the store or its transaction system has changed, or the store is not adopted.",
    ),
    Alert(
        "TmsTopicQuarantined",
        "warning",
        "max by (namespace, job) (tms_janitor_quarantined_topics{${scope}}) > 0",
        "forSeconds",
        "{{ $value }} topics are quarantined after three failures in a row",
        "Runs clean all other topics. The prune boundary does not move until these topics succeed.",
    ),
    Alert(
        "TmsPausedTooLong",
        "warning",
        _any_pod("tms_janitor_paused") + " > 0",
        "pausedSeconds",
        "Topics are paused for a long time; their rows are not deleted",
        "The pause was probably forgotten: janitor resume",
    ),
    Alert(
        "TmsPlanOnlyLeftOn",
        "info",
        _any_pod("tms_janitor_plan_only") + " > 0",
        "planOnlySeconds",
        "The janitor only plans; nothing is deleted",
        "janitor.apply is still false after the installation.",
    ),
    Alert(
        "TmsDeleteErrors",
        "warning",
        "sum by (namespace, job, table, reason)"
        " (increase(tms_janitor_delete_errors_total{${scope}}[${windowSeconds}s])) > ${repeats}",
        "forSeconds",
        "Runs fail on topics repeatedly ({{ $labels.table }}, {{ $labels.reason }})",
        "The store fails, or a topic's metadata keeps changing.",
    ),
    Alert(
        "TmsClockSkew",
        "warning",
        # If a janitor's clock is ahead of Prometheus' clock, the alerts on old timestamps fire too late.
        "max by (namespace, job, source) (abs(tms_janitor_clock_skew_seconds{${scope}})) > ${skewSeconds}"
        " or label_replace(max by (namespace, job) (tms_janitor_heartbeat_timestamp_seconds{${scope}}) - time()"
        ' > ${skewSeconds}, "source", "prometheus", "", "")',
        "forSeconds",
        "The wall clock differs by {{ $value }} s ({{ $labels.source }})",
        "Correct the clocks: above janitor.clock_allowance_seconds the clock guard stops all runs.",
    ),
    Alert(
        "TmsMessagesAhead",
        "warning",
        _has_condition(Condition.MESSAGES_AHEAD),
        "forSeconds",
        "Messages have future timestamps; janitor status names their topics",
        "A server's clock was ahead. Later messages of these topics also get future timestamps, so they stay longer"
        " than their ttl.",
    ),
    Alert(
        "TmsTopicGrowing",
        "warning",
        "max by (namespace, job, tms_namespace, topic) (tms_topic_bytes{${scope}})"
        " - max by (namespace, job, tms_namespace, topic) (tms_topic_bytes{${scope}} offset 1d) > ${growthBytes}"
        " and max by (namespace, job, tms_namespace, topic) (tms_topic_bytes{${scope}})"
        " > 2 * max by (namespace, job, tms_namespace, topic) (tms_topic_bytes{${scope}} offset 1d)",
        "forSeconds",
        "{{ $labels.tms_namespace }}:{{ $labels.topic }} has grown by {{ $value | humanize1024 }}B in a day",
        "A publisher sends more than usual, or the ttl is too long. The janitor deletes only expired messages.",
    ),
    Alert(
        "TmsConsumerLagging",
        "warning",
        f"{_OF_CONSUMER} (tms_consumer_lag_messages{{${{scope}}}}) > ${{lagMessages}} and"
        f" time() - {_OF_CONSUMER} (tms_consumer_oldest_unread_timestamp_seconds{{${{scope}}}}) > ${{lagSeconds}}",
        "forSeconds",
        "Consumer {{ $labels.consumer }} of {{ $labels.tms_namespace }}:{{ $labels.topic }} lags {{ $value }} messages",
        "The consumer has stopped or is too slow. It loses messages that expire before it reads them.",
    ),
    Alert(
        "TmsReadersBlocked",
        "warning",
        "time() - min by (namespace, job, tms_namespace, topic)"
        " (tms_topic_first_undecided_timestamp_seconds{${servers}}) > ${undecidedSeconds}",
        "forSeconds",
        "Readers of {{ $labels.tms_namespace }}:{{ $labels.topic }} have waited {{ $value | humanizeDuration }} for"
        " an open transaction",
        "Readers in transactions continue after it ends. tms tx list shows the transaction, its client and the"
        " blocked topics. tms tx invalidate ID ends the transaction and hides its messages.",
    ),
    Alert(
        "TmsUnauthorizedRequests",
        "warning",
        'sum by (namespace, job) (increase(tms_requests_total{code="401",${servers}}[5m])) > ${unauthorized}',
        "now",
        "{{ $value | humanize }} requests without a valid token in five minutes",
        "A client has an old token, or an attacker guesses tokens. The audit log has the client's address.",
    ),
)


def thresholds(mode: Literal["daemon", "cronjob"] = "daemon") -> dict[str, int]:
    """Return the thresholds of a mode, by their names."""
    return {threshold.name: getattr(threshold, mode) for threshold in THRESHOLDS}


def rules(
    values: Mapping[str, int | str] | None = None, scope: str = SCOPE, runbook: str = "", servers: str = SERVERS
) -> dict[str, Any]:
    """Return the rules in Prometheus' format.

    Args:
        values: the value of each threshold; by default the values for a daemon.
        scope: the selector of janitors.
        servers: the selector of janitors and servers.
        runbook: the URL of ``docs/operate/alerts.md``, which has a section for each alert; empty: no links.
    """
    substitutions = {**(thresholds() if values is None else values), "scope": scope, "servers": servers}
    return {"groups": [{"name": "tms-janitor", "rules": [_rule(alert, substitutions, runbook) for alert in ALERTS]}]}


def _rule(alert: Alert, substitutions: Mapping[str, int | str], runbook: str) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": Template(alert.expression).substitute(substitutions),
        **({} if alert.wait == "now" else {"for": f"{substitutions[alert.wait]}s"}),
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.meaning,
            **({"runbook_url": f"{runbook}#{alert.name.lower()}"} if runbook else {}),
        },
    }

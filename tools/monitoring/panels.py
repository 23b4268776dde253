"""The panels of the dashboard, one for each question of an operator, in the order of the questions.

Expressions take the maximum of a gauge in each release, because a sum would count a release with two pods, or a pod
that two Prometheus jobs scrape, twice.

In expressions, ``${scope}`` selects the janitors, and ``${servers}`` the janitors and servers, as in the alerts.
Grafana shows the description of a panel when the mouse points at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["stat", "timeseries", "table"]


@dataclass(frozen=True, slots=True)
class Target:
    """One expression, and the legend of its lines with Grafana's ``{{label}}``."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of the dashboard.

    Attributes:
        unit: Grafana's name of the unit.
        steps: the lowest values of a stat's colors; the first color has no lowest value.
        words: the texts that a stat shows instead of numbers.
        width: the width in columns; a row has 24.
        signed: whether values may be negative.
    """

    title: str
    kind: Kind
    unit: str
    description: str
    targets: tuple[Target, ...]
    steps: tuple[tuple[float | None, str], ...] = ((None, "green"),)
    words: tuple[tuple[str, str], ...] = ()
    width: int = 8
    signed: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A group of panels. Grafana queries the panels of a ``folded`` row only after a user opens the row."""

    title: str
    panels: tuple[Panel, ...]
    folded: bool = False


BAD = ((None, "green"), (1.0, "red"))
LATE = ((None, "green"), (3_600.0, "orange"), (86_400.0, "red"))
YES_IS_A_WARNING = (("0", "no"), ("1", "yes"))
#: The legend of a panel with one line for each janitor.
JANITOR = "{{namespace}} {{job}}"


def _of(expression: str, legend: str = "") -> tuple[Target, ...]:
    return (Target(expression, legend),)


OVERVIEW = (
    Panel(
        "Last heartbeat",
        "stat",
        "s",
        "Time since the last heartbeat of the daemon or run. Between runs of a CronJob, orange is normal.",
        _of("time() - min(max by (namespace, job) (tms_janitor_heartbeat_timestamp_seconds{${scope}}))"),
        ((None, "green"), (600.0, "orange"), (93_600.0, "red")),
        width=4,
    ),
    Panel(
        "Last success",
        "stat",
        "s",
        "Time since the last run that completed all its work.",
        _of("time() - min(tms_janitor_last_success_timestamp_seconds{${scope}})"),
        LATE,
        width=4,
    ),
    Panel(
        "Overdue rows",
        "stat",
        "short",
        "Rows that are due but held, paused or quarantined; with janitor.apply: false, all rows that are due.",
        _of("sum(max by (namespace, job, table, rule) (tms_janitor_overdue_rows{${scope}}))"),
        ((None, "green"), (1.0, "orange")),
        width=4,
    ),
    Panel(
        "Plan only",
        "stat",
        "short",
        "yes: janitor.apply is false, and nothing is deleted.",
        _of("max(tms_janitor_plan_only{${scope}})"),
        ((None, "green"), (1.0, "orange")),
        YES_IS_A_WARNING,
        width=4,
    ),
    Panel(
        "Paused",
        "stat",
        "short",
        "yes: at least one topic is paused.",
        _of("max(tms_janitor_paused{${scope}})"),
        ((None, "green"), (1.0, "orange")),
        YES_IS_A_WARNING,
        width=4,
    ),
    Panel(
        "Quarantined topics",
        "stat",
        "short",
        "Topics that failed three times in a row. Runs skip them.",
        _of("sum(max by (namespace, job) (tms_janitor_quarantined_topics{${scope}}))"),
        BAD,
        width=4,
    ),
)

WORK = (
    Panel(
        "Rows deleted",
        "timeseries",
        "rowsps",
        "By table and rule.",
        _of(
            "sum by (table, rule) (rate(tms_janitor_rows_deleted_total{${scope}}[$__rate_interval]))",
            "{{table}} {{rule}}",
        ),
    ),
    Panel(
        "Bytes deleted",
        "timeseries",
        "Bps",
        "Exact for keys, estimated for values. Compaction frees the disk space later.",
        _of("sum by (table) (rate(tms_janitor_bytes_deleted_total{${scope}}[$__rate_interval]))", "{{table}}"),
    ),
    Panel(
        "Rows inverted",
        "timeseries",
        "rowsps",
        "Inverted message rows of invalid transactions.",
        _of("sum(rate(tms_janitor_rows_inverted_total{${scope}}[$__rate_interval]))", "rows"),
    ),
    Panel(
        "Runs by result",
        "timeseries",
        "short",
        "`janitor history` shows the cause of each result other than done.",
        _of("sum by (result) (increase(tms_janitor_sweeps_total{${scope}}[$__rate_interval]))", "{{result}}"),
    ),
    Panel(
        "Time by phase",
        "timeseries",
        "percentunit",
        "Share of time that runs spend in each phase. If the sum is near 100 %, sweeps do not keep up.",
        _of(
            "sum by (phase) (rate(tms_janitor_sweep_phase_duration_seconds_sum{${scope}}[$__rate_interval]))",
            "{{phase}}",
        ),
    ),
    Panel(
        "Mean duration of a phase",
        "timeseries",
        "s",
        "Mean over the runs that had this phase.",
        _of(
            "sum by (phase) (rate(tms_janitor_sweep_phase_duration_seconds_sum{${scope}}[$__rate_interval])) / "
            "(sum by (phase) (rate(tms_janitor_sweep_phase_duration_seconds_count{${scope}}[$__rate_interval])) > 0)",
            "{{phase}}",
        ),
    ),
    Panel(
        "Rows read",
        "timeseries",
        "rowsps",
        "Runs skip most rows that are not due.",
        _of("sum by (table) (rate(tms_janitor_rows_scanned_total{${scope}}[$__rate_interval]))", "{{table}}"),
    ),
    Panel(
        "Store operations",
        "timeseries",
        "ops",
        "Operations of runs on the store.",
        _of("sum by (call) (rate(tms_janitor_store_calls_total{${scope}}[$__rate_interval]))", "{{call}}"),
    ),
    Panel(
        "Time to the next run",
        "timeseries",
        "s",
        "0: a run is due or in progress; Last success shows a late run. "
        "Empty with CronJobs, whose schedule the janitor does not know.",
        # Subtract the time of the scrape, not of the query, because the run may have started since. The scraped status
        # is some seconds old, so the next run may precede the scrape without being late; clamp_min shows that as 0.
        _of(
            "clamp_min(max by (namespace, job) (tms_janitor_next_run_timestamp_seconds{${scope}}"
            " - timestamp(tms_janitor_next_run_timestamp_seconds{${scope}})), 0)",
            JANITOR,
        ),
    ),
)

WAITING = (
    Panel(
        "Conditions",
        "timeseries",
        "short",
        "1: `janitor status` asks an operator to check this condition.",
        _of("max by (condition) (tms_janitor_attention{${scope}})", "{{condition}}"),
    ),
    Panel(
        "Overdue rows by rule",
        "timeseries",
        "short",
        "From the last count. Rows under janitor.protect are never due.",
        _of(
            "sum by (table, rule) (max by (namespace, job, table, rule) (tms_janitor_overdue_rows{${scope}}))",
            "{{table}} {{rule}}",
        ),
    ),
    Panel(
        "Age of the oldest overdue row",
        "timeseries",
        "s",
        "Time since the row was written. Empty without overdue rows.",
        _of(
            "time() - min by (table, rule) (tms_janitor_oldest_overdue_timestamp_seconds{${scope}})",
            "{{table}} {{rule}}",
        ),
    ),
    Panel(
        "Held topics",
        "timeseries",
        "short",
        "By reason. docs/operate/holds.md has the steps for each reason.",
        _of("sum by (reason) (max by (namespace, job, reason) (tms_janitor_held_topics{${scope}}))", "{{reason}}"),
    ),
    Panel(
        "Kept rows",
        "timeseries",
        "short",
        "Rows that are not due or not recognized, by reason, from the last full run.",
        _of("sum by (reason) (max by (namespace, job, reason) (tms_janitor_kept_rows{${scope}}))", "{{reason}}"),
    ),
    Panel(
        "Orphan and missing payloads",
        "timeseries",
        "short",
        "Payloads without messages, and messages without payloads, from the last janitor spark stats.",
        (
            Target("sum(max by (namespace, job) (tms_janitor_orphan_payload_rows{${scope}}))", "orphan payload rows"),
            Target("sum(max by (namespace, job) (tms_janitor_missing_payloads{${scope}}))", "missing payloads"),
        ),
    ),
    Panel(
        "Overdue share of all rows",
        "timeseries",
        "percentunit",
        "By rule, from the last janitor spark stats.",
        _of("max by (rule) (tms_janitor_statistics_overdue_ratio{${scope}})", "{{rule}}"),
    ),
    Panel(
        "Readers blocked by a transaction",
        "timeseries",
        "s",
        "Time for which the oldest undecided transaction of the last count blocks readers, and age of the count.",
        (
            Target("time() - min(tms_janitor_blocking_transaction_timestamp_seconds{${scope}})", "blocked for"),
            Target("time() - max(tms_janitor_statistics_timestamp_seconds{${scope}})", "counted ago"),
        ),
    ),
    Panel(
        "Topic failures",
        "timeseries",
        "short",
        "By table and reason. The next run tries again.",
        _of(
            "sum by (table, reason) (increase(tms_janitor_delete_errors_total{${scope}}[$__rate_interval]))",
            "{{table}} {{reason}}",
        ),
    ),
    Panel(
        "Guard trips",
        "timeseries",
        "short",
        "Runs that a guard stopped. They deleted nothing.",
        _of("sum by (guard) (increase(tms_janitor_guard_trips_total{${scope}}[$__rate_interval]))", "{{guard}}"),
    ),
)

TRANSACTIONS = (
    Panel(
        "Snapshot age",
        "timeseries",
        "s",
        "A snapshot older than two intervals is not used, and no rows are inverted.",
        _of("time() - max by (namespace, job) (tms_janitor_snapshot_timestamp_seconds{${scope}})", JANITOR),
    ),
    Panel(
        "Transactions",
        "timeseries",
        "short",
        "Invalid transactions, invalid transactions that may still write, and transactions in progress.",
        (
            Target("max by (namespace, job) (tms_janitor_invalid_transactions{${scope}})", f"{JANITOR} invalid"),
            Target("max by (namespace, job) (tms_janitor_open_invalid_transactions{${scope}})", f"{JANITOR} open"),
            Target(
                "max by (namespace, job) (tms_janitor_in_progress_transactions{${scope}})", f"{JANITOR} in progress"
            ),
        ),
    ),
    Panel(
        "Prune boundary age",
        "timeseries",
        "s",
        "Invalid transactions before the boundary have no rows left to invert. Two to three days are normal.",
        _of("time() - max by (namespace, job) (tms_janitor_prune_boundary_timestamp_seconds{${scope}})", JANITOR),
    ),
    Panel(
        "Runs without a usable snapshot",
        "timeseries",
        "short",
        "By reason.",
        _of("sum by (reason) (increase(tms_janitor_snapshot_errors_total{${scope}}[$__rate_interval]))", "{{reason}}"),
    ),
    Panel(
        "Clock skew",
        "timeseries",
        "s",
        "Wall clock minus reference clock. Negative: the wall clock is slow.",
        _of("tms_janitor_clock_skew_seconds{${scope}}", "{{instance}} {{source}}"),
        signed=True,
    ),
)

QUEUES = (
    Panel(
        "Largest topics",
        "timeseries",
        "bytes",
        "Size of keys and values in both tables; the ten largest topics.",
        _of("topk(10, max by (tms_namespace, topic) (tms_topic_bytes{${scope}}))", "{{tms_namespace}}:{{topic}}"),
    ),
    Panel(
        "Messages by topic",
        "timeseries",
        "short",
        "The ten topics with the most messages.",
        _of("topk(10, max by (tms_namespace, topic) (tms_topic_messages{${scope}}))", "{{tms_namespace}}:{{topic}}"),
    ),
    Panel(
        "Oldest message",
        "timeseries",
        "s",
        "Age of the oldest message. It levels off at the topic's ttl.",
        _of(
            "topk(10, time() - min by (tms_namespace, topic) (tms_topic_oldest_message_timestamp_seconds{${scope}}))",
            "{{tms_namespace}}:{{topic}}",
        ),
    ),
    Panel(
        "Newest message",
        "timeseries",
        "s",
        "Age of the newest message. It grows if nobody publishes to the topic.",
        _of(
            "topk(10, time() - max by (tms_namespace, topic) (tms_topic_newest_message_timestamp_seconds{${scope}}))",
            "{{tms_namespace}}:{{topic}}",
        ),
    ),
    Panel(
        "Count age",
        "timeseries",
        "s",
        "Time since the background count of topics and consumers.",
        (
            Target("time() - min(tms_topic_stats_timestamp_seconds{${scope}})", "topics"),
            Target("time() - min(tms_consumer_stats_timestamp_seconds{${scope}})", "consumers"),
        ),
    ),
    Panel(
        "Consumer lag",
        "timeseries",
        "short",
        "Unread messages by consumer; the ten largest lags.",
        _of(
            "topk(10, max by (tms_namespace, topic, consumer) (tms_consumer_lag_messages{${scope}}))",
            "{{consumer}} {{tms_namespace}}:{{topic}}",
        ),
    ),
    Panel(
        "Oldest unread message",
        "timeseries",
        "s",
        "Age of the oldest unread message. Near the topic's ttl, messages expire unread.",
        _of(
            "topk(10, time() - min by (tms_namespace, topic, consumer)"
            " (tms_consumer_oldest_unread_timestamp_seconds{${scope}}))",
            "{{consumer}} {{tms_namespace}}:{{topic}}",
        ),
    ),
    Panel(
        "Consumer position age",
        "timeseries",
        "s",
        "Age of the last message that a consumer read.",
        _of(
            "topk(10, time() - max by (tms_namespace, topic, consumer)"
            " (tms_consumer_position_timestamp_seconds{${scope}}))",
            "{{consumer}} {{tms_namespace}}:{{topic}}",
        ),
    ),
)

SERVER = (
    Panel(
        "Requests",
        "timeseries",
        "reqps",
        "By status code.",
        _of("sum by (code) (rate(tms_requests_total{${servers}}[$__rate_interval]))", "{{code}}"),
    ),
    Panel(
        "Request latency (p99)",
        "timeseries",
        "s",
        "99th percentile by route. A poll that waits for a message includes its wait.",
        _of(
            "histogram_quantile(0.99,"
            " sum by (route, le) (rate(tms_request_duration_seconds_bucket{${servers}}[$__rate_interval])))",
            "{{route}}",
        ),
    ),
    Panel(
        "Messages per second",
        "timeseries",
        "cps",
        "Messages published, and messages sent to consumers.",
        (
            Target("sum(rate(tms_messages_published_total{${servers}}[$__rate_interval]))", "published"),
            Target("sum(rate(tms_messages_fetched_total{${servers}}[$__rate_interval]))", "fetched"),
        ),
    ),
    Panel(
        "Publish queue",
        "timeseries",
        "short",
        "Publish requests that wait for the disk.",
        _of("sum(tms_publish_queue_size{${servers}})", "queue"),
    ),
)


def _top_topics_panel(title: str, metric: str) -> Panel:
    return Panel(
        title,
        "timeseries",
        "cps",
        "The ten busiest topics. Topics beyond the first 200 are summed as _other.",
        _of(
            f"topk(10, sum by (tms_namespace, topic) (rate({metric}{{${{servers}}}}[$__rate_interval])))",
            "{{tms_namespace}}:{{topic}}",
        ),
    )


SERVER_TOPICS = (
    _top_topics_panel("Published by topic", "tms_topic_messages_published_total"),
    _top_topics_panel("Fetched by topic", "tms_topic_messages_fetched_total"),
    Panel(
        "Publish latency by topic (p99)",
        "timeseries",
        "s",
        "99th percentile of the time to disk; the ten slowest topics.",
        _of(
            "topk(10, histogram_quantile(0.99, sum by (tms_namespace, topic, le)"
            " (rate(tms_topic_publish_duration_seconds_bucket{${servers}}[$__rate_interval]))))",
            "{{tms_namespace}}:{{topic}}",
        ),
    ),
    Panel(
        "Blocked readers",
        "timeseries",
        "s",
        "Time that readers in transactions have waited for an undecided transaction.",
        _of(
            "time() - min by (tms_namespace, topic) (tms_topic_first_undecided_timestamp_seconds{${servers}})",
            "{{tms_namespace}}:{{topic}}",
        ),
    ),
    Panel(
        "Open claims",
        "timeseries",
        "short",
        "Open claims of all consumer groups.",
        _of("max by (namespace, job) (tms_open_claims{${servers}})", JANITOR),
    ),
    Panel(
        "Oldest open claim",
        "timeseries",
        "s",
        "Time since its transaction started.",
        _of(
            "time() - min by (namespace, job) (tms_oldest_open_claim_timestamp_seconds{${servers}})",
            JANITOR,
        ),
    ),
    Panel(
        "Redeliveries and dead letters",
        "timeseries",
        "cps",
        "Messages delivered again to a consumer group, and messages beyond max_deliveries.",
        (
            Target("sum(rate(tms_messages_redelivered_total{${servers}}[$__rate_interval]))", "redelivered"),
            Target("sum(rate(tms_dead_letters_total{${servers}}[$__rate_interval]))", "dead letters"),
        ),
    ),
)

ACCESS = (
    Panel(
        "Rejected requests",
        "timeseries",
        "reqps",
        "Without a valid token (401), without permission (403), above a quota or after failed attempts (429).",
        _of(
            'sum by (code) (rate(tms_requests_total{code=~"401|403|429",${servers}}[$__rate_interval])) or vector(0)',
            "{{code}}",
        ),
    ),
    Panel(
        "Rejected requests by route",
        "timeseries",
        "reqps",
        "Requests rejected with 401, 403 or 429, by route.",
        _of(
            'sum by (route) (rate(tms_requests_total{code=~"401|403|429",${servers}}[$__rate_interval])) or vector(0)',
            "{{route}}",
        ),
    ),
)

PROCESS = (
    Panel(
        "Memory",
        "timeseries",
        "bytes",
        "Resident memory, mapped LevelDB files included.",
        _of("process_resident_memory_bytes{${servers}}", "{{instance}}"),
    ),
    Panel(
        "CPU",
        "timeseries",
        "percentunit",
        "Share of one core.",
        _of("rate(process_cpu_seconds_total{${servers}}[$__rate_interval])", "{{instance}}"),
    ),
    Panel(
        "Versions",
        "table",
        "short",
        "Version of each process; 1 if it holds the lease.",
        _of("tms_janitor_build_info{${scope}} * on (job, instance) group_left () tms_janitor_is_leader{${scope}}"),
    ),
)

ROWS = (
    Row("Health", OVERVIEW),
    Row("Runs", WORK),
    Row("Holds and failures", WAITING),
    Row("Transactions and clocks", TRANSACTIONS),
    Row("Topics and consumers", QUEUES),
    Row("Server", SERVER, folded=True),
    Row("Server by topic", SERVER_TOPICS, folded=True),
    Row("Access", ACCESS, folded=True),
    Row("Process", PROCESS, folded=True),
)

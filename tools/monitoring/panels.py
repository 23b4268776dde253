"""What the dashboard shows: one panel for each question an operator has, in the order the questions come.

Of gauges the largest that a release shows counts, so that two pods, or two who scrape one, are not added up.

A panel's expressions have ``${scope}`` where the alerts have it, and ``${servers}`` where they are about servers, too.
What is said of a panel here is what one reads when pointing at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["stat", "timeseries", "table"]


@dataclass(frozen=True, slots=True)
class Target:
    """One expression, and what its lines are called (Grafana's ``{{label}}``)."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        unit: as Grafana names it.
        steps: of a stat, from which value on it has which colour; the first is below all others.
        words: of a stat, what is written instead of a number.
        width: of 24 columns.
        signed: whether there are values below 0.
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
    """Panels that belong together; ``folded`` ones are loaded when they are opened."""

    title: str
    panels: tuple[Panel, ...]
    folded: bool = False


BAD = ((None, "green"), (1.0, "red"))
LATE = ((None, "green"), (3_600.0, "orange"), (86_400.0, "red"))
YES_IS_A_WARNING = (("0", "no"), ("1", "yes"))
#: How a line is called of which each janitor has one.
JANITOR = "{{namespace}} {{job}}"


def _of(expression: str, legend: str = "") -> tuple[Target, ...]:
    return (Target(expression, legend),)


OVERVIEW = (
    Panel(
        "Last sign of life",
        "stat",
        "s",
        "How long ago the daemon, or else the last run, showed that it was alive. Between CronJobs orange is normal.",
        _of("time() - min(max by (namespace, job) (tms_janitor_heartbeat_timestamp_seconds{${scope}}))"),
        ((None, "green"), (600.0, "orange"), (93_600.0, "red")),
        width=4,
    ),
    Panel(
        "Last success",
        "stat",
        "s",
        "How long ago a run did all there was to do.",
        _of("time() - min(tms_janitor_last_success_timestamp_seconds{${scope}})"),
        LATE,
        width=4,
    ),
    Panel(
        "Rows that are due and stay",
        "stat",
        "short",
        "What is held, paused or quarantined; with janitor.apply: false everything that is due.",
        _of("sum(max by (namespace, job, table, rule) (tms_janitor_overdue_rows{${scope}}))"),
        ((None, "green"), (1.0, "orange")),
        width=4,
    ),
    Panel(
        "Only plans",
        "stat",
        "short",
        "Whether janitor.apply is false, so that nothing is deleted.",
        _of("max(tms_janitor_plan_only{${scope}})"),
        ((None, "green"), (1.0, "orange")),
        YES_IS_A_WARNING,
        width=4,
    ),
    Panel(
        "Paused",
        "stat",
        "short",
        "Whether anything is paused, be it a single topic.",
        _of("max(tms_janitor_paused{${scope}})"),
        ((None, "green"), (1.0, "orange")),
        YES_IS_A_WARNING,
        width=4,
    ),
    Panel(
        "Quarantined topics",
        "stat",
        "short",
        "Topics put aside because they failed three times in a row.",
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
        "Keys exactly, values as the store estimates them. Disks show it after compaction only.",
        _of("sum by (table) (rate(tms_janitor_bytes_deleted_total{${scope}}[$__rate_interval]))", "{{table}}"),
    ),
    Panel(
        "Pointers negated",
        "timeseries",
        "rowsps",
        "Message rows of invalid transactions whose write pointer was negated.",
        _of("sum(rate(tms_janitor_rows_inverted_total{${scope}}[$__rate_interval]))", "rows"),
    ),
    Panel(
        "Runs by how they ended",
        "timeseries",
        "short",
        "Anything but done deserves a look: `janitor history` says why.",
        _of("sum by (result) (increase(tms_janitor_sweeps_total{${scope}}[$__rate_interval]))", "{{result}}"),
    ),
    Panel(
        "Where the time goes",
        "timeseries",
        "percentunit",
        "Part of the time that each phase of the runs takes. Near 100 % in all, sweeps do not keep up.",
        _of(
            "sum by (phase) (rate(tms_janitor_sweep_phase_duration_seconds_sum{${scope}}[$__rate_interval]))",
            "{{phase}}",
        ),
    ),
    Panel(
        "Duration of a phase",
        "timeseries",
        "s",
        "On the average of the runs that had it.",
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
        "What is live and not due is mostly not read.",
        _of("sum by (table) (rate(tms_janitor_rows_scanned_total{${scope}}[$__rate_interval]))", "{{table}}"),
    ),
    Panel(
        "Calls to the store",
        "timeseries",
        "ops",
        "Operations that runs asked of the store.",
        _of("sum by (call) (rate(tms_janitor_store_calls_total{${scope}}[$__rate_interval]))", "{{call}}"),
    ),
    Panel(
        "Until the next run",
        "timeseries",
        "s",
        "Below 0 the run is late. Nothing is shown where the schedule is not the janitor's, as with CronJobs.",
        # As it was when it was scraped: by now the run may have begun.
        _of(
            "max by (namespace, job) (tms_janitor_next_run_timestamp_seconds{${scope}}"
            " - timestamp(tms_janitor_next_run_timestamp_seconds{${scope}}))",
            JANITOR,
        ),
        signed=True,
    ),
)

WAITING = (
    Panel(
        "Rows that are due and stay, by rule",
        "timeseries",
        "short",
        "As last counted; rows under janitor.protect are never due.",
        _of(
            "sum by (table, rule) (max by (namespace, job, table, rule) (tms_janitor_overdue_rows{${scope}}))",
            "{{table}} {{rule}}",
        ),
    ),
    Panel(
        "Age of the oldest of them",
        "timeseries",
        "s",
        "Since it was written, not since it came due. Nothing is shown while there is none.",
        _of(
            "time() - min by (table, rule) (tms_janitor_oldest_overdue_timestamp_seconds{${scope}})",
            "{{table}} {{rule}}",
        ),
    ),
    Panel(
        "Topics that are held",
        "timeseries",
        "short",
        "By reason; docs/reference/messages.md says for each what to do.",
        _of("sum by (reason) (max by (namespace, job, reason) (tms_janitor_held_topics{${scope}}))", "{{reason}}"),
    ),
    Panel(
        "Rows kept for another reason",
        "timeseries",
        "short",
        "As the last thorough run counted them.",
        _of("sum by (reason) (max by (namespace, job, reason) (tms_janitor_kept_rows{${scope}}))", "{{reason}}"),
    ),
    Panel(
        "Orphan and missing payloads",
        "timeseries",
        "short",
        "Payloads without messages, and messages without payloads, as janitor spark stats last counted them.",
        (
            Target("sum(max by (namespace, job) (tms_janitor_orphan_payload_rows{${scope}}))", "orphan payload rows"),
            Target("sum(max by (namespace, job) (tms_janitor_missing_payloads{${scope}}))", "missing payloads"),
        ),
    ),
    Panel(
        "Overdue, of all rows",
        "timeseries",
        "percentunit",
        "By rule, as janitor spark stats last counted them.",
        _of("max by (rule) (tms_janitor_statistics_overdue_ratio{${scope}})", "{{rule}}"),
    ),
    Panel(
        "Held up by a transaction",
        "timeseries",
        "s",
        "For how long the oldest undecided transaction had held up readers when all was counted; and how old that "
        "count is.",
        (
            Target("time() - min(tms_janitor_blocking_transaction_timestamp_seconds{${scope}})", "blocked for"),
            Target("time() - max(tms_janitor_statistics_timestamp_seconds{${scope}})", "counted ago"),
        ),
    ),
    Panel(
        "Topics left undone",
        "timeseries",
        "short",
        "By table and reason; the next run tries again.",
        _of(
            "sum by (table, reason) (increase(tms_janitor_delete_errors_total{${scope}}[$__rate_interval]))",
            "{{table}} {{reason}}",
        ),
    ),
    Panel(
        "Guards that stopped a run",
        "timeseries",
        "short",
        "Nothing was deleted by these runs.",
        _of("sum by (guard) (increase(tms_janitor_guard_trips_total{${scope}}[$__rate_interval]))", "{{guard}}"),
    ),
)

TRANSACTIONS = (
    Panel(
        "Age of the snapshot",
        "timeseries",
        "s",
        "Older than twice its interval it is not used: nothing is inverted then.",
        _of("time() - max by (namespace, job) (tms_janitor_snapshot_timestamp_seconds{${scope}})", JANITOR),
    ),
    Panel(
        "Transactions",
        "timeseries",
        "short",
        "Invalid ones, those of them that may still write, and those in progress.",
        (
            Target("max by (namespace, job) (tms_janitor_invalid_transactions{${scope}})", f"{JANITOR} invalid"),
            Target("max by (namespace, job) (tms_janitor_open_invalid_transactions{${scope}})", f"{JANITOR} open"),
            Target(
                "max by (namespace, job) (tms_janitor_in_progress_transactions{${scope}})", f"{JANITOR} in progress"
            ),
        ),
    ),
    Panel(
        "Age of the prune boundary",
        "timeseries",
        "s",
        "Invalid transactions that began before it have no rows left to negate. Two to three days are normal.",
        _of("time() - max by (namespace, job) (tms_janitor_prune_boundary_timestamp_seconds{${scope}})", JANITOR),
    ),
    Panel(
        "Runs without a usable snapshot",
        "timeseries",
        "short",
        "By why.",
        _of("sum by (reason) (increase(tms_janitor_snapshot_errors_total{${scope}}[$__rate_interval]))", "{{reason}}"),
    ),
    Panel(
        "Clocks",
        "timeseries",
        "s",
        "How far the wall clock is ahead of another one; negative: behind.",
        _of("tms_janitor_clock_skew_seconds{${scope}}", "{{instance}} {{source}}"),
        signed=True,
    ),
)

QUEUES = (
    Panel(
        "Largest topics",
        "timeseries",
        "bytes",
        "Keys and payloads in both tables.",
        _of("topk(10, max by (tms_namespace, topic) (tms_topic_bytes{${scope}}))", "{{tms_namespace}}:{{topic}}"),
    ),
    Panel(
        "Topics with the most messages",
        "timeseries",
        "short",
        "How many messages there are in each.",
        _of("topk(10, max by (tms_namespace, topic) (tms_topic_messages{${scope}}))", "{{tms_namespace}}:{{topic}}"),
    ),
    Panel(
        "Oldest message",
        "timeseries",
        "s",
        "How long ago it was published; it levels off at the topic's ttl.",
        _of(
            "topk(10, time() - min by (tms_namespace, topic) (tms_topic_oldest_message_timestamp_seconds{${scope}}))",
            "{{tms_namespace}}:{{topic}}",
        ),
    ),
    Panel(
        "Newest message",
        "timeseries",
        "s",
        "How long ago it was published: which topics get no messages any more.",
        _of(
            "topk(10, time() - max by (tms_namespace, topic) (tms_topic_newest_message_timestamp_seconds{${scope}}))",
            "{{tms_namespace}}:{{topic}}",
        ),
    ),
    Panel(
        "Age of the counts",
        "timeseries",
        "s",
        "The background count has a budget of its own; this is how far behind it is.",
        (
            Target("time() - min(tms_topic_stats_timestamp_seconds{${scope}})", "topics"),
            Target("time() - min(tms_consumer_stats_timestamp_seconds{${scope}})", "consumers"),
        ),
    ),
    Panel(
        "Consumers behind",
        "timeseries",
        "short",
        "Messages that a consumer has not read yet.",
        _of(
            "topk(10, max by (tms_namespace, topic, consumer) (tms_consumer_lag_messages{${scope}}))",
            "{{consumer}} {{tms_namespace}}:{{topic}}",
        ),
    ),
    Panel(
        "Oldest unread message",
        "timeseries",
        "s",
        "How long ago it was published. Near the topic's ttl, messages expire before they are read.",
        _of(
            "topk(10, time() - min by (tms_namespace, topic, consumer)"
            " (tms_consumer_oldest_unread_timestamp_seconds{${scope}}))",
            "{{consumer}} {{tms_namespace}}:{{topic}}",
        ),
    ),
    Panel(
        "Age of consumers' positions",
        "timeseries",
        "s",
        "How long ago the message was published that a consumer read last.",
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
        "Slow requests",
        "timeseries",
        "s",
        "99 of 100 requests were answered within this, by route. A poll that waits for a message counts with its wait.",
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
        "Published, and sent to consumers.",
        (
            Target("sum(rate(tms_messages_published_total{${servers}}[$__rate_interval]))", "published"),
            Target("sum(rate(tms_messages_fetched_total{${servers}}[$__rate_interval]))", "fetched"),
        ),
    ),
    Panel(
        "Publishes not on disk yet",
        "timeseries",
        "short",
        "Requests to publish that wait for the disk.",
        _of("sum(tms_publish_queue_size{${servers}})", "queue"),
    ),
)


def _busiest(title: str, metric: str) -> Panel:
    return Panel(
        title,
        "timeseries",
        "cps",
        "The ten topics with the most; topics beyond the first 200 are counted together as _other.",
        _of(
            f"topk(10, sum by (tms_namespace, topic) (rate({metric}{{${{servers}}}}[$__rate_interval])))",
            "{{tms_namespace}}:{{topic}}",
        ),
    )


SERVER_TOPICS = (
    _busiest("Published by topic", "tms_topic_messages_published_total"),
    _busiest("Fetched by topic", "tms_topic_messages_fetched_total"),
    Panel(
        "Slow publishes by topic",
        "timeseries",
        "s",
        "99 of 100 publishes were on disk within this; the ten slowest topics.",
        _of(
            "topk(10, histogram_quantile(0.99, sum by (tms_namespace, topic, le)"
            " (rate(tms_topic_publish_duration_seconds_bucket{${servers}}[$__rate_interval]))))",
            "{{tms_namespace}}:{{topic}}",
        ),
    ),
    Panel(
        "Readers wait",
        "timeseries",
        "s",
        "For how long readers in transactions have waited for one that is not decided.",
        _of(
            "time() - min by (tms_namespace, topic) (tms_topic_first_undecided_timestamp_seconds{${servers}})",
            "{{tms_namespace}}:{{topic}}",
        ),
    ),
    Panel(
        "Claims of consumer groups",
        "timeseries",
        "short",
        "How many are open.",
        _of("max by (namespace, job) (tms_open_claims{${servers}})", JANITOR),
    ),
    Panel(
        "Oldest open claim",
        "timeseries",
        "s",
        "How long ago its transaction began.",
        _of(
            "time() - min by (namespace, job) (tms_oldest_open_claim_timestamp_seconds{${servers}})",
            JANITOR,
        ),
    ),
    Panel(
        "Given out again, and given up",
        "timeseries",
        "cps",
        "Messages that a consumer group got once more, and those that came more often than max_deliveries.",
        (
            Target("sum(rate(tms_messages_redelivered_total{${servers}}[$__rate_interval]))", "given out again"),
            Target("sum(rate(tms_dead_letters_total{${servers}}[$__rate_interval]))", "dead letters"),
        ),
    ),
)

ACCESS = (
    Panel(
        "Refused requests",
        "timeseries",
        "reqps",
        "Without a good token (401), not allowed (403), and above a quota or after failed attempts (429).",
        _of(
            'sum by (code) (rate(tms_requests_total{code=~"401|403|429",${servers}}[$__rate_interval])) or vector(0)',
            "{{code}}",
        ),
    ),
    Panel(
        "Refused requests by route",
        "timeseries",
        "reqps",
        "The same by what was asked for.",
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
        "Resident; mapped files of LevelDB are among it.",
        _of("process_resident_memory_bytes{${servers}}", "{{instance}}"),
    ),
    Panel(
        "Processor",
        "timeseries",
        "percentunit",
        "Of one core.",
        _of("rate(process_cpu_seconds_total{${servers}}[$__rate_interval])", "{{instance}}"),
    ),
    Panel(
        "Versions",
        "table",
        "short",
        "Which version each process is, and 1 where it holds the lease.",
        _of("tms_janitor_build_info{${scope}} * on (job, instance) group_left () tms_janitor_is_leader{${scope}}"),
    ),
)

ROWS = (
    Row("Is it well?", OVERVIEW),
    Row("What it does", WORK),
    Row("What waits, and why", WAITING),
    Row("Transactions and clocks", TRANSACTIONS),
    Row("Queues and consumers", QUEUES),
    Row("Server", SERVER, folded=True),
    Row("Server, by topic", SERVER_TOPICS, folded=True),
    Row("Access", ACCESS, folded=True),
    Row("Process", PROCESS, folded=True),
)

"""The metrics: all values of a status, no series for unknown values, and their reference page."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families as parse_text

from janitor.metrics import Metrics
from janitor.metrics.catalogue import CALLS, CATALOGUE, CLOCKS, DUE, FAILURES, GUARDS, PHASES, RESULTS
from janitor.metrics.series import PerTopic, TopicName, largest
from janitor.report import COUNTED_REASONS
from janitor.rules.policy import Hold
from janitor.state.base import CounterKey, Pause
from janitor.state.figures import ConsumerFigures, StatisticsFigures
from janitor.state.records import RunRecord
from janitor.status.health import Condition
from janitor.status.status import (
    BoundaryFigures,
    HeldTopic,
    Overdue,
    Quarantined,
    SnapshotFigures,
    Status,
    TopicFigures,
)
from janitor.sweep.transactions import Problem
from tests.builders import MINUTE, NOW_MS, janitor, pointer, topic
from tests.monitoring.prometheus import label_values
from tests.support import require_tool
from tms_core.tables.base import CELLS, COLUMNS, KEYS, MESSAGES, PAYLOADS
from tms_core.tables.memory import MemoryStore

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")

OWN = ("tms_janitor_", "tms_topic_", "tms_consumer_")

FoundRow = dict[str, float]


def empty_status(**changes: Any) -> Status:
    """Return the status of a janitor before its first run."""
    return Status("1.2.3", "store", "running", "apply", "every 60 s", NOW_MS, **changes)


def queue(name: str, size_bytes: int | None, **changes: Any) -> TopicFigures:
    namespace, _, topic_name = name.partition(":")
    counted = {"messages": 1, "oldest_ms": 5_000, "newest_ms": 6_000, "counted_ms": 7_000} if size_bytes else {}
    return TopicFigures(namespace, topic_name, 1, 60, size_bytes=size_bytes, **{**counted, **changes})


def consumer_figures(name: str, lag_messages: int, **changes: Any) -> ConsumerFigures:
    tms_namespace, topic_name, consumer = name.split(":")
    oldest_ms = 3_000 if lag_messages else None
    figures = {"position_ms": 2_000, "updated_ms": 1, "oldest_unread_ms": oldest_ms, "expired": False}
    return ConsumerFigures(
        tms_namespace, topic_name, 1, consumer, lag_messages=lag_messages, **{**figures, "counted_ms": 8_000, **changes}
    )


def counter(name: str, value: float, **labels: str) -> dict[CounterKey, float]:
    return {CounterKey(name, tuple(labels.items())): value}


def full_status() -> Status:
    """Return a status with a different number in every field."""
    held = [HeldTopic(f"a:{n}", reason, 1, 1, 1, None, "") for n, reason in enumerate([*Hold, Hold.FRONTIER])]
    return empty_status(
        heartbeat_ms=1_000_001,
        next_run_ms=1_000_002,
        leader=True,
        last_success_ms={"message": 1_000_003, "payload": 1_000_004},
        paused=[Pause("a:*", 1)],
        quarantined=[Quarantined("a:b", 1, 3, "", 1)] * 2,
        held=held,
        overdue=[Overdue("message", "expired", 11, 1_000_005), Overdue("payload", "old_generation", 12, None)],
        kept=dict(zip(map(str, COUNTED_REASONS), range(21, 27), strict=True)),
        snapshot=SnapshotFigures(1_000_006, invalid=31, open=32, in_progress=33),
        boundary=BoundaryFigures("1700000000000000007"),
        statistics=StatisticsFigures(
            *(1_000_008, 30, 10, 99, {"expired": 4, "old_generation": 2}, 34, 35),
            *("1700000000000000009", "a:b, generation 1", 1_000_009),
        ),
        skew_seconds={"monotonic": -0.25},
        topics=[queue("a:b", 41), queue("a:c", 42)],
        consumers=[consumer_figures("a:b:x", 43), consumer_figures("a:b:y", 0, position_ms=0)],
        counters={
            **counter("sweeps_total", 51, result="done"),
            **counter("rows_scanned_total", 52, table="message"),
            **counter("rows_deleted_total", 53, table="message", rule="expired"),
            **counter("bytes_deleted_total", 54, table="payload", rule="old_generation"),
            **counter("rows_inverted_total", 55),
            **counter("delete_errors_total", 56, table="payload", reason="store"),
            **counter("store_calls_total", 57, call="keys"),
            **counter("snapshot_errors_total", 58, reason="stale"),
            **counter("guard_trips_total", 59, guard="clock"),
            **counter("sweep_phase_duration_seconds_sum", 6.25, phase="sync"),
            **counter("sweep_phase_duration_seconds_count", 62, phase="sync"),
        },
    )


def metrics(status: Status | None = None, per_topic: PerTopic = "top", top: int = 1000) -> Metrics:
    made = Metrics(per_topic, top)
    if status is not None:
        made.update(status)
    return made


def text(made: Metrics, accept: str | None = None) -> str:
    return made.render(accept)[0].decode()


def parse_openmetrics(document: str) -> Iterable[Metric]:
    found: Iterable[Metric] = openmetrics_parser.text_string_to_metric_families(document)  # type: ignore[no-untyped-call]
    return found


def series(families: Iterable[Metric]) -> FoundRow:
    """Return the values of the product's series, by name and label values: ``tms_topic_bytes a b``."""
    samples = [sample for family in families for sample in family.samples if sample.name.startswith(OWN)]
    found = {
        " ".join([sample.name, *(sample.labels[key] for key in _order(sample.labels))]): sample for sample in samples
    }
    assert len(found) == len(samples), "a series is duplicated"
    return {name: sample.value for name, sample in found.items()}


def _order(labels: Mapping[str, str]) -> list[str]:
    definition = next(item for item in CATALOGUE if set(item.labels) == set(labels))
    return [name for name in definition.labels if name in labels]


def series_of(status: Status, per_topic: PerTopic = "top", top: int = 1000) -> FoundRow:
    """Return the series of a status, as Prometheus parses them."""
    return series(parse_text(text(metrics(status, per_topic, top))))


def without_prefix(found: FoundRow) -> FoundRow:
    return {name.removeprefix("tms_janitor_"): value for name, value in found.items()}


ZEROS = {
    f"{name} {' '.join(labels)}".rstrip(): 0.0
    for name, combinations in {
        "sweeps_total": product(RESULTS),
        "sweep_phase_duration_seconds_sum": product(PHASES),
        "sweep_phase_duration_seconds_count": product(PHASES),
        "rows_scanned_total": product(["message", "payload"]),
        "rows_deleted_total": product(["message", "payload"], ["expired", "old_generation", "processed"]),
        "bytes_deleted_total": product(["message", "payload"], ["expired", "old_generation", "processed"]),
        "rows_inverted_total": [()],
        "delete_errors_total": product(["message", "payload"], FAILURES),
        "store_calls_total": product(CALLS),
        "snapshot_errors_total": product(Problem),
        "guard_trips_total": product(GUARDS),
        "overdue_rows": DUE,
        "attention": product(Condition),
        "held_topics": product(Hold),
        "quarantined_topics": [()],
        "paused": [()],
        "plan_only": [()],
        "is_leader": [()],
        "open_invalid_transactions": [()],
    }.items()
    for labels in combinations
}


def test_metrics_before_anything_are_zeros_without_unknowns() -> None:
    assert without_prefix(series_of(empty_status())) == {**ZEROS, "build_info 1.2.3": 1, "attention not_adopted": 1}


def test_metrics_of_a_full_status_have_every_series() -> None:
    assert without_prefix(series_of(full_status())) == {
        **ZEROS,
        "build_info 1.2.3": 1,
        **{f"attention {condition}": 1 for condition in ("not_adopted", "paused", "topic_held", "topic_quarantined")},
        "heartbeat_timestamp_seconds": 1000.001,
        "statistics_timestamp_seconds": 1000.008,
        "statistics_overdue_ratio expired": 0.1,
        "statistics_overdue_ratio old_generation": 0.05,
        "orphan_payload_rows": 34,
        "missing_payloads": 35,
        "blocking_transaction_timestamp_seconds": 1000.009,
        "next_run_timestamp_seconds": 1000.002,
        "last_success_timestamp_seconds message": 1000.003,
        "last_success_timestamp_seconds payload": 1000.004,
        "paused": 1,
        "is_leader": 1,
        "quarantined_topics": 2,
        **{f"held_topics {reason}": 2 if reason is Hold.FRONTIER else 1 for reason in Hold},
        "overdue_rows message expired": 11,
        "overdue_rows payload old_generation": 12,
        "oldest_overdue_timestamp_seconds message expired": 1000.005,
        **{f"kept_rows {reason}": rows for reason, rows in zip(COUNTED_REASONS, range(21, 27), strict=True)},
        "snapshot_timestamp_seconds": 1000.006,
        "invalid_transactions": 31,
        "open_invalid_transactions": 32,
        "in_progress_transactions": 33,
        "prune_boundary_timestamp_seconds": 1_700_000_000,
        "clock_skew_seconds monotonic": -0.25,
        **{f"tms_topic_messages a {name}": 1 for name in "bc"},
        "tms_topic_bytes a b": 41,
        "tms_topic_bytes a c": 42,
        **{f"tms_topic_oldest_message_timestamp_seconds a {name}": 5 for name in "bc"},
        **{f"tms_topic_newest_message_timestamp_seconds a {name}": 6 for name in "bc"},
        **{f"tms_topic_stats_timestamp_seconds a {name}": 7 for name in "bc"},
        "tms_consumer_lag_messages a b x": 43,
        "tms_consumer_lag_messages a b y": 0,
        "tms_consumer_oldest_unread_timestamp_seconds a b x": 3,
        "tms_consumer_position_timestamp_seconds a b x": 2,
        **{f"tms_consumer_stats_timestamp_seconds a b {name}": 8 for name in "xy"},
        "sweeps_total done": 51,
        "rows_scanned_total message": 52,
        "rows_deleted_total message expired": 53,
        "bytes_deleted_total payload old_generation": 54,
        "rows_inverted_total": 55,
        "delete_errors_total payload store": 56,
        "store_calls_total keys": 57,
        "snapshot_errors_total stale": 58,
        "guard_trips_total clock": 59,
        "sweep_phase_duration_seconds_sum sync": 6.25,
        "sweep_phase_duration_seconds_count sync": 62,
    }


def test_metrics_of_a_janitor_that_only_plans_say_so() -> None:
    assert series_of(replace(empty_status(), mode="plan_only"))["tms_janitor_plan_only"] == 1


def test_metrics_before_a_status_have_no_counter_that_would_seem_to_restart() -> None:
    assert "process_resident_memory_bytes" in text(metrics())
    assert series(parse_text(text(metrics()))) == {}


def test_metrics_of_a_topic_held_in_both_tables_count_it_once() -> None:
    entry = HeldTopic("a:b", "frontier", 1, 1, 1, None, "")
    assert series_of(empty_status(held=[entry, replace(entry, rows=2)]))["tms_janitor_held_topics frontier"] == 1


def test_metrics_with_counters_of_a_newer_version_omit_them() -> None:
    unknown = {
        **counter("rows_polished_total", 1),
        **counter("rows_deleted_total", 2, table="message"),
        **counter("rows_inverted_total", 3, table="message"),
        **counter("sweep_phase_duration_seconds", 4, phase="sync"),
    }
    assert series_of(empty_status(counters=unknown)) == series_of(empty_status())


def test_metrics_show_a_known_counter_with_an_unknown_label() -> None:
    found = series_of(empty_status(counters=counter("guard_trips_total", 7, guard="gravity")))
    assert found["tms_janitor_guard_trips_total gravity"] == 7


def test_metrics_of_labels_in_any_order_are_one_series() -> None:
    counters = {
        **counter("rows_deleted_total", 2, table="message", rule="expired"),
        **counter("rows_deleted_total", 3, rule="expired", table="message"),
    }
    assert series_of(empty_status(counters=counters))["tms_janitor_rows_deleted_total message expired"] == 5


def test_metrics_after_a_run_declare_every_stored_counter() -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=60)
    invalid = pointer(NOW_MS - 2 * MINUTE)
    orders.plain(NOW_MS - 2 * MINUTE, NOW_MS - 61_000).tx(invalid, NOW_MS)
    kit = janitor(store, invalid=[invalid])
    report = kit.engine.run_once(adopt=True)

    stored = kit.state.counters()
    known = {item.name: item for item in CATALOGUE}
    found = series_of(empty_status(counters=stored))
    for name, labels in stored:
        item = known[re.sub("_(sum|count)$", "", f"tms_janitor_{name}")]
        assert tuple(dict(labels)[label] for label in item.labels) in (item.known or ())
    assert set(report.phase_seconds) == set(PHASES)
    assert found["tms_janitor_sweeps_total done"] == 1
    assert found["tms_janitor_rows_deleted_total message expired"] == 2
    assert found["tms_janitor_rows_inverted_total"] == 1


def sources(*folders: str) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py"))


#: The code with which a store counts the pages that it reads.
READS = "".join(f'self._calls["{want.call}"]' for want in (KEYS, CELLS, MESSAGES, COLUMNS, PAYLOADS))


STATUS_PAGE = (ROOT / "janitor/http/page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("known", "pattern", "code"),
    [
        (GUARDS, r'GuardNote\(\s*"(\w+)", True', sources("janitor")),
        (FAILURES, r'FailedTopic\([\w.]+, [\w.]+, "(\w+)"', sources("janitor/sweep")),
        (CALLS, r'self\._calls\["(\w+)"\]', sources("tms_core/tables") + READS),
        (RESULTS, r"``(\w+)``", str(RunRecord.__doc__).partition("result:")[2].partition("error:")[0]),
        (PHASES, r'\["(\w+)", "[^"]+"\]', STATUS_PAGE.partition("const PHASES = ")[2].partition(";")[0]),
        (CLOCKS, r'skew_seconds=.*"(\w+)"', sources("janitor")),
    ],
    ids=["guards", "failures", "calls", "results", "phases of the page", "clocks"],
)
def test_label_values_match_the_code(known: tuple[str, ...], pattern: str, code: str) -> None:
    assert set(known) == set(re.findall(pattern, code))


def starting(found: FoundRow, prefix: str) -> FoundRow:
    return {name: value for name, value in found.items() if name.startswith(prefix)}


def lags_of(found: FoundRow) -> FoundRow:
    return {name.partition(" ")[2]: value for name, value in starting(found, "tms_consumer_lag").items()}


FOUR = [
    consumer_figures("a:a:x", 0),
    consumer_figures("a:a:y", 9),
    consumer_figures("a:b:x", 30),
    consumer_figures("b:a:x", 20),
]


@pytest.mark.parametrize(
    ("per_topic", "expected"),
    [("top", {"a b x": 30, "b a x": 20, "_other _other _other": 9}), ("none", {"_other _other _other": 59})],
)
def test_metrics_of_consumers_show_the_slowest_and_sum_the_others(per_topic: PerTopic, expected: FoundRow) -> None:
    assert lags_of(series_of(empty_status(consumers=FOUR), per_topic, 2)) == expected


def test_metrics_keep_a_shown_consumer_until_another_is_far_slower() -> None:
    made = metrics(empty_status(consumers=FOUR), "top", 2)
    made.update(empty_status(consumers=[*FOUR, consumer_figures("c:c:c", 23)]))
    assert lags_of(series(parse_text(text(made)))) == {"a b x": 30, "b a x": 20, "_other _other _other": 32}
    made.update(empty_status(consumers=[*FOUR, consumer_figures("c:c:c", 27)]))
    assert lags_of(series(parse_text(text(made)))) == {"a b x": 30, "c c c": 27, "_other _other _other": 29}


def test_metrics_of_other_consumers_show_the_worst_of_them() -> None:
    others = [
        consumer_figures("a:a:x", 1, oldest_unread_ms=5_000, position_ms=4_000, counted_ms=9_000),
        consumer_figures("a:a:y", 2, oldest_unread_ms=4_000, position_ms=5_000, counted_ms=8_000),
        consumer_figures("a:a:z", 0, position_ms=0, counted_ms=8_500),
        consumer_figures("_other:_other:_other", 4, oldest_unread_ms=7_000, position_ms=6_000, counted_ms=9_500),
    ]
    assert starting(series_of(empty_status(consumers=others), "none"), "tms_consumer") == {
        "tms_consumer_lag_messages _other _other _other": 7,
        "tms_consumer_oldest_unread_timestamp_seconds _other _other _other": 4,
        "tms_consumer_position_timestamp_seconds _other _other _other": 4,
        "tms_consumer_stats_timestamp_seconds _other _other _other": 8,
    }
    assert lags_of(series_of(empty_status(consumers=others[3:]), "top")) == {"_other _other _other": 4}
    assert lags_of(series_of(empty_status(consumers=others), "top", 1)) == {"a a y": 2, "_other _other _other": 5}


OTHER = "_other _other"
SOME = [queue("a:a", 100), queue("a:b", 300), queue("a:c", 200, messages=5, counted_ms=1_000), queue("b:a", 50)]


def sizes_of(found: FoundRow) -> FoundRow:
    return {name.partition(" ")[2]: value for name, value in starting(found, "tms_topic_bytes").items()}


def test_metrics_of_top_topics_sum_the_others() -> None:
    assert sizes_of(series_of(empty_status(topics=SOME), "top", 2)) == {"a b": 300, "a c": 200, OTHER: 150}


def test_metrics_of_top_topics_skip_uncounted_topics() -> None:
    topics = [queue("a:a", None), queue("a:b", None), queue("a:c", 1)]
    assert sizes_of(series_of(empty_status(topics=topics), "top", 1)) == {"a c": 1}


def test_metrics_of_other_topics_span_the_oldest_and_newest_of_them() -> None:
    topics = [
        queue("a:a", 1, oldest_ms=3_000, newest_ms=4_000, counted_ms=9_000),
        queue("a:b", 2, oldest_ms=2_000, newest_ms=5_000, counted_ms=8_000, messages=3),
        queue("a:c", 0, messages=0, counted_ms=8_500),
        queue("a:d", None),
    ]
    assert starting(series_of(empty_status(topics=topics), "none"), "tms_topic") == {
        f"tms_topic_messages {OTHER}": 4,
        f"tms_topic_bytes {OTHER}": 3,
        f"tms_topic_stats_timestamp_seconds {OTHER}": 8,
        f"tms_topic_oldest_message_timestamp_seconds {OTHER}": 2,
        f"tms_topic_newest_message_timestamp_seconds {OTHER}": 5,
    }


@pytest.mark.parametrize("per_topic", ["top", "none"])
def test_metrics_of_a_topic_named_other_count_it_with_the_others(per_topic: PerTopic) -> None:
    found = series_of(empty_status(topics=[queue("_other:_other", 1000), queue("a:a", 1)]), per_topic, 1)
    assert sizes_of(found)[OTHER] == (1001 if per_topic == "none" else 1000)


def test_metrics_of_top_topics_replace_one_only_if_a_fifth_smaller() -> None:
    made = metrics(per_topic="top", top=1)
    shown = []
    for a, b in [(100, 90), (100, 110), (100, 125), (100, 126), (110, 126), (160, 128), (161, 128), (0, 0)]:
        made.update(empty_status(topics=[queue("n:a", a), queue("n:b", b)]))
        shown.append(next(name for name in sizes_of(series(parse_text(text(made)))) if name != OTHER))
    assert shown == ["n a", "n a", "n a", "n b", "n b", "n b", "n a", "n a"]


names = st.integers(0, 12).map(lambda number: TopicName("n", str(number)))


@given(st.dictionaries(names, st.integers(0, 100)), st.sets(names), st.integers(1, 8))
def test_largest_leaves_out_smaller_topics(sizes: dict[TopicName, int], before: set[TopicName], top: int) -> None:
    chosen = largest(sizes, before, top)
    assert len(chosen) == min(top, len(sizes))
    for out in sizes.keys() - chosen:
        for taken in chosen:
            if out in before and taken not in before:
                assert sizes[out] < 0.8 * sizes[taken]
            elif out in before or taken not in before:
                assert sizes[out] <= sizes[taken]
            else:
                assert 0.8 * sizes[out] <= sizes[taken]


HOSTILE = [
    'a"} 1\ntms_janitor_paused 1',
    "\\",
    'a\\"',
    "a\nb",
    "a\\nb",
    "a\rb",
    "\x00\x01\x7f",
    "}",
    "# EOF",
    "{a=1}",
    "ünïcödé \u2028 \U0001f4a9",
    "x" * 10_000,
    " ",
]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_metrics_with_a_hostile_topic_name_escape_it(name: str) -> None:
    made = metrics(empty_status(topics=[TopicFigures(name, name, 1, 60, size_bytes=7, messages=1)]))
    plain = {name for name in series_of(empty_status()) if not name.startswith("tms_topic")}
    for families in (parse_text(text(made)), parse_openmetrics(text(made, "application/openmetrics-text"))):
        found = series(families)
        assert found[f"tms_topic_bytes {name} {name}"] == 7
        assert found.keys() - plain == {f"tms_topic_bytes {name} {name}", f"tms_topic_messages {name} {name}"}


def test_metrics_with_a_non_unicode_name_replace_its_bytes() -> None:
    found = series_of(
        empty_status(topics=[TopicFigures("a", "b\ud800", 1, 60, size_bytes=7)], skew_seconds={"\udc80": 1.0})
    )
    assert found["tms_topic_bytes a b?"] == 7
    assert found["tms_janitor_clock_skew_seconds ?"] == 1


PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("application/openmetrics-text", True),
        ("Application/OpenMetrics-Text; Version=1.0.0", True),
        ('application/openmetrics-text; version="1.0.0"; escaping=allow-utf-8', True),
        (PROMETHEUS, True),
        ("application/openmetrics-text; version=0.0.1", False),
        ("application/openmetrics-text; version=9.0.0, text/plain", False),
        ("application/openmetrics-text;q=0.2, text/plain;q=0.3", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=nan", True),
        ("text/plain; version=one", False),
        (";;,=,q=;", False),
        ("\x00\udc80", False),
    ],
)
def test_metrics_are_openmetrics_if_accepted(accept: str | None, openmetrics: bool) -> None:
    body, content_type = metrics(full_status()).render(accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0" if openmetrics else "text/plain;")
    assert body.endswith(b"# EOF\n") is openmetrics


def test_metrics_after_an_update_do_not_read_the_status_again() -> None:
    topics, counters = [queue("a:b", 1)], counter("rows_inverted_total", 1)
    made = metrics(empty_status(topics=topics, counters=counters))
    before = series(parse_text(text(made)))
    topics.clear()
    counters.clear()
    assert series(parse_text(text(made))) == before


def test_metrics_after_a_failed_update_stay_unchanged() -> None:
    made = metrics(full_status())
    with pytest.raises(ValueError, match="nonsense"):
        made.update(empty_status(boundary=BoundaryFigures("nonsense")))
    assert series(parse_text(text(made))) == series_of(full_status())


@pytest.mark.parametrize(
    "status",
    [
        full_status(),
        empty_status(),
        empty_status(topics=[TopicFigures(name, name, 1, 60, size_bytes=7) for name in HOSTILE]),
    ],
    ids=["full", "empty", "hostile"],
)
def test_metrics_pass_the_check_of_promtool(status: Status) -> None:
    promtool = require_tool("promtool", "apt-get install prometheus, or make system-deps")
    body, _ = metrics(status).render()
    checked = subprocess.run([promtool, "check", "metrics"], input=body, capture_output=True, timeout=60, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def documented_metrics() -> dict[str, tuple[str, dict[str, frozenset[str] | None]]]:
    """Return type and label values of each metric in the page's tables; None for values that are only described."""
    rows = re.findall(r"^\| `([a-z_]+)` \| (\w+) \| (.*?) \| .+ \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) == len({name for name, _, _ in rows})
    return {name: (kind, _labels(cell)) for name, kind, cell in rows}


def _labels(cell: str) -> dict[str, frozenset[str] | None]:
    found: dict[str, frozenset[str] | None] = {}
    for part in filter(None, cell.strip().split("; ")):
        name, _, values = part.partition(": ")
        found[name.strip("`")] = frozenset(re.findall("`([^`]+)`", values)) or None
    return found


def exported_metrics() -> dict[str, tuple[str, dict[str, frozenset[str] | None]]]:
    """Return type and label values of each metric in the catalogue, and of the metrics of prometheus-client."""
    own = {item.name: (item.kind, label_values(item)) for item in CATALOGUE}
    added: dict[str, tuple[str, dict[str, frozenset[str] | None]]] = {}
    for family in metrics().registry.collect():
        if not family.name.startswith(OWN):
            name = family.name + ("_total" if family.type == "counter" else "")
            added[name] = (family.type, dict.fromkeys(family.samples[0].labels))
    return {**own, **added}


def test_reference_page_lists_exactly_the_exported_metrics() -> None:
    assert documented_metrics() == exported_metrics(), "correct docs/reference/metrics.md"


def test_exported_metrics_match_the_catalogue() -> None:
    """Compare the catalogue, from which the reference page is checked, with the exported metrics."""
    families = [family for family in parse_text(text(metrics(full_status()))) if family.name.startswith(OWN)]
    shown = {family.name + ("_total" if family.type == "counter" else ""): family for family in families}
    assert set(shown) == {item.name for item in CATALOGUE}
    for item in CATALOGUE:
        assert shown[item.name].type == item.kind
        for sample in shown[item.name].samples:
            assert set(sample.labels) == set(item.labels)
            if item.known is not None:
                assert tuple(sample.labels[label] for label in item.labels) in item.known


def alerts() -> list[tuple[str, str, str]]:
    """Return name, expression and duration of each alert of the page."""
    section = PAGE.partition("## What to alert on")[2]
    return re.findall(r"^\| ([^|`]+) \| `([^`]+)` \| (\w+) \| .+ \|$", section, flags=re.MULTILINE)


def test_alerts_name_existing_metrics_and_label_values() -> None:
    assert len(alerts()) == PAGE.partition("## What to alert on")[2].count("\n| ") - 1
    known = {item.name: label_values(item) for item in CATALOGUE}
    for _, expression, _ in alerts():
        for name, selector in re.findall(r"(tms_\w+)(?:\{([^}]*)\})?", expression):
            assert name in known, expression
            for label, value in re.findall(r'(\w+)="(\w+)"', selector):
                assert value in (known[name][label] or ()), expression


def test_alerts_pass_the_check_of_promtool(tmp_path: Path) -> None:
    promtool = require_tool("promtool", "apt-get install prometheus, or make system-deps")
    rules = [{"alert": name, "expr": expression, "for": wait} for name, expression, wait in alerts()]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "page", "rules": rules}]}), encoding="utf-8")
    checked = subprocess.run([promtool, "check", "rules", file], capture_output=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr
    assert len(rules) > 2

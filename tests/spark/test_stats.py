"""Statistics of a small store with known counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from janitor.spark import stats
from janitor.spark.source.source import register
from janitor.state.records import Note
from janitor.state.sqlite.state import SqliteState
from janitor.stats.topic_sizes import TopicSizeCounter
from janitor.sweep.transactions import TransactionView
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, pointer, save_snapshot, topic, unknown_topic, visibility
from tms_core.clock import ManualClock, SystemClock
from tms_core.errors import StoreNotFound
from tms_core.tables.base import Store
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId

ORDERS, BIG = TopicId("default", "orders"), TopicId("default", "big")
ORPHAN, REFERENCED, MISSING, INVALID = (pointer(NOW_MS - 2 * DAY, number) for number in range(4))
OPEN = pointer(NOW_MS - HOUR)


def fill(store: Store) -> None:
    orders = topic(store, "default:orders", ttl_seconds=86_400, generation=2)
    orders.at(1).plain(NOW_MS, NOW_MS)
    orders.plain(NOW_MS, NOW_MS - 2 * HOUR, NOW_MS - 2 * DAY, NOW_MS - 8 * DAY, NOW_MS - 40 * DAY)
    orders.tx(INVALID, NOW_MS - MINUTE).tx(OPEN, NOW_MS - MINUTE)
    big = topic(store, "default:big", ttl_seconds=86_400)
    big.stored(ORPHAN, NOW_MS - 2 * DAY, NOW_MS)
    big.stored(REFERENCED, NOW_MS - 2 * DAY, NOW_MS - 2 * DAY).ref(REFERENCED, NOW_MS - MINUTE)
    big.ref(-MISSING, NOW_MS - MINUTE)
    unknown_topic(store, "default:unknown").plain(NOW_MS - 50 * DAY)


@pytest.fixture
def view() -> TransactionView:
    """Return a view with an open and an invalid transaction."""
    return TransactionView(visibility(NOW_MS, [INVALID], [OPEN]), NOW_MS, HOUR)


@pytest.fixture
def snapshots(tmp_path: Path) -> Path:
    """Return a folder with a recent snapshot of the same transactions, which the source requires."""
    save_snapshot(tmp_path / "tx", visibility(SystemClock().now_ms(), [INVALID], [OPEN]))
    return tmp_path / "tx"


def test_stats_of_a_store_are_counted_saved_and_written(
    spark: SparkSession, place: Path, view: TransactionView, snapshots: Path, tmp_path: Path
) -> None:
    with LevelDBStore(place, create=True) as store:
        fill(store)
        living = stats.existing_generations(store)
        state, clock = SqliteState.in_memory(), ManualClock(NOW_MS)
        TopicSizeCounter(store, state, clock, rows_per_second=10_000).step()
    register(spark)
    options = {"leveldb": str(place), "snapshots": str(snapshots)}
    found = {(one.topic, one.generation): one for one in stats.count(spark, options, NOW_MS, view)}
    assert list(found) == [(BIG, 1), (ORDERS, 1), (ORDERS, 2), (TopicId("default", "unknown"), 1)]

    big, old, orders, unknown = found.values()
    assert (orders.rows, orders.payload_rows, orders.oldest_ms, orders.newest_ms) == (7, 0, NOW_MS - 40 * DAY, NOW_MS)
    assert dict(orders.ages) == {"under_1h": 3, "under_1d": 1, "under_7d": 1, "under_30d": 1, "older": 1}
    assert orders.invalid_transaction == 1
    assert (dict(orders.overdue), orders.blocking_transaction) == ({"expired": 3, "old_generation": 0}, OPEN)
    assert dict(old.overdue) == {"expired": 0, "old_generation": 2}
    assert (big.rows, big.payload_rows, big.orphan_payloads, big.missing_payloads) == (2, 4, 2, 1)
    assert dict(big.overdue) == {"expired": 1, "old_generation": 0}, "a message references the other expired payload"
    assert dict(unknown.overdue) == {"expired": 0, "old_generation": 0}
    shown = orders.to_json()
    assert (shown["overdue_share"]["expired"], shown["blocking_transaction"]) == (3 / 7, str(OPEN))
    assert shown["blocking_since_ms"] == NOW_MS - HOUR

    # The background count has the same result.
    counted = {name: replace(count, counted_ms=NOW_MS) for name, count in state.counts().items()}
    stats.save(state, list(found.values()), {**living, TopicId("a", "empty"): 3}, NOW_MS, whole=True)
    assert state.note(Note.STATISTICS) == {
        "counted_ms": NOW_MS,
        "rows": sum(one.rows for one in found.values()),
        "payload_rows": 4,
        "size_bytes": sum(one.size_bytes for one in found.values()),
        "overdue": {"expired": 4, "old_generation": 2},
        "orphans": 2,
        "missing": 1,
        "blocking": str(OPEN),
        "blocking_topic": "default:orders, generation 2",
        "blocking_since_ms": NOW_MS - HOUR,
    }
    assert {name: state.counts()[name] for name in counted} == counted
    assert state.counts()[TopicId("a", "empty")].messages == 0

    path = stats.write(spark, list(found.values()), str(tmp_path / "out"), "2023-11-14")
    stats.write(spark, list(found.values()), str(tmp_path / "out"), "2023-11-14")
    assert path == f"{tmp_path}/out/day=2023-11-14"
    table = pq.read_table(path)
    assert table.column("topic").to_pylist() == ["big", "orders", "orders", "unknown"]
    assert dict(table.column("ages").to_pylist()[2])["older"] == 1
    assert dict(table.column("overdue_share").to_pylist()[2])["expired"] == 3 / 7


def test_stats_with_what_if_count_rows_of_that_policy(spark: SparkSession, place: Path, view: TransactionView) -> None:
    with LevelDBStore(place, create=True) as store:
        fill(store)
    register(spark)
    options = {"leveldb": str(place), "what_if": "ttl=1h,topic=default:orders", "topics": "default:o*"}
    _, orders = stats.count(spark, options, NOW_MS, view)
    assert orders.overdue["expired"] == 4


def test_stats_of_missing_store_raise_store_not_found(spark: SparkSession, place: Path, view: TransactionView) -> None:
    register(spark)
    with pytest.raises(StoreNotFound):
        stats.count(spark, {"leveldb": str(place)}, NOW_MS, view)

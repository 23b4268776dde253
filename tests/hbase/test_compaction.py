"""Compaction on a real HBase: which regions, when, how fast, and with which effect."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import happybase
import pytest

from tests.builders import HOUR, janitor, topic
from tests.hbase.server import HBaseServer
from tests.hbase.tables import PatientStore, Tables, empty
from tests.hbase.thrift_calls import watch_calls
from tms_core.clock import SystemClock
from tms_core.rowkey import salt
from tms_core.tables.base import KEYS, MessageValue
from tms_core.tables.hbase import regions as hbase_regions
from tms_core.tables.hbase.regions import FLUSHED_MS, PAUSE_SECONDS
from tms_core.tables.hbase.rows import FIRST_KEYS
from tms_core.tables.hbase.store import HBaseStore

BUCKETS = 4
ROW = MessageValue(None, b"x")
P = b"d:\x00\x00\x00p"
#: A small minimum for a compaction, for speed.
ENOUGH_ROWS = 90


class ManualMonotonicClock(SystemClock):
    """The wall clock of this machine, by which HBase stamps cells, with a manual monotonic clock.

    Attributes:
        slept: the sleeps in seconds, each of which advances the monotonic clock.
    """

    def __init__(self) -> None:
        self.time_ms = 0
        self.slept: list[float] = []

    def monotonic_ms(self) -> int:
        return self.time_ms

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time_ms += round(seconds * 1000)


@pytest.fixture
def clock() -> ManualMonotonicClock:
    return ManualMonotonicClock()


@pytest.fixture(scope="module", params=[1, BUCKETS], ids=["one region", "one region per salt"])
def regions(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def namespace(hbase_tables: Tables, regions: int) -> str:
    return hbase_tables.make(buckets=BUCKETS, cuts=[bytes([byte]) for byte in range(1, regions)])


@pytest.fixture(autouse=True)
def _low_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hbase_regions, "WORTHWHILE_ROWS", ENOUGH_ROWS)


@pytest.fixture
def store(hbase_tables: Tables, namespace: str, clock: ManualMonotonicClock) -> Iterator[HBaseStore]:
    with hbase_tables.open(namespace, buckets=BUCKETS) as other:
        empty(other, namespace)
    with PatientStore([hbase_tables.server.thrift], namespace=namespace, buckets=BUCKETS, clock=clock) as opened:
        yield opened


def fill(store: HBaseStore, rows: int) -> list[bytes]:
    keys = [b"k%06d" % number for number in range(rows)]
    store.message.put([(key, ROW) for key in keys])
    return keys


def compact(store: HBaseStore) -> int:
    """Compact each part and return the number of compactions."""
    before = store.pool.calls["majorCompact"]
    for part in store.parts():
        part.message.compact(b"", b"\xff")
    return store.pool.calls["majorCompact"] - before


def test_compaction_of_emptied_regions_runs_once_with_pauses(
    store: HBaseStore, clock: ManualMonotonicClock, regions: int
) -> None:
    keys = fill(store, BUCKETS * 3 * ENOUGH_ROWS)
    live = keys[::3]
    store.message.delete(sorted(set(keys) - set(live)))
    assert compact(store) == 0, "the delete markers may still be in memory"
    clock.time_ms += FLUSHED_MS + HOUR
    assert compact(store) == regions
    assert len(clock.slept) == regions - 1
    assert all(0 < seconds <= PAUSE_SECONDS for seconds in clock.slept)
    assert compact(store) == 0
    assert store.message.read(KEYS, b"", None, len(keys)).items == live


def test_compaction_rarely_counts_rows_of_mostly_full_regions(
    store: HBaseStore, clock: ManualMonotonicClock, regions: int
) -> None:
    keys = fill(store, BUCKETS * 20 * ENOUGH_ROWS)
    counts: list[bytes] = []

    def record_counts(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "scannerOpenWithScan" and arguments[1].filterString == FIRST_KEYS.filter:
            counts.append(arguments[1].startRow)

    watch_calls(store.pool, record_counts)
    for part, counted, compacted in ((slice(0, 3), True, 0), (slice(3, 4), False, 0), (slice(4, 14), True, regions)):
        store.message.delete([key for number, key in enumerate(keys) if number % 20 in range(20)[part]])
        clock.time_ms += FLUSHED_MS + HOUR
        counts.clear()
        assert compact(store) == compacted
        assert bool(counts) == counted


def test_completed_compaction_removes_delete_markers(
    hbase: HBaseServer, store: HBaseStore, clock: ManualMonotonicClock, namespace: str, witness: happybase.Connection
) -> None:
    keys = fill(store, BUCKETS * 2 * ENOUGH_ROWS)
    table = f"{namespace}:tms.message"
    hbase.command("flush", table)
    message = witness.table(table.encode())
    row = salt(keys[0], BUCKETS) + keys[0]
    long_ago_ms = time.time_ns() // 1_000_000 - HOUR
    store.message.delete(keys)

    def is_hidden() -> bool:
        """Return whether a delete marker still hides a cell with an old timestamp."""
        message.put(row, {P: b"old"}, timestamp=long_ago_ms)
        return message.row(row) == {}

    assert is_hidden()
    hbase.command("flush", table)
    # With these settings, compactions requested over Thrift are major: see tms_core/tables/hbase/regions.py.
    hbase.command("set", table, "hbase.hregion.majorcompaction", 1)
    hbase.command("set", table, "hbase.hregion.majorcompaction.jitter", 0)
    clock.time_ms += FLUSHED_MS + HOUR
    store.message.compact(b"", b"\xff")
    # HBase compacts in the background, and only the time limit of the test ends this wait.
    while is_hidden():
        time.sleep(0.1)


def test_compaction_is_requested_after_several_small_sweeps(
    store: HBaseStore, clock: ManualMonotonicClock, regions: int
) -> None:
    orders = topic(store, "default:orders", ttl_seconds=3600)
    kit = janitor(store, batch_rows=50, workers=2).adopt()
    calls = []
    for _ in range(6):
        now_ms = kit.clock.now_ms()
        orders.plain(*range(now_ms - 2 * HOUR, now_ms - 2 * HOUR + ENOUGH_ROWS * regions * 3 // 8), now_ms)
        store.pool.calls.clear()
        assert kit.engine.run_once().errors == []
        calls.append(store.pool.calls["majorCompact"])
        clock.time_ms += FLUSHED_MS + HOUR
        kit.clock.advance(HOUR)
    assert calls[:2] == [0, 0]
    assert sum(calls) >= regions

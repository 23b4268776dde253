"""P13: a sweep on Spark compared with a sweep of a single process on the same rows, in LevelDB and in HBase.

In LevelDB only the driver can delete; tasks only search. Therefore the benchmark sweeps two stores. In the first one,
all rows are due, so tasks have nothing to search, and both sweeps should take the same time. The second one has live
payloads and live rows of transactions, one of which is invalid, so that nearly all work is the search. Times exclude
the start of the JVM (a warm-up turn) and compaction. A task reads each byte once; the driver reads deleted rows again.

In HBase each task deletes the rows under one salt, and the single process has the same number of workers. HBase, Spark
and the sweep compete for the processors of one machine: the figures show the overhead of Spark there.
"""

from __future__ import annotations

import secrets
import shutil
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figure import Figure, report
from benchmarks.hbase import BUCKETS, server, table_copies
from benchmarks.p1_sweep import BenchClock
from benchmarks.stores import BODY, NOW_MS, TERMS, build, engine, topic_names
from janitor.report import Report
from janitor.run.engine import Engine
from janitor.run.prepare import Deps
from janitor.settings import load
from janitor.spark.access import Access
from janitor.spark.session import session
from janitor.spark.sweep.engine import Sender, SparkSender, cutter, spark_engine
from janitor.spark.sweep.task import StoreEnvironment
from janitor.state.base import State
from janitor.state.hbase.state import HBaseState
from janitor.state.sqlite.state import SqliteState
from janitor.sweep.sweep import Threads
from tests.hbase.tables import Tables
from tests.support import size
from tms_core.rowkey import MessageKey, PayloadKey
from tms_core.tables.base import MessageValue, Store
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.leveldb.clone import copy_open_store
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.transaction.model import TX_PER_MS, VisibilityState
from tms_core.transaction.source.source import Loaded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = size("TMS_BENCH_ROWS", 1_000_000)
HBASE_ROWS = size("TMS_BENCH_HBASE_ROWS", 2_000_000)
WARM_ROWS = 60_000
CORES = 2
WORKERS = 4
TURNS, HBASE_TURNS = 3, 2
#: The invalid transaction started a minute ago, when its messages were published.
INVALID = (NOW_MS - 60_000) * TX_PER_MS
COMMITTED = INVALID + 1


class OneInvalid:
    """A source of a snapshot with one invalid transaction."""

    def latest(self) -> Loaded:
        newest = NOW_MS * TX_PER_MS
        return Loaded(VisibilityState(NOW_MS, newest, newest, array("q", [INVALID]), ()), "snapshot")


def build_live(path: Path) -> None:
    """Write live rows of transactions, one row in ten thousand of an invalid one, and half as many live payloads."""
    [name] = topic_names(1)
    build(path, [name], 0, NOW_MS, 1)
    with LevelDBStore(path) as store:
        for first in range(0, ROWS, 10_000):
            numbers = range(first, min(first + 10_000, ROWS))
            keys = [MessageKey(name, 1, NOW_MS - 60_000 + number // 60, number % 60).pack() for number in numbers]
            pointers = [INVALID if number % 10_000 == 0 else COMMITTED for number in numbers]
            values = [MessageValue(pointer, BODY) for pointer in pointers]
            store.message.put(list(zip(keys, values, strict=True)))
            payloads = [PayloadKey(name, 1, COMMITTED + number, NOW_MS - 60_000, 0).pack() for number in numbers[::2]]
            store.payload.put([(key, BODY) for key in payloads])


@contextmanager
def open_on_spark(spark: SparkSession, path: Path) -> Iterator[Engine]:
    """Yield a janitor on a LevelDB store whose tasks only search."""
    access = Access(load(None, {}, {"leveldb": str(path)}).settings)

    @contextmanager
    def open_copy() -> Iterator[Sender]:
        with copy_open_store(path, path.with_name("state")) as copied:
            yield SparkSender(spark, StoreEnvironment(access.at(copied)))

    with LevelDBStore(path) as store, SqliteState.in_memory() as state:
        yield make_spark_engine(
            store, state, SparkSender(spark, StoreEnvironment(access)), access, open_reading=open_copy
        )


def make_spark_engine(store: Store, state: State, sender: Sender, access: Access, **options: Any) -> Engine:
    deps = Deps(store, state, OneInvalid(), BenchClock(), TERMS, token_hex=secrets.token_hex)
    return spark_engine(deps, sender=sender, cut=cutter(access, CORES), **options)


@contextmanager
def open_in_process(path: Path) -> Iterator[Any]:
    """Yield a janitor in one process, without Spark."""
    with LevelDBStore(path) as store:
        yield engine(store, BenchClock(), source=OneInvalid())


def measure_sweep(run: Callable[[], Report], rows: int) -> float:
    """Return the seconds of a sweep without compaction."""
    started = time.perf_counter()
    done = run()
    seconds = time.perf_counter() - started - done.phase_seconds["compact"]
    changed = sum(entry.rows for entry in done.topics)
    if done.errors or changed != rows:
        raise RuntimeError(f"the sweep changed {changed} of {rows} rows: {done.errors}")
    return seconds


def measure_leveldb(spark: SparkSession, source: Path, rows: int) -> tuple[float, float]:
    """Return the seconds on Spark and in one process, each the median of the turns."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(TURNS + 1):
        for tasks in (True, False):
            copy = shutil.copytree(source, source.with_name("copy"))
            with open_on_spark(spark, copy) if tasks else open_in_process(copy) as janitor:
                elapsed = measure_sweep(lambda: janitor.run_once(adopt=True), rows)
            shutil.rmtree(copy)
            if turn:
                seconds[tasks].append(elapsed)
    return statistics.median(seconds[True]), statistics.median(seconds[False])


def measure_hbase(spark: SparkSession) -> tuple[float, float]:
    """Return the same seconds for tables in which all rows are due."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with server() as running, Tables(running) as tables:
        # A sweep of a small store warms up the JVMs of HBase and Spark.
        with table_copies(tables, WARM_ROWS, topics=1) as copy:
            for tasks in (True, False) * 2:
                sweep_hbase_copy(spark if tasks else None, running.thrift, copy, WARM_ROWS)
        with table_copies(tables, HBASE_ROWS, topics=1) as copy:
            for tasks in (True, False) * HBASE_TURNS:
                elapsed = sweep_hbase_copy(spark if tasks else None, running.thrift, copy, HBASE_ROWS)
                seconds[tasks].append(elapsed)
    return statistics.median(seconds[True]), statistics.median(seconds[False])


def sweep_hbase_copy(
    spark: SparkSession | None, thrift: str, copy: Callable[[], AbstractContextManager[str]], rows: int
) -> float:
    """Return the seconds of one sweep of a copy, on Spark or in this process, with the state in HBase."""
    with copy() as namespace:
        access = Access(load(None, {"TMS_STORAGE__HBASE__NAMESPACE": namespace}, {"hbase": thrift}).settings)
        storage = access.settings.storage.hbase
        with HBaseStore(storage.model_copy(update={"connections": WORKERS})) as store, HBaseState(storage) as state:
            deps = Deps(store, state, OneInvalid(), BenchClock(), TERMS, token_hex=secrets.token_hex)
            if spark is None:
                janitor = Engine(replace(deps, division=Threads(WORKERS)))
            else:
                janitor = spark_engine(
                    deps, sender=SparkSender(spark, StoreEnvironment(access)), cut=cutter(access, None, state.counts)
                )
            return measure_sweep(lambda: janitor.run_once(adopt=True), rows)


def main() -> None:
    with session(f"local[{CORES},4]") as spark:
        with tempfile.TemporaryDirectory(prefix="p13-") as scratch:
            due, live = Path(scratch) / "due" / "store", Path(scratch) / "live" / "store"
            build(due, topic_names(10), ROWS // 10, NOW_MS - 7_200_000, 1)
            build_live(live)
            files = sum(file.stat().st_size for file in live.rglob("*") if file.is_file())
            seconds = {
                "due": measure_leveldb(spark, due, ROWS),
                "live": measure_leveldb(spark, live, -(-ROWS // 10_000)),
            }
        searched = ROWS + ROWS // 2
        ratio = {kind: round(single / tasks, 3) for kind, (tasks, single) in seconds.items()}
        details: dict[str, Any] = {
            "rows": ROWS,
            "cores": CORES,
            "rows_looked_at_per_second": round(searched / seconds["live"][0]),
            "rows_looked_at_per_second_alone": round(searched / seconds["live"][1]),
            "bytes_read_per_row_looked_at": round(files / searched, 1),
            "all_due_ratio": ratio["due"],
            "rows_deleted_per_second": round(ROWS / seconds["due"][0]),
            "rows_deleted_per_second_alone": round(ROWS / seconds["due"][1]),
            "python": sys.version.split()[0],
        }
        name = "LevelDB sweep of live rows, alone ÷ with two tasks that look"
        report(Figure("P13", name, ratio["live"], details=details))
        tasks, single = measure_hbase(spark)
    details = {
        "rows": HBASE_ROWS,
        "salts": BUCKETS,
        "cores": CORES,
        "rows_deleted_per_second": round(HBASE_ROWS / tasks),
        "rows_deleted_per_second_alone": round(HBASE_ROWS / single),
        "workers_alone": WORKERS,
    }
    report(Figure("P13", "HBase sweep, alone ÷ on Spark", round(single / tasks, 3), at_least=0.7, details=details))


if __name__ == "__main__":
    main()

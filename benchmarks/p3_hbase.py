"""P3: rows an HBase sweep deletes per second, beside a bare happybase loop that scans and deletes the same rows.

Both go through as many connections, salt by salt, read keys only and delete by batches of the same size; each turn has
new tables, whose rows are in files. The sweep's time is all of ``run_once`` but asking for compaction, which happens in
the background and which the loop does not do. A loop of HBase's own Java client, in a warm JVM and without Thrift, does
the same. HBase itself runs on the same machine, so that more workers mostly find its processors busy.

A topic has some thousand rows under each salt, whatever the size. The same rows in ten times as many topics are a sweep
of many small batches, each of which reads its topic's metadata again (rule S2), while the loop knows no topics: what
that costs is in the details.
"""

from __future__ import annotations

import statistics
import subprocess
import time

import happybase

from benchmarks.figure import Figure, report
from benchmarks.hbase import BUCKETS, by_salt, filled, server
from benchmarks.p1_sweep import BenchClock
from benchmarks.stores import BATCH_ROWS, engine
from janitor.law.policy import Rule
from tests import maven
from tests.hbase.server import HERE, HBaseServer
from tests.hbase.tables import Tables
from tests.support import size
from tms_core.tables.hbase.store import HBaseStore

#: ``TMS_BENCH_HBASE_ROWS=1000000`` is the full size.
ROWS = size("TMS_BENCH_HBASE_ROWS", 60_000)
TOPICS = max(1, ROWS // 100_000)
SMALL_TOPICS = 10 * TOPICS
WORKERS = (1, 2, 4)
#: The bar is about this many.
JUDGED = 4
TURNS = 3


def sweep(address: str, namespace: str, workers: int) -> tuple[float, float, float]:
    """Seconds a sweep takes, and operations and Thrift calls per 1,000 rows."""
    with HBaseStore([address], namespace=namespace, connections=workers) as store:
        started = time.perf_counter()
        done = engine(store, BenchClock(), workers=workers).run_once(adopt=True)
        seconds = time.perf_counter() - started - done.phase_seconds["compact"]
        calls = store.pool.calls.total()
    if done.total(Rule.EXPIRED) != ROWS or done.errors:
        raise RuntimeError(f"swept {done.total(Rule.EXPIRED)} of {ROWS} rows: {done.errors}")
    return seconds, done.store_calls / ROWS * 1000, calls / ROWS * 1000


def bare(address: str, namespace: str, connections: int) -> float:
    """Seconds a plain loop takes."""
    started = time.perf_counter()

    def clean(table: happybase.Table, salt: bytes) -> None:
        batch = table.batch(batch_size=BATCH_ROWS)
        keys_only = b"FirstKeyOnlyFilter() AND KeyOnlyFilter()"
        stop = bytes([salt[0] + 1])
        for key, _ in table.scan(row_start=salt, row_stop=stop, filter=keys_only, batch_size=BATCH_ROWS):
            batch.delete(key, columns=[b"d"])
        batch.send()

    by_salt(address, namespace, connections, clean)
    return time.perf_counter() - started


def java(running: HBaseServer, threads: int, *namespaces: str) -> float:
    """Seconds HBase's own client takes for the last of some tables."""
    assert running.folder is not None
    class_path = ":".join(map(str, [running.folder / "conf", *maven.build(HERE)]))
    tables = [f"{namespace}:tms.message" for namespace in namespaces]
    command = ["java", "-cp", class_path, "fixture.Clean", str(BUCKETS), str(threads), str(BATCH_ROWS), *tables]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    kinds = [*((workers, TOPICS) for workers in WORKERS), (JUDGED, SMALL_TOPICS)]
    ours: dict[tuple[int, int], list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    plain: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
    with server() as running, Tables(running) as tables:
        address = running.thrift
        # Both once beforehand, so that HBase's own code is warm.
        for turn in range(TURNS + 1):
            for workers, topics in kinds if turn else [(JUDGED, TOPICS)]:
                with filled(tables, ROWS, topics=topics) as namespace:
                    swept = sweep(address, namespace, workers)
                with filled(tables, ROWS, topics=topics) as namespace:
                    looped = bare(address, namespace, workers)
                if turn:
                    ours[workers, topics].append(swept)
                    plain[workers, topics].append(looped)
        with filled(tables, ROWS, topics=TOPICS) as warming, filled(tables, ROWS, topics=TOPICS) as namespace:
            java_seconds = java(running, JUDGED, warming, namespace)

    def rate(seconds: list[float]) -> int:
        return round(ROWS / statistics.median(seconds))

    ratio = {
        kind: round(statistics.median(b / o[0] for o, b in zip(ours[kind], plain[kind], strict=True)), 3)
        for kind in kinds
    }
    judged = (JUDGED, TOPICS)
    details = {
        "rows": ROWS,
        "salts": BUCKETS,
        "topics": TOPICS,
        "workers": JUDGED,
        "ratio_by_workers": {workers: ratio[workers, TOPICS] for workers in WORKERS},
        "rows_per_second_by_workers": {workers: rate([one[0] for one in ours[workers, TOPICS]]) for workers in WORKERS},
        "bare_rows_per_second_by_workers": {workers: rate(plain[workers, TOPICS]) for workers in WORKERS},
        "java_rows_per_second": rate([java_seconds]),
        "store_calls_per_1000_rows": round(statistics.median(one[1] for one in ours[judged]), 2),
        "thrift_calls_per_1000_rows": round(statistics.median(one[2] for one in ours[judged]), 2),
        "ratio_in_small_topics": ratio[JUDGED, SMALL_TOPICS],
        "store_calls_per_1000_rows_in_small_topics": round(
            statistics.median(one[1] for one in ours[JUDGED, SMALL_TOPICS]), 2
        ),
    }
    name = "HBase sweep, rows deleted per second ÷ a bare happybase loop's"
    report(Figure("P3", name, ratio[judged], at_least=0.9, details=details))


if __name__ == "__main__":
    main()

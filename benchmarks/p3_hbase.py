"""P3: rows an HBase sweep deletes per second, beside a bare happybase loop that scans and deletes the same rows.

Both go through as many connections, salt by salt, read keys only and delete by batches of the same size; each turn has
new tables, whose rows are in files. The sweep's time is all of ``run_once`` but asking for compaction, which happens in
the background and which the loop does not do. A loop of HBase's own Java client, in a warm JVM and without Thrift, does
the same. HBase itself runs on the same machine, so that more workers mostly find its processors busy.
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
from janitor.policy import Rule
from tests import maven
from tests.hbase.server import HERE, HBaseServer
from tests.hbase.tables import Tables
from tests.support import size
from tms_core.tables.hbase import HBaseStore

ROWS = size("TMS_BENCH_HBASE_ROWS", 100_000)
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
    ours: dict[int, list[tuple[float, float, float]]] = {workers: [] for workers in WORKERS}
    plain: dict[int, list[float]] = {workers: [] for workers in WORKERS}
    with server() as running, Tables(running) as tables:
        address = running.thrift
        # Both once beforehand, so that HBase's own code is warm.
        for turn in range(TURNS + 1):
            for workers in WORKERS if turn else (JUDGED,):
                with filled(tables, ROWS) as namespace:
                    swept = sweep(address, namespace, workers)
                with filled(tables, ROWS) as namespace:
                    looped = bare(address, namespace, workers)
                if turn:
                    ours[workers].append(swept)
                    plain[workers].append(looped)
        with filled(tables, ROWS) as warming, filled(tables, ROWS) as namespace:
            java_seconds = java(running, JUDGED, warming, namespace)

    def rate(seconds: list[float]) -> int:
        return round(ROWS / statistics.median(seconds))

    ratio = {
        workers: round(statistics.median(b / o[0] for o, b in zip(ours[workers], plain[workers], strict=True)), 3)
        for workers in WORKERS
    }
    details = {
        "rows": ROWS,
        "salts": BUCKETS,
        "workers": JUDGED,
        "ratio_by_workers": ratio,
        "rows_per_second_by_workers": {workers: rate([one[0] for one in ours[workers]]) for workers in WORKERS},
        "bare_rows_per_second_by_workers": {workers: rate(plain[workers]) for workers in WORKERS},
        "java_rows_per_second": rate([java_seconds]),
        "store_calls_per_1000_rows": round(statistics.median(one[1] for one in ours[JUDGED]), 2),
        "thrift_calls_per_1000_rows": round(statistics.median(one[2] for one in ours[JUDGED]), 2),
    }
    name = "HBase sweep, rows deleted per second ÷ a bare happybase loop's"
    report(Figure("P3", name, ratio[JUDGED], at_least=0.9, details=details))


if __name__ == "__main__":
    main()

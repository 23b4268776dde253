"""P3: rows that an HBase sweep deletes per second, beside a bare happybase loop and HBase's own Java client.

All three read keys only and delete the same rows salt by salt, over as many connections, in batches of the same size.
Each sweep has tables of its own, whose rows are in files: clones of one snapshot. The time of a sweep is all of
``run_once`` but asking for compaction, which happens in the background and which the loops do not do. HBase runs on the
same machine.

The three take turns on one server. Turns are measured only after two turns of the sweep differ by less than 5 %: the
JVM of a server that has just started compiles for several turns, and that would be measured otherwise. On a machine
with other load they may never be as close; then ``steady`` is false, and the ratios scatter.

A topic has some thousand rows under each salt. The same rows in ten times as many topics are a sweep of many small
batches, each of which reads its topic's metadata again (invariant S2), while the loop knows no topics; the details have
that ratio.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import happybase

from benchmarks.figure import Figure, report
from benchmarks.hbase import BUCKETS, by_salt, copies, server
from benchmarks.p1_sweep import BenchClock
from benchmarks.stores import BATCH_ROWS, engine
from janitor.rules.policy import Rule
from tests import maven
from tests.hbase.server import HERE, HBaseServer
from tests.hbase.tables import Tables
from tests.support import size
from tms_core.settings.models import HBaseSettings
from tms_core.tables.hbase.store import HBaseStore

ROWS = size("TMS_BENCH_HBASE_ROWS", 200_000)
TOPICS = max(1, ROWS // 100_000)
SMALL_TOPICS = 10 * TOPICS
WORKERS = 4
TURNS = size("TMS_BENCH_TURNS", 6)
#: How much the sweep's seconds in two turns may differ once the server is warm, and how many turns that may take.
STEADY, WARM_TURNS = 0.05, 10


def sweep(address: str, namespace: str) -> tuple[float, float, float]:
    """Return the seconds of a sweep, and its operations and Thrift calls per 1,000 rows."""
    with HBaseStore(HBaseSettings(thrift=(address,), namespace=namespace, connections=WORKERS)) as store:
        started = time.perf_counter()
        done = engine(store, BenchClock(), workers=WORKERS).run_once(adopt=True)
        seconds = time.perf_counter() - started - done.phase_seconds["compact"]
        calls = store.pool.calls.total()
    if done.total(Rule.EXPIRED) != ROWS or done.errors:
        raise RuntimeError(f"swept {done.total(Rule.EXPIRED)} of {ROWS} rows: {done.errors}")
    return seconds, done.store_calls / ROWS * 1000, calls / ROWS * 1000


def bare(address: str, namespace: str) -> float:
    """Return the seconds of a plain loop."""
    started = time.perf_counter()

    def clean(table: happybase.Table, salt: bytes) -> None:
        batch = table.batch(batch_size=BATCH_ROWS)
        keys_only = b"FirstKeyOnlyFilter() AND KeyOnlyFilter()"
        stop = bytes([salt[0] + 1])
        for key, _ in table.scan(row_start=salt, row_stop=stop, filter=keys_only, batch_size=BATCH_ROWS):
            batch.delete(key, columns=[b"d"])
        batch.send()

    by_salt(address, namespace, WORKERS, clean)
    return time.perf_counter() - started


@contextmanager
def java_client(running: HBaseServer, threads: int) -> Iterator[Callable[[str], float]]:
    """Start a JVM with HBase's own client; yield a function that cleans a namespace and returns the seconds it took."""
    assert running.folder is not None
    class_path = ":".join(map(str, [running.folder / "conf", *maven.build(HERE)]))
    command = ["java", "-cp", class_path, "fixture.Clean", str(BUCKETS), str(threads), str(BATCH_ROWS)]
    pipe, silent = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=silent) as process:
        tables, seconds = process.stdin, process.stdout
        assert tables is not None
        assert seconds is not None

        def clean(namespace: str) -> float:
            print(f"{namespace}:tms.message", file=tables, flush=True)
            return float(seconds.readline())

        yield clean
        tables.close()


def warm_up(turn: Callable[[], float]) -> tuple[int, bool]:
    """Take turns until two of them in a row differ by less than ``STEADY``; return how many, and whether they did."""
    before = turn()
    for turns in range(2, WARM_TURNS + 1):
        seconds = turn()
        if abs(seconds - before) < STEADY * before:
            return turns, True
        before = seconds
    sys.stderr.write(f"P3: the sweep did not become steady in {WARM_TURNS} turns; other load makes figures scatter\n")
    return WARM_TURNS, False


def main() -> None:
    with server() as running, Tables(running) as tables, java_client(running, WORKERS) as java:
        address = running.thrift
        calls: dict[str, list[tuple[float, float]]] = {"large": [], "small": []}

        def ours(namespace: str, topics: str = "large") -> float:
            seconds, *counted = sweep(address, namespace)
            calls[topics].append((counted[0], counted[1]))
            return seconds

        contenders: dict[str, tuple[int, Callable[[str], float]]] = {
            "ours": (TOPICS, ours),
            "bare": (TOPICS, lambda namespace: bare(address, namespace)),
            "java": (TOPICS, java),
            "ours in small topics": (SMALL_TOPICS, lambda namespace: ours(namespace, "small")),
            "bare in small topics": (SMALL_TOPICS, lambda namespace: bare(address, namespace)),
        }

        with copies(tables, ROWS, topics=TOPICS) as large, copies(tables, ROWS, topics=SMALL_TOPICS) as small:
            sources = {TOPICS: large, SMALL_TOPICS: small}

            def turn() -> dict[str, float]:
                seconds = {}
                for name, (topics, clean) in contenders.items():
                    with sources[topics]() as namespace:
                        seconds[name] = clean(namespace)
                return seconds

            warm_turns, is_steady = warm_up(lambda: turn()["ours"])
            turns = [turn() for _ in range(TURNS)]

    def ratio(name: str, to: str) -> float:
        return round(statistics.median(taken[to] / taken[name] for taken in turns), 3)

    def call_counts(topics: str) -> list[float]:
        return [round(statistics.median(counted), 2) for counted in zip(*calls[topics], strict=True)]

    details = {
        "rows": ROWS,
        "salts": BUCKETS,
        "topics": TOPICS,
        "workers": WORKERS,
        "warm_turns": warm_turns,
        "steady": is_steady,
        "turns": TURNS,
        "rows_per_second": {
            name: round(ROWS / statistics.median(taken[name] for taken in turns)) for name in contenders
        },
        "ratio_to_java": ratio("ours", "java"),
        "ratio_in_small_topics": ratio("ours in small topics", "bare in small topics"),
        "store_and_thrift_calls_per_1000_rows": call_counts("large"),
        "store_and_thrift_calls_per_1000_rows_in_small_topics": call_counts("small"),
    }
    name = "HBase sweep, rows deleted per second ÷ a bare happybase loop's"
    report(Figure("P3", name, ratio("ours", "bare"), at_least=1.1, details=details))


if __name__ == "__main__":
    main()

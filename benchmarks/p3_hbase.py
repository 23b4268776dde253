"""P3: rows that an HBase sweep deletes per second, compared with a bare happybase loop and HBase's Java client.

All three read only keys and delete the same rows salt by salt, with the same number of connections and the same batch
size. Each sweep has separate tables, cloned from one snapshot, whose rows are in files. The time of a sweep is the time
of ``run_once`` without the request for compaction, which runs in the background and which the loops do not make. HBase
runs on the same machine.

The three take turns on one server. Measured turns start after two turns of the sweep differ by less than 5 %, because
the JVM of a new server compiles for several turns. Under other load two turns may never be that close; then ``steady``
is false, and the ratios scatter.

A topic has some thousand rows under each salt. With the same rows in ten times as many topics, a sweep deletes many
small batches and reads the topic's metadata before each batch (invariant S2), unlike the loop; the details have that
ratio.
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
from benchmarks.hbase import BUCKETS, run_by_salt, server, table_copies
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
#: The largest relative difference of two turns on a warm server, and the maximum number of warm-up turns.
MAX_DIFFERENCE, WARM_TURNS = 0.05, 10


def measure_sweep(address: str, namespace: str) -> tuple[float, float, float]:
    """Return the seconds of a sweep, and its operations and Thrift calls per 1,000 rows."""
    with HBaseStore(HBaseSettings(thrift=(address,), namespace=namespace, connections=WORKERS)) as store:
        started = time.perf_counter()
        done = engine(store, BenchClock(), workers=WORKERS).run_once(adopt=True)
        seconds = time.perf_counter() - started - done.phase_seconds["compact"]
        calls = store.pool.calls.total()
    if done.total(Rule.EXPIRED) != ROWS or done.errors:
        raise RuntimeError(f"swept {done.total(Rule.EXPIRED)} of {ROWS} rows: {done.errors}")
    return seconds, done.store_calls / ROWS * 1000, calls / ROWS * 1000


def bare_loop_seconds(address: str, namespace: str) -> float:
    """Return the seconds of a plain loop."""
    started = time.perf_counter()

    def clean(table: happybase.Table, salt: bytes) -> None:
        batch = table.batch(batch_size=BATCH_ROWS)
        keys_only = b"FirstKeyOnlyFilter() AND KeyOnlyFilter()"
        stop = bytes([salt[0] + 1])
        for key, _ in table.scan(row_start=salt, row_stop=stop, filter=keys_only, batch_size=BATCH_ROWS):
            batch.delete(key, columns=[b"d"])
        batch.send()

    run_by_salt(address, namespace, WORKERS, clean)
    return time.perf_counter() - started


@contextmanager
def java_client(running: HBaseServer, threads: int) -> Iterator[Callable[[str], float]]:
    """Start a JVM with HBase's client; yield a function that cleans a namespace and returns the seconds."""
    assert running.folder is not None
    class_path = ":".join(map(str, [running.folder / "conf", *maven.build(HERE)]))
    command = ["java", "-cp", class_path, "fixture.Clean", str(BUCKETS), str(threads), str(BATCH_ROWS)]
    pipe, devnull = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=devnull) as process:
        tables, seconds = process.stdin, process.stdout
        assert tables is not None
        assert seconds is not None

        def clean(namespace: str) -> float:
            print(f"{namespace}:tms.message", file=tables, flush=True)
            return float(seconds.readline())

        yield clean
        tables.close()


def warm_up(turn: Callable[[], float]) -> tuple[int, bool]:
    """Run turns until two consecutive turns hardly differ; return the number of turns, and whether that happened."""
    before = turn()
    for turns in range(2, WARM_TURNS + 1):
        seconds = turn()
        if abs(seconds - before) < MAX_DIFFERENCE * before:
            return turns, True
        before = seconds
    sys.stderr.write(f"P3: the sweep was not steady after {WARM_TURNS} turns; other load makes figures scatter\n")
    return WARM_TURNS, False


def main() -> None:
    with server() as running, Tables(running) as tables, java_client(running, WORKERS) as java:
        address = running.thrift
        calls: dict[str, list[tuple[float, float]]] = {"large": [], "small": []}

        def ours(namespace: str, topics: str = "large") -> float:
            seconds, *counted = measure_sweep(address, namespace)
            calls[topics].append((counted[0], counted[1]))
            return seconds

        candidates: dict[str, tuple[int, Callable[[str], float]]] = {
            "ours": (TOPICS, ours),
            "bare": (TOPICS, lambda namespace: bare_loop_seconds(address, namespace)),
            "java": (TOPICS, java),
            "ours in small topics": (SMALL_TOPICS, lambda namespace: ours(namespace, "small")),
            "bare in small topics": (SMALL_TOPICS, lambda namespace: bare_loop_seconds(address, namespace)),
        }

        with (
            table_copies(tables, ROWS, topics=TOPICS) as large,
            table_copies(tables, ROWS, topics=SMALL_TOPICS) as small,
        ):
            sources = {TOPICS: large, SMALL_TOPICS: small}

            def turn() -> dict[str, float]:
                seconds = {}
                for name, (topics, clean) in candidates.items():
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
            name: round(ROWS / statistics.median(taken[name] for taken in turns)) for name in candidates
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

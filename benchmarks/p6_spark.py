"""P6: the decision stage on Spark with two cores, compared with one core: read, decode and evaluate every row.

Both run eight tasks on the same store of five million messages, after warm-up turns of the JVM. With one core, all
processes are pinned to one processor, because otherwise the JVM and the task's Python would run in parallel on two; the
details have the unpinned value, the planned rows per second of a single process, and the bytes of files per row. The
second figure is the speed of decoding and evaluation in one process, as a share of a bare plyvel loop over the same
rows with verified checksums, in processor time and in turns: plain messages, transactional messages, references, and
payload rows. Its details have the share of a loop over keys alone, which reads less.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, report
from benchmarks.stores import BODY, NOW_MS, build, engine, topic_names
from janitor.report import DataTable
from janitor.rules.policy import Rule
from janitor.spark.source.options import SourceOptions
from janitor.spark.source.parts import Piece
from janitor.spark.source.source import RowReader, register
from tests.support import size
from tms_core.clock import ManualClock
from tms_core.rowkey import MessageKey, PayloadKey
from tms_core.tables.base import ALL_KEYS, MessageValue
from tms_core.tables.leveldb.clone import clone
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import encode_properties
from tms_core.transaction.model import TX_PER_MS

ROWS = size("TMS_BENCH_ROWS", 5_000_000)
TASKS, TURNS = 8, 5
#: The number of measurements of decoding and of the bare loop.
MEASUREMENTS = 5
#: The rows per write.
BATCH_ROWS = 10_000
ALL_ROWS = Piece(None, (ALL_KEYS,))


def pin(processors: set[int]) -> None:
    """Pin this process and its descendants (the JVM, Python workers), with all their threads, to some processors."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    pids = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in pids} - pids:
        pids |= more
    for process in pids:
        with suppress(OSError):
            for thread in Path(f"/proc/{process}/task").iterdir():
                with suppress(OSError):
                    os.sched_setaffinity(int(thread.name), processors)


def decide(store: Path, cores: int, *, pinned: bool = False) -> list[float]:
    """Return the seconds of each turn with a number of cores.

    Args:
        pinned: pin all processes to one processor.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(f"local[{cores}]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.sql.shuffle.partitions", "1")
    spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
    register(spark)
    all_processors = os.sched_getaffinity(0)
    if pinned:
        pin({min(all_processors)})
    seconds = []
    for _ in range(TURNS + 1):
        source = spark.read.format("tms").options(leveldb=str(store), now=str(NOW_MS), partitions=str(TASKS))
        started = time.perf_counter()
        counted = source.load().groupBy("rule").count().collect()
        seconds.append(time.perf_counter() - started)
        if sum(row["count"] for row in counted) != ROWS:
            raise RuntimeError(f"{counted} are not {ROWS} rows")
    pin(all_processors)
    spark.stop()
    return seconds[1:]


def decoding_seconds(store: Path, table: DataTable, rows: int) -> float:
    """Return the processor seconds of one process that decodes and evaluates all rows."""
    reader = RowReader(SourceOptions.parse({"leveldb": str(store), "table": table, "now": str(NOW_MS)}, {}))
    with clone(store, store.with_name("scratch")) as cloned:
        started = time.process_time()
        found = sum(batch.num_rows for batch in reader.batches(cloned, ALL_ROWS, None))
        seconds = time.process_time() - started
    if found != rows:
        raise RuntimeError(f"decoded {found} of {rows} rows")
    return seconds


def bare_loop_seconds(store: Path, table: DataTable, *, values: bool) -> float:
    """Return the processor seconds of a plain loop over the same rows, or over their keys alone."""
    database = plyvel.DB(str(store / f"system.tms.{table}"))
    started = time.process_time()
    options: dict[str, Any] = {"include_value": values, "fill_cache": False, "verify_checksums": True}
    with database.iterator(**options) as found:
        for _ in found:
            pass
    seconds = time.process_time() - started
    database.close()
    return seconds


def decoding_shares(store: Path, table: DataTable, rows: int) -> tuple[float, float]:
    """Return the speed of decoding as a share of a plain loop over rows, and of a plain loop over keys alone."""
    turns = [
        (
            decoding_seconds(store, table, rows),
            bare_loop_seconds(store, table, values=True),
            bare_loop_seconds(store, table, values=False),
        )
        for _ in range(MEASUREMENTS)
    ]
    decoded, both, keys = (min(seconds) for seconds in zip(*turns, strict=True))
    return round(both / decoded, 3), round(keys / decoded, 3)


def build_transactional(store: Path, rows: int, payload: bytes | None) -> None:
    """Write messages of transactions. If ``payload`` is None, each message refers to a row of the payload table."""
    [topic] = topic_names(1)
    with LevelDBStore(store, create=True) as target:
        target.metadata.compare_and_set(topic.prefix, None, encode_properties({"generation": "1", "ttl": "3600"}))
        for first in range(0, rows, BATCH_ROWS):
            times = range(NOW_MS - rows + first, NOW_MS - rows + min(first + BATCH_ROWS, rows))
            value = [MessageValue(ms * TX_PER_MS, payload) for ms in times]
            keys = [MessageKey(topic, 1, ms, 0).pack() for ms in times]
            target.message.put(list(zip(keys, value, strict=True)))
            if payload is None:
                target.payload.put([(PayloadKey(topic, 1, ms * TX_PER_MS, ms, 0).pack(), BODY) for ms in times])


def plan_seconds(store: Path) -> float:
    """Return the seconds in which one process plans a sweep; a plan reads only due rows."""
    with clone(store, store.with_name("scratch")) as cloned:
        started = time.perf_counter()
        done = engine(cloned, ManualClock(NOW_MS)).plan().report
        seconds = time.perf_counter() - started
    if done.total(Rule.EXPIRED) != ROWS:
        raise RuntimeError(f"planned {done.total(Rule.EXPIRED)} of {ROWS} rows")
    return seconds


def shares_by_kind(scratch: Path, plain: Path) -> dict[str, tuple[float, float]]:
    """Return the result of :func:`decoding_shares` for each kind of row."""
    rows = ROWS // 5
    inline, references = scratch / "inline", scratch / "references"
    build_transactional(inline, rows, BODY)
    build_transactional(references, rows, None)
    return {
        "plain": decoding_shares(plain, "message", ROWS),
        "transactional": decoding_shares(inline, "message", rows),
        "reference": decoding_shares(references, "message", rows),
        "payload": decoding_shares(references, "payload", rows),
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="p6-") as scratch:
        store = Path(scratch) / "store"
        build(store, topic_names(10), ROWS // 10, NOW_MS - 7_200_000, 1)
        by_kind = shares_by_kind(Path(scratch), store)
        single = min(plan_seconds(store) for _ in range(MEASUREMENTS))
        decide(store, 2)
        kinds = {"one": (1, True), "unpinned": (1, False), "two": (2, False)}
        turns: dict[str, list[float]] = {kind: [] for kind in kinds}
        for kind, (cores, pinned) in [*kinds.items(), *kinds.items()]:
            turns[kind] += decide(store, cores, pinned=pinned)
        one, unpinned, two = (statistics.median(turns[kind]) for kind in kinds)
        files = sum(path.stat().st_size for path in (store / "system.tms.message").iterdir())
    details = {
        "rows": ROWS,
        "rows_per_second_one_core": round(ROWS / one),
        "rows_per_second_two_cores": round(ROWS / two),
        "two_cores_to_one_unpinned": round(unpinned / two, 3),
        "single_process_plan_rows_per_second": round(ROWS / single),
        "bytes_read_per_row": round(files / ROWS, 1),
        "python": sys.version.split()[0],
    }
    report(
        Figure("P6", "Spark decision stage, two cores ÷ one core", round(one / two, 3), at_least=1.4, details=details)
    )
    slowest = min(rows for rows, _ in by_kind.values())
    each = {
        "rows": ROWS,
        "to_loop_over_rows": {kind: rows for kind, (rows, _) in by_kind.items()},
        "to_loop_over_keys": {kind: keys for kind, (_, keys) in by_kind.items()},
    }
    report(Figure("P6", "decoding ÷ a bare loop, of the slowest kind of row", slowest, at_least=0.5, details=each))


if __name__ == "__main__":
    main()

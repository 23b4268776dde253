"""P6: the decision stage on Spark, two cores beside one: every row read, decoded and judged, verdicts counted.

Both on the same store of five million messages, with the same eight tasks, after turns that warm the JVM up. Beside the
figure stand the speed of decoding and judging in one process, as a share of a bare plyvel loop over the same rows that
verifies checksums, too (processor time of each; bar: a half), how many rows a second the single process plans of the
same store, and how many bytes of files there are for each row.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import plyvel

from benchmarks.figure import Figure, report
from benchmarks.stores import NOW_MS, build, engine, topic_names
from janitor.policy import Rule
from janitor.spark.options import Options
from janitor.spark.parts import Piece
from janitor.spark.source import RowReader, register
from tests.support import size
from tms_core.clock import ManualClock
from tms_core.tables.leveldb_clone import clone

ROWS = size("TMS_BENCH_ROWS", 5_000_000)
TASKS, TURNS = 8, 5
#: How often decoding and the bare loop are measured.
LOOPS = 3


def decide(store: Path, cores: int) -> list[float]:
    """Seconds of each turn on so many cores."""
    from pyspark.sql import SparkSession  # noqa: PLC0415

    builder = SparkSession.builder.master(f"local[{cores}]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false").config("spark.sql.shuffle.partitions", "1")
    spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
    register(spark)
    seconds = []
    for _ in range(TURNS + 1):
        source = spark.read.format("tms").options(leveldb=str(store), now=str(NOW_MS), partitions=str(TASKS))
        started = time.perf_counter()
        counted = source.load().groupBy("rule").count().collect()
        seconds.append(time.perf_counter() - started)
        if sum(row["count"] for row in counted) != ROWS:
            raise RuntimeError(f"{counted} are not {ROWS} rows")
    spark.stop()
    return seconds[1:]


def decoding(store: Path) -> float:
    """Seconds of processor time in which one process decodes and judges everything."""
    reader = RowReader(Options.parse({"leveldb": str(store), "now": str(NOW_MS)}, {}))
    with clone(store, store.with_name("scratch")) as cloned:
        started = time.process_time()
        rows = sum(found.num_rows for found in reader.batches(cloned, Piece(None, b"", b"")))
        seconds = time.process_time() - started
    if rows != ROWS:
        raise RuntimeError(f"decoded {rows} of {ROWS} rows")
    return seconds


def bare(store: Path) -> float:
    """Seconds of processor time in which a plain loop goes over the same rows."""
    database = plyvel.DB(str(store / "system.tms.message"))
    started = time.process_time()
    with database.iterator(fill_cache=False, verify_checksums=True) as found:
        for _ in found:
            pass
    seconds = time.process_time() - started
    database.close()
    return seconds


def planning(store: Path) -> float:
    """Seconds in which one process plans a sweep: it reads what is due and nothing else."""
    with clone(store, store.with_name("scratch")) as cloned:
        started = time.perf_counter()
        done = engine(cloned, ManualClock(NOW_MS)).plan().report
        seconds = time.perf_counter() - started
    if done.total(Rule.EXPIRED) != ROWS:
        raise RuntimeError(f"planned {done.total(Rule.EXPIRED)} of {ROWS} rows")
    return seconds


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="p6-") as scratch:
        store = Path(scratch) / "store"
        build(store, topic_names(10), ROWS // 10, NOW_MS - 7_200_000, 1)
        ratio = min(bare(store) for _ in range(LOOPS)) / min(decoding(store) for _ in range(LOOPS))
        single = min(planning(store) for _ in range(LOOPS))
        decide(store, 2)
        turns = {cores: decide(store, cores) + decide(store, cores) for cores in (1, 2)}
        one, two = (statistics.median(turns[cores]) for cores in (1, 2))
        files = sum(path.stat().st_size for path in (store / "system.tms.message").iterdir())
    details = {
        "rows": ROWS,
        "rows_per_second_one_core": round(ROWS / one),
        "rows_per_second_two_cores": round(ROWS / two),
        "decoding_to_bare_loop": round(ratio, 3),
        "single_process_plan_rows_per_second": round(ROWS / single),
        "bytes_read_per_row": round(files / ROWS, 1),
        "python": sys.version.split()[0],
    }
    report(
        Figure("P6", "Spark decision stage, two cores ÷ one core", round(one / two, 3), at_least=1.4, details=details)
    )


if __name__ == "__main__":
    main()

"""P1: rows that a LevelDB sweep deletes per second, compared with a bare loop that deletes the same range.

Both run on copies of one store of a million expired rows, in turns, with the same batch size, unsynced batches and one
sync at the end. The sweep's time covers ``run_once``: metadata, guards, adoption, the read before each batch (S2), and
the commit of the state. Compaction is measured separately, in both cases. If Java is available, CDAP's prune is
measured on the same rows.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.figure import Figure, report
from benchmarks.java_prune import prune_copy
from benchmarks.stores import BATCH_ROWS, NOW_MS, build, engine, topic_names
from janitor.rules.policy import Rule
from tests.interop.java import Interop, JavaFailed
from tests.support import size
from tms_core.clock import SystemClock
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.store import LevelDBStore

ROWS = size("TMS_BENCH_ROWS", 1_000_000)
TURNS = 5


class BenchClock(SystemClock):
    """A clock with real monotonic time and the wall time of the benchmark stores."""

    def now_ms(self) -> int:
        return NOW_MS


def sweep(path: Path) -> tuple[float, float]:
    """Return the seconds of a sweep, without and for compaction."""
    with LevelDBStore(path) as store:
        started = time.perf_counter()
        done = engine(store, BenchClock()).run_once(adopt=True)
        seconds = time.perf_counter() - started
    if done.total(Rule.EXPIRED) != ROWS:
        raise RuntimeError(f"swept {done.total(Rule.EXPIRED)} of {ROWS} rows")
    compaction = done.phase_seconds["compact"]
    return seconds - compaction, compaction


def bare(path: Path) -> tuple[float, float]:
    """Return the seconds of a plain loop, without and for compaction."""
    database = plyvel.DB(str(path / "system.tms.message"))
    started = time.perf_counter()
    batch = database.write_batch()
    rows = 0
    with database.iterator(include_value=False, fill_cache=False) as keys:
        for key in keys:
            batch.delete(key)
            rows += 1
            if rows % BATCH_ROWS == 0:
                batch.write()
                batch = database.write_batch()
    batch.write()
    database.write_batch(sync=True).write()
    deleted = time.perf_counter()
    database.compact_range(start=b"\x00", stop=b"\xff")
    compacted = time.perf_counter()
    database.close()
    return deleted - started, compacted - deleted


def java_rows_per_second(store: Path) -> int | None:
    """Return the rate of CDAP's own prune on the same rows; None without Java."""
    if Interop.available():
        return None
    try:
        return int(prune_copy(store, NOW_MS)["rows_per_second"])
    except JavaFailed:
        return None


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="p1-") as scratch:
        source = Path(scratch) / "source"
        build(source, topic_names(10), ROWS // 10, NOW_MS - 7_200_000, 1)
        ours: list[tuple[float, float]] = []
        plain: list[tuple[float, float]] = []
        for turn in range(TURNS + 1):
            for run, results in ((sweep, ours), (bare, plain)):
                copy = shutil.copytree(source, Path(scratch) / "copy")
                result = run(copy)
                if turn:
                    results.append(result)
                shutil.rmtree(copy)
        java = java_rows_per_second(source)
    ratio = statistics.median(b[0] / o[0] for o, b in zip(ours, plain, strict=True))
    with_compaction = statistics.median(sum(b) / sum(o) for o, b in zip(ours, plain, strict=True))
    seconds = statistics.median(o[0] for o in ours)
    details = {
        "rows": ROWS,
        "rows_per_second": round(ROWS / seconds),
        "bare_rows_per_second": round(ROWS / statistics.median(b[0] for b in plain)),
        "ratio_with_compaction": round(with_compaction, 3),
        "rows_per_second_with_compaction": round(ROWS / statistics.median(sum(o) for o in ours)),
        "cdap_rows_per_second": java,
    }
    name = "LevelDB sweep, rows deleted per second ÷ a bare loop's"
    report(Figure("P1", name, round(ratio, 3), at_least=0.8, details=details))


if __name__ == "__main__":
    main()

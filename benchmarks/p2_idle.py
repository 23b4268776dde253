"""P2: the cost of a pass without due rows, in a new process.

The store has a thousand topics of live rows. The figures are the counted store operations per topic, and the ratio of
the times with 2 million and 20 thousand live rows.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.figure import Figure, report
from benchmarks.p1_sweep import BenchClock
from benchmarks.stores import NOW_MS, build, engine, topic_names
from tests.support import size
from tms_core.tables.leveldb.store import LevelDBStore

TOPICS = 1_000
ROWS = size("TMS_BENCH_ROWS_IDLE", 2_000_000)
FEW_ROWS = 20_000
TURNS = 7


def measure_pass(path: Path) -> tuple[float, int]:
    """Return the seconds and the store operations of one pass."""
    with LevelDBStore(path) as store:
        janitor = engine(store, BenchClock())
        janitor.adopt()
        before = store.calls.total()
        started = time.perf_counter()
        done = janitor.run_once()
        seconds = time.perf_counter() - started
        if done.topics:
            raise RuntimeError(f"rows were due in {len(done.topics)} topics")
        return seconds, store.calls.total() - before


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="p2-") as scratch:
        many, few = Path(scratch) / "many", Path(scratch) / "few"
        build(many, topic_names(TOPICS), ROWS // TOPICS, NOW_MS, 1)
        build(few, topic_names(TOPICS), FEW_ROWS // TOPICS, NOW_MS, 1)
        measure_pass(many), measure_pass(few)
        pairs = [(measure_pass(many), measure_pass(few)) for _ in range(TURNS)]
    operations = max(calls / TOPICS for pair in pairs for _, calls in pair)
    ratio = statistics.median(large[0] / small[0] for large, small in pairs)
    report(Figure("P2", "store operations per topic, nothing due", round(operations, 3), at_most=2))
    details = {
        "rows": ROWS,
        "milliseconds": round(statistics.median(large[0] for large, _ in pairs) * 1000, 1),
        "few_rows": FEW_ROWS,
        "few_milliseconds": round(statistics.median(small[0] for _, small in pairs) * 1000, 1),
    }
    name = "time of a pass with many live rows ÷ with few, nothing due"
    report(Figure("P2", name, round(ratio, 3), at_most=1.5, details=details))


if __name__ == "__main__":
    main()

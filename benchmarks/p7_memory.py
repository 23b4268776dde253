"""P7: anonymous resident memory of a process that sweeps ten million rows.

A separate process builds the store. Then a fresh process sweeps it, and reads its anonymous memory (without mapped
table files) from the kernel after every page of rows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.figure import Figure, report
from benchmarks.p1_sweep import BenchClock
from benchmarks.stores import NOW_MS, build, engine, topic_names
from janitor.rules.policy import Rule
from tests.support import size
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId

ROWS = size("TMS_BENCH_ROWS_MEMORY", 10_000_000)


def anonymous_mb() -> float:
    """Return the anonymous resident memory of this process, in megabytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def sweep(path: Path) -> None:
    """Sweep the store and print the peak; runs in its own process."""
    peak = 0.0

    def watch(_phase: str, _topic: TopicId | None, _rows: int) -> None:
        nonlocal peak
        peak = max(peak, anonymous_mb())

    with LevelDBStore(path) as store:
        janitor = engine(store, BenchClock(), watch)
        done = janitor.run_once(adopt=True)
    print(json.dumps({"peak_mb": round(max(peak, anonymous_mb()), 1), "rows": done.total(Rule.EXPIRED)}))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="p7-") as scratch:
        path = Path(scratch) / "store"
        build(path, topic_names(10), ROWS // 10, NOW_MS - 7_200_000, 1)
        command = [sys.executable, "-m", "benchmarks.p7_memory", str(path)]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if result["rows"] != ROWS:
        raise RuntimeError(f"swept {result['rows']} of {ROWS} rows")
    name = f"anonymous memory while sweeping {ROWS:,} rows, MB"
    report(Figure("P7", name, result["peak_mb"], at_most=120, details={"rows": ROWS}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sweep(Path(sys.argv[1]))
    else:
        main()

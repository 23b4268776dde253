"""P12: the cost of a pass without due rows while the state has a million closed invalid ids.

A daemon runs a pass every minute, so closed ids must cost almost nothing. The store is small; the pass reads the
snapshot, which has a million ids too, and compares them with the state. The bar is the ratio to the read of that
snapshot alone (P8), in one process, in turns. Memory is the peak resident size of a fresh process that makes two
passes, minus the peak without ids.

``python -m benchmarks.p12_invalid_ids`` prints two JSON lines.
"""

from __future__ import annotations

import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, report
from benchmarks.p1_sweep import BenchClock
from benchmarks.stores import NOW_MS, TERMS, build, topic_names
from janitor.run.engine import Engine
from janitor.run.prepare import Deps
from janitor.state.sqlite.state import SqliteState
from tests.support import size
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.transaction.codec.snapshot import write_snapshot
from tms_core.transaction.model import TX_PER_MS, Snapshot, VisibilityState
from tms_core.transaction.source.source import DirectorySource

IDS = size("TMS_BENCH_INVALID_IDS", 1_000_000)
TURNS = 7
MAX_RATIO = 1.5
MAX_MEMORY_MB = 60
#: The ids are from the previous year, about 3 ms apart, so that the first full pass closes all of them.
OLDEST_MS = NOW_MS - 365 * 86_400_000
GAP = 3 * TX_PER_MS + 7


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(passes(Path(sys.argv[1]), turns=int(sys.argv[2]))))
        return
    with tempfile.TemporaryDirectory(prefix="p12-") as scratch:
        none, many = Path(scratch) / "none", Path(scratch) / "many"
        for folder, ids in ((none, 0), (many, IDS)):
            make(folder, ids)
        first = {folder: in_child(folder, 0) for folder in (none, many)}
        idle = {folder: in_child(folder, 1) for folder in (none, many)}
        timed = in_child(many, TURNS)
    details = {
        "ids": IDS,
        "pass_seconds": timed["seconds"],
        "snapshot_seconds": timed["snapshot_seconds"],
        "first_pass_of_a_process_seconds": timed["cold_seconds"],
        "first_contact_seconds": first[many]["cold_seconds"],
    }
    name = "time of an idle pass with a million closed invalid ids ÷ reading the snapshot"
    report(Figure("P12", name, timed["ratio"], at_most=MAX_RATIO, details=details))
    over_mb = round(idle[many]["peak_mb"] - idle[none]["peak_mb"], 1)
    details = {
        "ids": IDS,
        "peak_mb_without": idle[none]["peak_mb"],
        "first_contact_memory_mb": round(first[many]["peak_mb"] - first[none]["peak_mb"], 1),
    }
    name = "memory of an idle pass with a million closed invalid ids over one with none, MB"
    report(Figure("P12", name, over_mb, at_most=MAX_MEMORY_MB, details=details))


def make(folder: Path, ids: int) -> None:
    """Create a store, and a snapshot with a number of invalid ids."""
    build(folder / "store", topic_names(10), 10, NOW_MS, 1)
    invalid = array("q", range(OLDEST_MS * TX_PER_MS, OLDEST_MS * TX_PER_MS + ids * GAP, GAP))
    newest = NOW_MS * TX_PER_MS
    with (folder / f"snapshot.{NOW_MS}").open("wb") as stream:
        write_snapshot(stream, Snapshot(VisibilityState(NOW_MS, newest, newest, invalid)))


def in_child(folder: Path, turns: int) -> dict[str, Any]:
    """Run :func:`passes` in a separate process."""
    command = [sys.executable, "-m", "benchmarks.p12_invalid_ids", str(folder), str(turns)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def passes(folder: Path, turns: int) -> dict[str, Any]:
    """Run a first pass over a new folder, and then measured passes, each next to a read of the snapshot."""
    source = DirectorySource(folder / f"snapshot.{NOW_MS}")
    with LevelDBStore(folder / "store") as store, SqliteState(folder / "state") as state:
        engine = Engine(Deps(store, state, source, BenchClock(), TERMS, token_hex=secrets.token_hex))
        cold_seconds = seconds_of(lambda: engine.run_once(adopt=True))
        pairs = [(seconds_of(engine.run_once), seconds_of(source.latest)) for _ in range(turns)]
    measured = {"cold_seconds": round(cold_seconds, 3), "peak_mb": round(peak_mb(), 1)}
    if not pairs:
        return measured
    return measured | {
        "ratio": round(statistics.median(idle / reading for idle, reading in pairs), 3),
        "seconds": round(statistics.median(idle for idle, _ in pairs), 4),
        "snapshot_seconds": round(statistics.median(reading for _, reading in pairs), 4),
    }


def seconds_of(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def peak_mb() -> float:
    """Return the peak resident size of this process, in megabytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


if __name__ == "__main__":
    main()

"""P10: rows per second that a sweep inverts on HBase, compared with a bare loop of ``checkAndPut`` on the same rows.

Both use the same number of connections. The loop knows the rows; the sweep's step reads every row of the table to find
them. The table has one topic, and an invalid transaction wrote all its rows. The rows are in files in both cases, and
each turn has new tables.
"""

from __future__ import annotations

import statistics
import time
from array import array

import happybase

from benchmarks.figure import Figure, report
from benchmarks.hbase import filled_tables, run_by_salt, server
from benchmarks.p1_sweep import BenchClock
from benchmarks.stores import NOW_MS, engine
from janitor.rules.policy import Rule
from tests.hbase.tables import Tables
from tests.support import size
from tms_core.settings.models import HBaseSettings
from tms_core.tables.hbase.schema import POINTER_COLUMN
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.hbase.thrift import HBASE
from tms_core.transaction.model import TX_PER_MS, VisibilityState
from tms_core.transaction.source.source import Loaded

#: ``TMS_BENCH_INVERT_ROWS=100000`` is the full size.
ROWS = size("TMS_BENCH_INVERT_ROWS", 20_000)
CONNECTIONS = 4
TURNS = 3
INVALID = (NOW_MS - 1000) * TX_PER_MS


class OneInvalid:
    """A source of a current snapshot with one invalid transaction."""

    def latest(self) -> Loaded:
        newest = NOW_MS * TX_PER_MS
        return Loaded(VisibilityState(NOW_MS, newest, newest, array("q", [INVALID])), "benchmark")


def sweep_seconds(address: str, namespace: str) -> float:
    """Return the seconds of the sweep's step."""
    with HBaseStore(HBaseSettings(thrift=(address,), namespace=namespace, connections=CONNECTIONS)) as store:
        janitor = engine(store, BenchClock(), workers=CONNECTIONS, source=OneInvalid())
        done = janitor.run_once(adopt=True)
    if done.total(Rule.INVALID_TRANSACTION) != ROWS or done.errors:
        raise RuntimeError(f"inverted {done.total(Rule.INVALID_TRANSACTION)} of {ROWS} rows: {done.errors}")
    return done.phase_seconds["invert"]


def bare_loop_seconds(address: str, namespace: str) -> float:
    """Return the seconds of a plain loop that knows the rows."""
    old, new = INVALID.to_bytes(8, "big"), (-INVALID).to_bytes(8, "big", signed=True)
    rows: dict[bytes, list[bytes]] = {}

    def find_rows(table: happybase.Table, salt: bytes) -> None:
        found = table.scan(row_start=salt, row_stop=bytes([salt[0] + 1]), filter=b"KeyOnlyFilter()")
        rows[salt] = [row for row, _ in found]

    def invert_rows(table: happybase.Table, salt: bytes) -> None:
        mutation = HBASE.Mutation(isDelete=False, column=POINTER_COLUMN, value=new)
        name, client = table.name, table.connection.client
        for row in rows[salt]:
            assert client.checkAndPut(name, row, POINTER_COLUMN, old, mutation, {})

    run_by_salt(address, namespace, CONNECTIONS, find_rows)
    started = time.perf_counter()
    run_by_salt(address, namespace, CONNECTIONS, invert_rows)
    return time.perf_counter() - started


def main() -> None:
    ours: list[float] = []
    plain: list[float] = []
    with server() as running, Tables(running) as tables:
        # The first turn is a warm-up, because HBase's JVM compiles its code.
        for turn in range(TURNS + 1):
            for run, seconds in ((sweep_seconds, ours), (bare_loop_seconds, plain)):
                with filled_tables(tables, ROWS, topics=1, pointer=INVALID) as namespace:
                    elapsed = run(running.thrift, namespace)
                if turn:
                    seconds.append(elapsed)
    ratio = statistics.median(b / o for o, b in zip(ours, plain, strict=True))
    details = {
        "rows": ROWS,
        "connections": CONNECTIONS,
        "rows_per_second": round(ROWS / statistics.median(ours)),
        "bare_rows_per_second": round(ROWS / statistics.median(plain)),
    }
    name = "HBase inversion, rows negated per second ÷ a bare checkAndPut loop's"
    report(Figure("P10", name, round(ratio, 3), at_least=0.8, details=details))


if __name__ == "__main__":
    main()

"""CDAP's own cleaners: its observers inside the region servers, and Tephra's pruning.

CDAP removes ids from the invalid list when all tables with its observers are clean. If the message table has no
observer but pruning still runs, CDAP removes ids although that table may not be clean. If the table has an observer,
two cleaners work, and CDAP uses its own boundary. In both cases, the janitor must not publish a prune boundary. A sweep
is harmless in both cases, so it is never refused.

Observers are in the table's attributes, which only Thrift 2 reads. HBase cannot tell whether pruning runs, but pruning
writes rows to its state table; rows that are older than a day count as leftovers. See
``docs/reference/formats/tables.md``, "Tephra's pruning state".
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress

from tms_core.clock import Clock
from tms_core.errors import StoreError, StoreNotFound
from tms_core.logs.printable import moment
from tms_core.tables.base import TableName
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.rows import KEYS, HBaseRows, newest
from tms_core.tables.hbase.schema import attributes_of, table_name

#: The lifetime of a cached result, in milliseconds.
CACHE_MS = 3_600_000
#: The time without a new row after which pruning counts as off; it runs every six hours (data.tx.prune.interval).
PRUNING_QUIET_MS = 86_400_000
#: Tephra's state table (data.tx.prune.state.table): in CDAP's namespace, or by Tephra's default without a namespace.
STATE_TABLE = "tephra.state"

#: The tables that CDAP gives an observer.
_OBSERVED: tuple[TableName, ...] = ("message", "payload")
#: A coprocessor is an attribute such as ``coprocessor$1``, with the value ``jar|class|priority|arguments``.
_ENTRY = re.compile(r"coprocessor\$\d+", re.IGNORECASE)
#: CDAP's packages before and since version 6, and Tephra's package.
_CDAP_CLASSES = re.compile(r"(co\.cask|io\.cdap|org\.apache\.tephra)\.")
#: Rows of the state table by their first byte: bounds, one row for each region; results of runs, the newest run first;
#: empty regions, the oldest first.
_BOUNDS, _RUNS, _EMPTY = b"\x01", (b"\x02", b"\x03", b"\x05"), b"\x04"
_PAGE_ROWS = 2000


class CdapWatch:
    """A check whether CDAP still cleans the tables, cached for an hour; threads may share it.

    Args:
        pool: connections to Thrift 1 servers.
        admin: connections to Thrift 2 servers; None: observers are not checked.
    """

    def __init__(self, pool: HBasePool, admin: HBasePool | None, namespace: str, clock: Clock) -> None:
        self._pool = pool
        self._admin = admin
        self._namespace = namespace
        self._clock = clock
        self._lock = threading.Lock()
        self._found: tuple[str, ...] = ()
        self._checked_ms: int | None = None

    def obstacles(self) -> tuple[str, ...]:
        """Return CDAP's active cleaners, each as a sentence with the next step, pruning first.

        A failed check is also an obstacle.
        """
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if self._checked_ms is None or now_ms - self._checked_ms >= CACHE_MS:
                try:
                    self._found = (*self._pruning(), *self._observers())
                except StoreError as error:
                    return (f"the check whether CDAP still cleans these tables failed: {error}",)
                self._checked_ms = now_ms
            return self._found

    def _pruning(self) -> Iterator[str]:
        now_ms = self._clock.now_ms()
        for name in (f"{self._namespace}:{STATE_TABLE}", STATE_TABLE):
            last_ms = last_pruned_ms(HBaseRows(self._pool, name.encode(), self._clock), now_ms - PRUNING_QUIET_MS)
            if last_ms is not None:
                yield (
                    f"Tephra's pruning still runs: it wrote to {name} at {moment(last_ms)}; set data.tx.prune.enable "
                    "to false in CDAP and restart it; after a day without a write, pruning counts as off"
                )

    def _observers(self) -> Iterator[str]:
        if self._admin is None:
            return
        for table in _OBSERVED:
            attributes = attributes_of(self._admin, self._namespace, table)
            yield from observers(table_name(self._namespace, table).decode(), attributes)


def observers(table: str, attributes: Mapping[str, str]) -> Iterator[str]:
    """Yield a table's observers of CDAP or Tephra, each as a sentence with the next step."""
    for name, value in sorted(attributes.items()):
        java_class = value.partition("|")[2].partition("|")[0].strip()
        if _ENTRY.fullmatch(name) and _CDAP_CLASSES.match(java_class):
            yield (
                f"{table} still has CDAP's observer {java_class.rpartition('.')[2]}, which cleans it inside the "
                "region servers; when pruning is off and this janitor sweeps, remove it in the HBase shell: "
                f"alter '{table}', METHOD => 'table_att_unset', NAME => '{name}'"
            )


def last_pruned_ms(state: HBaseRows, since_ms: int) -> int | None:
    """Return the time of the last write of Tephra's pruning to its state table; None without a recent write or table.

    Args:
        since_ms: the time before which writes are not recent.

    Raises:
        StoreError: the table could not be read.
    """
    last_ms = 0
    with suppress(StoreNotFound):
        last_ms = max(_written_ms(state, since_ms))
    return last_ms if last_ms >= max(1, since_ms) else None


def _written_ms(state: HBaseRows, since_ms: int) -> Iterator[int]:
    """Yield timestamps of cells, including the newest of each kind, without all rows that accumulate per run."""
    for kind in _RUNS:
        yield newest(state.fetch(kind, _after(kind), 1, KEYS).rows)
    yield newest(state.fetch(_EMPTY + max(0, since_ms).to_bytes(8, "big"), _after(_EMPTY), _PAGE_ROWS, KEYS).rows)
    start, ended = _BOUNDS, False
    while not ended:
        rows, ended = state.fetch(start, _after(_BOUNDS), _PAGE_ROWS, KEYS)
        yield newest(rows)
        start = rows[-1].row + b"\x00" if rows else start


def _after(kind: bytes) -> bytes:
    return bytes([kind[0] + 1])

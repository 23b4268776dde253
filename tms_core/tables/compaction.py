"""Compaction of deleted rows, which frees their disk space.

A deleted row takes space until LevelDB compacts its table files, and LevelDB does that only when it must. Therefore a
run compacts its deletions itself, in slices: a compaction cannot be interrupted, and a run must renew its heartbeat in
between (invariant S10). HBase's tables get the same slices, but decide themselves where and when to compact
(``tms_core/tables/hbase/regions.py``).

LevelDB compacts a slice while the pass continues elsewhere: a separate thread requests it as soon as its rows are all
deleted. If the disk may be too small for that, all slices are compacted after the pass, because a failed compaction
closes the store for writing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Lock

from tms_core.errors import StoreError
from tms_core.tables.base import KeyTable, TableName

#: Deleted rows and bytes of table files per slice, each about a second of compaction on a laptop. Rows at an edge are
#: rewritten twice, so a large slice is worth more than an early start.
SLICE_ROWS = 1_000_000
SLICE_BYTES = 32 * 1024 * 1024

#: Live bytes that may lie between two batches of one slice: about one table file, which would be rewritten anyway.
GAP_BYTES = 2 * 1024 * 1024

#: A slice of fewer rows is left to LevelDB: rewriting table files would cost more than it frees.
WORTHWHILE_ROWS = 1_000

#: Interval of heartbeats while a run waits for a slice, in seconds.
ALIVE_SECONDS = 1.0


@dataclass(slots=True)
class Slice:
    """A range of one table with deleted rows; first and last key are keys of deleted rows.

    Attributes:
        background: the compaction during the pass; None: it comes after the pass.
    """

    table: KeyTable
    start: bytes
    last: bytes
    rows: int
    background: Future[None] | None = None

    def takes(self, table: KeyTable, first: bytes) -> bool:
        """Return whether a batch that starts at ``first`` may be added."""
        if table is not self.table or self.rows >= SLICE_ROWS or first <= self.last:
            return False
        gap, whole = (table.estimate_bytes(key, first) for key in (self.last, self.start))
        return gap <= GAP_BYTES and whole < SLICE_BYTES

    @property
    def worthwhile(self) -> bool:
        return self.rows >= WORTHWHILE_ROWS or self.table.weighs_compaction

    def compact(self) -> None:
        self.table.compact(self.start, self.last + b"\x00")


@dataclass(slots=True)
class DeletedRanges:
    """The ranges of a run's deleted rows, added batch by batch in key order of each table. Its threads may share it."""

    slices: list[Slice] = field(default_factory=list)
    _last: dict[KeyTable, Slice] = field(default_factory=dict)
    _compactor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "compact"))
    _lock: Lock = field(default_factory=Lock)
    _failed: bool = False

    def add(self, table: KeyTable, keys: Sequence[bytes]) -> None:
        with self._lock:
            last = self._last.get(table)
            if last is not None and last.takes(table, keys[0]):
                last.last = keys[-1]
                last.rows += len(keys)
                return
            self._last[table] = Slice(table, keys[0], keys[-1], len(keys))
            self.slices.append(self._last[table])
        # Outside the lock, because it looks at the disk: no other thread changes a slice that is no longer the last.
        self._begin(last)

    def no_more(self, name: TableName) -> None:
        """Start the last compactions of a table whose deletions are finished."""
        # Iterate over a copy: another thread may finish its part of the table at the same time.
        for table in [table for table in list(self._last) if table.name == name]:
            with self._lock:
                last = self._last.pop(table, None)
            self._begin(last)

    def compact(self, heartbeat: Callable[[], None]) -> None:
        """Compact all slices; slices that were not started before are compacted one by one.

        Raises:
            StoreError: the store failed; the rows are deleted all the same.
        """
        for part in self.slices:
            if part.background is not None:
                while wait([part.background], ALIVE_SECONDS).not_done:
                    heartbeat()
                part.background.result()
                heartbeat()
            elif part.worthwhile:
                part.compact()
                heartbeat()
        for table in {part.table: None for part in self.slices if part.background is not None}:
            # Of no rows: files in which the pass was reading while they were compacted go with the next one.
            table.compact(b"", b"")

    def close(self) -> None:
        """Wait until no compaction is running; slices that were not started are left to the store."""
        self._compactor.shutdown(cancel_futures=True)

    def _begin(self, part: Slice | None) -> None:
        """Start the compaction of a slice during the pass, if its table supports that."""
        if part is not None and part.worthwhile and part.table.can_compact_concurrently:
            part.background = self._compactor.submit(self._compact_in_background, part)

    def _compact_in_background(self, part: Slice) -> None:
        """Compact a slice, unless one before has failed: only that error is reported to the run."""
        if not self._failed:
            try:
                part.compact()
            except StoreError:
                self._failed = True
                raise

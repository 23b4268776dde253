"""Compaction of deleted rows, which frees their disk space.

A deleted row takes space until LevelDB compacts its table files, which LevelDB does as late as possible. Therefore a
run compacts its deletions itself, in slices: a compaction cannot be interrupted, and a run must renew its heartbeat
between slices (invariant S10). HBase's tables get the same slices, but decide themselves where and when to compact
(``tms_core/tables/hbase/regions.py``).

LevelDB compacts a slice while the pass continues elsewhere: a separate thread compacts the slice as soon as all its
rows are deleted. If the disk may be too small for that, all slices are compacted after the pass, because a failed
compaction closes the store for writing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Lock

from tms_core.errors import StoreError
from tms_core.tables.base import KeyTable, TableName

#: The largest slice, in deleted rows and in bytes of table files: about a second of compaction on a laptop. Rows at the
#: edge of a slice are rewritten twice, so fewer and larger slices are better.
SLICE_ROWS = 1_000_000
SLICE_BYTES = 32 * 1024 * 1024

#: The largest number of live bytes between two batches of one slice: about one table file, which is rewritten anyway.
GAP_BYTES = 2 * 1024 * 1024

#: The smallest slice that a run compacts, in rows: for fewer rows, rewriting table files costs more than it frees.
WORTHWHILE_ROWS = 1_000

#: Interval of heartbeats while a run waits for a slice, in seconds.
ALIVE_SECONDS = 1.0


@dataclass(slots=True)
class Slice:
    """A range of one table with deleted rows; its first and last key are keys of deleted rows.

    Attributes:
        background: the compaction during the pass; None: the slice is compacted after the pass.
    """

    table: KeyTable
    start: bytes
    last: bytes
    rows: int
    background: Future[None] | None = None

    def can_add(self, first: bytes) -> bool:
        """Return whether a batch that starts at ``first`` may be added."""
        if self.rows >= SLICE_ROWS or first <= self.last:
            return False
        gap, whole = (self.table.estimate_bytes(key, first) for key in (self.last, self.start))
        return gap <= GAP_BYTES and whole < SLICE_BYTES

    @property
    def is_worthwhile(self) -> bool:
        return self.rows >= WORTHWHILE_ROWS or self.table.weighs_compaction

    def compact(self) -> None:
        self.table.compact(self.start, self.last + b"\x00")


@dataclass(slots=True)
class DeletedRanges:
    """The ranges of a run's deleted rows, added batch by batch in key order of each table; threads may share it."""

    slices: list[Slice] = field(default_factory=list)
    _last: dict[KeyTable, Slice] = field(default_factory=dict)
    _compactor: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "compact"))
    _lock: Lock = field(default_factory=Lock)
    _failed: bool = False

    def add(self, table: KeyTable, keys: Sequence[bytes]) -> None:
        with self._lock:
            last = self._last.get(table)
            if last is not None and last.can_add(keys[0]):
                last.last = keys[-1]
                last.rows += len(keys)
                return
            self._last[table] = Slice(table, keys[0], keys[-1], len(keys))
            self.slices.append(self._last[table])
        # Outside the lock, because this checks the disk: no other thread changes a slice that is no longer the last.
        self._start_compaction(last)

    def finish_table(self, name: TableName) -> None:
        """Start the last compactions of a table whose deletions are finished."""
        # Iterate over a copy: another thread may finish its part of the table at the same time.
        for table in [table for table in list(self._last) if table.name == name]:
            with self._lock:
                last = self._last.pop(table, None)
            self._start_compaction(last)

    def compact(self, heartbeat: Callable[[], None]) -> None:
        """Wait for compactions in the background, and compact all other slices one by one.

        Raises:
            StoreError: the store failed; the rows are deleted nevertheless.
        """
        for part in self.slices:
            if part.background is not None:
                while wait([part.background], ALIVE_SECONDS).not_done:
                    heartbeat()
                part.background.result()
                heartbeat()
            elif part.is_worthwhile:
                part.compact()
                heartbeat()
        for table in {part.table: None for part in self.slices if part.background is not None}:
            # An empty compaction removes the files that the pass was still reading when they were compacted.
            table.compact(b"", b"")

    def close(self) -> None:
        """Wait for the running compaction; leave slices that were not started to the store."""
        self._compactor.shutdown(cancel_futures=True)

    def _start_compaction(self, part: Slice | None) -> None:
        """Start the compaction of a slice in the background, if its table supports that."""
        if part is not None and part.is_worthwhile and part.table.can_compact_concurrently:
            part.background = self._compactor.submit(self._compact_in_background, part)

    def _compact_in_background(self, part: Slice) -> None:
        """Compact a slice, unless an earlier compaction has failed: the run reports only that error."""
        if not self._failed:
            try:
                part.compact()
            except StoreError:
                self._failed = True
                raise

"""Getting the space back.

A deleted row takes room until LevelDB compacts the tables it was in, and LevelDB only does so when it must. So what a
run deleted is compacted explicitly, after all deleting is done, in slices: one compaction cannot be interrupted, and
a run has to show between two of them that it is alive (rule S10). HBase's tables are told of the same slices, but judge
by themselves where and when it is worth it (``tms_core/tables/hbase/regions.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tms_core.tables.base import KeyTable

#: Deleted rows per slice; about a second of compaction on a laptop.
SLICE_ROWS = 200_000

#: Live bytes that may lie between two batches of one slice: about one table file, which would be rewritten anyway.
GAP_BYTES = 2 * 1024 * 1024

#: A slice of fewer rows is left to LevelDB: rewriting table files would cost more than it frees.
WORTHWHILE_ROWS = 1_000


@dataclass(slots=True)
class Slice:
    """A range of one table in which rows were deleted; both ends are keys that were."""

    table: KeyTable
    start: bytes
    last: bytes
    rows: int

    def takes(self, table: KeyTable, first: bytes) -> bool:
        """Whether a batch that starts at ``first`` may be added."""
        if table is not self.table or self.rows >= SLICE_ROWS or first <= self.last:
            return False
        return table.estimate_bytes(self.last, first) <= GAP_BYTES


@dataclass(slots=True)
class DeletedRanges:
    """Where rows were deleted, gathered batch by batch, of each table in key order."""

    slices: list[Slice] = field(default_factory=list)
    _last: dict[KeyTable, Slice] = field(default_factory=dict)

    def add(self, table: KeyTable, keys: Sequence[bytes]) -> None:
        last = self._last.get(table)
        if last is not None and last.takes(table, keys[0]):
            last.last = keys[-1]
            last.rows += len(keys)
        else:
            self._last[table] = Slice(table, keys[0], keys[-1], len(keys))
            self.slices.append(self._last[table])

    def compact(self, heartbeat: Callable[[], None]) -> None:
        """Compact slice by slice.

        Raises:
            StoreError: the store failed; the rows are deleted all the same.
        """
        for part in self.slices:
            if part.rows >= WORTHWHILE_ROWS or part.table.weighs_compaction:
                part.table.compact(part.start, part.last + b"\x00")
                heartbeat()

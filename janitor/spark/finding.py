"""Where in a store there is something to do, found by tasks for a driver that alone may do it.

A store in LevelDB is one process's. Most of a thorough pass is not deleting but looking: for the pointers of invalid
transactions in every message row, and for payload rows that have come due among those that have not. So tasks look, on
clones, by the same code that would do it; and the driver's own pass, which judges every row anew, goes nowhere else.

What is *found* are ranges of keys, one for each page with something in it. Whether payloads are still referred to is
left to the driver, which has to look that up for those alone that are due.
"""

from __future__ import annotations

from collections.abc import Sequence

from janitor.inversions import Inversions
from janitor.payloads import Payloads
from janitor.ranges import Range
from janitor.walk import Batch, Preview, Walk
from janitor.world import TopicWork
from tms_core.tables.base import KeyTable, TxCell


class Finder(Preview):
    """The act of a task that looks.

    Attributes:
        ranges: where something was found, in key order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[Range] = []

    def note(self, keys: Sequence[bytes]) -> None:
        """Something is to be done with these rows of a page."""
        if keys:
            self.ranges.append(Range(keys[0], keys[-1] + b"\x00"))

    def delete(self, work: TopicWork, table: KeyTable, batch: Batch) -> list[bytes]:
        self.note(batch.keys)
        return batch.keys


class FoundInversions(Inversions):
    """Looks for rows of invalid transactions.

    Args:
        since_ms, everything: as those of a search that negates them.
    """

    def __init__(self, walk: Walk, finder: Finder, since_ms: int | None, *, everything: bool) -> None:
        super().__init__(walk, since_ms, everything=everything)
        self._finder = finder

    def _negate(self, cells: list[TxCell]) -> None:
        self._finder.note([cell.key for cell in cells])


class FoundPayloads(Payloads):
    """Looks for payload rows that may go unless somebody needs them."""

    def __init__(self, walk: Walk, finder: Finder) -> None:
        super().__init__(walk)
        self._finder = finder

    def _decided(self, keys: list[bytes]) -> list[bytes]:
        self._finder.note(super()._decided(keys))
        return []

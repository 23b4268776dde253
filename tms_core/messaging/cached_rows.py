"""Caches of the side table's rows and of the number of rows, for the only server that writes them; thread-safe."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from threading import Lock

from tms_core.errors import BadRequest
from tms_core.rowkey import stop_key
from tms_core.tables.base import iterate_items
from tms_core.tables.recently_set import RecentlySet
from tms_core.tables.side import SideChange, SideTable
from tms_core.topic import TopicId

#: The maximum number of cached rows, and their maximum age in milliseconds. The age is limited because the janitor
#: changes rows of producers that were idle for days.
_MAX_ROWS, _MAX_AGE_MS = 20_000, 3_600_000
#: The maximum number of producers, and of consumers, of a topic; a list of them takes about a second and a few MB. And
#: the maximum number of topics whose counts are cached.
MAX_NAMES, _MAX_COUNTS = 20_000, 10_000


class CachedRows(RecentlySet[bytes, bytes | None]):
    """A write-through cache of rows; a subscription reads a row that is not cached."""

    def __init__(self, side: SideTable) -> None:
        super().__init__(_MAX_ROWS)
        self._side = side
        self._since_ms = 0
        self._changes = 0
        self._lock = Lock()

    def __missing__(self, key: bytes) -> bytes | None:
        return self.read(key)

    def read(self, key: bytes) -> bytes | None:
        """Return a row's value from the table, and cache it.

        Raises:
            StoreError: the row could not be read.
        """
        changes = self._changes
        value = self._side.get(key)
        with self._lock:
            # If another thread changed rows during the read, the value may be outdated: do not cache it.
            if changes == self._changes:
                self[key] = value
        return value

    def change(self, changes: Sequence[SideChange]) -> list[bool]:
        """Change rows as :meth:`SideTable.exchange_each`; cache the new values if no other thread changed rows."""
        keys = [key for change in changes for key in _changed_keys(change)]
        before = self._drop(keys)
        made: list[bool] = []
        try:
            made = self._side.exchange_each(changes)
        finally:
            alone = self._drop(keys) == before + 1
        # If another thread changed rows in between, its values may be newer than these: do not cache them.
        if alone and all(made):
            with self._lock:
                if self._changes == before + 1:
                    self.update((change.key, change.value) for change in changes)
        return made

    def invalidate_old(self, now_ms: int) -> None:
        """Drop all entries an hour after the last drop."""
        if not 0 <= now_ms - self._since_ms < _MAX_AGE_MS:
            self.invalidate()
            self._since_ms = now_ms

    def invalidate(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._changes += 1
            self.clear()

    def _drop(self, keys: Sequence[bytes]) -> int:
        """Drop rows that are being changed, and return the number of changes including this one."""
        with self._lock:
            self._changes += 1
            for key in keys:
                self.pop(key, None)
            return self._changes


class CountedNames:
    """A limit of the names that clients register for a topic; counts the rows at the first use and at the limit.

    Args:
        side: the table with a row for each name.
    """

    def __init__(self, side: SideTable) -> None:
        self._side = side
        #: An upper bound of the number of names, by key prefix.
        self._numbers: RecentlySet[bytes, int] = RecentlySet(_MAX_COUNTS)

    def count_new(self, prefix: bytes, topic: TopicId, kind: str, hint: str) -> None:
        """Count a new name before its row is written.

        Args:
            prefix: the key prefix of the rows.
            topic: the topic, for the error.
            kind: the kind of name for the error, such as ``producers``.
            hint: the hint of the error.

        Raises:
            BadRequest: the limit is reached.
            StoreError: the rows could not be read.
        """
        number = self._numbers.get(prefix, MAX_NAMES)
        if number >= MAX_NAMES:
            number = sum(1 for _ in islice(iterate_items(self._side.rows, prefix, stop_key(prefix)), MAX_NAMES))
        if number >= MAX_NAMES:
            raise BadRequest(f"Topic {topic} has {MAX_NAMES} {kind}, the maximum.", hint)
        self._numbers[prefix] = number + 1

    def invalidate(self) -> None:
        """Drop the cached counts."""
        self._numbers.clear()


def _changed_keys(change: SideChange) -> Sequence[bytes]:
    """Return the keys of all rows that a change writes or deletes."""
    if not change.puts and not change.deletes:
        return (change.key,)
    return (change.key, *(key for key, _ in change.puts), *change.deletes)

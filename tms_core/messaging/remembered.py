"""Caches of rows of the side table, and of their numbers, for the only server that writes them.

Threads may share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from threading import Lock

from tms_core.errors import BadRequest
from tms_core.rowkey import stop_key
from tms_core.tables.base import every
from tms_core.tables.recently_set import RecentlySet
from tms_core.tables.side import SideChange, SideTable
from tms_core.topic import TopicId

#: The most cached rows, and their age in milliseconds: the janitor changes rows of producers that were idle for days.
_ROWS, _MEMORY_MS = 20_000, 3_600_000
#: The most producers and the most consumers of a topic, so that a list or a search takes a second and some MB; and the
#: most topics whose numbers are cached.
MOST_NAMES, _COUNTED = 20_000, 10_000


class RememberedRows(RecentlySet[bytes, bytes | None]):
    """A cache of rows that also changes them; a subscription reads a row that is not cached."""

    def __init__(self, side: SideTable) -> None:
        super().__init__(_ROWS)
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
            # A change during the read may be newer than the value, so the value is not cached then.
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
        # A row that another thread changed or read in between may be newer or older than these values: cache nothing
        # then.
        if alone and all(made):
            with self._lock:
                if self._changes == before + 1:
                    self.update((change.key, change.value) for change in changes)
        return made

    def forget_old(self, now_ms: int) -> None:
        """Drop entries that are older than an hour."""
        if not 0 <= now_ms - self._since_ms < _MEMORY_MS:
            self.forget()
            self._since_ms = now_ms

    def forget(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._changes += 1
            self.clear()

    def _drop(self, keys: Sequence[bytes]) -> int:
        """Drop rows that are being changed, and return the number of changes so far."""
        with self._lock:
            self._changes += 1
            for key in keys:
                self.pop(key, None)
            return self._changes


class CountedNames:
    """A limit of names that clients choose, each a row; counts the rows once, and again at the limit.

    Args:
        side: the table of the rows.
    """

    def __init__(self, side: SideTable) -> None:
        self._side = side
        #: An upper bound of their number, by the start of their keys.
        self._numbers: RecentlySet[bytes, int] = RecentlySet(_COUNTED)

    def make_room(self, prefix: bytes, topic: TopicId, kind: str, hint: str) -> None:
        """Count one more name.

        Args:
            prefix: the start of the keys.
            topic: their topic.
            kind: their kind for the error, as ``producers``.
            hint: the hint of the error.

        Raises:
            BadRequest: the limit is reached.
            StoreError: the rows could not be read.
        """
        number = self._numbers.get(prefix, MOST_NAMES)
        if number >= MOST_NAMES:
            number = sum(1 for _ in islice(every(self._side.rows, prefix, stop_key(prefix)), MOST_NAMES))
        if number >= MOST_NAMES:
            raise BadRequest(f"Topic {topic} has {MOST_NAMES} {kind}, the most there may be.", hint)
        self._numbers[prefix] = number + 1

    def forget(self) -> None:
        """Drop the cached numbers."""
        self._numbers.clear()


def _changed_keys(change: SideChange) -> Sequence[bytes]:
    """Return the keys of the changed rows."""
    if not change.puts and not change.deletes:
        return (change.key,)
    return (change.key, *(key for key, _ in change.puts), *change.deletes)

"""Rows of the side table as they were read or counted last, for the server that alone writes them.

Threads may share all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from threading import Lock

from tms_core.errors import BadRequest
from tms_core.rowkey import stop_key
from tms_core.tables.base import every
from tms_core.tables.recently_used import RecentlyUsed
from tms_core.tables.side import SideChange, SideTable
from tms_core.topic import TopicId

#: How many rows are remembered, and for how long: the janitor changes those of producers that were idle for days.
_ROWS, _KEPT_MS = 20_000, 3_600_000
#: Stands for what is not known of a row.
_NOT_READ = b"not read"
#: How many producers a topic may have, and how many consumers, so that to list them, or to look for idle ones, takes a
#: second and some MB; and of how many topics it is known how many there are.
MOST_NAMES, _COUNTED = 20_000, 10_000


class RememberedRows:
    """Reads rows once, and changes them."""

    def __init__(self, side: SideTable) -> None:
        self._side = side
        self._rows: RecentlyUsed[bytes, bytes | None] = RecentlyUsed(_ROWS)
        self._since_ms = 0
        self._changes = 0
        self._lock = Lock()

    def get(self, key: bytes, *, again: bool = False) -> bytes | None:
        """Return a row's value; the data read while it was changed is not remembered.

        Args:
            again: read it, remembered or not.

        Raises:
            StoreError: it could not be read.
        """
        known = _NOT_READ if again else self._rows.get(key, _NOT_READ)
        if known is not _NOT_READ:
            return known
        changes = self._changes
        value = self._side.get(key)
        with self._lock:
            if changes == self._changes:
                self._rows[key] = value
        return value

    def change(self, changes: Sequence[SideChange]) -> list[bool]:
        """Change rows as :meth:`SideTable.exchange_each` does; the writes are remembered, if nothing else was."""
        keys = [key for change in changes for key in _changed(change)]
        before = self._drop(keys)
        made: list[bool] = []
        try:
            made = self._side.exchange_each(changes)
        finally:
            alone = self._drop(keys) == before + 1
        if alone and all(made):
            with self._lock:
                if self._changes == before + 1:
                    self._rows.update((change.key, change.value) for change in changes)
        return made

    def forget_old(self, now_ms: int) -> None:
        """Forget the data read long ago."""
        if not 0 <= now_ms - self._since_ms < _KEPT_MS:
            self.forget()
            self._since_ms = now_ms

    def forget(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._changes += 1
            self._rows.clear()

    def _drop(self, keys: Sequence[bytes]) -> int:
        """Forget rows that are being changed; returns how often any were."""
        with self._lock:
            self._changes += 1
            for key in keys:
                self._rows.pop(key, None)
            return self._changes


class CountedNames:
    """Counts names that clients have made up, each a row: once, and again where there seem to be too many.

    Args:
        side: where they are.
    """

    def __init__(self, side: SideTable) -> None:
        self._side = side
        #: How many there are at most, by the start of their keys.
        self._numbers: RecentlyUsed[bytes, int] = RecentlyUsed(_COUNTED)

    def make_room(self, prefix: bytes, topic: TopicId, kind: str, hint: str) -> None:
        """Count one more of those whose keys start so.

        Args:
            prefix: the start of the keys.
            topic: whose they are.
            kind: their kind: ``producers``.
            hint: what to do where there are too many.

        Raises:
            BadRequest: there are as many as there may be.
            StoreError: they could not be read.
        """
        number = self._numbers.get(prefix, MOST_NAMES)
        if number >= MOST_NAMES:
            number = sum(1 for _ in islice(every(self._side.rows, prefix, stop_key(prefix)), MOST_NAMES))
        if number >= MOST_NAMES:
            raise BadRequest(f"Topic {topic} has {MOST_NAMES} {kind}, the most there may be.", hint)
        self._numbers[prefix] = number + 1

    def forget(self) -> None:
        """Forget how many there are."""
        self._numbers.clear()


def _changed(change: SideChange) -> Sequence[bytes]:
    """Return the keys of the rows that it changes."""
    if not change.puts and not change.deletes:
        return (change.key,)
    return (change.key, *(key for key, _ in change.puts), *change.deletes)

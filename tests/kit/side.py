"""A side table with faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from tms_core.errors import StoreError, StoreUnavailable
from tms_core.tables.base import Page
from tms_core.tables.side import SideChange, SideTable

T = TypeVar("T")


class FaultySide(SideTable):
    """A side table with failing changes and small pages.

    Attributes:
        changes: the number of changes.
        fails_at: the number of the first change that fails, from 0; later changes fail, too. -1: all succeed.
        does_it: whether the first failing change takes effect.
        before: called with the key before each change and before each read of a single row.
    """

    def __init__(self, side: SideTable) -> None:
        self._side = side
        self.changes = 0
        self.fails_at = -1
        self.does_it = False
        self.before: Callable[[bytes], object] = lambda _: None

    def get(self, key: bytes) -> bytes | None:
        self.before(key)
        return self._side.get(key)

    def rows(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[tuple[bytes, bytes]]]:
        # Small pages, so that a log has several pages.
        return self._side.rows(start, stop, min(limit, 2))

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        self._change(rows[0][0], lambda: self._side.put(rows))

    def delete(self, keys: Sequence[bytes]) -> None:
        self._change(b"", lambda: self._side.delete(keys))

    def exchange_each(self, changes: Sequence[SideChange]) -> list[bool]:
        return self._change(changes[0].key, lambda: self._side.exchange_each(changes))

    def close(self) -> None:
        """Do nothing: the test closes the storage."""

    def _change(self, key: bytes, change: Callable[[], T]) -> T:
        self.before(key)
        number, self.changes = self.changes, self.changes + 1
        if 0 <= self.fails_at < number:
            raise StoreError("The table is gone.")
        if number == self.fails_at:
            if self.does_it:
                change()
            raise StoreUnavailable("The response is lost.")
        return change()

"""Reading straight through a table where that is cheaper than seeking from topic to topic.

A pass goes to each topic and reads due rows there: two calls a topic, however few rows it has. To LevelDB a call is
next to nothing. To HBase it is three journeys, in whose time a hundred keys could have come; and every topic lies in as
many places as there are buckets. Therefore a seek returns some more keys than requested, over several topics, and later
questions that they answer are not sent.

How many is learnt on the way: twice as many where they were needed or spared more than they cost, as many as would
have been enough where they were just too few, and else half as many. So a table of many small topics is soon read page
by page, and one of a few large topics is not read at all. The price is that the data read may be a moment old; it is no
older than a page of the same size, and a run asks for the topic again before each batch (rule S2).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from tms_core.errors import StoreError
from tms_core.tables.base import (
    CELLS,
    KEYS,
    KeyRange,
    KeyReads,
    MessageReads,
    Page,
    PointerSet,
    TxCell,
    cells_of,
    searched,
)


class Ahead:
    """The keys of one table, for going through it from its start completely.

    Args:
        table: what to read.
        most_keys: how many may be read at once.
    """

    def __init__(self, table: KeyReads, most_keys: int) -> None:
        self._table = table
        self._most = most_keys
        self._least = min(most_keys, table.keys_per_call // 4)
        self._size = self._least
        self._calls_spared = 0
        self.forget()

    def take_spared(self) -> int:
        """Return how many calls were spared since this was last asked."""
        spared, self._calls_spared = self._calls_spared, 0
        return spared

    def forget(self) -> None:
        """Ask anew from here on, for going back."""
        self._keep(b"", Page([], b""))
        self._gap = KeyRange(b"", b"")

    def first(self, start: bytes) -> bytes | None:
        """Return the first key at or after ``start``; None when there is none.

        Raises:
            StoreError: as :meth:`KeyReads.first`.
        """
        if self._is_in_gap(start):
            return self._gap.stop
        found = self._first(start)
        self._gap = KeyRange(start, found)
        return found

    def _is_in_gap(self, start: bytes) -> bool:
        """Return whether the last answer shows that there is nothing before it."""
        after, found = self._gap
        return after < start and (found is None or start <= found)

    def _first(self, start: bytes) -> bytes | None:
        if not self._least:
            return self._table.first(start)
        resume: bytes | None = start
        while resume is not None:
            page = self._known(resume, None, 1) or self._read(resume)
            if page.items:
                return page.items[0]
            resume = page.resume
        return None

    def keys(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[bytes]]:
        """As a page of keys; nothing is read ahead, but earlier keys are used."""
        page = self._known(start, stop, limit)
        if page is not None:
            self._served += len(page.items)
            return page
        page = self._table.read(KEYS, start, stop, limit)
        if self._holds(start) and page.resume is None:
            # With some to spare, since the next topic may have some more.
            self._wanted = self._least + len(page.items) * 5 // 4
        return page

    def _known(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[bytes]] | None:
        """Return the answer, if it was read ahead whole."""
        if not self._holds(start):
            return None
        found = _between(self._keys, start, stop)
        whole = len(found) <= limit and self._reaches(stop)
        if len(found) < limit and not whole:
            return None
        self._spared()
        items = self._keys[found.start : found.start + min(limit, len(found))]
        return Page(items, None if whole else items[-1] + b"\x00", self._origin)

    def _holds(self, key: bytes) -> bool:
        """Return whether the key would have been seen if it were there."""
        return self._start <= key and (self._stop is None or key < self._stop)

    def _reaches(self, stop: bytes | None) -> bool:
        """Return whether everything before ``stop`` was read."""
        return self._stop is None or (stop is not None and stop <= self._stop)

    def _read(self, start: bytes) -> Page[list[bytes]]:
        """Read from a key on, as many keys as have proved worth it."""
        pays = self._served + self._answered * self._table.keys_per_call >= self._size
        grown = 2 * self._size if pays else self._size // 2
        self._size = min(self._most, max(grown, self._wanted, self._least))
        try:
            page = self._table.read(KEYS, start, None, self._size)
        except StoreError:
            # Whatever is wrong may lie far behind what was asked for.
            self.forget()
            return self._table.read(KEYS, start, None, 1)
        self._keep(start, page)
        return page

    def _keep(self, start: bytes, page: Page[list[bytes]]) -> None:
        self._start, self._stop, self._keys, self._origin = start, page.resume, page.items, page.origin
        self._answered, self._served, self._wanted = 0, 0, 0

    def _spared(self) -> None:
        self._answered += 1
        self._calls_spared += 1


class CellsAhead(Ahead):
    """The same of the message table, and the transactional cells of the keys that were read ahead."""

    _cells: list[TxCell] | None

    def __init__(self, table: MessageReads, most_keys: int) -> None:
        self._messages = table
        super().__init__(table, most_keys)

    def cells(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[TxCell]]:
        """As a page of cells; those of all keys that were read ahead at once, where the range is among them.

        Raises:
            StoreError: as :meth:`MessageReads.read`.
        """
        if not (self._holds(start) and self._reaches(stop)):
            return self._messages.read(CELLS, start, stop, limit)
        if self._cells is None and _between(self._keys, start, stop):
            try:
                self._cells = self._read_cells()
            except StoreError:
                self.forget()
                return self._messages.read(CELLS, start, stop, limit)
        else:
            self._spared()
        cells = self._cells or []
        found = _between(cells, start, stop, attrgetter("key"))
        return Page(cells[found.start : found.stop], None)

    def search(self, start: bytes, stop: bytes | None, limit: int, pointers: PointerSet) -> Page[list[TxCell]]:
        """Search for cells of some pointers, from the data read ahead where that is known.

        Raises:
            StoreError: as :meth:`MessageReads.read`.
        """
        if not self._holds(start):
            found = self._messages.read(cells_of(pointers), start, stop, limit)
            if found.gap is not None:
                self._gap = found.gap
            return found
        return searched(self.cells(start, stop, limit), pointers)

    def _read_cells(self) -> list[TxCell]:
        cells: list[TxCell] = []
        resume: bytes | None = self._start
        while resume is not None:
            page = self._messages.read(CELLS, resume, self._stop, self._most)
            cells += page.items
            resume = page.resume
        return cells

    def _keep(self, start: bytes, page: Page[list[bytes]]) -> None:
        super()._keep(start, page)
        self._cells = None


def _between(
    items: Sequence[Any], start: bytes, stop: bytes | None, key: Callable[[Any], bytes] | None = None
) -> range:
    """Return which of some items, in order of their keys, lie in a range."""
    first = bisect_left(items, start, key=key)
    return range(first, len(items) if stop is None else bisect_left(items, stop, first, key=key))

"""A reader that returns long pages of a table, if they are cheaper than seeks from topic to topic.

A pass seeks each topic and reads its due rows: two calls for each topic, however few rows it has. A call to LevelDB
costs almost nothing. A call to HBase takes three round trips, in which it could return a hundred keys, and each topic
has rows in every bucket. Therefore a seek reads more keys than requested, of several topics, and later reads of these
keys need no call.

The number of keys adapts: it doubles if the extra keys were used or saved more calls than they cost, grows to the need
if there were slightly too few, and is halved otherwise. Therefore a table of many small topics is soon read page by
page, and a table of a few large topics by seeks. The data is not older than a page of the same size, and a run reads
the topic's metadata again before each batch (invariant S2).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar, cast

from tms_core.errors import StoreError
from tms_core.tables.base import (
    CELLS,
    KEYS,
    KeyRange,
    KeyReads,
    Page,
    PointerSet,
    Projection,
    TxCell,
    cells_of,
    filter_cells,
)

T = TypeVar("T")


class ReadAhead(KeyReads):
    """A table that a pass reads from its first key to its last, with read-ahead of keys and cells.

    Args:
        table: the table.
        max_keys: the largest number of keys in one read.
    """

    _cells: list[TxCell] | None

    def __init__(self, table: KeyReads, max_keys: int) -> None:
        self.name, self.keys_per_call = table.name, table.keys_per_call
        self._table = table
        self._max_keys = max_keys
        self._min_keys = min(max_keys, table.keys_per_call // 4)
        self._size = self._min_keys
        self._calls_spared = 0
        self.discard()

    def take_spared(self) -> int:
        """Return the number of saved calls since the previous call of this method."""
        spared, self._calls_spared = self._calls_spared, 0
        return spared

    def discard(self) -> None:
        """Drop all keys and cells that were read ahead, for a read at an earlier key."""
        self._keep(b"", Page([], b""))
        self._gap = KeyRange(b"", b"")

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        return self._table.estimate_bytes(start, stop)

    def read(self, want: Projection[T], start: bytes, stop: bytes | None, limit: int) -> Page[T]:
        """Read a page. A page of one key without a stop is a seek: it reads keys ahead, which later pages use."""
        page: Page[Any]
        if want.part == "keys":
            page = self._seek(start) if limit == 1 and stop is None else self._read_keys(start, stop, limit)
        elif want.part == "cells":
            page = self._read_cells(start, stop, limit, want.pointers)
        else:
            page = self._table.read(want, start, stop, limit)
        return cast(Page[T], page)

    def _seek(self, start: bytes) -> Page[list[bytes]]:
        if self._gap.start < start and (self._gap.stop is None or start <= self._gap.stop):
            # The previous seek has shown that the range before its key is empty.
            return _page_of(self._gap.stop)
        page = self._cached_page(start, None, 1) or self._read_keys_ahead(start)
        if page.items or page.resume is None:
            self._gap = KeyRange(start, page.items[0] if page.items else None)
            return _page_of(self._gap.stop, page)
        return page

    def _read_keys(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[bytes]]:
        page = self._cached_page(start, stop, limit)
        if page is not None:
            self._served += len(page.items)
            return page
        page = self._table.read(KEYS, start, stop, limit)
        if self._holds(start) and page.resume is None:
            # With a margin, because the next topic may have a few more keys.
            self._estimate = self._min_keys + len(page.items) * 5 // 4
        return page

    def _read_cells(
        self, start: bytes, stop: bytes | None, limit: int, pointers: PointerSet | None
    ) -> Page[list[TxCell]]:
        """Read cells. If the range is within the keys read ahead, read the cells of all these keys at once."""
        if not self._holds(start):
            # Leave the search to the store, which can skip rows.
            found = self._table.read(CELLS if pointers is None else cells_of(pointers), start, stop, limit)
            if found.gap is not None:
                self._gap = found.gap
            return found
        if not self._reaches(stop):
            return filter_cells(self._table.read(CELLS, start, stop, limit), pointers)
        if self._cells is None and _between(self._keys, start, stop):
            try:
                self._cells = self._all_cells()
            except StoreError:
                self.discard()
                return filter_cells(self._table.read(CELLS, start, stop, limit), pointers)
        else:
            self._count_spared()
        cells = self._cells or []
        found_at = _between(cells, start, stop, attrgetter("key"))
        return filter_cells(Page(cells[found_at.start : found_at.stop], None), pointers)

    def _all_cells(self) -> list[TxCell]:
        cells: list[TxCell] = []
        resume: bytes | None = self._start
        while resume is not None:
            page = self._table.read(CELLS, resume, self._stop, self._max_keys)
            cells += page.items
            resume = page.resume
        return cells

    def _cached_page(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[bytes]] | None:
        """Return the page if all its keys were read ahead, else None."""
        if not self._holds(start):
            return None
        found = _between(self._keys, start, stop)
        whole = len(found) <= limit and self._reaches(stop)
        if len(found) < limit and not whole:
            return None
        self._count_spared()
        items = self._keys[found.start : found.start + min(limit, len(found))]
        return Page(items, None if whole else items[-1] + b"\x00", self._origin)

    def _holds(self, key: bytes) -> bool:
        """Return whether the key, if it existed, would be among the keys read ahead."""
        return self._start <= key and (self._stop is None or key < self._stop)

    def _reaches(self, stop: bytes | None) -> bool:
        """Return whether all keys before ``stop`` were read ahead."""
        return self._stop is None or (stop is not None and stop <= self._stop)

    def _read_keys_ahead(self, start: bytes) -> Page[list[bytes]]:
        """Read as many keys from ``start`` on as recent reads have used."""
        if not self._min_keys:
            return self._table.read(KEYS, start, None, 1)
        pays = self._served + self._answered * self._table.keys_per_call >= self._size
        grown = 2 * self._size if pays else self._size // 2
        self._size = min(self._max_keys, max(grown, self._estimate, self._min_keys))
        try:
            page = self._table.read(KEYS, start, None, self._size)
        except StoreError:
            # The unreadable row may be far after the requested key, in another topic.
            self.discard()
            return self._table.read(KEYS, start, None, 1)
        self._keep(start, page)
        return page

    def _keep(self, start: bytes, page: Page[list[bytes]]) -> None:
        self._start, self._stop, self._keys, self._origin = start, page.resume, page.items, page.origin
        self._answered, self._served, self._estimate = 0, 0, 0
        self._cells = None

    def _count_spared(self) -> None:
        self._answered += 1
        self._calls_spared += 1


def _page_of(key: bytes | None, page: Page[list[bytes]] | None = None) -> Page[list[bytes]]:
    """Return a page of one key, or an empty last page; ``page`` has the origin of the key."""
    return Page([], None) if key is None else Page([key], key + b"\x00", page and page.origin)


def _between(
    items: Sequence[Any], start: bytes, stop: bytes | None, key: Callable[[Any], bytes] | None = None
) -> range:
    """Return the indexes of sorted items whose keys lie in a range."""
    first = bisect_left(items, start, key=key)
    return range(first, len(items) if stop is None else bisect_left(items, stop, first, key=key))

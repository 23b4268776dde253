"""What the state's file keeps of invalid transactions.

There may be a million of them, of which all but a few are closed, and a daemon asks every minute. So the closed ones
are read once, as bare pointers, 8 bytes each, and kept until the file's are others: because this connection changed
them, or because another one has written anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from janitor.state.base import KnownIds, OpenIdRecord, State
from janitor.state.records import is_among
from janitor.state.sqlite.file import SqliteFile

_ALL = "SELECT pointer, first_seen_ms, scanned_ms, closed_ms FROM open_ids ORDER BY pointer"
_NOT_CLOSED = """
    SELECT pointer, first_seen_ms, scanned_ms, closed_ms FROM open_ids WHERE closed_ms IS NULL
    ORDER BY pointer LIMIT :limit"""
#: A transaction begins at the millisecond that its pointer has left without its last six digits.
_OPEN = """
    SELECT pointer, first_seen_ms, scanned_ms, closed_ms FROM open_ids
    WHERE closed_ms IS NULL OR scanned_ms IS NULL OR scanned_ms > :now_ms
        OR pointer >= (scanned_ms - :window_ms + 1) * 1000000
    ORDER BY pointer"""
_CLOSED = "SELECT pointer FROM open_ids WHERE closed_ms IS NOT NULL ORDER BY pointer"
#: The last column: the longest window after their begins that had ended for all of them when their passes began; a
#: millisecond less than that for negative pointers, which are divided towards zero.
_WHEN_CLOSED = """
    SELECT coalesce(max(scanned_ms), 0), min(coalesce(scanned_ms - pointer / 1000000, -1)) FROM open_ids
    WHERE closed_ms IS NOT NULL"""
#: Nothing is written where nothing changes.
_SAVE = """
    INSERT INTO open_ids VALUES (?, ?, ?, ?) ON CONFLICT (pointer) DO UPDATE
    SET first_seen_ms = excluded.first_seen_ms, scanned_ms = excluded.scanned_ms, closed_ms = excluded.closed_ms
    WHERE (first_seen_ms, scanned_ms, closed_ms)
        IS NOT (excluded.first_seen_ms, excluded.scanned_ms, excluded.closed_ms)"""


class _Closed(NamedTuple):
    """Every pointer that has a closing time.

    Attributes:
        version: tells whether another connection has written since.
        latest_scan_ms: when the last of the passes began that closed them.
        window_ms: they are closed for every window up to this.
    """

    version: int
    pointers: array[int]
    latest_scan_ms: int
    window_ms: int

    def all_count(self, now_ms: int, window_ms: int) -> bool:
        return not self.pointers or (self.latest_scan_ms <= now_ms and window_ms <= self.window_ms)


class SqliteIds(SqliteFile, State):
    """The part of the state that is about invalid transactions."""

    #: None: to be read when it is next asked for.
    _closed: _Closed | None = None

    def open_ids(self) -> dict[int, OpenIdRecord]:
        return self._records(_ALL)

    def known_ids(self, now_ms: int, window_ms: int) -> KnownIds:
        with self._view():
            closed = self._read_closed()
            if closed.all_count(now_ms, window_ms):
                return KnownIds(self._records(_NOT_CLOSED, limit=-1), closed.pointers)
            open_ids = self._records(_OPEN, now_ms=now_ms, window_ms=window_ms)
            return KnownIds(open_ids, array("q", (each for each in closed.pointers if each not in open_ids)))

    def lowest_open(self, limit: int) -> tuple[int, list[OpenIdRecord]]:
        with self._view():
            [(number,)] = self._rows("SELECT count(*) FROM open_ids WHERE closed_ms IS NULL")
            return number, list(self._records(_NOT_CLOSED, limit=limit).values())

    def save_open_ids(self, records: Iterable[OpenIdRecord]) -> None:
        self._write(_SAVE, map(self._row_to_save, records))

    def forget_open_ids(self, pointers: Iterable[int]) -> None:
        self._write("DELETE FROM open_ids WHERE pointer = ?", map(self._row_to_forget, pointers))

    def forget_closed_ids(self, pointers: Iterable[int], before_ms: int) -> None:
        rows = ((pointer, before_ms) for pointer in pointers)
        with self.transaction():
            if self._write("DELETE FROM open_ids WHERE pointer = ? AND closed_ms < ?", rows):
                self._forget_what_was_read()

    def _forget_what_was_read(self) -> None:
        self._closed = None

    def _read_closed(self) -> _Closed:
        [(version,)] = self._rows("PRAGMA data_version")
        if self._closed is not None and self._closed.version == version:
            return self._closed
        [(latest_scan_ms, window_ms)] = self._rows(_WHEN_CLOSED)
        pointers = array("q", chain.from_iterable(self._connection.execute(_CLOSED)))
        closed = _Closed(version, pointers, latest_scan_ms, window_ms)
        # What is read inside a transaction may yet be undone.
        self._closed = None if self._depth else closed
        return closed

    def _records(self, query: str, **terms: int) -> dict[int, OpenIdRecord]:
        with self._lock, self._border():
            return {row[0]: OpenIdRecord(*row) for row in self._connection.execute(query, terms)}

    def _row_to_save(self, record: OpenIdRecord) -> tuple[int, int, int | None, int | None]:
        if record.closed_ms is not None:
            self._forget_what_was_read()
        self._row_to_forget(record.pointer)
        return record.pointer, record.first_seen_ms, record.scanned_ms, record.closed_ms

    def _row_to_forget(self, pointer: int) -> tuple[int]:
        """The pointer's row, which ends what was read if it is closed there."""
        if self._closed is not None and is_among(self._closed.pointers, pointer):
            self._forget_what_was_read()
        return (pointer,)

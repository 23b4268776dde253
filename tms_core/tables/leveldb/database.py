"""One open LevelDB folder as raw bytes: pages, single rows, batches.

Reads and writes are in separate classes: a plan gets the class for reads, which has no method that writes (invariant
S5).

If several threads write at once, this module combines their writes instead of LevelDB. After a failed write, LevelDB
would accept the next write into a torn log (:mod:`tms_core.tables.leveldb.handle`).

The hot path of a sweep is ``keys`` and ``delete``: one library call per page or batch, with loops in C.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice, starmap
from pathlib import Path
from shutil import disk_usage
from threading import Lock
from typing import NamedTuple

from tms_core.errors import StoreError
from tms_core.tables.base import KeyRange, Page, iterate_items
from tms_core.tables.leveldb.handle import Handle
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.lock import convert_errors, convert_write_errors, sync_logs

#: The upper limit of an unbounded range; only an unrecognized key can be above it.
_LAST_KEY = b"\xff" * 64

#: The bytes of values after which a page of rows stops.
PAGE_BYTES = 32 << 20

#: The number of rows between two checks of their size.
_CHUNK_ROWS = 128
#: The first chunk of a search, in rows. It is small because the range may be, and rows after the range are not used.
_FIRST_ROWS = 8

#: Returns a row's new value from its current one (None: the row does not exist); None leaves the row unchanged.
Change = Callable[[bytes | None], bytes | None]


class StoredColumns(NamedTuple):
    """Rows column by column, with their stored values."""

    keys: list[bytes]
    values: list[bytes]


class Database:
    """A LevelDB folder that is open for reading.

    LevelDB has no read-only mode: opening turns the log into a table and switches to a new MANIFEST. A store that must
    not change is cloned first (:mod:`tms_core.tables.leveldb.clone`).

    Args:
        create: create the database if the folder has none.

    Raises:
        StoreBusy: the folder is already open, in this or another process.
        StoreError: LevelDB cannot open the folder.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        self.folder = folder
        with convert_errors(folder):
            self._handle = Handle(folder, create=create)

    def keys(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[bytes]]:
        """Return at most ``limit`` keys, without adding blocks to the block cache, which is for consumers."""
        with (
            convert_errors(self.folder),
            self._handle as db,
            db.iterator(start=start, stop=stop, include_value=False, fill_cache=False, verify_checksums=True) as found,
        ):
            items = list(islice(found, limit))
            if len(items) < limit:
                _check_end(db, items[-1] + b"\x00" if items else start)
                return Page(items, None)
        return Page(items, items[-1] + b"\x00")

    def rows(
        self, start: bytes, stop: bytes | None, limit: int, max_bytes: int = PAGE_BYTES
    ) -> Page[list[tuple[bytes, bytes]]]:
        """Return at most ``limit`` rows; stop after ``max_bytes`` of values."""
        (keys, values), resume, *_ = self.columns(start, stop, limit, max_bytes)
        return Page(list(zip(keys, values, strict=True)), resume)

    def columns(self, start: bytes, stop: bytes | None, limit: int, max_bytes: int) -> Page[StoredColumns]:
        """Return rows as :meth:`rows`, with separate lists of keys and values."""
        with (
            convert_errors(self.folder),
            self._handle as db,
            db.iterator(start=start, stop=stop, fill_cache=False, verify_checksums=True) as found,
        ):
            keys: list[bytes] = []
            values: list[bytes] = []
            size = 0
            for key, value in islice(found, limit):
                keys.append(key)
                values.append(value)
                size += len(value)
                if size >= max_bytes:
                    break
            if len(keys) < limit and size < max_bytes:
                _check_end(db, keys[-1] + b"\x00" if keys else start)
                return Page(StoredColumns(keys, values), None)
        return Page(StoredColumns(keys, values), keys[-1] + b"\x00")

    def fast_columns(self, start: bytes, stop: bytes | None, limit: int) -> Page[StoredColumns]:
        """Return rows as :meth:`columns`, but faster; a page of large rows may exceed ``PAGE_BYTES``."""
        # Keys and values alternate, because a list that is filled by the library costs least.
        found: list[bytes] = []
        size = 0
        with (
            convert_errors(self.folder),
            self._handle as db,
            db.iterator(start=start, stop=stop, fill_cache=False, verify_checksums=True) as rows,
        ):
            parts = chain.from_iterable(rows)
            while len(found) < 2 * limit and size < PAGE_BYTES:
                before = len(found)
                found.extend(islice(parts, min(2 * _CHUNK_ROWS, 2 * limit - before)))
                if len(found) == before:
                    _check_end(db, found[-2] + b"\x00" if found else start)
                    return Page(StoredColumns(found[::2], found[1::2]), None)
                size += len(b"".join(found[before:]))
        return Page(StoredColumns(found[::2], found[1::2]), found[-2] + b"\x00")

    def search(
        self, start: bytes, stop: bytes | None, limit: int, values: Container[bytes], place: slice
    ) -> Page[list[tuple[bytes, bytes]]]:
        """Return those of the next ``limit`` rows whose value has one of some byte strings at a place.

        Other rows cost little more than LevelDB's step from row to row. The iterator has no ``stop``: a row after the
        range proves that the search has read the whole range (S3). A separate search for that row would cost as much
        as all deleted rows in between.
        """
        try:
            return self._search(start, stop, limit, values, place, None)
        except StoreError:
            # The unreadable row may be after the range; then LevelDB must stop before it.
            return self._search(start, stop, limit, values, place, stop)

    def _search(
        self, start: bytes, stop: bytes | None, limit: int, values: Container[bytes], place: slice, bound: bytes | None
    ) -> Page[list[tuple[bytes, bytes]]]:
        """Return the matching rows; LevelDB stops at ``bound`` (None: never)."""
        matches: list[tuple[bytes, bytes]] = []
        read, last, size = 0, start, _FIRST_ROWS
        with (
            convert_errors(self.folder),
            self._handle as db,
            db.iterator(start=start, stop=bound, fill_cache=False, verify_checksums=True) as rows,
        ):
            while read < limit:
                # A list, because the library fills it fastest; a short list, because its values may be large.
                some = list(islice(rows, min(size, limit - read)))
                ends = len(some) < min(size, limit - read)
                next_key = None
                if some and stop is not None and some[-1][0] >= stop:
                    inside = bisect_left(some, (stop,))
                    next_key, some = some[inside][0], some[:inside]
                matches += [row for row in some if row[1][place] in values]
                read += len(some)
                last = some[-1][0] + b"\x00" if some else last
                if next_key is not None:
                    return Page(matches, None, None, read, KeyRange(last, next_key))
                if ends:
                    _check_end(db, last)
                    return Page(matches, None, None, read)
                size = min(2 * size, _CHUNK_ROWS)
        return Page(matches, last, None, read)

    def all(self) -> list[tuple[bytes, bytes]]:
        """Return every row; for the small metadata table."""
        return list(iterate_items(self.rows, b"", None, sys.maxsize))

    def get(self, key: bytes) -> bytes | None:
        """Return one row's value."""
        with convert_errors(self.folder), self._handle as db:
            return db.get(key, verify_checksums=True)

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        """Return the approximate size of a range in tables, without rows in the log."""
        with convert_errors(self.folder), self._handle as db:
            return db.approximate_size(start, _LAST_KEY if stop is None else stop)

    def close(self) -> None:
        """Close the folder; a second call does nothing."""
        with convert_errors(self.folder):
            self._handle.close()


@dataclass(slots=True, eq=False)
class _Write:
    """A write of one thread; ``done`` after the attempt, with its error.

    Attributes:
        repeatable: whether the write may take effect although its writer got an error.
    """

    puts: Sequence[tuple[bytes, bytes]] = ()
    deletes: Sequence[bytes] = ()
    synced: bool = True
    repeatable: bool = False
    done: bool = False
    error: BaseException | None = None

    def to_undo(self) -> Iterable[bytes]:
        """Return the keys of the rows to restore after a failure."""
        if self.repeatable:
            return ()
        keys = (key for key, _ in self.puts)
        # Deletes are rolled back together with the puts of their batch. A batch of deletes alone is repeatable.
        return chain(keys, self.deletes) if self.puts else ()


class WritableDatabase(Database):
    """A LevelDB folder that is open for reading and writing.

    After a failed write, the next write reopens the folder; until that succeeds, all writes fail. A failed put is
    rolled back, unless the process stops before the folder was reopened. A failed delete or inversion may take effect,
    so its caller repeats it. The old values for a rollback would need as much memory and disk as the rows, and the disk
    may be full.

    Attributes:
        version: increases with each write, failed or not, and with each reopening of the folder.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        super().__init__(folder, create=create)
        # LevelDB has no compare-and-set. Between the read and the write of a row, no other thread may delete it, or the
        # write would restore it (invariant S6).
        self._rewriting = Lock()
        self._gathering = Lock()
        self._waiting: list[_Write] = []
        self._disk = Lock()
        #: Keys of failed writes to roll back when the folder is reopened; None: no write has failed.
        self._failed: list[bytes] | None = None
        #: Whether a crash of the machine could undo writes since the last sync.
        self._unsynced = False
        self.version = 0

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete rows in one batch, not synced."""
        with self._rewriting:
            self._write(_Write(deletes=keys, synced=False))

    def put(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Write rows in one synced batch."""
        self._write(_Write(list(rows)))

    def rewrite(self, changes: Iterable[tuple[bytes, Change]], *, repeatable: bool = False) -> list[bool]:
        """Read each row, and write its changed value, in one synced batch.

        Args:
            repeatable: whether a failed batch may take effect.

        Returns:
            Whether the row was written, for each row.
        """
        written, puts = [], []
        with convert_errors(self.folder), self._rewriting:
            with self._handle as db, db.iterator(fill_cache=False, verify_checksums=True) as rows:
                # Without this seek, the first step would skip all deleted rows at the start of the table.
                rows.seek_to_stop()
                for key, change in changes:
                    value = change(_value(db, rows, key))
                    if value is not None:
                        puts.append((key, value))
                    written.append(value is not None)
            if puts:
                self._write(_Write(puts, repeatable=repeatable))
        return written

    def change(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes]) -> None:
        """Write and delete rows in one batch, synced unless it only deletes."""
        self._write(_Write(puts, deletes, synced=bool(puts)))

    def sync(self) -> None:
        """Sync every log.

        A synced write covers only the current log. A crash would lose the rows of an older log, of which LevelDB is
        still making a table. After a failed sync, a repeated sync may succeed although nothing reached the disk, so a
        failed sync counts as a failed write. If no write is unsynced, this does nothing; reopening the folder makes
        tables of all logs, so it also syncs them.
        """
        with convert_write_errors(self.folder):
            with self._disk:
                self._repair()
                if not self._unsynced:
                    return
                # Before the sync: an unsynced write during it sets the flag again.
                self._unsynced = False
            try:
                sync_logs(self.folder)
            except OSError:
                with self._disk:
                    self._failed = self._failed or []
                    self._unsynced = True
                raise

    @contextmanager
    def block_writes(self) -> Iterator[None]:
        """Block all writes during the block. LevelDB may still compact in the background."""
        with self._disk:
            yield

    def can_compact(self) -> bool:
        """Return whether the disk has space for a copy of all tables, more than a compaction ever needs."""
        with convert_errors(self.folder):
            return disk_usage(self.folder).free > self.estimate_bytes(b"", None)

    def compact(self, start: bytes, stop: bytes) -> None:
        """Rewrite the range's tables without its deleted rows."""
        with convert_errors(self.folder), self._handle as db:
            db.compact_range(start=start, stop=stop)
        # LevelDB does not report a failed compaction, but rejects later writes. An empty write detects it.
        self._write(_Write(synced=False))

    def close(self) -> None:
        """Roll back a failed write if possible, and close the folder; closing twice is not an error."""
        with self._disk:
            with suppress(plyvel.Error, OSError):
                self._repair()
            self._failed = None
        super().close()

    def _write(self, write: _Write) -> None:
        """Execute a write together with the writes of waiting threads: one thread writes for all."""
        with self._gathering:
            self._waiting.append(write)
        with self._disk:
            if not write.done:
                with self._gathering:
                    writes, self._waiting = self._waiting, []
                self._write_all(writes)
        if write.error is not None:
            raise write.error

    def _write_all(self, writes: Sequence[_Write]) -> None:
        try:
            with convert_write_errors(self.folder):
                self._repair()
                with self._handle as db:
                    synced = [write.synced for write in writes]
                    batch = db.write_batch(sync=any(synced))
                    for write in writes:
                        deque(starmap(batch.put, write.puts), maxlen=0)
                        deque(map(batch.delete, write.deletes), maxlen=0)
                    self._unsynced = self._unsynced or not all(synced)
                    try:
                        batch.write()
                    except plyvel.Error:
                        # The writes of the batch failed together, so all are rolled back; the log gets no other write.
                        self._failed = [key for write in writes for key in write.to_undo()]
                        raise
        except BaseException as error:
            # For any error: otherwise waiting threads would report success.
            for write in writes:
                write.error = error
            raise
        finally:
            # After the write: a thread that has read an old row has also read an old version.
            self.version += 1
            for write in writes:
                write.done = True

    def _repair(self) -> None:
        """Reopen the folder if a write has failed, and check that it can be written; the caller holds the disk lock."""
        if self._failed is not None:
            try:
                self._handle.reopen(self._failed)
            finally:
                self.version += 1
            self._failed, self._unsynced = None, False
        self._handle.require_lock_file()


def _value(db: plyvel.DB, rows: plyvel._Rows, key: bytes) -> bytes | None:
    """Return the value of a row, usually the row after the iterator's position; None if the row does not exist."""
    found = next(rows, None)
    if found is None or found[0] != key:
        rows.seek(key)
        found = next(rows, None)
    if found is None:
        _check_end(db, key)
    return found[1] if found is not None and found[0] == key else None


def _check_end(db: plyvel.DB, at: bytes) -> None:
    """Check that an iterator stopped at this key because no row follows (invariant S3).

    plyvel treats an iterator that LevelDB stopped with an error as exhausted, so rows of a damaged table would be
    missing without an error. Its raw iterator does check the error.
    """
    with db.raw_iterator(fill_cache=False, verify_checksums=True) as iterator:
        iterator.seek(at)

"""One open LevelDB folder as raw bytes: pages, single rows, batches.

Reading and writing are separate classes: a plan gets the reading class, so it has no method that writes (invariant S5).

If several threads write at once, this module combines their writes, not LevelDB. After a failed write, LevelDB would
accept the next one into a torn log (:mod:`tms_core.tables.leveldb.handle`).

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
from tms_core.tables.base import KeyRange, Page, every
from tms_core.tables.leveldb.handle import Handle
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.lock import sync_logs, translated, writing

#: The upper limit of an unbounded range; only an unrecognized key could be above it.
_LAST_KEY = b"\xff" * 64

#: The bytes of values after which a page of rows is cut.
PAGE_BYTES = 32 << 20

#: The number of rows between two checks of their size.
_MEASURED_ROWS = 128
#: The first read of a search, in rows: the range may have few, and rows after it are read in vain.
_FIRST_ROWS = 8

#: Returns a row's new value from its current one (None: the row does not exist); None leaves the row unchanged.
Change = Callable[[bytes | None], bytes | None]


class StoredColumns(NamedTuple):
    """Rows column by column, with their stored values."""

    keys: list[bytes]
    values: list[bytes]


class Database:
    """A folder opened for reading.

    LevelDB has no read-only mode: opening turns the log into a table and switches to a new MANIFEST. A store that must
    not change is cloned first (:mod:`tms_core.tables.leveldb.clone`).

    Args:
        create: create the database if the folder has none.

    Raises:
        StoreBusy: it is open already, here or in another process.
        StoreError: LevelDB cannot open it.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        self.folder = folder
        with translated(folder):
            self._handle = Handle(folder, create=create)

    def keys(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[bytes]]:
        """Return at most ``limit`` keys, without filling the block cache, which serves consumers."""
        with (
            translated(self.folder),
            self._handle as db,
            db.iterator(start=start, stop=stop, include_value=False, fill_cache=False, verify_checksums=True) as found,
        ):
            items = list(islice(found, limit))
            if len(items) < limit:
                _check_end(db, items[-1] + b"\x00" if items else start)
                return Page(items, None)
        return Page(items, items[-1] + b"\x00")

    def rows(
        self, start: bytes, stop: bytes | None, limit: int, most_bytes: int = PAGE_BYTES
    ) -> Page[list[tuple[bytes, bytes]]]:
        """Return at most ``limit`` rows; stop after ``most_bytes`` of values."""
        (keys, values), resume, *_ = self.columns(start, stop, limit, most_bytes)
        return Page(list(zip(keys, values, strict=True)), resume)

    def columns(self, start: bytes, stop: bytes | None, limit: int, most_bytes: int) -> Page[StoredColumns]:
        """Return rows as :meth:`rows`, with separate lists of keys and values."""
        with (
            translated(self.folder),
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
                if size >= most_bytes:
                    break
            if len(keys) < limit and size < most_bytes:
                _check_end(db, keys[-1] + b"\x00" if keys else start)
                return Page(StoredColumns(keys, values), None)
        return Page(StoredColumns(keys, values), keys[-1] + b"\x00")

    def measured(self, start: bytes, stop: bytes | None, limit: int) -> Page[StoredColumns]:
        """Return rows as :meth:`columns`, of about ``PAGE_BYTES``; large rows may exceed that."""
        # Keys and values alternate, because a list that is filled by the library costs least.
        found: list[bytes] = []
        size = 0
        with (
            translated(self.folder),
            self._handle as db,
            db.iterator(start=start, stop=stop, fill_cache=False, verify_checksums=True) as rows,
        ):
            parts = chain.from_iterable(rows)
            while len(found) < 2 * limit and size < PAGE_BYTES:
                before = len(found)
                found.extend(islice(parts, min(2 * _MEASURED_ROWS, 2 * limit - before)))
                if len(found) == before:
                    _check_end(db, found[-2] + b"\x00" if found else start)
                    return Page(StoredColumns(found[::2], found[1::2]), None)
                size += len(b"".join(found[before:]))
        return Page(StoredColumns(found[::2], found[1::2]), found[-2] + b"\x00")

    def matching(
        self, start: bytes, stop: bytes | None, limit: int, values: Container[bytes], place: slice
    ) -> Page[list[tuple[bytes, bytes]]]:
        """Return the rows among at most ``limit`` whose value has one of the wanted byte strings at a place.

        Other rows cost little more than LevelDB's own step from row to row. The iterator has no ``stop``: a row after
        the range proves that reading reached its limit (S3). Searching for that row separately would cost as much as
        all deleted rows in between.
        """
        try:
            return self._matching(start, stop, limit, values, place, None)
        except StoreError:
            # The unreadable row may be after the range; then LevelDB must stop before it.
            return self._matching(start, stop, limit, values, place, stop)

    def _matching(
        self, start: bytes, stop: bytes | None, limit: int, values: Container[bytes], place: slice, bound: bytes | None
    ) -> Page[list[tuple[bytes, bytes]]]:
        """Return the matching rows; LevelDB stops at ``bound`` (None: never)."""
        matches: list[tuple[bytes, bytes]] = []
        read, last, size = 0, start, _FIRST_ROWS
        with (
            translated(self.folder),
            self._handle as db,
            db.iterator(start=start, stop=bound, fill_cache=False, verify_checksums=True) as rows,
        ):
            while read < limit:
                # A list, because the library fills it fastest; a short one, because its values may be large.
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
                size = min(2 * size, _MEASURED_ROWS)
        return Page(matches, last, None, read)

    def all(self) -> list[tuple[bytes, bytes]]:
        """Return every row; for the small metadata table."""
        return list(every(self.rows, b"", None, sys.maxsize))

    def get(self, key: bytes) -> bytes | None:
        """Return one row's value."""
        with translated(self.folder), self._handle as db:
            return db.get(key, verify_checksums=True)

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        """Return the approximate size of a range in tables; rows in the log are not counted."""
        with translated(self.folder), self._handle as db:
            return db.approximate_size(start, _LAST_KEY if stop is None else stop)

    def close(self) -> None:
        """Close the folder; a second call does nothing."""
        with translated(self.folder):
            self._handle.close()


@dataclass(slots=True, eq=False)
class _Write:
    """A write of one thread; ``done`` after the attempt, with its error.

    Attributes:
        repeatable: whether it does no harm if the write was done although its writer got an error.
    """

    puts: Sequence[tuple[bytes, bytes]] = ()
    deletes: Sequence[bytes] = ()
    synced: bool = True
    repeatable: bool = False
    done: bool = False
    error: BaseException | None = None

    def to_undo(self) -> Iterable[bytes]:
        """Return the keys of rows that must be restored after a failure."""
        if self.repeatable:
            return ()
        keys = (key for key, _ in self.puts)
        # Deletes in a batch with puts are atomic with them, so they are rolled back, too. Other deletes are repeatable.
        return chain(keys, self.deletes) if self.puts else ()


class WritableDatabase(Database):
    """A folder opened for reading and writing.

    After a failed write, the next write reopens the folder; until that succeeds, all writes fail. A failed put is not
    done, unless the process stops before the folder was reopened. A failed delete or inversion may turn out to be done:
    its caller repeats it. Keeping the old values for a rollback would take as much memory and disk as the rows, at a
    time without room.

    Attributes:
        version: greater after each write, also after a failed one, and after each reopening of the folder.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        super().__init__(folder, create=create)
        # LevelDB has no compare-and-set. Between the read and the write of a row, no other thread may delete it, or the
        # write would bring it back (invariant S6).
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
            repeatable: whether it does no harm if a failed batch turns out to be done.

        Returns:
            For each row whether it was written.
        """
        written, puts = [], []
        with translated(self.folder), self._rewriting:
            with self._handle as db, db.iterator(fill_cache=False, verify_checksums=True) as rows:
                # Otherwise the first step would pass all deleted rows at the start of the table.
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

        A synced write covers only the current log. Rows in an older log, which is still being made into a table, would
        be lost in a crash. A repeated sync may succeed after a failed one although nothing reached the disk, so a
        failed sync counts as a failed write. If everything is synced, nothing is done; reopening also makes tables of
        all logs.
        """
        with writing(self.folder):
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
    def held(self) -> Iterator[None]:
        """Block all writes while the block runs. LevelDB may still compact in the background."""
        with self._disk:
            yield

    def has_room(self) -> bool:
        """Return whether the disk has room for a copy of all tables, more than a compaction ever needs."""
        with translated(self.folder):
            return disk_usage(self.folder).free > self.estimate_bytes(b"", None)

    def compact(self, start: bytes, stop: bytes) -> None:
        """Rewrite the range's tables without its deleted rows."""
        with translated(self.folder), self._handle as db:
            db.compact_range(start=start, stop=stop)
        # LevelDB does not report a failed compaction, but rejects later writes. An empty write reveals it.
        self._write(_Write(synced=False))

    def close(self) -> None:
        """Close the folder, after a failed write was rolled back, if it can be; closing twice is not an error."""
        with self._disk:
            with suppress(plyvel.Error, OSError):
                self._repair()
            self._failed = None
        super().close()

    def _write(self, write: _Write) -> None:
        """Write it together with the writes of waiting threads: one thread writes for all."""
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
            with writing(self.folder):
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
                        # All writes of the batch failed together, so all are rolled back. No write may follow in this
                        # log.
                        self._failed = [key for write in writes for key in write.to_undo()]
                        raise
        except BaseException as error:
            # For any error: no waiting thread may mistake it for a success.
            for write in writes:
                write.error = error
            raise
        finally:
            # After the write: a thread that read an old row has noted an old version with it.
            self.version += 1
            for write in writes:
                write.done = True

    def _repair(self) -> None:
        """Reopen the folder if a write has failed; the caller holds the disk lock."""
        if self._failed is not None:
            try:
                self._handle.reopen(self._failed)
            finally:
                self.version += 1
            self._failed, self._unsynced = None, False


def _value(db: plyvel.DB, rows: plyvel._Rows, key: bytes) -> bytes | None:
    """Return the value of a row, usually the row after the last one that was read; None: the row does not exist."""
    found = next(rows, None)
    if found is None or found[0] != key:
        rows.seek(key)
        found = next(rows, None)
    if found is None:
        _check_end(db, key)
    return found[1] if found is not None and found[0] == key else None


def _check_end(db: plyvel.DB, at: bytes) -> None:
    """Check that reading really reached the last row at this key (invariant S3).

    plyvel treats an iterator that LevelDB stopped on an error as exhausted, so rows of a damaged table would silently
    be missing. Its raw iterator does check the error.
    """
    with db.raw_iterator(fill_cache=False, verify_checksums=True) as iterator:
        iterator.seek(at)

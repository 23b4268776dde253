"""One open LevelDB folder, as raw bytes: pages, single rows, batches.

Reading and writing are two classes, because a plan must hold nothing that can write (rule S5): it gets the first.

Several threads write at once, and it is we who put their writes together and not LevelDB: behind a write that failed it
would let the next one through, into a log that is torn (:mod:`tms_core.tables.leveldb.handle`).

The hot path of a sweep is ``keys`` and ``delete``: one library call per page and batch, and the loops run in C.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice, starmap
from pathlib import Path
from shutil import disk_usage
from threading import Lock
from typing import NamedTuple

from tms_core.errors import StoreError
from tms_core.tables.base import KeyRange, Page
from tms_core.tables.leveldb.handle import Handle
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.lock import sync_logs, translated, writing

#: An explicit end for a range without one; only an unrecognized key could lie beyond.
_LAST_KEY = b"\xff" * 64

#: Bytes of values after which a page of rows ends early.
PAGE_BYTES = 32 << 20

#: Rows after which their size is checked where rows come as columns; large ones among them come all the same.
_MEASURED_ROWS = 128
#: Rows that a search reads at first, since the range may have few, and what lies behind it is read in vain.
_FIRST_ROWS = 8

#: Makes a row's new value of its present one (None: no such row); None leaves the row as it is.
Change = Callable[[bytes | None], bytes | None]


class StoredColumns(NamedTuple):
    """Rows column by column, with their values as they are stored."""

    keys: list[bytes]
    values: list[bytes]


class Database:
    """A folder opened for reading.

    LevelDB has no read-only mode: opening turns the log into a table and switches to a new MANIFEST, whatever is asked
    afterwards. A store that must not change is cloned first (:mod:`tms_core.tables.leveldb.clone`).

    Args:
        create: make the database when the folder holds none.

    Raises:
        StoreBusy: it is open already, here or elsewhere.
        StoreError: LevelDB cannot open it.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        self.folder = folder
        with translated(folder):
            self._handle = Handle(folder, create=create)

    def keys(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[bytes]]:
        """At most ``limit`` keys, past the block cache, which is the consumers'."""
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
        """At most ``limit`` rows; fewer also where they are large: at ``most_bytes`` of values, and the last row's."""
        (keys, values), resume, *_ = self.columns(start, stop, limit, most_bytes)
        return Page(list(zip(keys, values, strict=True)), resume)

    def columns(self, start: bytes, stop: bytes | None, limit: int, most_bytes: int) -> Page[StoredColumns]:
        """As :meth:`rows`, keys and values apart."""
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
        """As :meth:`columns`, of at most ``PAGE_BYTES``; where rows are large, of some more."""
        # Keys and values by turns, because a list that is filled by the library costs least.
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
        self, start: bytes, stop: bytes | None, limit: int, wanted: Container[bytes], place: slice
    ) -> Page[list[tuple[bytes, bytes]]]:
        """Of at most ``limit`` rows those whose value has one of some bytes at a place.

        The others cost little more than LevelDB's own going from row to row. The iterator knows no ``stop``: a row
        behind it proves that reading came to the end (S3), and to look for that row again would be as much work as all
        rows that were deleted in between.
        """
        try:
            return self._matching(start, stop, limit, wanted, place, None)
        except StoreError:
            # What cannot be read may lie behind the range.
            return self._matching(start, stop, limit, wanted, place, stop)

    def _matching(
        self, start: bytes, stop: bytes | None, limit: int, wanted: Container[bytes], place: slice, bound: bytes | None
    ) -> Page[list[tuple[bytes, bytes]]]:
        """Args: ``bound``: where LevelDB stops by itself; None: nowhere."""
        matches: list[tuple[bytes, bytes]] = []
        read, last, size = 0, start, _FIRST_ROWS
        with (
            translated(self.folder),
            self._handle as db,
            db.iterator(start=start, stop=bound, fill_cache=False, verify_checksums=True) as rows,
        ):
            while read < limit:
                # As a list first, because the library fills one fastest; of few, since their values may be large.
                some = list(islice(rows, min(size, limit - read)))
                ends = len(some) < min(size, limit - read)
                behind = None
                if some and stop is not None and some[-1][0] >= stop:
                    inside = bisect_left(some, (stop,))
                    behind, some = some[inside][0], some[:inside]
                matches += [row for row in some if row[1][place] in wanted]
                read += len(some)
                last = some[-1][0] + b"\x00" if some else last
                if behind is not None:
                    return Page(matches, None, None, read, KeyRange(last, behind))
                if ends:
                    _check_end(db, last)
                    return Page(matches, None, None, read)
                size = min(2 * size, _MEASURED_ROWS)
        return Page(matches, last, None, read)

    def all(self) -> list[tuple[bytes, bytes]]:
        """Return every row; for the small metadata table."""
        items: list[tuple[bytes, bytes]] = []
        start: bytes | None = b""
        while start is not None:
            page = self.rows(start, None, sys.maxsize)
            items += page.items
            start = page.resume
        return items

    def get(self, key: bytes) -> bytes | None:
        """Return one row's value."""
        with translated(self.folder), self._handle as db:
            return db.get(key, verify_checksums=True)

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        """About how many bytes the range takes in tables; rows still in the log are not counted."""
        with translated(self.folder), self._handle as db:
            return db.approximate_size(start, _LAST_KEY if stop is None else stop)

    def close(self) -> None:
        """Close the folder; closing twice is no error."""
        with translated(self.folder):
            self._handle.close()


class _Write:
    """A write that one thread asks for; ``done`` when it was tried, with the error that it met.

    Attributes:
        repeatable: whether it does no harm when it was done although its writer was told that it failed.
    """

    __slots__ = ("deletes", "done", "error", "puts", "repeatable", "synced")

    def __init__(
        self,
        puts: Sequence[tuple[bytes, bytes]] = (),
        deletes: Sequence[bytes] = (),
        *,
        synced: bool = True,
        repeatable: bool = False,
    ) -> None:
        self.puts = puts
        self.deletes = deletes
        self.synced = synced
        self.repeatable = repeatable
        self.done = False
        self.error: BaseException | None = None

    def to_undo(self) -> Iterable[bytes]:
        """Return the keys of rows that must be as they were when it has failed."""
        if self.repeatable:
            return ()
        keys = (key for key, _ in self.puts)
        # Deletes that are one with what is written: either all of it is done or nothing.
        return chain(keys, self.deletes) if self.puts else ()


class WritableDatabase(Database):
    """A folder opened for reading and writing.

    After a write that failed the next one opens the folder anew, and as long as that cannot be done all of them fail.
    A put that failed is not done, unless the process stops before the folder could be opened anew. A delete or an
    inversion that failed may turn out to be done: its caller asks for it again, and to keep their values for undoing
    would take as much memory and disk as the rows themselves, when there is none left.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        super().__init__(folder, create=create)
        # LevelDB cannot compare and set. Between the reading and the writing of a row no other thread may delete it,
        # or the write would bring it back (rule S6).
        self._rewriting = Lock()
        self._gathering = Lock()
        self._waiting: list[_Write] = []
        self._disk = Lock()
        #: What is to be undone of failed writes, until the folder is opened anew; None: all is well.
        self._failed: list[bytes] | None = None
        #: Whether something was written since the last sync that a crash of the machine may take back.
        self._unsynced = False

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete rows in one batch, not synced."""
        with self._rewriting:
            self._write(_Write(deletes=keys, synced=False))

    def put(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Write rows in one synced batch."""
        self._write(_Write(list(rows)))

    def rewrite(self, changes: Iterable[tuple[bytes, Change]], *, repeatable: bool = False) -> list[bool]:
        """Read each row and write what its change makes of it, all in one synced batch.

        Args:
            repeatable: it does no harm when a batch that failed turns out to be done.

        Returns:
            For each row whether it was written.
        """
        written, puts = [], []
        with translated(self.folder), self._rewriting:
            with self._handle as db, db.iterator(fill_cache=False, verify_checksums=True) as rows:
                # Else the first step would go through whatever was deleted at the start of the table.
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
        """Sync every log there is.

        A synced write would do for the log in use alone: rows in an older one, which is still being made into a table,
        would not survive. A sync that failed may succeed when it is repeated, although nothing came to the disk; so it
        counts as a failed write. Nothing is done where all is synced, also by an opening anew, which makes tables of
        the logs.
        """
        with writing(self.folder):
            with self._disk:
                self._mend()
                if not self._unsynced:
                    return
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
        """Hold all writes while the block runs; they go on behind it. LevelDB may still be tidying up."""
        with self._disk:
            yield

    def has_room(self) -> bool:
        """Return whether the disk could take a second copy of all tables, which is more than a compaction ever
        needs.
        """
        with translated(self.folder):
            return disk_usage(self.folder).free > self.estimate_bytes(b"", None)

    def compact(self, start: bytes, stop: bytes) -> None:
        """Rewrite the range's tables without its deleted rows."""
        with translated(self.folder), self._handle as db:
            db.compact_range(start=start, stop=stop)
        # LevelDB does not say when it could not, but takes no write any more. So this one, of nothing, is what fails.
        self._write(_Write(synced=False))

    def close(self) -> None:
        """Close the folder, after a failed write was rolled back, if it can be; closing twice is no error."""
        with self._disk:
            with suppress(plyvel.Error, OSError):
                self._mend()
            self._failed = None
        super().close()

    def _write(self, write: _Write) -> None:
        """Have it written, together with what other threads have gathered meanwhile: one of them writes for all."""
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
                self._mend()
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
                        self._failed = [key for write in writes for key in write.to_undo()]
                        raise
        except BaseException as error:
            # Whatever it is, no caller may take it for a success.
            for write in writes:
                write.error = error
            raise
        finally:
            for write in writes:
                write.done = True

    def _mend(self) -> None:
        """Open the folder anew if a write has failed; the caller has the disk."""
        if self._failed is not None:
            self._handle.reopen(self._failed)
            self._failed, self._unsynced = None, False


def _value(db: plyvel.DB, rows: plyvel._Rows, key: bytes) -> bytes | None:
    """Return the value of a row, which mostly is the one behind the row that was asked for last; None: there is
    none.
    """
    found = next(rows, None)
    if found is None or found[0] != key:
        rows.seek(key)
        found = next(rows, None)
    if found is None:
        _check_end(db, key)
    return found[1] if found is not None and found[0] == key else None


def _check_end(db: plyvel.DB, at: bytes) -> None:
    """Raise unless reading really came to an end at this key (rule S3).

    plyvel takes an iterator that LevelDB stopped on an error for one that came completely, and rows of a damaged
    table would silently be none. Its raw iterator does check the error.
    """
    with db.raw_iterator(fill_cache=False, verify_checksums=True) as behind:
        behind.seek(at)

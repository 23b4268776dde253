"""One open LevelDB folder, as raw bytes: pages, single rows, batches.

Reading and writing are two classes, because a plan must hold nothing that can write (rule S5): it gets the first.

The hot path of a sweep is ``keys`` and ``delete``: one library call per page and batch, and the loops run in C.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import plyvel

from tms_core.tables.base import Page
from tms_core.tables.leveldb_folder import sync, translated

#: LevelDB's own default, in bytes. CDAP writes blocks of 1024; any reader takes any size, and a quarter of the index
#: entries makes opening a table four times cheaper, which is most of what a pass costs when nothing is due.
_BLOCK_BYTES = 4096
#: Bytes of blocks kept in memory per folder; only reads for consumers fill it. CDAP takes 100 MB.
_CACHE_BYTES = 8 << 20
#: An explicit end for a range without one; only a foreign key could lie beyond.
_LAST_KEY = b"\xff" * 64

#: Bytes of values after which a page of rows ends early.
PAGE_BYTES = 32 << 20

#: Rows after which their size is looked at where rows come as columns.
_MEASURED_ROWS = 32

#: Makes a row's new value of its present one (None: no such row); None leaves the row as it is.
Change = Callable[[bytes | None], bytes | None]


class Columns(NamedTuple):
    """A page of rows, keys and values apart; ``resume`` as of :class:`~tms_core.tables.base.Page`."""

    keys: list[bytes]
    values: list[bytes]
    resume: bytes | None


class Database:
    """A folder opened for reading.

    LevelDB has no read-only mode: opening turns the log into a table and switches to a new MANIFEST, whatever is asked
    afterwards. What must stay as it is, is cloned first (:mod:`tms_core.tables.leveldb_clone`).

    Args:
        folder: one LevelDB folder.
        create: make the database when the folder holds none.

    Raises:
        StoreBusy: it is open already, here or elsewhere.
        StoreError: LevelDB cannot open it.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        self.folder = folder
        with translated(folder):
            self._db = _open(folder, create)

    def keys(self, start: bytes, stop: bytes | None, limit: int) -> Page[bytes]:
        """At most ``limit`` keys, past the block cache, which is the consumers'."""
        with (
            translated(self.folder),
            self._db.iterator(
                start=start, stop=stop, include_value=False, fill_cache=False, verify_checksums=True
            ) as found,
        ):
            items = list(islice(found, limit))
            if len(items) < limit:
                self._check_end(items[-1] + b"\x00" if items else start)
                return Page(items, None)
        return Page(items, items[-1] + b"\x00")

    def rows(self, start: bytes, stop: bytes | None, limit: int) -> Page[tuple[bytes, bytes]]:
        """At most ``limit`` rows; fewer also where they are large."""
        with (
            translated(self.folder),
            self._db.iterator(start=start, stop=stop, fill_cache=False, verify_checksums=True) as found,
        ):
            items: list[tuple[bytes, bytes]] = []
            size = 0
            for item in islice(found, limit):
                items.append(item)
                size += len(item[1])
                if size >= PAGE_BYTES:
                    break
            if len(items) < limit and size < PAGE_BYTES:
                self._check_end(items[-1][0] + b"\x00" if items else start)
                return Page(items, None)
        return Page(items, items[-1][0] + b"\x00")

    def columns(self, start: bytes, stop: bytes | None, limit: int) -> Columns:
        """As :meth:`rows`, keys and values apart: pairs that are not kept cost half as much."""
        keys: list[bytes] = []
        values: list[bytes] = []
        size = 0
        with (
            translated(self.folder),
            self._db.iterator(start=start, stop=stop, fill_cache=False, verify_checksums=True) as found,
        ):
            while len(keys) < limit and size < PAGE_BYTES:
                before = len(keys)
                for key, value in islice(found, min(_MEASURED_ROWS, limit - before)):
                    keys.append(key)
                    values.append(value)
                if len(keys) == before:
                    self._check_end(keys[-1] + b"\x00" if keys else start)
                    return Columns(keys, values, None)
                size += sum(map(len, values[before:]))
        return Columns(keys, values, keys[-1] + b"\x00")

    def all(self) -> list[tuple[bytes, bytes]]:
        """Every row; for the small metadata table."""
        items: list[tuple[bytes, bytes]] = []
        start: bytes | None = b""
        while start is not None:
            page = self.rows(start, None, sys.maxsize)
            items += page.items
            start = page.resume
        return items

    def _check_end(self, at: bytes) -> None:
        """Raise unless reading really came to an end at this key (rule S3).

        plyvel takes an iterator that LevelDB stopped on an error for one that came to its end, and rows of a damaged
        table would silently be none. Its raw iterator does look at the error.
        """
        with self._db.raw_iterator(fill_cache=False, verify_checksums=True) as behind:
            behind.seek(at)

    def get(self, key: bytes) -> bytes | None:
        """One row's value."""
        with translated(self.folder):
            return self._db.get(key, verify_checksums=True)

    def estimate_bytes(self, start: bytes, stop: bytes | None) -> int:
        """About how many bytes the range takes in tables; rows still in the log are not counted."""
        with translated(self.folder):
            return self._db.approximate_size(start, _LAST_KEY if stop is None else stop)

    def close(self) -> None:
        """Let go of the folder; closing twice is no error."""
        with translated(self.folder):
            self._db.close()


class WritableDatabase(Database):
    """A folder opened for reading and writing."""

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        super().__init__(folder, create=create)
        # LevelDB cannot compare and set. Between the reading and the writing of a row no other thread may delete it,
        # or the write would bring it back (rule S6).
        self._rewriting = Lock()

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete rows in one batch, not synced."""
        with translated(self.folder):
            batch = self._db.write_batch()
            deque(map(batch.delete, keys), maxlen=0)
            with self._rewriting:
                batch.write()

    def put(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Write rows in one synced batch."""
        with translated(self.folder):
            batch = self._db.write_batch(sync=True)
            for key, value in rows:
                batch.put(key, value)
            batch.write()

    def rewrite(self, changes: Iterable[tuple[bytes, Change]]) -> list[bool]:
        """Read each row and write what its change makes of it, all in one synced batch.

        Returns:
            For each row whether it was written.
        """
        written = []
        with translated(self.folder), self._rewriting:
            batch = self._db.write_batch(sync=True)
            for key, change in changes:
                value = change(self._db.get(key, fill_cache=False, verify_checksums=True))
                if value is not None:
                    batch.put(key, value)
                written.append(value is not None)
            if any(written):
                batch.write()
        return written

    def sync(self) -> None:
        """Sync every log there is.

        A synced write would do for the log in use alone: rows in an older one, which is still being made into a table,
        would not survive. A log that disappears meanwhile has become a table, and LevelDB syncs those.
        """
        with translated(self.folder):
            for log in self.folder.glob("*.log"):
                with suppress(FileNotFoundError):
                    sync(log)
            sync(self.folder)

    def compact(self, start: bytes, stop: bytes) -> None:
        """Rewrite the range's tables without its deleted rows."""
        with translated(self.folder):
            self._db.compact_range(start=start, stop=stop)


def _open(folder: Path, create: bool) -> plyvel.DB:
    # Twice: a last write that a crash cut short ends the log, as LevelDB has it by default. With the log emptied so,
    # "paranoid" only means that the indexes of tables are verified too: a damaged one hides rows without an error.
    plyvel.DB(str(folder), create_if_missing=create, block_size=_BLOCK_BYTES).close()
    return plyvel.DB(str(folder), paranoid_checks=True, block_size=_BLOCK_BYTES, lru_cache_size=_CACHE_BYTES)

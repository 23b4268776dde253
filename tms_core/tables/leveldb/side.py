"""The side table of a LevelDB store, in a separate folder.

This module is in this package, so that programs with another store do not import LevelDB.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Lock

from tms_core.tables.base import Page
from tms_core.tables.leveldb.database import WritableDatabase
from tms_core.tables.leveldb.layout import holds_database
from tms_core.tables.leveldb.lock import convert_errors, hold_lock, sync
from tms_core.tables.leveldb.manifest import check_logs
from tms_core.tables.recently_set import RecentlySet
from tms_core.tables.side import SideChange, SideTable

#: The largest number of cached rows.
_MAX_CACHED_ROWS = 10_000
#: The value of a row that is not cached.
_NOT_READ = b"not read"


class LevelDBSide(SideTable):
    """A side table in a LevelDB folder; one process at a time.

    Args:
        folder: a folder outside the store, which contains CDAP's three folders only.

    Raises:
        StoreBusy: another process has the folder open.
        StoreError: the folder is damaged or cannot be written.
    """

    private = True

    def __init__(self, folder: Path) -> None:
        present = holds_database(folder)
        if present:
            with hold_lock(folder):
                check_logs(folder)
        else:
            with convert_errors(folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                sync(folder.parent)
        self._database = WritableDatabase(folder, create=not present)
        # A cache of rows. A read of LevelDB releases the interpreter lock, and among busy threads, acquiring it again
        # takes longer than a synced write.
        self._cache: RecentlySet[bytes, bytes | None] = RecentlySet(_MAX_CACHED_ROWS)
        self._changes = 0
        self._lock = Lock()
        # Between the read and the write of an exchange, no other thread may change the row.
        self._exchanging = Lock()

    def get(self, key: bytes) -> bytes | None:
        cached = self._cache.get(key, _NOT_READ)
        if cached is not _NOT_READ:
            return cached
        changes = self._changes
        value = self._database.get(key)
        self._cache_rows(changes, [(key, value)])
        return value

    def rows(self, start: bytes, stop: bytes | None, limit: int) -> Page[list[tuple[bytes, bytes]]]:
        return self._database.rows(start, stop, limit)

    def put(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        self._write(rows, ())

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._exchanging:
            self._write((), keys)

    def exchange_each(self, changes: Sequence[SideChange]) -> list[bool]:
        with self._exchanging:
            made = [self.get(change.key) == change.expected for change in changes]
            puts: list[tuple[bytes, bytes]] = []
            deletes: list[bytes] = []
            for change, is_made in zip(changes, made, strict=True):
                if is_made:
                    puts += [(change.key, change.value), *change.puts]
                    deletes += change.deletes
            if puts:
                self._write(puts, deletes)
        return made

    def _write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes]) -> None:
        """Change rows; cache the new values, unless another thread has changed rows during the write."""
        keys = [*(key for key, _ in puts), *deletes]
        changes = self._evict(keys)
        try:
            self._database.change(puts, deletes)
        finally:
            alone = self._evict(keys) == changes + 1
        if alone:
            self._cache_rows(changes + 1, puts)

    def _evict(self, keys: Iterable[bytes]) -> int:
        with self._lock:
            for key in keys:
                self._cache.pop(key, None)
            self._changes += 1
            return self._changes

    def _cache_rows(self, changes: int, rows: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Cache rows, unless a row has changed since ``changes`` was read."""
        with self._lock:
            if changes == self._changes:
                self._cache.update(rows)

    def block_writes(self) -> AbstractContextManager[None]:
        """Return a context manager that blocks all writes."""
        return self._database.block_writes()

    def close(self) -> None:
        self._database.close()


def side_path(store: Path) -> Path:
    """Return the folder of the side table of a LevelDB store."""
    store = store.resolve()
    return store.with_name(f"{store.name}.side")

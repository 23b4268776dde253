"""An open LevelDB folder that many threads use, and that is reopened after a failed write.

LevelDB does not remember a torn record of its log. It continues after the tear and reports success, but at the next
opening everything after the tear is lost. Therefore nothing may be written to that log after a failure. Reopening the
folder makes a table of all whole records and starts a new log, as a restart of the process would.

The effects of the failed write are rolled back before the next read. A record may be whole although it was never
synced, and its writer got an error. If the process stops before the rollback, a failed write may turn out to be done.

The trade: every use is counted, which costs about a microsecond, because LevelDB must not be closed under an iterator.
While the folder is closed, another process might open it; then reads and writes fail until that process closes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Lock

from tms_core.logs.loggers import get_logger
from tms_core.tables.leveldb.library import plyvel

#: The block size: LevelDB's default, in bytes. CDAP writes blocks of 1024, and readers accept any size. A quarter of
#: the index entries makes opening a table four times cheaper, which is most of the cost of a pass without due rows.
_BLOCK_BYTES = 4096
#: The block cache of a folder in bytes; only reads for consumers fill it. CDAP uses 100 MB.
_CACHE_BYTES = 8 << 20
#: Room for opening a folder in addition to a table as large as its logs: a new MANIFEST and a little more, in bytes.
_ROOM_BYTES = 256 << 10
_CHUNK_BYTES = 64 << 10
#: The longest wait for running uses before a folder is reopened, in seconds; a compaction may take longer.
_REOPEN_SECONDS = 10
#: LevelDB's name for a file that may be removed; nothing it makes has number 0.
_PROBE = "000000.dbtmp"

logger = get_logger(__name__)


class Handle:
    """An open folder; ``with handle as db:`` keeps it open for the block. Blocks must not be nested.

    Args:
        folder: one LevelDB folder.
        create: create the database if the folder has none.

    Raises:
        plyvel.Error: LevelDB cannot open it.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        self._folder = folder
        self._db = _open(folder, create)
        #: Whether the folder was closed for a reopening that has not succeeded yet.
        self._lost = False
        self._undo: dict[bytes, bytes | None] = {}
        self._users = 0
        self._closing = False
        self._lock = Lock()
        self._changed = Condition(self._lock)

    def __enter__(self) -> plyvel.DB:
        # The plain lock, because each read and write enters here; a Condition is entered in slower Python code.
        with self._lock:
            if self._closing:
                self._changed.wait_for(lambda: not self._closing)
            if self._lost:
                self._open_again()
            self._users += 1
            return self._db

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._closing and not self._users:
                self._changed.notify_all()

    def reopen(self, failed: Sequence[bytes]) -> None:
        """Reopen the folder once no thread uses it, and roll back a failed write.

        Args:
            failed: the keys that the failed write wrote or deleted.

        Raises:
            plyvel.Error, OSError: the folder cannot be reopened now. Without room on the disk, it stays open for
            reading.
        """
        with self._changed:
            if not self._lost:
                self._close_to_reopen(failed)
            if self._lost:
                self._open_again()
        logger.warning("%s was reopened after a failed write", self._folder)

    def close(self) -> None:
        """Close the folder once no thread uses it; a second call does nothing."""
        with self._changed:
            self._wait_until_unused(None)
            self._db.close()
            self._lost = False

    def _close_to_reopen(self, failed: Sequence[bytes]) -> None:
        # The failed write is in the log at most, not in LevelDB's memory, so this still reads the old values.
        self._undo |= {key: self._db.get(key, verify_checksums=True) for key in failed}
        # Twice: the rollback is written to the new log, and at the next opening to a table. Check before the close: if
        # the folder cannot be opened again, it must stay open for reading.
        _require_room(self._folder, 2 * sum(len(key) + len(value or b"") for key, value in self._undo.items()))
        if not self._wait_until_unused(_REOPEN_SECONDS):
            raise OSError(
                "it is in use for a long time, and cannot be reopened after a failed write before that use stops"
            )
        self._db.close()
        self._lost = True

    def _wait_until_unused(self, seconds: float | None) -> bool:
        """Block new uses, and wait until no thread uses the folder; return whether that happened in time."""
        self._closing = True
        try:
            return self._changed.wait_for(lambda: not self._users, seconds)
        finally:
            self._closing = False
            self._changed.notify_all()

    def _open_again(self) -> None:
        database = _open(self._folder, create=False)
        if not self._undo:
            self._db, self._lost = database, False
            return
        # Roll back before any read: readers must not see a write whose writer got an error. `_undo` is kept until this
        # succeeds.
        try:
            batch = database.write_batch(sync=True)
            for key, value in self._undo.items():
                if value is None:
                    batch.delete(key)
                else:
                    batch.put(key, value)
            batch.write()
        except plyvel.Error:
            database.close()
            raise
        self._db, self._lost, self._undo = database, False, {}


def _open(folder: Path, create: bool) -> plyvel.DB:
    # Open twice. The first, default opening tolerates a torn last record after a crash, and empties the log. In the
    # second one, "paranoid" then only means that indexes of tables are verified, too: a damaged index hides rows
    # silently (S3).
    plyvel.DB(str(folder), create_if_missing=create, block_size=_BLOCK_BYTES).close()
    return plyvel.DB(str(folder), paranoid_checks=True, block_size=_BLOCK_BYTES, lru_cache_size=_CACHE_BYTES)


def _require_room(folder: Path, more_bytes: int) -> None:
    """Check that the disk has room to reopen the folder and to write so many more bytes.

    Raises:
        OSError: the disk has too little room, so the opening would fail half-way.
    """
    remaining = _ROOM_BYTES + more_bytes
    for log in folder.glob("*.log"):
        # A log that disappears has become a table.
        with suppress(FileNotFoundError):
            remaining += log.stat().st_size
    probe = folder / _PROBE
    try:
        with probe.open("wb", buffering=0) as file:
            while remaining > 0:
                remaining -= file.write(bytes(min(remaining, _CHUNK_BYTES)))
            os.fsync(file.fileno())
    finally:
        # LevelDB removes such files too.
        probe.unlink(missing_ok=True)

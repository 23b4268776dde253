"""An open LevelDB folder that many threads use, and that is opened anew when a write to it has failed.

LevelDB does not remember that a record of its log was cut short: it goes on behind the tear, says that all is well, and
when the folder is opened next everything behind the tear is gone. So after a failure nothing may be written to that log
any more. Opening the folder again makes a table of all whole records and starts a new log; that is what a restart would
do, without one.

What the failed write left is rolled back before the next read: a record may be whole although it was never synced, and
its writer was told that it failed. That holds as long as the process lives; if it stops before, a failed write may turn
out to be done.

The trade: every use is counted in and out, which costs about a microsecond each time, because LevelDB must not be
closed under an iterator. While the folder is closed for a moment another process might take it; then reads and writes
fail until that one lets it go.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Lock

from tms_core.logs.loggers import get_logger
from tms_core.tables.leveldb.library import plyvel

#: LevelDB's own default, in bytes. CDAP writes blocks of 1024; any reader takes any size, and a quarter of the index
#: entries makes opening a table four times cheaper, which is most of what a pass costs when nothing is due.
_BLOCK_BYTES = 4096
#: Bytes of blocks kept in memory per folder; only reads for consumers fill it. CDAP takes 100 MB.
_CACHE_BYTES = 8 << 20
#: What opening a folder needs beside a table as large as its logs: a new MANIFEST and a little more, in bytes.
_ROOM_BYTES = 256 << 10
_CHUNK_BYTES = 64 << 10
#: How long new uses wait at most for those of a folder that is to be opened anew; a compaction may take longer.
_REOPEN_SECONDS = 10
#: LevelDB's name for a file that may be removed; nothing it makes has number 0.
_PROBE = "000000.dbtmp"

logger = get_logger(__name__)


class Handle:
    """A folder as it is open now; ``with handle as db:`` keeps it open for the block. Blocks must not be nested.

    Args:
        folder: one LevelDB folder.
        create: make the database when the folder holds none.

    Raises:
        plyvel.Error: LevelDB cannot open it.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        self._folder = folder
        self._db = _open(folder, create)
        #: Whether it was closed to be opened again, and was not.
        self._lost = False
        self._undo: dict[bytes, bytes | None] = {}
        self._users = 0
        self._closing = False
        self._lock = Lock()
        self._changed = Condition(self._lock)

    def __enter__(self) -> plyvel.DB:
        # By the lock itself, since each read and write comes here.
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
        """Open the folder anew, once no thread uses it, and take back what a failed write left.

        Args:
            failed: the keys that it wrote or deleted.

        Raises:
            plyvel.Error, OSError: that cannot be done now. As long as there is no room on the disk the folder stays
                open for reading.
        """
        with self._changed:
            if not self._lost:
                self._close_to_reopen(failed)
            if self._lost:
                self._open_again()
        logger.warning("%s was opened anew after a failed write", self._folder)

    def close(self) -> None:
        """Close the folder once no thread uses it; closing twice is no error."""
        with self._changed:
            self._wait_until_unused(None)
            self._db.close()
            self._lost = False

    def _close_to_reopen(self, failed: Sequence[bytes]) -> None:
        # What failed is in the log at most, so this is what was there before.
        self._undo |= {key: self._db.get(key, verify_checksums=True) for key in failed}
        # In the new log, and in the table that is made of that when the folder is opened next.
        _require_room(self._folder, 2 * sum(len(key) + len(value or b"") for key, value in self._undo.items()))
        if not self._wait_until_unused(_REOPEN_SECONDS):
            raise OSError("it is in use for long, and cannot be opened anew after a failed write before that ends")
        self._db.close()
        self._lost = True

    def _wait_until_unused(self, seconds: float | None) -> bool:
        """Stop new uses and wait until no thread uses the folder; returns whether that came in time."""
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
    # Twice: a last write that a crash cut short ends the log, as LevelDB has it by default. With the log emptied so,
    # "paranoid" only means that the indexes of tables are verified too: a damaged one hides rows without an error.
    plyvel.DB(str(folder), create_if_missing=create, block_size=_BLOCK_BYTES).close()
    return plyvel.DB(str(folder), paranoid_checks=True, block_size=_BLOCK_BYTES, lru_cache_size=_CACHE_BYTES)


def _require_room(folder: Path, more_bytes: int) -> None:
    """Check that there is room to open the folder again and to write so much more.

    Raises:
        OSError: there is not, and opening would fail half-way.
    """
    left = _ROOM_BYTES + more_bytes
    for log in folder.glob("*.log"):
        # One that disappears meanwhile has become a table.
        with suppress(FileNotFoundError):
            left += log.stat().st_size
    probe = folder / _PROBE
    try:
        with probe.open("wb", buffering=0) as file:
            while left > 0:
                left -= file.write(bytes(min(left, _CHUNK_BYTES)))
            os.fsync(file.fileno())
    finally:
        # LevelDB removes such files too.
        probe.unlink(missing_ok=True)

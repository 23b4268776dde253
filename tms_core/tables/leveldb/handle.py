"""An open LevelDB folder that many threads use, and that is reopened after a failed write.

After a failed write, LevelDB's log may have a torn record. LevelDB continues after that record and reports success, but
at the next opening everything after the torn record is lost. Therefore nothing may be written to that log after a
failure. Reopening the folder makes a table of all complete records and starts a new log, as a restart would.

The failed write is rolled back before the next read, because its record may be complete on the disk although its writer
got an error. If the process stops before the rollback, the failed write may be visible after the restart.

The trade-off: every use is counted, which costs about a microsecond, because LevelDB must not be closed during a read.
While the folder is closed, another process might open it; then reads and writes fail until that process closes it.
"""

from __future__ import annotations

import errno
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
#: The disk space for opening a folder in addition to a table of its logs: a new MANIFEST and a margin, in bytes.
_MARGIN_BYTES = 256 << 10
_CHUNK_BYTES = 64 << 10
#: The longest wait for running uses before a folder is reopened, in seconds; a compaction may take longer.
_REOPEN_SECONDS = 10
#: A name of LevelDB for temporary files, which it removes; LevelDB never uses number 0.
_PROBE = "000000.dbtmp"

logger = get_logger(__name__)


class Handle:
    """An open folder; ``with handle as db:`` keeps it open for the block. Blocks must not be nested.

    Args:
        folder: one LevelDB folder.
        create: create the database if the folder has none.

    Raises:
        plyvel.Error: LevelDB cannot open the folder.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        self._folder = folder
        self._db = _open(folder, create)
        self._lock_file = str(folder / "LOCK")
        self._lock_id = self._find_lock_id()
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
                self._reopen()
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
            plyvel.Error, OSError: the folder cannot be reopened now. If the disk is full, or the folder was deleted or
                replaced, it stays open for reading.
        """
        with self._changed:
            if not self._lost:
                self.require_lock_file()
                self._close_to_reopen(failed)
            if self._lost:
                self._reopen()
        logger.warning("%s was reopened after a failed write", self._folder)

    def require_lock_file(self) -> None:
        """Check that the folder has the lock file with which it was opened.

        LevelDB writes to deleted files and reports success. Without this lock file, another process can open the
        folder, too.

        Raises:
            OSError: the folder or its lock file was deleted or replaced.
        """
        if self._find_lock_id() != self._lock_id:
            raise OSError(errno.ENOENT, "its files were deleted or replaced while it was open", str(self._folder))

    def close(self) -> None:
        """Close the folder once no thread uses it; a second call does nothing."""
        with self._changed:
            self._wait_until_unused(None)
            self._db.close()
            self._lost = False

    def _find_lock_id(self) -> tuple[int, int] | None:
        """Return the device and the inode of the lock file; None: it does not exist."""
        try:
            # Not with pathlib, which is slower: each write calls this.
            found = os.stat(self._lock_file)  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            return None
        # On another volume, the file at this path may have the same inode.
        return found.st_dev, found.st_ino

    def _close_to_reopen(self, failed: Sequence[bytes]) -> None:
        # The failed write may be in the log, but is not in LevelDB's memory, so this still reads the old values.
        self._undo |= {key: self._db.get(key, verify_checksums=True) for key in failed}
        # Twice: the rollback is written to the new log, and at the next opening to a table. Check before the close: if
        # the folder cannot be opened again, it must stay open for reading.
        _require_space(self._folder, 2 * sum(len(key) + len(value or b"") for key, value in self._undo.items()))
        if not self._wait_until_unused(_REOPEN_SECONDS):
            raise OSError(
                "a long read or compaction uses it, so it cannot be reopened after a failed write before that finishes"
            )
        self._db.close()
        self._lost = True

    def _wait_until_unused(self, seconds: float | None) -> bool:
        """Block new uses and wait for running uses; return whether they have finished within the time."""
        self._closing = True
        try:
            return self._changed.wait_for(lambda: not self._users, seconds)
        finally:
            self._closing = False
            self._changed.notify_all()

    def _reopen(self) -> None:
        # The rows to roll back belong to this folder only.
        self.require_lock_file()
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
    # Open twice. The first opening has the default options, so it tolerates a torn last record after a crash, and it
    # empties the log. In the second opening, the paranoid checks therefore only add the checksums of table indexes: a
    # damaged index hides rows without an error (S3).
    plyvel.DB(str(folder), create_if_missing=create, block_size=_BLOCK_BYTES).close()
    return plyvel.DB(str(folder), paranoid_checks=True, block_size=_BLOCK_BYTES, lru_cache_size=_CACHE_BYTES)


def _require_space(folder: Path, more_bytes: int) -> None:
    """Check that the disk has the space to reopen the folder and to write ``more_bytes``.

    Raises:
        OSError: the disk has too little space, so the opening would fail.
    """
    remaining = _MARGIN_BYTES + more_bytes
    for log in folder.glob("*.log"):
        # LevelDB has made a table of a log that disappears.
        with suppress(FileNotFoundError):
            remaining += log.stat().st_size
    probe = folder / _PROBE
    try:
        with probe.open("wb", buffering=0) as file:
            while remaining > 0:
                remaining -= file.write(bytes(min(remaining, _CHUNK_BYTES)))
            os.fsync(file.fileno())
    finally:
        # LevelDB removes this file, too, if the process stops here.
        probe.unlink(missing_ok=True)

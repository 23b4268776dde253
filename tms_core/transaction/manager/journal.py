"""The log of a manager, in Tephra's format for one machine, synced before each response.

Tephra only flushes its buffer, and holds the first record of each file in the buffer until the second record. This
module appends an edit under the lock of the manager's state, so the file has the order of the decisions. The responding
thread then waits for the disk without the lock. One of the waiting threads writes and syncs for all: a sync takes as
long for one record as for hundreds (group commit).

After a failed write, the log must not be used: its last bytes are unknown, and a repeated sync may succeed although
nothing reached the disk. Therefore nothing is appended, all waiting threads get the error, and the manager continues
with another log (:mod:`tms_core.transaction.manager.durable`).
"""

from __future__ import annotations

import os
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from tms_core.errors import StoreError, StoreFull, is_full
from tms_core.transaction.codec.edits import Edit, encode_edit

_NUMBER = struct.Struct(">q")


class LogFailed(StoreError):
    """The transaction log could not be written; the appended edits may or may not be on disk."""

    code = "TMS-TRANSACTION-LOG"


class LogFull(LogFailed, StoreFull):
    """The transaction log could not be written, because its disk is full or read-only."""

    code = "TMS-STORE-FULL"


class GroupLog(ABC):
    """A log with group commit: waiting threads share one write; threads may share it."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._appended = 0
        self._synced = 0
        self._failure: OSError | StoreError | None = None
        self._buffer = Lock()
        #: Whether a thread is writing; and for each waiting thread, the number of edits and the lock that wakes it.
        self._writing = False
        self._waiting: list[tuple[int, Lock]] = []

    def append(self, edit: Edit) -> int:
        """Append an edit in memory, and return its number for :meth:`sync`."""
        data = encode_edit(edit)
        with self._buffer:
            self._pending.append(data)
            self._appended += 1
            return self._appended

    def sync(self, position: int) -> None:
        """Wait until the first ``position`` edits are on disk.

        Raises:
            LogFailed: the edits could not be written, and never will be.
        """
        if self._acquire_turn(position):
            try:
                self._write()
            finally:
                self._release_turn()
        if self._failure is not None and self._synced < position:
            raise self._failed(self._failure) from self._failure

    def _acquire_turn(self, position: int) -> bool:
        """Wait until the edits are on disk, the log has failed, or this thread must write; return whether it must."""
        with self._buffer:
            if self._synced >= position or self._failure is not None:
                return False
            if not self._writing:
                self._writing = True
                return True
            turn = Lock()
            turn.acquire()
            self._waiting.append((position, turn))
        turn.acquire()
        return self._synced < position and self._failure is None

    def _release_turn(self) -> None:
        """Wake the threads whose edits are on disk, and the first other thread, which writes for all."""
        with self._buffer:
            synced = self._synced if self._failure is None else sys.maxsize
            woken = [turn for position, turn in self._waiting if position <= synced]
            self._waiting = [one for one in self._waiting if one[0] > synced]
            self._writing = bool(self._waiting)
            if self._writing:
                woken.append(self._waiting.pop(0)[1])
        for turn in woken:
            turn.release()

    @abstractmethod
    def close(self) -> None:
        """Close the log; unsynced edits may be lost."""

    @abstractmethod
    def _put(self, first: int, edits: Sequence[bytes]) -> None:
        """Write edits after the earlier ones, and sync them.

        Args:
            first: the number of the first edit, from 0.
        """

    @abstractmethod
    def _failed(self, failure: OSError | StoreError) -> LogFailed:
        """Return the error for waiting threads."""

    def _write(self) -> None:
        """Write all appended edits."""
        with self._buffer:
            pending, self._pending = self._pending, []
            position = self._appended
        try:
            self._put(self._synced, pending)
        except (OSError, StoreError) as error:
            self._failure = error
        except BaseException as error:
            # For example, out of memory: the pending edits are lost, and nothing may be written after the gap.
            self._failure = StoreError(f"{error!r}")
            raise
        else:
            self._synced = position


class LogFile(GroupLog):
    """An open ``txlog.<ms>`` file; created when the first edit is synced.

    Args:
        path: the path of the file, which must not exist.
        check: raises StoreError if the directory is not the directory of this log; called before the file is created.
    """

    def __init__(self, path: Path, check: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._path = path
        self._check = check
        self._file: int | None = None

    def close(self) -> None:
        """Close the file; unsynced edits may be lost."""
        has_turn = self._acquire_turn(sys.maxsize)
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if has_turn:
            self._release_turn()

    def _put(self, first: int, edits: Sequence[bytes]) -> None:
        if self._file is None:
            self._check()
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # Without this sync, a power failure may lose the name of the file, and with it all synced edits.
            sync_folder(self._path.parent)
        elif not self._path.exists() or not os.path.samestat(self._path.stat(), os.fstat(self._file)):
            # The system writes to deleted files and reports success.
            self._check()
            raise StoreError(
                "it was deleted or replaced while it was open",
                "Decisions since the newest snapshot are lost. Find the program that deletes files of this directory.",
            )
        write_all(self._file, b"".join(_NUMBER.pack(first + at) + data for at, data in enumerate(edits)))
        os.fdatasync(self._file)

    def _failed(self, failure: OSError | StoreError) -> LogFailed:
        hint = "Repair the disk or free space on it; the manager then continues without a restart."
        if isinstance(failure, OSError):
            kind, reason = LogFull if is_full(failure) else LogFailed, failure.strerror or str(failure)
        else:
            kind, reason, hint = LogFailed, failure.message, failure.hint or hint
        return kind(f"transaction log {self._path} could not be written: {reason}.", hint, self._path)


def write_all(file: int, data: bytes) -> None:
    """Write all of ``data``; one system call may write less."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(file, remaining) :]


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

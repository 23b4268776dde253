"""The log that a manager writes, in Tephra's format for one machine, synced before anything is answered.

Tephra only empties its buffer, and leaves the first record of each file in it until the second comes. Here an edit is
appended while the manager's state is locked, so that the order of the file is that in which things happened, and the
thread that has to answer for it then waits for the disk without the lock. One of the waiting threads writes and syncs
for all: a sync takes the same time for one record as for hundreds (group commit).

A log that could not be written is over: what stands in the file behind a failure is not known, and a sync that failed
may succeed when it is repeated, although nothing came to the disk. So nothing more is put there, and all waiting
threads are told; the manager goes on with another log (:mod:`tms_core.transaction.manager.durable`).
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from threading import Lock

from tms_core.errors import StoreError
from tms_core.transaction.codec.edits import Edit, encode_edit

_NUMBER = struct.Struct(">q")


class LogFailed(StoreError):
    """The transaction log could not be written; what was appended may or may not be on disk."""


class LogFile:
    """A ``txlog.<ms>`` file while it is written; made when the first edit is synced. Threads may share it.

    Args:
        path: where; no such file may be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[bytes] = []
        self._appended = 0
        self._synced = 0
        self._file: int | None = None
        self._failure: OSError | None = None
        self._buffer = Lock()
        self._disk = Lock()

    def append(self, edit: Edit) -> int:
        """Put an edit at the end, in memory; returns what :meth:`sync` takes to wait for it."""
        data = encode_edit(edit)
        with self._buffer:
            self._pending.append(_NUMBER.pack(self._appended) + data)
            self._appended += 1
            return self._appended

    def sync(self, position: int) -> None:
        """Return when the first ``position`` edits are on disk.

        Raises:
            LogFailed: they are not, and will not be.
        """
        if self._synced >= position:
            return
        with self._disk:
            if self._synced >= position:
                return
            if self._failure is None:
                self._write()
            if self._failure is not None:
                raise _failed(self._path, self._failure) from self._failure

    def close(self) -> None:
        """Close the file; what was not synced may be lost."""
        with self._disk:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _write(self) -> None:
        """Write and sync all that was appended so far."""
        with self._buffer:
            pending, self._pending = self._pending, []
            position = self._appended
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                sync_folder(self._path.parent)
            write_all(self._file, b"".join(pending))
            os.fdatasync(self._file)
        except OSError as error:
            self._failure = error
        else:
            self._synced = position


def write_all(file: int, data: bytes) -> None:
    """Write all of ``data``; a single call may write less."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def sync_folder(folder: Path) -> None:
    """See that the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failed(path: Path, error: OSError) -> LogFailed:
    return LogFailed(
        f"transaction log {path} could not be written: {error.strerror or error}.",
        "Repair the disk or free space on it, and the manager goes on by itself; what was acknowledged is there.",
    )

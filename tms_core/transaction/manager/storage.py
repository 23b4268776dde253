"""The storage of a transaction manager: a directory with Tephra's names and formats.

A snapshot is written under a name that Tephra does not read, then synced and renamed, and the directory is synced. A
log is ``txlog.<ms>``, with the time of the snapshot before it. Therefore Tephra's ``LocalFileTransactionStateStorage``
can use the directory, and Tephra's files on HDFS can be copied to it.

Recovery reads the newest readable snapshot and every log since. It skips a damaged snapshot with a warning, because the
logs reach back to the oldest kept snapshot. A log with damage before its last record prevents the start, because
continuing would lose commits. The directory is locked, because two managers on it would issue the same ids.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from tms_core.errors import FormatError, StoreBusy, StoreError, StoreFull, StoreUnavailable, is_full
from tms_core.logs.loggers import get_logger
from tms_core.rowkey import LONG_MAX
from tms_core.transaction.codec.edits import Edit
from tms_core.transaction.codec.log import read_log
from tms_core.transaction.codec.snapshot import read_snapshot, write_snapshot
from tms_core.transaction.manager.journal import LogFile, sync_folder
from tms_core.transaction.model import Snapshot
from tms_core.transaction.source.source import SYSTEM_FILE

#: The number of kept snapshots (``data.tx.snapshot.retain``).
RETAINED = 10

_SNAPSHOT = re.compile(r"snapshot\.([0-9]{1,19})")
_LOG = re.compile(r"txlog\.([0-9]{1,19})")
#: The prefix of an unfinished snapshot's name, as in Tephra.
_UNFINISHED = ".in-progress."
_LOCK = ".lock"

logger = get_logger(__name__)


class DirectoryBusy(StoreBusy):
    """Another transaction manager has the directory."""


class StorageElsewhere(StoreUnavailable):
    """Another manager has the storage now; this manager may get it later."""


class DirectoryFailed(StoreError):
    """The directory of a transaction manager cannot be used."""


class DirectoryFull(DirectoryFailed, StoreFull):
    """The directory of a transaction manager cannot be written, because its disk is full or read-only."""

    code = "TMS-STORE-FULL"


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """The snapshot and the edits of an earlier manager.

    Attributes:
        snapshot: the newest usable snapshot; None: there is no snapshot.
        edits: later edits, in order.
        newest_ms: the largest number in any name; new names must have higher numbers, whatever the clock.
    """

    snapshot: Snapshot | None
    edits: Iterator[Edit]
    newest_ms: int


class Log(Protocol):
    """A log of edits."""

    def append(self, edit: Edit) -> int:
        """Append an edit, and return its number for :meth:`sync`."""
        ...

    def sync(self, position: int) -> None:
        """Wait until the first ``position`` edits are durable."""
        ...

    def close(self) -> None:
        """Close the log; unsynced edits may be lost."""
        ...


class Storage(Protocol):
    """The storage of snapshots and logs."""

    def recover(self) -> RecoveredLog:
        """Return the newest snapshot and the edits after it.

        Raises:
            StorageElsewhere: another manager has the storage now.
        """
        ...

    def log(self, timestamp_ms: int) -> Log:
        """Return a new log after the snapshot of that time."""
        ...

    def save(self, snapshot: Snapshot) -> None:
        """Save a snapshot, and delete older data."""
        ...

    def close(self) -> None:
        """Close the storage, so that another manager can open it."""
        ...


class DirectoryStorage:
    """A directory on this machine, locked by one manager at a time.

    Args:
        path: the directory (``transactions.directory``); created if it does not exist.
        retain: the number of kept snapshots.

    Raises:
        DirectoryBusy: another manager uses the directory.
        DirectoryFailed: the directory cannot be created or read.
    """

    def __init__(self, path: Path, *, retain: int = RETAINED) -> None:
        self._path = path
        self._retain = retain
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _failed(path, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise DirectoryBusy(
                f"another transaction manager uses {path}.", "Stop that manager, or set a separate directory for each."
            ) from error

    @staticmethod
    def has_log(path: Path) -> bool:
        """Return whether a directory has snapshots or logs."""
        return any(_SNAPSHOT.fullmatch(found.name) or _LOG.fullmatch(found.name) for found in path.glob("*"))

    def recover(self) -> RecoveredLog:
        """Return the newest usable snapshot, and every edit since.

        Raises:
            DirectoryFailed: no snapshot is usable, or the directory cannot be read.
            FormatError: during the iteration over the edits: a log is damaged.
        """
        try:
            snapshots, logs = self._list(_SNAPSHOT), self._list(_LOG)
            since_ms, snapshot = self._newest(snapshots)
        except OSError as error:
            raise _failed(self._path, error) from error
        # After the read: a restart must not replace the state by that of another directory, such as an empty mount
        # point, and save it when the directory is back.
        self._require_lock()
        edits = (edit for number in logs if number >= since_ms for edit in read_log(self._path / f"txlog.{number}"))
        return RecoveredLog(snapshot, edits, max([*snapshots, *logs], default=0))

    def name_system(self, system: str) -> None:
        """Store the id of the transaction system, if it has no id. Durable on return.

        Raises:
            DirectoryFailed: the id could not be written.
        """
        if system_of(self._path):
            return
        unfinished = self._path / f"{_UNFINISHED}{SYSTEM_FILE}"
        try:
            with unfinished.open("w", encoding="ascii") as stream:
                stream.write(f"{system}\n")
                stream.flush()
                os.fsync(stream.fileno())
            # Synced before the rename, so that a crash of the machine leaves no empty id under the name.
            unfinished.rename(self._path / SYSTEM_FILE)
            sync_folder(self._path)
        except OSError as error:
            raise _failed(self._path, error) from error

    def log(self, timestamp_ms: int) -> LogFile:
        """Return a new log; its file appears with its first edit."""
        return LogFile(self._path / f"txlog.{timestamp_ms}", self._require_lock)

    def save(self, snapshot: Snapshot) -> None:
        """Save a snapshot under its time, and delete data before the last ``retain`` snapshots.

        Raises:
            DirectoryFailed: the snapshot could not be written.
        """
        self._require_lock()
        timestamp_ms = snapshot.visibility.timestamp_ms
        unfinished = self._path / f"{_UNFINISHED}{timestamp_ms}"
        try:
            with open(unfinished, "wb", opener=partial(os.open, mode=0o600)) as stream:
                write_snapshot(stream, snapshot)
                stream.flush()
                os.fsync(stream.fileno())
            # Synced before it gets its name: a crash never leaves a partial file that looks like a snapshot.
            unfinished.rename(self._path / f"snapshot.{timestamp_ms}")
            sync_folder(self._path)
        except OSError as error:
            # Delete it, because repeated attempts would fill the disk with unfinished files.
            with suppress(OSError):
                unfinished.unlink()
            raise _failed(self._path, error) from error
        try:
            self._delete_old_files()
        except OSError as error:
            logger.warning("old transaction snapshots and logs in %s were not deleted: %s", self._path, error)

    def close(self) -> None:
        """Unlock the directory, so that another manager can open it; a second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _require_lock(self) -> None:
        """Check that the directory still has the locked file; another manager may use a directory in its place.

        Raises:
            DirectoryFailed: the directory was deleted or replaced, or cannot be read.
        """
        try:
            is_same = os.path.samestat((self._path / _LOCK).stat(), os.fstat(self._lock))
        except (FileNotFoundError, NotADirectoryError):
            is_same = False
        except OSError as error:
            raise _failed(self._path, error) from error
        if not is_same:
            raise DirectoryFailed(
                f"the transaction manager cannot use {self._path}: it was deleted or replaced while it was open.",
                "Mount it again. If it is lost, stop this server and restore the directory from a backup.",
                self._path,
            )

    def _newest(self, timestamps_ms: list[int]) -> tuple[int, Snapshot | None]:
        for timestamp_ms in reversed(timestamps_ms):
            path = self._path / f"snapshot.{timestamp_ms}"
            try:
                with path.open("rb") as stream:
                    return timestamp_ms, read_snapshot(stream)
            except FormatError as error:
                logger.warning("%s is skipped, and an older snapshot and the logs since are used: %s", path, error)
        if timestamps_ms:
            raise DirectoryFailed(
                f"none of the {len(timestamps_ms)} transaction snapshots in {self._path} can be used.",
                "Restore a snapshot from a copy; the log has the reason for each.",
                self._path,
            )
        return 0, None

    def _list(self, pattern: re.Pattern[str]) -> list[int]:
        """Return the numbers in the matching names, ascending."""
        with os.scandir(self._path) as entries:
            matches = [pattern.fullmatch(entry.name) for entry in entries]
        return sorted(number for match in matches if match and (number := int(match[1])) < LONG_MAX)

    def _delete_old_files(self) -> None:
        """Delete old snapshots, the logs before the oldest kept one, and unfinished files of a crash."""
        snapshots = self._list(_SNAPSHOT)
        newest = snapshots[-self._retain :]
        old = [f"snapshot.{number}" for number in snapshots[: -self._retain]]
        old += [f"txlog.{number}" for number in self._list(_LOG) if number < newest[0]]
        with os.scandir(self._path) as entries:
            old += [entry.name for entry in entries if entry.name.startswith(_UNFINISHED)]
        for name in old:
            (self._path / name).unlink(missing_ok=True)


class MemoryStorage:
    """A storage that stores nothing; the state is lost with the manager."""

    def recover(self) -> RecoveredLog:
        """Return an empty state."""
        return RecoveredLog(None, iter(()), 0)

    def log(self, timestamp_ms: int) -> Log:
        """Return a log that stores nothing."""
        return NoLog()

    def save(self, snapshot: Snapshot) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class NoLog:
    """A log that stores nothing."""

    def append(self, edit: Edit) -> int:
        return 0

    def sync(self, position: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def system_of(path: Path) -> str:
    """Return the id of the transaction system whose log is in a directory; empty: the directory has no id.

    Raises:
        DirectoryFailed: the directory cannot be read.
    """
    try:
        return (path / SYSTEM_FILE).read_text(encoding="ascii", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise _failed(path, error) from error


def _failed(path: Path, error: OSError) -> DirectoryFailed:
    kind = DirectoryFull if is_full(error) else DirectoryFailed
    return kind(
        f"the transaction manager cannot use {path}: {error.strerror or error}.",
        "Check that it is a folder that this user can write, on a disk with free space.",
        path,
    )

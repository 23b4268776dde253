"""The lock of a LevelDB folder, the process that holds it, and the conversion of the library's errors.

Before LevelDB opens a folder that CDAP wrote, and after LevelDB has closed a folder, this package changes its files.
That is safe only while no other process has the folder open. Therefore this module acquires LevelDB's own lock: an
``fcntl`` lock on the file ``LOCK``, the same in C++ and in Java.

The trade-off: such a lock belongs to the process, and *closing any handle* of the file releases it. Therefore no
function here opens ``LOCK`` in a process that has the store open; it searches the open files of the process instead.
Only one thread may open and clone stores, while other threads use the open stores.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tms_core.errors import StoreBusy, StoreError, StoreFull, WriteRefused
from tms_core.tables.leveldb.library import plyvel

#: Texts of errors of the library and the operating system, and their hints.
_FULL = ("No space left", "quota exceeded", "File too large")
_FREE_SPACE = (
    "Free some space on that disk, then repeat; servers and daemons continue by themselves. Deletions also need space."
)
_READ_ONLY = "Read-only file system"
_REMOUNT = "Check the disk and mount it for writing, then repeat; servers and daemons continue by themselves."
_HINTS = (
    (
        ("Permission denied", "not permitted"),
        "Run as the user who owns the store.",
    ),
    (
        ("File exists", "Not a directory"),
        "Set the folder: --leveldb, or storage.leveldb.path.",
    ),
    (
        ("deleted or replaced",),
        "Stop this process, check the folder or restore it from a backup, and start it again.",
    ),
    (
        ("Too many open files",),
        "Raise the limit of open files (ulimit -n).",
    ),
)
_CHECK_DISK = "Check the disk and the end of the file LOG in that folder."
_DAMAGED = "Restore the store from a backup, or try repair_db (plyvel) on a copy of that folder."


class convert_errors:  # noqa: N801 named as a function, because it is only used with ``with``
    """A context manager that converts errors of LevelDB and of its files.

    It is a class, because a generator for each use would cost as much as reading a row.

    Args:
        folder: the folder for the errors.

    Raises:
        StoreBusy: another process holds the folder's lock; the error names the process if it is known.
        StoreError: any other error, with the folder and a hint.
    """

    __slots__ = ("_folder",)

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, (plyvel.Error, OSError)):
            raise self._convert_error(_store_error(self._folder, error)) from error

    def _convert_error(self, error: StoreError) -> StoreError:
        return error


class convert_write_errors(convert_errors):  # noqa: N801
    """A context manager as :class:`convert_errors`, for writes.

    All writes go to one log, so the rows of a write are not the cause of its failure: any other write would also fail.

    Raises:
        WriteRefused: instead of ``StoreError``.
        StoreBusy: as :class:`convert_errors`.
    """

    __slots__ = ()

    def _convert_error(self, error: StoreError) -> StoreError:
        return (
            error
            if isinstance(error, (StoreBusy, WriteRefused))
            else WriteRefused(error.message, error.hint, error.path)
        )


@contextmanager
def hold_lock(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the folder's lock, so that no LevelDB can open the folder.

    Args:
        folder: one LevelDB folder.
        shared: whether to block writers only and to write nothing, for readers of a folder that must not change. A
            folder without a ``LOCK`` file was never opened at its path, and is read without a lock.

    Raises:
        StoreBusy: another process has the folder open, or this process does.
        StoreError: the lock file cannot be opened.
    """
    with convert_errors(folder):
        handle = _acquire_lock(folder, shared)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def sync(path: Path) -> None:
    """Sync a file's bytes or a folder's names to disk, including writes of other processes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_logs(folder: Path) -> None:
    """Sync every log of a folder. LevelDB has made a table of a log that disappears, and has synced the table."""
    for log in folder.glob("*.log"):
        with suppress(FileNotFoundError):
            sync(log)
    sync(folder)


def _acquire_lock(folder: Path, shared: bool) -> int | None:
    lock = folder / "LOCK"
    if _has_open(lock):
        raise StoreBusy(f"{folder} is already open in this process.", "Use the store that is open, or close it.")
    if shared and not lock.exists():
        return None
    handle = os.open(lock, os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise _busy_error(folder) from error
        raise
    return handle


def _has_open(lock: Path) -> bool:
    """Return whether this process has the lock file open, without opening it."""
    try:
        own = lock.stat()
    except OSError:
        return False
    return any(os.path.samestat(status, own) for status in _open_files())


def _open_files() -> Iterator[os.stat_result]:
    for entry in Path("/dev/fd").iterdir():
        try:
            yield os.fstat(int(entry.name))
        except OSError:
            # The handle of this listing, or a handle that another thread has just closed.
            continue


def _store_error(folder: Path, error: Exception) -> StoreError:
    text = _text(folder, error)
    if "already held by process" in text or ("/LOCK" in text and "temporarily unavailable" in text):
        return _busy_error(folder)
    kind: type[StoreError] = StoreError
    hint = _DAMAGED if isinstance(error, plyvel.CorruptionError) else _CHECK_DISK
    if any(word in text for word in _FULL):
        kind, hint = StoreFull, _FREE_SPACE
    elif _READ_ONLY in text:
        kind, hint = StoreFull, _REMOUNT
    else:
        hint = next((advice for words, advice in _HINTS if any(word in text for word in words)), hint)
    return kind(f"{folder}: {text}.", hint, folder)


def _text(folder: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        # The error's message already names the folder.
        named = "" if error.filename in (None, str(folder), folder) else f": {error.filename}"
        return f"{error.strerror}{named}"
    first = error.args[0] if error.args else ""
    return first.decode("utf-8", "replace") if isinstance(first, bytes) else str(error)


def _busy_error(folder: Path) -> StoreBusy:
    holder = _find_holder(folder / "LOCK")
    if holder is None:
        return StoreBusy(
            f"{folder} is held by another process.",
            "Stop the process that has it open (CDAP, tms serve, another janitor), or use its server.",
            folder,
        )
    pid, program = holder
    return StoreBusy(f"{folder} is held by process {pid} ({program}).", _busy_hint(program), folder)


def _busy_hint(program: str) -> str:
    if program.startswith("CDAP"):
        return "LevelDB allows one process at a time: stop CDAP first, and start it again afterwards."
    if program.startswith("tms"):
        return "Use the janitor inside that server, or stop the server first."
    return "LevelDB allows one process at a time: wait until that process exits, or stop it."


def _find_holder(lock: Path) -> tuple[int, str] | None:
    """Return the process that holds a lock, and its kind; None: unknown (on other systems, in containers)."""
    try:
        info = lock.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    file_id = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    for fields in map(str.split, lines):
        # "1: POSIX ADVISORY WRITE 4711 fe:00:1234 0 EOF"; pid 0 or -1: a process of another container.
        if len(fields) > 5 and fields[5] == file_id and int(fields[4]) > 0:
            return int(fields[4]), _program(int(fields[4]))
    return None


def _program(pid: int) -> str:
    """Return the name of a process's program, without its arguments, which may contain secrets."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return "of an unknown program"
    names = [Path(argument).name for argument in arguments]
    if names[0] == "java" and any("cdap" in argument.lower() for argument in arguments):
        return "CDAP, java"
    return next((name for name in names[:3] if name in ("tms", "janitor")), names[0] or "of an unknown program")

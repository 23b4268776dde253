"""One LevelDB folder from outside the library: its lock, its holder, and the meaning of the library's errors.

Before LevelDB opens a folder that CDAP wrote, and after it has closed a folder, this package changes the files itself.
That is safe only while no other process has the folder open. Therefore everything here uses LevelDB's own lock: an
``fcntl`` lock on the file ``LOCK``, the same in C++ and in Java.

The trade: such a lock belongs to the process, and *closing any handle* of the file drops it. Therefore no function here
opens ``LOCK`` in a process that holds the store; it searches the open files of the process instead. One thread opens
and clones stores, while others may use the open ones.
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
_FREE = (
    "Free some space on that disk, then repeat; servers and daemons continue by themselves. Deleting needs space, too."
)
_READ_ONLY = "Read-only file system"
_REMOUNT = "Check the disk and mount it for writing, then repeat; servers and daemons continue by themselves."
_HINTS = (
    (
        ("Permission denied", "not permitted"),
        "Run as the user the store belongs to.",
    ),
    (
        ("File exists", "Not a directory"),
        "Name a folder: --leveldb, or storage.leveldb.path.",
    ),
    (
        ("Too many open files",),
        "Raise the limit of open files (ulimit -n).",
    ),
)
_CHECK_DISK = "Look at the disk and at the end of the file LOG in that folder."
_DAMAGED = "Restore the store from a backup, or try repair_db (plyvel) on a copy of that folder."


class translated:  # noqa: N801 a block is written with it, as with a function
    """A context manager that converts errors of LevelDB and of its files.

    It is a class, because a generator for each use would cost as much as reading a row.

    Args:
        folder: the folder of the errors.

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


class writing(translated):  # noqa: N801
    """A context manager as :class:`translated`, for writes.

    LevelDB has one log, so a failed write is not caused by its rows: any other write would have failed, too.

    Raises:
        WriteRefused: in place of ``StoreError``.
        StoreBusy: as :class:`translated`.
    """

    __slots__ = ()

    def _convert_error(self, error: StoreError) -> StoreError:
        return (
            error
            if isinstance(error, (StoreBusy, WriteRefused))
            else WriteRefused(error.message, error.hint, error.path)
        )


@contextmanager
def locked(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the folder's lock, so that no LevelDB can open the folder.

    Args:
        folder: one LevelDB folder.
        shared: only block writers, and write nothing, to read a folder that must not change. A folder without a
            ``LOCK`` file was never opened in its place, and is read without a lock.

    Raises:
        StoreBusy: another process has the folder open, or this process does.
        StoreError: the lock file cannot be opened.
    """
    with translated(folder):
        handle = _take(folder, shared)
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
    """Sync every log of a folder. A log that disappears has become a table, which LevelDB syncs."""
    for log in folder.glob("*.log"):
        with suppress(FileNotFoundError):
            sync(log)
    sync(folder)


def _take(folder: Path, shared: bool) -> int | None:
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
            raise _busy(folder) from error
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
            # The handle of this listing itself, or a handle that another thread has just closed.
            continue


def _store_error(folder: Path, error: Exception) -> StoreError:
    text = _text(folder, error)
    if "already held by process" in text or ("/LOCK" in text and "temporarily unavailable" in text):
        return _busy(folder)
    kind: type[StoreError] = StoreError
    hint = _DAMAGED if isinstance(error, plyvel.CorruptionError) else _CHECK_DISK
    if any(word in text for word in _FULL):
        kind, hint = StoreFull, _FREE
    elif _READ_ONLY in text:
        kind, hint = StoreFull, _REMOUNT
    else:
        hint = next((advice for words, advice in _HINTS if any(word in text for word in words)), hint)
    return kind(f"{folder}: {text}.", hint, folder)


def _text(folder: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        # The message names the folder already.
        named = "" if error.filename in (None, str(folder), folder) else f": {error.filename}"
        return f"{error.strerror}{named}"
    first = error.args[0] if error.args else ""
    return first.decode("utf-8", "replace") if isinstance(first, bytes) else str(error)


def _busy(folder: Path) -> StoreBusy:
    holder = _holder(folder / "LOCK")
    if holder is None:
        return StoreBusy(
            f"{folder} is held by another process.",
            "Stop what has it open (CDAP, tms serve, another janitor), or ask the server that holds it.",
            folder,
        )
    pid, program = holder
    return StoreBusy(f"{folder} is held by process {pid} ({program}).", _advice(program), folder)


def _advice(program: str) -> str:
    if program.startswith("CDAP"):
        return "LevelDB allows one process at a time: stop CDAP first, then start it again."
    if program.startswith("tms"):
        return "Use the janitor inside that server, or stop it first."
    return "LevelDB allows one process at a time: wait until it ends, or stop it."


def _holder(lock: Path) -> tuple[int, str] | None:
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
    """Return the kind of a process in a word, without its arguments, which may contain secrets."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return "of an unknown program"
    names = [Path(argument).name for argument in arguments]
    if names[0] == "java" and any("cdap" in argument.lower() for argument in arguments):
        return "CDAP, java"
    return next((name for name in names[:3] if name in ("tms", "janitor")), names[0] or "of an unknown program")

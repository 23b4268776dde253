"""A copy of a store's files for a plan, so that reading a store changes nothing in it (invariant S5).

LevelDB has no read-only mode: opening a folder rewrites its log, its MANIFEST and its file names. Therefore a plan
opens a clone. Tables are hard links, because LevelDB never changes a finished table; logs, MANIFEST and CURRENT are
copies. The original is only read, under a shared lock that blocks writers during the copy.

The trade-off: a plan needs disk space for the logs, and for compactions in the clone while it is open. If hard links
are impossible (another disk, some network disks), tables are copied, and :attr:`ClonedStore.linked` is False.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from tms_core.errors import StoreError
from tms_core.tables.base import Reads
from tms_core.tables.leveldb.database import Database
from tms_core.tables.leveldb.layout import FOLDERS, disk_bytes, find_tables, identity
from tms_core.tables.leveldb.lineage import StoreTrace, trace_folder
from tms_core.tables.leveldb.lock import convert_errors, hold_lock
from tms_core.tables.leveldb.manifest import check_logs, current_manifest, repair, table_files
from tms_core.tables.leveldb.store import (
    LevelDBMessageReads,
    LevelDBMetadataReads,
    LevelDBPayloadReads,
)

#: The prefix of the names of clones' folders.
_PREFIX = "leveldb-clone-"
#: Errors of a file system without hard links, or without hard links between two places.
NO_LINKS = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
)


def clone(path: Path | str, into: Path | str) -> ClonedStore:
    """Open a clone of a store for reading; no file of the store changes.

    Args:
        path: the store; no process may have it open for writing.
        into: the folder for the clone while it is open; created if it does not exist. Not inside the store.

    Raises:
        StoreBusy: a process, perhaps this one, has the store open.
        StoreError: a folder is damaged, or the clone cannot be written.
        StoreNotFound, StoreLayoutError: as for the store itself.
    """
    return ClonedStore(Path(path), Path(into))


@contextmanager
def copy_open_store(path: Path | str, into: Path | str, *more: Path) -> Iterator[Path]:
    """Yield a copy of the files of a store that this process has open, which other processes can clone.

    The caller blocks writes to the store during the copy. LevelDB may still compact in the background, so a folder is
    copied again if its files have changed.

    Args:
        into: the folder for the copy during the block; created if it does not exist. Not inside the store.
        more: further LevelDB folders of this process to copy.

    Raises:
        StoreNotFound, StoreLayoutError: as for the store itself.
        StoreError: the copy cannot be written.
    """
    sources, into = [*find_tables(Path(path)).values(), *more], Path(into)
    _refuse_inside(Path(path), into)
    with ExitStack() as stack:
        folder = _new_folder(into, stack)
        for source in sources:
            with convert_errors(source):
                while not _copy_if_unchanged(source, folder / source.name):
                    shutil.rmtree(folder / source.name, ignore_errors=True)
        yield folder


@contextmanager
def copy_closed_store(path: Path, into: Path, *more: Path) -> Iterator[Path]:
    """Yield a copy of the files of a store that no process has open, as :func:`copy_open_store`.

    Raises:
        StoreBusy: a process has the store open.
        StoreError: a log is damaged, or the copy cannot be written.
    """
    sources = [*find_tables(path).values(), *more]
    _refuse_inside(path, into)
    with ExitStack() as stack:
        folder = _new_folder(into, stack)
        _copy_all(sources, folder, _Files())
        yield folder


@contextmanager
def copy_folder(folder: Path, into: Path | str) -> Iterator[Path]:
    """Yield a copy of one LevelDB folder next to a store, for readers of the store's clone.

    Args:
        folder: the folder; no process may have it open for writing.
        into: the folder for the copy during the block; created if it does not exist.

    Raises:
        StoreBusy: a process has the folder open.
        StoreError: the folder is damaged, or the copy cannot be written.
    """
    with ExitStack() as stack:
        scratch = _new_folder(Path(into), stack)
        _copy_all([folder], scratch, _Files())
        yield scratch / folder.name


def remove_stale(into: Path | str) -> int:
    """Remove clones of processes that no longer exist; call it when a process starts.

    A process locks its clones. Therefore a reused process id, or the same id in another container, does not matter.

    Returns:
        The number of removed clones.
    """
    removed = 0
    for folder in sorted(Path(into).glob(f"{_PREFIX}*/")):
        with convert_errors(folder), suppress(FileNotFoundError, BlockingIOError), ExitStack() as stack:
            _lock_clone(folder, stack)
            _remove(folder)
            removed += 1
    return removed


class ClonedStore(Reads):
    """A read-only store with the contents of another store at the time of the clone, made by :func:`clone`.

    Attributes:
        linked: whether all tables are hard links.
        copied_bytes: the size of the copied files.
    """

    def __init__(self, path: Path, into: Path) -> None:
        self.calls, self._path = Counter(), path
        files = _Files()
        sources = find_tables(path)
        self._identity = identity(path)
        opened = {name: trace_folder(folder) for name, folder in sources.items()}
        self._trace = StoreTrace(path, opened, frozen=True)
        _refuse_inside(path, into)
        with ExitStack() as stack:
            folder = _new_folder(into, stack)
            _copy_all(sources.values(), folder, files)
            try:
                databases = {table: _open_copy(folder / name, stack) for table, name in FOLDERS.items()}
            except StoreError as error:
                if type(error) is not StoreError:
                    raise
                # Name the original in the error, because the clone is removed.
                text, place = (part.replace(str(folder), str(path)) for part in (error.message, error.path))
                raise StoreError(text, error.hint, place) from error
            self._open = stack.pop_all()
        self.linked, self.copied_bytes = files.linked, files.copied_bytes
        self.metadata = LevelDBMetadataReads(databases["metadata"], self.calls)
        self.message = LevelDBMessageReads(databases["message"], self.calls)
        self.payload = LevelDBPayloadReads(databases["payload"], self.calls)

    def disk_bytes(self) -> int | None:
        """Return the current size of the original."""
        return disk_bytes(self._path)

    def identity(self) -> str:
        """Return the identity of the original."""
        return self._identity

    def lineage(self) -> Mapping[str, Any]:
        """Return the marks of the original at the time of the clone."""
        return self._trace.current_marks()

    def find_restore_evidence(self, known: Mapping[str, Any]) -> str | None:
        """Return the evidence that the original is not the recorded store; None without evidence."""
        return self._trace.find_restore_evidence(known)

    def close(self) -> None:
        """Close the clone and remove its files; the original is unchanged."""
        self._open.close()


class _Files:
    """A copier of store folders that counts copied bytes."""

    def __init__(self) -> None:
        self.linked = True
        self.copied_bytes = 0

    def copy_folder(self, source: Path, target: Path) -> None:
        target.mkdir(mode=0o700)
        # Tables before MANIFEST and logs: in an open store, the later MANIFEST may name newer tables, which
        # _copy_if_unchanged detects.
        for table in chain.from_iterable(table_files(source).values()):
            self._link(table, target / table.name)
        for file in (source / "CURRENT", current_manifest(source), *source.glob("*.log")):
            self._copy(file, target / file.name)

    def _link(self, source: Path, target: Path) -> None:
        try:
            target.hardlink_to(source)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            self.linked = False
            self._copy(source, target)

    def _copy(self, source: Path, target: Path) -> None:
        shutil.copyfile(source, target)
        self.copied_bytes += target.stat().st_size


def _copy_all(sources: Collection[Path], folder: Path, files: _Files) -> None:
    with ExitStack() as locks:
        # Lock all folders before the first copy, so that the copies are consistent.
        for source in sources:
            locks.enter_context(hold_lock(source, shared=True))
        for source in sources:
            # Check the original, so that an error names the store's file, not the clone's.
            check_logs(source)
            with convert_errors(source):
                files.copy_folder(source, folder / source.name)


def _copy_if_unchanged(source: Path, target: Path) -> bool:
    """Copy a folder, and return whether its files were unchanged during the copy."""
    try:
        before = _inventory(source)
        _Files().copy_folder(source, target)
        return _inventory(source) == before
    except FileNotFoundError:
        return False


def _inventory(folder: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of the files that determine the contents of a folder."""
    files = [*chain.from_iterable(table_files(folder).values()), *folder.glob("MANIFEST-*"), *folder.glob("*.log")]
    return sorted((file.name, file.stat().st_size) for file in files)


def _new_folder(into: Path, stack: ExitStack) -> Path:
    """Return a new folder that this process has locked; the stack removes it."""
    with convert_errors(into):
        into.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=into))
            with suppress(FileNotFoundError, BlockingIOError):
                _lock_clone(folder, stack)
                # remove_stale of another process may have removed the folder between its creation and its lock.
                if folder.exists():
                    stack.callback(_remove, folder)
                    return folder


def _open_copy(folder: Path, stack: ExitStack) -> Database:
    present = folder.exists()
    if present:
        repair(folder)
    database = Database(folder, create=not present)
    stack.callback(database.close)
    return database


def _remove(folder: Path) -> None:
    with convert_errors(folder):
        shutil.rmtree(folder)


def _lock_clone(folder: Path, stack: ExitStack) -> None:
    """Lock a clone's folder until the stack is closed."""
    handle = os.open(folder, os.O_RDONLY)
    stack.callback(os.close, handle)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _refuse_inside(path: Path, into: Path) -> None:
    if into.resolve().is_relative_to(path.resolve()):
        raise StoreError(f"A clone cannot be inside its store: {into}.", "Use a folder next to the store.")

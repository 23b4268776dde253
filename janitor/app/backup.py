"""Backups of a LevelDB store with its side table, transaction log and state, and their restore.

A backup is a folder with the layout of the store: ``messaging`` with the three tables, and next to it
``messaging.side``, ``messaging.tx`` and ``messaging.janitor``. Tables are hard links if the file system supports them,
so a backup next to the store needs little time and space. The folder gets its name when all files are complete and
synced.

The process that holds the store blocks its writes while files are linked, so the backup equals the store after a crash
at that time. The transaction log is copied during the block, so that each committed transaction in it has its messages.
The janitor's state is copied before the block, so that it proves nothing about later rows.

Without hard links, writes are blocked until the tables are copied.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from janitor.settings import AllSettings
from janitor.state.sqlite.loose import FILE_NAME as LOOSE_NAME
from janitor.state.sqlite.state import FILE_NAME, copy_state
from tms_core.errors import ConfigurationError, StoreNotFound
from tms_core.tables.base import Store
from tms_core.tables.leveldb.clone import NO_LINKS, copy_closed_store, copy_open_store, remove_stale
from tms_core.tables.leveldb.layout import find_tables, holds_database
from tms_core.tables.leveldb.lock import convert_errors, sync
from tms_core.tables.leveldb.side import LevelDBSide, side_path
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.side import SideTable

#: The name of the store in a backup.
STORE = "messaging"
#: The files of a transaction log: snapshots, later edits, and the id of the transaction system.
_LOG_FILES = re.compile(r"snapshot\.\d+|txlog\.\d+|system")


class Folders(NamedTuple):
    """The folders of a store, its side table, its transactions and its state.

    Attributes:
        transactions: the folder of the transaction log or of snapshots; None if it is not on this machine.
    """

    store: Path
    side: Path
    transactions: Path | None
    state: Path

    def named(self) -> dict[str, Path]:
        """Return the folders by their names in a backup; the store is the last one."""
        found = {f"{STORE}.side": self.side, f"{STORE}.janitor": self.state}
        if self.transactions is not None:
            found[f"{STORE}.tx"] = self.transactions
        return {**found, STORE: self.store}


def folders_of(settings: AllSettings) -> Folders:
    """Return the folders of a LevelDB store from the settings."""
    transactions, store = settings.transactions, settings.storage.leveldb.path
    is_local = transactions.source in ("manager", "directory") and "://" not in transactions.directory
    log = Path(transactions.directory) if is_local else None
    return Folders(store, side_path(store), log, settings.janitor.state)


def back_up(found: Folders, target: Path, *, store: Store | None = None, side: SideTable | None = None) -> int:
    """Write a backup.

    Args:
        target: a folder that does not exist or is empty.
        store, side: the store and side table that this process has open; None if no process has the store open.

    Returns:
        The size of the backup in bytes, including linked files, which share their space with the store.

    Raises:
        ConfigurationError: the target is not empty, or is inside the store.
        StoreBusy: another process has the store open.
        StoreError, StateError: a file could not be read or written; the target is unchanged.
    """
    tables = find_tables(found.store)
    _require_empty(target)
    for folder in [*found.named().values(), *tables.values()]:
        _require_outside(target, folder)
    remove_stale(found.state)
    with _new_folder(target) as made:
        _copy_state(found.state, made / f"{STORE}.janitor")
        with ExitStack() as writes:
            for opened in (store, side):
                if isinstance(opened, (LevelDBStore, LevelDBSide)):
                    writes.enter_context(opened.block_writes())
            more = [found.side] if holds_database(found.side) else []
            frozen = (copy_closed_store if store is None else copy_open_store)(found.store, found.state, *more)
            with frozen as files:
                if found.transactions is not None and found.transactions.is_dir():
                    _copy_log(found.transactions, made / f"{STORE}.tx")
                writes.close()
                for folder in files.iterdir():
                    name = f"{STORE}.side" if folder.name == found.side.name else f"{STORE}/{folder.name}"
                    _put_all(folder, made / name)
    return sum(file.stat().st_size for file in target.rglob("*") if file.is_file())


def restore(source: Path, found: Folders) -> list[Path]:
    """Copy a backup to the folders in the settings, without links.

    Returns:
        The created folders.

    Raises:
        ConfigurationError: a folder is not empty, or is inside the backup; nothing was changed.
        StoreError: the source is not a backup, or a file could not be copied; no folder was filled.
    """
    try:
        find_tables(source / STORE)
    except StoreNotFound as error:
        raise StoreNotFound(f"{source} has no backup of a store.", "Name the folder of a backup.") from error
    folders_by_source = {source / name: folder for name, folder in found.named().items() if (source / name).is_dir()}
    for folder in folders_by_source.values():
        _require_empty(folder)
        _require_outside(folder, source)
    # Rename the folders after all are copied: a retry after a full disk must not find some of them.
    with ExitStack() as folders:
        for folder, target in reversed(folders_by_source.items()):
            made = folders.enter_context(_new_folder(target))
            try:
                shutil.copytree(folder, made, dirs_exist_ok=True)
            except shutil.Error as error:
                # The error lists all files; report the reason of the first file.
                raise OSError(error.args[0][0][2]) from error
    return list(folders_by_source.values())


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to fill, which gets its name after the block; remove it after an error."""
    # Resolve a symbolic link, so that the folder behind the link is replaced.
    target = target.resolve()
    with convert_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{target.name}.unfinished-", dir=target.parent))
        try:
            yield made
            for path in [*made.rglob("*"), made]:
                sync(path)
            made.replace(target)
            sync(target.parent)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise


def _require_outside(target: Path, source: Path) -> None:
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigurationError(f"{target} is inside {source}, which is copied.", "Choose another folder.")


def _require_empty(folder: Path) -> None:
    try:
        is_used = any(folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be used: {error.strerror}.", "Choose another folder.") from error
    if is_used:
        raise ConfigurationError(
            f"{folder} is not empty, and this command does not overwrite files.",
            "Nothing was changed. Choose a new folder, or move this folder away first.",
        )


def _copy_state(source: Path, target: Path) -> None:
    """Copy the janitor's state, also while a janitor writes it."""
    if not (source / FILE_NAME).is_file():
        return
    target.mkdir(mode=0o700)
    copy_state(source, target)
    if (source / LOOSE_NAME).is_file():
        shutil.copyfile(source / LOOSE_NAME, target / LOOSE_NAME)


def _copy_log(source: Path, target: Path) -> None:
    """Copy a transaction log; repeat the copy if the manager starts a new log. The last edits may be truncated."""
    while True:
        target.mkdir(mode=0o700)
        names = _log_files(source)
        try:
            for name in names:
                shutil.copyfile(source / name, target / name)
        except FileNotFoundError:
            names = []
        if names == _log_files(source):
            return
        shutil.rmtree(target)


def _log_files(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if _LOG_FILES.fullmatch(entry.name))


def _put_all(folder: Path, target: Path) -> None:
    target.mkdir(mode=0o700, parents=True)
    for file in folder.iterdir():
        try:
            (target / file.name).hardlink_to(file)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            shutil.copyfile(file, target / file.name)

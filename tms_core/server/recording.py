"""Checks that a store and its transaction log belong together (:mod:`tms_core.tables.record`).

A manager starts only with the log that is recorded in the store; each saved snapshot updates the record.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tms_core.errors import ConfigurationError, NoSnapshot, SnapshotError, StoreError
from tms_core.logs.loggers import get_logger
from tms_core.tables.record import SystemRecord, record_transactions, recorded_transactions
from tms_core.tables.side import SideTable
from tms_core.transaction.codec.edits import Edit, EditState
from tms_core.transaction.manager.storage import DirectoryStorage, Log, RecoveredLog, system_of
from tms_core.transaction.model import Snapshot
from tms_core.transaction.source.source import DirectorySource

_ID_BYTES = 8
#: Edits that issue a write pointer.
_ISSUED = (EditState.IN_PROGRESS, EditState.CHECKPOINT)

logger = get_logger(__name__)


class RecordedStorage:
    """A transaction manager's directory that records its snapshots in the store.

    Args:
        storage: the directory; :meth:`close` closes it.
        side: the store's side table; the caller closes it.
    """

    def __init__(self, storage: DirectoryStorage, side: SideTable, path: Path) -> None:
        self._storage = storage
        self._side = side
        self._path = path
        recorded = recorded_transactions(side)
        system = system_of(path) or secrets.token_hex(_ID_BYTES)
        if recorded is None or not recorded.pointer:
            # Write the row before the file: a file without a row shows that the side table was lost (invariant S13).
            record_transactions(side, SystemRecord(system, str(path)))
        storage.name_system(system)
        self._system = system

    def recover(self) -> RecoveredLog:
        """Return the data of the previous manager; see :class:`~tms_core.transaction.manager.storage.Storage`."""
        found = self._storage.recover()
        return replace(found, edits=self._check_edits(found))

    def log(self, timestamp_ms: int) -> Log:
        """Return a new log."""
        return self._storage.log(timestamp_ms)

    def save(self, snapshot: Snapshot) -> None:
        """Save a snapshot, and record it in the store; a failure to record it is only logged."""
        self._storage.save(snapshot)
        visibility = snapshot.visibility
        newest = SystemRecord(self._system, str(self._path), visibility.write_pointer, visibility.timestamp_ms)
        try:
            record_transactions(self._side, newest)
        except StoreError as error:
            logger.warning("the transaction snapshot is saved, but not recorded in the side table: %s", error)

    def close(self) -> None:
        """Release the directory."""
        self._storage.close()

    def _check_edits(self, found: RecoveredLog) -> Iterator[Edit]:
        """Yield the edits, and then compare the highest pointer with the record, before the manager writes.

        Raises:
            ConfigurationError: the log does not match the record.
        """
        highest = found.snapshot.visibility.write_pointer if found.snapshot else 0
        for edit in found.edits:
            if edit.state in _ISSUED:
                highest = max(highest, edit.write_pointer)
            yield edit
        recorded = recorded_transactions(self._side)
        if recorded is not None and (difference := recorded.differs("", highest)):
            raise _rejection(f"The transaction log in {self._path} is {difference}", str(self._path), recorded)


def check_directory(directory: str, side: SideTable, *, created: bool = False) -> None:
    """Check that a directory has the transaction log that is recorded in a store, before the directory is written.

    Args:
        created: whether this process has created the store, so that its side table cannot be lost.

    Raises:
        ConfigurationError: the directory has another log or no log, or the side table was lost.
    """
    recorded, found = recorded_transactions(side), system_of(Path(directory))
    if recorded is None and found and not created:
        raise lost_side("The side table of this store", directory)
    if recorded is None or not recorded.pointer or recorded.id in ("", found):
        return
    if found:
        contents = f"the transaction log of another system ({found})"
    elif DirectoryStorage.has_log(Path(directory)):
        contents = "a transaction log that is not known to be this store's"
    else:
        contents = "no transaction log"
    raise _rejection(f"{directory} has {contents}", directory, recorded)


def check_snapshots(directory: str, side: SideTable) -> None:
    """Check that the snapshots of an external manager match the record of a store; record them if it has no record.

    Raises:
        ConfigurationError: the snapshots are from another transaction system.
    """
    try:
        found = DirectorySource.at(directory).latest()
    except (NoSnapshot, SnapshotError, OSError):
        return
    recorded, pointer = recorded_transactions(side), found.snapshot.write_pointer
    if recorded is None:
        record_transactions(side, SystemRecord(found.system, directory, pointer, found.snapshot.timestamp_ms))
    elif difference := recorded.differs(found.system, pointer):
        raise _rejection(f"The transaction snapshots in {directory} are {difference}", directory, recorded)


def lost_side(table: str, directory: str) -> ConfigurationError:
    """Return the error for a missing side table."""
    return ConfigurationError(
        f"{table} is missing or empty, and the transaction log in {directory} was used with it: positions of "
        "consumers, claims, producers and ttls of single messages are lost.",
        "Restore it from the backup that the store is from. To continue without it: tms admin accept",
    )


def _rejection(failure: str, directory: str, recorded: SystemRecord) -> ConfigurationError:
    is_same = Path(directory).resolve() == Path(recorded.place).resolve()
    return ConfigurationError(
        f"{failure}; the transactions of this store are in {recorded.place}, up to write pointer {recorded.pointer}.",
        f"{'Restore that folder' if is_same else f'Set transactions.directory to {recorded.place}'}. If it is lost, "
        "messages of uncommitted transactions become visible; to accept that: tms admin accept",
    )

"""Helpers for tests of the transaction manager."""

from __future__ import annotations

import io
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tms_core.clock import ManualClock
from tms_core.transaction.codec.snapshot import read_snapshot
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import DirectoryStorage, Log, MemoryStorage, RecoveredLog
from tms_core.transaction.model import Snapshot, VisibilityState
from tms_core.transaction.rpc.service import TransactionService

NOW_MS = 1_795_000_000_000
#: The first write pointer of :data:`NOW_MS`.
BASE = NOW_MS * 1_000_000


def state(manager: TransactionManager) -> Snapshot:
    """Return the manager's state, encoded and decoded, at time 0."""
    return timeless(read_snapshot(io.BytesIO(manager.encoded_snapshot())))


def timeless(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot at time 0, for comparisons."""
    seen = snapshot.visibility
    visibility = VisibilityState(0, seen.read_pointer, seen.write_pointer, seen.invalid, seen.in_progress)
    return Snapshot(visibility, snapshot.committing, snapshot.committed)


def recover_state(directory: Path, clock: ManualClock | None = None) -> Snapshot:
    with TransactionManager(DirectoryStorage(directory), clock or ManualClock(NOW_MS)) as manager:
        return state(manager)


@contextmanager
def served(manager: TransactionManager, **options: Any) -> Iterator[TransactionService]:
    """Run a transaction service with the manager on a free port."""
    service = TransactionService(manager, "127.0.0.1:0", **options)
    service.start()
    try:
        yield service
    finally:
        service.stop()


class ReadOnlyStorage(MemoryStorage):
    """A storage that recovers from a directory without writing to it, so that tests can repeat the recovery."""

    def __init__(self, directory: Path) -> None:
        self._storage = DirectoryStorage(directory)

    def recover(self) -> RecoveredLog:
        return self._storage.recover()

    def close(self) -> None:
        self._storage.close()


class PreviousStorage(MemoryStorage):
    """The storage of a previous manager with invalid transactions, the last of which has its last write pointer."""

    def __init__(self, *invalid: int) -> None:
        self._state = VisibilityState(0, invalid[-1], invalid[-1], array("q", invalid))

    def recover(self) -> RecoveredLog:
        return RecoveredLog(Snapshot(self._state), iter(()), 0)


class SpyStorage(MemoryStorage):
    """A storage that records calls, and fails if a test sets an error.

    Attributes:
        calls: the names of the calls in order: ``append``, ``sync``, ``save``, ``log``, ``close``.
        failure: the error of the next syncs; None: they succeed.
        save_failure: the error of the next snapshots; None: they succeed.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failure: Exception | None = None
        self.save_failure: Exception | None = None

    def log(self, timestamp_ms: int) -> Log:
        self.calls.append("log")
        return _SpyLog(self)

    def save(self, snapshot: Snapshot) -> None:
        if self.save_failure is not None:
            raise self.save_failure
        self.calls.append("save")

    def close(self) -> None:
        self.calls.append("close")

    def recover(self) -> RecoveredLog:
        return RecoveredLog(None, iter(()), 0)


class _SpyLog:
    def __init__(self, spy: SpyStorage) -> None:
        self._spy = spy
        self._appended = 0

    def append(self, edit: object) -> int:
        self._spy.calls.append("append")
        self._appended += 1
        return self._appended

    def sync(self, position: int) -> None:
        if self._spy.failure is not None:
            raise self._spy.failure
        if position:
            self._spy.calls.append(f"sync {position}")

    def close(self) -> None:
        """Do nothing: no file is open."""

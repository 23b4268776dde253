"""The durable state of a transaction manager: every decision is on disk before its response.

Decisions are made in memory, under one lock. Threads wait for the disk without the lock, so that many wait together. A
response also waits for all earlier decisions, even a rejection or a query, because it may show those decisions. No
client ever learns a decision that a crash could undo. The only exception is the response of ``can_commit``: if a crash
undoes it, the commit is rejected (:meth:`TransactionManager.commit`).

After a failed write of the log, memory is ahead of the disk, and the last bytes of the log are unknown. Therefore the
manager answers nothing from memory. The next request restarts it as after a crash: from the disk, with a new snapshot
and a new log. Until that succeeds, the manager decides nothing. Otherwise a snapshot that cannot be written does no
harm, because the logs reach further back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import RLock

from tms_core.clock import HonestClock
from tms_core.errors import FormatError, StoreError, TransactionError, Unavailable
from tms_core.logs.loggers import get_logger
from tms_core.transaction.codec.edits import Edit
from tms_core.transaction.manager.journal import LogFailed
from tms_core.transaction.manager.state import ManagerState
from tms_core.transaction.manager.storage import Log, NoLog, Storage, StorageElsewhere
from tms_core.transaction.model import TX_PER_MS, Snapshot, VisibilityState

#: The timeout of a long transaction, in milliseconds (``data.tx.long.timeout``).
LONG_TIMEOUT_MS = 86_400_000
_EMPTY = Snapshot(VisibilityState(0, 0, 0))

logger = get_logger(__name__)


class ManagerStopped(TransactionError, Unavailable):
    """The manager was closed, or its log has just failed; nothing was changed."""

    code = "TMS-UNAVAILABLE"


class DurableState:
    """The state of a transaction manager with its storage; threads may share it.

    It recovers the state from the disk and saves a snapshot of it at once, as a safe base. If another manager has the
    storage, it behaves as after a failure of its log, until :meth:`resume`.

    Args:
        storage: the storage of the state; closed with the manager.
        clock: the clock of snapshot names, first ids, and timeouts after a restart.

    Raises:
        StoreError: the storage cannot be read or written.
        FormatError: a log in it is damaged.
    """

    def __init__(self, storage: Storage, clock: HonestClock) -> None:
        self._storage = storage
        self._clock = clock
        self._lock = RLock()
        self._saving = RLock()
        self._position = 0
        self._closed = False
        #: Whether the log has failed, and whether memory is ahead of the disk since then.
        self._failed = self._ahead = False
        self._state, self._newest_ms = ManagerState(_EMPTY, LONG_TIMEOUT_MS), 0
        self._log: Log = _ClosedLog()
        try:
            self._state, self._newest_ms = self._recover()
            self._clock.note_past(self._newest_ms)
            self._log = storage.log(self._timestamp())
            self.take_snapshot()
        except StorageElsewhere:
            self._failed = self._ahead = True
        except BaseException:
            storage.close()
            raise

    @property
    def is_running(self) -> bool:
        """Return whether the manager executes calls; False between a failure of its log and its restart."""
        return not (self._closed or self._failed)

    def resume(self) -> None:
        """Continue if the log is writable, otherwise restart from the storage.

        Raises:
            StoreError: the manager cannot start yet.
        """
        with suppress(LogFailed):
            self._sync(self._log, 0)
        if self._restart():
            logger.info("transaction manager started from the files of the previous manager, with a new log")

    @contextmanager
    def deciding(self, must_wait: Callable[[ManagerState], bool] = lambda _: True) -> Iterator[ManagerState]:
        """Yield the state to one thread at a time; after the block, all decisions until then are on disk.

        Args:
            must_wait: called before the block; returns whether to wait for the disk. A rejection always waits.

        Raises:
            LogFailed: the decision could not be written; it is valid only if it reached the disk.
            StoreError: the log has failed before, and the manager cannot restart yet.
            ManagerStopped: the manager has stopped.
        """
        refusal: TransactionError | None = None
        self._repair()
        with self._lock:
            self._require_running()
            waits = must_wait(self._state)
            try:
                yield self._state
            except TransactionError as error:
                refusal = error
            log, position = self._log, self._position
        # Outside the lock, so that other threads can decide during the wait; one sync then covers all of them.
        if waits or refusal is not None:
            self._sync(log, position)
        if refusal is not None:
            raise refusal

    def record(self, edit: Edit) -> None:
        """Apply an edit to the state, and append it to the log; within :meth:`deciding`."""
        self.append(edit)
        self._state.apply(edit)

    @property
    def last_pointer(self) -> int:
        """Return the highest issued write pointer, without a lock or I/O."""
        return self._state.write_pointer

    def note_published(self, pointer: int, topic: str, publish_ms: int) -> None:
        """Record that a transaction in progress has published a message, at which readers wait for its outcome.

        The method takes no lock and does not write to the log.

        Args:
            pointer: the pointer of the transaction, or of one of its checkpoints.
            publish_ms: the publish time of the message; the first one in each topic is kept.
        """
        state = self._state
        if pointer in state.in_progress:
            state.published.setdefault(pointer, {}).setdefault(topic, publish_ms)

    @property
    def listed_ids(self) -> int:
        """Return the number of ids in the snapshot of a transaction that starts now, without a lock or I/O."""
        return len(self._state.invalid) + len(self._state.in_progress)

    def append(self, edit: Edit) -> None:
        """Append an edit to the log; the caller applies it to the state; within :meth:`deciding`."""
        self._position = self._log.append(edit)

    def take_snapshot(self) -> None:
        """Save a snapshot, and start a new log.

        Raises:
            LogFailed: an earlier decision could not be written.
            StoreError: the snapshot could not be written; the next one may succeed.
            ManagerStopped: the manager has stopped.
        """
        with self._saving:
            self._repair()
            with self._lock:
                self._require_running()
                timestamp_ms = self._timestamp()
                snapshot = self._state.snapshot(timestamp_ms)
                self._start_log(timestamp_ms)
            self._storage.save(snapshot)

    def reset(self) -> None:
        """Save a snapshot, then reset the state including the invalid list; failed writes become visible.

        Ids keep growing.
        """
        self.take_snapshot()
        with self._saving, self._lock:
            self._require_running()
            now_ms = self._clock.right_ms()
            pointer = self._state.next_pointer(now_ms)
            self._state = ManagerState(Snapshot(VisibilityState(now_ms, pointer, pointer)), LONG_TIMEOUT_MS)
            try:
                self.take_snapshot()
            except StoreError:
                # The new log follows a state without a snapshot, so it must not be used.
                self._failed = self._ahead = True
                raise

    def close(self) -> None:
        """Save a last snapshot, and close the storage; a second call does nothing."""
        with self._saving:
            try:
                if self.is_running:
                    self.take_snapshot()
            finally:
                # Also if the snapshot failed: the log has every edit, so the next start restores the state.
                with self._lock:
                    self._closed = True
                    self._log.close()
                    self._storage.close()

    def _recover(self) -> tuple[ManagerState, int]:
        found = self._storage.recover()
        state = ManagerState(found.snapshot or _EMPTY, LONG_TIMEOUT_MS)
        for edit in found.edits:
            state.apply(edit)
        if not state.write_pointer:
            state.write_pointer = state.read_pointer = self._clock.right_ms() * TX_PER_MS
        state.recovered_pointer = state.write_pointer
        state.set_deadlines(self._clock.right_ms(), self._clock.monotonic_ms())
        logger.info(
            "transaction log read: %d transactions in progress, %d invalid",
            len(state.in_progress),
            len(state.invalid),
        )
        return state, found.newest_ms

    def _repair(self) -> None:
        """Restart from the disk if the log has failed."""
        if not self._failed:
            return
        with self._saving, self._lock:
            if self._restart():
                self._handle_restart()
                logger.warning("transaction manager restarted from its files, with a new log")

    def _handle_restart(self) -> None:
        """Handle decisions that the failure of the log may have undone; called with the lock held."""

    def _restart(self) -> bool:
        """Restart with the state on disk if the log has failed; return whether it had failed."""
        if not self._failed:
            return False
        with self._saving, self._lock:
            if self._closed or not self._failed:
                return False
            if self._ahead:
                previous = self._state
                try:
                    self._state, newest_ms = self._recover()
                except FormatError as error:
                    raise StoreError(error.message, error.hint) from error
                self._newest_ms = max(self._newest_ms, newest_ms)
                self._state.adopt_facts(previous)
                self._ahead = False
            timestamp_ms = self._timestamp()
            # Save before the new log: the last bytes of the old log are unknown, so edits after them could not be
            # relied on at the next restart.
            self._storage.save(self._state.snapshot(timestamp_ms))
            self._log.close()
            self._log, self._position = self._storage.log(timestamp_ms), 0
            self._failed = False
            return True

    def _start_log(self, timestamp_ms: int) -> None:
        """Replace the log; sync the old one first, so that its edits reach the disk before edits of the new one."""
        self._sync(self._log, self._position)
        self._log.close()
        self._log = self._storage.log(timestamp_ms)
        self._position = 0

    def _sync(self, log: Log, position: int) -> None:
        try:
            log.sync(position)
        except LogFailed:
            with self._lock:
                # Another thread may have replaced the log during this wait; then the current log is intact.
                if log is self._log:
                    self._failed = self._ahead = True
            raise

    def _timestamp(self) -> int:
        """Return the time of the next snapshot or log: the current time, but above all earlier ones."""
        self._newest_ms = max(self._newest_ms + 1, self._clock.right_ms())
        return self._newest_ms

    def _require_running(self) -> None:
        if not self.is_running:
            raise ManagerStopped(
                "The transaction manager has stopped.",
                "If nobody has stopped it, check its log for the reason, then try again.",
            )


class _ClosedLog(NoLog):
    """The log of a manager that has not started; every sync fails."""

    def sync(self, position: int) -> None:
        raise LogFailed("The transaction manager has not started.", "Try again in a few seconds.")

"""Makes a manager's state durable: every decision is on disk before it is answered.

Decisions are made under one lock, in memory; waiting for the disk happens without it, so that many may wait together.
An answer waits for all that was decided before it too, also a refusal or a mere question: those show what others
decided, and no client is ever told anything that a crash could take back. Only that a transaction can commit is told at
once: where a crash takes that back, its commit is refused (:meth:`TransactionManager.commit`).

After a failed write of the log, memory is ahead of the disk, and the last bytes of that log are unknown. So nothing
more is answered from it, and the next request restarts as after a crash: from the disk, with a snapshot of that and a
new log. As long as that cannot be done either, nothing is decided. A snapshot that cannot be written does no harm
otherwise: the logs reach further back.
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
from tms_core.transaction.manager.storage import Log, Storage, StorageElsewhere
from tms_core.transaction.model import TX_PER_MS, Snapshot, VisibilityState

#: How long a long transaction may take, in milliseconds (``data.tx.long.timeout``).
LONG_TIMEOUT_MS = 86_400_000
_EMPTY = Snapshot(VisibilityState(0, 0, 0))

logger = get_logger(__name__)


class ManagerStopped(TransactionError, Unavailable):
    """The manager was closed, or its log has just failed; nothing was done."""

    code = "TMS-UNAVAILABLE"


class DurableState:
    """The state of a transaction manager, and the storage it is kept in; threads may share it.

    It recovers the state on disk and writes a snapshot of it at once, so that its new base is safe. Where another
    manager has the storage, it is as one whose log has failed until :meth:`begin`.

    Args:
        storage: where it is kept; closed with this.
        clock: by which snapshots and first ids are named, and timeouts go on after a restart.

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
        self._log: Log = _NotBegun()
        try:
            self._state, self._newest_ms = self._recovered()
            self._clock.note_past(self._newest_ms)
            self._log = storage.log(self._timestamp())
            self.take_snapshot()
        except StorageElsewhere:
            self._failed = self._ahead = True
        except BaseException:
            storage.close()
            raise

    @property
    def running(self) -> bool:
        """Return whether it answers; not after its log has failed, until it has restarted."""
        return not (self._closed or self._failed)

    def begin(self) -> None:
        """Continue if the log is writable, else restart from the storage.

        Raises:
            StoreError: it cannot start yet.
        """
        with suppress(LogFailed):
            self._sync(self._log, 0)
        if self._begin_anew():
            logger.info("the transaction manager has taken over what the one before it left, with a log of its own")

    @contextmanager
    def deciding(self, waits: Callable[[ManagerState], bool] = lambda _: True) -> Iterator[ManagerState]:
        """The state, for one thread at a time; after the block all that was decided until then is on disk.

        Args:
            waits: whether that holds, asked before the block; where not, only a refusal waits for the disk.

        Raises:
            LogFailed: the decision could not be written; it counts only if it is on the disk all the same.
            StoreError: the log has failed before, and it cannot restart yet.
            ManagerStopped: it has stopped.
        """
        refusal: TransactionError | None = None
        self._mend()
        with self._lock:
            self._require_running()
            waiting = waits(self._state)
            try:
                yield self._state
            except TransactionError as error:
                refusal = error
            log, position = self._log, self._position
        if waiting or refusal is not None:
            self._sync(log, position)
        if refusal is not None:
            raise refusal

    def record(self, edit: Edit) -> None:
        """Apply an edit to the state and put it in the log; within :meth:`deciding`."""
        self.append(edit)
        self._state.apply(edit)

    @property
    def last_pointer(self) -> int:
        """Return the highest write pointer that was ever given out; takes no lock and reads no disk."""
        return self._state.write_pointer

    def note_published(self, pointer: int, topic: str, publish_ms: int) -> None:
        """Note that a transaction in progress has published a message, which readers wait at until it is over.

        Takes no lock and writes nothing to the log.

        Args:
            pointer: the transaction's, or that of one of its checkpoints.
            publish_ms: the message's time; that of the first in each topic counts.
        """
        state = self._state
        if pointer in state.in_progress:
            state.published.setdefault(pointer, {}).setdefault(topic, publish_ms)

    @property
    def listed_ids(self) -> int:
        """Return how many ids a transaction that started now would carry; takes no lock and reads no disk."""
        return len(self._state.invalid) + len(self._state.in_progress)

    def append(self, edit: Edit) -> None:
        """Put an edit into the log whose effect the caller brings about; within :meth:`deciding`."""
        self._position = self._log.append(edit)

    def take_snapshot(self) -> None:
        """Keep a snapshot, and start a new log.

        Raises:
            LogFailed: an earlier decision could not be written.
            StoreError: the snapshot could not be written; the next one may be.
            ManagerStopped: it has stopped.
        """
        with self._saving:
            self._mend()
            with self._lock:
                self._require_running()
                timestamp_ms = self._timestamp()
                snapshot = self._state.snapshot(timestamp_ms)
                self._begin_log(timestamp_ms)
            self._storage.save(snapshot)

    def reset(self) -> None:
        """Forget everything, the invalid list too, after a snapshot of it: what failed before becomes readable.

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
                # The log goes on from a state that is not there.
                self._failed = self._ahead = True
                raise

    def close(self) -> None:
        """Keep a last snapshot and let the storage go; closing twice is no error."""
        with self._saving:
            try:
                if self.running:
                    self.take_snapshot()
            finally:
                with self._lock:
                    self._closed = True
                    self._log.close()
                    self._storage.close()

    def _recovered(self) -> tuple[ManagerState, int]:
        found = self._storage.recover()
        state = ManagerState(found.snapshot or _EMPTY, LONG_TIMEOUT_MS)
        for edit in found.edits:
            state.apply(edit)
        if not state.write_pointer:
            state.write_pointer = state.read_pointer = self._clock.right_ms() * TX_PER_MS
        state.recovered_pointer = state.write_pointer
        state.set_deadlines(self._clock.right_ms(), self._clock.running_ms())
        logger.info(
            "recovered: %d write pointers in progress, %d invalid transactions",
            len(state.in_progress),
            len(state.invalid),
        )
        return state, found.newest_ms

    def _mend(self) -> None:
        """Start anew if the log has failed."""
        if not self._failed:
            return
        with self._saving, self._lock:
            if self._begin_anew():
                self._note_mended()
                logger.warning("the transaction manager has begun anew from what is on the disk, with another log")

    def _note_mended(self) -> None:
        """Take in that decisions may have been undone, because the log failed; called with the lock held."""

    def _begin_anew(self) -> bool:
        """If the log has failed, continue with the state on disk, as after a crash; returns whether it had."""
        if not self._failed:
            return False
        with self._saving, self._lock:
            if self._closed or not self._failed:
                return False
            if self._ahead:
                clients, deadlines, published = self._state.clients, self._state.deadlines, self._state.published
                owners = self._state.owners
                try:
                    self._state, newest_ms = self._recovered()
                except FormatError as error:
                    raise StoreError(error.message, error.hint) from error
                self._newest_ms = max(self._newest_ms, newest_ms)
                self._state.clients = {
                    pointer: client for pointer, client in clients.items() if pointer in self._state.in_progress
                }
                self._state.owners = {
                    pointer: owner for pointer, owner in owners.items() if pointer in self._state.in_progress
                }
                self._state.published = {
                    pointer: topics for pointer, topics in list(published.items()) if pointer in self._state.in_progress
                }
                self._state.deadlines |= {
                    pointer: deadline for pointer, deadline in deadlines.items() if pointer in self._state.in_progress
                }
                self._ahead = False
            timestamp_ms = self._timestamp()
            # Before anything is put into the new log: behind what the old one ends with nothing could be relied on.
            self._storage.save(self._state.snapshot(timestamp_ms))
            self._log.close()
            self._log, self._position = self._storage.log(timestamp_ms), 0
            self._failed = False
            return True

    def _begin_log(self, timestamp_ms: int) -> None:
        """The new one's edits must not be on disk before the old one's."""
        self._sync(self._log, self._position)
        self._log.close()
        self._log = self._storage.log(timestamp_ms)
        self._position = 0

    def _sync(self, log: Log, position: int) -> None:
        try:
            log.sync(position)
        except LogFailed:
            with self._lock:
                # This thread may have waited for a log that was replaced meanwhile.
                if log is self._log:
                    self._failed = self._ahead = True
            raise

    def _timestamp(self) -> int:
        """Return the time of the next snapshot or log: now, but above all before, whatever the clock says."""
        self._newest_ms = max(self._newest_ms + 1, self._clock.right_ms())
        return self._newest_ms

    def _require_running(self) -> None:
        if not self.running:
            raise ManagerStopped(
                "The transaction manager has stopped.", "If it was not told to, its log has the reason: try again."
            )


class _NotBegun:
    """Stands for the log before there is one."""

    def append(self, edit: Edit) -> int:
        return 0

    def sync(self, position: int) -> None:
        raise LogFailed("The transaction manager has not begun.", "Try again in some seconds.")

    def close(self) -> None:
        """There is nothing to close."""

"""The transaction manager: it starts, commits, aborts and invalidates transactions.

This module has the rules and responses; changes are in :mod:`~tms_core.transaction.manager.state`, and durability is in
:mod:`~tms_core.transaction.manager.durable`. The rules are those of Tephra's ``TransactionManager``;
``docs/reference/conformance/transactions.md`` lists them, with the intended differences.
"""

from __future__ import annotations

import io
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, Self

from tms_core.clock import Clock, HonestClock
from tms_core.errors import (
    BadArgument,
    CannotSnapshot,
    Conflict,
    NotInProgress,
    StoreError,
    TransactionError,
    TruncateTimeError,
)
from tms_core.logs.loggers import get_logger
from tms_core.logs.printable import printable
from tms_core.transaction.codec.edits import Edit, EditState
from tms_core.transaction.codec.snapshot import write_snapshot
from tms_core.transaction.manager.conflicts import ChangeLimits
from tms_core.transaction.manager.durable import LONG_TIMEOUT_MS, DurableState, ManagerStopped
from tms_core.transaction.manager.state import InvalidList, ManagerState
from tms_core.transaction.manager.storage import Storage
from tms_core.transaction.manager.writes import WriteLedger
from tms_core.transaction.model import (
    DEFAULT_TIMEOUT_SECONDS,
    MAX_TIMEOUT_SECONDS,
    TX_PER_MS,
    UNKNOWN_CLIENT,
    InProgressType,
    Transaction,
    TransactionType,
    VisibilityState,
)
from tms_core.transaction.source.source import Loaded, SourceUnreachable

#: The longest stored name of a client, in characters.
MAX_CLIENT_CHARACTERS = 255
#: The largest number of checkpoints in an abort, because the manager looks up each while all other calls wait.
MAX_CHECKPOINTS = 100_000
#: The change key in an error about changes that a restart may have lost.
_LOST_KEY = "(lost by a restart: repeat canCommit)"

logger = get_logger(__name__)


class TransactionManager(DurableState):
    """Tephra's ``TransactionManager`` on a storage; threads may share it.

    Its owner calls :meth:`expire` and :meth:`take_snapshot` periodically (``TransactionService`` does). Every method
    raises ``ManagerStopped`` after the manager has stopped, and ``StoreError`` if the log cannot be written; earlier
    responses stay valid.

    Args:
        storage: the storage of the state; closed with the manager. If another manager has it now, this manager rejects
            calls until :meth:`resume`.
        clock: its wall time determines ids, its monotonic time timeouts. Ids do not follow a jump (invariant S7).
        offset: the offset of an id in its millisecond, from 0 to below ``TX_PER_MS``; random for each id, so that ids
            cannot be guessed. None: 0, as in Tephra.
        release: voids rows that would count after ids have left the invalid list, such as claims; called before that,
            with a function that selects the ids. None: no such rows exist.
        max_timeout_seconds: the longest timeout of a transaction (``data.tx.max.timeout``).

    Raises:
        StoreError: the storage cannot be read or written.
        FormatError: a log in it is damaged.
    """

    def __init__(
        self,
        storage: Storage,
        clock: Clock,
        *,
        max_timeout_seconds: int = MAX_TIMEOUT_SECONDS,
        limits: ChangeLimits | None = None,
        offset: Callable[[], int] | None = None,
        release: Callable[[Callable[[int], bool]], object] | None = None,
    ) -> None:
        super().__init__(storage, HonestClock(clock))
        self._max_timeout_seconds = max_timeout_seconds
        self._limits = limits or ChangeLimits()
        self._offset = offset or (lambda: 0)
        self._release = release or (lambda _: None)
        self._writes = WriteLedger()
        #: The number of running rollbacks of each transaction.
        self._running_rollbacks = Counter[int]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- transactions ------------------------------------------------------------------------------------------------

    def start_short(self, timeout_seconds: int | None = None, client: str = UNKNOWN_CLIENT) -> Transaction:
        """Start a short transaction.

        Args:
            timeout_seconds: its timeout; None: the default.
            client: the name of its client, for operators; cut after ``MAX_CLIENT_CHARACTERS``.

        Raises:
            BadArgument: the timeout is not above 0, or above ``max_timeout_seconds``.
        """
        return self._start(TransactionType.SHORT, self._timeout_ms(timeout_seconds), client)

    def start_long(self, client: str = UNKNOWN_CLIENT) -> Transaction:
        """Start a long transaction; an abort invalidates it, because its writes are not known."""
        return self._start(TransactionType.LONG, LONG_TIMEOUT_MS, client)

    def can_commit(self, transaction_id: int, changes: Collection[bytes]) -> None:
        """Record the changes of a transaction, and check whether another transaction has changed the same keys.

        The call does not wait for the disk, because the record of the commit follows this record in the log, and the
        commit waits. A repeated call waits, because a crash may leave the first record without the second.

        Raises:
            NotInProgress: the transaction has ended, or never started.
            ChangesTooLarge: the transaction has changed too many keys.
            Conflict: the transaction must be rolled back.
        """
        keys = frozenset(changes)
        with self.deciding(lambda state: transaction_id in state.committing) as state:
            _require(state, transaction_id)
            self._limits.check(transaction_id, keys)
            state.committed.check(transaction_id, keys)
            self.record(Edit(transaction_id, EditState.COMMITTING, changes=keys))

    def commit(self, transaction_id: int) -> None:
        """Make the writes of a transaction visible to later ones.

        Without an earlier :meth:`can_commit`, no conflict is detected.

        Raises:
            Conflict: another transaction has committed the same keys since :meth:`can_commit`, or a restart of the
                manager may have lost that call; repeat the call, or roll the transaction back.
            NotInProgress: the transaction has ended, or never started.
        """
        with self.deciding() as state:
            self._commit(state, transaction_id)

    def commit_and_start(
        self, transaction_id: int, timeout_seconds: int | None = None, client: str = UNKNOWN_CLIENT
    ) -> Transaction:
        """Commit a transaction, and start a short transaction that sees the commit, with one sync of the disk.

        Args:
            timeout_seconds, client: as of :meth:`start_short`.

        Raises:
            BadArgument: as :meth:`start_short`; nothing was changed.
            Conflict, NotInProgress: as :meth:`commit`; no transaction was started.
        """
        timeout_ms = self._timeout_ms(timeout_seconds)
        with self.deciding() as state:
            self._commit(state, transaction_id)
            return self._record_start(state, TransactionType.SHORT, timeout_ms, client)

    def abort(self, transaction: Transaction) -> None:
        """Abort a transaction whose client has rolled back its writes.

        The abort invalidates the transaction instead if it is long, if messaging has written rows that were not rolled
        back (:meth:`note_written`), or if a write is under way (:meth:`begin_write`). In these cases, an invalid
        transaction stays invalid. A transaction that is committed, aborted or unknown does not change.

        Only checkpoints that can belong to the transaction count: in progress or invalid, with a higher id. Otherwise
        an abort could remove ids of other transactions from the invalid list.

        Raises:
            BadArgument: the transaction has more than ``MAX_CHECKPOINTS`` checkpoints.
        """
        pointer, checkpoints = transaction.transaction_id, transaction.checkpoint_write_pointers
        if len(checkpoints) > MAX_CHECKPOINTS:
            raise BadArgument(f"an abort has {len(checkpoints)} checkpoints, above the limit of {MAX_CHECKPOINTS}")
        later = sorted({one for one in checkpoints if one > pointer})
        with self.deciding() as state:
            entry = state.in_progress.get(pointer)
            named = tuple(one for one in later if one in state.in_progress or one in state.invalid)
            places = self._writes.places({pointer, *later, *(entry.checkpoints if entry else ())})
            if entry is not None and places:
                logger.info(
                    "transaction %d is invalidated, not aborted: not rolled back: %s", pointer, ", ".join(places)
                )
                self.record(Edit(pointer, EditState.INVALID))
            elif entry is not None or (pointer in state.invalid and not places and pointer > state.recovered_pointer):
                if entry is not None and entry.is_long:
                    # Another abort, by its id or as a short transaction, must not remove it from the invalid list.
                    self._writes.add(pointer, "a long transaction", 1)
                self.record(Edit(pointer, EditState.ABORTED, type=transaction.type, checkpoints=named))

    def invalidate(self, transaction_id: int) -> bool:
        """Hide the writes of a transaction permanently, because they were not rolled back.

        Returns:
            Whether the transaction was in progress; False if it has ended or never started.
        """
        with self.deciding() as state:
            found = transaction_id in state.in_progress or transaction_id in state.committing
            if found:
                self.record(Edit(transaction_id, EditState.INVALID))
            return found

    def checkpoint(self, transaction: Transaction) -> Transaction:
        """Issue another write pointer for a transaction, so that its later writes can be rolled back separately.

        Returns:
            The transaction with the new pointer; its snapshot is unchanged.

        Raises:
            NotInProgress: the transaction has ended, or never started.
        """
        parent = transaction.transaction_id
        with self.deciding() as state:
            _require(state, parent, "Transaction {} is not in progress")
            pointer = state.next_pointer(self._clock.right_ms(), self._offset())
            self.record(Edit(pointer, EditState.CHECKPOINT, parent_write_pointer=parent))
            state.deadlines[pointer] = state.deadlines[parent]
            checkpoints = state.in_progress[parent].checkpoints
            return replace(transaction, write_pointer=pointer, checkpoint_write_pointers=checkpoints)

    def status(self, transaction_id: int) -> Literal["in progress", "invalid", "ended"]:
        """Return the status of a transaction; "ended" if it was committed, aborted or never started."""
        with self.deciding() as state:
            if transaction_id in state.in_progress:
                return "in progress"
            return "invalid" if transaction_id in state.invalid else "ended"

    def begin_write(self, pointer: int, principal: str | None = None) -> bool:
        """Record the start of a write with a pointer, if the pointer is in progress; without I/O.

        Args:
            principal: the writer, as of :meth:`belongs_to`.

        Returns:
            Whether the principal may write with the pointer now; if so, call :meth:`end_write` after the write.
        """
        with self._lock:
            found = self.is_in_progress(pointer) and self.belongs_to(pointer, principal)
            if found:
                if principal is not None:
                    self._state.owners[self.transaction_of(pointer)] = principal
                self._writes.begin(pointer)
            return found

    def end_write(self, pointer: int) -> None:
        """Record that a write of :meth:`begin_write` has finished or failed."""
        with self._lock:
            self._writes.end(pointer, late=not self.is_in_progress(pointer))
            self._prune_writes()

    def note_written(self, pointer: int, place: str, number: int = 1) -> None:
        """Record rows before they are written, because an abort would make them visible; without I/O.

        Args:
            pointer: the pointer of the transaction, or of one of its checkpoints; ignored if it is not in progress.
            place: the topic or consumer, for operators.
            number: the number of rows.
        """
        with self._lock:
            if self.is_in_progress(pointer):
                self._writes.add(pointer, place, number)
                self._prune_writes()

    def note_rolled_back(self, pointer: int, place: str, number: int | None = None) -> None:
        """Record that ``number`` rows do not have a pointer any longer; None: all rows in the place."""
        with self._lock:
            self._writes.subtract(pointer, place, number)

    @contextmanager
    def rolling_back(self, pointer: int) -> Iterator[None]:
        """Reject commits of a pointer's transaction while the block rolls back rows, which readers would miss."""
        with self._lock:
            transaction_id = self.transaction_of(pointer)
            self._running_rollbacks[transaction_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._running_rollbacks[transaction_id] -= 1
                if not self._running_rollbacks[transaction_id]:
                    del self._running_rollbacks[transaction_id]

    def note_unknown(self) -> None:
        """Record that transactions from before the last restart may have written rows that are not recorded."""
        with self._lock:
            self._writes.unknown_to = self._state.recovered_pointer

    def _handle_restart(self) -> None:
        # A commit that did not reach the disk is undone, but the ledger has discarded the rows of that transaction.
        self.note_unknown()

    def is_in_progress(self, pointer: int) -> bool:
        """Return whether a pointer (of a transaction or a checkpoint) is in progress, without a lock or I/O."""
        return pointer in self._state.in_progress

    def belongs_to(self, pointer: int, principal: str | None) -> bool:
        """Return whether a principal may use a pointer, without I/O; the principal does not become the owner.

        A transaction in progress belongs to the first principal that writes with it (:meth:`begin_write`). A
        transaction that is not in progress has no owner, and any principal may use it.

        Args:
            principal: the requesting principal; None: clients are not authenticated.
        """
        if principal is None:
            return True
        with self._lock:
            if not self.is_in_progress(pointer):
                return True
            return self._state.owners.get(self.transaction_of(pointer), principal) == principal

    def transaction_of(self, pointer: int) -> int:
        """Return the transaction of a checkpoint in progress, or any other pointer unchanged; without I/O."""
        with self._lock:
            entry = self._state.in_progress.get(pointer)
            if entry is None or entry.type is not InProgressType.CHECKPOINT:
                return pointer
            entries = self._state.in_progress.values()
            return next((entry.write_pointer for entry in entries if pointer in entry.checkpoints), pointer)

    # --- the invalid list --------------------------------------------------------------------------------------------

    def truncate_invalid(self, transaction_ids: Collection[int]) -> bool:
        """Remove ids from the invalid list, after their rows were deleted or inverted.

        Remaining claims and producers' transactions of the ids are voided first. An id with a write under way stays on
        the list.

        Returns:
            Whether any id was removed.

        Raises:
            StoreError: claims could not be voided; no id was removed.
        """
        with self.deciding() as state:
            leaving = frozenset(one for one in transaction_ids if one in state.invalid) - self._writes.under_way
        if leaving:
            # Void first: a claim whose id is not on the list any longer would count as committed.
            self._release(leaving.__contains__)
            with self.deciding() as state:
                leaving = frozenset(one for one in leaving if one in state.invalid)
                if leaving:
                    self.record(Edit(0, EditState.TRUNCATE_INVALID_TX, truncated=leaving))
        return bool(leaving)

    def truncate_invalid_before(self, time_ms: int) -> bool:
        """Remove all ids from the invalid list whose transactions started before a time, in milliseconds since 1970.

        Returns:
            Whether any id was removed; see :meth:`truncate_invalid`.

        Raises:
            TruncateTimeError: a transaction that started before that time is in progress.
            StoreError: as :meth:`truncate_invalid`.
        """
        bound = time_ms * TX_PER_MS
        with self.deciding() as state:
            older = [pointer for pointer in state.in_progress if pointer < bound]
            if older:
                raise TruncateTimeError(f"{len(older)} transactions that started before {time_ms} ms are in progress.")
            known = InvalidList(state.invalid.ids)
            # A bound in the log would also remove ids below it that appear later or have writes under way, although
            # their claims were not voided. If such ids are possible, remove the known ids one by one.
            changes = bound > state.write_pointer or any(one < bound for one in self._writes.under_way)
        if changes:
            return self.truncate_invalid(known.ids[: bisect_left(known.ids, bound)])
        if not known or known.ids[0] >= bound:
            return False
        self._release(lambda pointer: pointer < bound and pointer in known)
        with self.deciding():
            self.record(Edit(0, EditState.TRUNCATE_INVALID_TX, truncated_before_ms=time_ms))
        return True

    def reset(self) -> None:
        """Save a snapshot, then reset the state including the invalid list; failed writes become visible.

        Ids keep growing. Claims and producers' transactions of open or invalid transactions are voided first.

        Raises:
            StoreError: claims could not be voided, or the snapshot could not be written; nothing was reset.
        """
        with self._saving, self._lock:
            state = self._state
            # Before the reset, because after it the manager does not know which claims must not count.
            self._release(lambda pointer: pointer in state.in_progress or pointer in state.invalid)
            super().reset()

    def invalid_size(self) -> int:
        """Return the number of ids on the invalid list."""
        with self.deciding() as state:
            return len(state.invalid)

    # --- the state ---------------------------------------------------------------------------------------------------

    def visibility(self) -> VisibilityState:
        """Return the current visibility state, as an immutable value."""
        with self.deciding() as state:
            return state.visibility(self._clock.right_ms())

    def latest(self) -> Loaded:
        """Return the visibility state as a snapshot source does.

        Raises:
            NoSnapshot: the manager has stopped.
        """
        try:
            return Loaded(self.visibility(), "the transaction manager")
        except (TransactionError, StoreError) as error:
            raise SourceUnreachable(error.message, error.hint) from error

    def encoded_snapshot(self) -> bytes:
        """Return the whole state in the format of a snapshot file.

        Raises:
            CannotSnapshot: the manager has stopped.
        """
        try:
            with self.deciding() as state:
                snapshot = state.snapshot(self._clock.right_ms())
        except (ManagerStopped, StoreError) as error:
            raise CannotSnapshot(error.message, error.hint) from error
        stream = io.BytesIO()
        write_snapshot(stream, snapshot)
        return stream.getvalue()

    def clients(self) -> dict[int, str]:
        """Return the clients, by id, of transactions in progress that started after the last restart."""
        with self.deciding() as state:
            return dict(state.clients)

    def published(self) -> dict[int, dict[str, int]]:
        """Return the topics of the messages of transactions in progress, by id, with the time of the first message.

        Messages from before the last restart are missing.
        """
        found: dict[int, dict[str, int]] = {}
        with self.deciding() as state:
            owners = {child: entry.write_pointer for entry in state.in_progress.values() for child in entry.checkpoints}
            for pointer, topics in list(state.published.items()):
                if pointer not in state.in_progress:
                    continue
                known = found.setdefault(owners.get(pointer, pointer), {})
                for topic, publish_ms in list(topics.items()):
                    known[topic] = min(publish_ms, known.get(topic, publish_ms))
        return found

    # --- periodic work -----------------------------------------------------------------------------------------------

    def expire(self) -> int:
        """Invalidate the transactions whose timeout has passed.

        Returns:
            The number of invalidated pointers, including checkpoints.
        """
        with self.deciding() as state:
            late = state.expired(self._clock.monotonic_ms())
            for pointer in late:
                # A checkpoint is invalidated with its transaction; an orphaned checkpoint needs a separate edit.
                if state.in_progress[pointer].type is not InProgressType.CHECKPOINT or state.is_orphan(pointer):
                    self.append(Edit(pointer, EditState.INVALID))
                    client = printable(state.clients.get(pointer, UNKNOWN_CLIENT))
                    logger.info("transaction %d timed out (client: %s)", pointer, client)
            state.time_out(late)
            return len(late)

    def _prune_writes(self) -> None:
        """Discard the recorded writes of pointers that are neither in progress nor invalid."""
        invalid, in_progress = self._state.invalid, self._state.in_progress
        self._writes.prune(len(invalid) + len(in_progress), lambda one: one in in_progress or one in invalid)

    def _timeout_ms(self, seconds: int | None) -> int:
        seconds = DEFAULT_TIMEOUT_SECONDS if seconds is None else seconds
        if seconds <= 0:
            raise BadArgument(f"timeout must be positive but is {seconds} seconds")
        if seconds > self._max_timeout_seconds:
            raise BadArgument(f"timeout must not exceed {self._max_timeout_seconds} seconds but is {seconds} seconds")
        return seconds * 1000

    def _start(self, kind: TransactionType, timeout_ms: int, client: str) -> Transaction:
        with self.deciding() as state:
            return self._record_start(state, kind, timeout_ms, client)

    def _record_start(self, state: ManagerState, kind: TransactionType, timeout_ms: int, client: str) -> Transaction:
        now_ms = self._clock.right_ms()
        transaction = state.transaction(state.next_pointer(now_ms, self._offset()), kind)
        self.record(
            Edit(
                transaction.transaction_id,
                EditState.IN_PROGRESS,
                expiration_ms=now_ms + timeout_ms,
                visibility_upper_bound=transaction.visibility_upper_bound(),
                type=kind,
            )
        )
        state.deadlines[transaction.transaction_id] = self._clock.monotonic_ms() + timeout_ms
        state.clients[transaction.transaction_id] = client[:MAX_CLIENT_CHARACTERS]
        return transaction

    def _commit(self, state: ManagerState, transaction_id: int) -> None:
        _require(state, transaction_id)
        if transaction_id in self._running_rollbacks:
            text = f"Transaction {transaction_id} is being rolled back."
            raise Conflict(text, transaction_id, "(any: it is being rolled back)", "")
        keys, checkpoints = state.committing.get(transaction_id), state.in_progress[transaction_id].checkpoints
        if keys is not None:
            state.committed.check(transaction_id, keys)
        elif transaction_id <= state.recovered_pointer:
            text = f"The changes of transaction {transaction_id} are unknown, because the transaction manager was "
            text += "restarted since it began: repeat canCommit, or roll the transaction back."
            raise Conflict(text, transaction_id, _LOST_KEY, "")
        self.record(
            Edit(
                transaction_id,
                EditState.COMMITTED,
                commit_pointer=state.write_pointer + 1,
                can_commit=keys is not None,
                changes=keys or frozenset(),
            )
        )
        self._writes.discard((transaction_id, *checkpoints))


def _require(
    state: ManagerState, pointer: int, text: str = "canCommit() is called for transaction {} that is not in progress"
) -> None:
    entry = state.in_progress.get(pointer)
    if entry is not None and entry.type is InProgressType.CHECKPOINT:
        # A checkpoint has the outcome of its transaction; a separate commit would show its writes too early.
        raise NotInProgress(f"{pointer} is the write pointer of a checkpoint, not the id of a transaction")
    if entry is None:
        reason = " (it is known to be invalid)" if pointer in state.invalid else ""
        raise NotInProgress(text.format(pointer) + reason)

"""The transaction manager: who may write, who may see what, and who comes too late.

Here is what may happen and what is answered; what it changes is in :mod:`~tms_core.transaction.state`, and that it is
never forgotten is the business of :mod:`~tms_core.transaction.keeper`. The rules are those of Tephra's
``TransactionManager``; ``docs/conformance/transactions.md`` lists them, and what is different on purpose.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Self

from tms_core.clock import Clock
from tms_core.errors import CannotSnapshot, NotInProgress, StoreError, TransactionError, TruncateTimeError
from tms_core.rowkey import LONG_MAX
from tms_core.transaction.conflicts import ChangeLimits
from tms_core.transaction.edits import Edit, EditState
from tms_core.transaction.keeper import Keeper, ManagerStopped
from tms_core.transaction.model import TX_PER_MS, InProgressType, Transaction, TransactionType, VisibilityState
from tms_core.transaction.snapshot import write_snapshot
from tms_core.transaction.source import Loaded, SourceSilent
from tms_core.transaction.state import State
from tms_core.transaction.storage import Storage

__all__ = [
    "MAX_TIMEOUT_SECONDS",
    "UNKNOWN_CLIENT",
    "BadArgument",
    "ChangeLimits",
    "ManagerStopped",
    "TransactionManager",
]

#: The longest a short transaction may ask for, in seconds (``data.tx.max.timeout``).
MAX_TIMEOUT_SECONDS = 2**31 - 1
#: How much is kept of what a client calls itself, in characters.
MAX_CLIENT_CHARACTERS = 255
#: Who holds a transaction that was begun by nobody in particular.
UNKNOWN_CLIENT = "unknown"

logger = logging.getLogger(__name__)


class BadArgument(TransactionError):
    """What a transaction cannot have: a timeout below 1 (Java's ``IllegalArgumentException``)."""


class TransactionManager:
    """Tephra's ``TransactionManager`` on a storage; threads may share it.

    Somebody has to call :meth:`expire` and :meth:`take_snapshot` from time to time (``TransactionService`` does).
    Every method raises ``ManagerStopped`` when it has stopped, and ``StoreError`` when the log could not be written,
    or could not before and still cannot: what it answered until then counts.

    Args:
        storage: where its state is kept; closed with the manager.
        clock: whose wall time ids and timeouts go by.
        default_timeout_seconds: of a short transaction that names none (``data.tx.timeout``).
        max_timeout_seconds: the longest that one may name (``data.tx.max.timeout``).
        long_timeout_seconds: of a long transaction (``data.tx.long.timeout``).
        limits: how much a transaction may change.

    Raises:
        StoreError: the storage cannot be read or written.
        FormatError: a log in it is damaged.
    """

    def __init__(
        self,
        storage: Storage,
        clock: Clock,
        *,
        default_timeout_seconds: int = 30,
        max_timeout_seconds: int = MAX_TIMEOUT_SECONDS,
        long_timeout_seconds: int = 86_400,
        limits: ChangeLimits | None = None,
    ) -> None:
        self._clock = clock
        self._default_timeout_seconds = default_timeout_seconds
        self._max_timeout_seconds = max_timeout_seconds
        self._long_timeout_ms = long_timeout_seconds * 1000
        self._limits = limits or ChangeLimits()
        self._keeper = Keeper(storage, clock, self._long_timeout_ms)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def running(self) -> bool:
        """Whether it answers; not after its log has failed, until it has begun anew."""
        return self._keeper.running

    def close(self) -> None:
        """Take a last snapshot and let the storage go; closing twice is no error."""
        self._keeper.close()

    # --- transactions ------------------------------------------------------------------------------------------------

    def start_short(self, timeout_seconds: int | None = None, client: str = UNKNOWN_CLIENT) -> Transaction:
        """Begin a short transaction.

        Args:
            timeout_seconds: after how long it is given up; None: the default.
            client: who holds it, for people; cut off after ``MAX_CLIENT_CHARACTERS``.

        Raises:
            BadArgument: the timeout is not above 0, or above the highest that is allowed.
        """
        seconds = self._default_timeout_seconds if timeout_seconds is None else timeout_seconds
        if seconds <= 0:
            raise BadArgument(f"timeout must be positive but is {seconds} seconds")
        if seconds > self._max_timeout_seconds:
            raise BadArgument(f"timeout must not exceed {self._max_timeout_seconds} seconds but is {seconds} seconds")
        return self._start(TransactionType.SHORT, seconds * 1000, client)

    def start_long(self, client: str = UNKNOWN_CLIENT) -> Transaction:
        """Begin a long transaction; aborted, it becomes invalid, because nobody knows all it has written."""
        return self._start(TransactionType.LONG, self._long_timeout_ms, client)

    def can_commit(self, transaction_id: int, changes: Collection[bytes]) -> None:
        """Say what a transaction has changed, and look whether anybody else has changed it too.

        Raises:
            NotInProgress: it has ended, or never began.
            ChangesTooLarge: it has changed too much.
            Conflict: it has to be rolled back.
        """
        keys = frozenset(changes)
        with self._keeper.deciding() as state:
            _require(state, transaction_id)
            self._limits.check(transaction_id, keys)
            state.committed.check(transaction_id, keys)
            self._keeper.record(Edit(transaction_id, EditState.COMMITTING, changes=keys))

    def commit(self, transaction_id: int) -> None:
        """Make what a transaction wrote visible to those that begin from now on.

        Without :meth:`can_commit` before, no conflict is looked for.

        Raises:
            NotInProgress: it has ended, or never began.
            Conflict: somebody has committed the same since it asked; it has to be rolled back.
        """
        with self._keeper.deciding() as state:
            _require(state, transaction_id)
            keys = state.committing.get(transaction_id)
            if keys is not None:
                state.committed.check(transaction_id, keys)
            self._keeper.record(
                Edit(
                    transaction_id,
                    EditState.COMMITTED,
                    commit_pointer=state.write_pointer + 1,
                    can_commit=keys is not None,
                    changes=keys or frozenset(),
                )
            )

    def abort(self, transaction: Transaction) -> None:
        """End a transaction whose client has taken back what it wrote; a long one becomes invalid all the same.

        Without effect on one that has ended otherwise, or never began.

        Args:
            transaction: with the checkpoints that were taken back too.
        """
        pointer = transaction.transaction_id
        with self._keeper.deciding() as state:
            if pointer in state.in_progress or pointer in state.invalid:
                checkpoints = tuple(transaction.checkpoint_write_pointers)
                self._keeper.record(Edit(pointer, EditState.ABORTED, type=transaction.type, checkpoints=checkpoints))

    def invalidate(self, transaction_id: int) -> bool:
        """Hide for good what a transaction wrote, because it was not taken back.

        Returns:
            Whether it was in progress until now; False for one that was committed, or never began.
        """
        with self._keeper.deciding() as state:
            found = transaction_id in state.in_progress or transaction_id in state.committing
            if found:
                self._keeper.record(Edit(transaction_id, EditState.INVALID))
            return found

    def checkpoint(self, transaction: Transaction) -> Transaction:
        """Give a transaction another write pointer, so that what it writes from now on can be taken back alone.

        Returns:
            The transaction with the new pointer; what it reads stays as it was.

        Raises:
            NotInProgress: it has ended, or never began.
        """
        parent = transaction.transaction_id
        with self._keeper.deciding() as state:
            _require(state, parent, "Transaction {} is not in progress")
            pointer = state.next_pointer(self._clock.now_ms())
            self._keeper.record(Edit(pointer, EditState.CHECKPOINT, parent_write_pointer=parent))
            checkpoints = state.in_progress[parent].checkpoints
            return replace(transaction, write_pointer=pointer, checkpoint_write_pointers=checkpoints)

    # --- the invalid list --------------------------------------------------------------------------------------------

    def truncate_invalid(self, transaction_ids: Collection[int]) -> bool:
        """Take ids off the invalid list, because nothing of theirs is left anywhere.

        Returns:
            Whether any of them was on it.
        """
        with self._keeper.deciding() as state:
            found = frozenset(pointer for pointer in transaction_ids if pointer in state.invalid)
            if found:
                self._keeper.record(Edit(0, EditState.TRUNCATE_INVALID_TX, truncated=found))
            return bool(found)

    def truncate_invalid_before(self, time_ms: int) -> bool:
        """Take all ids off the invalid list whose transactions began before a time, milliseconds since the epoch.

        Returns:
            Whether there were any.

        Raises:
            TruncateTimeError: a transaction that began before it is still in progress.
        """
        time_ms = min(time_ms, LONG_MAX // TX_PER_MS)
        with self._keeper.deciding() as state:
            older = [pointer for pointer in state.in_progress if pointer < time_ms * TX_PER_MS]
            if older:
                raise TruncateTimeError(f"{len(older)} transactions that began before {time_ms} ms are in progress.")
            found = bool(state.invalid) and state.invalid.ids[0] < time_ms * TX_PER_MS
            if found:
                self._keeper.record(Edit(0, EditState.TRUNCATE_INVALID_TX, truncated_before_ms=time_ms))
            return found

    def invalid_size(self) -> int:
        """How many transactions are on the invalid list."""
        with self._keeper.deciding() as state:
            return len(state.invalid)

    def reset(self) -> None:
        """Forget everything, the invalid list too: what failed before becomes readable. Ids keep growing."""
        self._keeper.reset()

    # --- what there is -----------------------------------------------------------------------------------------------

    def visibility(self) -> VisibilityState:
        """Who may see what now; it does not change afterwards."""
        with self._keeper.deciding() as state:
            return state.visibility(self._clock.now_ms())

    def latest(self) -> Loaded:
        """The same for those who expect a snapshot source.

        Raises:
            NoSnapshot: the manager has stopped.
        """
        try:
            return Loaded(self.visibility(), "the transaction manager")
        except (TransactionError, StoreError) as error:
            raise SourceSilent(error.message, error.hint) from error

    def encoded_snapshot(self) -> bytes:
        """All of the state, in the bytes of a snapshot file.

        Raises:
            CannotSnapshot: the manager has stopped.
        """
        try:
            with self._keeper.deciding() as state:
                snapshot = state.snapshot(self._clock.now_ms())
        except (ManagerStopped, StoreError) as error:
            raise CannotSnapshot(error.message, error.hint) from error
        stream = io.BytesIO()
        write_snapshot(stream, snapshot)
        return stream.getvalue()

    def clients(self) -> dict[int, str]:
        """Who holds the transactions in progress, by id; not those begun before the last restart."""
        with self._keeper.deciding() as state:
            return dict(state.clients)

    # --- from time to time -------------------------------------------------------------------------------------------

    def expire(self) -> int:
        """Give up the transactions whose time is over: they become invalid.

        Returns:
            How many pointers, checkpoints included.
        """
        with self._keeper.deciding() as state:
            late = state.expired(self._clock.now_ms())
            for pointer in late:
                # A checkpoint goes with its transaction; one that has none any more goes by itself.
                if state.in_progress[pointer].type is not InProgressType.CHECKPOINT or state.is_orphan(pointer):
                    self._keeper.append(Edit(pointer, EditState.INVALID))
                    logger.info("transaction %d of %s timed out", pointer, state.clients.get(pointer, UNKNOWN_CLIENT))
            state.time_out(late)
            return len(late)

    def take_snapshot(self) -> None:
        """Keep a snapshot, and begin a new log.

        Raises:
            StoreError: it could not be written; the manager goes on with its log, and the next one may succeed.
        """
        self._keeper.take_snapshot()

    def _start(self, kind: TransactionType, timeout_ms: int, client: str) -> Transaction:
        with self._keeper.deciding() as state:
            now_ms = self._clock.now_ms()
            transaction = state.transaction(state.next_pointer(now_ms), kind)
            self._keeper.record(
                Edit(
                    transaction.transaction_id,
                    EditState.IN_PROGRESS,
                    expiration_ms=now_ms + timeout_ms,
                    visibility_upper_bound=transaction.visibility_upper_bound(),
                    type=kind,
                )
            )
            state.clients[transaction.transaction_id] = client[:MAX_CLIENT_CHARACTERS]
            return transaction


def _require(
    state: State, pointer: int, text: str = "canCommit() is called for transaction {} that is not in progress"
) -> None:
    if pointer not in state.in_progress:
        reason = " (it is known to be invalid)" if pointer in state.invalid else ""
        raise NotInProgress(text.format(pointer) + reason)

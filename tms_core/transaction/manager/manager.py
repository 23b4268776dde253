"""The transaction manager: who may write, visibility, and who comes too late.

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
from tms_core.rowkey import LONG_MAX
from tms_core.transaction.codec.edits import Edit, EditState
from tms_core.transaction.codec.snapshot import write_snapshot
from tms_core.transaction.manager.conflicts import ChangeLimits
from tms_core.transaction.manager.durable import LONG_TIMEOUT_MS, DurableState, ManagerStopped
from tms_core.transaction.manager.state import InvalidList, ManagerState
from tms_core.transaction.manager.storage import Storage
from tms_core.transaction.manager.writes import WriteLedger
from tms_core.transaction.model import (
    MAX_TIMEOUT_SECONDS,
    TX_PER_MS,
    UNKNOWN_CLIENT,
    InProgressType,
    Transaction,
    TransactionType,
    VisibilityState,
)
from tms_core.transaction.source.source import Loaded, SourceUnreachable

#: How long a short transaction may take that does not say, in seconds (``data.tx.timeout``).
_TIMEOUT_SECONDS = 30
#: How much is kept of what a client calls itself, in characters.
MAX_CLIENT_CHARACTERS = 255
#: How many checkpoints an abort may name: each is looked up while all other calls wait.
MAX_CHECKPOINTS = 100_000
#: The change key that is named where a restart may have forgotten them.
_FORGOTTEN = "(forgotten by a restart: ask again whether it can commit)"

logger = get_logger(__name__)


class TransactionManager(DurableState):
    """Tephra's ``TransactionManager`` on a storage; threads may share it.

    Its owner calls :meth:`expire` and :meth:`take_snapshot` from time to time (``TransactionService`` does).
    Every method raises ``ManagerStopped`` when it has stopped, and ``StoreError`` when the log could not be written,
    or could not before and still cannot: its earlier responses stand.

    Args:
        storage: where its state is kept; closed with the manager. If another manager has it now, it answers nothing
            until :meth:`begin`.
        clock: whose wall time ids go by, and whose running time timeouts go by. Ids do not follow a jump (rule S7).
        offset: where in its millisecond the first id starts, from 0 to below ``TX_PER_MS``; drawn for each id, so that
            nobody guesses one. None: at its start, as Tephra's.
        release: voids rows that would count once ids have left the invalid list, such as claims; called before they do,
            with what tells which. None: there is nothing.
        max_timeout_seconds: the longest that one may name (``data.tx.max.timeout``).

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
        #: How many roll backs of each transaction are under way.
        self._roll_backs = Counter[int]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- transactions ------------------------------------------------------------------------------------------------

    def start_short(self, timeout_seconds: int | None = None, client: str = UNKNOWN_CLIENT) -> Transaction:
        """Start a short transaction.

        Args:
            timeout_seconds: its timeout; None: the default.
            client: its client, for people; cut off after ``MAX_CLIENT_CHARACTERS``.

        Raises:
            BadArgument: the timeout is not above 0, or above the highest that is allowed.
        """
        return self._start(TransactionType.SHORT, self._timeout_ms(timeout_seconds), client)

    def start_long(self, client: str = UNKNOWN_CLIENT) -> Transaction:
        """Start a long transaction; aborted, it becomes invalid, because all it has written is not known."""
        return self._start(TransactionType.LONG, LONG_TIMEOUT_MS, client)

    def can_commit(self, transaction_id: int, changes: Collection[bytes]) -> None:
        """Record the changes of a transaction, and check whether another transaction has made one of them.

        Does not wait for the disk: the commit does, and its record follows this one's in the log. Only where it asks
        again it waits, for what it said before may be on the disk by itself.

        Raises:
            NotInProgress: it is over, or never started.
            ChangesTooLarge: it has changed too much.
            Conflict: it has to be rolled back.
        """
        keys = frozenset(changes)
        with self.deciding(lambda state: transaction_id in state.committing) as state:
            _require(state, transaction_id)
            self._limits.check(transaction_id, keys)
            state.committed.check(transaction_id, keys)
            self.record(Edit(transaction_id, EditState.COMMITTING, changes=keys))

    def commit(self, transaction_id: int) -> None:
        """Make the writes of a transaction visible to later ones.

        Without :meth:`can_commit` before, no conflict is looked for.

        Raises:
            Conflict: another transaction has committed the same since it asked, or the manager was restarted since
                it started and does not know whether it asked; it has to ask (again), or be rolled back.
            NotInProgress: it is over, or never started.
        """
        with self.deciding() as state:
            self._commit(state, transaction_id)

    def commit_and_start(
        self, transaction_id: int, timeout_seconds: int | None = None, client: str = UNKNOWN_CLIENT
    ) -> Transaction:
        """Commit a transaction and start a short one that sees it; both wait for the disk together.

        Args:
            timeout_seconds, client: as of :meth:`start_short`.

        Raises:
            BadArgument: as :meth:`start_short`; nothing was done.
            Conflict, NotInProgress: as :meth:`commit`; none was started.
        """
        timeout_ms = self._timeout_ms(timeout_seconds)
        with self.deciding() as state:
            self._commit(state, transaction_id)
            return self._begun(state, TransactionType.SHORT, timeout_ms, client)

    def abort(self, transaction: Transaction) -> None:
        """Abort a transaction whose client has rolled back its writes; a long one becomes invalid all the same.

        So does one of which messaging knows that something was not taken back (:meth:`note_written`), or is just being
        written (:meth:`begin_write`); and where that may be so, an invalid one stays invalid. Without effect on one
        that is over otherwise, or never started.

        Of the checkpoints that it names, only those count that can be its own: in progress or invalid, with a higher
        id. Any other id would leave the invalid list with it.

        Raises:
            BadArgument: it names more checkpoints than any transaction has.
        """
        pointer, checkpoints = transaction.transaction_id, transaction.checkpoint_write_pointers
        if len(checkpoints) > MAX_CHECKPOINTS:
            raise BadArgument(f"an abort names {len(checkpoints)} checkpoints, where {MAX_CHECKPOINTS} are the most")
        later = sorted({one for one in checkpoints if one > pointer})
        with self.deciding() as state:
            entry = state.in_progress.get(pointer)
            named = tuple(one for one in later if one in state.in_progress or one in state.invalid)
            left = self._writes.places({pointer, *later, *(entry.checkpoints if entry else ())})
            if entry is not None and left:
                logger.info("transaction %d is invalidated, not aborted: not rolled back: %s", pointer, ", ".join(left))
                self.record(Edit(pointer, EditState.INVALID))
            elif entry is not None or (pointer in state.invalid and not left and pointer > state.recovered_pointer):
                if entry is not None and entry.is_long:
                    # Aborted once more, by its id or as a short one, it must not leave the invalid list.
                    self._writes.add(pointer, "a long transaction", 1)
                self.record(Edit(pointer, EditState.ABORTED, type=transaction.type, checkpoints=named))

    def invalidate(self, transaction_id: int) -> bool:
        """Hide the writes of a transaction permanently, because they were not rolled back.

        Returns:
            Whether it was in progress until now; False for one that was committed, or never started.
        """
        with self.deciding() as state:
            found = transaction_id in state.in_progress or transaction_id in state.committing
            if found:
                self.record(Edit(transaction_id, EditState.INVALID))
            return found

    def checkpoint(self, transaction: Transaction) -> Transaction:
        """Give a transaction another write pointer, so that its later writes can be rolled back alone.

        Returns:
            The transaction with the new pointer; its reads are unchanged.

        Raises:
            NotInProgress: it is over, or never started.
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
        """Return the outcome of a transaction; one that was committed or aborted, or never started, is over."""
        with self.deciding() as state:
            if transaction_id in state.in_progress:
                return "in progress"
            return "invalid" if transaction_id in state.invalid else "ended"

    def begin_write(self, pointer: int, principal: str | None = None) -> bool:
        """Note that something is about to be written with a pointer, if that is in progress; takes no disk.

        Args:
            principal: the writer, as of :meth:`belongs_to`.

        Returns:
            Whether it is, and belongs to the principal; then :meth:`end_write` is to follow.
        """
        with self._lock:
            found = self.is_in_progress(pointer) and self.belongs_to(pointer, principal)
            if found:
                if principal is not None:
                    self._state.owners.setdefault(self.transaction_of(pointer), principal)
                self._writes.begin(pointer)
            return found

    def end_write(self, pointer: int) -> None:
        """Note that announced writes are finished, or failed."""
        with self._lock:
            self._writes.end(pointer, late=not self.is_in_progress(pointer))
            self._forget_decided()

    def note_written(self, pointer: int, place: str, number: int = 1) -> None:
        """Note writes in advance that an abort of their transaction would reveal; takes no disk.

        Args:
            pointer: the transaction's, or that of one of its checkpoints; nothing is noted unless it is in progress.
            place: where it is written, for operators.
            number: how many rows.
        """
        with self._lock:
            if self.is_in_progress(pointer):
                self._writes.add(pointer, place, number)
                self._forget_decided()

    def note_taken_back(self, pointer: int, place: str, number: int | None = None) -> None:
        """Note that so many rows no longer carry a pointer; None: none of those that were written to the place does."""
        with self._lock:
            self._writes.take_back(pointer, place, number)

    @contextmanager
    def rolling_back(self, pointer: int) -> Iterator[None]:
        """Refuse commits of a pointer's transaction while the block takes back rows: readers would miss them."""
        with self._lock:
            transaction_id = self.transaction_of(pointer)
            self._roll_backs[transaction_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._roll_backs[transaction_id] -= 1
                if not self._roll_backs[transaction_id]:
                    del self._roll_backs[transaction_id]

    def note_unknown(self) -> None:
        """Note that transactions started before the last restart may have written more than was noted since."""
        with self._lock:
            self._writes.unknown_to = self._state.recovered_pointer

    def _note_mended(self) -> None:
        # A commit that did not reach the disk is undone, and the ledger has forgotten what that transaction wrote.
        self.note_unknown()

    def is_in_progress(self, pointer: int) -> bool:
        """Return whether a pointer is in progress, a transaction's or a checkpoint's; takes no lock and no disk."""
        return pointer in self._state.in_progress

    def belongs_to(self, pointer: int, principal: str | None) -> bool:
        """Return whether a principal may use a pointer; it does not become the owner's by this question.

        A transaction in progress belongs to the first principal that writes with it (:meth:`begin_write`). A
        transaction that is not in progress belongs to nobody, and is not refused here. Takes no disk.

        Args:
            principal: None: without authentication there is only one.
        """
        if principal is None:
            return True
        with self._lock:
            if not self.is_in_progress(pointer):
                return True
            return self._state.owners.get(self.transaction_of(pointer), principal) == principal

    def transaction_of(self, pointer: int) -> int:
        """Return the transaction of a checkpoint that is in progress; of any other pointer itself. Takes no disk."""
        with self._lock:
            entry = self._state.in_progress.get(pointer)
            if entry is None or entry.type is not InProgressType.CHECKPOINT:
                return pointer
            entries = self._state.in_progress.values()
            return next((entry.write_pointer for entry in entries if pointer in entry.checkpoints), pointer)

    # --- the invalid list --------------------------------------------------------------------------------------------

    def truncate_invalid(self, transaction_ids: Collection[int]) -> bool:
        """Take ids off the invalid list, because nothing of theirs is left anywhere.

        Their remaining claims and notes are voided first. An id with which something is still being written
        stays on the list.

        Returns:
            Whether any of them left it.

        Raises:
            StoreError: the rest could not be voided; none of them has left the list.
        """
        with self.deciding() as state:
            leaving = frozenset(one for one in transaction_ids if one in state.invalid) - self._writes.under_way
        if leaving:
            self._release(leaving.__contains__)
            with self.deciding() as state:
                leaving = frozenset(one for one in leaving if one in state.invalid)
                if leaving:
                    self.record(Edit(0, EditState.TRUNCATE_INVALID_TX, truncated=leaving))
        return bool(leaving)

    def truncate_invalid_before(self, time_ms: int) -> bool:
        """Take all ids off the invalid list whose transactions started before a time, milliseconds since the epoch.

        Returns:
            Whether there were any; see :meth:`truncate_invalid`.

        Raises:
            TruncateTimeError: a transaction that started before it is still in progress.
            StoreError: as :meth:`truncate_invalid`.
        """
        time_ms = min(time_ms, LONG_MAX // TX_PER_MS)
        bound = time_ms * TX_PER_MS
        with self.deciding() as state:
            older = [pointer for pointer in state.in_progress if pointer < bound]
            if older:
                raise TruncateTimeError(f"{len(older)} transactions that began before {time_ms} ms are in progress.")
            known = InvalidList(state.invalid.ids)
            # Of what begins or ends meanwhile nothing would have been given up.
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
        """Forget everything, the invalid list too, after a snapshot of it: what failed before becomes readable.

        Ids keep growing. Claims and notes of open or invalid ones are voided first.

        Raises:
            StoreError: they could not be, or the snapshot could not be written; nothing is forgotten.
        """
        with self._saving, self._lock:
            state = self._state
            self._release(lambda pointer: pointer in state.in_progress or pointer in state.invalid)
            super().reset()

    def invalid_size(self) -> int:
        """Return how many transactions are on the invalid list."""
        with self.deciding() as state:
            return len(state.invalid)

    # --- what there is -----------------------------------------------------------------------------------------------

    def visibility(self) -> VisibilityState:
        """Return the state that decides what readers see now; the value does not change afterwards."""
        with self.deciding() as state:
            return state.visibility(self._clock.right_ms())

    def latest(self) -> Loaded:
        """Return the same for those who expect a snapshot source.

        Raises:
            NoSnapshot: the manager has stopped.
        """
        try:
            return Loaded(self.visibility(), "the transaction manager")
        except (TransactionError, StoreError) as error:
            raise SourceUnreachable(error.message, error.hint) from error

    def encoded_snapshot(self) -> bytes:
        """Return all of the state, in the bytes of a snapshot file.

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
        """Return the clients of the transactions in progress, by id; not of those started before the last restart."""
        with self.deciding() as state:
            return dict(state.clients)

    def published(self) -> dict[int, dict[str, int]]:
        """Return where transactions in progress have published: by id the topics, with the first message's time.

        Of those that were started before the last restart, what :meth:`note_published` was told since.
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

    # --- from time to time -------------------------------------------------------------------------------------------

    def expire(self) -> int:
        """Give up the transactions whose time is over: they become invalid.

        Returns:
            How many pointers, checkpoints included.
        """
        with self.deciding() as state:
            late = state.expired(self._clock.running_ms())
            for pointer in late:
                # A checkpoint goes with its transaction; one that has none any more goes by itself.
                if state.in_progress[pointer].type is not InProgressType.CHECKPOINT or state.is_orphan(pointer):
                    self.append(Edit(pointer, EditState.INVALID))
                    client = printable(state.clients.get(pointer, UNKNOWN_CLIENT))
                    logger.info("transaction %d timed out (client: %s)", pointer, client)
            state.time_out(late)
            return len(late)

    def _forget_decided(self) -> None:
        """Forget the writes with pointers that were committed, or taken back."""
        invalid, in_progress = self._state.invalid, self._state.in_progress
        self._writes.prune(len(invalid) + len(in_progress), lambda one: one in in_progress or one in invalid)

    def _timeout_ms(self, seconds: int | None) -> int:
        seconds = _TIMEOUT_SECONDS if seconds is None else seconds
        if seconds <= 0:
            raise BadArgument(f"timeout must be positive but is {seconds} seconds")
        if seconds > self._max_timeout_seconds:
            raise BadArgument(f"timeout must not exceed {self._max_timeout_seconds} seconds but is {seconds} seconds")
        return seconds * 1000

    def _start(self, kind: TransactionType, timeout_ms: int, client: str) -> Transaction:
        with self.deciding() as state:
            return self._begun(state, kind, timeout_ms, client)

    def _begun(self, state: ManagerState, kind: TransactionType, timeout_ms: int, client: str) -> Transaction:
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
        state.deadlines[transaction.transaction_id] = self._clock.running_ms() + timeout_ms
        state.clients[transaction.transaction_id] = client[:MAX_CLIENT_CHARACTERS]
        return transaction

    def _commit(self, state: ManagerState, transaction_id: int) -> None:
        _require(state, transaction_id)
        if transaction_id in self._roll_backs:
            text = f"Transaction {transaction_id} is being rolled back."
            raise Conflict(text, transaction_id, "(any: it is being rolled back)", "")
        keys, checkpoints = state.committing.get(transaction_id), state.in_progress[transaction_id].checkpoints
        if keys is not None:
            state.committed.check(transaction_id, keys)
        elif transaction_id <= state.recovered_pointer:
            text = f"The transaction manager was restarted since transaction {transaction_id} began, and does not "
            text += "know what it has changed: ask again whether it can commit, or roll it back."
            raise Conflict(text, transaction_id, _FORGOTTEN, "")
        self.record(
            Edit(
                transaction_id,
                EditState.COMMITTED,
                commit_pointer=state.write_pointer + 1,
                can_commit=keys is not None,
                changes=keys or frozenset(),
            )
        )
        self._writes.forget((transaction_id, *checkpoints))


def _require(
    state: ManagerState, pointer: int, text: str = "canCommit() is called for transaction {} that is not in progress"
) -> None:
    entry = state.in_progress.get(pointer)
    if entry is not None and entry.type is InProgressType.CHECKPOINT:
        # It ends with its transaction; ended by itself, what it wrote would be visible while that goes on.
        raise NotInProgress(f"{pointer} is the write pointer of a checkpoint, not the id of a transaction")
    if entry is None:
        reason = " (it is known to be invalid)" if pointer in state.invalid else ""
        raise NotInProgress(text.format(pointer) + reason)

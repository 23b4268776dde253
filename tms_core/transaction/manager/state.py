"""The state of a transaction manager, and the effect of each edit of its log.

A manager makes a decision, writes it as an :class:`~tms_core.transaction.codec.edits.Edit`, and applies the edit. After
a crash, the same edits are applied again by the same rules, so a restart restores the same state. Three facts are not
in the log: the names of clients, the unchanged read pointer after a timeout (as in Tephra), and the monotonic deadline
of each transaction.

This module has no clock, lock or file. The rules are those of Tephra's ``TransactionManager``;
``docs/reference/conformance/transactions.md`` lists the intended differences.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from tms_core.errors import FormatError
from tms_core.transaction.codec.edits import Edit, EditState
from tms_core.transaction.manager.conflicts import CommittedChanges, first_short
from tms_core.transaction.model import (
    DEFAULT_TIMEOUT_SECONDS,
    TX_PER_MS,
    InProgress,
    InProgressType,
    Snapshot,
    Transaction,
    TransactionType,
    VisibilityState,
    ascending,
    transaction_ms,
)

T = TypeVar("T")

#: A transaction without a type is long if its expiration is at most this much before that of a long transaction.
_LONG_TOLERANCE_MS = 10_000


class ManagerState:
    """The state of a manager in memory; for one thread at a time.

    Args:
        long_timeout_ms: the timeout of long transactions in old files, which do not contain it.

    Attributes:
        read_pointer: the highest version that new transactions read; never decreases.
        write_pointer: the highest issued pointer; never decreases.
        recovered_pointer: the highest pointer issued before the last restart; 0: no restart. A client of an older
            transaction may have a positive response to ``canCommit`` that the restart has lost.
        in_progress: transactions and checkpoints in progress by pointer; ascending.
        clients: clients by transaction id; lost in a restart.
        owners: the first principal of each transaction, by transaction id; lost in a restart.
        published: the topics of a transaction's messages, by pointer, with the time of the first message in
            milliseconds; lost in a restart.
        deadlines: timeouts by the monotonic clock, in milliseconds, by pointer.
        invalid: the invalid list.
        committing: change keys of transactions after ``canCommit``, by transaction id.
        committed: change keys of recent commits.
    """

    def __init__(self, snapshot: Snapshot, long_timeout_ms: int) -> None:
        visibility = snapshot.visibility
        self.read_pointer = visibility.read_pointer
        self.write_pointer = visibility.write_pointer
        self.recovered_pointer = 0
        self.in_progress: dict[int, InProgress] = {}
        self.clients: dict[int, str] = {}
        self.owners: dict[int, str] = {}
        self.published: dict[int, dict[str, int]] = {}
        self.deadlines: dict[int, int] = {}
        self.invalid = InvalidList(visibility.invalid)
        self.committing = dict(snapshot.committing)
        self.committed = CommittedChanges(snapshot.committed)
        self._long_timeout_ms = long_timeout_ms
        for entry in visibility.in_progress:
            self._restore(entry)

    # --- checks ------------------------------------------------------------------------------------------------------

    def next_pointer(self, now_ms: int, offset: int = 0) -> int:
        """Return the next pointer: by the clock, and above all issued pointers.

        Args:
            offset: the offset of the pointer in its millisecond, below ``TX_PER_MS``.
        """
        return max(self.write_pointer + 1, now_ms * TX_PER_MS + offset)

    def first_short(self) -> int:
        """Return the lowest pointer in progress that is not long, or ``NO_TX_IN_PROGRESS``."""
        return first_short((entry.write_pointer, entry.is_long) for entry in self.in_progress.values())

    def transaction(self, pointer: int, kind: TransactionType) -> Transaction:
        """Return a new transaction, before it is in progress."""
        return Transaction(
            read_pointer=self.read_pointer,
            transaction_id=pointer,
            write_pointer=pointer,
            invalids=self.invalid.ids,
            in_progress=tuple(self.in_progress),
            first_short_in_progress=self.first_short(),
            type=kind,
        )

    def is_orphan(self, pointer: int) -> bool:
        """Return whether a pointer is a checkpoint in progress whose transaction is not in progress."""
        entry = self.in_progress[pointer]
        is_checkpoint = entry.type is InProgressType.CHECKPOINT
        return is_checkpoint and not any(pointer in parent.checkpoints for parent in self.in_progress.values())

    def expired(self, monotonic_ms: int) -> list[int]:
        """Return the pointers whose timeout has passed by the monotonic clock."""
        return [pointer for pointer in self.in_progress if monotonic_ms > self.deadlines[pointer]]

    def set_deadlines(self, now_ms: int, monotonic_ms: int) -> None:
        """Set the monotonic deadlines of transactions from before a restart.

        The wall clock may have been set back since a transaction was started; that must not extend its timeout.
        """
        parents = {child: parent for parent, entry in self.in_progress.items() for child in entry.checkpoints}
        for pointer, entry in self.in_progress.items():
            transaction = self.in_progress[parents.get(pointer, pointer)]
            own_ms = entry.expiration_ms - transaction_ms(transaction.write_pointer)
            remaining_ms = entry.expiration_ms - now_ms
            if own_ms > 0:
                remaining_ms = min(remaining_ms, own_ms)
            elif not transaction.is_long:
                # The clock was set back before the start, so the id does not show the time of the start. The clock may
                # have been set back since: a timeout that is too early is safe, a late timeout delays all readers.
                remaining_ms = min(remaining_ms, DEFAULT_TIMEOUT_SECONDS * 1000)
            self.deadlines.setdefault(pointer, monotonic_ms + max(0, remaining_ms))

    def adopt_facts(self, previous: ManagerState) -> None:
        """Adopt the facts of transactions in progress that are not in the log, from an earlier state of the process."""
        self.clients |= self._in_progress_only(previous.clients)
        self.owners |= self._in_progress_only(previous.owners)
        self.published |= self._in_progress_only(previous.published)
        self.deadlines |= self._in_progress_only(previous.deadlines)

    def _in_progress_only(self, facts: Mapping[int, T]) -> dict[int, T]:
        # Iterate over a copy: a publish may add its transaction at the same time.
        return {pointer: fact for pointer, fact in list(facts.items()) if pointer in self.in_progress}

    # --- changes -----------------------------------------------------------------------------------------------------

    def apply(self, edit: Edit) -> None:
        """Apply an edit.

        Raises:
            FormatError: no manager writes such an edit.
        """
        match edit.state:
            case EditState.IN_PROGRESS:
                self._begin(edit)
            case EditState.CHECKPOINT:
                self._checkpoint(edit.parent_write_pointer, edit.write_pointer)
            case EditState.COMMITTING:
                self.committing[edit.write_pointer] = edit.changes
            case EditState.COMMITTED:
                self._commit(edit)
            case EditState.INVALID:
                self._invalidate(edit.write_pointer)
            case EditState.ABORTED:
                self._abort(edit)
            case EditState.TRUNCATE_INVALID_TX if edit.truncated_before_ms:
                self.invalid.remove_below(edit.truncated_before_ms * TX_PER_MS)
            case EditState.TRUNCATE_INVALID_TX:
                self.invalid.remove(edit.truncated)
            case _:
                raise FormatError(f"an edit {edit.state.name}, which no manager writes")

    def time_out(self, pointers: Collection[int]) -> None:
        """Invalidate timed-out transactions. The read pointer stays, but a replay of the same edits moves it."""
        for pointer in pointers:
            self._discard(pointer)
        if pointers:
            self.invalid.add(pointers)

    def snapshot(self, now_ms: int) -> Snapshot:
        """Return a copy of the state, without the facts that are not in the log."""
        return Snapshot(self.visibility(now_ms), dict(self.committing), self.committed.copy())

    def visibility(self, now_ms: int) -> VisibilityState:
        """Return a copy of the facts that decide visibility."""
        entries = tuple(self.in_progress.values())
        return VisibilityState(now_ms, self.read_pointer, self.write_pointer, self.invalid.ids, entries)

    # --- rules -------------------------------------------------------------------------------------------------------

    def _begin(self, edit: Edit) -> None:
        kind = InProgressType.LONG if edit.type is TransactionType.LONG else InProgressType.SHORT
        expiration_ms = edit.expiration_ms
        if expiration_ms < 0:
            kind, expiration_ms = InProgressType.LONG, transaction_ms(edit.write_pointer) + self._long_timeout_ms
        self._enter(InProgress(edit.write_pointer, expiration_ms, edit.visibility_upper_bound, kind))

    def _checkpoint(self, parent_pointer: int, pointer: int) -> None:
        parent = self.in_progress.get(parent_pointer)
        if parent is None:
            # The transaction was decided without this checkpoint, so the checkpoint's writes must not become visible.
            self.write_pointer = max(self.write_pointer, pointer)
            self.invalid.add([pointer])
            return
        self.in_progress[parent_pointer] = replace(parent, checkpoints=(*parent.checkpoints, pointer))
        self._enter(replace(parent, write_pointer=pointer, type=InProgressType.CHECKPOINT, checkpoints=()))

    def _commit(self, edit: Edit) -> None:
        pointer = edit.write_pointer
        client = self.clients.get(pointer, "")
        if edit.can_commit and edit.changes:
            self.committed.add(edit.commit_pointer, edit.changes, client)
        entry = self._discard(pointer)
        if entry is None:
            # The transaction had timed out before its commit was written.
            self.invalid.remove({pointer})
        checkpoints = entry.checkpoints if entry else ()
        for checkpoint in checkpoints:
            self._discard(checkpoint)
        self._read_up_to(checkpoints[-1] if checkpoints else pointer)
        self.committed.discard_below(self.first_short())

    def _invalidate(self, pointer: int) -> None:
        is_committing = pointer in self.committing
        entry = self._discard(pointer)
        if entry is None and not is_committing:
            return
        checkpoints = entry.checkpoints if entry else ()
        for checkpoint in checkpoints:
            self._discard(checkpoint)
        self.invalid.add([pointer, *checkpoints])
        if entry is not None and not entry.is_long:
            self._read_up_to(pointer)

    def _abort(self, edit: Edit) -> None:
        pointer, named = edit.write_pointer, frozenset(edit.checkpoints or ())
        if self._is_long(edit):
            self._invalidate(pointer)
            return
        if self._discard(pointer) is None and self.invalid.remove({pointer}):
            self.invalid.remove(named)
        for checkpoint in named:
            entry = self.in_progress.get(checkpoint)
            if entry is not None and entry.type is InProgressType.CHECKPOINT:
                self._discard(checkpoint)
        self._read_up_to(pointer)

    def _is_long(self, edit: Edit) -> bool:
        """Return whether the aborted transaction is long, by the edit or by its entry: then its writes still exist."""
        entry = self.in_progress.get(edit.write_pointer)
        if edit.type is None:
            return entry is None or entry.is_long
        return edit.type is TransactionType.LONG or (entry is not None and entry.is_long)

    def _enter(self, entry: InProgress) -> None:
        pointer = entry.write_pointer
        is_last = not self.in_progress or pointer > next(reversed(self.in_progress))
        self.in_progress[pointer] = entry
        if not is_last:
            # Tephra's log is not always in the order of ids.
            self.in_progress = dict(sorted(self.in_progress.items()))
        self.write_pointer = max(self.write_pointer, pointer)

    def _discard(self, pointer: int) -> InProgress | None:
        self.committing.pop(pointer, None)
        self.clients.pop(pointer, None)
        self.owners.pop(pointer, None)
        self.published.pop(pointer, None)
        self.deadlines.pop(pointer, None)
        return self.in_progress.pop(pointer, None)

    def _read_up_to(self, pointer: int) -> None:
        self.read_pointer = max(self.read_pointer, min(pointer, self.write_pointer))

    def _restore(self, entry: InProgress) -> None:
        """Restore an entry of a snapshot. Version 1 has no types; Tephra before 0.10 has no entries for checkpoints."""
        if entry.type is None:
            long_ms = transaction_ms(entry.write_pointer) + self._long_timeout_ms
            if entry.is_long or long_ms - entry.expiration_ms < _LONG_TOLERANCE_MS:
                entry = replace(entry, type=InProgressType.LONG, expiration_ms=long_ms)
            else:
                entry = replace(entry, type=InProgressType.SHORT)
        self._enter(entry)
        for checkpoint in entry.checkpoints:
            self._enter(replace(entry, write_pointer=checkpoint, type=InProgressType.CHECKPOINT, checkpoints=()))


class InvalidList:
    """The ids of invalid transactions: ascending, without duplicates, and shared without copies.

    Every new transaction gets the whole list. Therefore readers share one array, and each change creates a new array,
    which copies 8 bytes per id. Tephra keeps ids in the order of their arrival, with duplicates (a checkpoint that was
    invalidated before its parent).

    Args:
        pointers: ids in any order, also with duplicates.

    Attributes:
        ids: all ids; the array is replaced, never changed.
    """

    def __init__(self, pointers: Iterable[int] = ()) -> None:
        self.ids = ascending(pointers)

    def __contains__(self, pointer: int) -> bool:
        at = bisect_left(self.ids, pointer)
        return at < len(self.ids) and self.ids[at] == pointer

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, pointers: Iterable[int]) -> None:
        """Add ids to the list; ids on the list stay."""
        ids = self.ids[:]
        for pointer in pointers:
            at = bisect_left(ids, pointer)
            if at == len(ids) or ids[at] != pointer:
                ids.insert(at, pointer)
        self.ids = ids

    def remove(self, pointers: Iterable[int]) -> bool:
        """Remove ids from the list; return whether an id was removed."""
        ids, start = array("q"), 0
        for pointer in sorted(set(pointers)):
            at = bisect_left(self.ids, pointer, start)
            if at < len(self.ids) and self.ids[at] == pointer:
                ids.extend(self.ids[start:at])
                start = at + 1
        return self._replace(ids + self.ids[start:] if start else self.ids)

    def remove_below(self, bound: int) -> bool:
        """Remove all ids below ``bound``; return whether an id was removed."""
        return self._replace(self.ids[bisect_left(self.ids, bound) :])

    def _replace(self, ids: array[int]) -> bool:
        changed = len(ids) < len(self.ids)
        if changed:
            self.ids = ids
        return changed

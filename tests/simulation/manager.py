"""A model of Tephra's transaction manager that implements visibility.

The simulation needs a correct, small and deterministic manager: it issues pointers, keeps the in-progress and invalid
lists, moves the read pointer like Tephra's ``TransactionManager``, and writes its state with the real codec, so that
the janitor reads real bytes. It omits conflicts and the transaction log, because visibility does not depend on them.
"""

from __future__ import annotations

import io
from array import array
from collections.abc import Iterable
from dataclasses import replace

from tms_core.transaction.codec.snapshot import write_snapshot
from tms_core.transaction.model import (
    NO_TX_IN_PROGRESS,
    TX_PER_MS,
    InProgress,
    InProgressType,
    Snapshot,
    Transaction,
    VisibilityState,
)
from tms_core.transaction.source.source import Loaded


class Manager:
    """The transaction service of the simulated world."""

    def __init__(self, now_ms: int) -> None:
        self.write_pointer = now_ms * TX_PER_MS
        self.read_pointer = self.write_pointer
        self.invalid: set[int] = set()
        self.in_progress: dict[int, InProgress] = {}

    def start(self, now_ms: int, timeout_ms: int, *, long: bool) -> int:
        bound = self.reader().visibility_upper_bound()
        kind = InProgressType.LONG if long else InProgressType.SHORT
        return self._enter(now_ms, InProgress(0, now_ms + timeout_ms, bound, kind))

    def checkpoint(self, pointer: int, now_ms: int) -> int | None:
        """Issue a new write pointer; return None unless the transaction is in progress."""
        parent = self.in_progress.get(pointer)
        if parent is None:
            return None
        new = self._enter(now_ms, replace(parent, type=InProgressType.CHECKPOINT, checkpoints=()))
        self.in_progress[pointer] = replace(parent, checkpoints=(*parent.checkpoints, new))
        return new

    def commit(self, pointer: int) -> bool:
        entry = self._leave(pointer)
        if entry is None:
            return False
        self._read_up_to(entry.checkpoints[-1] if entry.checkpoints else pointer)
        return True

    def abort(self, pointer: int, checkpoints: Iterable[int], *, long: bool) -> None:
        """Abort a rolled-back transaction; a long transaction becomes invalid instead."""
        if long:
            self.invalidate(pointer)
            return
        self._read_up_to(pointer)
        self._leave(pointer)
        self.invalid.difference_update({pointer, *checkpoints})

    def invalidate(self, pointer: int) -> None:
        """Invalidate a transaction whose client could not roll back."""
        entry = self._leave(pointer)
        if entry is not None:
            self.invalid |= {pointer, *entry.checkpoints}
            if not entry.is_long:
                self._read_up_to(max(pointer, *entry.checkpoints, pointer))

    def expire(self, now_ms: int) -> None:
        late = {pointer for pointer, entry in self.in_progress.items() if now_ms > entry.expiration_ms}
        self.invalid |= late
        for pointer in late:
            del self.in_progress[pointer]

    def truncate(self, bound: int) -> int:
        """Truncate invalid ids up to and including ``bound``, like an operator; return how many."""
        dropped = {pointer for pointer in self.invalid if pointer <= bound}
        self.invalid -= dropped
        return len(dropped)

    def truncate_invalid(self, transaction_ids: Iterable[int], /) -> bool:
        """Truncate these ids for the janitor; return whether any was listed."""
        before = len(self.invalid)
        self.invalid.difference_update(transaction_ids)
        return len(self.invalid) < before

    def latest(self) -> Loaded:
        """Return the current state, like the transaction service does for the janitor."""
        return Loaded(self._state(0), "the manager")

    def reader(self) -> Transaction:
        """Return a transaction that starts now."""
        return Transaction(
            read_pointer=self.read_pointer,
            transaction_id=NO_TX_IN_PROGRESS,
            write_pointer=NO_TX_IN_PROGRESS,
            invalids=sorted(self.invalid),
            in_progress=sorted(self.in_progress),
        )

    def snapshot(self, now_ms: int) -> bytes:
        stream = io.BytesIO()
        write_snapshot(stream, Snapshot(self._state(now_ms)))
        return stream.getvalue()

    def prune_bound(self) -> int:
        """Return Tephra's prune upper bound of the state (``TxUtils.getPruneUpperBound``)."""
        if not self.invalid and not self.in_progress:
            return self.read_pointer - 1
        return min(max(self.invalid, default=2**63 - 1), min(self.in_progress, default=2**63) - 1)

    def _state(self, now_ms: int) -> VisibilityState:
        invalid, entries = array("q", sorted(self.invalid)), tuple(self.in_progress.values())
        return VisibilityState(now_ms, self.read_pointer, self.write_pointer, invalid, entries)

    def _enter(self, now_ms: int, entry: InProgress) -> int:
        self.write_pointer = max(self.write_pointer + 1, now_ms * TX_PER_MS)
        self.in_progress[self.write_pointer] = replace(entry, write_pointer=self.write_pointer)
        return self.write_pointer

    def _leave(self, pointer: int) -> InProgress | None:
        entry = self.in_progress.pop(pointer, None)
        if entry is not None:
            for checkpoint in entry.checkpoints:
                self.in_progress.pop(checkpoint, None)
        return entry

    def _read_up_to(self, pointer: int) -> None:
        self.read_pointer = max(self.read_pointer, pointer)

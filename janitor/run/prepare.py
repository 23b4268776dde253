"""What every question to the janitor begins with: the clocks, the store's record, the snapshot, and the guards.

Nothing here changes the store or what is remembered, but for one thing: a store that is met for the first time is
given its mark, so that a plan made now can be recognised when it is applied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from janitor import guards, txstate
from janitor.report import GuardNote
from janitor.state.base import ClockAnchor, State, StoreRecord
from janitor.txstate import Observed, TxState
from janitor.world import Terms
from tms_core.clock import Clock
from tms_core.transaction.source import SnapshotSource


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a question begins with.

    Attributes:
        now: the clocks; ``wall_ms`` is the moment rows are judged by.
        measured: the same moment as elapsed time is measured by, so that a wrong wall clock does not shorten a hold.
        record: what is known of the store; a fresh one for a store that is not the one remembered.
        ids: the snapshot's invalid list beside what was known of it; of none without a usable snapshot.
    """

    now: ClockAnchor
    measured: ClockAnchor
    record: StoreRecord
    tx: TxState
    ids: Observed
    notes: list[GuardNote]

    @property
    def adopted(self) -> bool:
        return self.record.adopted_ms is not None

    @property
    def stopped(self) -> bool:
        """Whether nothing may be written."""
        return not self.adopted or any(note.tripped for note in self.notes)

    @property
    def first_contact(self) -> bool:
        """Whether this store, or this transaction system, is not the one that was adopted (rule S13)."""
        return not self.adopted or any(note.guard == "identity" for note in self.notes)


def prepare(
    state: State,
    identity: str,
    source: SnapshotSource | None,
    clock: Clock,
    terms: Terms,
    token_hex: Callable[[int], str],
    at_ms: int | None = None,
) -> Prepared:
    """Read all that a verdict rests on besides the tables.

    Args:
        identity: the store's (``Store.identity``).
        at_ms: judge by another moment than the present; then the clock is not checked.
    """
    allowance_ms = terms.lifetime.allowance_ms
    now = guards.read_clocks(clock)
    measured = guards.measured(state.anchor(), now)
    clock_note = guards.check_clocks(state, now, allowance_ms) if at_ms is None else None
    if at_ms is not None:
        # Until then honest time passes, so that a frontier held then is one that would be.
        later_ms = at_ms - now.wall_ms
        now = replace(now, wall_ms=at_ms, running_ms=now.running_ms + later_ms)
        measured = replace(measured, wall_ms=measured.wall_ms + later_ms, running_ms=measured.running_ms + later_ms)
    record, store_note = _known_store(state, identity, token_hex)
    interval_seconds = terms.snapshot_interval_seconds
    tx = txstate.refresh(source, now.wall_ms, interval_seconds=interval_seconds, allowance_ms=allowance_ms)
    if at_ms is not None and tx.usable is None:
        # A snapshot that is fresh today is the best there is to look ahead with.
        tx = txstate.refresh(source, clock.now_ms(), interval_seconds=interval_seconds, allowance_ms=allowance_ms)
    system_note = guards.check_transaction_system(record, tx.usable)
    ids = Observed(now.wall_ms)
    if tx.usable is not None:
        known = state.known_ids(now.wall_ms, terms.lifetime.window_end_ms(0))
        ids = txstate.observe(known, tx.usable.invalid, now.wall_ms)
    notes = [note for note in (clock_note, store_note, system_note) if note is not None]
    return Prepared(now, measured, record, tx, ids, notes)


def _known_store(state: State, identity: str, token_hex: Callable[[int], str]) -> tuple[StoreRecord, GuardNote | None]:
    """What is remembered of the store. One that is not the one remembered is a first contact."""
    record = state.store()
    if record is None:
        record = StoreRecord.first_contact(identity, token_hex)
        state.save_store(record)
    note = guards.check_store(record, identity)
    if note is None:
        return record, None
    return StoreRecord(mark=guards.successor_mark(record.mark, identity), identity=identity), note

"""What everything the janitor is asked for begins with: clocks, the store's record, the snapshot, guards, the context.

Nothing here changes the store or what is remembered, but for two things. A store that is met for the first time is
given its mark, so that a plan made now can be recognised when it is applied. And of one that was put back from a backup
all that was learnt is withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from janitor.boundary import claim as boundary
from janitor.rules.policy import Hold
from janitor.run import guards
from janitor.run.deps import Deps
from janitor.run.guards import InProgressThen
from janitor.state.base import Claim, State, StoreRecord
from janitor.state.figures import GuardNote
from janitor.state.records import RESTORED, Note
from janitor.sweep import transactions as txstate
from janitor.sweep.run import ConsumerHolds, PassKind, PlanLimits, Preparation, ProcessedRows, Run
from janitor.sweep.transactions import DECIDED, Observed, TransactionView, decided
from tms_core.tables.base import Reads
from tms_core.tables.record import recorded_state, recorded_transactions

#: The note that says what was in progress in the snapshot last used, and what its write pointer was.
IN_PROGRESS = Note.IN_PROGRESS


def prepare(deps: Deps, at_ms: int | None = None) -> Preparation:
    """Read all that decisions on rows rest on besides the tables.

    Args:
        at_ms: judge by another moment than the present; then the clock is not checked.

    Raises:
        StoreError, StateError: the store or the state could not be read.
    """
    state, source, clock, terms = deps.state, deps.source, deps.clock, deps.terms
    allowance_ms = terms.lifetime.allowance_ms
    now = guards.read_clocks(clock)
    measured = guards.measured(state.anchor(), now)
    clock_note = guards.check_clocks(state, now, allowance_ms) if at_ms is None else None
    if at_ms is not None:
        # Until then honest time passes, so that a frontier held then is one that would be.
        later_ms = at_ms - now.wall_ms
        now = replace(now, wall_ms=at_ms, monotonic_ms=now.monotonic_ms + later_ms)
        measured = replace(measured, wall_ms=measured.wall_ms + later_ms, monotonic_ms=measured.monotonic_ms + later_ms)
    record, store_note = _known_store(state, deps.store, deps.token_hex)
    # Before the snapshot, since a later one may be recorded at any moment.
    recorded = recorded_transactions(deps.side) if deps.side is not None else None
    state_note = guards.check_state(recorded_state(deps.side), record) if deps.side is not None else None
    read = partial(
        txstate.refresh,
        source,
        interval_seconds=terms.snapshot_interval_seconds,
        allowance_ms=allowance_ms,
        wanted=terms.snapshots_wanted,
    )
    tx = read(now.wall_ms)
    if at_ms is not None and tx.usable is None:
        # A snapshot that is fresh today is the best there is to look ahead with.
        tx = read(clock.now_ms())
    ids, system_note = Observed(now.wall_ms), None
    if (usable := tx.usable) is not None:
        known = state.known_ids(now.wall_ms, terms.lifetime.window_end_ms(0))
        ids = txstate.observe(known, usable.invalid, now.wall_ms)
        system_note = guards.check_transaction_system(record, usable)
        system_note = system_note or guards.check_history(in_progress_then(state, record), usable, known, ids.new)
        system_note = system_note or guards.check_recorded(recorded, tx)
        if system_note is not None and usable.timestamp_ms < (record.snapshot_timestamp_ms or 0):
            # Of the same system from before, as far as can be told: the one that was used last has been removed.
            tx, ids, system_note = txstate.older(tx), Observed(now.wall_ms), None
    unknown = _knows_none(state) and state_note is None and system_note is None
    notes = [note for note in (clock_note, store_note or state_note, system_note) if note is not None]
    ended = decided(now.wall_ms, state.note(DECIDED), tx.usable, terms.lifetime)
    return Preparation(now, measured, record, unknown, tx, ids, notes, ended, boundary.refutation(state))


def make_run(
    deps: Deps,
    ready: Preparation,
    *,
    kind: PassKind,
    patterns: tuple[str, ...] = (),
    label: Hold | None = None,
    limits: PlanLimits | None = None,
    deletes: bool = False,
) -> Run:
    """What a pass judges by; the topics are yet to be read.

    Args:
        kind, patterns, label, limits: as of :class:`~janitor.sweep.run.Run`.
        deletes: whether it is a run's, and not a plan's.

    Raises:
        StateError: the state, or the positions of consumers, could not be read.
    """
    usable, terms, state, floor = ready.tx.usable, deps.terms, deps.state, deps.floor
    processed = None
    if usable is not None and deps.side is not None:
        announces = deletes and not ready.is_blocked
        processed = ProcessedRows(deps.side, usable, terms.hold_seconds, announces)
    return Run(
        store=deps.store,
        ready=ready,
        terms=terms,
        transactions=TransactionView(usable, ready.now.wall_ms, terms.lifetime.undecided_ms),
        records={} if label is Hold.FIRST_CONTACT else state.frontiers(),
        kind=kind,
        label=label,
        patterns=patterns,
        limits=limits,
        paused=tuple(pause.pattern for pause in state.pauses()),
        quarantined=guards.quarantined(state.strikes(), ready.now.wall_ms),
        consumers=ConsumerHolds(floor) if floor is not None else None,
        processed=processed,
        newborn=deps.newborn,
    )


def in_progress_then(state: State, record: StoreRecord) -> InProgressThen | None:
    """Return the ids in progress in the recorded snapshot; None: not known."""
    note = state.note(IN_PROGRESS)
    if note is None or note["write_pointer"] != record.snapshot_write_pointer:
        return None
    return InProgressThen(note["write_pointer"], frozenset(note["pointers"]))


def remember_snapshot(state: State, ready: Preparation) -> None:
    """Save the facts for checking the next snapshot (rule S13), and withdraw a boundary that this one refutes.

    The invalid list is saved with the ids. Call it inside the state's transaction, with those.
    """
    usable, claim = ready.tx.usable, state.claim()
    if usable is None:
        return
    state.save_note(DECIDED, ready.decided._asdict())
    pointers = sorted(usable.open_pointers)
    state.save_note(IN_PROGRESS, {"write_pointer": usable.write_pointer, "pointers": pointers})
    if ready.speaks_against(claim):
        state.save_claim(None)


def claim_in_force(deps: Deps, ready: Preparation) -> Claim | None:
    """Return the claim in force: not of another store, nor by a clock set back since, nor with a lifetime raised since.

    Raises:
        StateError: the state could not be read.
    """
    claim = deps.state.claim()
    if claim is None or ready.first_contact or ready.speaks_against(claim):
        return None
    now_ms, evidence = deps.clock.now_ms(), deps.state.evidence()
    return claim if boundary.in_force(claim, evidence, now_ms, deps.terms.lifetime) else None


def obstacles(deps: Deps, ready: Preparation) -> list[str]:
    """Why nothing can be claimed, whatever the evidence."""
    found = list(deps.store.obstacles())
    if ready.first_contact:
        found.append("this store, with these transactions, has not been adopted")
    if not deps.terms.lifetime_known:
        found.append(
            "transactions.max_lifetime_seconds is not set, so it is not known how long a transaction may write; "
            "set it to what the servers enforce (data.tx.max.lifetime)"
        )
    if ready.tx.usable is None:
        found.append(ready.tx.message)
    return found


def _known_store(state: State, store: Reads, token_hex: Callable[[int], str]) -> tuple[StoreRecord, GuardNote | None]:
    """Return the saved record of the store. One that is not the one remembered is a first contact."""
    record, identity = state.store(), store.identity()
    if record is None:
        record = StoreRecord.first_contact(identity, token_hex)
        state.save_store(record)
    note = guards.check_store(record, identity)
    if note is None:
        return guards.check_lineage(state, store, record)
    return StoreRecord(mark=guards.successor_mark(record.mark, identity), identity=identity), note


def _knows_none(state: State) -> bool:
    record = state.store()
    return (record is None or record.adopted_ms is None) and state.note(RESTORED) is None

"""The dependencies of a janitor, and the preparation of its runs and queries.

``janitor/app`` creates ``Deps`` once in a process; queries, decisions and runs keep nothing else. ``prepare`` reads the
clocks, the store's record and the snapshot, and runs the guards.

A preparation changes neither the store nor the state, with two exceptions. An unknown store gets a mark, so that a plan
made now is recognized when it is applied. If the store was restored from a backup, its adoption and evidence are
withdrawn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

from janitor import boundary
from janitor.archive.writer import ParquetArchive
from janitor.report import Observer, UnrecognizedKey, ignore_progress
from janitor.rules.policy import Hold
from janitor.run import guards
from janitor.run.guards import LastInProgress
from janitor.state.base import ProvenBoundary, RunRecord, State, StoreRecord
from janitor.state.figures import GuardNote, KeptFigures
from janitor.state.records import RESTORED, Mode, Note
from janitor.sweep import transactions as txstate
from janitor.sweep.consumers import ConsumerHolds, ProcessedRows
from janitor.sweep.executor import never
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import NO_RUN, PassKind, PlanLimits, Preparation, Run, Terms, never_created_empty
from janitor.sweep.sweep import Division, Threads
from janitor.sweep.transactions import DECIDED, InvalidListChange, TransactionView, update_decided
from tms_core.clock import Clock
from tms_core.consumers.positions import Floor, Positions
from tms_core.errors import StateBusy
from tms_core.tables.base import MetadataReads, Reads, Store
from tms_core.tables.lease import Lease
from tms_core.tables.read_only import read_only, read_only_error
from tms_core.tables.recently_set import RecentlySet
from tms_core.tables.record import recorded_state, recorded_transactions
from tms_core.tables.side import Expiries, SideTable
from tms_core.topic import TopicId, TopicMetadata, readable_topics
from tms_core.transaction.source.source import SnapshotSource

logger = logging.getLogger(__name__)


class GuardedObserver:
    """An observer whose errors do not affect a run (invariant S15): an error is logged, and the observer is not called
    again.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __call__(self, phase: str, topic: TopicId | None, rows: int) -> None:
        try:
            self._observer(phase, topic, rows)
        # Catch everything: an error of the progress display must not stop a deletion halfway.
        except Exception:
            logger.exception("the progress display failed; the run continues without it")
            self._observer = ignore_progress


#: The number of logged rows and topics that a process remembers.
REMEMBERED_KEYS = 10_000


class UnknownRowLog:
    """A log of unrecognized rows (rules L0 and L1) that names a row again only after it has forgotten the row."""

    def __init__(self) -> None:
        self._named: RecentlySet[UnrecognizedKey | TopicId, None] = RecentlySet(REMEMBERED_KEYS)

    def name(self, outcome: Outcome, metadata: MetadataReads) -> None:
        """Log new unrecognized rows and unknown topics of a pass; skip topics created after the pass started.

        Args:
            metadata: the current metadata table.
        """
        unknown = outcome.unknown - self._named.keys()
        if unknown:
            # One call for all topics, since a run saves its heartbeat only between calls (invariant S10).
            prefixes = {topic.prefix for topic in unknown}
            unknown -= {found.topic for found in readable_topics(row for row in metadata.rows() if row[0] in prefixes)}
        for found in outcome.unrecognized:
            if found not in self._named:
                logger.warning("skipped a row of the %s table with an unrecognized key: %s", *found)
            self._named[found] = None
        for topic in sorted(unknown):
            logger.warning("skipped rows of topic %s, which has no readable metadata", topic)
            self._named[topic] = None


class Truncator(SnapshotSource, Protocol):
    """A transaction manager: in this process, or the client of another process."""

    def truncate_invalid(self, transaction_ids: Collection[int], /) -> bool:
        """Remove ids from the invalid list (Tephra's ``truncateInvalidTx``); return whether the list had any of them.

        Raises:
            TmsError: the ids were not removed, or the outcome is unknown.
        """
        ...


class Feedback(NamedTuple):
    """The receiver of proven ids (:mod:`janitor.run.feedback`).

    Attributes:
        manager: the transaction manager with the invalid list.
        participants: all participants in its transactions (``janitor.boundary.participants``).
    """

    manager: Truncator
    participants: Collection[str]


def ignore_restored(_: TopicId) -> None:
    """Do nothing: no other code caches the rows of a topic."""


@dataclass(frozen=True, slots=True)
class Deps:
    """The dependencies of a janitor of one store.

    Attributes:
        store: the store; for queries a clone of it, or a read-only store.
        state: its state.
        source: the source of transaction snapshots; None if the settings have none.
        clock: the clock.
        terms: the settings.
        token_hex: returns random bytes as hex (``secrets.token_hex``).
        division: the parts of the store in a pass, and the threads or tasks that run its steps.
        observer: receives progress; after an error it is not called again, and the run continues (invariant S15).
        is_stopping: returns whether to stop before the next page or batch.
        unknown_row_log: the log of unrecognized rows; shared within a process.
        side: the side table with own TTLs of messages (L6), consumers and claims; None if it does not exist.
        created_empty: returns whether a topic was created without rows, so that it is not held.
        lease: the lease of runs; None if no other process can write.
        archive: archives rows before their deletion; None: no archive.
        feedback: the transaction manager that receives proven ids; None: no ids are removed.
        restored: called with each topic into which archived rows were restored.
        opened_bytes: the size of the store on disk before it was opened for writing; None: read its present size.
    """

    store: Reads
    state: State
    source: SnapshotSource | None
    clock: Clock
    terms: Terms
    token_hex: Callable[[int], str]
    division: Division = field(default_factory=Threads)
    observer: Observer = ignore_progress
    is_stopping: Callable[[], bool] = never
    unknown_row_log: UnknownRowLog = field(default_factory=UnknownRowLog)
    side: SideTable | None = None
    created_empty: Callable[[TopicMetadata], bool] = never_created_empty
    lease: Lease | None = None
    archive: ParquetArchive | None = None
    feedback: Feedback | None = None
    restored: Callable[[TopicId], None] = ignore_restored
    opened_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.observer, GuardedObserver):
            object.__setattr__(self, "observer", GuardedObserver(self.observer))

    @property
    def floor(self) -> Floor | None:
        """Return the hold on messages that registered consumers have not read; None: there is no hold."""
        seconds = self.terms.consumer_hold_seconds
        if self.side is None or seconds is None:
            return None
        return Floor(Positions(self.side), read_only(self.store), seconds)

    def writable_store(self) -> Store:
        """Return the store for writing; queries never call this (invariant S5).

        Raises:
            StoreError: the store was opened read-only.
        """
        if not isinstance(self.store, Store):
            raise read_only_error()
        return self.store

    def check_lease(self) -> None:
        """Check that this process still holds the lease.

        Raises:
            LeaseLost: another process has it.
        """
        if self.lease is not None:
            self.lease.check()

    @contextmanager
    def as_holder(self) -> Iterator[None]:
        """Convert ``StateBusy`` in the block into ``LeaseLost``, if the lease is lost.

        Raises:
            LeaseLost: another process has the lease and the state.
        """
        try:
            yield
        except StateBusy:
            self.check_lease()
            raise


# -- the common start of runs and queries -----------------------------------------------------------------------------


#: The note with the write pointer of the last used snapshot, and the ids in progress in it.
IN_PROGRESS: KeptFigures[LastInProgress | None] = KeptFigures(Note.IN_PROGRESS, LastInProgress, None)


def prepare(deps: Deps, at_ms: int | None = None) -> Preparation:
    """Read the basis of all decisions, besides the tables.

    Args:
        at_ms: evaluate the rules at this time instead of now; then the clock is not checked.

    Raises:
        StoreError, StateError: the store or the state could not be read.
    """
    state, source, clock, terms = deps.state, deps.source, deps.clock, deps.terms
    allowance_ms = terms.lifetime.allowance_ms
    now = guards.read_clocks(clock)
    measured = guards.elapsed_clock(state.anchor(), now)
    clock_note = guards.check_clocks(state, now, allowance_ms) if at_ms is None else None
    if at_ms is not None:
        # Advance both clocks to that time; otherwise the future time itself would look like a jump.
        later_ms = at_ms - now.wall_ms
        now = replace(now, wall_ms=at_ms, monotonic_ms=now.monotonic_ms + later_ms)
        measured = replace(measured, wall_ms=measured.wall_ms + later_ms, monotonic_ms=measured.monotonic_ms + later_ms)
    # S13: check the store before any use of the state's records, which must not be applied to another store.
    record, store_note = _load_store_record(state, deps.store, deps.token_hex)
    # S13: read the record before the snapshot. A server updates the record at any time, and a record newer than the
    # snapshot would look like another transaction system.
    recorded = recorded_transactions(deps.side) if deps.side is not None else None
    state_note = guards.check_state(recorded_state(deps.side), record) if deps.side is not None else None
    read = partial(
        txstate.refresh,
        source,
        interval_seconds=terms.snapshot_interval_seconds,
        allowance_ms=allowance_ms,
        is_required=terms.is_snapshot_required,
    )
    tx = read(now.wall_ms)
    if at_ms is not None and tx.usable is None:
        # No snapshot is fresh at a future time: use the snapshot that is fresh now.
        tx = read(clock.now_ms())
    ids, system_note = InvalidListChange(now.wall_ms), None
    if (usable := tx.usable) is not None:
        known = state.known_ids(now.wall_ms, terms.lifetime.window_end_ms(0))
        ids = txstate.observe(known, usable.invalid, now.wall_ms)
        system_note = guards.check_transaction_system(record, usable)
        system_note = system_note or guards.check_history(load_last_in_progress(state, record), usable, known, ids.new)
        system_note = system_note or guards.check_recorded(recorded, tx)
        if system_note is not None and usable.timestamp_ms < (record.snapshot_timestamp_ms or 0):
            # Probably an older snapshot of the same system, because the last used snapshot was removed.
            tx, ids, system_note = txstate.reject_older(tx), InvalidListChange(now.wall_ms), None
    unknown = _has_no_adopted_store(state) and state_note is None and system_note is None
    notes = [note for note in (clock_note, store_note or state_note, system_note) if note is not None]
    decided = update_decided(now.wall_ms, DECIDED.read(state), tx.usable, terms.lifetime)
    return Preparation(now, measured, record, unknown, tx, ids, notes, decided, boundary.refutation(state))


def make_run(
    deps: Deps,
    ready: Preparation,
    *,
    kind: PassKind,
    patterns: tuple[str, ...] = (),
    label: Hold | None = None,
    limits: PlanLimits | None = None,
    mode: Mode | None = None,
) -> Run:
    """Return the data of a pass, before its topics are read.

    Args:
        kind, patterns, label, limits: as for :class:`~janitor.sweep.run.Run`.
        mode: the mode of a run, which starts now; None for a query, which is not a run.

    Raises:
        StateError: the state, or the positions of consumers, could not be read.
    """
    usable, terms, state, floor = ready.tx.usable, deps.terms, deps.state, deps.floor
    processed, record = None, NO_RUN
    if mode is not None:
        now_ms = deps.clock.now_ms()
        record = RunRecord(new_id(now_ms, deps.token_hex), mode, now_ms, heartbeat_ms=now_ms)
    if usable is not None and deps.side is not None:
        processed = ProcessedRows(deps.side, usable, terms.hold_seconds, mode == "apply")
    return Run(
        store=deps.store,
        ready=ready,
        record=record,
        terms=terms,
        transactions=TransactionView(usable, ready.now.wall_ms, terms.lifetime.undecided_ms),
        records={} if label is Hold.FIRST_CONTACT else state.frontiers(),
        kind=kind,
        label=label,
        patterns=patterns,
        limits=limits,
        paused=tuple(pause.pattern for pause in state.pauses()),
        quarantined=guards.find_quarantined(state.strikes(), ready.now.wall_ms),
        expiries=Expiries(deps.side) if deps.side is not None else None,
        consumers=ConsumerHolds(floor) if floor is not None else None,
        processed=processed,
        created_empty=deps.created_empty,
    )


def new_id(started_ms: int, token_hex: Callable[[int], str]) -> str:
    """Return the id of a run that starts now."""
    return f"{started_ms}-{token_hex(4)}"


def load_last_in_progress(state: State, record: StoreRecord) -> LastInProgress | None:
    """Return the ids in progress in the last used snapshot; None if unknown."""
    known = IN_PROGRESS.read(state)
    return known if known is not None and known.write_pointer == record.snapshot_write_pointer else None


def remember_snapshot(state: State, ready: Preparation) -> None:
    """Save the facts to check the next snapshot (invariant S13), and withdraw a boundary that this snapshot refutes.

    Call this inside the state's transaction that also saves the invalid ids.
    """
    usable, proven = ready.tx.usable, state.boundary()
    if usable is None:
        return
    DECIDED.save(state, ready.decided)
    IN_PROGRESS.save(state, LastInProgress(usable.write_pointer, frozenset(usable.open_pointers)))
    if ready.contradicts(proven):
        state.save_boundary(None)


def boundary_in_force(deps: Deps, ready: Preparation) -> ProvenBoundary | None:
    """Return the boundary, if it is of this store and still valid (:func:`janitor.boundary.in_force`).

    Raises:
        StateError: the state could not be read.
    """
    proven = deps.state.boundary()
    if proven is None or ready.first_contact or ready.contradicts(proven):
        return None
    now_ms, evidence = deps.clock.now_ms(), deps.state.evidence()
    return proven if boundary.in_force(proven, evidence, now_ms, deps.terms.lifetime) else None


def obstacles(deps: Deps, ready: Preparation) -> list[str]:
    """Return the reasons why no boundary can be published, independent of evidence."""
    found = list(deps.store.obstacles())
    if ready.first_contact:
        found.append("this store, with these transactions, has not been adopted")
    if not deps.terms.lifetime_known:
        found.append(
            "transactions.max_lifetime_seconds is not set, so the janitor does not know how long a transaction may "
            "write; set it to the limit of the servers (data.tx.max.lifetime)"
        )
    if ready.tx.usable is None:
        found.append(ready.tx.message)
    return found


def _load_store_record(
    state: State, store: Reads, token_hex: Callable[[int], str]
) -> tuple[StoreRecord, GuardNote | None]:
    """Return the saved record of the store, or a new record and a note if it is another store than the saved one."""
    record, identity = state.store(), store.identity()
    if record is None:
        record = StoreRecord.first_contact(identity, token_hex)
        state.save_store(record)
    note = guards.check_store(record, identity)
    if note is None:
        return guards.check_lineage(state, store, record)
    return StoreRecord(mark=guards.successor_mark(record.mark, identity), identity=identity), note


def _has_no_adopted_store(state: State) -> bool:
    record = state.store()
    return (record is None or record.adopted_ms is None) and state.note(RESTORED) is None

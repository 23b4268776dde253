"""The dependencies of a janitor, and the common start of its runs and questions.

``Deps`` is created once, where a process is put together (``janitor/app``), and given to questions, decisions and runs,
which keep nothing else. ``prepare`` then reads the clocks, the store's record and the snapshot, and asks the guards.

A preparation changes neither the store nor the state, with two exceptions. A store that is met for the first time gets
a mark, so that a plan made now is recognized when it is applied. If a store was put back from a backup, all knowledge
about it is withdrawn.
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
from janitor.run.guards import InProgressThen
from janitor.state.base import ProvenBoundary, RunRecord, State, StoreRecord
from janitor.state.figures import GuardNote, KeptFigures
from janitor.state.records import RESTORED, Mode, Note
from janitor.sweep import transactions as txstate
from janitor.sweep.consumers import ConsumerHolds, ProcessedRows
from janitor.sweep.executor import never
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import NO_RUN, PassKind, PlanLimits, Preparation, Run, Terms, none_is_new
from janitor.sweep.sweep import Division, Threads
from janitor.sweep.transactions import DECIDED, InvalidListChange, TransactionView, decided
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
        # Whatever it raises: showing progress must never stop a deletion half-way.
        except Exception:
            logger.exception("showing progress failed; the run continues without it")
            self._observer = ignore_progress


#: How many logged rows and topics a process remembers.
REMEMBERED_KEYS = 10_000


class UnknownRowLog:
    """Logs unrecognized rows (rules L0 and L1), each once in the life of a process, as long as it remembers the row."""

    def __init__(self) -> None:
        self._named: RecentlySet[UnrecognizedKey | TopicId, None] = RecentlySet(REMEMBERED_KEYS)

    def name(self, outcome: Outcome, metadata: MetadataReads) -> None:
        """Log findings of a pass that were not logged before, except topics that were created after the pass started.

        Args:
            metadata: the present metadata table.
        """
        unknown = outcome.unknown - self._named.keys()
        if unknown:
            # One call for all topics: a run sends its heartbeat between calls (invariant S10).
            prefixes = {topic.prefix for topic in unknown}
            unknown -= {found.topic for found in readable_topics(row for row in metadata.rows() if row[0] in prefixes)}
        for found in outcome.unrecognized:
            if found not in self._named:
                logger.warning("left alone: a row of the %s table with an unrecognized key: %s", *found)
            self._named[found] = None
        for topic in sorted(unknown):
            logger.warning("left alone: rows of topic %s, which has no metadata that can be read", topic)
            self._named[topic] = None


class Truncator(SnapshotSource, Protocol):
    """A transaction manager: in this process, or the client of another process."""

    def truncate_invalid(self, transaction_ids: Collection[int], /) -> bool:
        """Remove ids from the invalid list (Tephra's ``truncateInvalidTx``); return whether any was on it.

        Raises:
            TmsError: it was not done, or the outcome is unknown.
        """
        ...


class Feedback(NamedTuple):
    """The receiver of ids that are proven clean (:mod:`janitor.run.feedback`).

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
        store: the store; for questions a clone of it, or a read-only store.
        state: its state.
        source: the source of transaction snapshots; None if it does not exist.
        clock: the clock.
        terms: the settings.
        token_hex: returns random bytes as hex (``secrets.token_hex``).
        division: the parts of the store in a pass, and the threads or tasks that run its steps.
        observer: receives progress; after an error it is not called again, and nothing stops (invariant S15).
        is_stopping: whether to stop before the next page or batch.
        unknown_row_log: the subjects already logged; shared within a process.
        side: has messages with TTLs of their own (L6), consumers and their claims; None: there are none.
        newborn: returns whether a topic is known to be created without rows, so that it is not held.
        lease: the lease of runs; None: no other process can write.
        archive: keeps rows before their deletion; None: no archive.
        feedback: the transaction manager that receives proven ids; None if it does not exist.
        restored: called with each topic that archived rows were written to.
        opened_bytes: the size of the store on its disk before it was opened for writing; None: its size is read.
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
    newborn: Callable[[TopicMetadata], bool] = none_is_new
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
        """Return the store for writing; questions never call this (invariant S5).

        Raises:
            StoreError: it was opened for reading only.
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
        """Convert the state's refusal in the block into a loss of the lease, if the lease is lost.

        Raises:
            LeaseLost: instead of the state's ``StateBusy``.
        """
        try:
            yield
        except StateBusy:
            self.check_lease()
            raise


# -- the common start of runs and queries -----------------------------------------------------------------------------


#: The note with the write pointer of the last used snapshot, and the ids in progress in it.
IN_PROGRESS: KeptFigures[InProgressThen | None] = KeptFigures(Note.IN_PROGRESS, InProgressThen, None)


def prepare(deps: Deps, at_ms: int | None = None) -> Preparation:
    """Read the basis of decisions on rows, besides the tables.

    Args:
        at_ms: judge by another time than the present; then the clock is not checked.

    Raises:
        StoreError, StateError: the store or the state could not be read.
    """
    state, source, clock, terms = deps.state, deps.source, deps.clock, deps.terms
    allowance_ms = terms.lifetime.allowance_ms
    now = guards.read_clocks(clock)
    measured = guards.elapsed_clock(state.anchor(), now)
    clock_note = guards.check_clocks(state, now, allowance_ms) if at_ms is None else None
    if at_ms is not None:
        # Suppose that both clocks run until then; otherwise the future time itself would look like a jump.
        later_ms = at_ms - now.wall_ms
        now = replace(now, wall_ms=at_ms, monotonic_ms=now.monotonic_ms + later_ms)
        measured = replace(measured, wall_ms=measured.wall_ms + later_ms, monotonic_ms=measured.monotonic_ms + later_ms)
    # S13: before the state's records are used: those of another store must not judge this one.
    record, store_note = _known_store(state, deps.store, deps.token_hex)
    # S13: before the snapshot is read. A server records later values at any moment, and a record that is ahead of
    # the snapshot would look like another transaction system.
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
        # No snapshot is fresh at a future time: use the one that is fresh today.
        tx = read(clock.now_ms())
    ids, system_note = InvalidListChange(now.wall_ms), None
    if (usable := tx.usable) is not None:
        known = state.known_ids(now.wall_ms, terms.lifetime.window_end_ms(0))
        ids = txstate.observe(known, usable.invalid, now.wall_ms)
        system_note = guards.check_transaction_system(record, usable)
        system_note = system_note or guards.check_history(in_progress_then(state, record), usable, known, ids.new)
        system_note = system_note or guards.check_recorded(recorded, tx)
        if system_note is not None and usable.timestamp_ms < (record.snapshot_timestamp_ms or 0):
            # Probably an older snapshot of the same system: the snapshot that was used last has been removed.
            tx, ids, system_note = txstate.older(tx), InvalidListChange(now.wall_ms), None
    unknown = _knows_none(state) and state_note is None and system_note is None
    notes = [note for note in (clock_note, store_note or state_note, system_note) if note is not None]
    ended = decided(now.wall_ms, DECIDED.read(state), tx.usable, terms.lifetime)
    return Preparation(now, measured, record, unknown, tx, ids, notes, ended, boundary.refutation(state))


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
    """Return the data that a pass judges by; the topics are not read yet.

    Args:
        kind, patterns, label, limits: as for :class:`~janitor.sweep.run.Run`.
        mode: the mode of a run, which starts now; None: a question, which is not a run.

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
        newborn=deps.newborn,
    )


def new_id(started_ms: int, token_hex: Callable[[int], str]) -> str:
    """Return the id of a run that starts now."""
    return f"{started_ms}-{token_hex(4)}"


def in_progress_then(state: State, record: StoreRecord) -> InProgressThen | None:
    """Return the ids in progress in the recorded snapshot; None: not known."""
    known = IN_PROGRESS.read(state)
    return known if known is not None and known.write_pointer == record.snapshot_write_pointer else None


def remember_snapshot(state: State, ready: Preparation) -> None:
    """Save the facts for the check of the next snapshot (invariant S13), and withdraw a boundary that this snapshot
    refutes.

    The invalid list is saved with the ids; call it inside the state's transaction, with them.
    """
    usable, proven = ready.tx.usable, state.boundary()
    if usable is None:
        return
    DECIDED.save(state, ready.decided)
    IN_PROGRESS.save(state, InProgressThen(usable.write_pointer, frozenset(usable.open_pointers)))
    if ready.contradicts(proven):
        state.save_boundary(None)


def boundary_in_force(deps: Deps, ready: Preparation) -> ProvenBoundary | None:
    """Return the boundary in force: of this store, not dated by a clock set back since, nor with a shorter lifetime.

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
            "transactions.max_lifetime_seconds is not set, so it is not known how long a transaction may write; "
            "set it to what the servers enforce (data.tx.max.lifetime)"
        )
    if ready.tx.usable is None:
        found.append(ready.tx.message)
    return found


def _known_store(state: State, store: Reads, token_hex: Callable[[int], str]) -> tuple[StoreRecord, GuardNote | None]:
    """Return the saved record of the store. Another store than the saved one is a first contact."""
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

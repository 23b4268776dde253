"""A task of a sweep: one step of a pass, in one part of the store, by the rules of the driver's run.

A task gets a serialized :class:`~janitor.sweep.scan.Part`, opens it, and runs the same step as a thread; it returns its
outcome as JSON. Before each batch it checks the same facts as a thread of the driver (invariants S2, S12): the metadata
of the topic, the pauses, the lease, and whether the run continues. Therefore a task may run twice concurrently, or
continue after its run: deletions are idempotent, and a task of a finished run stops at its next batch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from janitor.archive.folder import local_folder
from janitor.archive.writer import ParquetArchive
from janitor.control import wire
from janitor.spark.access import Access
from janitor.spark.session import plain_kind
from janitor.spark.sweep.ranged import RangedReads, RangedStore
from janitor.state import values
from janitor.state.base import State
from janitor.state.hbase.state import HBaseState
from janitor.sweep.executor import DryRun, Executor, Pacer, Permission, RowArchive, StoreExecutor
from janitor.sweep.findings import NOTHING_DONE, Done, Due, Finding, Invalid
from janitor.sweep.outcome import Ledger, Outcome
from janitor.sweep.run import Run
from janitor.sweep.scan import Part
from janitor.sweep.sweep import run_step
from janitor.sweep.transactions import TransactionView
from tms_core.clock import Clock, SystemClock
from tms_core.errors import Interrupted, LeaseLost, StateError, StoreError
from tms_core.tables.base import ALL_KEYS, KeyRange, Reads, Store
from tms_core.tables.compaction import DeletedRanges
from tms_core.tables.lease import Lease, LeaseRecord
from tms_core.tables.read_only import read_only

#: The maximum number of archive files of an attempt; each attempt has a separate range of numbers.
FILES_PER_ATTEMPT = 100_000
#: The maximum number of attempts of a task; Spark makes four by default.
ATTEMPTS = 16


class TaskEnvironment(Protocol):
    """The environment of a task."""

    def reading(self, part: Part) -> AbstractContextManager[tuple[Reads, Reads]]:
        """Return a part of the store and the whole store, without methods that write."""
        ...

    def writing(self, part: Part) -> AbstractContextManager[tuple[Store, Store, State]]:
        """Return a part of the store and the whole store for writing, and the state of the run."""
        ...

    def archive(self, run_id: str, transactions: TransactionView, first: int) -> RowArchive | None:
        """Return the archive for rows before their deletion; None without an archive."""
        ...

    @property
    def clock(self) -> Clock: ...


@dataclass(frozen=True, slots=True)
class StoreEnvironment:
    """The environment with the store in the settings."""

    access: Access

    @contextmanager
    def reading(self, part: Part) -> Iterator[tuple[Reads, Reads]]:
        if self.access.is_leveldb:
            with self.access.reading() as store:
                yield RangedReads(store, *([each] for each in part.within)), store
        else:
            with self.access.hbase() as store:
                yield read_only(rows_of(part, store.part(part.salt or 0))), read_only(store)

    @contextmanager
    def writing(self, part: Part) -> Iterator[tuple[Store, Store, State]]:
        with self.access.hbase() as store, HBaseState(self.access.settings.storage.hbase) as state:
            yield rows_of(part, store.part(part.salt or 0)), store, state

    def archive(self, run_id: str, transactions: TransactionView, first: int) -> RowArchive | None:
        settings = self.access.settings.janitor.archive
        if not settings.enabled:
            return None
        return ParquetArchive(local_folder(settings.path), self.clock).begin(run_id, transactions, first)

    @property
    def clock(self) -> Clock:
        return SystemClock()


def rows_of(part: Part, salted: Store) -> Store:
    """Return the rows of a part, as ranges of the rows of its salt."""
    if part.within == (ALL_KEYS, ALL_KEYS):
        return salted
    return RangedStore(salted, *([each] for each in part.within))


class FollowedLease(Lease):
    """The lease of a run in its tasks, which check the lease but never renew it.

    Args:
        state: the state with the lease and the run.
        run: the run of the task; ``run.lease`` is the lease of its driver.
    """

    def __init__(self, state: State, run: Run, clock: Clock) -> None:
        super().__init__(state, run.lease.holder if run.lease else "", 1, clock)
        self._state = state
        self._run = run

    def renew_if_due(self) -> None:
        """Do nothing: the driver renews the lease."""

    def check(self) -> None:
        """Check that the run continues under the same lease.

        Raises:
            LeaseLost: the run has finished, or its lease was lost.
        """
        expected_lease = self._run.lease
        if expected_lease is not None:
            present = LeaseRecord.parse(self._state.lease())
            if present is None or (present.holder, present.fence) != (expected_lease.holder, expected_lease.fence):
                raise LeaseLost("the lease of this task's run was lost; another run continues the work.")
        record = self._state.run(self._run.id)
        if record is None or record.finished_ms is not None:
            raise LeaseLost("the run of this task has finished; the next run continues the work.")


class Finder(DryRun):
    """The executor of a task that only searches: it returns ranges with findings to the driver."""

    def apply(self, finding: Finding) -> Done:
        match finding:
            case Due(hold=None):
                keys = finding.batch.keys
                return Done(keys, found=KeyRange(keys[0], keys[-1] + b"\x00"))
            case Invalid():
                # Do not return the cells: the driver inverts and counts them.
                return Done(found=KeyRange(finding.cells[0].key, finding.cells[-1].key + b"\x00"))
            case _:
                return NOTHING_DONE


def perform(environment: TaskEnvironment, part: Part, attempt: int) -> Outcome:
    """Run one task.

    Args:
        part: the serialized part.
        attempt: the number of earlier attempts.

    Raises:
        StoreError: the store could not be read; the error names the part.
    """
    try:
        if part.is_read_only or part.run.mode == "plan":
            with environment.reading(part) as (store, whole):
                return _take(part, store, whole, Finder() if part.is_read_only else DryRun())
        return _sweep(environment, part, attempt)
    except StoreError as error:
        message = f"the task for {part} lost its store in the step {part.step}: {error.message}"
        raise plain_kind(type(error))(message, error.hint) from error


def _sweep(environment: TaskEnvironment, part: Part, attempt: int) -> Outcome:
    run = part.run
    with environment.writing(part) as (store, whole, state):
        allowed = Permission(state, FollowedLease(state, run, environment.clock), environment.clock, run.id)
        snapshot = run.transactions.snapshot
        ledger = Ledger(state, environment.clock, run.id, None if snapshot is None else snapshot.timestamp_ms)
        first = (part.number * ATTEMPTS + attempt % ATTEMPTS) * FILES_PER_ATTEMPT + 1
        archive = environment.archive(run.id, run.transactions, first)
        pacer = Pacer(run.terms.rows_per_second, environment.clock, allowed.keep_alive)
        executor = StoreExecutor(whole.metadata, allowed, pacer, ledger, archive)
        before = Counter(whole.calls)
        outcome = _take(part, store, whole, executor)
        if outcome.ended is None:
            _finish(store, allowed, executor.deleted, outcome)
        outcome.calls = whole.calls - before
        return outcome


def _take(part: Part, store: Reads, whole: Reads, executor: Executor) -> Outcome:
    """Run the part's step with the opened resources."""
    before, outcome = Counter(whole.calls), Outcome()
    opened = replace(part, run=replace(part.run, store=whole, reread_topics=set(part.run.reread_topics)))
    for _ in run_step(opened.open(store, executor), outcome):
        """Only the driver shows progress."""
    if outcome.ended is not None and not isinstance(outcome.ended, Interrupted | StateError):
        raise outcome.ended
    outcome.calls = whole.calls - before
    return outcome


def _finish(part: Store, allowed: Permission, deleted: DeletedRanges, outcome: Outcome) -> None:
    """Sync the changes and compact the ranges of this task's deletions."""
    part.sync()
    outcome.compact(deleted, allowed.keep_alive)


def pack(outcome: Outcome) -> str:
    """Return an outcome as JSON, with the error that stopped it."""
    ended = outcome.ended
    error = wire.pack_error(ended) if isinstance(ended, Interrupted | StateError) else None
    return json.dumps({"outcome": values.pack(replace(outcome, ended=None)), "ended": error})


def unpack(text: str) -> Outcome:
    """Read the result of :func:`pack`."""
    found = json.loads(text)
    outcome: Outcome = values.unpack(Outcome, found["outcome"])
    outcome.ended = None if found["ended"] is None else wire.read_error(found["ended"])
    return outcome

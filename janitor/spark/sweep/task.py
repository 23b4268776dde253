"""What one task of a sweep does: one step of a pass, in one part of the store, under the law of the driver's run.

A task gets what the pass knows (:class:`~janitor.sweep.context.RunContext`) and runs the same step in its part as a
thread would; its outcome goes back. Before each batch it reads again what a driver's thread would (rules S2, S12): the
topic's metadata, the pauses, the lease and whether the run still goes on. So a task may run twice at once, or go on
after its run is over: deletes are the same when they are repeated, and a *zombie* stops at its next batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from janitor.archive.folder import local_folder
from janitor.archive.writer import ParquetArchive
from janitor.spark.access import Access
from janitor.spark.session import plain_kind
from janitor.spark.sweep.messages import Run, TaskResult, TaskShare, TaskSpec
from janitor.spark.sweep.ranged import RangedReads
from janitor.state.base import State
from janitor.state.hbase.state import HBaseState
from janitor.sweep import permission
from janitor.sweep.act import Act, Keeper, Preview, Sweep
from janitor.sweep.compaction import DeletedRanges
from janitor.sweep.findings import NOTHING_DONE, Counted, Done, Due, Finding, Invalid, Read
from janitor.sweep.ledger import Ledger
from janitor.sweep.outcome import Outcome
from janitor.sweep.permission import Pacer, Permission
from janitor.sweep.scan import Part
from janitor.sweep.sweep import StepJob, run_step
from janitor.sweep.transactions import TransactionView
from tms_core.clock import Clock, SystemClock
from tms_core.errors import Interrupted, LeaseLost, StateError, StoreError
from tms_core.tables.base import KeyRange, Reads, Store
from tms_core.tables.lease import Lease, LeaseRecord
from tms_core.tables.read_only import read_only

#: Archive files that one attempt of one task may write; each has numbers of its own.
FILES_PER_ATTEMPT = 100_000
#: Attempts of one task; Spark makes four by default.
ATTEMPTS = 16


class Ground(Protocol):
    """What a task stands on."""

    def reading(self, share: TaskShare) -> AbstractContextManager[tuple[Reads, Reads]]:
        """Return a part and the whole of the store, with nothing that could write."""
        ...

    def writing(self, share: TaskShare) -> AbstractContextManager[tuple[Store, Store, State]]:
        """Return a part and the whole of the store, to be written, and the state of the run."""
        ...

    def archive(self, run_id: str, transactions: TransactionView, first: int) -> Keeper | None:
        """Return where rows go before they are deleted; None for nowhere."""
        ...

    @property
    def clock(self) -> Clock: ...


@dataclass(frozen=True, slots=True)
class StoreGround:
    """The store that settings name."""

    access: Access

    @contextmanager
    def reading(self, share: TaskShare) -> Iterator[tuple[Reads, Reads]]:
        if self.access.is_leveldb:
            with self.access.reading() as store:
                yield RangedReads(store, [share.messages], [share.payloads]), store
        else:
            with self.access.hbase() as store:
                yield read_only(store.part(share.salt or 0)), read_only(store)

    @contextmanager
    def writing(self, share: TaskShare) -> Iterator[tuple[Store, Store, State]]:
        with self.access.hbase() as store, HBaseState.configured(self.access.settings.storage.hbase) as state:
            yield store.part(share.salt or 0), store, state

    def archive(self, run_id: str, transactions: TransactionView, first: int) -> Keeper | None:
        wanted = self.access.settings.janitor.archive
        if not wanted.enabled:
            return None
        return ParquetArchive(local_folder(wanted.path), self.clock).begin(run_id, transactions, first)

    @property
    def clock(self) -> Clock:
        return SystemClock()


class FollowedLease(Lease):
    """The lease of a run as its tasks see it: they look whether it is still held, and never renew it.

    Args:
        state: where the lease and the run are.
        run: whose task this is.
    """

    def __init__(self, state: State, run: Run, clock: Clock) -> None:
        super().__init__(state, run.holder, 1, clock)
        self._state = state
        self._run = run

    def renew_if_due(self) -> None:
        """The driver does."""

    def check(self) -> None:
        """Look whether the run still goes on, under the same lease.

        Raises:
            LeaseLost: it does not.
        """
        record = LeaseRecord.parse(self._state.lease()) if self._run.holder else None
        if self._run.holder and (
            record is None or (record.holder, record.fence) != (self._run.holder, self._run.fence)
        ):
            raise LeaseLost("the lease of this task's run was lost; another run goes on from there.")
        present = self._state.run(self._run.id)
        if present is None or present.finished_ms is not None:
            raise LeaseLost("the run of this task has ended; the next one goes on from there.")


class Finder:
    """The act of a task that looks for a driver which alone may write: it says where something is to be done."""

    def alive(self) -> None:
        """Spark ends a task that is not wanted any more."""

    def progress(self, read: Read) -> None:
        """Progress is shown by the driver."""

    def apply(self, finding: Finding) -> Done:
        match finding:
            case Due(hold=None):
                return Done(finding.batch.keys, found=_around(finding.batch.keys))
            case Invalid():
                return Done(found=_around([cell.key for cell in finding.cells]))
            case _:
                return NOTHING_DONE

    def pay(self, taken: Counted) -> None:
        """Looking costs nothing."""


def _around(keys: Sequence[bytes]) -> KeyRange | None:
    return KeyRange(keys[0], keys[-1] + b"\x00") if keys else None


def perform(ground: Ground, spec: TaskSpec, share: TaskShare, attempt: int) -> TaskResult:
    """Do one task.

    Args:
        attempt: how many went before this one.

    Raises:
        StoreError: the store could not be read between topics either; names the part.
    """
    try:
        result = _planned(ground, spec, share) if spec.run is None else _swept(ground, spec, spec.run, share, attempt)
    except StoreError as error:
        message = f"the task for {share} lost its store in the step {spec.step}: {error.message}"
        raise plain_kind(type(error))(message, error.hint) from error
    result.again = attempt > 0
    return result


def _planned(ground: Ground, spec: TaskSpec, share: TaskShare) -> TaskResult:
    with ground.reading(share) as (part, whole):
        before = Counter(whole.calls)
        outcome = _step(spec, share, part, whole, Finder() if spec.finds else Preview())
        return TaskResult.of(outcome, whole.calls - before)


def _swept(ground: Ground, spec: TaskSpec, run: Run, share: TaskShare, attempt: int) -> TaskResult:
    with ground.writing(share) as (part, whole, state):
        before = Counter(whole.calls)
        lease = FollowedLease(state, run, ground.clock)
        allowed = Permission(state, lease, ground.clock, run.id, permission.never)
        snapshot = spec.context.transactions.snapshot
        ledger = Ledger(state, ground.clock, run.id, None if snapshot is None else snapshot.timestamp_ms)
        first = (share.number * ATTEMPTS + attempt % ATTEMPTS) * FILES_PER_ATTEMPT + 1
        keeper = ground.archive(run.id, spec.context.transactions, first)
        pacer = Pacer(run.rows_per_second, ground.clock, allowed.alive)
        act = Sweep(whole.metadata, allowed, pacer, ledger, keeper)
        outcome = _step(spec, share, part, whole, act)
        if outcome.ended is None:
            _finish(part, allowed, act.deleted, outcome)
        return TaskResult.of(outcome, whole.calls - before)


def _finish(part: Store, allowed: Permission, deleted: DeletedRanges, outcome: Outcome) -> None:
    """Make durable what was done, and have its space given back: only here it is known where rows were."""
    part.message.sync()
    part.payload.sync()
    try:
        deleted.compact(allowed.alive)
    except Interrupted as error:
        outcome.ended = error
    except StoreError as error:
        outcome.errors.append(
            f"the rows are deleted, but the store could not be compacted, so the disk shows no free space yet: {error}"
        )


def _step(spec: TaskSpec, share: TaskShare, store: Reads, whole: Reads, act: Act) -> Outcome:
    # What dataclasses replace they share, and a task changes its own.
    reread = set(spec.context.reread_topics)
    context = replace(spec.context, metadata=whole.metadata, reread_topics=reread)
    part = Part(store, whole, context, spec.page_rows, act, replans=False)
    job = StepJob(spec.step, part, share.failed, share.since_ms, share.everything, refers=not spec.finds)
    outcome = run_step(job)
    if outcome.ended is not None and not isinstance(outcome.ended, Interrupted | StateError):
        raise outcome.ended
    return outcome

"""What one task of a sweep does: one step of a pass, in one part of the store, under the law of the driver's run.

A task gets what the pass knows (:class:`~janitor.world.World`) and walks its part exactly as a thread of a crew would;
what it counted goes back as an answer. Before each batch it reads again what a driver's thread would (rules S2, S12):
the topic's metadata, the pauses, the lease and whether the run still goes on. So a task may run twice at once, or go on
after its run has ended: deletes are the same whoever repeats them, and a *zombie* ends at its next batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from janitor import permission
from janitor.archive import ParquetArchive
from janitor.archive_folder import local_folder
from janitor.compaction import DeletedRanges
from janitor.crew import StepName
from janitor.inversions import Inversions
from janitor.ledger import Ledger
from janitor.messages import Messages
from janitor.observe import tell_nobody
from janitor.pacing import Pacer
from janitor.payloads import Payloads
from janitor.permission import Permission, Withheld
from janitor.report import DataTable, Tally
from janitor.spark.access import Access
from janitor.spark.errands import Answer, Errand, Run, Share
from janitor.spark.finding import Finder, FoundInversions, FoundPayloads
from janitor.spark.ranged import RangedStore
from janitor.spark.session import plain_kind
from janitor.state.base import State
from janitor.state.hbase import HBaseState
from janitor.sweep import Keeper, Sweep
from janitor.txstate import TransactionView
from janitor.walk import Act, Batch, Moved, Preview, Visit, Walk
from janitor.world import TopicWork
from tms_core.clock import Clock, SystemClock
from tms_core.errors import Interrupted, LeaseLost, StoreError
from tms_core.lease import Lease, LeaseRecord
from tms_core.tables.base import KeyTable, Store
from tms_core.tables.read_only import read_only
from tms_core.topic import TopicId

#: Archive files that one attempt of one task may write; each has numbers of its own.
FILES_PER_ATTEMPT = 100_000
#: Attempts of one task; Spark makes four by default.
ATTEMPTS = 16


class Ground(Protocol):
    """What a task stands on."""

    def reading(self, share: Share) -> AbstractContextManager[tuple[Store, Store]]:
        """A part and the whole of the store, with nothing that could write."""
        ...

    def writing(self, share: Share) -> AbstractContextManager[tuple[Store, Store, State]]:
        """A part and the whole of the store, to be written, and the memory of the run."""
        ...

    def archive(self, run_id: str, transactions: TransactionView, first: int) -> Keeper | None:
        """Where rows go before they are deleted; None for nowhere."""
        ...

    @property
    def clock(self) -> Clock: ...


@dataclass(frozen=True, slots=True)
class StoreGround:
    """The store that settings name."""

    access: Access

    @contextmanager
    def reading(self, share: Share) -> Iterator[tuple[Store, Store]]:
        if self.access.is_leveldb:
            with self.access.reading() as store:
                yield RangedStore(store, [share.messages], [share.payloads]), store
        else:
            with self.access.hbase() as store:
                yield read_only(store.part(share.salt or 0)), read_only(store)

    @contextmanager
    def writing(self, share: Share) -> Iterator[tuple[Store, Store, State]]:
        wanted = self.access.settings.storage.hbase
        with (
            self.access.hbase() as store,
            HBaseState(
                wanted.thrift,
                namespace=wanted.namespace,
                thrift2=wanted.thrift2 or (),
                timeout_seconds=wanted.timeout_seconds,
            ) as state,
        ):
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


class TaskSweep(Sweep):
    """The act of a task; a topic that has moved is left to the driver, who plans it anew.

    Attributes:
        moved: metadata keys of such topics.
    """

    def __init__(
        self, store: Store, permission: Permission, pacer: Pacer, ledger: Ledger, keeper: Keeper | None
    ) -> None:
        super().__init__(store, permission, pacer, ledger, keeper)
        self.moved: set[bytes] = set()

    def delete(self, work: TopicWork, table: KeyTable, batch: Batch) -> list[bytes]:
        try:
            return super().delete(work, table, batch)
        except Moved:
            self.moved.add(work.topic.topic.prefix)
            raise Withheld from None


class TaskWalk(Walk):
    """A walk that counts nothing as staying in a topic that is planned anew."""

    def _visit(self, name: DataTable, table: KeyTable, prefix: bytes, key: bytes, visit: Visit) -> bytes:
        kept = self.tally.kept.copy()
        behind = super()._visit(name, table, prefix, key, visit)
        topic = TopicId.from_prefix(prefix)
        if isinstance(self.act, TaskSweep) and prefix in self.act.moved and topic is not None:
            self.tally.forget_kept(kept, topic, name)
        return behind


def perform(ground: Ground, errand: Errand, share: Share, attempt: int) -> Answer:
    """Do one task.

    Args:
        attempt: how many went before this one.

    Raises:
        StoreError: the store could not be read between topics either; names the part.
    """
    try:
        answer = (
            _planned(ground, errand, share)
            if errand.run is None
            else _swept(ground, errand, errand.run, share, attempt)
        )
    except StoreError as error:
        message = f"the task for {share} lost its store in the step {errand.step}: {error.message}"
        raise plain_kind(type(error))(message, error.hint) from error
    answer.again = attempt > 0
    return answer


def _planned(ground: Ground, errand: Errand, share: Share) -> Answer:
    with ground.reading(share) as (part, whole):
        act = Finder() if errand.finds else Preview()
        answer = _walked(errand, share, part, whole, act)
        answer.found = act.ranges if isinstance(act, Finder) else []
        return answer


def _swept(ground: Ground, errand: Errand, run: Run, share: Share, attempt: int) -> Answer:
    with ground.writing(share) as (part, whole, state):
        lease = FollowedLease(state, run, ground.clock)
        allowed = Permission(state, lease, ground.clock, run.id, permission.never)
        snapshot = errand.world.transactions.snapshot
        ledger = Ledger(state, ground.clock, run.id, None if snapshot is None else snapshot.timestamp_ms)
        first = (share.number * ATTEMPTS + attempt % ATTEMPTS) * FILES_PER_ATTEMPT + 1
        keeper = ground.archive(run.id, errand.world.transactions, first)
        pacer = Pacer(run.rows_per_second, ground.clock, allowed.alive)
        sweep = TaskSweep(whole, allowed, pacer, ledger, keeper)
        answer = _walked(errand, share, part, whole, sweep)
        if answer.interrupted is None:
            _finish(sweep, sweep.deleted, allowed, answer)
        answer.ledger = ledger.entries()
        answer.moved = sorted(sweep.moved)
        answer.withheld = [prefix for prefix in answer.withheld if prefix not in sweep.moved]
        answer.archive_error = None if sweep.archive_error is None else str(sweep.archive_error)
        answer.write_failed = sweep.write_failed
        return answer


def _finish(sweep: Sweep, deleted: DeletedRanges, allowed: Permission, answer: Answer) -> None:
    """Make durable what was done, and have its space given back: only here it is known where rows were."""
    sweep.sync()
    try:
        deleted.compact(allowed.alive)
    except Interrupted as error:
        answer.interrupted = (type(error).__name__, error.message)
    except StoreError as error:
        answer.errors.append(f"space was not given back: {error}")


def _walked(errand: Errand, share: Share, part: Store, whole: Store, act: Act) -> Answer:
    world = replace(errand.world, metadata=whole.metadata)
    # What dataclasses replace they share, and a task changes its own.
    world.reread_topics = set(errand.world.reread_topics)
    before = Counter(whole.calls)
    walk = TaskWalk(part, world, act, Tally(), page_rows=errand.page_rows, observer=tell_nobody, whole=whole)
    walk.failed.update(share.failed)
    walk.withheld |= share.withheld
    interrupted = None
    try:
        if isinstance(act, Finder):
            _look(errand.step, walk, act, share)
        else:
            _step(errand.step, walk, share)
    except Interrupted as error:
        interrupted = (type(error).__name__, error.message)
    answer = Answer.of(walk.tally)
    answer.interrupted = interrupted
    answer.failed = sorted((prefix, why) for prefix, why in walk.failed.items() if prefix not in share.failed)
    answer.withheld = sorted(walk.withheld - share.withheld)
    answer.calls = sorted((whole.calls - before).items())
    return answer


def _step(step: StepName, walk: Walk, share: Share) -> None:
    if step == "message":
        Messages(walk).delete()
    elif step == "invert":
        Inversions(walk, share.since_ms, everything=share.everything).invert()
    else:
        Payloads(walk).delete()


def _look(step: StepName, walk: Walk, finder: Finder, share: Share) -> None:
    if step == "invert":
        FoundInversions(walk, finder, share.since_ms, everything=share.everything).invert()
    else:
        FoundPayloads(walk, finder).delete()

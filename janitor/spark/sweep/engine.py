"""A pass whose jobs are tasks on Spark: planned, guarded, counted and concluded by the engine as any other.

The engine does not change. It prepares, asks its guards, takes each step of a pass in all parts before the next one
starts, and saves what was reached; only the division of the pass is another (:class:`~janitor.sweep.sweep.Division`).
While tasks are at work the driver shows that the run is alive and renews its lease; when that is lost, the tasks are
called back, and those that do not hear it end at their next batch by themselves. There is one task for each share.

Traded: what a task takes is counted when it stops. What an attempt took that was lost is in the ledger without a
number, because each attempt announces where it will delete before it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

from janitor.report import DataTable, Mode
from janitor.rules.policy import Reason, Rule
from janitor.run.deps import Deps
from janitor.run.engine import Engine
from janitor.spark.access import Access
from janitor.spark.session import attended, translated
from janitor.spark.source.parts import cut_evenly
from janitor.spark.sweep.messages import Run, TaskResult, TaskShare, TaskSpec, portable
from janitor.spark.sweep.ranged import NOTHING, RangedReads, RangedStore
from janitor.spark.sweep.task import Ground, perform
from janitor.state.base import LedgerEntry, State
from janitor.sweep.context import RunContext
from janitor.sweep.findings import failed
from janitor.sweep.ledger import LedgerKey, Taken
from janitor.sweep.outcome import Outcome
from janitor.sweep.scan import Part
from janitor.sweep.sweep import REPLANS, STEPS, Divided, Runner, StepJob, ignore_reached, run_step
from tms_core.errors import StoreUnavailable
from tms_core.tables.base import ALL_KEYS, Reads, Store
from tms_core.tables.hbase.store import HBasePart
from tms_core.tables.lease import Lease, LeaseRecord
from tms_core.tables.read_only import read_only_error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)


_STEP_NAMES = {"message": "messages", "invert": "invalid transactions", "payload": "payloads"}


class Sender(Protocol):
    """Has tasks done somewhere."""

    def send(self, spec: TaskSpec, shares: Sequence[TaskShare], alive: Callable[[], None]) -> list[TaskResult]:
        """Have each share done; the answers come in their order.

        Args:
            alive: called now and then while one waits.

        Raises:
            Interrupted: what ``alive`` raised; the tasks were called back.
            StoreError: a task failed as often as it was tried.
        """
        ...


class SparkSender:
    """Has tasks done on Spark, one for each share.

    Args:
        spark: where; a session of the sweep's own, whose jobs are all called back when the run has to end.
        ground: what tasks stand on; goes with them.
    """

    def __init__(self, spark: SparkSession, ground: Ground) -> None:
        self._spark = spark
        self._ground = ground

    def send(self, spec: TaskSpec, shares: Sequence[TaskShare], alive: Callable[[], None]) -> list[TaskResult]:
        kind = "plan" if spec.run is None and not spec.finds else "sweep"
        name = f"{kind}, step {STEPS.index(spec.step) + 1} of {len(STEPS)}: {_STEP_NAMES[spec.step]}"
        return attended(self._spark, partial(self._collect, spec, shares), alive, name=name)

    def _collect(self, spec: TaskSpec, shares: Sequence[TaskShare]) -> list[TaskResult]:
        ground, numbered = self._ground, list(shares)

        def work(batches: Iterator[Any]) -> Iterator[Any]:
            import pyarrow as pa  # noqa: PLC0415
            from pyspark import TaskContext  # noqa: PLC0415

            context = TaskContext.get()
            attempt = context.attemptNumber() if context is not None else 0
            for batch in batches:
                for at in batch.column(0).to_pylist():
                    answer = perform(ground, spec, numbered[at], attempt).pack()
                    yield pa.RecordBatch.from_pydict({"at": [at], "answer": [answer]})

        with translated():
            numbers = self._spark.range(0, len(numbered), 1, len(numbered))
            asked = numbers.mapInArrow(work, "at long, answer string")
            found = {row.at: row.answer for row in asked.collect()}
        return [TaskResult.unpack(found[at]) for at in range(len(numbered))]


#: Cuts a store into shares, each with the part of the driver's own store that stands for it.
Cut = Callable[[Reads], list[tuple[TaskShare, Reads]]]
#: Gives a sender whose tasks look at the store as it is now, as long as the block runs.
Looking = Callable[[], AbstractContextManager[Sender]]


@dataclass(frozen=True, slots=True)
class Tasks:
    """Jobs are tasks: those of a store in HBase in a sweep, and those of any store in a plan.

    Attributes:
        sender: has tasks done.
        cut: cuts the store into shares.
        state: where the lease of a run is.
        lease: of the driver; None where there is none to lose.
        rows_per_second: the limit on deleting; None for none.
    """

    sender: Sender
    cut: Cut
    state: State
    lease: Lease | None
    rows_per_second: float | None

    @contextmanager
    def begin(self, run_id: str, mode: Mode, store: Reads, context: RunContext) -> Iterator[Divided]:
        shares = self.cut(store)
        run = self._run_of(run_id, len(shares)) if mode == "apply" else None
        yield Divided([part for _, part in shares], partial(self._do, [share for share, _ in shares], run))

    def _do(
        self, shares: Sequence[TaskShare], run: Run | None, jobs: Sequence[StepJob]
    ) -> Iterator[tuple[int, Outcome]]:
        """Have a step taken in all parts, and once more in topics that have moved meanwhile (rule S2)."""
        step, context = jobs[0].step, jobs[0].part.context
        outcomes = [Outcome() for _ in jobs]
        due = [share.informed(job) for share, job in zip(shares, jobs, strict=True)]
        if step == "invert" and all(share.since_ms is None for share in due):
            due = []
        narrowed = context
        for _ in range(REPLANS):
            if not due:
                break
            spec = TaskSpec(step, portable(narrowed), run, jobs[0].part.page_rows)
            for share, result in zip(due, self._send(spec, due, jobs[0].part), strict=True):
                outcomes[share.number].moved.clear()
                outcomes[share.number] += result.received
            moved = {share.number: outcomes[share.number].moved for share in due}
            topics = {prefix for prefixes in moved.values() for prefix in prefixes}
            for prefix in topics:
                context.reread(prefix)
            narrowed = replace(context, patterns=tuple(sorted(prefix[:-1].decode() for prefix in topics)))
            due = [share for share in due if moved[share.number]]
        for share in due:
            outcome = outcomes[share.number]
            for prefix in sorted(outcome.moved):
                restless = StoreUnavailable("its metadata keeps changing; left for the next run")
                outcome.add(failed("message" if step == "message" else "payload", prefix, restless))
            outcome.moved.clear()
        ended = next((outcome.ended for outcome in outcomes if outcome.ended is not None), None)
        for outcome in outcomes:
            # A run that has to end says of none of its parts that it was covered.
            outcome.ended = ended
        yield from enumerate(outcomes)

    def _send(self, spec: TaskSpec, shares: Sequence[TaskShare], part: Part) -> list[TaskResult]:
        known = self._announced(spec.run)
        results = self.sender.send(spec, shares, part.act.alive)
        for result in results:
            part.whole.calls.update(dict(result.calls))
        answered = {
            (*key[:4], taken.start)
            for result in results
            for key, taken in (*result.outcome.taken.items(), *result.outcome.unsure)
        }
        # Also where no task says that another one went before it: Spark may have killed one of two that ran at once.
        lost = [entry for about, entry in self._announced(spec.run).items() if about not in known.keys() | answered]
        if lost:
            logger.warning("%d announcements of attempts that were lost go into the ledger without a count", len(lost))
            results[0].outcome.unsure += map(_unsure_of, lost)
        return results

    def _announced(self, run: Run | None) -> dict[tuple[object, ...], LedgerEntry]:
        """What a run has announced so far."""
        own = [entry for entry in self.state.intents() if entry.run_id == run.id] if run is not None else []
        return {(e.topic, e.generation, e.table, e.rule, e.start): e for e in own}

    def _run_of(self, run_id: str, tasks: int) -> Run:
        record = LeaseRecord.parse(self.state.lease()) if self.lease is not None else None
        if record is not None and self.lease is not None and record.fence != self.lease.fence:
            record = None  # It is kept elsewhere, where the driver alone looks after it.
        rate = self.rows_per_second
        # Not all tasks need be at work at once; a rate is a limit, and not a promise.
        share = None if not rate else rate / max(1, tasks)
        return Run(run_id, record.holder if record else "", record.fence if record else 0, share)


def _unsure_of(announced: LedgerEntry) -> tuple[LedgerKey, Taken]:
    """What was announced and of which nothing is known but that."""
    table: DataTable = "message" if announced.table == "message" else "payload"
    policy = (announced.metadata_generation, announced.ttl_seconds, announced.cutoff_ms)
    key = LedgerKey(announced.topic, announced.generation, table, Rule(announced.rule), *policy)
    return key, Taken(announced.at_ms, announced.start, announced.stop, None, None, None)


@dataclass(frozen=True, slots=True)
class GuidedDriver:
    """A driver that alone can write a store, and goes only where tasks have found something to do on a copy.

    A store in LevelDB is one process's. Most of a thorough pass is not deleting but looking: for the pointers of
    invalid transactions in every message row, and for payload rows that have come due among those that have not. So
    tasks look, by the same code that would do it, and the driver, which judges every row anew, goes nowhere else.
    Nothing else can write meanwhile, so what tasks saw is still so.

    Attributes:
        tasks: who does plans, and cuts the store.
        looking: gives a sender of tasks that look; asked once, when they are needed, and held until the pass stops.
    """

    tasks: Tasks
    looking: Looking

    @contextmanager
    def begin(self, run_id: str, mode: Mode, store: Reads, context: RunContext) -> Iterator[Divided]:
        if mode == "plan":
            with self.tasks.begin(run_id, mode, store, context) as divided:
                yield divided
            return
        if not isinstance(store, Store):
            raise read_only_error()
        shares = [share for share, _ in self.tasks.cut(store)]
        with ExitStack() as needed:
            yield Divided(store.parts(), _guided(store, shares, self.looking, needed))


def _guided(store: Store, shares: Sequence[TaskShare], looking: Looking, needed: ExitStack) -> Runner:
    """Does jobs where there is something to do."""
    senders: list[Sender] = []

    def run(jobs: Sequence[StepJob]) -> Iterator[tuple[int, Outcome]]:
        [job] = jobs
        if not _needs_looking(job):
            yield 0, run_step(job)
            return
        if not senders:
            # Not before messages are gone, or tasks would look at those, too.
            senders.append(needed.enter_context(looking()))
        part = job.part
        spec = TaskSpec(job.step, portable(part.context), None, part.page_rows, finds=True)
        seen = Outcome()
        for result in senders[0].send(spec, [share.informed(job) for share in shares], part.act.alive):
            part.whole.calls.update(dict(result.calls))
            seen += result.received
        yield 0, _done_where_found(store, job, seen)

    return run


def _needs_looking(job: StepJob) -> bool:
    """Return whether there may be much to look at; due rows of messages lies in one range of each topic."""
    store = job.part.store
    if job.step == "invert":
        return job.since_ms is not None and store.message.first(b"") is not None
    return job.step == "payload" and store.payload.first(b"") is not None


def _done_where_found(store: Store, job: StepJob, seen: Outcome) -> Outcome:
    """Do a job where tasks have found something.

    What is taken is counted by the driver, who takes it; what stays is counted by the tasks, who saw all of it.
    """
    found = sorted(seen.found)
    ranges = (found, []) if job.step == "invert" else ([], found)
    part = job.part
    there = Part(RangedStore(store, *ranges), part.whole, part.context, part.page_rows, part.act)
    outcome = run_step(replace(job, part=there, failed=job.failed | seen.failed.keys(), reached=ignore_reached))
    total = replace(seen, entries={key: entry for key, entry in seen.entries.items() if key.held is not None}, found=[])
    total += outcome.taking()
    total.keep(Reason.REFERENCED, outcome.kept[Reason.REFERENCED])
    return total


def spark_engine(deps: Deps, *, sender: Sender, cut: Cut, looking: Looking | None = None) -> Engine:
    """Return an engine whose passes are done on Spark.

    Args:
        sender: has tasks done.
        cut: cuts the store into shares.
        looking: of a store that nothing but this process can write: gives a sender of tasks that look at it; None where
            tasks delete.
    """
    tasks = Tasks(sender, cut, deps.state, deps.lease, deps.rows_per_second)
    return Engine(replace(deps, division=tasks if looking is None else GuidedDriver(tasks, looking)))


def cutter(access: Access, partitions: int | None) -> Cut:
    """Cuts the store that settings name: by salt in HBase, by bytes in LevelDB.

    Args:
        partitions: about how many shares of a LevelDB store; None: by its size.
    """

    def cut(store: Reads) -> list[tuple[TaskShare, Reads]]:
        if access.is_leveldb:
            messages, payloads = (cut_evenly(table, ALL_KEYS, partitions) for table in (store.message, store.payload))
            ranges = zip_longest(messages, payloads, fillvalue=NOTHING)
            return [
                (TaskShare(at, None, *both), RangedReads(store, *([one] for one in both)))
                for at, both in enumerate(ranges)
            ]
        parts = [(part.salt, part) for part in store.parts() if isinstance(part, HBasePart)]
        if parts:
            return [(TaskShare(at, salt, ALL_KEYS, ALL_KEYS), part) for at, (salt, part) in enumerate(parts)]
        # The parts of a store for reading only do not tell their salts.
        nothing = RangedReads(store, (), ())
        with access.salted() as salted:
            return [(TaskShare(at, salt, ALL_KEYS, ALL_KEYS), nothing) for at, (salt, _) in enumerate(salted)]

    return cut

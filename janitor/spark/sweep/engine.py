"""A pass whose jobs are tasks on Spark: planned, guarded, counted and concluded by the engine as any other.

The engine does not change. It prepares, asks its guards, takes each step of a pass in all parts before the next one
begins, and saves what was reached; only the division of the pass is another (:class:`~janitor.sweep.sweep.Division`).
While tasks are at work the driver shows that the run is alive and renews its lease; when that is lost, the tasks are
called back, and those that do not hear it end at their next batch by themselves. There is one task for each share.

Traded: what a task takes is counted when it ends. What an attempt took that was lost is in the ledger without a number,
because each attempt announces where it will delete before it does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

from janitor.rules.policy import Reason
from janitor.run.engine import Engine
from janitor.run.prepare import Deps
from janitor.spark.access import Access, spare_collections
from janitor.spark.session import attended, translated
from janitor.spark.source.parts import between, cut_by_counts, cut_evenly
from janitor.spark.sweep.ranged import NOTHING, RangedReads, RangedStore
from janitor.spark.sweep.task import TaskEnvironment, pack, perform, unpack
from janitor.state.base import LedgerEntry, State, TopicCount
from janitor.sweep.executor import Executor
from janitor.sweep.findings import Read, failed
from janitor.sweep.outcome import Outcome, subject_of
from janitor.sweep.run import Run
from janitor.sweep.scan import STEPS, Part, SearchScope
from janitor.sweep.sweep import REPLANS, Event, StepFinished, Threads, Workers, run_step
from tms_core.errors import StoreUnavailable
from tms_core.tables.base import ALL_KEYS, Reads, Store
from tms_core.tables.lease import Lease, LeaseRecord
from tms_core.tables.read_only import read_only_error
from tms_core.topic import TopicId

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)


_STEP_NAMES = {"message": "messages", "invert": "invalid transactions", "payload": "payloads"}


class Sender(Protocol):
    """Has tasks done somewhere."""

    def send(self, parts: Sequence[Part], alive: Callable[[], None]) -> list[Outcome]:
        """Have the step of each part taken by a task; the outcomes come in their order.

        Args:
            alive: called now and then while one waits.

        Raises:
            Interrupted: what ``alive`` raised; the tasks were called back.
            StoreError: a task failed as often as it was tried.
        """
        ...


class SparkSender:
    """Has tasks done on Spark, one for each part.

    Args:
        spark: where; a session of the sweep's own, whose jobs are all called back when the run has to end.
        environment: the resources of tasks; sent with them.
    """

    def __init__(self, spark: SparkSession, environment: TaskEnvironment) -> None:
        self._spark = spark
        self._environment = environment

    def send(self, parts: Sequence[Part], alive: Callable[[], None]) -> list[Outcome]:
        step, finds, run = parts[0].step, parts[0].finds, parts[0].run
        kind = "plan" if run.mode == "plan" and not finds else "sweep"
        name = f"{kind}, step {STEPS.index(step) + 1} of {len(STEPS)}: {_STEP_NAMES[step]}"
        return attended(self._spark, partial(self._collect, list(parts)), alive, name=name)

    def _collect(self, parts: list[Part]) -> list[Outcome]:
        environment = self._environment

        def work(batches: Iterator[Any]) -> Iterator[Any]:
            import pyarrow as pa  # noqa: PLC0415
            from pyspark import TaskContext  # noqa: PLC0415

            context = TaskContext.get()
            attempt = context.attemptNumber() if context is not None else 0
            for batch in batches:
                for at in batch.column(0).to_pylist():
                    answer = pack(perform(environment, parts[at], attempt))
                    yield pa.RecordBatch.from_pydict({"at": [at], "answer": [answer]})
            spare_collections()

        with translated():
            numbers = self._spark.range(0, len(parts), 1, len(parts))
            asked = numbers.mapInArrow(work, "at long, answer string")
            found = {row.at: row.answer for row in asked.collect()}
        return [unpack(found[at]) for at in range(len(parts))]


#: Cuts the store of a run into parts, each with what of the driver's own store stands for it.
Cut = Callable[[Run], list[tuple[Part, Reads]]]
#: Gives a sender whose tasks look at the store as it is now, as long as the block runs.
Looking = Callable[[], AbstractContextManager[Sender]]


class Tasks:
    """A division whose steps are tasks: those of a store in HBase in a sweep, and those of any store in a plan.

    Args:
        sender: has tasks done.
        cut: cuts the store into parts.
        state: where the lease of a run is.
        lease: of the driver; None where there is none to lose.
    """

    def __init__(self, sender: Sender, cut: Cut, state: State, lease: Lease | None) -> None:
        self.cut = cut
        self._sender = sender
        self._state = state
        self._lease = lease

    @contextmanager
    def begin(self, run: Run, executor: Executor) -> Iterator[Workers]:
        found = self.cut(run)
        record = LeaseRecord.parse(self._state.lease()) if self._lease is not None else None
        if record is not None and self._lease is not None and record.fence != self._lease.fence:
            record = None  # It is kept elsewhere, where the driver alone looks after it.
        bound = replace(run, lease=record)
        parts = [replace(part, run=bound, replans=False).open(store, executor) for part, store in found]
        yield _TaskWorkers(self._sender, self._state, parts)


class _TaskWorkers:
    def __init__(self, sender: Sender, state: State, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._sender = sender
        self._state = state

    def take(self, outcomes: Sequence[Outcome]) -> Iterator[Event]:
        """Take a step in all parts, and once more in topics that have moved meanwhile (invariant S2)."""
        run, step = self.parts[0].run, self.parts[0].step
        taken = [Outcome() for _ in self.parts]
        searches = step != "invert" or any(part.search.since_ms is not None for part in self.parts)
        # A task costs more than it takes to see that it would have nothing to do.
        due = [part for part in self.parts if _has_rows(part)] if searches else []
        narrowed = run
        for _ in range(REPLANS):
            if not due:
                break
            for part, outcome in zip(due, self._send(_with_rate(due, narrowed)), strict=True):
                taken[part.number].moved.clear()
                taken[part.number].merge(outcome)
            topics = {prefix for part in due for prefix in taken[part.number].moved}
            for prefix in topics:
                run.reread(prefix)
            narrowed = replace(run, patterns=tuple(sorted(prefix[:-1].decode() for prefix in topics)))
            due = [part for part in due if taken[part.number].moved]
        for part in due:
            outcome = taken[part.number]
            for prefix in sorted(outcome.moved):
                restless = StoreUnavailable("its metadata keeps changing; left for the next run")
                outcome.add(failed("message" if step == "message" else "payload", prefix, restless))
            outcome.moved.clear()
        ended = next((outcome.ended for outcome in taken if outcome.ended is not None), None)
        for part, outcome in zip(self.parts, outcomes, strict=True):
            outcome.merge(taken[part.number])
            # A run that has to end says of none of its parts that it was covered.
            outcome.ended = ended
            yield StepFinished(part, outcome)

    def _send(self, parts: Sequence[Part]) -> list[Outcome]:
        run = self.parts[0].run
        known = self._announced(run)
        found = self._sender.send(parts, self.parts[0].executor.alive)
        for outcome in found:
            run.store.calls.update(outcome.calls)
        answered = {_range_of(entry) for outcome in found for entry in (*outcome.taken.values(), *outcome.unsure)}
        # Also where no task says that another one went before it: Spark may have killed one of two that ran at once.
        lost = [entry for about, entry in self._announced(run).items() if about not in known.keys() | answered]
        if lost:
            logger.warning("%d announcements of attempts that were lost go into the ledger without a count", len(lost))
            found[0].unsure += lost
        return found

    def _announced(self, run: Run) -> Mapping[tuple[object, ...], LedgerEntry]:
        """Return the deletions that a run has announced."""
        own = [entry for entry in self._state.intents() if entry.run_id == run.id] if run.mode == "apply" else []
        return {_range_of(entry): entry for entry in own}


def _range_of(entry: LedgerEntry) -> tuple[object, ...]:
    return (*subject_of(entry)[:4], entry.start)


def _with_rate(parts: Sequence[Part], run: Run) -> list[Part]:
    """Return the parts with equal shares of the run's rate, which is a limit also if few tasks are at work at once."""
    if run.terms.rows_per_second:
        run = replace(run, terms=replace(run.terms, rows_per_second=run.terms.rows_per_second / len(parts)))
    return [replace(part, run=run) for part in parts]


def _has_rows(part: Part) -> bool:
    """Return whether the table of a part's step has rows there."""
    table = part.store.payload if part.step == "payload" else part.store.message
    return table.first(b"") is not None


class GuidedDriver:
    """A driver that alone can write a store, and goes only where tasks have found something to do on a copy.

    A store in LevelDB is one process's. Most of a full pass is not deleting but looking: for the pointers of
    invalid transactions in every message row, and for payload rows that have come due among those that have not. So
    tasks look, by the same code that would do it, and the driver, which judges every row again, goes nowhere else.
    Nothing else can write meanwhile, so what tasks saw is still so.

    Args:
        tasks: who does plans, and cuts the store.
        looking: gives a sender of tasks that look; asked once, when they are needed, and held until the pass ends.
    """

    def __init__(self, tasks: Tasks, looking: Looking) -> None:
        self._tasks = tasks
        self._looking = looking

    @contextmanager
    def begin(self, run: Run, executor: Executor) -> Iterator[Workers]:
        if run.mode == "plan":
            with self._tasks.begin(run, executor) as workers:
                yield workers
            return
        if not isinstance(run.store, Store):
            raise read_only_error()
        with Threads().begin(run, executor) as driver, ExitStack() as needed:
            shares = [replace(part, finds=True) for part, _ in self._tasks.cut(run)]
            yield _GuidedWorkers(driver, run.store, shares, self._looking, needed)


class _GuidedWorkers:
    """Workers that go where there is something to do."""

    def __init__(
        self, driver: Workers, store: Store, shares: Sequence[Part], looking: Looking, needed: ExitStack
    ) -> None:
        self.parts = driver.parts
        self._driver = driver
        self._store = store
        self._shares = shares
        self._looking = looking
        self._needed = needed
        self._sender: Sender | None = None

    def take(self, outcomes: Sequence[Outcome]) -> Iterator[Event]:
        [part], [outcome] = self.parts, outcomes
        if not _needs_looking(part):
            yield from self._driver.take(outcomes)
            return
        if self._sender is None:
            # Not before messages are deleted, or tasks would look at those, too.
            self._sender = self._needed.enter_context(self._looking())
        search = SearchScope(part.search.since_ms, part.search.everything)
        looks = [replace(share, step=part.step, undone=part.undone, search=search) for share in self._shares]
        seen = Outcome()
        for found in self._sender.send(looks, part.executor.alive):
            part.run.store.calls.update(found.calls)
            seen.merge(found)
        yield from self._go(part, seen, outcome)
        yield StepFinished(part, outcome)

    def _go(self, part: Part, seen: Outcome, total: Outcome) -> Iterator[Read]:
        """Take a step where tasks have found something.

        What is deleted is counted by the driver, which deletes it; what stays is counted by the tasks, who saw all of
        it.
        """
        found = sorted(seen.found)
        ranges = (found, []) if part.step == "invert" else ([], found)
        there = replace(part, undone=part.undone | seen.failed.keys())
        done = Outcome()
        for event in run_step(there.open(RangedStore(self._store, *ranges), part.executor), done):
            if isinstance(event, Read):
                yield event
        held = {key: entry for key, entry in seen.entries.items() if key.held is not None}
        total.merge(replace(seen, entries=held, found=[]))
        total.merge(done.taking())
        total.keep(Reason.REFERENCED, done.kept[Reason.REFERENCED])


def _needs_looking(part: Part) -> bool:
    """Return whether there may be much to look at; due rows of messages lies in one range of each topic."""
    if part.step == "invert":
        return part.search.since_ms is not None and part.store.message.first(b"") is not None
    return part.step == "payload" and part.store.payload.first(b"") is not None


def spark_engine(deps: Deps, *, sender: Sender, cut: Cut, looking: Looking | None = None) -> Engine:
    """Return an engine whose passes are done on Spark.

    Args:
        sender: has tasks done.
        cut: cuts the store into parts.
        looking: of a store that nothing but this process can write: gives a sender of tasks that look at it; None where
            tasks delete.
    """
    tasks = Tasks(sender, cut, deps.state, deps.lease)
    return Engine(replace(deps, division=tasks if looking is None else GuidedDriver(tasks, looking)))


def cutter(access: Access, partitions: int | None, counts: Callable[[], Mapping[TopicId, TopicCount]] = dict) -> Cut:
    """Return a function that cuts the store of the settings: by bytes in LevelDB, by salt and counted rows in HBase.

    Args:
        partitions: about how many parts; in HBase at least one for each salt. None: by the store's size.
        counts: returns the counted rows of topics, which tell where to cut a salt in HBase.
    """

    def cut(run: Run) -> list[tuple[Part, Reads]]:
        store = run.store
        if access.is_leveldb:
            messages, payloads = (cut_evenly(table, ALL_KEYS, partitions) for table in (store.message, store.payload))
            both_ranges = zip_longest(messages, payloads, fillvalue=NOTHING)
            return [
                (Part(run, at, None, both), RangedReads(store, *([one] for one in both)))
                for at, both in enumerate(both_ranges)
            ]
        salted = store.parts()
        topics = (work.topic for work in run.topics.values())
        cuts = cut_by_counts(counts(), topics, max(1, len(salted)), partitions)
        ranges = [within for [within] in between([ALL_KEYS], cuts)]
        parts: list[tuple[Part, Reads]] = []
        for share in salted:
            [salt] = share.span.start
            for within in ranges:
                # The same keys in both tables, so that the span of a part says which rows of either table it has.
                cut_out = RangedReads(share, [within], [within]) if cuts else share
                parts.append((Part(run, len(parts), salt, (within, within)), cut_out))
        return parts

    return cut

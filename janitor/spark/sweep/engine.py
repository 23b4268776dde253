"""A pass whose steps are tasks on Spark.

The engine is unchanged: it prepares the run, checks the guards, completes each step in all parts before the next step,
and saves the progress. Only the division of the pass differs (:class:`~janitor.sweep.sweep.Division`): each part has
one task. While tasks run, the driver sends heartbeats and renews its lease. If it loses the lease, it cancels the
tasks; a task that is not cancelled stops before its next batch.

The deletions of a task are counted only when the task finishes. If an attempt is lost, the ledger has its deletions
without a number of rows, because each attempt announces its ranges before it deletes.
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
from janitor.spark.access import Access, freeze_modules
from janitor.spark.session import run_on_spark, translated
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


class Sender(Protocol):
    """A sender of parts to tasks."""

    def send(self, parts: Sequence[Part], keep_alive: Callable[[], None]) -> list[Outcome]:
        """Run the step of each part in a task; return the outcomes in the order of the parts.

        Args:
            keep_alive: called at intervals during the wait.

        Raises:
            Interrupted: ``keep_alive`` raised it; the tasks were cancelled.
            StoreError: a task failed in all its attempts.
        """
        ...


class SparkSender:
    """A sender that runs tasks on Spark, one for each part.

    Args:
        spark: a session of this sweep only, because a stop cancels all its jobs.
        environment: the resources of tasks, which is sent with them.
    """

    def __init__(self, spark: SparkSession, environment: TaskEnvironment) -> None:
        self._spark = spark
        self._environment = environment

    def send(self, parts: Sequence[Part], keep_alive: Callable[[], None]) -> list[Outcome]:
        step, is_read_only, run = parts[0].step, parts[0].is_read_only, parts[0].run
        kind = "plan" if run.mode == "plan" and not is_read_only else "sweep"
        name = f"{kind}, step {STEPS.index(step) + 1} of {len(STEPS)}: {step}"
        return run_on_spark(self._spark, partial(self._collect, list(parts)), keep_alive, name=name)

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
            freeze_modules()

        with translated():
            numbers = self._spark.range(0, len(parts), 1, len(parts))
            answers = numbers.mapInArrow(work, "at long, answer string")
            found = {row.at: row.answer for row in answers.collect()}
        return [unpack(found[at]) for at in range(len(parts))]


#: Cuts the store of a run into parts, with the rows of each part for the driver.
Cut = Callable[[Run], list[tuple[Part, Reads]]]
#: Returns a sender whose tasks read the present contents of the store inside the block.
OpenReading = Callable[[], AbstractContextManager[Sender]]


class Tasks:
    """A division whose steps are tasks: for a store in HBase in a sweep, and for any store in a plan.

    Args:
        sender: runs the tasks.
        cut: cuts the store into parts.
        state: the state with the lease of the run.
        lease: the driver's lease; None if the run needs no lease.
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
            record = None  # the driver alone maintains the record
        bound = replace(run, lease=record)
        parts = [replace(part, run=bound, replans=False).open(store, executor) for part, store in found]
        yield _TaskWorkers(self._sender, self._state, parts)


class _TaskWorkers:
    def __init__(self, sender: Sender, state: State, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._sender = sender
        self._state = state

    def take(self, outcomes: Sequence[Outcome]) -> Iterator[Event]:
        """Run a step in all parts, and again in topics whose metadata changed during the step (invariant S2)."""
        run, step = self.parts[0].run, self.parts[0].step
        totals = [Outcome() for _ in self.parts]
        # A task costs more than a seek for its rows.
        due = [part for part in self.parts if _may_have_work(part)]
        narrowed = run
        for _ in range(REPLANS):
            if not due:
                break
            for part, outcome in zip(due, self._send(_with_rate(due, narrowed)), strict=True):
                totals[part.number].moved.clear()
                totals[part.number].merge(outcome)
            topics = {prefix for part in due for prefix in totals[part.number].moved}
            for prefix in topics:
                run.reread(prefix)
            narrowed = replace(run, patterns=tuple(sorted(prefix[:-1].decode() for prefix in topics)))
            due = [part for part in due if totals[part.number].moved]
        for part in due:
            outcome = totals[part.number]
            for prefix in sorted(outcome.moved):
                error = StoreUnavailable("its metadata keeps changing; the next run tries again")
                outcome.add(failed("message" if step == "message" else "payload", prefix, error))
            outcome.moved.clear()
        ended = next((outcome.ended for outcome in totals if outcome.ended is not None), None)
        for part, outcome in zip(self.parts, outcomes, strict=True):
            outcome.merge(totals[part.number])
            # An interrupted run counts no part as covered.
            outcome.ended = ended
            yield StepFinished(part, outcome)

    def _send(self, parts: Sequence[Part]) -> list[Outcome]:
        run = self.parts[0].run
        known = self._read_announcements(run)
        found = self._sender.send(parts, self.parts[0].executor.keep_alive)
        for outcome in found:
            run.store.calls.update(outcome.calls)
        answered = {_range_of(entry) for outcome in found for entry in (*outcome.deletions.values(), *outcome.unsure)}
        # Include attempts that no task reports: Spark may have killed one of two concurrent attempts.
        lost = [entry for about, entry in self._read_announcements(run).items() if about not in known.keys() | answered]
        if lost:
            logger.warning("added %d announcements of lost attempts to the ledger without a number of rows", len(lost))
            found[0].unsure += lost
        return found

    def _read_announcements(self, run: Run) -> Mapping[tuple[object, ...], LedgerEntry]:
        """Return the deletions that a run has announced."""
        own = [entry for entry in self._state.intents() if entry.run_id == run.id] if run.mode == "apply" else []
        return {_range_of(entry): entry for entry in own}


def _range_of(entry: LedgerEntry) -> tuple[object, ...]:
    return (*subject_of(entry)[:4], entry.start)


def _with_rate(parts: Sequence[Part], run: Run) -> list[Part]:
    """Return the parts with equal shares of the run's rate; the limit holds even if only a few tasks run at once."""
    if run.terms.rows_per_second:
        run = replace(run, terms=replace(run.terms, rows_per_second=run.terms.rows_per_second / len(parts)))
    return [replace(part, run=run) for part in parts]


def _may_have_work(part: Part) -> bool:
    """Return whether the step of a part has rows to read."""
    if part.step == "invert" and part.search.since_ms is None:
        return False
    return part.table("payload" if part.step == "payload" else "message").first(b"") is not None


class GuidedDriver:
    """A driver that writes the store alone, and visits only places where tasks found work on a copy.

    Only one process can open a LevelDB store. Most of a full pass is reading: it searches every message row for the
    pointers of invalid transactions, and the payload table for due rows. Therefore tasks search with the same code that
    would delete, and the driver visits only their findings and checks every row again. No other process can write
    during the pass, so the findings of the tasks stay valid.

    Args:
        tasks: runs plans, and cuts the store.
        open_reading: returns a sender of tasks that read; called once, when needed, and kept until the pass finishes.
    """

    def __init__(self, tasks: Tasks, open_reading: OpenReading) -> None:
        self._tasks = tasks
        self._open_reading = open_reading

    @contextmanager
    def begin(self, run: Run, executor: Executor) -> Iterator[Workers]:
        if run.mode == "plan":
            with self._tasks.begin(run, executor) as workers:
                yield workers
            return
        if not isinstance(run.store, Store):
            raise read_only_error()
        with Threads().begin(run, executor) as driver, ExitStack() as needed:
            shares = [replace(part, is_read_only=True) for part, _ in self._tasks.cut(run)]
            yield _GuidedWorkers(driver, run.store, shares, self._open_reading, needed)


class _GuidedWorkers:
    """Workers that visit only ranges with findings of tasks."""

    def __init__(
        self, driver: Workers, store: Store, shares: Sequence[Part], open_reading: OpenReading, needed: ExitStack
    ) -> None:
        self.parts = driver.parts
        self._driver = driver
        self._store = store
        self._shares = shares
        self._open_reading = open_reading
        self._needed = needed
        self._sender: Sender | None = None

    def take(self, outcomes: Sequence[Outcome]) -> Iterator[Event]:
        [part], [outcome] = self.parts, outcomes
        # Due messages are one range in each topic, so no search is needed.
        if part.step == "message" or not _may_have_work(part):
            yield from self._driver.take(outcomes)
            return
        if self._sender is None:
            # Open it after the deletion of messages, so that the tasks do not read deleted messages.
            self._sender = self._needed.enter_context(self._open_reading())
        search = SearchScope(part.search.since_ms, part.search.everything)
        parts = [replace(share, step=part.step, undone=part.undone, search=search) for share in self._shares]
        task_outcome = Outcome()
        for found in self._sender.send(parts, part.executor.keep_alive):
            part.run.store.calls.update(found.calls)
            task_outcome.merge(found)
        yield from self._apply_findings(part, task_outcome, outcome)
        yield StepFinished(part, outcome)

    def _apply_findings(self, part: Part, task_outcome: Outcome, total: Outcome) -> Iterator[Read]:
        """Run a step in the ranges with findings of tasks.

        The driver counts deletions, because it deletes. The tasks count remaining rows, because they read all rows.
        """
        found = sorted(task_outcome.found)
        ranges = (found, []) if part.step == "invert" else ([], found)
        rest = replace(part, undone=part.undone | task_outcome.failed.keys())
        done = Outcome()
        for event in run_step(rest.open(RangedStore(self._store, *ranges), part.executor), done):
            if isinstance(event, Read):
                yield event
        held_entries = {key: entry for key, entry in task_outcome.entries.items() if key.held is not None}
        total.merge(replace(task_outcome, entries=held_entries, found=[]))
        total.merge(done.without_kept_rows())
        total.keep(Reason.REFERENCED, done.kept[Reason.REFERENCED])


def spark_engine(deps: Deps, *, sender: Sender, cut: Cut, open_reading: OpenReading | None = None) -> Engine:
    """Return an engine whose passes run on Spark.

    Args:
        sender: runs the tasks.
        cut: cuts the store into parts.
        open_reading: returns a sender of tasks that read the store, if only this process can write it; None if tasks
            delete.
    """
    tasks = Tasks(sender, cut, deps.state, deps.lease)
    return Engine(replace(deps, division=tasks if open_reading is None else GuidedDriver(tasks, open_reading)))


def cutter(access: Access, partitions: int | None, counts: Callable[[], Mapping[TopicId, TopicCount]] = dict) -> Cut:
    """Return a function that cuts the configured store: by bytes in LevelDB, by salt and counted rows in HBase.

    Args:
        partitions: the approximate number of parts; in HBase at least one for each salt. None: by the store's size.
        counts: returns the counted rows of topics, which show where to cut a salt in HBase.
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
                # Both tables have the same keys, so the span of a part defines its rows in either table.
                cut_out = RangedReads(share, [within], [within]) if cuts else share
                parts.append((Part(run, len(parts), salt, (within, within)), cut_out))
        return parts

    return cut

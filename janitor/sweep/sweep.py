"""One pass over a store: its steps, in their order, in all parts.

A store in LevelDB is one part. One in HBase has a part for each salt, whose rows lie apart from those of the others,
and most of a sweep's time is spent waiting for servers. So each step of a pass goes through all parts at once, and is
over everywhere before the next one starts: whether a payload is still needed depends on messages of any part.

Messages come first, because a payload is free once its message is gone; inversions after them, because a row that goes
need not be inverted.

In one step in one part what there is is pulled, handed to an act, and counted. Threads of the driver and tasks of Spark
take the same step. Only there are results of findings counted (rule S15), so the numbers of a plan and a run have the
same meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, Protocol

from janitor.boundary.coverage import Round, is_whole
from janitor.report import Mode
from janitor.sweep.act import Act, Moved, NotArchived, Unsure
from janitor.sweep.context import RunContext
from janitor.sweep.deletions import message_ttls, messages, payloads
from janitor.sweep.findings import Failed, Reached, Read, failed
from janitor.sweep.inversions import NOT_COVERED, Covered, inversions
from janitor.sweep.outcome import Outcome
from janitor.sweep.permission import Withheld
from janitor.sweep.scan import Event, Part, Visit
from tms_core.errors import StoreError, TmsError
from tms_core.tables.base import KeyRange, Reads
from tms_core.tables.side import Expiries

StepName = Literal["message", "invert", "payload"]
#: The steps that are taken in every part, in their order.
STEPS: tuple[StepName, ...] = ("message", "invert", "payload")

#: How often a topic is planned anew within one pass before it is left for the next.
REPLANS = 3

#: Told up to which key a step has come, with the outcomes of it until then.
OnReached = Callable[[bytes, Sequence[Outcome]], None]


def ignore_reached(key: bytes, so_far: Sequence[Outcome]) -> None:
    """Ignore how far a step has come."""


@dataclass(frozen=True, slots=True)
class StepJob:
    """One step in one part.

    Attributes:
        failed: metadata keys of topics that former steps have left undone in this part.
        since_ms, everything: the scope of the search for invalid pointers (:func:`~.inversions.inversions`).
        refers: whether the step of the payloads looks for messages that refer to them.
        covered: the part that an earlier run has searched for invalid pointers.
        from_topic: the first topic whose payloads no earlier run has gone through.
        expiries: messages with a ttl of their own, to go through instead of the part; None in the other steps.
        reached: told how far it has come.
    """

    step: StepName
    part: Part
    failed: frozenset[bytes] = frozenset()
    since_ms: int | None = None
    everything: bool = True
    refers: bool = True
    covered: Covered = NOT_COVERED
    from_topic: bytes = b""
    expiries: Expiries | None = None
    reached: OnReached = ignore_reached

    def events(self, undone: set[bytes]) -> Iterator[Event]:
        """What there is to do, in key order; topics that are ``undone`` when they are come to are passed by."""
        if self.expiries is not None:
            return message_ttls(self.part, undone, self.expiries)
        if self.step == "message":
            return messages(self.part, undone)
        if self.step == "invert":
            return inversions(self.part, undone, self.since_ms, everything=self.everything, covered=self.covered)
        return payloads(self.part, undone, refers=self.refers, from_topic=self.from_topic)


#: Does jobs; gives the number of each and its outcome as they end.
Runner = Callable[[Sequence[StepJob]], Iterator[tuple[int, Outcome]]]


class Divided(NamedTuple):
    """The parts of a store in one pass, and the executor of their steps."""

    parts: Sequence[Reads]
    run: Runner


class Division(Protocol):
    """The parts of a store in a pass, and the executor of its steps."""

    def begin(self, run_id: str, mode: Mode, store: Reads, context: RunContext) -> AbstractContextManager[Divided]:
        """Divide one pass; the result works inside the block."""
        ...


@dataclass(frozen=True, slots=True)
class Threads:
    """The parts that the store has, side by side in threads; a lone one in the caller's thread.

    Attributes:
        workers: how many at once.
    """

    workers: int = 1

    @contextmanager
    def begin(self, run_id: str, mode: Mode, store: Reads, context: RunContext) -> Iterator[Divided]:
        yield Divided(store.parts(), self._run)

    def _run(self, jobs: Sequence[StepJob]) -> Iterator[tuple[int, Outcome]]:
        if len(jobs) == 1:
            yield 0, run_step(jobs[0])
            return
        with ThreadPoolExecutor(self.workers, "sweep") as pool:
            futures = {pool.submit(run_step, job): at for at, job in enumerate(jobs)}
            for future in as_completed(futures):
                yield futures[future], future.result()


@dataclass(frozen=True, slots=True)
class Scope:
    """The work of a pass, and how.

    Attributes:
        run_id, mode: whose pass it is.
        store: the whole store.
        context: its context.
        division: its parts, and the executor of the steps.
        page_rows: rows per page, and so per batch.
        expiries: messages with a ttl of their own; None: there are none.
        begin_round: called before anything is searched, with the parts: the round that this pass continues, which
            records covered intervals; None: it proves nothing.
        phase: entered for each step with its name.
    """

    run_id: str
    mode: Mode
    store: Reads
    context: RunContext
    division: Division
    page_rows: int
    expiries: Expiries | None
    begin_round: Callable[[Sequence[Reads]], Round] | None
    phase: Callable[[str], AbstractContextManager[None]]

    def part(self, store: Reads, act: Act) -> Part:
        """Return a part as this pass reads it."""
        planned = self.expiries if self.mode == "plan" else None
        return Part(store, self.store, self.context, self.page_rows, act, planned=planned)


def sweep_store(scope: Scope, act: Act) -> Outcome:
    """Take the steps of a pass; the cause of an early stop is in the outcome, with all work until then."""
    with scope.division.begin(scope.run_id, scope.mode, scope.store, scope.context) as (stores, run):
        parts = [scope.part(store, act) for store in stores]
        outcomes = [Outcome() for _ in parts]
        total, progress = Outcome(), None
        try:
            for step in STEPS:
                with scope.phase(step):
                    if step == "invert" and scope.begin_round is not None:
                        progress = scope.begin_round(stores)
                        progress.record_gaps(stores)
                    _take(step, parts, run, outcomes, progress)
                    if step == "message" and scope.expiries is not None and not _ended(outcomes):
                        total += _take_expired(scope.part(scope.store, act), scope.expiries, outcomes)
                if _ended([*outcomes, total]):
                    break
        except TmsError as error:
            total.ended = error
    for done in outcomes:
        total += done
    return total


def _take(step: StepName, parts: Sequence[Part], run: Runner, outcomes: list[Outcome], progress: Round | None) -> None:
    """Take a step in all parts; their work is added to their outcomes."""
    whole = is_whole([part.store for part in parts])
    jobs = [_job(step, part, done, progress, whole) for part, done in zip(parts, outcomes, strict=True)]
    for at, outcome in run(jobs):
        outcomes[at] += outcome
        if step == "invert" and progress is not None:
            try:
                _record(progress, parts[at].store, outcomes[at])
            except TmsError as error:
                # It ends the pass; what other parts have done meanwhile is still to be counted.
                outcomes[at].ended = outcomes[at].ended or error


def _take_expired(whole: Part, expiries: Expiries, outcomes: Sequence[Outcome]) -> Outcome:
    """Take the step of the messages with a ttl of their own, which may be in any part."""
    undone = frozenset(key for done in outcomes for key in (*done.failed, *done.withheld))
    return run_step(StepJob("message", whole, undone, expiries=expiries))


def _ended(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.ended is not None for outcome in outcomes)


def _job(step: StepName, part: Part, done: Outcome, progress: Round | None, whole: bool) -> StepJob:
    """Return a step in a part, with the present context.

    Args:
        whole: whether the part is the whole store, which a round goes through from its first key to its last.
    """
    job = StepJob(step, part, frozenset(done.failed), part.context.search_since_ms)
    if progress is None or step == "message":
        return job
    if step == "payload":
        if not whole:
            return job
        return replace(job, from_topic=progress.payloads_from, reached=partial(_payloads_reached, progress, done))
    if progress.has_done(part.store):
        return replace(job, since_ms=progress.since_ms, everything=False)
    if not whole:
        return job
    covered = Covered(progress.first_undone(part.store), progress.since_ms)
    return replace(job, covered=covered, reached=partial(_reached, progress, part.store, done))


def _reached(progress: Round, part: Reads, before: Outcome, upto: bytes, so_far: Sequence[Outcome]) -> None:
    """Write down now and then how far a part was searched for invalid pointers (rule S4)."""
    known = (before, *so_far)
    if not progress.is_due() or any(outcome.undone for outcome in known):
        return
    start = progress.first_undone(part)
    if start < upto:
        met = [outcome.untouchable for outcome in known if outcome.untouchable is not None]
        progress.record([KeyRange(start, upto)], min(met, default=None))


def _payloads_reached(progress: Round, before: Outcome, upto: bytes, so_far: Sequence[Outcome]) -> None:
    """Write down up to which topic payloads were gone through."""
    if not any(outcome.failed for outcome in (before, *so_far)):
        progress.payloads_done(upto)


def _record(progress: Round, part: Reads, done: Outcome) -> None:
    """Write down that a part was covered, if all of it was (rule S4)."""
    if not done.undone and not progress.has_done(part):
        covered = KeyRange(progress.first_undone(part), part.span.stop)
        progress.record([covered], done.untouchable)


# -- one step in one part ----------------------------------------------------------------------------------------------


def run_step(job: StepJob) -> Outcome:
    """Take one step in one part; the cause of an early stop is in the outcome, with all work until then."""
    outcome, undone, part = Outcome(), set(job.failed), job.part
    try:
        for event in job.events(undone):
            if not isinstance(event, Visit):
                part.act.alive()
                outcome.add(event)
                if isinstance(event, Reached):
                    job.reached(event.key, (outcome,))
                continue
            found = visit(event, job, outcome)
            undone.update(found.failed, found.withheld, found.moved)
            outcome += found
            if outcome.ended is not None:
                break
        else:
            # However long the last call took: a step that hung in it has not covered the table.
            part.act.alive()
    except Exception as error:  # noqa: BLE001 what was done is kept; the pass raises this again
        outcome.ended = error
    outcome.seeks_spared += part.messages.take_spared() + part.payloads.take_spared()
    return outcome


def visit(found: Visit, job: StepJob, before: Outcome) -> Outcome:
    """Do one topic, again if its metadata moves meanwhile (rule S2).

    Args:
        before: the outcome of the step before this topic.
    """
    outcome, part = Outcome(), job.part
    for _ in range(REPLANS):
        attempt = Outcome()
        try:
            with _left_undone(found, attempt):
                for finding in found.findings():
                    if isinstance(finding, Reached):
                        job.reached(finding.key, (before, outcome, attempt))
                    elif isinstance(finding, Read):
                        attempt.add(finding)
                        part.act.progress(finding)
                    elif (counted := attempt.add(finding, part.act.apply(finding))) is not None:
                        part.act.pay(counted)
        except Moved:
            outcome += attempt.taking()
            if not part.replans:
                outcome.moved.add(found.prefix)
                return outcome
            part.forget()
            part.context.reread(found.prefix)
            if not found.again:
                return outcome
            continue
        outcome += attempt
        return outcome
    message = f"topic {found.prefix[:-1].decode()} keeps changing; left for the next run"
    outcome.add(Failed(found.prefix, found.table, "moved", message))
    return outcome


@contextmanager
def _left_undone(found: Visit, outcome: Outcome) -> Iterator[None]:
    """The cause of an early stop of a topic goes into the outcome.

    Raises:
        Moved: the topic is to be planned anew.
    """
    try:
        yield
    except Moved:
        raise
    except Withheld as reason:
        outcome.withheld.add(found.prefix)
        outcome.archive_error = str(reason) if isinstance(reason, NotArchived) else None
    except Unsure as failure:
        outcome.add_unsure(failure.due, failure.at_ms)
        outcome.add(failed(found.table, found.prefix, failure.error))
    except StoreError as error:
        outcome.add(failed(found.table, found.prefix, error))
    except Exception as error:  # noqa: BLE001 what was done is kept; the pass raises this again
        outcome.ended = error

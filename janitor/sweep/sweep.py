"""One pass over a store: its steps, in their order, in all parts.

A store in LevelDB is one part. One in HBase has a part for each salt, whose rows lie apart from those of the others,
and most of a sweep's time is spent waiting for servers. So each step of a pass goes through all parts at once, and is
over everywhere before the next one begins: whether a payload is still needed depends on messages of any part.

Messages come first, because a payload is free once its message is gone; inversions after them, because a row that goes
need not be inverted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, Protocol

from janitor.boundary.coverage import Round, is_whole
from janitor.law.intervals import Interval
from janitor.report import Mode
from janitor.sweep.context import RunContext
from janitor.sweep.inversions import NOT_COVERED, Covered, inversions
from janitor.sweep.message_ttls import message_ttls
from janitor.sweep.messages import messages
from janitor.sweep.outcome import Outcome
from janitor.sweep.payloads import payloads
from janitor.sweep.scan import Event, OnReached, Part, nothing_reached, run_step
from tms_core.errors import TmsError
from tms_core.tables.base import Store
from tms_core.tables.side import Expiries

#: The steps that are taken in every part, in their order.
StepName = Literal["message", "invert", "payload"]
STEPS: tuple[StepName, ...] = ("message", "invert", "payload")


@dataclass(frozen=True, slots=True)
class Job:
    """One step in one part.

    Attributes:
        failed: metadata keys of topics that former steps have left undone in this part.
        since_ms, everything: what the search for invalid pointers looks at (:func:`~.inversions.inversions`).
        refers: whether the step of the payloads looks for messages that refer to them.
        covered: what an earlier run has searched for invalid pointers.
        from_topic: the first topic whose payloads no earlier run has gone through.
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
    reached: OnReached = nothing_reached

    def events(self, undone: set[bytes]) -> Iterator[Event]:
        if self.step == "message":
            return messages(self.part, undone)
        if self.step == "invert":
            return inversions(self.part, undone, self.since_ms, everything=self.everything, covered=self.covered)
        return payloads(self.part, undone, refers=self.refers, from_topic=self.from_topic)

    def run(self) -> Outcome:
        undone = set(self.failed)
        return run_step(self.events(undone), undone, self.part, self.reached)


#: Does jobs; gives the number of each and its outcome as they end.
Runner = Callable[[Sequence[Job]], Iterator[tuple[int, Outcome]]]


class Divided(NamedTuple):
    """The parts of a store that one pass goes over, and who does the jobs in them."""

    parts: Sequence[Store]
    run: Runner


class Division(Protocol):
    """In which parts a pass goes over a store, and who does its jobs."""

    def begin(self, run_id: str, mode: Mode, store: Store, context: RunContext) -> AbstractContextManager[Divided]:
        """Divide one pass; what is given out works as long as the block runs."""
        ...


@dataclass(frozen=True, slots=True)
class Threads:
    """The parts that the store has, side by side in threads; a lone one in the caller's thread.

    Attributes:
        workers: how many at once.
    """

    workers: int = 1

    @contextmanager
    def begin(self, run_id: str, mode: Mode, store: Store, context: RunContext) -> Iterator[Divided]:
        yield Divided(store.parts(), self._run)

    def _run(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Outcome]]:
        if len(jobs) == 1:
            yield 0, jobs[0].run()
            return
        with ThreadPoolExecutor(self.workers, "sweep") as pool:
            futures = {pool.submit(job.run): at for at, job in enumerate(jobs)}
            for future in as_completed(futures):
                yield futures[future], future.result()


@dataclass(frozen=True, slots=True)
class Over:
    """What a pass goes over.

    Attributes:
        whole: the whole store, for what may be in any part.
        parts: what is swept side by side.
        expiries: messages with a ttl of their own; None: there are none.
        begin_round: called before anything is searched, with the parts: the round this pass goes on with, which is told
            of those that were covered; None: it proves nothing.
        phase: entered for each step with its name.
    """

    whole: Part
    parts: Sequence[Part]
    expiries: Expiries | None
    begin_round: Callable[[Sequence[Store]], Round] | None
    phase: Callable[[str], AbstractContextManager[None]]


def sweep_store(over: Over, run: Runner) -> Outcome:
    """Take the steps of a pass; what ends it early is in the outcome, with all that was done until then."""
    outcomes = [Outcome() for _ in over.parts]
    total, progress = Outcome(), None
    try:
        for step in STEPS:
            with over.phase(step):
                if step == "invert" and over.begin_round is not None:
                    stores = [part.store for part in over.parts]
                    progress = over.begin_round(stores)
                    progress.record_gaps(stores)
                total += _take(step, over, run, outcomes, progress)
            if _ended([*outcomes, total]):
                break
    except TmsError as error:
        total.ended = error
    for done in outcomes:
        total += done
    return total


def _take(step: StepName, over: Over, run: Runner, outcomes: list[Outcome], progress: Round | None) -> Outcome:
    """Take a step in all parts, and what belongs to it in the whole; what parts have done is added to theirs."""
    whole = is_whole([part.store for part in over.parts])
    jobs = [_job(step, part, done, progress, whole) for part, done in zip(over.parts, outcomes, strict=True)]
    for at, outcome in run(jobs):
        outcomes[at] += outcome
        if step == "invert" and progress is not None:
            _record(progress, over.parts[at].store, outcomes[at])
    if step != "message" or over.expiries is None or _ended(outcomes):
        return Outcome()
    undone = {key for done in outcomes for key in (*done.failed, *done.withheld)}
    return run_step(message_ttls(over.whole, undone, over.expiries), undone, over.whole)


def _ended(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.ended is not None for outcome in outcomes)


def _job(step: StepName, part: Part, done: Outcome, progress: Round | None, whole: bool) -> Job:
    """A step in a part, with what is known by now.

    Args:
        whole: whether the part is the whole store, which a round goes through from its first key to its last.
    """
    job = Job(step, part, frozenset(done.failed), part.context.search_since_ms)
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


def _reached(progress: Round, part: Store, before: Outcome, upto: bytes, so_far: Sequence[Outcome]) -> None:
    """Write down now and then how far a part was searched for invalid pointers (rule S4)."""
    known = (before, *so_far)
    if not progress.is_due() or any(outcome.undone for outcome in known):
        return
    start = progress.first_undone(part)
    if start < upto:
        met = [outcome.untouchable for outcome in known if outcome.untouchable is not None]
        progress.record([Interval(start, upto)], min(met, default=None))


def _payloads_reached(progress: Round, before: Outcome, upto: bytes, so_far: Sequence[Outcome]) -> None:
    """Write down up to which topic payloads were gone through."""
    if not any(outcome.failed for outcome in (before, *so_far)):
        progress.payloads_done(upto)


def _record(progress: Round, part: Store, done: Outcome) -> None:
    """Write down that a part was covered, if all of it was (rule S4)."""
    if not done.undone and not progress.has_done(part):
        covered = Interval(progress.first_undone(part), part.span[1])
        progress.record([covered], done.untouchable)

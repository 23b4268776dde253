"""One pass over a store: its steps in all parts.

A store in LevelDB is one part. A store in HBase has one part for each salt, because rows of different salts are stored
apart and a sweep mostly waits for servers. Each step runs in all parts at once, and finishes everywhere before the next
step starts: the message of a payload may be in any part.

Messages come first, because the deletion of a message frees its payload. Inversions come second, because a deleted row
need not be inverted.

:func:`sweep_store` is a generator of events. Its caller consumes them to show progress and to save the covered keys;
the outcome fills on the way. :func:`run_step` is one step in one part, for threads of the driver and tasks of Spark.
Only it counts what an executor did (invariant S15), so the numbers of plans and runs are comparable.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from janitor.sweep.executor import Executor
from janitor.sweep.findings import FailedTopic, ReachedKey, Read, failed
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import Run
from janitor.sweep.scan import STEPS, Part, SearchScope, Visit
from janitor.sweep.steps import inversions, message_ttls, messages, payloads
from tms_core.errors import StoreError, TmsError

#: How often a topic is planned again within one pass before it is left for the next.
REPLANS = 3


class StepStarted(NamedTuple):
    """A step starts, also in a store without parts. The caller may still change the search of the parts."""

    step: str
    parts: Sequence[Part]


class Advance(NamedTuple):
    """All keys before this key are done. ``so_far`` has the outcomes until then."""

    part: Part
    key: bytes
    so_far: Sequence[Outcome]


class StepFinished(NamedTuple):
    """A step has finished in one part."""

    part: Part
    outcome: Outcome


Event = StepStarted | Read | Advance | StepFinished


class Workers(Protocol):
    """The threads or tasks that run the steps of one pass."""

    parts: Sequence[Part]

    def take(self, outcomes: Sequence[Outcome]) -> Iterator[Event]:
        """Run the step that is set in the parts; yield its events, and add its results to the outcome of each part."""
        ...


class Division(Protocol):
    """The parts of a store in a pass, and the threads or tasks that run its steps."""

    def begin(self, run: Run, executor: Executor) -> AbstractContextManager[Workers]:
        """Divide one pass; the workers work during the block."""
        ...


def sweep_store(run: Run, division: Division, executor: Executor, total: Outcome) -> Generator[Event, None, None]:
    """Run the steps of a pass; yield its events.

    Args:
        total: gets all results and the error that ended the pass early, when the generator ends or is closed.
    """
    with division.begin(run, executor) as workers:
        outcomes = [Outcome() for _ in workers.parts]
        since_ms = run.search_since_ms()
        try:
            # L5: each step is over in all parts before the next. A payload's message may be in any other part.
            for step in STEPS:
                for part, done in zip(workers.parts, outcomes, strict=True):
                    part.step, part.undone = step, frozenset(done.failed)
                    part.search = SearchScope(since_ms)
                yield StepStarted(step, workers.parts)
                yield from workers.take(outcomes)
                if step == "message" and run.expiries is not None and not _has_ended(outcomes):
                    # A topic that any part gave up is left alone here too: its messages lie in all parts.
                    undone = frozenset(key for done in outcomes for key in (*done.failed, *done.withheld))
                    whole = Part(run, step="ttl", undone=undone).open(run.store, executor)
                    yield from run_step(whole, total)
                if _has_ended([*outcomes, total]):
                    break
        except TmsError as error:
            total.ended = error
        finally:
            for done in outcomes:
                total.merge(done)


def _has_ended(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.ended is not None for outcome in outcomes)


@dataclass(frozen=True, slots=True)
class Threads:
    """Runs the parts of a store in parallel threads; a single part in the caller's thread."""

    workers: int = 1

    @contextmanager
    def begin(self, run: Run, executor: Executor) -> Iterator[Workers]:
        parts = [Part(run, number).open(store, executor) for number, store in enumerate(run.store.parts())]
        yield _ThreadWorkers(parts, self.workers)


class _ThreadWorkers:
    def __init__(self, parts: Sequence[Part], threads: int) -> None:
        self.parts = parts
        self._threads = threads

    def take(self, outcomes: Sequence[Outcome]) -> Iterator[Event]:
        if len(self.parts) == 1:
            yield from run_step(self.parts[0], outcomes[0])
            yield StepFinished(self.parts[0], outcomes[0])
            return
        events: SimpleQueue[Event | BaseException] = SimpleQueue()

        def work(part: Part, outcome: Outcome) -> None:
            try:
                for event in run_step(part, outcome):
                    events.put(event)
                events.put(StepFinished(part, outcome))
            except BaseException as error:  # noqa: BLE001 the caller's thread raises it
                events.put(error)

        with ThreadPoolExecutor(self._threads, "sweep") as pool:
            at_work = len(self.parts)
            for part, outcome in zip(self.parts, outcomes, strict=True):
                pool.submit(work, part, outcome)
            while at_work:
                event = events.get()
                if isinstance(event, BaseException):
                    # The pool first waits for the other parts, so no thread writes after the pass is over.
                    raise event
                at_work -= isinstance(event, StepFinished)
                yield event


# -- one step in one part ----------------------------------------------------------------------------------------------


#: Yields the events of each step in key order, without topics that are undone by then.
_STEPS = {"message": messages, "ttl": message_ttls, "invert": inversions, "payload": payloads}


def run_step(part: Part, outcome: Outcome) -> Iterator[Read | Advance]:
    """Run one step in one part; yield its progress.

    Args:
        outcome: gets all results and the error that ended the step early, also if the caller closes the generator.
    """
    undone = set(part.undone)
    try:
        for event in _STEPS[part.step](part, undone):
            if isinstance(event, Visit):
                yield from _visit(event, part, undone, outcome)
                if outcome.ended is not None:
                    break
                continue
            part.executor.alive()
            outcome.add(event)
            if isinstance(event, ReachedKey):
                yield Advance(part, event.key, (outcome,))
        else:
            # S10, S12: the last call may have hung until the lease ran out. Then the step has not covered the table.
            part.executor.alive()
    except Exception as error:  # noqa: BLE001 what was done is kept; the pass raises this again
        outcome.ended = error
    finally:
        outcome.seeks_spared += part.messages.take_spared() + part.payloads.take_spared()


def _visit(found: Visit, part: Part, undone: set[bytes], outcome: Outcome) -> Iterator[Read | Advance]:
    """Process one topic, again if its metadata changes (invariant S2); yield the progress.

    Args:
        undone: gets the topic if it is left undone.
        outcome: has the results of this step before this topic, and gets the results of this topic.
    """
    for _ in range(REPLANS):
        attempt = Outcome()
        try:
            yield from _apply_findings(found, part, outcome, attempt)
        except StoreError as error:
            attempt.add(failed(found.table, found.prefix, error))
        except Exception as error:  # noqa: BLE001 what was done is kept; the pass raises this again
            attempt.ended = error
        finally:
            has_moved = bool(attempt.moved)
            # A moved topic is planned again below. It counts as moved only where the driver has to do that.
            if part.replans:
                attempt.moved.clear()
            undone.update(attempt.failed, attempt.withheld, attempt.moved)
            # What stays is counted again by the next attempt.
            outcome.merge(attempt.taking() if has_moved else attempt)
        if not (has_moved and part.replans):
            return
        # S2: drop the keys read ahead before the topic is planned again, or old keys meet new rules.
        part.forget()
        part.run.reread(found.prefix)
        if not found.is_repeatable:
            return
    message = f"topic {found.prefix[:-1].decode()} keeps changing; the next run tries again"
    outcome.add(FailedTopic(found.prefix, found.table, "moved", message))
    undone.add(found.prefix)


def _apply_findings(found: Visit, part: Part, before: Outcome, attempt: Outcome) -> Iterator[Read | Advance]:
    """Apply the findings of one topic until there is a reason to stop; count them in ``attempt``."""
    for finding in found.findings():
        if isinstance(finding, ReachedKey):
            yield Advance(part, finding.key, (before, attempt))
        elif isinstance(finding, Read):
            attempt.add(finding)
            yield finding
            part.executor.alive()
        else:
            done = part.executor.apply(finding)
            # Count before the wait: a run that is stopped while it waits has deleted these rows (S15).
            if (counted := attempt.add(finding, done)) is not None:
                part.executor.pay(counted)
            if done.stop is not None:
                return

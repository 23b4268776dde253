"""One pass over a store: its steps in all parts.

A store in LevelDB is one part. A store in HBase has one part for each salt, because region servers work in parallel and
a sweep mostly waits for them. Each step runs in all parts concurrently, and the next step starts when it is complete in
all parts: the message of a payload may be in any part.

Messages come first, because the deletion of a message frees its payload. Inversions come second, because a deleted row
need not be inverted.

:func:`sweep_store` is a generator of events. Its caller consumes them to show progress and to save the covered keys.
:func:`run_step` runs one step in one part, in a thread of the driver or a Spark task. It is the only place that counts
the results of an executor (invariant S15), so the numbers of plans and runs are comparable.
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

#: The number of attempts for a topic whose metadata keeps changing during a pass.
REPLANS = 3


class StepStarted(NamedTuple):
    """The start of a step, also in a store without parts. The consumer may change the search scope of the parts."""

    step: str
    parts: Sequence[Part]


class Advance(NamedTuple):
    """Progress in a part: all keys before ``key`` are done, with the outcomes in ``so_far``."""

    part: Part
    key: bytes
    so_far: Sequence[Outcome]


class StepFinished(NamedTuple):
    """The completion of a step in one part."""

    part: Part
    outcome: Outcome


Event = StepStarted | Read | Advance | StepFinished


class Workers(Protocol):
    """The threads or tasks that run the steps of one pass."""

    parts: Sequence[Part]

    def take(self, outcomes: Sequence[Outcome]) -> Iterator[Event]:
        """Run the current step of the parts; yield its events, and add its results to the outcome of each part."""
        ...


class Division(Protocol):
    """The parts of a store in a pass, and the threads or tasks that run its steps."""

    def begin(self, run: Run, executor: Executor) -> AbstractContextManager[Workers]:
        """Divide the store for a pass; the workers are usable inside the block."""
        ...


def sweep_store(run: Run, division: Division, executor: Executor, total: Outcome) -> Generator[Event, None, None]:
    """Run the steps of a pass; yield its events.

    Args:
        total: receives all results, and the error that interrupted the pass, when the generator returns or is closed.
    """
    with division.begin(run, executor) as workers:
        outcomes = [Outcome() for _ in workers.parts]
        since_ms = run.search_since_ms()
        try:
            # L5: finish each step in all parts before the next step. A payload's message may be in any other part.
            for step in STEPS:
                for part, done in zip(workers.parts, outcomes, strict=True):
                    part.step, part.undone = step, frozenset(done.failed)
                    part.search = SearchScope(since_ms)
                yield StepStarted(step, workers.parts)
                yield from workers.take(outcomes)
                if step == "message" and run.expiries is not None and not _has_ended(outcomes):
                    # Skip topics that any part left undone: their messages are spread over all parts.
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
    """A division that runs several parts in parallel threads, and a single part in the caller's thread."""

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
            running = len(self.parts)
            for part, outcome in zip(self.parts, outcomes, strict=True):
                pool.submit(work, part, outcome)
            while running:
                event = events.get()
                if isinstance(event, BaseException):
                    # Leaving the pool waits for the other parts, so no thread writes after the pass.
                    raise event
                running -= isinstance(event, StepFinished)
                yield event


# -- one step in one part ----------------------------------------------------------------------------------------------


#: The generator of each step: yields events in key order, and skips topics that are left undone.
_STEPS = {"message": messages, "ttl": message_ttls, "invert": inversions, "payload": payloads}


def run_step(part: Part, outcome: Outcome) -> Iterator[Read | Advance]:
    """Run one step in one part; yield its progress.

    Args:
        outcome: receives all results and the error that interrupted the step, also if the caller closes the generator.
    """
    undone = set(part.undone)
    try:
        for event in _STEPS[part.step](part, undone):
            if isinstance(event, Visit):
                yield from _visit(event, part, undone, outcome)
                if outcome.ended is not None:
                    break
                continue
            part.executor.keep_alive()
            outcome.add(event)
            if isinstance(event, ReachedKey):
                yield Advance(part, event.key, (outcome,))
        else:
            # S10, S12: the lease may have expired during the last call. Then the step does not count as complete.
            part.executor.keep_alive()
    except Exception as error:  # noqa: BLE001 the outcome keeps the completed work, and the pass raises the error
        outcome.ended = error
    finally:
        outcome.seeks_spared += part.messages.take_spared() + part.payloads.take_spared()


def _visit(found: Visit, part: Part, undone: set[bytes], outcome: Outcome) -> Iterator[Read | Advance]:
    """Process one topic, and repeat it if its metadata changes (invariant S2); yield the progress.

    Args:
        undone: receives the topic if it is left undone.
        outcome: has the results of this step so far, and receives the results of this topic.
    """
    for _ in range(REPLANS):
        attempt = Outcome()
        try:
            yield from _apply_findings(found, part, outcome, attempt)
        except StoreError as error:
            attempt.add(failed(found.table, found.prefix, error))
        except Exception as error:  # noqa: BLE001 the outcome keeps the completed work, and the pass raises the error
            attempt.ended = error
        finally:
            has_moved = bool(attempt.moved)
            # A moved topic is planned again below. Report it as moved only if the driver must plan it again.
            if part.replans:
                attempt.moved.clear()
            undone.update(attempt.failed, attempt.withheld, attempt.moved)
            # The next attempt counts kept rows again.
            outcome.merge(attempt.without_kept_rows() if has_moved else attempt)
        if not (has_moved and part.replans):
            return
        # S2: first drop the keys that were read ahead, so that the new plan does not use them.
        part.discard()
        part.run.reread(found.prefix)
        if not found.is_repeatable:
            return
    message = f"topic {found.prefix[:-1].decode()} keeps changing; the next run tries again"
    outcome.add(FailedTopic(found.prefix, found.table, "moved", message))
    undone.add(found.prefix)


def _apply_findings(found: Visit, part: Part, before: Outcome, attempt: Outcome) -> Iterator[Read | Advance]:
    """Apply the findings of one topic until the executor stops it; count them in ``attempt``."""
    for finding in found.findings():
        if isinstance(finding, ReachedKey):
            yield Advance(part, finding.key, (before, attempt))
        elif isinstance(finding, Read):
            attempt.add(finding)
            yield finding
            part.executor.keep_alive()
        else:
            done = part.executor.apply(finding)
            # Count before the wait: a run that is interrupted during the wait has deleted these rows (S15).
            if (counted := attempt.add(finding, done)) is not None:
                part.executor.throttle(counted)
            if done.stop is not None:
                return

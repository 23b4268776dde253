"""One pass over a store: its steps, in their order, in all parts.

A store in LevelDB is one part. One in HBase has a part for each salt, whose rows lie apart from those of the others,
and most of a sweep's time is spent waiting for servers. So each step of a pass goes through all parts at once, and is
over everywhere before the next one starts: whether a payload is still needed depends on messages of any part.

Messages come first, because a payload is free once its message is deleted; inversions after them, because a row that is
deleted need not be inverted.

:func:`sweep_store` is a generator of events: the caller consumes them, shows progress, writes down what was covered,
and fills the outcome by doing so. :func:`run_step` is one step in one part; threads of the driver and tasks of Spark
take the same one. What an executor does with a finding is counted there and nowhere else (rule S15), so a plan's
figures and a run's mean the same.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from janitor.sweep.executor import Executor
from janitor.sweep.findings import Failed, ReachedKey, Read, failed
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import Run
from janitor.sweep.scan import STEPS, Part, SearchScope, Visit
from janitor.sweep.scan import Event as PartEvent
from janitor.sweep.steps import inversions, message_ttls, messages, payloads
from tms_core.errors import StoreError, TmsError
from tms_core.tables.side import Expiries

#: How often a topic is planned again within one pass before it is left for the next.
REPLANS = 3


class StepStarted(NamedTuple):
    """A step starts. The caller may still say what its parts search."""

    parts: Sequence[Part]


class Advance(NamedTuple):
    """All keys before this one were gone through, with these outcomes until then."""

    part: Part
    key: bytes
    so_far: Sequence[Outcome]


class StepFinished(NamedTuple):
    """A step is over in one part."""

    part: Part
    outcome: Outcome


Event = StepStarted | Read | Advance | StepFinished


class Workers(Protocol):
    """The threads or tasks that take the steps of one pass.

    Attributes:
        parts: of the store.
    """

    parts: Sequence[Part]

    def take(self, outcomes: Sequence[Outcome]) -> Iterator[Event]:
        """Take the step that the parts say; what is done in each is added to its outcome."""
        ...


class Division(Protocol):
    """In which parts a pass goes over a store, and who takes its steps there."""

    def begin(self, run: Run, executor: Executor) -> AbstractContextManager[Workers]:
        """Divide one pass; the workers work as long as the block runs."""
        ...


def sweep_store(
    run: Run, division: Division, executor: Executor, expiries: Expiries | None, total: Outcome
) -> Generator[Event, None, None]:
    """Take the steps of a pass.

    Args:
        expiries: messages with a ttl of their own; None: there are none.
        total: takes in all that was done, and what ended the pass early, when the generator ends or is closed.
    """
    with division.begin(run, executor) as workers:
        outcomes = [Outcome() for _ in workers.parts]
        since_ms = run.search_since_ms()
        try:
            # L5: each step is over in all parts before the next. A payload's message may be in any other part.
            for step in STEPS:
                for part, done in zip(workers.parts, outcomes, strict=True):
                    part.step, part.undone, part.expiries = step, frozenset(done.failed), expiries
                    part.search = SearchScope(since_ms)
                yield StepStarted(workers.parts)
                yield from workers.take(outcomes)
                if step == "message" and expiries is not None and not _has_ended(outcomes):
                    # A topic that any part gave up is left alone here too: its messages lie in all parts.
                    undone = frozenset(key for done in outcomes for key in (*done.failed, *done.withheld))
                    whole = Part(run, step="ttl", undone=undone, expiries=expiries).open(run.store, executor)
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
    """The parts that the store has, side by side in threads; a lone one in the caller's thread.

    Attributes:
        workers: how many at once.
    """

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
                    raise event
                at_work -= isinstance(event, StepFinished)
                yield event


# -- one step in one part ----------------------------------------------------------------------------------------------


def run_step(part: Part, outcome: Outcome) -> Iterator[Read | Advance]:
    """Take one step in one part, and say how far it is.

    Args:
        outcome: takes in all that is done, and what ends the step early; also if the caller closes the generator.
    """
    undone = set(part.undone)
    try:
        for event in _events(part, undone):
            if isinstance(event, Visit):
                found = Outcome()
                try:
                    yield from visit(event, part, outcome, found)
                finally:
                    undone.update(found.failed, found.withheld, found.moved)
                    outcome.merge(found)
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


def _events(part: Part, undone: set[bytes]) -> Iterator[PartEvent]:
    """What there is to do, in key order; topics that are ``undone`` when they are come to are passed by."""
    steps = {"message": messages, "ttl": message_ttls, "invert": inversions, "payload": payloads}
    return steps[part.step](part, undone)


def visit(found: Visit, part: Part, before: Outcome, outcome: Outcome) -> Iterator[Read | Advance]:
    """Do one topic, again if its metadata moves meanwhile (rule S2).

    Args:
        before: what the step has done before this topic.
        outcome: takes in what is done in it.
    """
    for _ in range(REPLANS):
        attempt = Outcome()
        try:
            yield from _apply_findings(found, part, (before, outcome, attempt))
        except StoreError as error:
            attempt.add(failed(found.table, found.prefix, error))
        except Exception as error:  # noqa: BLE001 what was done is kept; the pass raises this again
            attempt.ended = error
        finally:
            has_moved = bool(attempt.moved)
            # A moved topic is planned again below. It counts as moved only where the driver has to do that.
            if part.replans:
                attempt.moved.clear()
            # What stays is counted again by the next attempt.
            outcome.merge(attempt.taking() if has_moved else attempt)
        if not (has_moved and part.replans):
            return
        # S2: drop what was read ahead before the topic is planned again, or old keys meet new rules.
        part.forget()
        part.run.reread(found.prefix)
        if not found.again:
            return
    message = f"topic {found.prefix[:-1].decode()} keeps changing; left for the next run"
    outcome.add(Failed(found.prefix, found.table, "moved", message))


def _apply_findings(found: Visit, part: Part, so_far: tuple[Outcome, ...]) -> Iterator[Read | Advance]:
    """Have the findings of one topic carried out, until there is a reason to stop; counts in the last outcome."""
    attempt = so_far[-1]
    for finding in found.findings():
        if isinstance(finding, ReachedKey):
            yield Advance(part, finding.key, so_far)
        elif isinstance(finding, Read):
            attempt.add(finding)
            yield finding
            part.executor.after_page(finding)
        else:
            done = part.executor.apply(finding)
            # Count before the wait: a run that is stopped while it waits has deleted these rows (S15).
            if (counted := attempt.add(finding, done)) is not None:
                part.executor.pay(counted)
            if done.stop is not None:
                return

"""One step of a pass in one part of a store: what there is is pulled, handed to an act, and counted.

Threads of the driver and tasks of Spark take the same step. What an act does with a finding is counted here and nowhere
else (rule S15), so a plan's figures and a run's mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from janitor.sweep.act import Moved, NotArchived, Unsure
from janitor.sweep.deletions import message_ttls, messages, payloads
from janitor.sweep.findings import Failed, Reached, Read, failed
from janitor.sweep.inversions import NOT_COVERED, Covered, inversions
from janitor.sweep.outcome import Outcome
from janitor.sweep.permission import Withheld
from janitor.sweep.scan import Event, Part, Visit
from tms_core.errors import StoreError
from tms_core.tables.side import Expiries

StepName = Literal["message", "message_ttl", "invert", "payload"]

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
        since_ms, everything: what the search for invalid pointers looks at (:func:`~.inversions.inversions`).
        refers: whether the step of the payloads looks for messages that refer to them.
        covered: what an earlier run has searched for invalid pointers.
        from_topic: the first topic whose payloads no earlier run has gone through.
        expiries: what the step of the messages with a ttl of their own goes through; None in the other steps.
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
        if self.step == "message":
            return messages(self.part, undone)
        if self.step == "message_ttl":
            return message_ttls(self.part, undone, self.expiries) if self.expiries is not None else iter(())
        if self.step == "invert":
            return inversions(self.part, undone, self.since_ms, everything=self.everything, covered=self.covered)
        return payloads(self.part, undone, refers=self.refers, from_topic=self.from_topic)


def run_step(job: StepJob) -> Outcome:
    """Take one step in one part; what ends it early is in the outcome, with all that was done until then."""
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
        before: what the step has done before this topic.
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
    """What ends the work on a topic early goes into the outcome.

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

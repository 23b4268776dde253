"""Whether an operator must act, as one word with reasons.

A person on call reads one line first. It is made from the status here, not in the page, so that it is tested and is the
same for every reader of the API. Each reason states a problem. The metrics export the same reasons by condition, and
alerts use them, so no alert contradicts the status.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from janitor.state.base import EVERYTHING
from janitor.status.status import Status
from tms_core.logs.printable import duration
from tms_core.transaction.model import transaction_ms

#: The results of runs that failed, in words.
_BAD_ENDS = {"failed": "failed", "lost": "was lost: its heartbeat stopped", "partial": "was only partly done"}

#: The guard of a store that is not adopted, which has its own line.
_ADOPTION = "adoption"

#: No alarm before so many runs are missed, nor before this time has passed; a large store takes its time.
MISSED_RUNS, GRACE_MS = 3, 3_600_000

#: The wait of readers for a transaction after which an operator must check it, in milliseconds.
LATE_MS = 600_000

#: Largest lag of the prune boundary, in seconds.
STUCK_SECONDS = 345_600

#: The most patterns in a line.
_NAMED = 3


class Condition(StrEnum):
    """A kind of reason for which somebody has to check the janitor; a label value of the metric ``attention``."""

    BOUNDARY_REFUTED = "boundary_refuted"
    NOT_ADOPTED = "not_adopted"
    GUARD_TRIPPED = "guard_tripped"
    JOB_FAILING = "job_failing"
    NO_RUN = "no_run"
    RUN_FAILED = "run_failed"
    TOPIC_QUARANTINED = "topic_quarantined"
    SNAPSHOT_UNUSABLE = "snapshot_unusable"
    BOUNDARY_STUCK = "boundary_stuck"
    READERS_BLOCKED = "readers_blocked"
    MESSAGES_AHEAD = "messages_ahead"
    TOPIC_HELD = "topic_held"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class HealthReason:
    """A sentence, the section of the status page with details (empty: none), and the condition of a problem."""

    text: str
    about: str = ""
    condition: Condition | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """The summary for a person on call.

    Attributes:
        level: ``well``; ``attention``: the janitor works, but an operator must check something; ``down``: it does not
            work.
        reasons: most severe first; never empty.
    """

    level: Literal["well", "attention", "down"]
    reasons: tuple[HealthReason, ...]


def judge(status: Status, alive: str = "", ready: str = "") -> Health:
    """Return the health of a status.

    Args:
        status: the status.
        alive: the reason why the janitor is not alive; empty: it is alive.
        ready: the reason why it is not ready; empty: it is ready.
    """
    down, attention = tuple(_down(status, alive)), tuple(find_problems(status))
    if ready and not down and not attention:
        attention = (HealthReason(ready),)
    if down:
        return Health("down", down + attention)
    if attention:
        return Health("attention", attention)
    return Health("well", (HealthReason(_well(status)),))


def _down(status: Status, alive: str) -> Iterator[HealthReason]:
    if alive:
        yield HealthReason(alive)
    if status.process == "down":
        yield HealthReason("No janitor is running. This is the last recorded state.")


def find_problems(status: Status) -> Iterator[HealthReason]:
    """Yield the problems that an operator must check while the janitor works, most severe first, each with its
    condition.
    """
    if status.boundary.refuted:
        text = f"The prune boundary was refuted: {status.boundary.refuted}."
        yield HealthReason(text, "boundary", Condition.BOUNDARY_REFUTED)
    if status.adopted_ms is None:
        text = "This store is not adopted. Nothing is deleted until you adopt it."
        yield HealthReason(text, "adopt", Condition.NOT_ADOPTED)
    for guard in status.guards:
        if guard.tripped and (guard.guard != _ADOPTION or status.adopted_ms is not None):
            yield HealthReason(f"The {guard.guard} guard blocked the last run.", "guards", Condition.GUARD_TRIPPED)
    for job, error in status.failing.items():
        yield HealthReason(f"The {job} job fails: {error.rstrip('.')}.", "run", Condition.JOB_FAILING)
    yield from _no_run(status)
    yield from _last_run(status)
    quarantined = (entry.topic for entry in status.quarantined)
    yield from _topics("is quarantined", "aside", Condition.TOPIC_QUARANTINED, quarantined)
    if status.snapshot.problem not in ("", "not_configured"):
        problem = f"The transaction snapshot is unusable ({status.snapshot.problem})"
        text = f"{problem}: no rows are inverted, no boundary is published."
        yield HealthReason(text, "snapshot", Condition.SNAPSHOT_UNUSABLE)
    yield from _stuck(status)
    for late in status.late:
        # A transaction from before the server's start blocks readers only since then.
        if status.now_ms - max(late.since_ms, status.started_ms or 0) > LATE_MS:
            text = f"Readers of {late.readers} are blocked by transaction {late.transaction}."
            yield HealthReason(text, "late", Condition.READERS_BLOCKED)
            break
    topics = (entry.topic for entry in status.ahead)
    yield from _topics("has messages with future timestamps", "queues", Condition.MESSAGES_AHEAD, topics)
    held = (held.topic for held in status.held if _waits(status, held.reason))
    yield from _topics("is held", "held", Condition.TOPIC_HELD, held)
    yield from _pause_reasons(status)


def _waits(status: Status, reason: str) -> bool:
    """Return whether held rows wait for an operator; other holds are intended, or reported elsewhere."""
    return reason == "frontier" or (reason == "first_contact" and status.adopted_ms is not None)


def _stuck(status: Status) -> Iterator[HealthReason]:
    """Yield a reason if the boundary has stopped moving; without a transaction system it does not have to move."""
    # A withdrawn boundary is stuck, too: the last published boundary counts.
    last = status.boundary.last
    if last is None or status.snapshot.problem == "not_configured":
        return
    lag_ms = status.now_ms - transaction_ms(int(last))
    # The first boundary of a store that was adopted late lies in the past: it may lag as long after the adoption.
    since_ms = status.now_ms - (status.adopted_ms or 0)
    if min(lag_ms, since_ms) > STUCK_SECONDS * 1000:
        yield HealthReason(f"The prune boundary lags by {duration(lag_ms)}.", "boundary", Condition.BOUNDARY_STUCK)


def _no_run(status: Status) -> Iterator[HealthReason]:
    """Yield a reason if a daemon's runs no longer finish."""
    if status.process != "running" or status.every_seconds is None or not status.leader:
        return
    last_ms = status.last_run.finished_ms if status.last_run else None
    # A time ahead of the clock is of a clock that was wrong.
    signs = (ms for ms in (status.started_ms, last_ms) if ms and ms <= status.now_ms)
    silent_ms = status.now_ms - max(signs, default=status.now_ms)
    if silent_ms > MISSED_RUNS * status.every_seconds * 1000 + GRACE_MS:
        yield HealthReason(f"No run has finished for {silent_ms // 60_000} min.", "run", Condition.NO_RUN)


def _last_run(status: Status) -> Iterator[HealthReason]:
    last = status.last_run
    if last is not None and last.result in _BAD_ENDS:
        error = last.error or next(iter(last.errors), "")
        text = f"The last run {_BAD_ENDS[last.result]}" + (f": {error.rstrip('.')}." if error else ".")
        yield HealthReason(text, "run", Condition.RUN_FAILED)


def _topics(state: str, about: str, condition: Condition, names: Iterable[str]) -> Iterator[HealthReason]:
    found = sorted(set(names))
    if len(found) == 1:
        yield HealthReason(f"{found[0]} {state}.", about, condition)
    elif found:
        states = state.replace("is ", "are ").replace("has ", "have ")
        yield HealthReason(f"{len(found):,} topics {states}.", about, condition)


def _pause_reasons(status: Status) -> Iterator[HealthReason]:
    patterns = [pause.pattern for pause in status.paused]
    if EVERYTHING in patterns:
        yield HealthReason("Everything is paused.", "aside", Condition.PAUSED)
    elif patterns:
        more = " and more" if len(patterns) > _NAMED else ""
        yield HealthReason(f"Paused: {', '.join(patterns[:_NAMED])}{more}.", "aside", Condition.PAUSED)


def _well(status: Status) -> str:
    if status.mode == "plan_only":
        return "Plan only: nothing is deleted."
    if status.lease_holder and not status.leader:
        return f"On standby: {status.lease_holder} holds the lease."
    if status.running is not None:
        return "A run is under way."
    if status.last_run is None:
        return "No run has started yet."
    return "No action is required."

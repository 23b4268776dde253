"""The health of a janitor: one word that shows whether an operator must act, with reasons.

An operator on call reads one line first. This module derives it from the status, so that the page and all readers of
the API agree. Each reason states a problem. The metrics export the same reasons by condition, and alerts use them, so
no alert contradicts the status.
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

#: The description of a failed run, by its result.
_FAILED_RESULTS = {"failed": "failed", "lost": "was lost: its heartbeat stopped", "partial": "was only partly done"}

#: The guard of a store that is not adopted, which is a separate condition.
_ADOPTION = "adoption"

#: The number of missed runs and the additional time after which runs count as stopped; a large store needs long runs.
MISSED_RUNS, GRACE_MS = 3, 3_600_000

#: The wait of readers for a transaction after which an operator must check it, in milliseconds.
LATE_MS = 600_000

#: The maximum lag of the prune boundary, in seconds.
STUCK_SECONDS = 345_600

#: The maximum number of patterns in a line.
_NAMED = 3


class Condition(StrEnum):
    """A kind of problem that an operator must check; a label value of the metric ``attention``."""

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
    """A sentence, the section of the status page with details (or empty), and the condition of a problem."""

    text: str
    about: str = ""
    condition: Condition | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """The summary for an operator on call.

    Attributes:
        level: ``well``; ``attention``: the janitor works, but an operator must check a problem; ``down``: it does not
            work.
        reasons: the reasons, most severe first; never empty.
    """

    level: Literal["well", "attention", "down"]
    reasons: tuple[HealthReason, ...]


def judge(status: Status, alive: str = "", ready: str = "") -> Health:
    """Return the health of a status.

    Args:
        status: the status.
        alive: the reason why the janitor is not alive; empty if it is alive.
        ready: the reason why it is not ready; empty if it is ready.
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
    """Yield the problems of a working janitor that an operator must check, most severe first, with their conditions."""
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
        # A transaction that is older than the server blocks its readers only since the server's start.
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
    """Return whether a hold needs an operator; other holds are intended, or reported elsewhere."""
    return reason == "frontier" or (reason == "first_contact" and status.adopted_ms is not None)


def _stuck(status: Status) -> Iterator[HealthReason]:
    """Yield a reason if the boundary does not advance; without a transaction system it need not advance."""
    # Use the last published boundary: a withdrawn boundary does not advance either.
    last = status.boundary.last
    if last is None or status.snapshot.problem == "not_configured":
        return
    lag_ms = status.now_ms - transaction_ms(int(last))
    # The first boundary of a store that was adopted late lags from the start, so measure from the adoption at most.
    since_ms = status.now_ms - (status.adopted_ms or 0)
    if min(lag_ms, since_ms) > STUCK_SECONDS * 1000:
        yield HealthReason(f"The prune boundary lags by {duration(lag_ms)}.", "boundary", Condition.BOUNDARY_STUCK)


def _no_run(status: Status) -> Iterator[HealthReason]:
    """Yield a reason if the runs of a daemon no longer finish."""
    if status.process != "running" or status.every_seconds is None or not status.leader:
        return
    last_ms = status.last_run.finished_ms if status.last_run else None
    # A time in the future comes from a wrong clock.
    signs = (ms for ms in (status.started_ms, last_ms) if ms and ms <= status.now_ms)
    silent_ms = status.now_ms - max(signs, default=status.now_ms)
    if silent_ms > MISSED_RUNS * status.every_seconds * 1000 + GRACE_MS:
        yield HealthReason(f"No run has finished for {silent_ms // 60_000} min.", "run", Condition.NO_RUN)


def _last_run(status: Status) -> Iterator[HealthReason]:
    last = status.last_run
    if last is not None and last.result in _FAILED_RESULTS:
        error = last.error or next(iter(last.errors), "")
        text = f"The last run {_FAILED_RESULTS[last.result]}" + (f": {error.rstrip('.')}." if error else ".")
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
        return "A run is in progress."
    if status.last_run is None:
        return "No run has started yet."
    return "No action is required."

"""The limit of each topic's deletions in this run (invariant S8).

Time moves a cutoff forward by exactly the time that passed. Anything that moves it further, or makes a generation old,
has another cause: a TTL was shortened, a topic was deleted, a clock jumped, a store was restored. Most of these are
intended and a few are accidents. A deletion cannot be undone, so rows that came due by such a jump are *held* for some
time, in which a person can approve or undo it. Meanwhile, rows that came due by time alone are deleted. This needs no
counts of rows, so it costs nothing.
"""

from __future__ import annotations

from dataclasses import replace

from janitor.rules.policy import Frontier, Hold
from janitor.state.base import ClockAnchor, FrontierRecord, PendingJump
from tms_core.rowkey import Cutoff
from tms_core.topic import TopicMetadata, first_kept_generation


def elapsed_ms(since: ClockAnchor, now: ClockAnchor) -> int:
    """Time that passed between two readings, never negative; none if it is unknown.

    Within one boot the machine's monotonic clock counts, and wall time only where it is smaller; across boots there is
    only wall time.
    """
    if not since.comparable(now):
        return 0
    wall = now.wall_ms - since.wall_ms
    if since.boot_id and since.boot_id == now.boot_id:
        wall = min(wall, now.monotonic_ms - since.monotonic_ms)
    return max(0, wall)


def admit(topic: TopicMetadata, now: ClockAnchor) -> FrontierRecord:
    """Return a record that releases everything that is due now."""
    return _applied(_unseen(now), topic, Cutoff.at(now.wall_ms, topic.ttl_seconds), now)


def freeze(record: FrontierRecord | None, now: ClockAnchor) -> FrontierRecord:
    """Return the record of a skipped topic: rows that come due meanwhile count as a jump after that."""
    return replace(record or _unseen(now), at=now, pending=None, approved=None)


def approve(record: FrontierRecord, topic: TopicMetadata) -> FrontierRecord:
    """Return a record whose present held jump the next run will release."""
    return replace(record, approved=_target(topic))


def advance(
    record: FrontierRecord | None,
    topic: TopicMetadata,
    now: ClockAnchor,
    *,
    hold_seconds: int,
    allowance_ms: int,
    now_ms: int | None = None,
) -> tuple[Frontier, FrontierRecord]:
    """Return this run's frontier of a topic, and the record to save once the run has applied it.

    Args:
        record: the saved record; None: the topic was never seen since the store was adopted, and is held like a jump
            from nothing.
        now: the time by which elapsed time is measured (``guards.measured``).
        hold_seconds: how long a jump is held; 0: not at all.
        allowance_ms: how much further than the passed time a cutoff may move.
        now_ms: the time that rows are judged by, if it differs from ``now``.
    """
    known = record or _unseen(now)
    target = _target(topic)
    opened = Frontier.open(now.wall_ms if now_ms is None else now_ms, topic)
    if not _jumps(record, topic, opened.due, now, allowance_ms) or known.approved == target:
        return opened, _applied(known, topic, opened.due, now)
    pending = known.pending
    if pending is None or pending.target != target or _lies_ahead(pending.since, now):
        pending = PendingJump(topic.generation, topic.ttl_seconds, now, topic.consumed)
    if elapsed_ms(pending.since, now) >= hold_seconds * 1000:
        return opened, _applied(known, topic, opened.due, now)
    cutoff_ms = min(opened.due.ms, known.cutoff_ms + elapsed_ms(known.at, now)) if record else 0
    held = replace(opened, cutoff=Cutoff(cutoff_ms), generation=known.generation, hold=Hold.FRONTIER)
    return held, replace(known, cutoff_ms=cutoff_ms, at=now, pending=pending, approved=None)


def _lies_ahead(since: ClockAnchor, now: ClockAnchor) -> bool:
    """Return whether a reading cannot be compared with the present, so that a hold starts again."""
    return not since.comparable(now) or (since.boot_id != now.boot_id and since.wall_ms > now.wall_ms)


def _jumps(
    record: FrontierRecord | None, topic: TopicMetadata, due: Cutoff, now: ClockAnchor, allowance_ms: int
) -> bool:
    if record is None:
        return True
    if topic.consumed and not record.consumed:
        return True
    if topic.old_below > first_kept_generation(record.generation):
        return True
    allowed_ms = record.cutoff_ms + elapsed_ms(record.at, now) + allowance_ms
    return not topic.deleted and due.ms > allowed_ms


def _unseen(now: ClockAnchor) -> FrontierRecord:
    return FrontierRecord(generation=0, cutoff_ms=0, at=now, first_seen_ms=now.wall_ms)


def _applied(known: FrontierRecord, topic: TopicMetadata, due: Cutoff, now: ClockAnchor) -> FrontierRecord:
    applied = replace(known, generation=topic.generation, cutoff_ms=due.ms, at=now, consumed=topic.consumed)
    return replace(applied, pending=None, approved=None)


def _target(topic: TopicMetadata) -> tuple[int, int, bool]:
    return topic.generation, topic.ttl_seconds, topic.consumed

"""Deletion rules for one row.

``decide`` applies rules L0 to L7 (``docs/reference/deletion-rules.md``) to one row. It does no I/O and reads no clock.
A differential test over random stores compares it with every engine that works on ranges. If they disagree, this
module is right.

The last part sets the limit of each topic's deletions in a run (invariant S8). Time moves a cutoff forward by exactly
the time that passed. Anything that moves it further, or makes a generation old, has another cause: a TTL was shortened,
a topic was deleted, a clock jumped, a store was restored. Most of these are intended and a few are accidents. A
deletion cannot be undone, so rows that came due by such a jump are *held* for some time, in which an operator can
approve or undo it. Rows that came due by time alone are still deleted. This needs no counts of rows, so it is free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from janitor.state.base import ClockAnchor, FrontierRecord, PendingJump
from tms_core.rowkey import LONG_MAX, Cutoff, MessageKey, PayloadKey
from tms_core.topic import TopicMetadata, first_kept_generation


class Rule(StrEnum):
    """The reason for the deletion or change of a row."""

    EXPIRED = "expired"
    OLD_GENERATION = "old_generation"
    PROCESSED = "processed"
    INVALID_TRANSACTION = "invalid_transaction"


class Reason(StrEnum):
    """The reason why a row stays."""

    LIVE = "live"
    UNRECOGNIZED = "unrecognized"
    UNKNOWN_TOPIC = "unknown_topic"
    NEWER_GENERATION = "newer_generation"
    HELD = "held"
    UNDECIDED = "undecided"
    REFERENCED = "referenced"


class Hold(StrEnum):
    """The reason why due rows of a topic are not deleted."""

    FIRST_CONTACT = "first_contact"
    FRONTIER = "frontier"
    CONSUMER = "consumer"
    TRANSACTION = "transaction"
    PAUSED = "paused"
    PROTECTED = "protected"
    QUARANTINED = "quarantined"


class Row(NamedTuple):
    """The facts about a row that the rules need.

    Attributes:
        key: the parsed key; None if TMS does not write such a key.
        pointer: the stored write pointer of a message row, with its sign; None for payload rows and for messages
            outside transactions.
    """

    table: Literal["message", "payload"]
    key: MessageKey | PayloadKey | None
    pointer: int | None = None


@dataclass(frozen=True, slots=True)
class Frontier:
    """The limit of one topic's deletions in this run (invariant S8), and the limit of the rules.

    Attributes:
        now_ms: the time at which the run evaluates the rules.
        due: the cutoff of the rules at that time.
        cutoff: the cutoff of this run; never above ``due``.
        generation: the metadata generation of this run, which may delete older generations; 0: it deletes none.
        hold: the reason why the run deletes less than the rules allow; None: no hold.
        processed: the first position (``milliseconds * 65,536 + sequence``) that L7 keeps; 0: L7 deletes nothing.
        decided_ms: a message's own TTL deletes it only if it was published before this time.
    """

    now_ms: int
    due: Cutoff
    cutoff: Cutoff
    generation: int
    hold: Hold | None = None
    processed: int = 0
    decided_ms: int = LONG_MAX

    @classmethod
    def open(cls, now_ms: int, topic: TopicMetadata) -> Frontier:
        """Return a frontier at the limit of the rules."""
        due = Cutoff.at(now_ms, topic.ttl_seconds)
        return cls(now_ms, due, due, topic.generation)

    @classmethod
    def closed(cls, now_ms: int, topic: TopicMetadata, hold: Hold) -> Frontier:
        """Return a frontier that allows no deletion."""
        return cls(now_ms, Cutoff.at(now_ms, topic.ttl_seconds), Cutoff(0), 0, hold)

    @property
    def old_below(self) -> int:
        """Return the lowest generation that is not old; rows of lower generations may be deleted."""
        return first_kept_generation(self.generation)

    @property
    def processed_now(self) -> int:
        """Return the limit of L7 in this run: 0 if the topic has a hold."""
        return self.processed if self.hold is None else 0

    def within(self, other: Frontier) -> Frontier:
        """Return this frontier, limited by another frontier of the same time."""
        processed, decided_ms = min(self.processed, other.processed), min(self.decided_ms, other.decided_ms)
        same = replace(self, processed=processed, decided_ms=decided_ms)
        if other.cutoff >= self.cutoff and other.old_below >= self.old_below:
            return same
        generation = min(self, other, key=lambda each: each.old_below).generation
        cutoff = min(self.cutoff, other.cutoff)
        return replace(same, cutoff=cutoff, generation=generation, hold=self.hold or other.hold or Hold.FRONTIER)

    def is_processed(self, key: MessageKey | PayloadKey) -> bool:
        """Return whether all consumers have processed a row of the current generation (L7).

        A payload key has no sequence number, so only payloads of earlier milliseconds than the position are processed.
        """
        if isinstance(key, MessageKey):
            return key.publish_ms << 16 | key.sequence < self.processed
        return key.write_ms < self.processed >> 16


class Transactions(Protocol):
    """The facts about transactions when a run starts."""

    def is_invalid(self, pointer: int) -> bool:
        """Return whether a usable snapshot lists the pointer as invalid."""
        ...

    def is_undecided(self, pointer: int) -> bool:
        """Return whether the transaction may still commit."""
        ...


@dataclass(frozen=True, slots=True)
class Keep:
    """A verdict: keep the row unchanged."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Delete:
    """A verdict: delete the row."""

    rule: Rule


@dataclass(frozen=True, slots=True)
class Invert:
    """A verdict: keep the row and negate its write pointer."""

    reason: Reason


Verdict = Keep | Delete | Invert


def decide(
    row: Row,
    topic: TopicMetadata | None,
    frontier: Frontier | None,
    transactions: Transactions,
    referenced: bool,
    expires_ms: int | None,
) -> Verdict:
    """Return the verdict on one row.

    Args:
        topic: the topic's metadata; None if the topic has no metadata row, or the row does not parse (L1).
        frontier: the limit of this run for the topic; None exactly if ``topic`` is None.
        transactions: the transaction snapshot, or a substitute.
        referenced: whether a remaining message row takes its payload from this payload row (L5).
        expires_ms: the time at which the message's own TTL expires (L6); None if it has no TTL of its own.
    """
    if row.key is None:
        return Keep(Reason.UNRECOGNIZED)
    rule, reason = _rule_without_holds(row.key, topic, frontier, expires_ms)
    if rule is not None and topic is not None and frontier is not None:
        if not _is_released(row.key, topic, frontier, expires_ms):
            rule, reason = None, Reason.HELD
        # L5 does not apply to old generations: no reader reaches a message that refers to the payload.
        elif row.table == "payload" and not _is_in_old_generation(row.key, topic, frontier):
            rule, reason = _apply_l5(row.key, rule, transactions, referenced)
    if rule is not None:
        return Delete(rule)
    # L4 covers every kept row, also held and unrecognized rows: a proven boundary applies to the whole table (S4).
    if row.pointer is not None and row.pointer > 0 and transactions.is_invalid(row.pointer):
        return Invert(reason)
    return Keep(reason)


def is_unrecognized(key: MessageKey | PayloadKey | None) -> bool:
    """Return whether TMS cannot have written a key (L0): it does not parse, or its generation or time is invalid."""
    return key is None or key.generation <= 0 or key.time_ms < 0


def _rule_without_holds(
    key: MessageKey | PayloadKey, topic: TopicMetadata | None, frontier: Frontier | None, expires_ms: int | None
) -> tuple[Rule | None, Reason]:
    """Apply L0 to L3, L6 and L7, without holds; return the rule that deletes the row, or the reason to keep it."""
    if is_unrecognized(key):
        return None, Reason.UNRECOGNIZED
    if topic is None or frontier is None:
        return None, Reason.UNKNOWN_TOPIC
    if topic.is_old(key.generation):
        return Rule.OLD_GENERATION, Reason.LIVE
    if key.generation != topic.generation:
        return None, Reason.NEWER_GENERATION
    if frontier.due.expires(key.time_ms) or _has_expired(expires_ms, frontier):
        return Rule.EXPIRED, Reason.LIVE
    return (Rule.PROCESSED if frontier.is_processed(key) else None), Reason.LIVE


def _is_released(
    key: MessageKey | PayloadKey, topic: TopicMetadata, frontier: Frontier, expires_ms: int | None
) -> bool:
    """Return whether this run's frontier releases a row that the rules delete (S8)."""
    if _is_in_old_generation(key, topic, frontier):
        return True
    # S8: the jump itself made the generations between these two old, so all their rows are held.
    if key.generation not in (frontier.generation, topic.generation):
        return False
    if frontier.cutoff.expires(key.time_ms):
        return True
    own_ttl_expired = _has_expired(expires_ms, frontier) and key.time_ms < frontier.decided_ms
    return frontier.hold is None and (own_ttl_expired or frontier.is_processed(key))


def _is_in_old_generation(key: MessageKey | PayloadKey, topic: TopicMetadata, frontier: Frontier) -> bool:
    """Return whether both the topic and the frontier make the row's generation old; then L5 does not apply."""
    return key.generation < min(frontier.old_below, topic.old_below)


def _apply_l5(
    key: MessageKey | PayloadKey, rule: Rule, transactions: Transactions, referenced: bool
) -> tuple[Rule | None, Reason]:
    """Apply L5: a payload stays while its transaction may commit or a remaining message refers to it."""
    if isinstance(key, PayloadKey) and transactions.is_undecided(key.write_pointer):
        return None, Reason.UNDECIDED
    if referenced:
        return None, Reason.REFERENCED
    return rule, Reason.LIVE


def _has_expired(expires_ms: int | None, frontier: Frontier) -> bool:
    return expires_ms is not None and expires_ms <= frontier.now_ms


# -- the limit of each topic's deletions in a run (invariant S8) -------------------------------------------------------


def elapsed_ms(since: ClockAnchor, now: ClockAnchor) -> int:
    """Return the time between two readings, never negative; 0 if it is unknown.

    Within one boot this is the smaller difference of monotonic clock and wall clock. Across boots only the wall clock
    is comparable.
    """
    if not since.comparable(now):
        return 0
    wall = now.wall_ms - since.wall_ms
    if since.boot_id and since.boot_id == now.boot_id:
        wall = min(wall, now.monotonic_ms - since.monotonic_ms)
    return max(0, wall)


def admit(topic: TopicMetadata, now: ClockAnchor) -> FrontierRecord:
    """Return a record that releases all rows that are due now."""
    return _apply_to_record(_new_record(now), topic, Cutoff.at(now.wall_ms, topic.ttl_seconds), now)


def freeze(record: FrontierRecord | None, now: ClockAnchor) -> FrontierRecord:
    """Return the record of a skipped topic. Its cutoff does not advance, so rows that come due then count as a jump."""
    return replace(record or _new_record(now), at=now, pending=None, approved=None)


def approve(record: FrontierRecord, topic: TopicMetadata) -> FrontierRecord:
    """Return a record whose current jump is approved, so that the next run releases it."""
    return replace(record, approved=_jump_target(topic))


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
        record: the saved record; None: the topic is new since the adoption, so all its due rows count as a jump.
        now: the clock reading for elapsed time (:func:`janitor.run.guards.elapsed_clock`).
        hold_seconds: how long a jump is held; 0: not at all.
        allowance_ms: how far a cutoff may advance beyond the elapsed time.
        now_ms: the time at which the rules are evaluated, if it differs from ``now``.
    """
    known = record or _new_record(now)
    target = _jump_target(topic)
    opened = Frontier.open(now.wall_ms if now_ms is None else now_ms, topic)
    if not _is_jump(record, topic, opened.due, now, allowance_ms) or known.approved == target:
        return opened, _apply_to_record(known, topic, opened.due, now)
    pending = known.pending
    if pending is None or pending.target != target or _is_in_future(pending.since, now):
        # S8: the hold of another jump, or one that a wrong clock dated ahead, does not count for this jump.
        pending = PendingJump(topic.generation, topic.ttl_seconds, now, topic.consumed)
    if elapsed_ms(pending.since, now) >= hold_seconds * 1000:
        return opened, _apply_to_record(known, topic, opened.due, now)
    # Rows that are due by time alone are deleted during a hold. A topic without a record has no such rows.
    cutoff_ms = min(opened.due.ms, known.cutoff_ms + elapsed_ms(known.at, now)) if record else 0
    frontier = replace(opened, cutoff=Cutoff(cutoff_ms), generation=known.generation, hold=Hold.FRONTIER)
    return frontier, replace(known, cutoff_ms=cutoff_ms, at=now, pending=pending, approved=None)


def _is_in_future(since: ClockAnchor, now: ClockAnchor) -> bool:
    """Return whether a reading is later than now or not comparable; a hold that started then restarts."""
    return not since.comparable(now) or (since.boot_id != now.boot_id and since.wall_ms > now.wall_ms)


def _is_jump(
    record: FrontierRecord | None, topic: TopicMetadata, due: Cutoff, now: ClockAnchor, allowance_ms: int
) -> bool:
    if record is None:
        return True
    # L7 was switched on: everything that consumers have processed so far comes due at once.
    if topic.consumed and not record.consumed:
        return True
    if topic.old_below > first_kept_generation(record.generation):
        return True
    allowed_ms = record.cutoff_ms + elapsed_ms(record.at, now) + allowance_ms
    # All generations of a deleted topic are old, so its cutoff makes no rows due.
    return not topic.deleted and due.ms > allowed_ms


def _new_record(now: ClockAnchor) -> FrontierRecord:
    return FrontierRecord(generation=0, cutoff_ms=0, at=now, first_seen_ms=now.wall_ms)


def _apply_to_record(known: FrontierRecord, topic: TopicMetadata, due: Cutoff, now: ClockAnchor) -> FrontierRecord:
    applied = replace(known, generation=topic.generation, cutoff_ms=due.ms, at=now, consumed=topic.consumed)
    return replace(applied, pending=None, approved=None)


def _jump_target(topic: TopicMetadata) -> tuple[int, int, bool]:
    return topic.generation, topic.ttl_seconds, topic.consumed

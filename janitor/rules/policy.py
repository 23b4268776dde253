"""Deletion rules for one row.

``decide`` applies rules L0 to L7 (``docs/reference/deletion-rules.md``) to one row. It does no I/O and reads no clock.
A differential test over random stores proves that every engine that works on ranges agrees with it. If two disagree,
this module is right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from tms_core.rowkey import LONG_MAX, Cutoff, MessageKey, PayloadKey
from tms_core.topic import TopicMetadata, first_kept_generation


class Rule(StrEnum):
    """Why a row is deleted or changed."""

    EXPIRED = "expired"
    OLD_GENERATION = "old_generation"
    PROCESSED = "processed"
    INVALID_TRANSACTION = "invalid_transaction"


class Reason(StrEnum):
    """Why a row stays."""

    LIVE = "live"
    UNRECOGNIZED = "unrecognized"
    UNKNOWN_TOPIC = "unknown_topic"
    NEWER_GENERATION = "newer_generation"
    HELD = "held"
    UNDECIDED = "undecided"
    REFERENCED = "referenced"


class Hold(StrEnum):
    """Why a topic's deletions stop short of due rows."""

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
        table: which table it is in.
        key: its parsed key; None when the bytes are not a key of ours.
        pointer: the stored write pointer of a message row, as it is; None without one, and for payload rows.
    """

    table: Literal["message", "payload"]
    key: MessageKey | PayloadKey | None
    pointer: int | None = None


@dataclass(frozen=True, slots=True)
class Frontier:
    """How far one topic's deletions may go in this run (rule S8), beside how far the rules would go.

    Attributes:
        now_ms: the moment the run judges by.
        due: where the rules put the cut-off at that moment.
        cutoff: where this run may put it; never above ``due``.
        generation: the metadata generation this run may act on: rows it makes old may go. 0 makes none old.
        hold: why the run stops short, None when it goes as far as the rules.
        processed: the first position (``milliseconds * 65,536 + sequence``) that L7 leaves; 0: it takes nothing.
        decided_ms: no ttl of a message's own takes published messages from this moment on.
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
        """Return a frontier that goes as far as the rules."""
        due = Cutoff.at(now_ms, topic.ttl_seconds)
        return cls(now_ms, due, due, topic.generation)

    @classmethod
    def closed(cls, now_ms: int, topic: TopicMetadata, hold: Hold) -> Frontier:
        """Return a frontier behind which nothing may be deleted."""
        return cls(now_ms, Cutoff.at(now_ms, topic.ttl_seconds), Cutoff(0), 0, hold)

    @property
    def old_below(self) -> int:
        """Rows of generations below this number may go as old."""
        return first_kept_generation(self.generation)

    @property
    def processed_now(self) -> int:
        """Return the limit of this run by L7: nothing of a topic in which anything is held."""
        return self.processed if self.hold is None else 0

    def within(self, other: Frontier) -> Frontier:
        """This frontier where it goes no further than another one of the same moment."""
        processed, decided_ms = min(self.processed, other.processed), min(self.decided_ms, other.decided_ms)
        same = replace(self, processed=processed, decided_ms=decided_ms)
        if other.cutoff >= self.cutoff and other.old_below >= self.old_below:
            return same
        generation = min(self, other, key=lambda each: each.old_below).generation
        cutoff = min(self.cutoff, other.cutoff)
        return replace(same, cutoff=cutoff, generation=generation, hold=self.hold or other.hold or Hold.FRONTIER)

    def is_processed(self, key: MessageKey | PayloadKey) -> bool:
        """Return whether all consumers have done with a row of the current generation (L7).

        A payload is older than each message that refers to it, so it has to lie before the last millisecond.
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
    """The row stays as it is."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Delete:
    """The row goes."""

    rule: Rule


@dataclass(frozen=True, slots=True)
class Invert:
    """The row stays, with its write pointer negated."""

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
        row: the row.
        topic: the topic's metadata, None when it has no row or its row does not parse (L1).
        frontier: how far this run may go for the topic; None exactly when ``topic`` is.
        transactions: the transaction snapshot in use, or a substitute.
        referenced: whether a message row that stays takes its payload from this payload row (L5).
        expires_ms: the first moment at which a ttl of the message's own takes it (L6), None without one.
    """
    if row.key is None:
        return Keep(Reason.UNRECOGNIZED)
    rule, reason = _claim(row.key, topic, frontier, expires_ms)
    if rule is not None and topic is not None and frontier is not None:
        if not _within_reach(row.key, topic, frontier, expires_ms):
            rule, reason = None, Reason.HELD
        elif row.table == "payload" and not _old_either_way(row.key, topic, frontier):
            rule, reason = _payload_needed(row.key, rule, transactions, referenced)
    if rule is not None:
        return Delete(rule)
    if row.pointer is not None and row.pointer > 0 and transactions.is_invalid(row.pointer):
        return Invert(reason)
    return Keep(reason)


def is_unrecognized(key: MessageKey | PayloadKey | None) -> bool:
    """Return whether TMS writes no such key (rule L0): it does not parse, or a number in it is out of range."""
    return key is None or key.generation <= 0 or key.time_ms < 0


def _claim(
    key: MessageKey | PayloadKey, topic: TopicMetadata | None, frontier: Frontier | None, expires_ms: int | None
) -> tuple[Rule | None, Reason]:
    """What L0 to L3, L6 and L7 say when nothing is held."""
    if is_unrecognized(key):
        return None, Reason.UNRECOGNIZED
    if topic is None or frontier is None:
        return None, Reason.UNKNOWN_TOPIC
    if topic.is_old(key.generation):
        return Rule.OLD_GENERATION, Reason.LIVE
    if key.generation != topic.generation:
        return None, Reason.NEWER_GENERATION
    if frontier.due.expires(key.time_ms) or _past(expires_ms, frontier):
        return Rule.EXPIRED, Reason.LIVE
    return (Rule.PROCESSED if frontier.is_processed(key) else None), Reason.LIVE


def _within_reach(
    key: MessageKey | PayloadKey, topic: TopicMetadata, frontier: Frontier, expires_ms: int | None
) -> bool:
    """Return whether this run's frontier lets go of a row that the rules delete (S8)."""
    if _old_either_way(key, topic, frontier):
        return True
    if key.generation not in (frontier.generation, topic.generation):
        return False
    if frontier.cutoff.expires(key.time_ms):
        return True
    early = _past(expires_ms, frontier) and key.time_ms < frontier.decided_ms
    return frontier.hold is None and (early or frontier.is_processed(key))


def _old_either_way(key: MessageKey | PayloadKey, topic: TopicMetadata, frontier: Frontier) -> bool:
    """Return whether both the rules and the frontier take the row for its generation, so that L5 does not ask."""
    return key.generation < min(frontier.old_below, topic.old_below)


def _payload_needed(
    key: MessageKey | PayloadKey, rule: Rule, transactions: Transactions, referenced: bool
) -> tuple[Rule | None, Reason]:
    """L5: a payload stays while its transaction may commit or a message that stays refers to it."""
    if isinstance(key, PayloadKey) and transactions.is_undecided(key.write_pointer):
        return None, Reason.UNDECIDED
    if referenced:
        return None, Reason.REFERENCED
    return rule, Reason.LIVE


def _past(expires_ms: int | None, frontier: Frontier) -> bool:
    return expires_ms is not None and expires_ms <= frontier.now_ms

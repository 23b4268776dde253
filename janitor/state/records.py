"""The records of the state, as frozen values, so that code which judges by one does not need the state itself.

Times are milliseconds since the epoch; write pointers, bounds and times are signed 64-bit numbers.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum, unique
from functools import cache
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from tms_core.topic import TopicId


@unique
class Note(StrEnum):
    """The names of all notes that are kept in the state (:meth:`janitor.state.base.State.note`).

    They stand together because two of one name would be read as each other. What a note's value is, the modules say
    that write it. Names stay, since states have them.
    """

    CONSUMERS = "consumers"
    DAEMON = "daemon"
    DECISIONS = "decided"
    IN_PROGRESS = "in_progress"
    KEPT = "kept"
    LATE = "late_transactions"
    LINEAGE = "lineage"
    OVERDUE = "overdue"
    REFUTED = "refuted"
    REHEARSED = "rehearsed_ms"
    RESTORED = "restored"
    RETIRED = "retired_run"
    ROUND = "round"
    SNAPSHOT = "snapshot"
    STATISTICS = "statistics"
    SUCCESS = "success_ms"
    TOPICS = "topics"
    TOPIC_CHANGES = "topic_changes"
    TOPIC_SIZES = "topic_sizes"
    TRANSACTION_ENDS = "transactions_decided"
    WANTED = "full_pass_wanted_ms"


#: Later than any clock shows: where the wall time of readings lies of a boot whose clock is known to be wrong.
UNKNOWN_MS = 2**62

#: The note with the store's lineage as it was remembered last (invariant S13): ``Store.lineage``.
LINEAGE = Note.LINEAGE
#: The note that says how it showed that the store was restored; until it is adopted anew.
RESTORED = Note.RESTORED

#: Bytes of randomness in a store's mark: enough that no two stores ever get the same.
MARK_BYTES = 16


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """The one store this state is about (invariant S13).

    Attributes:
        mark: a random name given at first contact; another mark is another store.
        identity: ``Store.identity()`` when it was last found right.
        adopted_ms: when it was adopted; None as long as it is not.
        snapshot_timestamp_ms: of the newest transaction snapshot used so far; None before the first.
        snapshot_write_pointer: that snapshot's write pointer; one below it is another transaction system's.
    """

    mark: str
    identity: str
    adopted_ms: int | None = None
    snapshot_timestamp_ms: int | None = None
    snapshot_write_pointer: int | None = None

    @classmethod
    def first_contact(cls, identity: str, token_hex: Callable[[int], str]) -> StoreRecord:
        """Return a record of a store met just now, not adopted.

        Args:
            identity: ``Store.identity()``.
            token_hex: makes that many random bytes, as hex: ``secrets.token_hex``.
        """
        return cls(token_hex(MARK_BYTES), identity)


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """A reading of a machine's clocks (``tms_core.clock.Clock``) to measure elapsed time from (invariant S7).

    Attributes:
        wall_ms: wall time; from ``UNKNOWN_MS`` on it can only be compared with other readings of the same boot.
    """

    wall_ms: int
    monotonic_ms: int
    boot_id: str

    def comparable(self, other: ClockAnchor) -> bool:
        """Return whether the time between the two readings is known."""
        known = self.wall_ms < UNKNOWN_MS
        if known != (other.wall_ms < UNKNOWN_MS):
            return False
        return known or (bool(self.boot_id) and self.boot_id == other.boot_id)


@dataclass(frozen=True, slots=True)
class PendingJump:
    """A held change of a topic beyond the passage of time, and its start."""

    generation: int
    ttl_seconds: int
    since: ClockAnchor
    consumed: bool = False

    @property
    def target(self) -> tuple[int, int, bool]:
        """Return the target of a change: generation, TTL in seconds, and whether processed rows are deleted (L7)."""
        return self.generation, self.ttl_seconds, self.consumed


@dataclass(frozen=True, slots=True)
class FrontierRecord:
    """How far deleting has come in one topic (invariant S8).

    Attributes:
        generation: the metadata generation last applied, signed; 0 before the first.
        cutoff_ms: the cut-off last applied.
        at: when that was.
        first_seen_ms: when the topic was first met.
        pending: a held jump.
        approved: :attr:`PendingJump.target` of the jump that was approved.
        consumed: whether rows that were processed went (rule L7).
    """

    generation: int
    cutoff_ms: int
    at: ClockAnchor
    first_seen_ms: int
    pending: PendingJump | None = None
    approved: tuple[int, int, bool] | None = None
    consumed: bool = False


@dataclass(frozen=True, slots=True)
class OpenIdRecord:
    """An invalid transaction's write pointer, and whether its rows can all have been seen.

    Attributes:
        scanned_ms: when the last complete pass that covered it began; None: none has.
        closed_ms: when a full pass closed it; None: its client may still write, or no such pass has come since.
    """

    pointer: int
    first_seen_ms: int
    scanned_ms: int | None = None
    closed_ms: int | None = None


@dataclass(frozen=True, slots=True)
class KnownIds:
    """Every invalid transaction that is remembered, as it counts at one moment (``State.known_ids``).

    Attributes:
        open_ids: those whose client may still write, or that no full pass has come to since, in order of pointer.
        closed: pointers of all the others, ascending. There may be a million; the array must not be changed.
    """

    open_ids: Mapping[int, OpenIdRecord]
    closed: array[int]

    def __contains__(self, pointer: int) -> bool:
        return pointer in self.open_ids or is_among(self.closed, pointer)


Mode = Literal["plan", "apply"]
#: The results of runs that have not done their work.
_BAD_RESULTS = frozenset({"failed", "lost", "blocked", "partial"})


@dataclass(frozen=True, slots=True)
class StoreBytes:
    """Size of the store on its disk at the start of a pass, and after a run's compaction; None: unknown."""

    before: int | None = None
    after: int | None = None


@dataclass(frozen=True, slots=True)
class MessagesLeft:
    """The approximate number of messages in the topics of a pass, before and after it, or after the planned run; None:
    unknown.

    A pass does not read live rows, so this is the background count, less the rows deleted since.

    Attributes:
        counted_ms: the time of the oldest count.
    """

    before: int | None = None
    left: int | None = None
    counted_ms: int | None = None


NO_SIZES = StoreBytes()
NOT_COUNTED = MessagesLeft()


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run and its numbers, which are made from its report.

    Attributes:
        result: ``done``, ``partial``, ``blocked`` (by a guard), ``interrupted`` (by a signal or a pause), ``failed`` or
            ``lost``; empty: not finished.
        error: the error of a failed run; empty otherwise.
        expired, old_generation, processed, invalid_transaction: rows that were deleted or inverted, by rule.
        held: due rows that a hold keeps; also those that only an earlier run counted.
        deleted_bytes: the approximate size of the deleted rows, since values are estimated.
        blocked_by: the guards that blocked it.
        heartbeat_ms: when it last showed that it was alive (invariant S10).
    """

    id: str
    mode: Mode
    started_ms: int
    finished_ms: int | None = None
    result: str = ""
    expired: int = 0
    old_generation: int = 0
    processed: int = 0
    invalid_transaction: int = 0
    held: int = 0
    deleted_bytes: int = 0
    store_bytes: StoreBytes = NO_SIZES
    messages: MessagesLeft = NOT_COUNTED
    duration_seconds: float = 0.0
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    full: bool = False
    errors: tuple[str, ...] = ()
    error: str = ""
    blocked_by: tuple[str, ...] = ()
    heartbeat_ms: int | None = None

    @property
    def is_bad(self) -> bool:
        """Return whether the run failed in any way.

        A store that is not adopted is no failure; the status reports it separately.
        """
        return self.result in _BAD_RESULTS and self.blocked_by != ("adoption",)


@dataclass(frozen=True, slots=True)
class Pause:
    """Topics in which nothing is done until they are resumed; ``pattern`` is a shell pattern on ``NS:TOPIC``."""

    pattern: str
    since_ms: int


#: The pattern that stands for everything.
EVERYTHING = "*:*"


@dataclass(frozen=True, slots=True)
class Strikes:
    """Failures of one topic in a row (invariant S9).

    Attributes:
        count: how many runs in a row failed in it.
        error: the last message.
        quarantined_ms: when it was put aside; None while it is still retried in every run.
        probe_ms: when it will be tried again; None while it is not put aside.
    """

    count: int
    last_ms: int
    error: str
    quarantined_ms: int | None = None
    probe_ms: int | None = None


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Rows of one topic, generation and table that one run took by one rule.

    Attributes:
        rule: ``expired``, ``old_generation``, ``processed`` or ``invalid_transaction``.
        start: the first deleted key.
        stop: just behind the last one. Rows between the two may have stayed: those the rule did not take.
        rows: how many; None when the run died and the number with it, and ``stop`` is then where it might have come to.
        metadata_generation, ttl_seconds, cutoff_ms: the policy of the deletion.
        snapshot_timestamp_ms: of the transaction snapshot in use; None without one.
    """

    run_id: str
    at_ms: int
    topic: TopicId
    generation: int
    table: str
    rule: str
    start: bytes
    stop: bytes
    rows: int | None
    oldest_ms: int | None
    newest_ms: int | None
    metadata_generation: int
    ttl_seconds: int
    cutoff_ms: int
    snapshot_timestamp_ms: int | None


class CounterKey(NamedTuple):
    """One series of a counter: its name without the prefix, and its labels in order."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class TopicCount:
    """The background count of one topic.

    Attributes:
        size_bytes: of keys and payloads, in both tables.
        oldest_ms, newest_ms: publish times; None when it is empty.
        counted_ms: when the count of this topic was finished.
    """

    messages: int
    size_bytes: int
    oldest_ms: int | None
    newest_ms: int | None
    counted_ms: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """One key interval ``[start, stop)`` of the message table that a pass left clean (invariant S4).

    Attributes:
        stop: None is the last row of the table.
        snapshot_timestamp_ms: of the snapshot the pass worked with.
        bound: that snapshot's prune upper bound.
        started_ms: when the pass started.
    """

    start: bytes
    stop: bytes | None
    snapshot_timestamp_ms: int
    bound: int
    started_ms: int
    run_id: str


@dataclass(frozen=True, slots=True)
class Claim:
    """No row carries a positive write pointer of an invalid transaction up to and including ``bound``."""

    bound: int
    made_ms: int
    run_id: str


def is_among(ascending: array[int], pointer: int) -> bool:
    """Return whether an ascending array holds the pointer."""
    at = bisect_left(ascending, pointer)
    return at < len(ascending) and ascending[at] == pointer


def row_of(record: Any) -> tuple[Any, ...]:
    """Return a record as it is kept: its fields in their order.

    Args:
        record: of one of the classes above, or a topic's name.
    """
    kind: Any = type(record)
    return _fields_of(kind)(record)


def in_json(value: Any) -> Any:
    """Return a value that JSON cannot represent as one that it can: bytes in hex, a record as its row."""
    return value.hex() if isinstance(value, bytes) else row_of(value)


@cache
def _fields_of(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(each.name for each in fields(kind)))

"""The records of the state, as frozen values, so that pure functions can use them without the state.

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
    """The names of all notes in the state (:meth:`janitor.state.base.State.note`).

    They are in one place to keep them unique. The modules that write a note define its value. Existing states have
    these names, so they must not change.
    """

    CONSUMERS = "consumers"
    DAEMON = "daemon"
    DECISIONS = "decided"
    FULL_REQUEST = "full_pass_wanted_ms"
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


#: The first wall time of a boot whose clock is known to be wrong; later than any clock.
UNKNOWN_MS = 2**62

#: The note with the last saved lineage of the store (invariant S13): ``Store.lineage``.
LINEAGE = Note.LINEAGE
#: The note with the evidence that the store was restored, until it is adopted again.
RESTORED = Note.RESTORED

#: The number of random bytes in a store's mark, which makes marks unique.
MARK_BYTES = 16


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """The store that the state describes (invariant S13).

    Attributes:
        mark: a random name from the first contact; another mark means another store.
        identity: the last accepted ``Store.identity()``.
        adopted_ms: the time of the adoption; None if the store is not adopted.
        snapshot_timestamp_ms: the time of the newest used transaction snapshot; None if no snapshot was used.
        snapshot_write_pointer: the write pointer of that snapshot; a lower pointer belongs to another transaction
            system.
    """

    mark: str
    identity: str
    adopted_ms: int | None = None
    snapshot_timestamp_ms: int | None = None
    snapshot_write_pointer: int | None = None

    @classmethod
    def first_contact(cls, identity: str, token_hex: Callable[[int], str]) -> StoreRecord:
        """Return the record of a new store that is not adopted.

        Args:
            identity: ``Store.identity()``.
            token_hex: returns random bytes as hex (``secrets.token_hex``).
        """
        return cls(token_hex(MARK_BYTES), identity)


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """A reading of a machine's clocks (``tms_core.clock.Clock``), from which elapsed time is measured (invariant S7).

    Attributes:
        wall_ms: wall time; a time from ``UNKNOWN_MS`` on is comparable only within the same boot.
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
    """A held jump of a topic's cutoff, and its start."""

    generation: int
    ttl_seconds: int
    since: ClockAnchor
    consumed: bool = False

    @property
    def target(self) -> tuple[int, int, bool]:
        """Return the target of the jump: generation, TTL in seconds, and whether processed rows are deleted (L7)."""
        return self.generation, self.ttl_seconds, self.consumed


@dataclass(frozen=True, slots=True)
class FrontierRecord:
    """The last applied limit of the deletions in one topic (invariant S8).

    Attributes:
        generation: the last applied metadata generation, signed; 0 before the first.
        cutoff_ms: the last applied cutoff.
        at: the clock readings at that time.
        first_seen_ms: the time of the first contact with the topic.
        pending: the held jump; None without a jump.
        approved: :attr:`PendingJump.target` of the approved jump; None without an approval.
        consumed: whether rule L7 was applied.
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
    """The write pointer of an invalid transaction, and the passes that have searched for its rows.

    Attributes:
        scanned_ms: the start of the last complete pass that covered it; None before the first such pass.
        closed_ms: the time at which a full pass closed it; None while its client may write and until a full pass.
    """

    pointer: int
    first_seen_ms: int
    scanned_ms: int | None = None
    closed_ms: int | None = None


@dataclass(frozen=True, slots=True)
class KnownIds:
    """All remembered invalid transactions at one time (``State.known_ids``).

    Attributes:
        open_ids: transactions whose client may still write, or that no full pass has covered since, by pointer.
        closed: the pointers of all other transactions, ascending, up to a million; do not modify the array.
    """

    open_ids: Mapping[int, OpenIdRecord]
    closed: array[int]

    def __contains__(self, pointer: int) -> bool:
        return pointer in self.open_ids or is_among(self.closed, pointer)


Mode = Literal["plan", "apply"]
#: The results of runs that count as failed.
_BAD_RESULTS = frozenset({"failed", "lost", "blocked", "partial"})


@dataclass(frozen=True, slots=True)
class StoreBytes:
    """The size of the store on disk at the start of a pass and after a run's compaction; None if unknown."""

    before: int | None = None
    after: int | None = None


@dataclass(frozen=True, slots=True)
class MessagesLeft:
    """The approximate number of messages in the topics of a pass, before and after it; None if unknown.

    A pass does not read all live rows, so this is the background count minus the rows that were deleted since.

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
    """One run and its numbers, which derive from its report.

    Attributes:
        result: ``done``, ``partial``, ``blocked`` (by a guard), ``interrupted`` (by a signal or a pause), ``failed`` or
            ``lost``; empty while the run is not finished.
        error: the error of a failed run; otherwise empty.
        expired, old_generation, processed, invalid_transaction: the number of deleted or inverted rows, by rule.
        held: the number of due rows that a hold keeps, including rows that only an earlier run counted.
        deleted_bytes: the approximate size of the deleted rows, since the size of values is estimated.
        blocked_by: the guards that blocked the run.
        heartbeat_ms: the time of its last heartbeat (invariant S10).
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

        A store that is not adopted is not a failure; the status reports it separately.
        """
        return self.result in _BAD_RESULTS and self.blocked_by != ("adoption",)


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause of topics until they are resumed; ``pattern`` is a shell pattern for ``NS:TOPIC``."""

    pattern: str
    since_ms: int


#: The pattern that matches all topics.
EVERYTHING = "*:*"


@dataclass(frozen=True, slots=True)
class Strikes:
    """Consecutive failures of one topic (invariant S9).

    Attributes:
        count: the number of consecutive runs in which the topic failed.
        error: the last error message.
        quarantined_ms: the start of its quarantine; None while every run retries the topic.
        probe_ms: the time of its next probe; None without a quarantine.
    """

    count: int
    last_ms: int
    error: str
    quarantined_ms: int | None = None
    probe_ms: int | None = None


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Rows of one topic, generation and table that one run deleted or inverted by one rule.

    Attributes:
        rule: ``expired``, ``old_generation``, ``processed`` or ``invalid_transaction``.
        start: the first deleted key.
        stop: the key after the last deleted key. Rows in between to which the rule does not apply were kept.
        rows: the number of rows; None if unknown, because the run died. Then ``stop`` is the first key that the run
            cannot have reached.
        metadata_generation, ttl_seconds, cutoff_ms: the policy of the deletion.
        snapshot_timestamp_ms: the time of the transaction snapshot in use; None without a snapshot.
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
    """A series of a counter: its name without the prefix, and its labels in order."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class TopicCount:
    """The background count of one topic.

    Attributes:
        size_bytes: the size of keys and payloads, in both tables.
        oldest_ms, newest_ms: the publish times of the oldest and newest message; None if the topic is empty.
        counted_ms: the time at which the count of this topic finished.
    """

    messages: int
    size_bytes: int
    oldest_ms: int | None
    newest_ms: int | None
    counted_ms: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """A key interval ``[start, stop)`` of the message table that a pass left clean (invariant S4).

    Attributes:
        stop: the key after the interval; None for the end of the table.
        snapshot_timestamp_ms: the time of the snapshot that the pass used.
        bound: the prune upper bound of that snapshot, or less if pointers could not be negated.
        started_ms: the start of the pass.
    """

    start: bytes
    stop: bytes | None
    snapshot_timestamp_ms: int
    bound: int
    started_ms: int
    run_id: str


@dataclass(frozen=True, slots=True)
class ProvenBoundary:
    """A proof that no row has a positive write pointer of an invalid transaction up to and including ``bound``."""

    bound: int
    made_ms: int
    run_id: str


def is_among(ascending: array[int], pointer: int) -> bool:
    """Return whether an ascending array contains a pointer."""
    at = bisect_left(ascending, pointer)
    return at < len(ascending) and ascending[at] == pointer


def row_of(record: Any) -> tuple[Any, ...]:
    """Return the stored form of a record: its fields in their order.

    Args:
        record: an object of a class above, or the name of a topic.
    """
    kind: Any = type(record)
    return _fields_of(kind)(record)


def in_json(value: Any) -> Any:
    """Return the JSON form of bytes (hex) or of a record (its row)."""
    return value.hex() if isinstance(value, bytes) else row_of(value)


@cache
def _fields_of(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(each.name for each in fields(kind)))

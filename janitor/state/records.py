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

    They are in one place so that no two have the same name. The modules that write a note define its value. Existing
    states have these names, so they must not change.
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


#: The start of the wall times of a boot whose clock is known to be wrong; later than any clock.
UNKNOWN_MS = 2**62

#: The note with the last saved lineage of the store (invariant S13): ``Store.lineage``.
LINEAGE = Note.LINEAGE
#: The note with the evidence that the store was restored, until it is adopted again.
RESTORED = Note.RESTORED

#: Bytes of randomness in a store's mark: enough that no two stores ever get the same.
MARK_BYTES = 16


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """The one store this state is about (invariant S13).

    Attributes:
        mark: a random name given at first contact; another mark is another store.
        identity: the last accepted ``Store.identity()``.
        adopted_ms: the time of its adoption; None: it is not adopted.
        snapshot_timestamp_ms: the time of the newest used transaction snapshot; None: no snapshot was used.
        snapshot_write_pointer: the write pointer of that snapshot; a lower one belongs to another transaction system.
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
            token_hex: returns random bytes as hex (``secrets.token_hex``).
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
    """The last applied limit of the deletions in one topic (invariant S8).

    Attributes:
        generation: the last applied metadata generation, signed; 0: none.
        cutoff_ms: the last applied cutoff.
        at: the clocks at that time.
        first_seen_ms: the time of the first contact with the topic.
        pending: a held jump.
        approved: :attr:`PendingJump.target` of the jump that was approved.
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
        scanned_ms: the start of the last complete pass that covered it; None: no pass has.
        closed_ms: the time at which a full pass closed it; None: its client may still write, or no full pass followed.
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
        closed: the pointers of all others, ascending. There may be a million; the array must not be changed.
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

        A store that is not adopted is no failure; the status reports it separately.
        """
        return self.result in _BAD_RESULTS and self.blocked_by != ("adoption",)


@dataclass(frozen=True, slots=True)
class Pause:
    """Topics in which nothing is done until they are resumed; ``pattern`` is a shell pattern on ``NS:TOPIC``."""

    pattern: str
    since_ms: int


#: The pattern that matches all topics.
EVERYTHING = "*:*"


@dataclass(frozen=True, slots=True)
class Strikes:
    """Failures of one topic in a row (invariant S9).

    Attributes:
        count: the number of runs in a row that failed in it.
        error: the last message.
        quarantined_ms: the start of its quarantine; None: every run retries it.
        probe_ms: the time of its next probe; None: it is not in quarantine.
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
        stop: right after the last deleted key. Rows in between to which the rule does not apply have stayed.
        rows: their number; None: unknown, because the run died. Then ``stop`` is the furthest key that it may have
            reached.
        metadata_generation, ttl_seconds, cutoff_ms: the policy of the deletion.
        snapshot_timestamp_ms: the time of the transaction snapshot in use; None: no snapshot.
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
        size_bytes: the size of keys and payloads, in both tables.
        oldest_ms, newest_ms: publish times; None: the topic is empty.
        counted_ms: the end of the count of this topic.
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
        stop: None: the end of the table.
        snapshot_timestamp_ms: the time of the snapshot that the pass used.
        bound: the prune upper bound of that snapshot, or less if rows had to stay.
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
    """No row carries a positive write pointer of an invalid transaction up to and including ``bound``."""

    bound: int
    made_ms: int
    run_id: str


def is_among(ascending: array[int], pointer: int) -> bool:
    """Return whether an ascending array holds the pointer."""
    at = bisect_left(ascending, pointer)
    return at < len(ascending) and ascending[at] == pointer


def row_of(record: Any) -> tuple[Any, ...]:
    """Return a record as it is stored: its fields in their order.

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

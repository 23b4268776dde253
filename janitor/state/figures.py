"""Typed models of consumers, guards, snapshots and blocked readers, from the state to the status page.

The state stores a model as JSON and reads it as the same type (:mod:`janitor.state.values`). Status, API,
``--format json``, the control socket, metrics and page use the model itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from janitor.state.base import State
from janitor.state.records import Note
from janitor.state.values import pack
from tms_core.errors import code_of_guard

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GuardNote:
    """A guard's finding.

    Attributes:
        tripped: whether the guard blocked the run; False for a warning.
        code: the error code (``docs/reference/errors.md``).
    """

    guard: str
    tripped: bool
    message: str
    code: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", code_of_guard(self.guard))


@dataclass(frozen=True, slots=True)
class ConsumerFigures:
    """The position and lag of one consumer in the last background count.

    Attributes:
        position_ms: publish time of the last message that it has read; 0 if it has not read any.
        updated_ms: the time of its last update.
        lag_messages: the number of unread messages.
        oldest_unread_ms: publish time of the oldest unread message; None if it has read all.
        expired: whether messages may have expired unread.
        open_claims: for a group, the number of ranges that transactions in progress have claimed.
        redelivered: for a group, the number of unprocessed ranges that were delivered more than once.
    """

    tms_namespace: str
    topic: str
    generation: int
    consumer: str
    position_ms: int
    updated_ms: int
    lag_messages: int
    oldest_unread_ms: int | None
    expired: bool
    counted_ms: int
    open_claims: int = 0
    redelivered: int = 0


@dataclass(frozen=True, slots=True)
class BlockedReaders:
    """A transaction in progress whose messages block readers that read in transactions.

    Attributes:
        client: the client of the transaction; empty if unknown.
        since_ms: publish time of its first message.
        topics: the first topics that it has published to.
        more_topics: the number of its other topics.
        command: the command that aborts the transaction. It is not stored, because it has options of the caller.
    """

    transaction: str
    client: str
    since_ms: int
    topics: Sequence[str]
    more_topics: int = 0
    command: str = ""

    @property
    def readers(self) -> str:
        """Return the topics with blocked readers as text."""
        named = ", ".join(self.topics[:3])
        more = len(self.topics[3:]) + self.more_topics
        return f"{named} and {more} more" if more else named


@dataclass(frozen=True, slots=True)
class SnapshotRead:
    """The transaction snapshot of a run.

    Attributes:
        timestamp_ms: its time; None if there is no snapshot.
        problem: a ``Problem`` of :mod:`janitor.sweep.transactions`; empty if the snapshot is used.
    """

    timestamp_ms: int | None = None
    source: str = ""
    problem: str = ""
    message: str = ""
    invalid: int = 0
    in_progress: int = 0


@dataclass(frozen=True, slots=True)
class StatisticsFigures:
    """The last count of the whole store on Spark.

    Attributes:
        rows, payload_rows, size_bytes: totals of all topics and generations.
        overdue: rows of both tables that the rules delete, by rule.
        orphans: payload rows that no message refers to.
        missing: references to payloads that do not exist.
        blocking: the undecided write pointer that has blocked readers longest; None if readers are not blocked.
        blocking_topic: a topic with rows of that pointer, with its generation.
        blocking_since_ms: the start of that transaction.
    """

    counted_ms: int
    rows: int = 0
    payload_rows: int = 0
    size_bytes: int = 0
    overdue: Mapping[str, int] = field(default_factory=dict)
    orphans: int = 0
    missing: int = 0
    blocking: str | None = None
    blocking_topic: str | None = None
    blocking_since_ms: int | None = None


@dataclass(frozen=True)
class KeptFigures(Generic[T]):
    """A note of the state with a type.

    Attributes:
        note: the name of the note.
        kind: the type of its value.
        absent: the value if the state does not have the note.
    """

    note: Note
    kind: Any
    absent: T

    def read(self, state: State) -> T:
        """Return the value.

        Raises:
            StateError: the state cannot be read, or the value is damaged.
        """
        found: T | None = state.note(self.note, self.kind)
        return self.absent if found is None else found

    def save(self, state: State, value: T) -> None:
        """Write the value, unless it is unchanged.

        Raises:
            StateError: the state cannot be read or written, or the value is damaged.
        """
        if value != self.read(state):
            state.save_note(self.note, pack(value))


CONSUMERS: KeptFigures[list[ConsumerFigures]] = KeptFigures(Note.CONSUMERS, list[ConsumerFigures], [])
LATE: KeptFigures[list[BlockedReaders]] = KeptFigures(Note.LATE, list[BlockedReaders], [])
SNAPSHOT: KeptFigures[SnapshotRead] = KeptFigures(Note.SNAPSHOT, SnapshotRead, SnapshotRead())
STATISTICS: KeptFigures[StatisticsFigures | None] = KeptFigures(Note.STATISTICS, StatisticsFigures, None)

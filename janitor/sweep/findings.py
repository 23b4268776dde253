"""What a pass finds and what is done with it, as values: batches of rows with one fate, and what else is to be counted.

A finding is a batch and never a row, so that nothing on the way costs an object for each row. A step pulls findings,
hands them to an executor (:mod:`janitor.sweep.executor`), and then counts them, with what the executor did, in an
outcome (:mod:`janitor.sweep.outcome`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from janitor.report import DataTable
from janitor.rules.policy import Hold, Reason, Rule
from janitor.sweep.run import TopicWork
from tms_core.errors import ArchiveError, StoreError, WriteRefused
from tms_core.tables.base import KeyRange, KeyReads, MessageReads, Origin, TxCell
from tms_core.tables.side import Expiry
from tms_core.topic import TopicId


class Batch(NamedTuple):
    """Rows of one topic, generation and table with one fate, in key order.

    Attributes:
        origin: their rows as the store returned them.
    """

    table: DataTable
    generation: int
    rule: Rule
    keys: list[bytes]
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Due:
    """Rows that the rules delete.

    Attributes:
        table: where they are.
        size_bytes: key bytes exactly, value bytes as the store estimates them.
        hold: why they stay for now; None: they go.
        label: the hold they are shown under.
        expiries: those of messages with expired TTLs of their own; none of others.
    """

    work: TopicWork
    table: KeyReads
    batch: Batch
    size_bytes: int
    hold: Hold | None
    label: Hold | None
    expiries: Sequence[Expiry] = ()


@dataclass(frozen=True, slots=True)
class Invalid:
    """Message rows of one topic and generation whose transactions are invalid and whose pointers are to be negated.

    Attributes:
        work: the topic's; None without readable metadata.
        label: the hold they are shown under.
    """

    topic: TopicId
    generation: int
    work: TopicWork | None
    table: MessageReads
    cells: Sequence[TxCell]
    label: Hold | None


@dataclass(frozen=True, slots=True)
class Kept:
    """Rows that stay.

    Attributes:
        keys: those that are none of ours, to be named.
        prefix: of the topic that has no readable metadata, to be named.
    """

    reason: Reason
    rows: int
    table: DataTable = "message"
    keys: Sequence[bytes] = ()
    prefix: bytes | None = None


@dataclass(frozen=True, slots=True)
class Untouchable:
    """An invalid write pointer that stays as it is, so that no boundary may pass it."""

    pointer: int


@dataclass(frozen=True, slots=True)
class ExpiredMessages:
    """Messages with a ttl of their own whose rows a range has taken."""

    expiries: Sequence[Expiry]


@dataclass(frozen=True, slots=True)
class Read:
    """A page that was read, or with no rows a jump to another place."""

    phase: str
    topic: TopicId | None
    rows: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A topic that is left undone.

    Attributes:
        reason: ``store`` or ``moved``.
        refused: whether the store refused to write, as it refuses all; the topic is not to blame (rule S9).
    """

    prefix: bytes
    table: DataTable
    reason: str
    message: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Rows of no topic in particular that could not be read."""

    message: str


@dataclass(frozen=True, slots=True)
class ReachedKey:
    """All before this key was gone through, apart from topics that were left undone."""

    key: bytes


Finding = Due | Invalid | Kept | Untouchable | ExpiredMessages | Read | Failed | Unreadable | ReachedKey


class Done(NamedTuple):
    """What an executor did with a finding.

    Attributes:
        keys: the rows that it deleted.
        cells: the rows whose pointers it negated.
        at_ms: when; None where nothing is written down, as in a plan.
        found: where something is to be done, by an executor that only looks.
        stop: why the rest of the topic is left: ``moved``, its metadata is no longer what was planned by (rule S2);
            ``withheld``, nothing may be deleted in it now; ``unsure``, the store failed on the batch, so it is not
            known which of its rows are deleted.
        error: why rows could not be archived, or how the store failed.
    """

    keys: Sequence[bytes] = ()
    cells: Sequence[TxCell] = ()
    at_ms: int | None = None
    found: KeyRange | None = None
    stop: Literal["moved", "withheld", "unsure"] | None = None
    error: ArchiveError | StoreError | None = None


NOTHING_DONE = Done()
MOVED, WITHHELD = Done(stop="moved"), Done(stop="withheld")


class DeletionCount(NamedTuple):
    """Deletions by one rule; Metrics do not count ``size_bytes`` of inversions."""

    table: DataTable
    rule: Rule
    rows: int
    size_bytes: int


def unrecognized(table: DataTable, keys: Sequence[bytes]) -> Kept:
    """Keys that are none of ours (L0)."""
    return Kept(Reason.UNRECOGNIZED, len(keys), table, keys)


def failed(table: DataTable, prefix: bytes, error: StoreError) -> Failed:
    """Return a topic is left undone, for this step and the next ones."""
    refused = isinstance(error, WriteRefused)
    return Failed(prefix, table, "store", f"topic {prefix[:-1].decode()}: {error}", refused)


def times_of(batch: Batch) -> tuple[int, int]:
    """Time of the oldest and of the newest row; message rows are in order of time."""
    if batch.table == "message":
        times = (batch.keys[0][-10:-2], batch.keys[-1][-10:-2])
    else:
        written = [key[-10:-2] for key in batch.keys]
        times = (min(written), max(written))
    return int.from_bytes(times[0], "big"), int.from_bytes(times[1], "big")

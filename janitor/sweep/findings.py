"""The findings of a pass, and the results of executors, as values.

A finding is a batch of rows, so that no object is created for each row. A step yields findings, an executor
(:mod:`janitor.sweep.executor`) carries them out, and an outcome (:mod:`janitor.sweep.outcome`) counts the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from janitor.report import DataTable
from janitor.rules.policy import Hold, Reason, Rule
from janitor.state.base import LedgerEntry
from janitor.sweep.run import TopicWork
from tms_core.errors import ArchiveError, StoreError, WriteRefused
from tms_core.tables.base import KeyRange, KeyReads, MessageReads, Origin, TxCell
from tms_core.tables.side import Expiry
from tms_core.topic import TopicId


class Batch(NamedTuple):
    """Rows of one topic, generation and table with the same verdict, in key order.

    Attributes:
        origin: the knowledge of the store about these rows, which speeds up their change.
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
        size_bytes: exact bytes of keys plus the store's estimate of the bytes of values.
        hold: the hold that keeps the rows for now; None: delete them.
        label: the hold in the report.
        expiries: the expiries of messages whose own TTLs have expired; empty for other rows.
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
    """Message rows of one topic and generation with invalid pointers to negate.

    Attributes:
        work: the topic in this pass; None if it has no readable metadata.
        label: the hold in the report.
    """

    topic: TopicId
    generation: int
    work: TopicWork | None
    table: MessageReads
    cells: Sequence[TxCell]
    label: Hold | None


@dataclass(frozen=True, slots=True)
class RemainingRows:
    """Rows that stay.

    Attributes:
        keys: unrecognized keys, for the report.
        prefix: the prefix of a topic without readable metadata, for the report.
    """

    reason: Reason
    rows: int
    table: DataTable = "message"
    keys: Sequence[bytes] = ()
    prefix: bytes | None = None


@dataclass(frozen=True, slots=True)
class RemainingPointer:
    """An invalid write pointer that is not negated, so the boundary must stay below it."""

    pointer: int


@dataclass(frozen=True, slots=True)
class ExpiredMessages:
    """Messages with their own TTLs whose expiries can be deleted: a range deletes the rows, or they do not exist."""

    expiries: Sequence[Expiry]


@dataclass(frozen=True, slots=True)
class Read:
    """A page of rows that was read; 0 rows for a seek."""

    phase: str
    topic: TopicId | None
    rows: int


@dataclass(frozen=True, slots=True)
class FailedTopic:
    """A topic that is left undone.

    Attributes:
        reason: ``store`` or ``moved``.
        refused: whether the store rejects all writes, so that the failure does not count for the topic (invariant S9).
    """

    prefix: bytes
    table: DataTable
    reason: str
    message: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Rows between known topics that could not be read."""

    message: str


@dataclass(frozen=True, slots=True)
class ReachedKey:
    """The key up to which a step has processed all rows, except in topics that were left undone."""

    key: bytes


Finding = (
    Due | Invalid | RemainingRows | RemainingPointer | ExpiredMessages | Read | FailedTopic | Unreadable | ReachedKey
)


class Done(NamedTuple):
    """The result of an executor for a finding.

    Attributes:
        keys: the keys of deleted rows.
        cells: the rows with negated pointers.
        entry: the announcement of these changes; None if nothing is recorded, as in a plan.
        found: the range with due rows, from an executor that only reads.
        stop: the reason to skip the rest of the topic: ``moved``: its metadata differs from the plan (invariant S2);
            ``withheld``: nothing may be deleted in it now; ``unsure``: the store failed during the batch, so it is
            unknown which rows are deleted.
        error: the error of the archive or of the store.
    """

    keys: Sequence[bytes] = ()
    cells: Sequence[TxCell] = ()
    entry: LedgerEntry | None = None
    found: KeyRange | None = None
    stop: Literal["moved", "withheld", "unsure"] | None = None
    error: ArchiveError | StoreError | None = None


NOTHING_DONE = Done()
MOVED, WITHHELD = Done(stop="moved"), Done(stop="withheld")


class DeletionCount(NamedTuple):
    """The number of rows that one rule deleted or inverted; metrics ignore ``size_bytes`` of inversions."""

    table: DataTable
    rule: Rule
    rows: int
    size_bytes: int


def unrecognized(table: DataTable, keys: Sequence[bytes]) -> RemainingRows:
    """Return a finding of unrecognized keys (L0)."""
    return RemainingRows(Reason.UNRECOGNIZED, len(keys), table, keys)


def failed(table: DataTable, prefix: bytes, error: StoreError) -> FailedTopic:
    """Return the failure of a topic, which this step and later steps then skip."""
    refused = isinstance(error, WriteRefused)
    return FailedTopic(prefix, table, "store", f"topic {prefix[:-1].decode()}: {error}", refused)


def times_of(batch: Batch) -> tuple[int, int]:
    """Return the times of the oldest and the newest row; message rows are sorted by time."""
    if batch.table == "message":
        times = (batch.keys[0][-10:-2], batch.keys[-1][-10:-2])
    else:
        written = [key[-10:-2] for key in batch.keys]
        times = (min(written), max(written))
    return int.from_bytes(times[0], "big"), int.from_bytes(times[1], "big")

"""The findings of a pass, and the results of executors, as values.

A finding is a batch of rows, never one row, so no object is created for each row. A step yields findings, gives them to
an executor (:mod:`janitor.sweep.executor`), and counts them with the executor's result in an outcome
(:mod:`janitor.sweep.outcome`).
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
    """Rows of one topic, generation and table with the same result, in key order.

    Attributes:
        origin: the rows as the store returned them.
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
        size_bytes: exact bytes of keys, and the store's estimate of the bytes of values.
        hold: the reason why they stay for now; None: they are deleted.
        label: the hold in the report.
        expiries: the expiries of messages whose own TTLs have passed; empty for others.
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
    """Message rows of one topic and generation whose invalid pointers are to be negated.

    Attributes:
        work: the topic in this pass; None: it has no readable metadata.
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
    """An invalid write pointer that is not negated, so no boundary may pass it."""

    pointer: int


@dataclass(frozen=True, slots=True)
class ExpiredMessages:
    """Messages with TTLs of their own whose rows are deleted by a range."""

    expiries: Sequence[Expiry]


@dataclass(frozen=True, slots=True)
class Read:
    """A page that was read; with 0 rows, a jump to another key."""

    phase: str
    topic: TopicId | None
    rows: int


@dataclass(frozen=True, slots=True)
class FailedTopic:
    """A topic that is left undone.

    Attributes:
        reason: ``store`` or ``moved``.
        refused: whether the store refused to write, as it refuses all; the topic is not to blame (invariant S9).
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
    """All rows before this key are done, except in topics that were left undone."""

    key: bytes


Finding = (
    Due | Invalid | RemainingRows | RemainingPointer | ExpiredMessages | Read | FailedTopic | Unreadable | ReachedKey
)


class Done(NamedTuple):
    """The result of an executor for a finding.

    Attributes:
        keys: the deleted rows.
        cells: the rows with negated pointers.
        entry: the announcement of these changes; None: nothing is recorded, as in a plan.
        found: the range with work, from an executor that only reads.
        stop: the reason to leave the rest of the topic: ``moved``: its metadata differs from the plan (invariant S2);
            ``withheld``: nothing may be deleted in it now; ``unsure``: the store failed during the batch, so the
            deleted rows are not known.
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
    """Deletions by one rule; metrics do not count ``size_bytes`` of inversions."""

    table: DataTable
    rule: Rule
    rows: int
    size_bytes: int


def unrecognized(table: DataTable, keys: Sequence[bytes]) -> RemainingRows:
    """Return a finding of unrecognized keys (L0)."""
    return RemainingRows(Reason.UNRECOGNIZED, len(keys), table, keys)


def failed(table: DataTable, prefix: bytes, error: StoreError) -> FailedTopic:
    """Return the failure of a topic, which is then left undone in this step and the next ones."""
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

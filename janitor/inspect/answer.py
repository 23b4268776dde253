"""The answer to ``janitor why``, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from janitor.inspect.fate import Fate
from janitor.report import DataTable
from janitor.state.base import LedgerEntry
from janitor.state.records import row_of
from janitor.state.values import Pointer, pack
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId


@dataclass(frozen=True, slots=True)
class Trace(LedgerEntry):
    """A ledger entry whose range contains a row.

    Attributes:
        certain: whether the run has certainly deleted the row, if it existed; False: possibly.
    """

    certain: bool

    @classmethod
    def of(cls, entry: LedgerEntry, *, certain: bool) -> Trace:
        return cls(*(*row_of(entry), certain))


@dataclass(frozen=True, slots=True)
class FoundRow:
    """A row in the store.

    Attributes:
        time_ms: the time from which its TTL counts: publish time, or the payload's write time.
        pointer: the stored write pointer; None outside transactions.
        transaction: the state of its transaction, as in ``janitor inspect``; empty outside transactions;
            ``unreadable`` if the value cannot be read.
        refers: whether a message takes its payload from the payload table.
        inverted: the runs that may have negated its pointer.
        unprocessed: the condition of rule L7 that a message of a topic with ``retention: consumed`` does not meet.
    """

    table: DataTable
    key: bytes
    generation: int
    time_ms: int
    pointer: Pointer | None
    transaction: str
    refers: bool
    fate: Fate
    inverted: tuple[Trace, ...] = ()
    unprocessed: str = ""

    def to_json(self) -> dict[str, Any]:
        document = pack(self)
        fate = document.pop("fate")
        return {
            **document,
            **fate,
            "transaction": self.transaction or None,
        }


@dataclass(frozen=True, slots=True)
class MissingRow:
    """A row that is not in the store.

    Attributes:
        key: its key; None for a message row, whose generation is unknown.
        taken: the runs that have deleted it, or may have deleted it, newest first.
    """

    table: DataTable
    key: bytes | None
    taken: tuple[Trace, ...]


@dataclass(frozen=True, slots=True)
class LedgerReach:
    """The period for which the ledger is complete.

    Attributes:
        created_ms: the creation of this state; None if not recorded.
        complete_since_ms: the time since which the ledger has every deletion of this janitor; None if unknown.
        history_days: how long entries are kept.
    """

    created_ms: int | None
    complete_since_ms: int | None
    history_days: int


@dataclass(frozen=True, slots=True)
class Why:
    """The reason why a message exists, or the run that deleted it.

    Attributes:
        generation, ttl_seconds: the topic's metadata; None without readable metadata.
        problem: the parse error of the metadata; empty without an error or without a metadata row.
        found: existing rows, each message row before its payload row.
        missing: missing rows.
        resume: the patterns that pause the topic.
        consumed: whether rows are deleted once all consumers have processed them (rule L7).
    """

    topic: TopicId
    message_id: MessageId
    now_ms: int
    generation: int | None
    ttl_seconds: int | None
    problem: str
    found: tuple[FoundRow, ...]
    missing: tuple[MissingRow, ...]
    ledger_reach: LedgerReach
    resume: tuple[str, ...] = ()
    consumed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON values; keys and ids are in hex, write pointers are decimal strings."""
        return {
            **pack(self),
            "message_id": str(self.message_id),
            "publish_ms": self.message_id.publish_ms,
            "sequence": self.message_id.sequence,
            "problem": self.problem or None,
            "found": [found.to_json() for found in self.found],
        }

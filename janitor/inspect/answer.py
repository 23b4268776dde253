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
    """A ledger entry about a row.

    Attributes:
        certain: whether the run deleted the row if it existed; otherwise it may have.
    """

    certain: bool

    @classmethod
    def of(cls, entry: LedgerEntry, *, certain: bool) -> Trace:
        return cls(*(*row_of(entry), certain))


@dataclass(frozen=True, slots=True)
class FoundRow:
    """A row in the store.

    Attributes:
        time_ms: the start of its age: publish time, or the payload's write time.
        pointer: the stored write pointer; None: outside transactions.
        transaction: its state, as ``janitor inspect`` names it; empty: outside transactions; ``unreadable``: the value
            cannot be read.
        refers: whether a message takes its payload from the payload table.
        inverted: runs that may have negated its pointer.
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
        key: its key; None: a message row, whose generation is unknown.
        taken: the runs that deleted it, or may have deleted it, newest first.
    """

    table: DataTable
    key: bytes | None
    taken: tuple[Trace, ...]


@dataclass(frozen=True, slots=True)
class LedgerReach:
    """The reliable extent of the ledger.

    Attributes:
        created_ms: when this state started; None: not recorded.
        complete_since_ms: the time since which the ledger has every deletion of this janitor; None: not known.
        history_days: how long entries are kept.
    """

    created_ms: int | None
    complete_since_ms: int | None
    history_days: int


@dataclass(frozen=True, slots=True)
class Why:
    """The reason why a message exists, or the run that deleted it.

    Attributes:
        generation, ttl_seconds: the topic's metadata; None: there is no readable metadata.
        problem: the reason why it cannot be read; empty if it can, or if there is no row.
        found: existing rows, each message row before its payload row.
        missing: missing rows.
        resume: the patterns that pause the topic, to be resumed.
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

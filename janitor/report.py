"""The report: the result of a plan or a run as one frozen value; and the interface for progress.

The report is the only source of numbers: the printed table, the JSON, the saved history and the metrics all use it
(invariant S15). It derives from the outcome of a pass (:mod:`janitor.sweep.outcome`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from janitor.rules.policy import Hold, Reason, Rule
from janitor.state.figures import GuardNote, KeptFigures
from janitor.state.records import NO_SIZES, NOT_COUNTED, MessagesLeft, Mode, Note, RunRecord, StoreBytes
from janitor.state.values import Pointer
from tms_core.topic import TopicId

DataTable = Literal["message", "payload"]
#: The type of row keys, for a class in which ``bytes`` is a field.
Key = bytes

#: Called after each page with the phase, the topic, and the number of rows.
Observer = Callable[[str, TopicId | None, int], None]
#: The phase of the call before the first page, with the estimated number of rows that the messages' step will read.
EXPECTED = "expected"
#: The phase to which this estimate applies.
MEASURED = "message"

#: The maximum number of sample keys of an entry.
SAMPLE_KEYS = 3

#: The maximum number of saved entries of a report; a report of a thousand topics every minute would fill the disk.
HISTORY_ENTRIES = 100

#: The maximum number of unrecognized keys, and of unknown topics, that the log names for a pass.
NAMED_KEYS = 20

#: The reasons with counts; a pass does not read all live rows, so their number is unknown.
COUNTED_REASONS = (
    Reason.UNKNOWN_TOPIC,
    Reason.NEWER_GENERATION,
    Reason.UNRECOGNIZED,
    Reason.UNDECIDED,
    Reason.REFERENCED,
    Reason.HELD,
)


def ignore_progress(phase: str, topic: TopicId | None, rows: int) -> None:
    """Do nothing; the observer of runs without a progress display."""


class EntryKey(NamedTuple):
    """The subject of an entry of the report, and its first fields."""

    topic: TopicId
    generation: int
    table: DataTable
    rule: Rule
    held: Hold | None


@dataclass(slots=True)
class Entry:
    """Rows of one topic, generation and table under one rule.

    Attributes:
        bytes: exact bytes of keys, and the store's estimate of the bytes of values.
        oldest_ms: the time of the oldest row; None without rows.
        held: the hold that keeps the rows; None if a run deletes or inverts them.
        sample_keys: keys in hex.
    """

    topic: TopicId
    generation: int
    table: DataTable
    rule: Rule
    held: Hold | None
    rows: int = 0
    bytes: int = 0
    oldest_ms: int | None = None
    newest_ms: int | None = None
    sample_keys: list[str] = field(default_factory=list)

    def add(self, keys: Sequence[Key], size_bytes: int, oldest_ms: int, newest_ms: int) -> None:
        samples = [key.hex() for key in keys[: SAMPLE_KEYS - len(self.sample_keys)]]
        self._add(len(keys), size_bytes, oldest_ms, newest_ms, samples)

    def merge(self, other: Entry) -> None:
        """Add the rows of another part of the store."""
        if other.oldest_ms is not None and other.newest_ms is not None:
            samples = other.sample_keys[: SAMPLE_KEYS - len(self.sample_keys)]
            self._add(other.rows, other.bytes, other.oldest_ms, other.newest_ms, samples)

    def _add(self, rows: int, size_bytes: int, oldest_ms: int, newest_ms: int, samples: list[str]) -> None:
        self.rows += rows
        self.bytes += size_bytes
        self.oldest_ms = oldest_ms if self.oldest_ms is None else min(self.oldest_ms, oldest_ms)
        self.newest_ms = newest_ms if self.newest_ms is None else max(self.newest_ms, newest_ms)
        self.sample_keys += samples

    def counts_as_done(self, mode: Mode) -> bool:
        """Return whether the rows are in the totals; ``apply --adopt`` also deletes first-contact rows of a plan."""
        return self.held is None or (mode == "plan" and self.held is Hold.FIRST_CONTACT)


#: Due rows that the last run did not delete, or that a run would delete.
HELD: KeptFigures[list[Entry]] = KeptFigures(Note.OVERDUE, list[Entry], [])


class UnrecognizedKey(NamedTuple):
    """An unrecognized key in hex, and its table."""

    table: str
    key: str


@dataclass(frozen=True, slots=True)
class SnapshotUsed:
    """The transaction snapshot that a run used."""

    timestamp_ms: int
    source: str


@dataclass(frozen=True, slots=True)
class Totals:
    """The number of deleted or inverted rows by rule, and of kept rows by reason."""

    expired: int
    old_generation: int
    processed: int
    invalid_transaction: int
    kept: Mapping[str, int]

    @classmethod
    def of(cls, mode: Mode, entries: Iterable[Entry], kept: Mapping[Reason, int]) -> Totals:
        """Return the totals of a pass."""
        done, held_rows = Counter[Rule](), 0
        for entry in entries:
            if entry.counts_as_done(mode):
                done[entry.rule] += entry.rows
            else:
                held_rows += entry.rows
        kept = {**kept, Reason.HELD: held_rows}
        return cls(
            done[Rule.EXPIRED],
            done[Rule.OLD_GENERATION],
            done[Rule.PROCESSED],
            done[Rule.INVALID_TRANSACTION],
            {str(reason): kept.get(reason, 0) for reason in COUNTED_REASONS},
        )


@dataclass(frozen=True, slots=True)
class HeldBefore:
    """Held rows that an earlier run counted and this run did not: their number, and the largest entries."""

    rows: int
    topics: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a plan or a run, printed and stored; see ``docs/reference/formats/reports.md``.

    Attributes:
        topics: entries with rows, by topic, table, generation and rule.
        deleted_bytes: exact for keys, estimated by the store for values. Inversions free none.
        topics_omitted: the number of entries that the history does not keep.
    """

    id: str
    mode: Mode
    started_ms: int
    effective_now_ms: int
    snapshot: SnapshotUsed | None
    topics: Sequence[Entry]
    totals: Totals
    deleted_bytes: int
    boundary: Pointer | None
    guards: Sequence[GuardNote]
    errors: Sequence[str]
    store_calls: int
    duration_seconds: float
    phase_seconds: Mapping[str, float]
    full: bool
    seeks_spared: int = 0
    truncated: int = 0
    store_bytes: StoreBytes = NO_SIZES
    messages: MessagesLeft = NOT_COUNTED
    topics_omitted: int = 0
    held_before: HeldBefore | None = None

    @property
    def tripped(self) -> bool:
        return any(note.tripped for note in self.guards)

    def total(self, rule: Rule) -> int:
        """Return the rows that were deleted or inverted by a rule, or would be."""
        rows: int = getattr(self.totals, rule)
        return rows

    def held_rows(self) -> int:
        return self.totals.kept[Reason.HELD]

    def held_topics(self) -> dict[TopicId, Hold]:
        return {entry.topic: entry.held for entry in self.topics if entry.held is not None}

    def to_history(self, run: RunRecord, held_before: Sequence[Entry]) -> tuple[RunRecord, Report]:
        """Return the run with its numbers, and the report for the history, limited to the largest entries.

        Args:
            held_before: held rows that an earlier run counted and this run did not.
        """
        held_entries = [entry for entry in held_before if entry.held]
        rows = sum(entry.rows for entry in held_entries)
        numbers: dict[str, Any] = {str(rule): self.total(rule) for rule in Rule}
        run = replace(
            run,
            **numbers,
            held=self.held_rows() + rows,
            duration_seconds=self.duration_seconds,
            phase_seconds=self.phase_seconds,
            full=self.full,
            errors=tuple(self.errors),
            blocked_by=tuple(note.guard for note in self.guards if note.tripped),
            deleted_bytes=self.deleted_bytes,
            store_bytes=self.store_bytes,
            messages=self.messages,
        )
        report = replace(
            self,
            topics=largest(self.topics, HISTORY_ENTRIES),
            topics_omitted=max(0, len(self.topics) - HISTORY_ENTRIES),
            held_before=HeldBefore(rows, largest(held_entries, HISTORY_ENTRIES)) if held_entries else None,
        )
        return run, report


def sort_entries(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries with rows, by topic, table, generation and rule."""
    filled = (entry for entry in entries if entry.rows)
    return sorted(filled, key=lambda e: (str(e.topic), e.table, e.generation, e.rule, e.held or ""))


def largest(entries: Sequence[Entry], limit: int) -> list[Entry]:
    """Return the entries with the most rows, in order."""
    return sort_entries(nlargest(limit, entries, key=attrgetter("rows")))


def deleted_bytes(mode: Mode, entries: Iterable[Entry]) -> int:
    """Return the bytes of the rows that a run has deleted, or would delete."""
    return sum(
        entry.bytes for entry in entries if entry.rule is not Rule.INVALID_TRANSACTION and entry.counts_as_done(mode)
    )

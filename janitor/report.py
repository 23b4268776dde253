"""The result of a plan or a run, as one frozen value; and its progress for observers.

The report is the only source of numbers: the printed table, the JSON, the saved history and the metrics all use it
(invariant S15). It is made from a pass's outcome (:mod:`janitor.sweep.outcome`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from janitor.rules.policy import Hold, Reason, Rule
from janitor.state.figures import GuardNote, HeldRows
from janitor.state.records import NO_SIZES, NOT_COUNTED, MessagesLeft, Mode, RunRecord, StoreBytes
from janitor.state.values import pack
from tms_core.topic import TopicId

DataTable = Literal["message", "payload"]

#: Told after every page: the phase, the topic, and how many rows the page had.
Observer = Callable[[str, TopicId | None, int], None]
#: Told before the first page, in the place of a phase: about how many rows the step of the messages will read, as far
#: as topics have been counted.
EXPECTED = "expected"
#: The phase that is expected to read so many.
MEASURED = "message"

#: How many keys of an entry are shown.
SAMPLE_KEYS = 3

#: How many entries of a report are remembered; a report of a thousand topics every minute would fill the disk.
HISTORY_ENTRIES = 100

#: How many unrecognized keys, and how many unknown topics, of a pass are named in the log.
NAMED_KEYS = 20

#: Reasons that are counted; live rows are not visited, so there is no count of them.
COUNTED_REASONS = (
    Reason.UNKNOWN_TOPIC,
    Reason.NEWER_GENERATION,
    Reason.UNRECOGNIZED,
    Reason.UNDECIDED,
    Reason.REFERENCED,
    Reason.HELD,
)


def ignore_progress(phase: str, topic: TopicId | None, rows: int) -> None:
    """Do nothing: the observer of runs whose progress is not shown."""


@dataclass(frozen=True, slots=True)
class EntryKey:
    """The subject of an entry of the report."""

    topic: TopicId
    generation: int
    table: DataTable
    rule: Rule
    held: Hold | None


@dataclass(slots=True)
class Entry:
    """Rows of one topic, generation and table under one rule.

    Attributes:
        size_bytes: exact bytes of keys, and the store's estimate of the bytes of values.
        oldest_ms: the row time of the oldest row; None if it does not exist.
    """

    rows: int = 0
    size_bytes: int = 0
    oldest_ms: int | None = None
    newest_ms: int | None = None
    sample_keys: list[bytes] = field(default_factory=list)

    def add(self, keys: Sequence[bytes], size_bytes: int, oldest_ms: int, newest_ms: int) -> None:
        self.rows += len(keys)
        self.size_bytes += size_bytes
        self.oldest_ms = oldest_ms if self.oldest_ms is None else min(self.oldest_ms, oldest_ms)
        self.newest_ms = newest_ms if self.newest_ms is None else max(self.newest_ms, newest_ms)
        self.sample_keys += keys[: SAMPLE_KEYS - len(self.sample_keys)]

    def merge(self, other: Entry) -> None:
        """Add the rows of another part of the store."""
        if other.oldest_ms is not None and other.newest_ms is not None:
            self.add(other.sample_keys, other.size_bytes, other.oldest_ms, other.newest_ms)
            self.rows += other.rows - len(other.sample_keys)


class UnrecognizedKey(NamedTuple):
    """An unrecognized key in hex, and its table."""

    table: str
    key: str


@dataclass(frozen=True, slots=True)
class SnapshotUsed:
    """The transaction snapshot a run judged by."""

    timestamp_ms: int
    source: str


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a plan or a run; see ``docs/reference/formats/reports.md``."""

    id: str
    mode: Mode
    started_ms: int
    effective_now_ms: int
    snapshot: SnapshotUsed | None
    entries: Mapping[EntryKey, Entry]
    kept: Mapping[Reason, int]
    boundary: int | None
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

    @property
    def tripped(self) -> bool:
        return any(note.tripped for note in self.guards)

    def counts_as_done(self, held: Hold | None) -> bool:
        """Return whether rows under this hold are in the totals (:func:`counts_as_done`)."""
        return counts_as_done(self.mode, held)

    def total(self, rule: Rule) -> int:
        return sum(
            entry.rows for key, entry in self.entries.items() if key.rule is rule and self.counts_as_done(key.held)
        )

    def deleted_bytes(self) -> int:
        """Return the bytes of the deleted rows: exact for keys, estimated by the store for values. Inversions free
        none.
        """
        return sum(
            entry.size_bytes
            for key, entry in self.entries.items()
            if key.rule is not Rule.INVALID_TRANSACTION and self.counts_as_done(key.held)
        )

    def held_rows(self) -> int:
        return sum(entry.rows for key, entry in self.entries.items() if not self.counts_as_done(key.held))

    def kept_rows(self) -> dict[str, int]:
        """Return rows that stayed, by reason."""
        kept = {**self.kept, Reason.HELD: self.held_rows()}
        return {str(reason): kept.get(reason, 0) for reason in COUNTED_REASONS}

    def held_topics(self) -> dict[TopicId, Hold]:
        return {key.topic: key.held for key in self.entries if key.held is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values; 64-bit ids are decimal strings."""
        return {
            "id": self.id,
            "mode": self.mode,
            "started_ms": self.started_ms,
            "effective_now_ms": self.effective_now_ms,
            "snapshot": pack(self.snapshot),
            "topics": [_entry_json(key, entry) for key, entry in self.sorted_entries()],
            "totals": {**{str(rule): self.total(rule) for rule in Rule}, "kept": self.kept_rows()},
            "deleted_bytes": self.deleted_bytes(),
            "store_bytes": pack(self.store_bytes),
            "messages": pack(self.messages),
            "boundary": None if self.boundary is None else str(self.boundary),
            "guards": pack(self.guards),
            "errors": list(self.errors),
            "store_calls": self.store_calls,
            "seeks_spared": self.seeks_spared,
            "duration_seconds": round(self.duration_seconds, 6),
            "phase_seconds": {name: round(seconds, 6) for name, seconds in self.phase_seconds.items()},
            "full": self.full,
            "truncated": self.truncated,
        }

    def to_history(self, run: RunRecord, held_before: Sequence[HeldRows]) -> tuple[RunRecord, dict[str, Any]]:
        """Return the run with its numbers, and the report as JSON values for the history.

        If there are very many entries, the report has those with the most rows and the number of others.

        Args:
            held_before: held rows that an earlier run counted, and this run did not count again.
        """
        report = self.to_json()
        topics = sorted(report["topics"], key=lambda entry: entry["rows"], reverse=True)
        if len(topics) > HISTORY_ENTRIES:
            report["topics"] = topics[:HISTORY_ENTRIES]
            report["topics_omitted"] = len(topics) - HISTORY_ENTRIES
        held = sorted((item for item in held_before if item.held), key=lambda item: item.rows, reverse=True)
        rows = sum(item.rows for item in held)
        if held:
            report["held_before"] = {"rows": rows, "topics": pack(held[:HISTORY_ENTRIES])}
        numbers: dict[str, Any] = {str(rule): self.total(rule) for rule in Rule}
        run = replace(
            run,
            **numbers,
            held=self.held_rows() + rows,
            duration_seconds=report["duration_seconds"],
            phase_seconds=report["phase_seconds"],
            full=self.full,
            errors=tuple(self.errors),
            blocked_by=tuple(note.guard for note in self.guards if note.tripped),
            deleted_bytes=self.deleted_bytes(),
            store_bytes=self.store_bytes,
            messages=self.messages,
        )
        return run, report

    def sorted_entries(self) -> list[tuple[EntryKey, Entry]]:
        """Return the entries with rows, by topic, table, generation and rule."""
        filled = [(key, entry) for key, entry in self.entries.items() if entry.rows]
        return sorted(filled, key=lambda item: _order(item[0]))


def counts_as_done(mode: Mode, held: Hold | None) -> bool:
    """Return whether rows under this hold are in the totals: ``apply --adopt`` deletes a plan's first contact."""
    return held is None or (mode == "plan" and held is Hold.FIRST_CONTACT)


def _order(key: EntryKey) -> tuple[str, str, int, str, str]:
    return (str(key.topic), key.table, key.generation, key.rule, key.held or "")


def _entry_json(key: EntryKey, entry: Entry) -> dict[str, Any]:
    return {
        "tms_namespace": key.topic.namespace,
        "topic": key.topic.topic,
        "generation": key.generation,
        "table": key.table,
        "rule": str(key.rule),
        "rows": entry.rows,
        "bytes": entry.size_bytes,
        "bytes_exact": False,
        "oldest_ms": entry.oldest_ms,
        "newest_ms": entry.newest_ms,
        "sample_keys": [sample.hex() for sample in entry.sample_keys],
        "held": key.held and str(key.held),
    }

"""The changes of a pass: announced before they are made, and counted afterwards.

An *outcome* is the result of a pass: a value that can be merged and serialized, and the only place that counts
(invariant S15). Report, ledger, metrics and the evidence for a boundary derive from it alone. Each part of a store,
each thread and each Spark task fills its own outcome; they are merged afterwards.

An *announcement* is a ledger entry without a number of rows. It is written before the first row in its range changes
(``State.intend``), so the ledger has the ranges of a run that dies. The entries of the outcome replace the
announcements when the run is closed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import cast

from janitor.report import NAMED_KEYS, Entry, EntryKey, UnrecognizedKey
from janitor.rules.policy import Reason, Rule
from janitor.state.base import LedgerEntry, State
from janitor.state.figures import GuardNote
from janitor.sweep.findings import (
    NOTHING_DONE,
    DeletionCount,
    Done,
    Due,
    ExpiredMessages,
    FailedTopic,
    Finding,
    Invalid,
    Read,
    RemainingPointer,
    RemainingRows,
    Unreadable,
    failed,
    times_of,
)
from tms_core.clock import Clock
from tms_core.errors import Interrupted, StoreError
from tms_core.rowkey import LONG_MAX, generation_prefix, position_prefix, stop_key, time_prefix
from tms_core.tables.base import KeyRange
from tms_core.tables.compaction import DeletedRanges
from tms_core.tables.side import Expiry
from tms_core.topic import TopicId

#: The subject of a ledger entry: topic, generation, table and rule; then the policy of the deletion.
Subject = tuple[TopicId, int, str, str, int, int, int]


@dataclass(slots=True)
class Outcome:
    """The findings and changes of a pass.

    Attributes:
        kept: the number of kept rows, by reason.
        unrecognized: the first unrecognized keys, for the report.
        unknown: the first topics with rows but without readable metadata.
        pointers: the negated write pointers, by topic.
        untouchable: the lowest invalid write pointer that was not negated: of a row with an unrecognized key, or of a
            row that came due after the messages' step.
        scanned: the number of read rows, by phase.
        failures: how often a topic was left undone, by table and reason.
        seeks_spared: the number of store calls that read-ahead has saved.
        early: the first and the last message that its own TTL deletes (L6), by topic and generation.
        failed: topics that were left undone, by metadata key.
        withheld: metadata keys of topics whose deletions were stopped halfway.
        moved: metadata keys of changed topics that the driver must plan again.
        expired: expiries to delete once the deletions of their messages are durable.
        found: the ranges with due rows, from an executor that only reads.
        deletions: deletions for the ledger.
        unsure: deletions with an unknown number of rows: the store failed, or a task was lost.
        archive_error: the error of the archive that stopped all deletions.
        truncated: the number of transactions removed from the invalid list.
        calls: store calls by name, of a task or of a finished pass; not merged.
        ended: the error that interrupted the pass: ``Interrupted``, an error of the store as a whole, or a bug; a task
            does not send it.
    """

    entries: dict[EntryKey, Entry] = field(default_factory=dict)
    kept: Counter[Reason] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    unrecognized: list[UnrecognizedKey] = field(default_factory=list)
    unknown: set[TopicId] = field(default_factory=set)
    pointers: dict[TopicId, set[int]] = field(default_factory=dict)
    untouchable: int | None = None
    scanned: Counter[str] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    seeks_spared: int = 0
    early: dict[tuple[TopicId, int], tuple[bytes, bytes]] = field(default_factory=dict)
    failed: dict[bytes, FailedTopic] = field(default_factory=dict)
    withheld: set[bytes] = field(default_factory=set)
    moved: set[bytes] = field(default_factory=set)
    expired: list[Expiry] = field(default_factory=list)
    found: list[KeyRange] = field(default_factory=list)
    deletions: dict[Subject, LedgerEntry] = field(default_factory=dict)
    unsure: list[LedgerEntry] = field(default_factory=list)
    archive_error: str | None = None
    truncated: int = 0
    notes: list[GuardNote] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    ended: Exception | None = None

    # -- counting ------------------------------------------------------------------------------------------------------

    def add(self, finding: Finding, done: Done = NOTHING_DONE) -> DeletionCount | None:
        """Count a finding and the executor's result; return the number of deletions or inversions."""
        if isinstance(finding, Due | Invalid):
            return self._add_done(finding, done)
        match finding:
            case RemainingRows():
                self._add_remaining(finding)
            case Read():
                self.scanned[finding.phase] += finding.rows
            case RemainingPointer():
                self.keep_pointer(finding.pointer)
            case ExpiredMessages():
                self.expired += finding.expiries
            case FailedTopic():
                self._add_failed(finding)
            case Unreadable():
                self.errors.append(finding.message)
        return None

    def keep(self, reason: Reason, rows: int = 1) -> None:
        """Count kept rows, except live rows: a pass does not read all of them, so their number is unknown."""
        if rows and reason is not Reason.LIVE:
            self.kept[reason] += rows

    def keep_pointer(self, pointer: int) -> None:
        """Note an invalid write pointer that was not negated."""
        self.untouchable = pointer if self.untouchable is None else min(self.untouchable, pointer)

    def _add_done(self, finding: Due | Invalid, done: Done) -> DeletionCount | None:
        if done.found is not None:
            self.found.append(done.found)
        if done.stop is not None:
            self._add_stopped(finding, done)
            return None
        return self._add_due(finding, done) if isinstance(finding, Due) else self._add_inverted(finding, done)

    def _add_stopped(self, finding: Due | Invalid, done: Done) -> None:
        """Note why the rest of a topic is skipped."""
        topic = finding.topic if isinstance(finding, Invalid) else finding.work.topic.topic
        if done.stop == "moved":
            self.moved.add(topic.prefix)
        elif done.stop == "withheld":
            self.withheld.add(topic.prefix)
            self.archive_error = None if done.error is None else str(done.error)
        elif isinstance(finding, Due) and isinstance(done.error, StoreError) and done.entry is not None:
            keys = finding.batch.keys
            self.unsure.append(replace(done.entry, start=keys[0], stop=keys[-1] + b"\x00"))
            self._add_failed(failed(finding.batch.table, topic.prefix, done.error))

    def _add_due(self, due: Due, done: Done) -> DeletionCount | None:
        batch, size = due.batch, due.size_bytes
        topic = due.work.topic.topic
        if due.hold is None:
            if not done.keys:
                return None
            if len(done.keys) < len(batch.keys):
                size = size * len(done.keys) // len(batch.keys)
                batch = batch._replace(keys=list(done.keys))
        times = times_of(batch)
        label = EntryKey(topic, batch.generation, batch.table, batch.rule, due.label)
        self._entry(label).add(batch.keys, size, *times)
        if due.expiries:
            self._note_early(topic, batch.generation, batch.keys)
            deleted_keys = set(done.keys)
            self.expired += [expiry for expiry in due.expiries if expiry.key in deleted_keys]
        self._add_deletion(done.entry, batch.keys, times)
        return None if due.hold is not None else DeletionCount(batch.table, batch.rule, len(batch.keys), size)

    def _add_inverted(self, invalid: Invalid, done: Done) -> DeletionCount | None:
        cells = done.cells
        if not cells:
            return None
        topic, generation = invalid.topic, invalid.generation
        keys = [cell.key for cell in cells]
        # Keys with negative times (L0) sort after all others, so the first and last key may not bound the times.
        timed = keys if keys[-1][-10] >= 0x80 else (keys[0], keys[-1])
        times = [int.from_bytes(key[-10:-2], "big", signed=True) for key in timed]
        oldest_ms, newest_ms = min(times), max(times)
        label = EntryKey(topic, generation, "message", Rule.INVALID_TRANSACTION, invalid.label)
        self._entry(label).add(keys, sum(map(len, keys)), oldest_ms, newest_ms)
        self.pointers.setdefault(topic, set()).update(cell.pointer for cell in cells)
        self._add_deletion(done.entry, keys, (oldest_ms, newest_ms))
        return DeletionCount("message", Rule.INVALID_TRANSACTION, len(keys), sum(map(len, keys)))

    def _add_remaining(self, remaining: RemainingRows) -> None:
        self.keep(remaining.reason, remaining.rows)
        remaining_names = max(0, NAMED_KEYS - len(self.unrecognized))
        self.unrecognized += [UnrecognizedKey(remaining.table, key.hex()) for key in remaining.keys[:remaining_names]]
        topic = None if remaining.prefix is None else TopicId.from_prefix(remaining.prefix)
        if topic is not None and len(self.unknown) < NAMED_KEYS:
            self.unknown.add(topic)

    def _add_failed(self, failed: FailedTopic) -> None:
        self.failures[failed.table, failed.reason] += 1
        self._note_failed(failed)
        self.errors.append(failed.message)

    def _note_failed(self, failed: FailedTopic) -> None:
        """Note a topic's failure. Keep an earlier failure by a store that rejects writes, which is never a strike."""
        known = self.failed.get(failed.prefix)
        if known is None or not known.refused:
            self.failed[failed.prefix] = failed

    def _add_deletion(self, entry: LedgerEntry | None, keys: Sequence[bytes], times: tuple[int, int]) -> None:
        if entry is not None:
            start, stop, (oldest_ms, newest_ms) = keys[0], keys[-1] + b"\x00", times
            rows = len(keys)
            self._merge_deletion(
                replace(entry, start=start, stop=stop, rows=rows, oldest_ms=oldest_ms, newest_ms=newest_ms)
            )

    def _merge_deletion(self, entry: LedgerEntry) -> None:
        subject = subject_of(entry)
        known = self.deletions.get(subject)
        self.deletions[subject] = entry if known is None else _merge_entries(known, entry)

    def _entry(self, key: EntryKey) -> Entry:
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = Entry(*key)
        return entry

    def _note_early(self, topic: TopicId, generation: int, keys: Sequence[bytes]) -> None:
        bounds = [*self.early.get((topic, generation), ()), *keys]
        self.early[topic, generation] = (min(bounds), max(bounds))

    def compact(self, deleted: DeletedRanges, heartbeat: Callable[[], None]) -> None:
        """Compact the ranges in which rows were deleted; note an error, which only delays the release of disk space."""
        try:
            deleted.compact(heartbeat)
        except Interrupted as error:
            self.ended = error
        except StoreError as error:
            self.errors.append(
                f"the rows are deleted, but the compaction failed, so their disk space is not free yet: {error}"
            )

    @property
    def undone(self) -> bool:
        """Return whether something was left undone, so that the pass is not evidence."""
        return bool(self.failed or self.withheld or self.errors or self.moved or self.ended)

    @property
    def interruption(self) -> Interrupted | None:
        """Return the interruption of the pass; None if it was not interrupted, or failed."""
        return self.ended if isinstance(self.ended, Interrupted) else None

    # -- merging -------------------------------------------------------------------------------------------------------

    def merge(self, other: Outcome) -> None:
        """Add the results of another outcome."""
        for label, entry in other.entries.items():
            self._entry(label).merge(entry)
        for name in _SUMMED_FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.unrecognized += other.unrecognized[: max(0, NAMED_KEYS - len(self.unrecognized))]
        self.unknown |= set(sorted(other.unknown)[: max(0, NAMED_KEYS - len(self.unknown))])
        for topic, pointers in other.pointers.items():
            self.pointers.setdefault(topic, set()).update(pointers)
        if other.untouchable is not None:
            self.keep_pointer(other.untouchable)
        for (topic, generation), bounds in other.early.items():
            self._note_early(topic, generation, bounds)
        for failure in other.failed.values():
            self._note_failed(failure)
        self.withheld |= other.withheld
        self.moved |= other.moved
        for deletion in other.deletions.values():
            self._merge_deletion(deletion)
        self.archive_error = self.archive_error or other.archive_error
        self.ended = self.ended or other.ended

    def without_kept_rows(self) -> Outcome:
        """Return the outcome without kept rows, for a topic that is planned again or counted elsewhere."""
        entries = {key: entry for key, entry in self.entries.items() if key.held is None}
        return replace(self, entries=entries, kept=Counter(), unrecognized=[], unknown=set())


#: Fields whose values are added in a merge.
_SUMMED_FIELDS = (
    "truncated",
    "notes",
    "kept",
    "errors",
    "scanned",
    "failures",
    "seeks_spared",
    "expired",
    "found",
    "unsure",
)


# -- the ledger --------------------------------------------------------------------------------------------------------


def subject_of(entry: LedgerEntry) -> Subject:
    """Return the subject of a ledger entry; a run has one entry per subject."""
    policy = entry.metadata_generation, entry.ttl_seconds, entry.cutoff_ms
    return entry.topic, entry.generation, entry.table, entry.rule, *policy


def _merge_entries(one: LedgerEntry, other: LedgerEntry) -> LedgerEntry:
    """Merge two entries with the same subject and known numbers of rows."""
    return replace(
        one,
        at_ms=min(one.at_ms, other.at_ms),
        start=min(one.start, other.start),
        stop=max(one.stop, other.stop),
        rows=cast(int, one.rows) + cast(int, other.rows),
        oldest_ms=min(cast(int, one.oldest_ms), cast(int, other.oldest_ms)),
        newest_ms=max(cast(int, one.newest_ms), cast(int, other.newest_ms)),
    )


def open_announcements(announced: Iterable[LedgerEntry], deletions: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """Return the announcements without a result in the entries."""
    by_subject = defaultdict(list)
    for entry in deletions:
        by_subject[subject_of(entry)[:4]].append(entry)
    return [
        entry
        for entry in announced
        if not any(done.start <= entry.start < done.stop for done in by_subject[subject_of(entry)[:4]])
    ]


class Ledger:
    """The announcements of one run. Threads that sweep different parts of a store may share it."""

    def __init__(self, state: State, clock: Clock, run_id: str, snapshot_timestamp_ms: int | None) -> None:
        self._state = state
        self._clock = clock
        self._run_id = run_id
        self._snapshot_timestamp_ms = snapshot_timestamp_ms
        self._announced: dict[Subject, bytes] = {}
        self._lock = Lock()

    def announce(self, finding: Due | Invalid, first: bytes) -> LedgerEntry:
        """Announce the rows of a finding from a key on, before they change; return the announcement.

        Raises:
            StateError: the announcement could not be saved; nothing may be changed.
        """
        entry = self._announcement(finding, first)
        subject = subject_of(entry)
        with self._lock:
            # Parts of a store are swept concurrently, so a batch may start before the announced range.
            if first < self._announced.get(subject, b"\xff"):
                self._state.intend(entry)
                # Remember it after the write: if the write fails, the next batch announces the range again.
                self._announced[subject] = first
        return entry

    def _announcement(self, finding: Due | Invalid, first: bytes) -> LedgerEntry:
        work = finding.work
        if isinstance(finding, Due):
            topic, (table, generation, rule, *_) = finding.work.topic.topic, finding.batch
        else:
            topic, table, generation, rule = finding.topic, "message", finding.generation, Rule.INVALID_TRANSACTION
        return LedgerEntry(
            run_id=self._run_id,
            at_ms=self._clock.now_ms(),
            topic=topic,
            generation=generation,
            table=table,
            rule=str(rule),
            start=first,
            stop=_range_stop(finding),
            rows=None,
            oldest_ms=None,
            newest_ms=None,
            metadata_generation=work.topic.generation if work else 0,
            ttl_seconds=work.topic.ttl_seconds if work else 0,
            cutoff_ms=work.frontier.cutoff.ms if work else 0,
            snapshot_timestamp_ms=self._snapshot_timestamp_ms,
        )


def _range_stop(finding: Due | Invalid) -> bytes:
    """Return the end of the range in which the rule of a finding may change rows."""
    if isinstance(finding, Invalid):
        return cast(bytes, stop_key(generation_prefix(finding.topic.prefix, finding.generation)))
    batch, frontier, prefix = finding.batch, finding.work.frontier, finding.work.topic.topic.prefix
    if batch.table == "message" and batch.rule is Rule.EXPIRED:
        return time_prefix(prefix, batch.generation, min(frontier.cutoff.ms, LONG_MAX))
    if batch.table == "message" and batch.rule is Rule.PROCESSED:
        return position_prefix(prefix, batch.generation, frontier.processed)
    return generation_prefix(prefix, batch.generation + 1)

"""Records of a running run: its next ranges, and its deletions.

An announcement has one topic, generation, table, rule and policy, and the keys between which rows may be deleted or
inverted. It is written before the first of them is changed (``State.intend``), so the ranges of a run that dies are
known as well. The actual deletions are counted in the run's outcome; the ledger is written from it when the run ends
(:func:`janitor.sweep.outcome.ledger_entries`).

Sums of deletions are saved about once a second. So counters change while a run works, and the deletions of a killed run
are counted when it is recovered. A failure to save them stops no sweep (invariant S15).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple, cast

from janitor.report import DataTable
from janitor.rules.policy import Rule
from janitor.state.base import LedgerEntry, State
from janitor.sweep.findings import Batch, DeletionCount, Invalid
from janitor.sweep.run import TopicWork
from tms_core.clock import Clock
from tms_core.errors import StateError
from tms_core.rowkey import LONG_MAX, generation_prefix, position_prefix, stop_key, time_prefix
from tms_core.topic import TopicId

#: How often deletions are saved, in milliseconds of monotonic time.
BOOK_MS = 1_000

#: Rows and bytes, by table and rule.
Sums = Mapping[tuple[DataTable, Rule], tuple[int, int]]

logger = logging.getLogger(__name__)


class LedgerKey(NamedTuple):
    """The subject of a ledger entry; the last three fields are the policy of the deletion."""

    topic: TopicId
    generation: int
    table: DataTable
    rule: Rule
    metadata_generation: int = 0
    ttl_seconds: int = 0
    cutoff_ms: int = 0

    @classmethod
    def of(cls, work: TopicWork, batch: Batch) -> LedgerKey:
        return cls(work.topic.topic, batch.generation, batch.table, batch.rule, *policy_of(work))

    @classmethod
    def of_invalid(cls, invalid: Invalid) -> LedgerKey:
        """Return the subject of inversions."""
        rule = Rule.INVALID_TRANSACTION
        return cls(invalid.topic, invalid.generation, "message", rule, *policy_of(invalid.work))


@dataclass(frozen=True, slots=True)
class DeletedRows:
    """Deleted rows between two keys.

    Attributes:
        at_ms: the time of the first deletion.
        rows: their number; None: not known, because the store failed during the deletion.
    """

    at_ms: int
    start: bytes
    stop: bytes
    rows: int | None
    oldest_ms: int | None
    newest_ms: int | None

    def __add__(self, other: DeletedRows) -> DeletedRows:
        return DeletedRows(
            min(self.at_ms, other.at_ms),
            min(self.start, other.start),
            max(self.stop, other.stop),
            (self.rows or 0) + (other.rows or 0),
            min((ms for ms in (self.oldest_ms, other.oldest_ms) if ms is not None), default=None),
            max((ms for ms in (self.newest_ms, other.newest_ms) if ms is not None), default=None),
        )


class Ledger:
    """The announcements of one run. Threads that sweep different parts of a store may share it.

    Args:
        state: saves the announcements.
        clock: the clock of their times.
        run_id: the id of the run.
        snapshot_timestamp_ms: the time of the transaction snapshot; None: there is none.
    """

    def __init__(self, state: State, clock: Clock, run_id: str, snapshot_timestamp_ms: int | None) -> None:
        self._state = state
        self._clock = clock
        self._run_id = run_id
        self._snapshot_timestamp_ms = snapshot_timestamp_ms
        self._announced: dict[LedgerKey, bytes] = {}
        self._lock = Lock()

    def announce(self, work: TopicWork, batch: Batch) -> int:
        """Announce a batch before its deletion; return the current time.

        Raises:
            StateError: it could not be saved; nothing may be deleted.
        """
        return self._announce(LedgerKey.of(work, batch), batch.keys[0], _furthest(work, batch))

    def announce_inverting(self, invalid: Invalid) -> int:
        """Announce the negation of pointers, as :meth:`announce`."""
        stop = stop_key(generation_prefix(invalid.topic.prefix, invalid.generation))
        return self._announce(LedgerKey.of_invalid(invalid), invalid.cells[0].key, cast(bytes, stop))

    def _announce(self, key: LedgerKey, first: bytes, stop: bytes) -> int:
        now_ms = self._clock.now_ms()
        with self._lock:
            # Parts of a store are swept side by side, so that a batch may begin before the one that was announced.
            if first < self._announced.get(key, b"\xff"):
                taken = DeletedRows(now_ms, first, stop, None, None, None)
                self._state.intend(ledger_entry(key, taken, self._run_id, self._snapshot_timestamp_ms))
                # Only after it is written: if that fails, the next batch announces the range again.
                self._announced[key] = first
        return now_ms


class LedgerSums:
    """The sums of one run. Threads that sweep different parts of a store may share it.

    Args:
        save: saves the sums; raises ``StateError``.
        clock: the clock of the interval.
    """

    def __init__(self, save: Callable[[Sums], None], clock: Clock) -> None:
        self._save = save
        self._clock = clock
        self._sums: dict[tuple[DataTable, Rule], tuple[int, int]] = {}
        self._saved_ms = clock.monotonic_ms()
        self._failed = False
        self._lock = Lock()

    def add(self, taken: DeletionCount) -> None:
        """Add deletions, and write the sums if that is due."""
        with self._lock:
            rows, size_bytes = self._sums.get((taken.table, taken.rule), (0, 0))
            self._sums[taken.table, taken.rule] = (rows + taken.rows, size_bytes + taken.size_bytes)
            now_ms = self._clock.monotonic_ms()
            if now_ms - self._saved_ms < BOOK_MS:
                return
            self._saved_ms = now_ms
            try:
                self._save(self._sums)
            except StateError as error:
                if not self._failed:
                    logger.warning(
                        "the counters of this run do not change in the metrics until it ends, because they cannot be "
                        "saved: %s",
                        error,
                    )
                self._failed = True


def _furthest(work: TopicWork, batch: Batch) -> bytes:
    """Return the end of the range in which the announced rule may delete rows."""
    prefix = work.topic.topic.prefix
    if batch.table == "message" and batch.rule is Rule.EXPIRED:
        return time_prefix(prefix, batch.generation, min(work.frontier.cutoff.ms, LONG_MAX))
    if batch.table == "message" and batch.rule is Rule.PROCESSED:
        return position_prefix(prefix, batch.generation, work.frontier.processed)
    return generation_prefix(prefix, batch.generation + 1)


def open_announcements(announced: Iterable[LedgerEntry], taken: Iterable[LedgerEntry]) -> list[LedgerEntry]:
    """Return the announcements whose result is in no entry."""
    told = defaultdict(list)
    for entry in taken:
        told[_subject(entry)].append(entry)
    return [
        entry
        for entry in announced
        if not any(of.start <= entry.start < of.stop for of in told.get(_subject(entry), ()))
    ]


def _subject(entry: LedgerEntry) -> tuple[TopicId, int, str, str]:
    return entry.topic, entry.generation, entry.table, entry.rule


def ledger_entry(key: LedgerKey, taken: DeletedRows, run_id: str, snapshot_timestamp_ms: int | None) -> LedgerEntry:
    """Return one entry of the ledger."""
    return LedgerEntry(
        run_id=run_id,
        at_ms=taken.at_ms,
        topic=key.topic,
        generation=key.generation,
        table=key.table,
        rule=str(key.rule),
        start=taken.start,
        stop=taken.stop,
        rows=taken.rows,
        oldest_ms=taken.oldest_ms,
        newest_ms=taken.newest_ms,
        metadata_generation=key.metadata_generation,
        ttl_seconds=key.ttl_seconds,
        cutoff_ms=key.cutoff_ms,
        snapshot_timestamp_ms=snapshot_timestamp_ms,
    )


def policy_of(work: TopicWork | None) -> tuple[int, int, int]:
    """Return generation, TTL and cutoff; zeros for a topic without metadata."""
    return (work.topic.generation, work.topic.ttl_seconds, work.frontier.cutoff.ms) if work else (0, 0, 0)
